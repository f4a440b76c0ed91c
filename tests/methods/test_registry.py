"""Every registered method passes the conformance checks; the checks themselves find what they are for."""

import inspect
import re
from typing import Literal

import pytest
import torch

from tests.support.paths import ROOT
from tokensieve import Reduction, UserError, list_methods
from tokensieve.methods.controls import cells, centres
from tokensieve.methods.registry import REGISTRY, describe, method
from tokensieve.scoring import top
from tokensieve.testing import check_method, decide, make_view


@pytest.mark.parametrize("name", [m.name for m in list_methods() if not m.on_image])
def test_conforms(name):
    check_method(name)


def test_registry_names_are_file_worthy_and_described():
    for m in list_methods():
        assert m.name == m.decide.__name__ and m.summary
    assert {"anchor", "none", "random", "grid", "pool"} <= set(REGISTRY)


def test_trained_methods_name_the_command_that_trains_them():
    for m in list_methods():
        assert (m.part is not None) == bool(m.recipe)
        if m.recipe:
            assert m.recipe.startswith("tokensieve train ") and (ROOT / m.recipe.split()[-1]).is_file()


def test_papers_are_citations_or_nothing():
    for m in list_methods():
        assert not m.paper or re.search(r"[A-Z]\w+.*, (19|20)\d\d", m.paper)


@pytest.mark.parametrize("name", sorted(name for name, each in REGISTRY.items() if each.paper and each.name != "sdtps"))
def test_the_text_of_a_published_method_names_paper_place_and_licence(name):
    """sdtps is an adaptation to other inputs; its paper's code is not what it follows."""
    text = inspect.getmodule(REGISTRY[name].decide).__doc__
    for number in re.findall(r"arXiv:\d+\.\d+", REGISTRY[name].paper):
        assert number in text
    assert re.search(r"\bPlaces?\b|`\w+@|before layers", text), f"{name}: where do the authors put it?"
    assert re.search(r"licence|Apache-2\.0|\bMIT\b|CC-BY", text), f"{name}: what is the licence of the released code?"


def test_a_new_method_is_one_function():
    try:

        @method(summary="largest norm first")
        def norm_of_tokens(view, keep, *, power: float = 1.0):
            return Reduction.keep(top(view.tokens.float().norm(dim=-1) ** power, keep), view.n)

        check_method("norm_of_tokens")
        from tokensieve import Plan

        assert str(Plan.parse("norm_of_tokens@2:50%(power=2.0)")) == "norm_of_tokens@2:50%(power=2.0)"
    finally:
        REGISTRY.remove("norm_of_tokens")


def test_a_taken_name_is_refused():
    with pytest.raises(UserError, match="registered already"):

        @method(summary="another")
        def grid(view, keep):
            return Reduction.keep(torch.zeros(1, 1, dtype=torch.long), view.n)


def word_as_number(view, keep, *, k: int = "a"):
    return view


def number_as_word(view, keep, *, mode: Literal["a", "b"] = 3):
    return view


def without_keep(view, *, power: float = 1.0):
    return view


def one_more(view, keep, power):
    return view


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: method(without_keep), r"write @method\(\.\.\.\) with parentheses"),
        (lambda: method(needs="attention")(one_too_many), r"needs is a tuple of names, such as needs=\('attention',\), not"),
        (lambda: method(needs=3)(one_too_many), r"needs is a tuple of names, .* not 3 \(int\)"),
        (lambda: method(needs=("atention",))(one_too_many), "known are"),
        (lambda: method()(lambda view, keep: view), "'<lambda>' is none; write it as def name"),
        (lambda: method()(3), r"a method is a function, .* not 3 \(int\)"),
        (lambda: method()(without_keep), r"called as without_keep\(view, keep\), but its function is without_keep\(view, \*"),
        (lambda: method()(one_more), r"called as one_more\(view, keep\), but its function is one_more\(view, keep, power\)"),
        (lambda: method()(word_as_number), r"the option 'k' is 'a' \(str\); it must be a whole number"),
        (lambda: method()(number_as_word), r"the option 'mode' is 3 \(int\); it must be one of a, b"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, message):
    before = set(REGISTRY)
    with pytest.raises(UserError, match=message):
        declare()
    assert set(REGISTRY) == before


def first_image_for_all(view, keep):
    """The trap: one image's choice for the whole batch."""
    return Reduction.keep(top(view.tokens.float().norm(dim=-1)[:1], keep).expand(len(view.tokens), -1), view.n)


def one_too_many(view, keep):
    return Reduction.keep(top(view.tokens.float().norm(dim=-1), min(keep + 1, view.n)), view.n)


def not_repeatable(view, keep):
    return Reduction.keep(top(torch.rand(view.tokens.shape[:2]), keep), view.n)


def unweighted_sum(view, keep):
    chosen = top(view.tokens.float().norm(dim=-1), keep)
    return Reduction(index=chosen, n=view.n, weight=torch.ones(len(chosen), keep, view.n), sizes=torch.ones(len(chosen), keep))


@pytest.mark.parametrize("bad", [first_image_for_all, one_too_many, not_repeatable, unweighted_sum], ids=lambda f: f.__name__)
def test_the_checks_find(bad):
    with pytest.raises(AssertionError):
        check_method(describe(bad, selects=bad is not unweighted_sum))


@pytest.mark.parametrize("grid", [(14, 14), (16, 8), (7, 7), (1, 9), (9, 1)])
def test_cells_partition_the_image(grid):
    n = grid[0] * grid[1]
    for keep in range(1, n + 1):
        cell = cells(grid, n, keep)
        counts = cell.bincount(minlength=keep)
        assert len(counts) == keep and (counts > 0).all()
        middle = centres(grid, cell, keep)
        assert torch.equal(cell[middle], torch.arange(keep))


def test_cells_of_an_even_split_are_equal_squares():
    assert cells((4, 4), 16, 4).reshape(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_random_differs_between_images_and_seeds():
    view = make_view(batch=8)
    chosen = decide(REGISTRY["random"], view, 8).index
    assert len({tuple(row) for row in chosen.tolist()}) > 1
    view.seed = 5
    assert not torch.equal(chosen, decide(REGISTRY["random"], view, 8).index)


def test_the_list_of_methods_is_printed_one_on_a_line():
    lines = repr(list_methods()).splitlines()
    assert len(lines) == len(list_methods()) and lines[0].startswith("anchor ") and REGISTRY["anchor"].summary in lines[0]


def test_the_checks_say_that_a_method_passed(capsys):
    check_method("random")
    said = capsys.readouterr().out
    assert re.fullmatch(r"random: passed, \d+ cases \(.*rest=drop, merge, fuse\) and bfloat16\n", said)
