"""Re-identification models on the disk: a folder with config.json (Settings) and model.safetensors; and the one that ships."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokensieve import embedded
from tokensieve.errors import UserError, did_you_mean, one_line
from tokensieve.files import read_json, write_bytes, write_json
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.loaded import Loaded, no_text
from tokensieve.reid.backbones import make_model
from tokensieve.reid.batches import Plain
from tokensieve.reid.model import ReidModel, Settings

EMBEDDED = embedded.REID
OURS = (EMBEDDED, embedded.REID_MERGE, embedded.REID_PRETRAINED)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "tokensieve reid 1"


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
        return bool(read_json(model_folder(name) / CONFIG).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def check_model(name: str, pretrained: str = "") -> None:
    """A UserError unless there is such a model."""
    if pretrained:
        raise UserError(f"--pretrained {pretrained}: a re-identification model has its weights in its folder; leave it out.")
    if is_model(name):
        return
    if name in OURS:
        raise UserError(f"--model {name} is missing from this installation, though it ships with tokensieve: install it again")
    what = "holds no re-identification model (config.json, model.safetensors)" if Path(name).is_dir() else "is no folder"
    raise UserError(
        f"--model {name} {what}; give the folder of a training (tokensieve train configs/embedded_reid.yml), or "
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
    header = {"format": FORMAT, "sha256": hashlib.sha256(packed).hexdigest()}
    write_json(folder / CONFIG, header | settings.to_json())


def read(name: str) -> ReidModel:
    """The model in evaluation mode on the CPU; a UserError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load as unpack

    check_model(name)
    folder = model_folder(name)
    config: dict[str, Any] = read_json(folder / CONFIG)
    del config["format"]
    try:
        packed = (folder / WEIGHTS).read_bytes()
        checksum = hashlib.sha256(packed).hexdigest()
        if config.pop("sha256", checksum) != checksum:
            raise UserError(f"{name}: damaged, its weights are not those that were saved; copy it again, or train it again")
        model = make_model(Settings.read(config))
        state = {key: value.float() if value.is_floating_point() else value for key, value in unpack(packed).items()}
        model.load_state_dict(state)
    except UserError:
        raise
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{name}: damaged, or of another version ({one_line(error, 160)})") from None
    if not all(bool(torch.isfinite(value).all()) for value in state.values() if value.is_floating_point()):
        raise UserError(f"{name}: its weights hold NaN or infinity; train it again with a lower learning rate")
    return model.eval()


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
