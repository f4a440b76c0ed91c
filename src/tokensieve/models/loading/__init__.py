"""Models by name: open_clip's, the embedded one among them, Hugging Face's and timm's; what is missing is said at once.

Without a network a miss on the Hub is retried for up to 46 seconds. So weights are looked for on the disk first, and the Hub
is asked only if a connection to it opens. What --model and --pretrained mean:

    open_clip   a name of open_clip's list; a tag, a file, or "" for random weights
    hf          a folder, or an id on the Hub; the revision on the Hub, "" for the main one (load_hf.py)
    timm        a name of timm's list; a tag, a file, or "" for random weights, unless the name ends in .TAG (load_timm.py)
    vlm         a folder, or an id on the Hub, or ours; the revision on the Hub, "" for the main one (load_vlm.py)
    reid        the folder of a training, or ours; nothing, the weights are in the folder (load_reid.py)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tokensieve.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch

    from tokensieve.models.loading.loaded import Loaded

EXAMPLES = {  # of types that have no model of ours
    "hf": "--model openai/clip-vit-base-patch16, or a folder with such a model",
    "timm": "--model vit_base_patch16_224.augreg2_in21k_ft_in1k",
}


def model_pairs(
    model: list[str] | None, pretrained: list[str] | None, pretrained_model: list[str] | None, model_type: str = "open_clip"
) -> list[tuple[str, str]]:
    """(model, weights) of every run: --pretrained_model if given, else every --model with every --pretrained."""
    from tokensieve import embedded
    from tokensieve.models.loading.open_clip import SCHEMAS

    ours = {"vlm": embedded.LLAVA, "reid": embedded.REID}
    if model_type in ours:
        model = model or [ours[model_type]]
    if model_type in (*EXAMPLES, *ours):
        if pretrained_model:
            raise UserError(f"--pretrained_model names open_clip models; with --model_type {model_type} use --model.")
        if not model:
            raise UserError(f"--model_type {model_type} needs --model, for example {EXAMPLES[model_type]}")
        return [(m, p) for m in model for p in pretrained or [""]]
    if not pretrained_model:
        models = model or [embedded.MODEL]
        return [(m, p) for m in models for p in pretrained or ["" if m.startswith(SCHEMAS) else embedded.default_weights(m)]]
    from clip_benchmark.model_collection import model_collection

    from tokensieve.data.registry import read_list

    found: list[tuple[str, str]] = []
    for name in pretrained_model:
        if os.path.isfile(name):
            lines = read_list(name, "--pretrained_model")
            found.extend(_pair(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
        elif name in model_collection:
            found.extend(model_collection[name])
        else:
            found.append(_pair(name, "--pretrained_model", list(model_collection)))
    return found


def _pair(text: str, where: str, collections: list[str] | None = None) -> tuple[str, str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        kinds = f", a text file, or one of {', '.join(collections)}" if collections else ""
        hint = did_you_mean(text, collections or [])
        raise UserError(f"{where}: {text!r} is not MODEL,WEIGHTS such as ViT-B-32,openai{kinds}.{hint}")
    return parts[0], parts[1]


def check_model(model: str, pretrained: str, model_type: str = "open_clip") -> None:
    """A UserError if there is no such model or no such weights for it; nothing is loaded."""
    from tokensieve import embedded
    from tokensieve.models.loading import hf as load_hf
    from tokensieve.models.loading import timm as load_timm
    from tokensieve.models.loading import vlm as load_vlm
    from tokensieve.models.loading.open_clip import SCHEMAS, check_weights_file
    from tokensieve.reid import loading

    if model_type == "vlm":
        return load_vlm.check_model(model, pretrained)
    if model_type == "reid":
        if pretrained:
            raise UserError(
                f"--pretrained {pretrained}: a re-identification model has its weights in its folder; leave it out."
            )
        return loading.check_model(model)
    if model_type == "hf":
        return load_hf.check_model(model, pretrained)
    if model_type == "timm":
        return load_timm.check_model(model, pretrained)
    if model_type != "open_clip":
        return
    import open_clip

    embedded.register()
    if model.startswith("local-dir:"):
        folder = model.removeprefix("local-dir:")
        if not os.path.isfile(os.path.join(folder, "open_clip_config.json")):
            raise UserError(f"--model {model}: there is no open_clip_config.json in {folder!r}.")
    if model.startswith(SCHEMAS):
        return
    name = model.replace("/", "-")
    known = open_clip.list_models()
    if name not in known:
        raise UserError(f"open_clip has no model {model!r}.{did_you_mean(name, known)} All: open_clip.list_models().")
    if os.path.isfile(pretrained):
        check_weights_file(pretrained)
        return
    if not pretrained or open_clip.get_pretrained_cfg(name, pretrained):
        return
    tags = embedded.MODELS.get(name) or open_clip.list_pretrained_tags_by_model(name)
    if pretrained in tags:
        return
    if os.sep in pretrained or pretrained.endswith((".pt", ".bin", ".safetensors", ".pth")):
        raise UserError(f"--pretrained {pretrained}: there is no such file. Tags for {model}: {', '.join(tags)}.")
    raise UserError(
        f"there are no weights {pretrained!r} for {model}. Give --pretrained with one of: {', '.join(tags) or '(none)'}, "
        f"or a file.{did_you_mean(pretrained, tags)}"
    )


def load(
    model: str,
    pretrained: str,
    *,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model by its name, with its transform and tokenizer, in evaluation mode on the device."""
    from tokensieve.models.loading import hf as load_hf
    from tokensieve.models.loading import timm as load_timm
    from tokensieve.models.loading import vlm as load_vlm
    from tokensieve.models.loading.fingerprints import identity
    from tokensieve.models.loading.ja_clip import load_ja_clip
    from tokensieve.models.loading.load_errors import collect_warnings, translate_load_errors
    from tokensieve.models.loading.loaded import Loaded
    from tokensieve.models.loading.open_clip import SCHEMAS, create
    from tokensieve.reid import loading

    if model_type == "vlm":
        return load_vlm.load(model, device, dtype, cache_dir=cache_dir, revision=pretrained)
    check_model(model, pretrained, model_type)
    if model_type == "reid":
        return loading.load(model, device)
    if model_type == "ja_clip":
        return load_ja_clip(pretrained, cache_dir, device)
    if model_type == "hf":
        return load_hf.load(model, pretrained, cache_dir, device)
    if model_type == "timm":
        return load_timm.load(model, pretrained, cache_dir, device)
    import open_clip

    with collect_warnings() as notes:
        built, transform = create(model, pretrained, cache_dir)
        with translate_load_errors(model, pretrained):
            tokenizer = open_clip.get_tokenizer(model, cache_dir=cache_dir)
    if not pretrained and not model.startswith(SCHEMAS):
        notes.append(f"{model} has random weights: --pretrained is empty")
    built = built.to(device).eval()
    return Loaded(built, transform, tokenizer, identity(built, transform), notes)


def architecture(
    model: str,
    pretrained: str = "",
    image_size: int | tuple[int, int] | None = None,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
) -> Any:
    """The bare model by its name: no tokenizer, random weights if none are named, any image size."""
    from tokensieve.models.loading import hf as load_hf
    from tokensieve.models.loading import timm as load_timm
    from tokensieve.models.loading.load_errors import collect_warnings
    from tokensieve.models.loading.open_clip import create

    if model_type == "hf":
        assert not isinstance(image_size, tuple)  # its configurations have square images
        return load_hf.architecture(model, pretrained, image_size)
    check_model(model, pretrained, model_type)
    if model_type == "timm":
        with collect_warnings():
            return load_timm.create(model, pretrained, cache_dir, image_size)
    if model_type != "open_clip":
        raise UserError(f"--model_type {model_type} has no architectures to measure; use open_clip, hf or timm.")
    with collect_warnings():
        return create(model, pretrained, cache_dir, image_size)[0]
