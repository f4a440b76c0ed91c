"""The plans that are searched."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest

from tokensieve.errors import UserError
from tokensieve.methods.registry import REGISTRY
from tokensieve.models.registry import open_tower
from tokensieve.plan import Budget, Plan
from tokensieve.tuning.outline import Outline
from tokensieve.tuning.space import RESIZE, Candidate, Space, find_methods


@pytest.fixture(scope="module")
def space(tiny_clip: SimpleNamespace) -> Space:
    tower = open_tower(tiny_clip.make()[0])
    return Space(Outline(tower, None, 24), tuple(find_methods(None, False)[0]), True)


def test_every_untrained_method_is_searched() -> None:
    names, with_resize = find_methods(None, takes_questions=True)
    assert with_resize and {"cover", "anchor", "random", "grid", "pool"} <= set(names)
    assert not any(REGISTRY[name].part for name in names) and "none" not in names and RESIZE not in names


def test_restricted_methods() -> None:
    assert find_methods(["cover", "resize", "cover"], False) == (["cover"], True)
    assert find_methods(["cover"], False) == (["cover"], False)
    for name, message in (("learned", "trained weights"), ("none", "cannot be searched"), ("covr", "Did you mean 'cover'")):
        with pytest.raises(UserError, match=message):
            find_methods([name], False)


@pytest.mark.parametrize("keep", [None, 5])
def test_suggestions_and_seeds_are_plans(space: Space, keep: int | None) -> None:
    space = Space(space.outline, space.methods, True, keep)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seeds = space.seeds()
    for seed in seeds:
        study.enqueue_trial(seed, skip_if_exists=False)
    found = set()
    for number in range(len(seeds) + 60):
        trial = study.ask()
        candidate = space.suggest(trial)
        assert number >= len(seeds) or {key: trial.params[key] for key in seeds[number]} == seeds[number]
        assert Candidate.read(candidate.to_json()) == candidate
        plan = space.plan(candidate, Budget.parse("3"))
        assert Plan.parse(str(plan)) == plan
        found.add((candidate.method, candidate.position))
    assert {method for method, _ in found} == {*space.methods, RESIZE}
    assert ("cover", "*") in found or keep is not None
    if keep is not None:
        assert {position for _, position in found} <= {"", "0", "1", "2"}


def test_full_images_are_not_resized(space: Space) -> None:
    assert str(space.plan(Candidate(4, "cover", "2"), Budget.parse("3"))) == "cover@2:3"
    assert str(space.plan(Candidate(3, "grid", "2", (("rest", "merge"),)), Budget.parse("3"))) == (
        "resize(size=24) + grid@2:3(rest=merge)"
    )
