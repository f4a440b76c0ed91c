"""Reading the fields of a result: plan, main metric, speed, and values as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokensieve.tasks.registry import TASKS

Result = Mapping[str, Any]
FULL = "none"  # the method that changes nothing
NOTHING = "–"  # where there is no value
SMALLEST = 1e-100  # a number nearer to 0 was not measured
COLOURS = 7  # classes k-0 to k-6 of the style
SHAPES = 3  # of controls: classes k-control-0 to k-control-2


def split_older(found: Sequence[Result]) -> tuple[list[Result], int]:
    """The results to show, and how many others are older ones of the same settings."""
    shown: list[Result] = []
    keys: set[str] = set()
    for result in sorted(found, key=lambda result: mapping_at(result, "run").get("newest") is False):
        key = mapping_at(result, "run").get("key")
        if key is None or str(key) not in keys:
            shown.append(result)
            keys.add(str(key))
    return shown, len(found) - len(shown)


def plan_text(result: Result) -> str:
    return str(mapping_at(result, "reduction").get("plan") or "none")


def plan_label(result: Result) -> str:
    """The plan's text, with the token fusion where there is one."""
    done = mapping_at(result, "reduction")
    plan, fusion = plan_text(result), done.get("token_fusion", "cls")
    if fusion in (None, "cls"):
        return plan
    weight = f" {done['token_fusion_weight']}" if "token_fusion_weight" in done else ""
    temperature = done.get("token_fusion_temperature", 1.0)
    return f"{plan}, fusion {fusion}{weight}" + ("" if temperature == 1.0 else f", temperature {temperature}")


def main_metric(rows: Sequence[Result]) -> str | None:
    """The metric of a section: its task's, or the first number there is."""
    numbers = [name for row in rows for name, value in row["metrics"].items() if number_of(value) is not None]
    task = TASKS.get(str(rows[0].get("task")))
    main = task.main_metric(numbers) if task else None
    return main or (numbers[0] if numbers else None)


def number_of(value: Any) -> float | None:
    """A finite number, or None whatever else it is. One that is too small for its inverse to be drawn is 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if abs(value) > SMALLEST else 0.0


def speed_up(result: Result) -> float | None:
    """Times the speed of the full model, where both were measured."""
    done = mapping_at(result, "reduction")
    if (paired := number_of(done.get("speedup"))) is not None:
        return paired or None
    speed, full = number_of(done.get("images_per_second")), number_of(done.get("images_per_second_full"))
    return speed / full if speed and full else None


def unchanged(result: Result) -> str | None:
    """In which way the plan of a result did nothing; None if it did something, or if that is not known."""
    done = mapping_at(result, "reduction")
    if method_name(result) == FULL:
        return None
    if done.get("applied") is False:
        return "was not applied"
    return "changed nothing" if done.get("changed") is False else None


def mapping_at(result: Result, name: str) -> Mapping[str, Any]:
    """The values of that name; none if it is something else."""
    value = result.get(name)
    return value if isinstance(value, Mapping) else {}


def method_name(result: Result) -> str:
    """The name at the beginning of the plan."""
    return plan_text(result).split("+")[0].split("@")[0].split(":")[0].split("(")[0].strip()


def mark_kind(result: Result, rows: Sequence[Result]) -> str:
    """none for the full model, control-N with the number of the shape of a control, or the number of the method's colour."""
    controls, method = _controls(), method_name(result)
    if method == FULL:
        return FULL
    if method in controls:
        return f"control-{controls.index(method) % SHAPES}"
    methods = list(dict.fromkeys(method_name(row) for row in rows if method_name(row) not in (FULL, *controls)))
    return str(methods.index(method) % COLOURS)


def method_label(result: Result) -> str:
    """The method in a legend."""
    name = method_name(result)
    return "full model" if name == FULL else f"{name} (control)" if name in _controls() else name


def _controls() -> list[str]:
    """The methods that are declared as controls, in the order of their declarations."""
    from tokensieve.methods import REGISTRY

    return [method.name for method in REGISTRY.values() if method.control]


def flatten_values(run: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in run.items():
        made.update({f"{name} {inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {name: value})
    return made


def value_text(value: Any) -> str:
    return NOTHING if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
