"""TODO docstring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, did_you_mean
from tokensieve.models.loading.hub import hub_is_reachable, is_cached, offline_message
from tokensieve.models.loading.load_errors import translate_load_errors

SCHEMAS = ("hf-hub:", "local-dir:")  # a model name that begins so brings its own weights


def check_weights_file(path: str) -> None:
    """A UserError if the file begins like no kind of weights."""
    with open(path, "rb") as file:
        start = file.read(9)
    begins = {".safetensors": start[8:] == b"{", ".npz": start[:2] == b"PK", ".npy": start[:6] == b"\x93NUMPY"}
    if not begins.get(Path(path).suffix, start[:2] == b"PK" or start[:1] == b"\x80"):
        raise UserError(f"--pretrained {path} is not a file of weights (safetensors, or tensors saved by torch).")


def create(
    model: str, pretrained: str, cache_dir: str | None = None, image_size: int | tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """open_clip's model and its transform."""
    import open_clip

    from tokensieve import embedded

    weights = pretrained
    if pretrained in embedded.MODELS.get(model, ()):
        weights = str(embedded.weights_path(pretrained))
    elif _needs_hub(model, pretrained):
        _check_hub(model, pretrained, cache_dir)
    with translate_load_errors(model, pretrained):
        built, _, transform = open_clip.create_model_and_transforms(
            model, pretrained=weights or None, cache_dir=cache_dir, force_image_size=image_size
        )
    return built, transform


def _needs_hub(model: str, pretrained: str) -> bool:
    """Whether open_clip would ask the Hub for weights, a tokenizer or a text tower."""
    import open_clip

    if model.startswith(SCHEMAS):
        return model.startswith("hf-hub:")
    text = open_clip.get_model_config(model.replace("/", "-"))["text_cfg"]
    named = [text[key] for key in ("hf_tokenizer_name", "hf_model_name") if text.get(key)]
    weights = bool(pretrained) and not os.path.isfile(pretrained)
    return weights or "siglip" in model.lower() or any(not os.path.isdir(name) for name in named)


def _check_hub(model: str, pretrained: str, cache_dir: str | None) -> None:
    """A UserError if the Hub does not answer and the weights are not on the disk."""
    if hub_is_reachable():
        return
    away = offline_message()
    if model.startswith("hf-hub:"):
        if not is_cached(model.removeprefix("hf-hub:"), "open_clip_config.json", cache_dir):
            raise UserError(f"the model {model} is {away}. Connect once, or give a folder: --model local-dir:/path/to/model")
    elif pretrained and not os.path.isfile(pretrained) and not _cached(model, pretrained, cache_dir):
        raise UserError(
            f"the weights {pretrained!r} for {model} are {away}. "
            f"Connect once, or give a file: --pretrained /path/to/weights.safetensors"
        )


def _cached(model: str, pretrained: str, cache_dir: str | None) -> bool:
    """Whether open_clip would find these weights on the disk."""
    import open_clip

    entry = open_clip.get_pretrained_cfg(model.replace("/", "-"), pretrained)
    if entry.get("hf_hub"):
        repository, _, file = entry["hf_hub"].rpartition("/")
        file = file or "open_clip_pytorch_model.bin"
        safe = "open_clip_model.safetensors" if file == "open_clip_pytorch_model.bin" else f"{Path(file).stem}.safetensors"
        return any(is_cached(repository, f, cache_dir) for f in (safe, file))
    folder = Path(cache_dir or "~/.cache/clip").expanduser()
    return (folder / os.path.basename(entry.get("url", ""))).is_file()


def set_language(model: str, tokenizer: Any, language: str) -> None:
    """NLLB-CLIP's tokenizer must be told the language; no other model's needs it."""
    if "nllb-clip" not in model:
        return
    from clip_benchmark.models.nllb_clip import lang_map

    if language not in lang_map:
        raise UserError(f"NLLB-CLIP does not know the language {language!r}.{did_you_mean(language, lang_map)}")
    tokenizer.tokenizer.set_src_lang_special_tokens(lang_map[language])
