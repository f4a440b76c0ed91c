"""Weights from the checkpoints of a training run: of a step, of the best one, or of a plain state dict by its file's name.

    <run>/checkpoints/step-00000200/merger.safetensors    a trained part, beside the state of the training
    <run>/checkpoints/best/merger.safetensors             that of the best step
    <run>/checkpoints/token_merger_step_200.pt            the tensors alone; what they belong to is found in the step's folder

State dicts are read with torch's restricted reader (weights_only), which runs no code.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError, one_line
from tokensieve.methods.registry import get_method
from tokensieve.parts.files import check_trainable, fill_part, part_checksum, read_header, training_commands
from tokensieve.parts.protocol import LoadedPart

CHECKPOINTS, BEST, TENSORS = "checkpoints", "best", "tensors.safetensors"  # folders, and the file with a training's state
_STATE_DICT = re.compile(r".+_step_(\d+)\.pt")


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def state_dict_file(name: str, step: int | str) -> str:
    return f"{name}_step_{step}.pt"


def part_files(folder: Path) -> list[Path]:
    """The files of trained parts in a folder, be it of a checkpoint."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name != TENSORS)


def folder_of_run(run: Path) -> Path:
    """The folder with the parts of a run: itself once it is finished, before that its best checkpoint or its last one."""
    checkpoints = run / CHECKPOINTS
    folders = [run, checkpoints / BEST, *sorted(checkpoints.glob("step-*"), reverse=True)]
    found = next((folder for folder in folders if part_files(folder)), None)
    if found is None:
        raise UserError(f"no .safetensors file in the folder {str(run)!r}; {training_commands()} makes one")
    return found


def read_state_dict(path: Path) -> LoadedPart:
    """The part whose tensors a file such as token_merger_step_200.pt holds."""
    name = _STATE_DICT.fullmatch(path.name)
    if name is None:
        raise UserError(
            f"{path}: a .pt file needs the name and the folder that the training gave it, as in "
            "outputs/checkpoints/token_merger_step_200.pt"
        )
    state = _read_tensors(path)
    folders = [path.parent / step_folder(int(name[1])), path.parent]
    for file in (file for folder in folders for file in part_files(folder)):
        about = read_header(file)
        if set(state) == _tensor_names(file):
            check_trainable(about["method"], str(file))
            part = fill_part(path, about, get_method(about["method"]), state)
            return LoadedPart(part, str(path), {**about, "sha256": part_checksum(part)})
    raise UserError(
        f"{path}: these tensors are of no method in {folders[0]} or beside the file; give the .safetensors file of a "
        "method (a discriminator serves the training only)"
    )


def _tensor_names(path: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return set(file.keys())


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}; {training_commands()} makes such files") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: damaged, or not a state dict ({one_line(error, 120)})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: not a state dict, which holds tensors by name")
    return state
