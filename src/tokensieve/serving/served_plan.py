"""The plan that a model's config asks vLLM to carry out: read, checked, or refused with the reason.

The number of tokens that an image keeps is a pure function of the number it has, because vLLM reserves their places in the
prompt before the image is encoded. What a plan may ask for therefore depends on its method, and on what vLLM's models show of
their insides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tokensieve.cutting.placement import Cut
from tokensieve.errors import UserError, describe_value, did_you_mean
from tokensieve.plan import Plan, Step
from tokensieve.serving.families import FAMILIES, ServedFamily, titles

PLAN_KEY, RATE_KEY, POSITIONS_KEY = "tokensieve_plan", "image_pruning_rate", "tokensieve_positions"
KEYS = (PLAN_KEY, RATE_KEY, POSITIONS_KEY)  # of a model's config; vLLM's --hf-overrides sets them
POSITIONS = ("original", "compact")
CLIP = "clip_vision_model"
VISION_MODELS = (CLIP, "siglip_vision_model")
NEEDS_OF_TOWER = ("attention", "values")  # what CLIP towers in vLLM show
WHY_NOT = {
    "question": "reads the question, but vLLM encodes images before it knows which question they belong to",
    "text": "reads the question, but vLLM encodes images before it knows which question they belong to",
    "inputs": "reads the question, but vLLM encodes images before it knows which question they belong to",
    "before": "compares tokens before and after the MLP of a block, which vLLM's towers do not show",
    "pixels": "stands at @0, but vLLM's towers run whole",
}


@dataclass(frozen=True)
class ServedPlan:
    """A plan that vLLM can carry out on a given model. Equal texts give equal plans, in every process of a server."""

    text: str  # of the plan
    cut: Cut
    compact: bool  # tokens that stay are numbered anew
    has_grid_positions: bool  # the language model numbers image tokens by row and column
    depth: int = 0  # blocks of the tower that run, for @out

    @property
    def step(self) -> Step:
        """The plan's only step."""
        return self.cut.step

    @property
    def identity(self) -> str:
        """What makes the tokens of an image those of this plan; part of the key of every cache of images."""
        return f"{self.text}|{'compact' if self.compact else 'original'}"

    @property
    def needs_attention(self) -> bool:
        """Whether the method reads the attention of the tower."""
        return bool(set(NEEDS_OF_TOWER) & set(self.step.method.needs))

    @property
    def loses_sizes(self) -> bool:
        """Whether merged tokens lose their sizes: transformers adds log(size) to attention, vLLM has no bias on keys."""
        merges = self.step.merges or not self.step.method.selects or self.step.rest != "drop"
        return merges and self.step.keeps_sizes

    def kept(self, n: int) -> int:
        """The number of tokens that an image of n tokens keeps; a UserError if that is none."""
        if self.cut.count(n) < 1:
            raise UserError(f"{self.text} leaves no token of an image that has {n}")
        return self.cut.outputs(n)


def read_served_plan(config: Mapping[str, Any]) -> ServedPlan | None:
    """The plan of a model's config; None if it has none, or one that changes nothing.

    config: as config.json has it, with the keys of --hf-overrides.

    Raises:
        UserError: vLLM cannot carry the plan out on this model; the message says why, and what works.
    """
    text = plan_text(config)
    if text is None:
        return None
    plan = Plan.parse(text)
    if plan.is_identity:
        return None
    family = family_of(config)
    cut, depth = _cut_of(plan, config, family)
    positions = config.get(POSITIONS_KEY) or "original"
    if positions not in POSITIONS:
        raise UserError(
            f"{POSITIONS_KEY}={positions!r} is not one of {', '.join(POSITIONS)}.{did_you_mean(str(positions), POSITIONS)}"
        )
    if positions == "original":
        _check_positions(config, family)
    served = ServedPlan(str(plan), cut, positions == "compact", family.has_grid_positions, depth)
    if family.cuts_tower_output:
        served.kept(grid_of(config)[0] * grid_of(config)[1])  # known at the start, so an empty result is an error now
    return served


def plan_text(config: Mapping[str, Any]) -> str | None:
    """The text of the plan, also from the alias image_pruning_rate; None: there is none."""
    text, rate = config.get(PLAN_KEY), config.get(RATE_KEY)
    if text is not None and rate is not None:
        raise UserError(f"{PLAN_KEY} and {RATE_KEY} are both given; {RATE_KEY} is a short form of the plan cover: give one")
    if rate is None:
        if text is not None and not isinstance(text, str):
            raise UserError(f"{PLAN_KEY} is a text such as cover@out:64, not {text!r}")
        return text or None
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise UserError(f"{RATE_KEY}={rate!r} is not a share of image tokens to remove, from 0 (none) to below 1")
    if not rate:
        return None
    percent = float((1 - Fraction(str(rate))) * 100)
    return f"cover@{family_of(config).default_place}:{percent:g}%"


