"""A thread, such as that of the model, and a queue before it. Work of clients that went away is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
POLL = 0.1  # seconds between looks at whether the client is still there


class BusyError(Exception):
    """The queue is full."""


class GoneAwayError(Exception):
    """The client went away before its work began, or the server ended before it was done."""


class Worker:
    """Runs calls one after another in its own thread.

    Args:
        limit: calls that may wait or run at the same time; one more is a BusyError.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit, self.pending = limit, 0
        self._thread = ThreadPoolExecutor(1)

    async def run(self, call: Callable[[], T], is_gone: Callable[[], Awaitable[bool]]) -> T:
        """The result of the call. is_gone: whether the client went away; then a call that has not begun is dropped."""
        if self.pending >= self.limit:
            raise BusyError
        self.pending += 1
        future = self._thread.submit(call)
        future.add_done_callback(self._count_down(asyncio.get_running_loop()))
        waiting = asyncio.wrap_future(future)
        while not waiting.done():
            try:
                await asyncio.wait([waiting], timeout=POLL)
            except asyncio.CancelledError:  # the server ends, and waits no longer
                raise GoneAwayError from None
            if not waiting.done() and not future.running() and await is_gone() and future.cancel():
                raise GoneAwayError
        return waiting.result()

    def _count_down(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        def one_less() -> None:
            self.pending -= 1

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(one_less)

        return tell

    def close(self) -> None:
        """Drops what waits."""
        self._thread.shutdown(wait=False, cancel_futures=True)
