"""Suggestions: a typing mistake is answered with the word that was meant, any other word with none."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tokensieve.cli.registry import all_commands
from tokensieve.errors import did_you_mean, nearest

COMMANDS = tuple(all_commands())
FLAGS = ("--plan", "--compare", "--batch_size", "--quiet", "--limit", "--seed", "--output", "--enable_pruning", "--model_type")
METHODS = ("anchor", "cover", "tome", "random", "grid", "pool", "learned", "merger", "cross", "visionzip", "fastv")
MODELS = ("ViT-B-16", "ViT-B-32", "ViT-L-14", "RN50", "coca_ViT-B-32")

NEAR = (
    ("evla", COMMANDS, "eval"),
    ("trian", COMMANDS, "train"),
    ("buidl", COMMANDS, "build"),
    ("method", COMMANDS, "methods"),
    ("vaildate", COMMANDS, "validate"),
    ("--batch-size", FLAGS, "--batch_size"),
    ("--bacth_size", FLAGS, "--batch_size"),
    ("--plans", FLAGS, "--plan"),
    ("-quiet", FLAGS, "--quiet"),
    ("--Output", FLAGS, "--output"),
    ("--enable_prunning", FLAGS, "--enable_pruning"),
    ("--enable_prune", FLAGS, "--enable_pruning"),
    ("ancor", METHODS, "anchor"),
    ("vision_zip", METHODS, "visionzip"),
    ("fast-v", METHODS, "fastv"),
    ("kk", ("m", "k"), "k"),
    ("TI", ("RGB", "TIR"), "TIR"),
    ("vit_b_16", MODELS, "ViT-B-16"),
    ("ViT-B/32", MODELS, "ViT-B-32"),
)

FAR = (
    ("--budget", FLAGS),
    ("--device", FLAGS),
    ("--speedup", FLAGS),
    ("--batch", FLAGS),
    ("--models", ("--methods", "--compare")),
    ("--images", FLAGS),
    ("--top_k", FLAGS),
    ("run", COMMANDS),
    ("test", COMMANDS),
    ("help", COMMANDS),
    ("prune", COMMANDS),
    ("benchmark", ("build", "bench")),
    ("knn", METHODS),
    ("attention", METHODS),
    ("none", METHODS),
    ("x", ("k", "m")),
    ("resnet", MODELS),
    ("", METHODS),
    ("x" * 5000, ("x" * 5001,)),
)


@pytest.mark.parametrize(("word", "options", "meant"), NEAR)
def test_a_typing_mistake_has_a_suggestion(word: str, options: tuple[str, ...], meant: str) -> None:
    assert nearest(word, options) == meant
    assert did_you_mean(word, options) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize(("word", "options"), FAR)
def test_another_word_has_none(word: str, options: tuple[str, ...]) -> None:
    assert nearest(word, options) is None
    assert did_you_mean(word, options) == ""


def distance(first: str, second: str) -> int:
    """The same number of edits, by its recursive definition."""

    @cache
    def of(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        found = min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (first[i - 1] != second[j - 1]))
        if i > 1 and j > 1 and first[i - 2 : i] == second[j - 2 : j][::-1]:
            found = min(found, of(i - 2, j - 2) + 1)
        return found

    return of(len(first), len(second))


def test_the_nearest_of_many_words() -> None:
    rng = random.Random(0)
    for _ in range(200):
        word, *options = ("".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(6))
        away = [distance(word, option) for option in options]
        near = [
            n <= max(1, len(word) // 3) and n < max(len(word), len(option)) for n, option in zip(away, options, strict=True)
        ]
        best = min((n for n, is_near in zip(away, near, strict=True) if is_near), default=None)
        expected = [o for o, n, is_near in zip(options, away, near, strict=True) if is_near and n == best]
        assert nearest(word, options) == (expected[0] if expected else None)