def family_of(config: Mapping[str, Any]) -> ServedFamily:
    """The family of a model; a UserError if none that is served under a plan."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"architectures in the model's config is a list of names, not {describe_value(names)}")
    found = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if found is None:
        raise UserError(f"{', '.join(names) or 'this model'} cannot be cut in vLLM; plans work with {titles()}")
    return found


def grid_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The grid of a LLaVA's tower, (h, w)."""
    side = _vision_number(config, "image_size") // _vision_number(config, "patch_size")
    return side, side


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of a config; empty where there is none."""
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"{key} in the model's config is an object of keys and values, not {describe_value(found)}")
    return found or {}


def _vision_number(config: Mapping[str, Any], key: str) -> int:
    """A number of the tower's config."""
    value = _section(config, "vision_config").get(key)
    if type(value) is not int or value < 1:
        given = "missing" if value is None else describe_value(value)
        raise UserError(f"{key} in the vision_config of the model's config is {given}; it has to be a whole number above 0")
    return value


def _cut_of(plan: Plan, config: Mapping[str, Any], family: ServedFamily) -> tuple[Cut, int]:
    """The cut of a plan, and the number of blocks that run before it in the tower; a UserError if vLLM cannot do it."""
    if len(plan.steps) > 1:
        raise UserError(f"{plan}: vLLM can cut at one place, and the plan has {len(plan.steps)} steps")
    step = plan.steps[0]
    method = step.method
    if method.on_image:
        raise UserError(f"{step}: {method.name} makes images smaller, which is done before vLLM gets them: send smaller images")
    if step.budget is not None and step.budget.scope != "image":
        raise UserError(
            f"{step}: vLLM encodes each image by itself, with all its tiles, so a budget is of each image; "
            f"leave /{step.budget.scope} out"
        )
    _check_method(step)
    depth = tower_depth(config) if family.cuts_tower_output else 0
    where = step.resolved_where(depth or 24)
    works = "@out (before the projector) and @llm.0 (behind it)" if family.cuts_tower_output else "@llm.0"
    example = f"{method.name}@{family.default_place}"
    if where.part == "llm" and tuple(where.layers) != (0,):
        raise UserError(
            f"{step}: in vLLM every layer of the language model has the same tokens, so a cut inside it saves nothing; "
            f"{family.title} can be cut at {works}"
        )
    if where.part not in ("out", "llm") or (where.part == "out" and not family.cuts_tower_output):
        raise UserError(f"{step}: in vLLM {family.title} can be cut at {works}; for example {example}:25%")
    if where.part == "out":
        _check_tower(step, config)
    elif needs := [need for need in NEEDS_OF_TOWER if need in method.needs]:
        raise UserError(f"{step}: {method.name} needs the {needs[0]} of a layer before the cut, and none has run at @llm.0")
    if where.part == "llm" and method.layers is not None:
        raise UserError(f"{step}: {method.name} needs the attention of blocks of the tower; use it with @out")
    at = (depth, "out") if where.part == "out" else (0, "llm")
    return Cut(step, *at, seed=0, budget=step.resolved_budget()), depth


def _check_method(step: Step) -> None:
    """A UserError for methods that no engine of this kind can carry out."""
    method = step.method
    if method.part is not None:
        raise UserError(f"{step}: {method.name} has a trained part, which is not loaded in vLLM")
    if method.adaptive:
        raise UserError(
            f"{step}: {method.name} decides for each image how many tokens stay, but vLLM has to know the number before it "
            "encodes the image"
        )
    for need in method.needs:
        if need in WHY_NOT:
            raise UserError(f"{step}: {method.name} {WHY_NOT[need]}")
    if step.rest == "zero":
        raise UserError(f"{step}: rest=zero keeps the number of tokens and saves nothing in vLLM; use rest=drop")


def tower_depth(config: Mapping[str, Any]) -> int:
    """The number of blocks of a LLaVA's tower that run: up to the layer whose tokens it takes."""
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise UserError(f"this LLaVA joins the tokens of several layers ({layer}), which would have to be cut alike")
    return layer if layer >= 0 else _vision_number(config, "num_hidden_layers") + 1 + layer


def _check_tower(step: Step, config: Mapping[str, Any]) -> None:
    """A UserError if the tower of a LLaVA cannot be cut at its output, or does not show what the method needs."""
    kind = _section(config, "vision_config").get("model_type")
    if kind not in VISION_MODELS:
        raise UserError(f"{step}: its vision tower is a {kind}; LLaVA can be cut with the towers {', '.join(VISION_MODELS)}")
    strategy = config.get("vision_feature_select_strategy") or "default"
    if kind == CLIP and strategy != "default":
        raise UserError(f'{step}: this LLaVA takes vision_feature_select_strategy="{strategy}"; only "default" can be cut')
    method = step.method
    needs = [need for need in NEEDS_OF_TOWER if need in method.needs] or (["attention"] if method.layers else [])
    if needs and kind != CLIP:
        raise UserError(
            f"{step}: {method.name} reads the {needs[0]} of the tower, which its SigLIP tower has without a CLS token and "
            "without its pooling head in vLLM; use a method without attention, such as cover"
        )


def _check_positions(config: Mapping[str, Any], family: ServedFamily) -> None:
    """A UserError if positions cannot be those of the uncut prompt."""
    if family.has_grid_positions:
        return
    kind = _section(_section(config, "text_config"), "rope_parameters").get("rope_type", "default")
    if kind != "default":
        raise UserError(
            f"the language model scales its positions (rope_type {kind}), which vLLM cannot combine with the positions of the "
            f"uncut prompt; add {POSITIONS_KEY}=compact to number the tokens that stay anew"
        )
