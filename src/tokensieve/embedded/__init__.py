"""The small trained models that ship with the package, so that everything runs on a fresh clone without a download.

`sieve-vit-8` is a CLIP; `sieve-coca-8` is the same CLIP with a decoder that writes captions; `sieve-llava-8` is a LLaVA that
answers questions, in a folder as transformers' from_pretrained reads it (`llava_path`), and `sieve-llava-video-8` is one that
answers questions about clips; `sieve-reid-6` re-identifies people, in a folder as `reid.loading` reads it, and
`sieve-reid-6-merge` does so with fewer tokens inside the backbone. `register` adds the first two architectures to open_clip
through its own API; from then on they are open_clip models like any other:

    register()
    model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=str(weights_path(PRETRAINED)))
    tokenizer = open_clip.get_tokenizer(MODEL)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, WriteError, did_you_mean

MODEL, PRETRAINED = "sieve-vit-8", "scenes-v1"
CAPTIONER, CAPTIONER_PRETRAINED = "sieve-coca-8", "captions-v1"
MODELS = {MODEL: (PRETRAINED,), CAPTIONER: (CAPTIONER_PRETRAINED,)}  # the weights that ship for each model
LLAVA = "sieve-llava-8"
LLAVA_VIDEO = "sieve-llava-video-8"
LLAVAS = (LLAVA, LLAVA_VIDEO)
REID, REID_PRETRAINED = "sieve-reid-6", "sieve-reid-6-pretrain"  # the latter is what the former began with
REID_MERGE = "sieve-reid-6-merge"  # trained with a merge inside the backbone
DATASET = "embedded"

_FOLDER = Path(__file__).parent


def architecture(model: str = MODEL) -> dict[str, Any]:
    """open_clip's configuration of a model, with the tokenizer's place on this machine filled in."""
    config: dict[str, Any] = json.loads((_FOLDER / f"{model}.json").read_text(encoding="utf-8"))
    config["text_cfg"]["hf_tokenizer_name"] = str(_FOLDER / "tokenizer")
    return config


def register() -> None:
    """Make the models known to open_clip. Calling it again does nothing."""
    import open_clip

    if set(MODELS) <= set(open_clip.list_models()):
        return
    # open_clip reads configurations from files, once, when they are added; the packaged ones lack the tokenizer's path.
    try:
        with tempfile.TemporaryDirectory() as folder:
            for model in MODELS:
                (Path(folder) / f"{model}.json").write_text(json.dumps(architecture(model)), encoding="utf-8")
            open_clip.add_model_config(folder)
    except OSError as error:
        raise WriteError(
            f"no temporary file can be written ({error.strerror}): set TMPDIR to a folder that has room"
        ) from error


def default_weights(model: str) -> str:
    """The weights that a model has unless others are named."""
    return MODELS.get(model, MODELS[MODEL])[0]


def weights_path(tag: str = PRETRAINED) -> Path:
    """The weights file of a tag, for open_clip's `pretrained` argument."""
    tags = [tag for of_model in MODELS.values() for tag in of_model]
    if tag not in tags:
        raise UserError(f"no embedded weights {tag!r}; there are: {', '.join(tags)}.{did_you_mean(tag, tags)}")
    return _FOLDER / f"{tag}.safetensors"


def llava_path(name: str = LLAVA) -> Path:
    """The folder of one of `LLAVAS`, for transformers' `from_pretrained`."""
    return _FOLDER / name


def reid_path(name: str = REID) -> Path:
    """The folder of a re-identification model."""
    return _FOLDER / name


def card(tag: str = PRETRAINED) -> dict[str, Any]:
    """How the weights were made and what they reach: recipe, seed, time, loss curve, accuracies."""
    name = "card.json" if tag == PRETRAINED else f"{tag}.card.json"
    return json.loads((_FOLDER / name).read_text(encoding="utf-8"))
