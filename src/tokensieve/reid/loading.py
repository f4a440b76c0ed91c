"""Re-identification models on the disk: a folder with config.json (Settings) and model.safetensors; and the one that ships."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokensieve import embedded
from tokensieve.errors import UserError, did_you_mean, short
from tokensieve.files import read_json, write_bytes, write_json
from tokensieve.installation.packages import missing_package
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.loaded import Loaded, no_text
from tokensieve.parts.header import CHECKSUM, MAX_HEADER, as_header, check_header, checksum
from tokensieve.parts.tensor_files import check_tensors, parse_safetensors, read_content
from tokensieve.reid.backbones import make_model
from tokensieve.reid.batches import Plain
from tokensieve.reid.model import ReidModel, Settings

EMBEDDED = embedded.REID
OURS = (EMBEDDED, embedded.REID_MERGE, embedded.REID_PRETRAINED)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT, FIRST_FORMAT = "tokensieve reid 2", "tokensieve reid 1"  # the checksum of the first one covers the weights alone


@dataclass
class LoadedReid(Loaded):
    """A re-identification model; its transform takes Pillow images by modality."""


def model_folder(name: str) -> Path:
    """The folder of a model: one of ours by its name, or the user's."""
    return embedded.reid_path(name) if name in OURS else Path(name)


def is_model_name(name: str) -> bool:
    """Whether a name can only be a re-identification model."""
    return name in OURS or is_model(name)


def is_model(name: str) -> bool:
    """Whether a folder, or the name of a model that ships, holds a re-identification model."""
    if not name:
        return False
    try:
        return read_json(model_folder(name) / CONFIG, MAX_HEADER).get("format") in (FORMAT, FIRST_FORMAT)
    except (ValueError, AttributeError):
        return False


def check_model(name: str, pretrained: str = "") -> None:
    """A UserError unless there is such a model."""
    if pretrained:
        raise UserError(f"--pretrained {pretrained}: a re-identification model has its weights in its folder; leave it out.")
    if is_model(name):
        return
    if name in OURS:
        raise UserError(f"--model {name} is missing from this installation, though it ships with tokensieve: install it again")
    what = "holds no re-identification model (config.json, model.safetensors)" if os.path.isdir(name) else "is no folder"
    raise UserError(
        f"--model {short(name, 200)} {what}; give the folder of a training (tokensieve train configs/embedded_reid.yml), or "
        f"{EMBEDDED}.{did_you_mean(name, OURS)}"
    )


def save(model: ReidModel, folder: Path, small: bool = False) -> None:
    """Write the model, each file whole or not at all. small: in 16 bits and without classifiers, as those that ship."""
    from safetensors.torch import save as pack

    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    settings = model.settings
    if small:
        settings = replace(settings, identities=0)
        state = {name: value for name, value in state.items() if ".classifier." not in name}
        state = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    packed = pack(state)
    write_bytes(folder / WEIGHTS, packed)
    header = as_header({"format": FORMAT} | settings.to_json(), str(folder / CONFIG))
    write_json(folder / CONFIG, {"format": FORMAT, CHECKSUM: checksum(header, [packed])} | header)


def read(name: str) -> ReidModel:
    """The model in evaluation mode on the CPU; a UserError if it is damaged.

    It is built without memory first, on the meta device: settings can name any size, a file holds what its tensors need.
    """
    check_model(name)
    folder, source = model_folder(name), short(name, 200)
    config = check_header(read_json(folder / CONFIG, MAX_HEADER), source)
    content = read_content(folder / WEIGHTS)
    _check_saved(config, content, source)
    try:
        settings = Settings.read({key: value for key, value in config.items() if key not in ("format", CHECKSUM)})
        if settings.library == "timm" and not re.fullmatch(r"\w+", settings.backbone):
            raise UserError(f"{short(settings.backbone)} names weights of timm")
        if settings.library == "hf" and not settings.arguments:
            raise UserError("it has no configuration of its backbone")
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = make_model(settings).state_dict()
    except ImportError as error:
        raise (missing_package(error) or error) from error.__cause__
    except Exception as error:  # settings of any kind lead to any kind
        raise UserError(f"{source}: damaged, or of another version ({short(error, 160)})") from None
    state, _ = parse_safetensors(content, source)
    check_tensors(state, wanted, source)
    model = make_model(settings)
    model.load_state_dict(state)
    return model.eval()


def _check_saved(config: dict[str, Any], content: bytes, source: str) -> None:
    """A UserError unless settings and weights are as they were saved."""
    if config["format"] == FORMAT:
        is_saved = config.get(CHECKSUM) == checksum(config, [content])
    else:  # the checksum was that of the weights, and older files have none
        is_saved = config.get(CHECKSUM) in (None, hashlib.sha256(content).hexdigest())
    if not is_saved:
        raise UserError(f"{source}: damaged, it is not as it was saved; copy it again, or train it again")


def load(
    name: str,
    device: torch.device | str = "cpu",
    *,
    pretrained: str = "",
    cache_dir: str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedReid:
    """A model by its name or its folder, which holds its weights."""
    check_model(name, pretrained)
    model = read(name).to(device=device, dtype=dtype)
    settings = model.settings
    transform: Any = Plain(settings.image_size, settings.mean, settings.std)
    return LoadedReid(model, transform, no_text(name), identity(model, transform))
