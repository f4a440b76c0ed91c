"""`python -m tokensieve.train CONFIG`: `tokensieve train`, for those who are used to start a Python file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokensieve.cli import main as run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    if argv is not None:
        return run_command(["train", *argv])
    sys.argv.insert(1, "train")
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
