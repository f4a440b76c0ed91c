"""What can be chosen on the page: the methods that fit a model, the places of its layers, and the parts of a plan."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tokensieve.drawing.sheet import where
from tokensieve.errors import UserError
from tokensieve.measuring.rounds import detached_handle
from tokensieve.methods.registry import Method, list_methods
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan, Step

FORMS = ("{name}", "{name}:25%", "{name}(scale=0.75)", "{name}@llm.2:50%")  # of a plan of one method, the first that fits
TRAINED_FORMS = ("{name}", "{name}@out", "{name}:25%")  # of one with a trained part, which may know its budget


def fitting_methods(model: nn.Module, weights: Weights) -> list[dict[str, str]]:
    """The methods that can be applied to a model, each with a plan to begin with."""
    found = []
    for method in list_methods():
        plan = _fitting_plan(model, method, weights)
        if plan is not None and method.name != "none":
            group = "controls" if method.control else "published" if method.paper else "of this package"
            found.append({"name": method.name, "summary": method.summary, "group": group, "plan": plan})
    return found


def _fitting_plan(model: nn.Module, method: Method, weights: Weights) -> str | None:
    for form in FORMS if method.part is None else TRAINED_FORMS:
        plan = form.format(name=method.name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                detached_handle(model, plan, weights)
        except UserError:
            continue
        return plan
    return None


def places(depth: tuple[int, int]) -> list[dict[str, str]]:
    """The places of the slider, in the order in which a token passes them."""
    blocks, layers = depth
    names = [str(number) for number in range(blocks + 1)] if blocks else []
    if blocks:
        names.append("out")
    names += [f"llm.{number}" for number in range(layers)]
    return [{"where": name, "label": where(name)} for name in names]


def describe_steps(plan: Plan, depth: tuple[int, int]) -> list[dict[str, Any]]:
    """The steps of a plan in parts, from which the page makes a plan with another place or budget."""
    return [_describe_step(step, depth) for step in plan.steps]


def _describe_step(step: Step, depth: tuple[int, int]) -> dict[str, Any]:
    blocks, layers = depth
    found: dict[str, Any] = {
        "text": str(step),
        "method": step.method.name,
        "summary": step.method.summary,
        "options": {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in step.explicit_options
        },
        "place": None,
        "where": "",
        "cuts": 1,
        "budget": None,
    }
    if step.method.on_image:
        scale = step.options.get("scale") or 0
        return found | {"budget": {"kind": "scale", "amount": float(scale) or None}}
    resolved = step.resolved_where(blocks or 12, layers or 32)
    numbers = resolved.layers or tuple(range(blocks)) if resolved.part in ("block", "attn") else resolved.layers
    found["cuts"] = max(1, len(numbers))
    found["where"] = str(step.where)
    if resolved.part == "half":
        found["place"] = str(blocks // 2)
    elif resolved.part == "out":
        found["place"] = "out"
    elif len(numbers) == 1 and resolved.part in ("block", "llm"):
        number = numbers[0] + (blocks + 1 if numbers[0] < 0 else 0)
        found["place"] = f"llm.{numbers[0]}" if resolved.part == "llm" else str(number)
    if step.budget is not None or step.method.budget is not None:
        budget = step.resolved_budget()
        amount = float(budget.amount) * (100 if budget.kind == "share" else 1)
        found["budget"] = {"kind": budget.kind, "amount": round(amount, 2)}
        if step.method.budget is not None and "m" in found["options"]:
            found["replaced"] = ["m"]  # an option that says the budget in another way
    elif step.method.part is None:
        found["budget"] = {"kind": "share", "amount": 100.0}
    return found
