"""Vision-language models by name, with the processor that belongs to them; no code of theirs is run (no trust_remote_code).

A name is `sieve-llava-8` (ships with the package), a folder that `save_pretrained` made, or an id on the Hub such as
`llava-hf/llava-1.5-7b-hf`. On a CPU weights are float32, elsewhere they are what they were saved as.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from tokensieve import embedded
from tokensieve.errors import UserError, did_you_mean
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


def is_embedded(name: str) -> bool:
    """Whether this is the vision-language model that ships with the package."""
    return name == EMBEDDED


def check_model(name: str, revision: str = "") -> None:
    """A UserError if this is not ours, no folder of a model, and cannot be an id on the Hub."""
    if name == EMBEDDED:
        if revision:
            raise UserError(f"--pretrained {revision}: {name} ships with its weights; leave --pretrained out.")
        if not os.path.isdir(embedded.llava_path()):
            raise UserError(
                f"{name} is not in this installation ({embedded.llava_path()} is missing): install tokensieve again."
            )
    elif not os.path.isdir(name) and "/" not in name:
        raise UserError(
            f"there is no vision-language model {name!r}: give {EMBEDDED}, a folder, or an id on the Hub such as {EXAMPLE}."
            f"{did_you_mean(name, [EMBEDDED])}"
        )
    else:
        load_hf.check_model(name, revision)


def load(
    name: str = EMBEDDED,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | None = None,
    revision: str = "",
) -> LoadedVlm:
    """The model by its name, in evaluation mode on the device, with its processor (padding on the left).

    dtype: float32, bfloat16, ...; "auto" is what the weights were saved as; without one, that is taken on a GPU only.
    """
    check_model(name, revision)
    place = str(embedded.llava_path()) if name == EMBEDDED else name
    where = _where(place, revision, cache_dir)
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    with collect_warnings() as notes, load_hf.quiet(), translate_load_errors(name, revision):
        model = _build(name, place, dtype, attn_implementation, where).to(device).eval()
        processor = _processor(name, place, where)
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


def prompt(processor: Any, question: str, image: bool = True) -> str:
    """The text that asks the model a question about an image (or without one), up to where its answer begins."""
    if not getattr(processor, "chat_template", None):
        shown = f"{processor.image_token}\n" if image else ""
        return f"USER: {shown}{question} ASSISTANT:"  # LLaVA's, from before processors had templates
    content = [{"type": "image"}] if image else []
    said = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    text: str = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return text


def _where(place: str, revision: str, cache_dir: str | None) -> dict[str, Any]:
    """How to find the files; a UserError if they are on the Hub, and it cannot be asked."""
    if os.path.isdir(place):
        return {"local_files_only": True}
    online = hub_is_reachable()
    if not online and not is_cached(place, "config.json", cache_dir, revision or None):
        raise UserError(
            f"the model {place} is {offline_message()}. Connect once, or give a folder: --model /path/to/model, "
            f"or leave --model out for {EMBEDDED}, which ships with tokensieve."
        )
    return {"local_files_only": not online, "cache_dir": cache_dir, "revision": revision or "main"}


def _build(name: str, place: str, dtype: Any, attn_implementation: str | None, where: dict[str, Any]) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **where)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(f"{name} is a {config.model_type}, which does not answer questions about images; use {EXAMPLE}, say.")
    model, told = AutoModelForImageTextToText.from_pretrained(
        place,
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=False,
        output_loading_info=True,
        **where,
    )
    lacking = sorted(told["missing_keys"])
    if lacking:
        raise UserError(
            f"the weights of {name} lack {len(lacking)} tensors, which would be random: {', '.join(lacking[:3])} ..."
        )
    return model


def _settings(processor: Any) -> str:
    """All of a processor that what it makes depends on; names and places on the disk are left out."""
    words = processor.tokenizer
    return digest([processor.image_processor.to_dict(), words.get_vocab(), str(words.chat_template or processor.chat_template)])


def _processor(name: str, place: str, where: dict[str, Any]) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(place, trust_remote_code=False, **where)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise UserError(
            f"{name} has no processor for images and texts: processor_config.json, preprocessor_config.json or tokenizer.json "
            f"is missing in it."
        )
    if processor.tokenizer.pad_token_id is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    processor.tokenizer.padding_side = "left"
    return processor
