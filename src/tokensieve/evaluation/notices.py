"""Messages on stderr during an evaluation."""

from __future__ import annotations

import sys


class WarnOnce:
    """Prints each message once on stderr. With several processes only process 0 prints."""

    def __init__(self, silent: bool = False) -> None:
        self.printed: set[str] = set()
        self.silent = silent

    def __call__(self, message: str) -> None:
        if message not in self.printed and not self.silent:
            self.printed.add(message)
            print(f"tokensieve: {message}", file=sys.stderr)
