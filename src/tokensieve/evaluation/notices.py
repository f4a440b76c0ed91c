"""TODO docstring."""

from __future__ import annotations

import sys


class WarnOnce:
    """Says a remark on stderr, each one once; process 0 speaks for all."""

    def __init__(self, silent: bool = False) -> None:
        self.said: set[str] = set()
        self.silent = silent

    def __call__(self, remark: str) -> None:
        if remark not in self.said and not self.silent:
            self.said.add(remark)
            print(f"tokensieve: {remark}", file=sys.stderr)
