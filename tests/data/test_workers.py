"""What reading processes hand over arrives, or is an error; nothing waits for ever."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tokensieve.data.workers import WorkerLoader
from tokensieve.errors import UserError


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


@dataclass
class Item:
    tensors: dict[str, Any]
    pair: Pair


def item(number: int) -> Item:
    inner = {"a": torch.full((1000,), float(number)), "b": [torch.tensor(number), (torch.empty(0), "text", None)]}
    return Item(inner, Pair(torch.full((2, 3), number), [str(number)]))


class Items(Dataset[Item]):
    def __init__(self, room: int | None = None) -> None:
        self.room = room

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Item:
        if self.room is not None:  # shared memory counts as a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.RLIM_INFINITY))
        return item(number)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        while True:
            yield torch.zeros(1000)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_items_arrive_as_they_are(workers: int) -> None:
    for number, found in enumerate(WorkerLoader(Items(), num_workers=workers)):
        wanted = item(number)
        assert torch.equal(found.tensors["a"], wanted.tensors["a"]) and found.tensors["b"][1][1:] == ("text", None)
        assert found.tensors["b"][0] == number and found.tensors["b"][1][0].numel() == 0
        assert torch.equal(found.pair.image, wanted.pair.image) and found.pair.names == [str(number)]


@pytest.mark.parametrize("items", [Items(10), Endless()])
def test_no_room_in_shared_memory_is_an_error_and_no_hang(items: Any) -> None:
    with pytest.raises(UserError, match=r"no room in shared memory .*--num_workers 0"):
        list(WorkerLoader(items, num_workers=1))


class Group(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        return os.getpgrp()


def test_a_worker_leaves_the_process_group() -> None:
    assert list(WorkerLoader(Group(), num_workers=1)) != [os.getpgrp()]
