"""Workers of a search that are forked from it, instead of started: they need not import the libraries again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Forked:
    """What a search uses of subprocess.Popen. The ids of the processes are lines of the file `pids` in the current folder."""

    def __init__(self, command: list[str], stdout: Any, env: dict[str, str], **_: object) -> None:
        self.returncode: int | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as nothing of Python runs in a process that is started
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        else:
            code = 1
            try:
                os.setsid()
                with Path("pids").open("a") as file:
                    file.write(f"{os.getpid()}\n")
                code = _run(command, stdout, env)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        end = time.monotonic() + (600 if seconds is None else seconds)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a worker", seconds or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _run(command: list[str], stdout: Any, env: dict[str, str]) -> int:
    from tokensieve.search import trial

    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ.update(env)
    for stream in (1, 2):
        os.dup2(stdout.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    try:
        return trial.main(command[command.index("tokensieve.search.trial") + 1 :])
    except SystemExit as end:
        return int(end.code or 0)


def use() -> None:
    """Searches of this process fork their workers, and notice sooner that one is gone."""
    from tokensieve.search import study, workers

    workers.subprocess.Popen = Forked  # type: ignore[attr-defined, assignment, misc]
    study.HEARTBEAT = workers.HEARTBEAT = 1
    workers.PAUSE = 0.05
