"""The command line. Each file of this package declares one command; `main` parses the arguments and runs it.

Nothing heavy is imported before a command runs, so that `--help` prints at once. A new file here is a new command.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from tokensieve.cli.parser import parse
from tokensieve.cli.registry import COMMANDS
from tokensieve.errors import ProcessLostError, UserError, one_line

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "__main__":
        importlib.import_module(f"{__name__}.{_module.name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 an internal error, 2 an error in the input, 130 interrupted, 143 terminated."""
    argv = sys.argv[1:] if argv is None else list(argv)
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that can handle signals
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm) if in_main_thread else None
    try:
        code = dispatch(parse(argv))
        sys.stdout.flush()
    except UserError as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"tokensieve: error: {error}", file=sys.stderr)
        return 2
    except ProcessLostError as error:
        print(f"tokensieve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tokensieve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`tokensieve methods | head`): not our error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in argv:
            raise
        reason = one_line(f"{type(error).__name__}: {error}")
        print(f"tokensieve: unexpected error: {reason} (use --debug for the traceback)", file=sys.stderr)
        return 1
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
    return code


def dispatch(args: argparse.Namespace) -> int:
    """Run the command that was parsed; the exit code."""
    return 0 if args.command is None else COMMANDS[args.command].run(args) or 0


def _exit_on_sigterm(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
