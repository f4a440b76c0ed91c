"""Files of tensors: read as they were written, or refused with the name of the file; no code of theirs is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tokensieve.errors import UserError
from tokensieve.parts import tensor_files

STATE = {"weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)}


def torch_bytes(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError, match=path.name) as caught:
        (tensor_files.read_torch if path.suffix == ".pt" else tensor_files.read_safetensors)(path)
    return str(caught.value)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(save(STATE, metadata={"a": "b"}))
    (tmp_path / "x.pt").write_bytes(torch_bytes(STATE))
    tensors, metadata = tensor_files.read_safetensors(tmp_path / "x.safetensors")
    assert metadata == {"a": "b"}
    for state in (tensors, tensor_files.read_torch(tmp_path / "x.pt")):
        assert state.keys() == STATE.keys() and all(torch.equal(state[name], STATE[name]) for name in STATE)


def test_every_damaged_byte_of_a_state_dict_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """torch itself compares no checksums."""
    path, whole = tmp_path / "x.pt", torch_bytes(STATE)
    read = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            state = tensor_files.read_torch(path)
        except UserError:
            continue
        assert state.keys() == STATE.keys() and all(torch.equal(state[name], STATE[name]) for name in STATE), place
        read += 1
    assert read < len(whole) / 4


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_pickles_are_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    for content in (
        torch_bytes(Evil(mark)),
        pickle.dumps(Evil(mark)),
        torch_bytes([Evil(mark)], _use_new_zipfile_serialization=False),
    ):
        assert "damaged, or not tensors that torch.save wrote" in refused(tmp_path / "x.pt", content)
        assert "damaged, or not a safetensors file" in refused(tmp_path / "x.safetensors", content)
    assert not mark.exists()


def test_archives_that_unpack_to_more_than_they_are_are_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_bytes(STATE))) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    assert "it is compressed" in refused(tmp_path / "x.pt", packed.getvalue())


def test_a_safetensors_file_is_as_long_as_its_header_says(tmp_path: Path) -> None:
    whole = save(STATE)
    for content in (b"", whole[:7], whole[:-1], whole + b"x", bytes(100), b"\xff" * 8 + whole[8:]):
        assert "damaged, or not a safetensors file" in refused(tmp_path / "x.safetensors", content)
    for table in (
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"data_offsets": [0, "x"]}}',
        b'{"a": {"data_offsets": {}}}',
    ):
        content = len(table).to_bytes(8, "little") + table + b"1234"
        assert "damaged, or not a safetensors file" in refused(tmp_path / "x.safetensors", content)
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(UserError, match=r"sparse\.safetensors: damaged"):
        tensor_files.read_safetensors(tmp_path / "sparse.safetensors")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1).expand(10**6, 10**6),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, device="meta"),
        3,
        None,
    ],
)
def test_only_tensors_in_memory_are_plain(value: Any) -> None:
    assert not tensor_files.is_plain(value)
    with pytest.raises(UserError, match="x: weight is not a plain tensor"):
        tensor_files.check_tensors({"weight": value}, {"weight": torch.ones(2, 3)}, "x")
