"""The small trained CLIP that ships with the package, so that everything runs on a fresh clone without a download.

`register` tells open_clip of the architecture through open_clip's own API; from then on it is an open_clip model like
any other:

    register()
    model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=str(weights_path(PRETRAINED)))
    tokenizer = open_clip.get_tokenizer(MODEL)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, did_you_mean

MODEL = "sieve-vit-8"
PRETRAINED = "scenes-v1"
DATASET = "embedded"

_FOLDER = Path(__file__).parent


def architecture() -> dict[str, Any]:
    """open_clip's configuration of the model, with the tokenizer's place on this machine filled in."""
    config: dict[str, Any] = json.loads((_FOLDER / f"{MODEL}.json").read_text(encoding="utf-8"))
    config["text_cfg"]["hf_tokenizer_name"] = str(_FOLDER / "tokenizer")
    return config


def register() -> None:
    """Make MODEL known to open_clip. Calling it again does nothing."""
    import open_clip

    if MODEL in open_clip.list_models():
        return
    # open_clip reads configurations from files, once, when they are added; the packaged one lacks the tokenizer's path.
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder) / f"{MODEL}.json"
        filled.write_text(json.dumps(architecture()), encoding="utf-8")
        open_clip.add_model_config(filled)


def pretrained_tags() -> list[str]:
    """The weights that ship."""
    return sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


def weights_path(tag: str = PRETRAINED) -> Path:
    """The weights file of a tag, for open_clip's `pretrained` argument."""
    path = _FOLDER / f"{tag}.safetensors"
    if not path.is_file():
        known = ", ".join(pretrained_tags())
        raise UserError(f"no embedded weights {tag!r} for {MODEL}; there are: {known}.{did_you_mean(tag, pretrained_tags())}")
    return path


def card() -> dict[str, Any]:
    """How the weights were made and what they reach: recipe, seed, time, loss curve, accuracies."""
    return json.loads((_FOLDER / "card.json").read_text(encoding="utf-8"))
