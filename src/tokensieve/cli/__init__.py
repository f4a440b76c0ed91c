"""The command line. Each file of this package declares one command; `main` parses the arguments and runs it.

Nothing heavy is imported before a command runs, so that `--help` prints at once. A new file here is a new command. This file
imports next to nothing, so that signals are handled from the beginning.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from tokensieve.cli.signals import Signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 an internal error, 2 an error in the input, 130 interrupted, 143 terminated.

    Without arguments this process is the command: it takes sys.argv, and its streams and signals are prepared for it.
    """
    from tokensieve.cli.signals import Signals

    if argv is not None:
        with Signals(is_program=False) as signals:
            return _run(list(argv), signals)
    from tokensieve.terminal import streams

    code: int | str | None
    with Signals(is_program=True) as signals:
        try:
            streams.prepare()
            code = _run(sys.argv[1:], signals)
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:  # while the message about the first one was printed
            code = 130
    return streams.finish(code)


def _run(argv: list[str], signals: Signals) -> int:
    from tokensieve.cli.parser import parse
    from tokensieve.errors import ProcessLostError, UserError, one_line
    from tokensieve.installation.packages import missing_package
    from tokensieve.terminal import streams

    try:
        return dispatch(parse(argv))
    except UserError as error:
        if "--debug" in argv:
            import traceback

            traceback.print_exc()
        streams.say(f"tokensieve: error: {error}")
        return 2
    except ProcessLostError as error:
        streams.say(f"tokensieve: error: {error}")
        return 1
    except KeyboardInterrupt:
        streams.say("tokensieve: interrupted")
        return 130
    except Exception as error:
        if isinstance(error, OSError) and streams.are_broken():
            return 0  # and `finish` knows better
        if "--debug" in argv:
            raise
        if isinstance(error, ImportError) and (told := missing_package(error)) is not None:
            streams.say(f"tokensieve: error: {told}")
            return 2
        if signals.caught:  # a library has made this of the exception that the signal raised
            streams.say("tokensieve: interrupted")
            return 128 + signals.caught
        reason = one_line(f"{type(error).__name__}: {error}")
        streams.say(f"tokensieve: unexpected error: {reason} (use --debug for the traceback)")
        return 1


def dispatch(args: argparse.Namespace) -> int:
    """Run the command that was parsed; the exit code.

    With --json, standard output gets the result alone; what the command prints goes to standard error.
    """
    from tokensieve.cli.registry import COMMANDS, Result
    from tokensieve.terminal import progress

    if args.command is None:
        return 0
    command = COMMANDS[args.command]
    printing = contextlib.redirect_stdout(sys.stderr) if args.as_json else contextlib.nullcontext()
    with printing, progress.hidden(args.quiet):
        done = command.run(args)
    result = done if isinstance(done, Result) else Result({"exit_code": done or 0}, done or 0)
    if args.as_json:
        import os

        from tokensieve import distributed, files

        if distributed.from_environment(os.environ).is_main:
            print(files.json_bytes(result.value).decode(), end="")
    return result.code
