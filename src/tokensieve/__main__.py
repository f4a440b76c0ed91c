"""`python -m tokensieve` and `torchrun -m tokensieve` run the command `tokensieve`."""

import sys

from tokensieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
