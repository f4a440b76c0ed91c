"""Vision-language models by name, with the processor that belongs to them; no code of theirs is run (no trust_remote_code).

A name is `sieve-llava-8` or `sieve-llava-video-8` (they ship with the package), a folder that `save_pretrained` made, or an id
on the Hub such as `llava-hf/llava-1.5-7b-hf`. On a CPU weights are float32, elsewhere they are what they were saved as.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokensieve import embedded
from tokensieve.errors import UserError, did_you_mean
from tokensieve.files import read_json
from tokensieve.models.families import VLM_FAMILIES
from tokensieve.models.loading import hf as load_hf
from tokensieve.models.loading.fingerprints import identity
from tokensieve.models.loading.hub import hub_is_reachable, is_cached, offline_message
from tokensieve.models.loading.load_errors import collect_warnings, translate_load_errors
from tokensieve.models.loading.loaded import Loaded
from tokensieve.provenance import digest

EMBEDDED = embedded.LLAVA
EXAMPLE = "llava-hf/llava-1.5-7b-hf"


@dataclass
class LoadedVlm(Loaded):
    """A vision-language model in evaluation mode with what belongs to it."""

    processor: Any = None  # images and texts -> what the model takes
    name: str = ""


def is_model_name(name: str) -> bool:
    """Whether a name can only be a vision-language model: ours, or a folder with one of a known family."""
    if name in embedded.LLAVAS or not os.path.isdir(name):
        return name in embedded.LLAVAS
    try:
        config = read_json(os.path.join(name, "config.json"))
    except (UserError, ValueError):  # it is said where the model is loaded
        return False
    return isinstance(config, dict) and config.get("model_type") in VLM_FAMILIES


def check_model(name: str, pretrained: str = "") -> None:
    """A UserError if this is not ours, no folder of a model, and cannot be an id on the Hub."""
    if name in embedded.LLAVAS:
        if pretrained:
            raise UserError(f"--pretrained {pretrained}: {name} ships with its weights; leave --pretrained out.")
        if not os.path.isdir(embedded.llava_path(name)):
            raise UserError(
                f"{name} is not in this installation ({embedded.llava_path(name)} is missing): install tokensieve again."
            )
    elif not os.path.isdir(name) and "/" not in name:
        raise UserError(
            f"there is no vision-language model {name!r}: give {EMBEDDED}, a folder, or an id on the Hub such as {EXAMPLE}."
            f"{did_you_mean(name, embedded.LLAVAS)}"
        )
    else:
        load_hf.check_model(name, pretrained)


def load(
    name: str = EMBEDDED,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | None = None,
    pretrained: str = "",
) -> LoadedVlm:
    """The model by its name, in evaluation mode on the device, with its processor (padding on the left).

    dtype: float32, bfloat16, ...; "auto": what the weights were saved as; None: "auto" on a GPU, float32 on a CPU.
    pretrained: the revision on the Hub.
    """
    check_model(name, pretrained)
    path = str(embedded.llava_path(name)) if name in embedded.LLAVAS else name
    where = _where(path, pretrained, cache_dir)
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    with collect_warnings() as notes, load_hf.quiet(), translate_load_errors(name, pretrained):
        model = _build(name, path, dtype, attn_implementation, where).to(device).eval()
        processor = _processor(name, path, where)
    transform = load_hf.Transform(processor.image_processor)
    return LoadedVlm(
        model=model,
        transform=transform,
        tokenizer=processor.tokenizer,
        fingerprint=identity(model, _settings(processor)),
        notes=notes,
        processor=processor,
        name=name,
    )


def prompt(processor: Any, question: str, seen: Literal["image", "video"] | None = "image") -> str:
    """The prompt that asks the model a question about what it sees (or nothing), up to where its answer begins."""
    if not getattr(processor, "chat_template", None):
        shown = f"{getattr(processor, f'{seen}_token')}\n" if seen else ""
        return f"USER: {shown}{question} ASSISTANT:"  # LLaVA's, from before processors had templates
    content = [{"type": seen}] if seen else []
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    text: str = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def _where(path: str, revision: str, cache_dir: str | None) -> dict[str, Any]:
    """How to find the files; a UserError if they are on the Hub, and it cannot be reached."""
    if os.path.isdir(path):
        return {"local_files_only": True}
    online = hub_is_reachable()
    if not online and not is_cached(path, "config.json", cache_dir, revision or None):
        raise UserError(
            f"the model {path} is {offline_message()}. Connect once, or give a folder: --model /path/to/model, "
            f"or leave --model out for {EMBEDDED}, which ships with tokensieve."
        )
    return {"local_files_only": not online, "cache_dir": cache_dir, "revision": revision or "main"}


def _build(name: str, path: str, dtype: Any, attn_implementation: str | None, where: dict[str, Any]) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(f"{name} is a {config.model_type}, which does not answer questions about images; use {EXAMPLE}.")
    model, report = AutoModelForImageTextToText.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=False,
        output_loading_info=True,
        **where,
    )
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise UserError(
            f"the weights of {name} lack {len(lacking)} tensors, which would be random: {', '.join(lacking[:3])} ..."
        )
    return model


def _settings(processor: Any) -> str:
    """All of a processor that what it makes depends on; names and places on the disk are left out."""
    words, video = processor.tokenizer, getattr(processor, "video_processor", None)
    of_videos = [] if video is None else [video.to_dict()]
    chat = str(words.chat_template or processor.chat_template)
    return digest([processor.image_processor.to_dict(), words.get_vocab(), chat, *of_videos])


def _processor(name: str, path: str, where: dict[str, Any]) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, trust_remote_code=False, **where)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise UserError(
            f"{name} has no processor for images and texts: processor_config.json, preprocessor_config.json or tokenizer.json "
            f"is missing in it."
        )
    if processor.tokenizer.pad_token_id is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    processor.tokenizer.padding_side = "left"
    return processor
