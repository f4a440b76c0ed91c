"""Weights from the checkpoints of a training run: of a step, of the best one, or of a plain state dict by its file's name.

    <run>/checkpoints/step-00000200/merger.safetensors    a trained part, beside the state of the training
    <run>/checkpoints/best/merger.safetensors             that of the best step
    <run>/checkpoints/token_merger_step_200.pt            the tensors alone; what they belong to is found in the step's folder

State dicts are read with torch's restricted reader (weights_only), which runs no code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokensieve.errors import UserError, short
from tokensieve.methods.registry import get_method
from tokensieve.parts.files import build_part, check_trainable, read_part_file, seal_header, training_commands
from tokensieve.parts.protocol import LoadedPart
from tokensieve.parts.tensor_files import read_torch

CHECKPOINTS, BEST, TENSORS = "checkpoints", "best", "tensors.safetensors"  # folders, and the file with a training's state
_STATE_DICT = re.compile(r".+_step_([0-9]{1,18})\.pt", re.DOTALL)
_STEP = re.compile(r"step-([0-9]{8,18})")


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """The folders of checkpoints in a folder, by their steps in ascending order. Others, whatever their names, are left out."""
    named = [(_STEP.fullmatch(path.name), path) for path in folder.glob("step-*")]
    steps = {int(name[1]): path for name, path in named if name and path.is_dir()}
    return {step: steps[step] for step in sorted(steps) if steps[step].name == step_folder(step)}


def state_dict_file(name: str, step: int | str) -> str:
    return f"{name}_step_{step}.pt"


def part_files(folder: Path) -> list[Path]:
    """The files of trained parts in a folder, be it of a checkpoint."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name != TENSORS)


def folder_of_run(run: Path) -> Path:
    """The folder with the parts of a run: itself once it is finished, before that its best checkpoint or its last one."""
    checkpoints = run / CHECKPOINTS
    folders = [run, checkpoints / BEST, *reversed(step_folders(checkpoints).values())]
    found = next((folder for folder in folders if part_files(folder)), None)
    if found is None:
        raise UserError(f"no .safetensors file in the folder {short(run, 200)!r}; {training_commands()} makes one")
    return found


def read_state_dict(path: Path) -> LoadedPart:
    """The part whose tensors a file such as token_merger_step_200.pt holds."""
    name, source = _STATE_DICT.fullmatch(path.name), short(path, 200)
    if name is None:
        raise UserError(
            f"{source}: a .pt file needs the name and the folder that the training gave it, as in "
            "outputs/checkpoints/token_merger_step_200.pt"
        )
    if not os.path.exists(path):
        raise UserError(f"no file {source!r}; {training_commands()} makes such files")
    state = read_torch(path)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise UserError(f"{source}: not a state dict, which holds tensors by name")
    folders = [path.parent / step_folder(int(name[1])), path.parent]
    for file in (file for folder in folders for file in part_files(folder)):
        about, tensors = read_part_file(file)
        if set(state) == set(tensors):
            check_trainable(about["method"], short(file, 200))
            part = build_part(source, about, get_method(about["method"]), state)
            return LoadedPart(part, source, seal_header(part, about))
    raise UserError(
        f"{source}: these tensors are of no method in {short(folders[0], 200)} or beside the file; give the .safetensors file "
        "of a method (a discriminator serves the training only)"
    )
