"""Declarations of model types: the libraries that models come from. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve import embedded
from tokensieve.registry import Registry, resolve


@dataclass(frozen=True)
class ModelType:
    """What `--model_type NAME` means. The functions are named as "module:function" and imported when used."""

    name: str
    summary: str  # one line, for help and docs: what --model and --pretrained mean
    check: str  # (model, pretrained) -> None; a UserError if there is no such model or no such weights; loads nothing
    load: str  # (model, *, pretrained, cache_dir, device, dtype) -> Loaded; a UserError where check gives one
    architecture: str | None = None  # (model, pretrained, image_size, cache_dir) -> the bare model, for bench
    outline: str | None = None  # (model) -> the bare model on the meta device, to check plans with; None if it is not known
    bench: str = "tokensieve.measuring.vision:bench"  # (arguments of `bench`) -> rows (None: it tells none): measures plans
    bench_model: str = ""  # measured where --model is not given
    tune: str = "tokensieve.tuning.features:ImageFeatures"  # a Subject: how `tune` compares a plan with the full model
    demo: str = "tokensieve.demo.matching:Matching"  # a Subject: what the page of `demo` does with its models
    takes_questions: bool = False  # its models answer questions about images: `tune --questions`
    default_model: str | None = None  # used where --model is not given
    default_pretrained: str | None = None  # (model) -> weights used where --pretrained is not given; None: always ""
    example: str = ""  # of types without a default model: what to type
    takes_pairs: bool = False  # --pretrained_model names models of this type
    is_model_name: str | None = None  # (name) -> bool: whether a name can only be a model of this type


MODEL_TYPES: Registry[ModelType] = Registry("model type")
LOADING = "tokensieve.models.loading"
BENCHMARK_PRETRAINED = "laion400m_e32"  # clip_benchmark's default; of open_clip models that are not embedded

MODEL_TYPES.add(
    ModelType(
        "open_clip",
        "a name of open_clip's list; a tag, a file, or '' for random weights",
        check=f"{LOADING}.open_clip:check_model",
        load=f"{LOADING}.open_clip:load",
        architecture=f"{LOADING}.open_clip:architecture",
        outline=f"{LOADING}.outline:of_open_clip",
        bench_model="ViT-B-16",
        default_model=embedded.MODEL,
        default_pretrained=f"{LOADING}.open_clip:default_weights",
        takes_pairs=True,
    ),
    origin=__name__,
)
MODEL_TYPES.add(
    ModelType(
        "ja_clip",
        "Japanese CLIP models: --pretrained is the name",
        check=f"{LOADING}.ja_clip:check_model",
        load=f"{LOADING}.ja_clip:load",
        default_model="japanese-clip",
        takes_pairs=True,
    ),
    origin=__name__,
)
MODEL_TYPES.add(
    ModelType(
        "hf",
        "a folder or an id on the Hub; the revision on the Hub, '' for the main one",
        check=f"{LOADING}.hf:check_model",
        load=f"{LOADING}.hf:load",
        architecture=f"{LOADING}.hf:architecture",
        outline=f"{LOADING}.outline:of_hf",
        bench_model="clip-vit-base-patch16",
        example="--model openai/clip-vit-base-patch16, or a folder with such a model",
    ),
    origin=__name__,
)
MODEL_TYPES.add(
    ModelType(
        "timm",
        "a name of timm's list; a tag, a file, or '' for random weights, unless the name ends in .TAG",
        check=f"{LOADING}.timm:check_model",
        load=f"{LOADING}.timm:load",
        architecture=f"{LOADING}.timm:architecture",
        outline=f"{LOADING}.outline:of_timm",
        bench_model="vit_base_patch16_224",
        example="--model vit_base_patch16_224.augreg2_in21k_ft_in1k",
    ),
    origin=__name__,
)
MODEL_TYPES.add(
    ModelType(
        "vlm",
        f"{' or '.join(embedded.LLAVAS)}, a folder, or an id on the Hub; the revision on the Hub, '' for the main one",
        check=f"{LOADING}.vlm:check_model",
        load=f"{LOADING}.vlm:load",
        outline=f"{LOADING}.outline:of_vlm",
        bench="tokensieve.measuring.vlm:bench",
        tune="tokensieve.tuning.answers:NextTokens",
        demo="tokensieve.demo.answers:Answers",
        takes_questions=True,
        bench_model=embedded.LLAVA,
        default_model=embedded.LLAVA,
        is_model_name=f"{LOADING}.vlm:is_model_name",
    ),
    origin=__name__,
)


def type_of_name(name: str | None, given: str | None) -> str:
    """The type of a model: the given one; where that is None or the default, the type that claims the name, if one does.

    >>> type_of_name("sieve-llava-8", None), type_of_name("sieve-llava-8", "hf"), type_of_name("ViT-B-16", None)
    ('vlm', 'hf', 'open_clip')
    """
    default = next(iter(MODEL_TYPES))
    if name is None or given not in (None, default):
        return given or default
    only = (kind.name for kind in MODEL_TYPES.values() if kind.is_model_name and resolve(kind.is_model_name)(name))
    return next(only, default)
