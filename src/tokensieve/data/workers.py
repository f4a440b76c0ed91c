"""Processes that read ahead: what they hand over arrives, or is an error; signals are left to the process that reads."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from tokensieve.errors import UserError, one_line


@dataclasses.dataclass(frozen=True)
class NoRoom:
    """Stands in for an item that a worker could not hand over."""

    reason: str


class WorkerLoader(DataLoader[Any]):
    """A DataLoader of items as they are, without batching. convert: what becomes of an item in the worker."""

    def __init__(self, items: Any, convert: Callable[[Any], Any] | None = None, **options: Any) -> None:
        hand_over = HandOver(convert)
        super().__init__(items, batch_size=None, collate_fn=hand_over, worker_init_fn=leave_process_group, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for item in super().__iter__():
            if isinstance(item, NoRoom):
                raise UserError(
                    f"the reading processes have no room in shared memory (/dev/shm): {item.reason}. Give it more room, use a "
                    "smaller batch, or read without other processes (--num_workers 0, in the file of a training workers: 0)."
                )
            yield item


class HandOver:
    """In a worker: moves the tensors of an item to shared memory, where the reading process takes them from.

    torch would do so while the item is sent. If there is no room the item is lost then, and its reader waits for ever.
    """

    def __init__(self, convert: Callable[[Any], Any] | None) -> None:
        self.convert = convert

    def __call__(self, item: Any) -> Any:
        item = item if self.convert is None else self.convert(item)
        if get_worker_info() is not None:
            try:
                _share(item)
            except (RuntimeError, OSError) as error:
                return NoRoom(one_line(error, 200))
        return item


def _share(value: Any) -> None:
    if isinstance(value, Tensor):
        value.share_memory_()
    elif isinstance(value, Mapping):
        for one in value.values():
            _share(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _share(one)
    elif dataclasses.is_dataclass(value):
        _share(vars(value))


def leave_process_group(_worker: int) -> None:
    """Ctrl-C and `timeout` reach the whole process group; only the process that reads handles them, so a worker leaves it.

    It does not ignore SIGTERM: after a crash Python ends its children by it and waits for them.
    """
    if os.name == "posix":
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = _show_unless_lost


def _show_unless_lost(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of an error, but not of a connection to a reading process that has ended: it says so itself."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
