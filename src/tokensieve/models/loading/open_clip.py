"""open_clip models with their transform and tokenizer, the embedded ones among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import embedded
from tokensieve.errors import UserError, did_you_mean
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.hub import hub_is_reachable, is_cached, offline_message
from tokensieve.models.loading.load_errors import collect_warnings, translate_load_errors
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.loading.registry import BENCHMARK_PRETRAINED

if TYPE_CHECKING:
    import torch

SCHEMAS = ("hf-hub:", "local-dir:")  # a model name that begins so brings its own weights


def default_weights(model: str) -> str:
    """The weights of a model where --pretrained is not given."""
    if model.startswith(SCHEMAS):
        return ""
    return embedded.default_weights(model) if model in embedded.MODELS else BENCHMARK_PRETRAINED


def check_model(model: str, pretrained: str) -> None:
    """A UserError if open_clip has no such model, or no such weights for it."""
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
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loaded:
    """The model with the transform and the tokenizer that belong to it."""
    import open_clip

    check_model(model, pretrained)
    with collect_warnings() as notes:
        built, transform = create(model, pretrained, cache_dir)
        with translate_load_errors(model, pretrained):
            tokenizer = open_clip.get_tokenizer(model, cache_dir=cache_dir)
    if not pretrained and not model.startswith(SCHEMAS):
        notes.append(f"{model} has random weights: --pretrained is empty")
    built = built.to(device=device, dtype=dtype).eval()
    return Loaded(built, transform, tokenizer, identity(built, transform), notes)


def architecture(model: str, pretrained: str, image_size: int | tuple[int, int] | None, cache_dir: str | None) -> Any:
    """The bare model."""
    check_model(model, pretrained)
    with collect_warnings():
        return create(model, pretrained, cache_dir, image_size)[0]


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
    import torch

    weights = pretrained
    if pretrained in embedded.MODELS.get(model, ()):
        weights = str(embedded.weights_path(pretrained))
    elif needs_hub(model, pretrained):
        _check_hub(model, pretrained, cache_dir)
    with translate_load_errors(model, pretrained):
        built, _, transform = open_clip.create_model_and_transforms(
            model,
            pretrained=weights or None,
            cache_dir=cache_dir,
            force_image_size=image_size,
            device=torch.get_default_device(),
        )
    return built, transform


def needs_hub(model: str, pretrained: str) -> bool:
    """Whether open_clip would fetch weights, a tokenizer or a text tower from the Hub."""
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
            f"Connect once, give a file: --pretrained /path/to/weights.safetensors, or take what ships with tokensieve: "
            f"--model {embedded.MODEL}"
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
    """Set the language of NLLB-CLIP's tokenizer; no other model's needs it."""
    if "nllb-clip" not in model:
        return
    from clip_benchmark.models.nllb_clip import lang_map

    if language not in lang_map:
        raise UserError(f"NLLB-CLIP does not know the language {language!r}.{did_you_mean(language, lang_map)}")
    tokenizer.tokenizer.set_src_lang_special_tokens(lang_map[language])
