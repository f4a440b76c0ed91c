"""`python -m tokensieve.train_net --config_file FILE KEY VALUE ...`: `tokensieve train`, as scripts of the field call it."""

from __future__ import annotations

import sys

from tokensieve.train import main

if __name__ == "__main__":
    sys.exit(main())
