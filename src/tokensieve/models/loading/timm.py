"""timm models by name, for linear probes: bodies without a classifier, with the transform their weights were trained with."""

from __future__ import annotations

import inspect
import os
import re
import sys
from typing import Any

import torch

from tokensieve.errors import UserError, did_you_mean
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.hub import hub_is_reachable, is_cached, offline_message
from tokensieve.models.loading.load_errors import collect_warnings, translate_load_errors
from tokensieve.models.loading.loaded import Loaded, no_text
from tokensieve.models.loading.open_clip import SCHEMAS, check_weights_file


def check_model(model: str, pretrained: str) -> None:
    """A UserError if timm has no such model, or no such weights for it."""
    import timm

    if model.startswith(SCHEMAS):
        if pretrained:
            raise UserError(f"--pretrained {pretrained}: {model} brings its own weights; leave --pretrained out.")
        return
    name, _, tag = model.partition(".")
    known = timm.list_models()
    if name not in known:
        raise UserError(f"timm has no model {name!r}.{did_you_mean(name, known)} All: timm.list_models().")
    if tag and pretrained:
        raise UserError(f"--model {model} names its weights already; leave --pretrained {pretrained} out.")
    if os.path.isfile(pretrained):
        return check_weights_file(pretrained)
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
    wanted = tag or pretrained
    if os.sep in wanted or wanted.endswith((".pt", ".bin", ".safetensors", ".pth")):
        raise UserError(f"--pretrained {wanted}: there is no such file. Tags for {name}: {', '.join(tags) or '(none)'}.")
    if wanted and wanted not in tags:
        raise UserError(
            f"timm has no weights {wanted!r} for {name}. Give --pretrained with one of: {', '.join(tags) or '(none)'}, "
            f"or a file.{did_you_mean(wanted, tags)}"
        )


def load(
    model: str,
    pretrained: str,
    *,
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model with the transform of its weights; it has no tokenizer."""
    import timm

    check_model(model, pretrained)
    with collect_warnings() as notes:
        built = create(model, pretrained, cache_dir)
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(built), is_training=False)
    if not pretrained and "." not in model and not model.startswith(SCHEMAS):
        notes.append(f"{model} has random weights: --pretrained is empty")
    built = built.to(device=device, dtype=dtype).eval()
    return Loaded(built, transform, no_text(model), identity(built, transform), notes)


def architecture(model: str, pretrained: str, image_size: int | tuple[int, int] | None, cache_dir: str | None) -> Any:
    """The bare model in training mode."""
    check_model(model, pretrained)
    with collect_warnings():
        return create(model, pretrained, cache_dir, image_size)


def create(
    model: str,
    pretrained: str,
    cache_dir: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    **arguments: Any,
) -> Any:
    """The bare model in training mode, without its classifier. arguments: more for timm.create_model."""
    import timm

    if own := sorted(arguments.keys() & inspect.signature(timm.create_model).parameters.keys()):
        raise UserError(f"{model}: {', '.join(own)} is not an argument of the architecture; leave it out")
    from_file = os.path.isfile(pretrained)
    name = f"{model}.{pretrained}" if pretrained and not from_file else model
    fetched = "." in name or name.startswith(SCHEMAS)
    if fetched:
        _check_hub(name, cache_dir)
    options: dict[str, Any] = arguments if image_size is None else {"img_size": image_size, **arguments}
    with translate_load_errors(model, pretrained):
        try:
            built: Any = timm.create_model(name, pretrained=fetched, cache_dir=cache_dir, num_classes=0, **options)
        except TypeError as error:
            if image_size is None:
                raise
            changes = f"the image size {image_size}" + (f" and {arguments}" if arguments else "")
            raise UserError(f"{model} cannot be made with {changes}: {error}") from error
        if from_file:
            heads = built.pretrained_cfg.get("classifier") or ()
            heads = tuple(f"{head}." for head in ((heads,) if isinstance(heads, str) else heads))
            state = _fitted(pretrained, built)
            built.load_state_dict({key: value for key, value in state.items() if not key.startswith(heads)})
    return built


def take_clip(model: Any, path: str, head_width: int) -> None:
    """Begin a VisionTransformer with the image tower of an open_clip file: its first blocks, where it has more of them.

    timm itself knows that format. The projection is left out; anything else that does not fit is a UserError, and so are heads
    of another width, which the weights do not show.
    """
    heads, width = model.blocks[0].attn.num_heads, model.embed_dim
    if width != heads * head_width:
        raise UserError(f"{path} has attention heads of width {head_width}; num_heads: {heads} of embed_dim: {width} do not")
    more = re.compile(r"head\.|blocks\.(\d+)\.")
    state = {}
    for name, value in _fitted(path, model).items():
        match = more.match(name)
        if match is None or (match[1] and int(match[1]) < len(model.blocks)):
            state[name] = value.float()
    with translate_load_errors(type(model).__name__, path):
        model.load_state_dict(state)


def _fitted(path: str, model: Any) -> dict[str, Any]:
    """The tensors of a file as timm turns them into those of this model, position embeddings interpolated."""
    import timm

    state = timm.models.load_state_dict(path, weights_only=True)
    fit = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return dict(state if fit is None else fit(state, model))


def _check_hub(name: str, cache_dir: str | None) -> None:
    """A UserError if the Hub does not answer and the weights are not on the disk."""
    import timm

    if name.startswith("local-dir:") or hub_is_reachable():
        return
    entry = None if name.startswith("hf-hub:") else timm.models.get_pretrained_cfg(name)
    hub = name.removeprefix("hf-hub:") if entry is None else entry.hf_hub_id
    if not hub or not any(is_cached(hub, file, cache_dir) for file in ("model.safetensors", "pytorch_model.bin")):
        raise UserError(
            f"the weights of {name} are {offline_message()}. "
            "Connect once, or give a file: --pretrained /path/to/weights.safetensors"
        )
