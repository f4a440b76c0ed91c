"""`python -m tokensieve.cli` runs the command `tokensieve`, as `python -m clip_benchmark.cli` runs clip_benchmark."""

import sys

from tokensieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
