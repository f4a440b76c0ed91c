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

import hashlib
import json
import logging
import os
import pickle
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from tokensieve.errors import UserError, did_you_mean

SCHEMAS = ("hf-hub:", "local-dir:")  # a model name that begins so brings its own weights
UNRELATED = (  # to what a model computes: attributes of modules and entries of configurations
    *("training", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("id2label", "label2id", "pretrained_cfg", "default_cfg"),
)
EXAMPLES = {  # of types that have no model of ours
    "hf": "--model openai/clip-vit-base-patch16, or a folder with such a model",
    "timm": "--model vit_base_patch16_224.augreg2_in21k_ft_in1k",
}


@dataclass
class Loaded:
    """A model in evaluation mode with what belongs to it."""

    model: Any
    transform: Callable[[Any], torch.Tensor]
    tokenizer: Callable[[list[str]], Any]
    fingerprint: str  # identity()
    notes: list[str] = field(default_factory=list)


def pairs(
    model: list[str] | None, pretrained: list[str] | None, pretrained_model: list[str] | None, model_type: str = "open_clip"
) -> list[tuple[str, str]]:
    """(model, weights) of every run: --pretrained_model if given, else every --model with every --pretrained."""
    from tokensieve import embedded

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

    from tokensieve.data.sources import read_list

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


def check(model: str, pretrained: str, model_type: str = "open_clip") -> None:
    """A UserError if there is no such model or no such weights for it; nothing is loaded."""
    from tokensieve import embedded
    from tokensieve.models import load_hf, load_reid, load_timm, load_vlm

    if model_type == "vlm":
        return load_vlm.check(model, pretrained)
    if model_type == "reid":
        if pretrained:
            raise UserError(
                f"--pretrained {pretrained}: a re-identification model has its weights in its folder; leave it out."
            )
        return load_reid.check(model)
    if model_type == "hf":
        return load_hf.check(model, pretrained)
    if model_type == "timm":
        return load_timm.check(model, pretrained)
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
        check_file(pretrained)
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


def check_file(path: str) -> None:
    """A UserError if the file begins like no kind of weights."""
    with open(path, "rb") as file:
        start = file.read(9)
    begins = {".safetensors": start[8:] == b"{", ".npz": start[:2] == b"PK", ".npy": start[:6] == b"\x93NUMPY"}
    if not begins.get(Path(path).suffix, start[:2] == b"PK" or start[:1] == b"\x80"):
        raise UserError(f"--pretrained {path} is not a file of weights (safetensors, or tensors saved by torch).")


def load(
    model: str,
    pretrained: str,
    *,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """The model by its name, with its transform and tokenizer, in evaluation mode on the device."""
    from tokensieve.models import load_hf, load_reid, load_timm, load_vlm

    if model_type == "vlm":
        return load_vlm.load(model, device, cache_dir=cache_dir, revision=pretrained)
    check(model, pretrained, model_type)
    if model_type == "reid":
        return load_reid.load(model, device)
    if model_type == "ja_clip":
        return _load_japanese(pretrained, cache_dir, device)
    if model_type == "hf":
        return load_hf.load(model, pretrained, cache_dir, device)
    if model_type == "timm":
        return load_timm.load(model, pretrained, cache_dir, device)
    import open_clip

    with remarks() as notes:
        built, transform = create(model, pretrained, cache_dir)
        with explained(model, pretrained):
            tokenizer = open_clip.get_tokenizer(model, cache_dir=cache_dir)
    if not pretrained and not model.startswith(SCHEMAS):
        notes.append(f"{model} has random weights: --pretrained is empty")
    built = built.to(device).eval()
    return Loaded(built, transform, tokenizer, identity(built, transform), notes)


def no_text(model: str) -> Callable[[list[str]], Any]:
    """The tokenizer of a model without a text tower."""

    def refuse(texts: list[str]) -> Any:
        raise UserError(f"{model} has no text tower, so it cannot compare images with texts; use --task linear_probe")

    return refuse


def architecture(
    model: str,
    pretrained: str = "",
    image_size: int | tuple[int, int] | None = None,
    model_type: str = "open_clip",
    cache_dir: str | None = None,
) -> Any:
    """The bare model by its name: no tokenizer, random weights if none are named, any image size."""
    from tokensieve.models import load_hf, load_timm

    if model_type == "hf":
        assert not isinstance(image_size, tuple)  # its configurations have square images
        return load_hf.architecture(model, pretrained, image_size)
    check(model, pretrained, model_type)
    if model_type == "timm":
        with remarks():
            return load_timm.create(model, pretrained, cache_dir, image_size)
    if model_type != "open_clip":
        raise UserError(f"--model_type {model_type} has no architectures to measure; use open_clip, hf or timm.")
    with remarks():
        return create(model, pretrained, cache_dir, image_size)[0]


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
        _ask_hub_only_if_there(model, pretrained, cache_dir)
    with explained(model, pretrained):
        built, _, transform = open_clip.create_model_and_transforms(
            model, pretrained=weights or None, cache_dir=cache_dir, force_image_size=image_size
        )
    return built, transform


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over names, types and values of all weights."""
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return state.hexdigest()[:32]


def identity(model: torch.nn.Module, transform: Any) -> str:
    """What features depend on: the fingerprint of the weights, then one of the architecture and the transform.

    The architecture is the class and the plain settings of every module (heads, scale, pooling, ...), and the configuration
    where there is one. Names, places on the disk and versions are left out.
    """
    lines = [re.sub(r" at 0x[0-9a-f]+", "", repr(transform))]
    configs = {}
    for name, module in model.named_modules():
        settings = {key: _plain(value) for key, value in vars(module).items() if _related(key)}
        settings = {key: value for key, value in settings.items() if value is not None}
        lines.append(json.dumps([name, type(module).__qualname__, settings], sort_keys=True))
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            configs[id(config)] = _plain(config.to_dict())
    lines.extend(json.dumps(config, sort_keys=True) for config in configs.values())
    return f"{fingerprint(model)}-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    """Numbers, texts, names of functions, and lists and tables of such; None for all else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if _related(str(key))}
    return getattr(value, "__name__", None)


def _related(key: str) -> bool:
    return key not in UNRELATED and not key.startswith("_")


# --------------------------------------------------------------------------------------------------------- the network


def reachable(*hosts: str, seconds: float = 3.0) -> bool:
    """Whether a connection opens to one of these hosts (to the proxy, if the environment names one)."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    places = [urlsplit(proxy if "://" in proxy else f"http://{proxy}")] if proxy else [urlsplit(f"https://{h}") for h in hosts]
    for place in places:
        try:
            port = place.port or (80 if place.scheme == "http" else 443)
            socket.create_connection((place.hostname or "", port), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def _hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc


def hub_answers() -> bool:
    """Whether the Hub can be asked; if not, all libraries are told not to try."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not reachable(_hub_host()):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def missing() -> str:
    """What is wrong with a thing that has to come from the Hub, and cannot."""
    return f"not on this machine and {_hub_host()} cannot be reached (or HF_HUB_OFFLINE is set)"


def on_disk(repository: str, file: str, cache_dir: str | None, revision: str | None = None) -> bool:
    """Whether a file of a repository on the Hub was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision), str)


def _needs_hub(model: str, pretrained: str) -> bool:
    """Whether open_clip would ask the Hub for weights, a tokenizer or a text tower."""
    import open_clip

    if model.startswith(SCHEMAS):
        return model.startswith("hf-hub:")
    text = open_clip.get_model_config(model.replace("/", "-"))["text_cfg"]
    named = [text[key] for key in ("hf_tokenizer_name", "hf_model_name") if text.get(key)]
    weights = bool(pretrained) and not os.path.isfile(pretrained)
    return weights or "siglip" in model.lower() or any(not os.path.isdir(name) for name in named)


def _ask_hub_only_if_there(model: str, pretrained: str, cache_dir: str | None) -> None:
    """A UserError if the Hub does not answer and the weights are not on the disk."""
    if hub_answers():
        return
    away = missing()
    if model.startswith("hf-hub:"):
        if not on_disk(model.removeprefix("hf-hub:"), "open_clip_config.json", cache_dir):
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
        return any(on_disk(repository, f, cache_dir) for f in (safe, file))
    folder = Path(cache_dir or "~/.cache/clip").expanduser()
    return (folder / os.path.basename(entry.get("url", ""))).is_file()


# --------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def remarks() -> Iterator[list[str]]:
    """Collect what the libraries warn about as short notes; keep their log lines off the terminal."""
    notes: list[str] = []
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield notes
        notes.extend(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
    finally:
        logging.disable(disabled)


@contextmanager
def explained(model: str, pretrained: str) -> Iterator[None]:
    """Turn what goes wrong in loading into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        text = " ".join(str(error).split())
        named = [package for package in ("sentencepiece", "protobuf", "tiktoken") if package in text.lower()]
        hint = f"type pip install {named[0]}" if named else text[:200]
        raise UserError(f"{model} needs a package that is not installed: {hint}") from error
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{pretrained or model} is damaged, or more than tensors (which could run code): {text[:200]}"
        ) from error
    except (RuntimeError, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        text = " ".join(str(error).split())
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise UserError(
                f"{pretrained or model} is damaged, or more than tensors (which could run code): {text[:200]}"
            ) from error
        if "loading state_dict" in text or isinstance(error, (LookupError, TypeError, AttributeError, StopIteration)):
            raise UserError(f"the weights {pretrained or 'there'} do not fit {model}: {text[:200]}") from error
        from huggingface_hub import constants

        here = os.path.isdir(model) or os.path.isfile(pretrained)
        offline = f" ({_hub_host()} cannot be reached)" if constants.HF_HUB_OFFLINE and not here else ""
        weights = f" with weights {pretrained!r}" if pretrained else ""
        raise UserError(f"cannot load {model}{weights}{offline}: {text[:200]}") from error


# ------------------------------------------------------------------------------------------------- clip_benchmark's others


def _load_japanese(pretrained: str, cache_dir: str | None, device: torch.device | str) -> Loaded:
    from clip_benchmark.models.japanese_clip import load_japanese_clip

    try:
        model, transform, tokenizer = load_japanese_clip(pretrained=pretrained, device=device, cache_dir=cache_dir)
    except ImportError as error:
        raise UserError(f"--model_type ja_clip: {error}") from error
    model.model.eval()
    return Loaded(model, transform, tokenizer, identity(model.model, transform))


def set_language(model: str, tokenizer: Any, language: str) -> None:
    """NLLB-CLIP's tokenizer must be told the language; no other model's needs it."""
    if "nllb-clip" not in model:
        return
    from clip_benchmark.models.nllb_clip import lang_map

    if language not in lang_map:
        raise UserError(f"NLLB-CLIP does not know the language {language!r}.{did_you_mean(language, lang_map)}")
    tokenizer.tokenizer.set_src_lang_special_tokens(lang_map[language])
