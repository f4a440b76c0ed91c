"""`python -m tokensieve` and `torchrun -m tokensieve` are the command `tokensieve`."""

import sys

from tokensieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
