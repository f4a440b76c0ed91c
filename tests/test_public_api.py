"""The front door: public names, their types and docstrings, errors for wrong arguments, and no torch before it is needed."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokensieve
from tests.support.paths import ROOT
from tokensieve import UserError

USER_CODE = '''
"""What a user writes, with the types that an editor shows."""

from pathlib import Path
from types import ModuleType
from typing import assert_type

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve import Method, Plan, Reduction, UserError, View, method


def prune(model: nn.Module, images: Tensor) -> list[tuple[str, int, int]]:
    plan = Plan.parse("anchor@6(k=10,m=50) + pool@9:16")
    assert_type(plan, tokensieve.Plan)
    assert_type(str(plan.steps[0].method.name), str)
    budget = plan.steps[1].budget
    kept = 0 if budget is None else assert_type(budget.count(60), int)
    with tokensieve.apply(model, plan, seed=kept, weights=Path("part.safetensors")) as handle:
        assert_type(handle, tokensieve.Handle)
        model(images)
        assert_type(handle.kept, Tensor | None)
        assert_type(handle.notes, list[str])
        return [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger]


@method(summary="the tokens with the largest norm", needs=("attention",))
def largest(view: View, keep: int, *, power: float = 1.0) -> Reduction:
    scores = view.tokens.float().norm(dim=-1) ** power
    assert_type(view.attention is None, bool)
    return Reduction.keep(scores.topk(keep).indices, view.n, scores=scores)


def check(view: View) -> Tensor:
    reduction = largest(view, 5, power=2.0)  # the decorator keeps the type of the function
    assert_type(reduction, Reduction)
    return assert_type(reduction.apply(view.tokens), Tensor)


def names() -> dict[Plan, list[str]]:
    methods: list[Method] = tokensieve.list_methods()
    assert_type(tokensieve.load_plugin("my_methods.py"), ModuleType)
    try:
        return {Plan.parse("none"): [m.name for m in methods if m.recipe or m.paper]}
    except UserError as error:
        raise SystemExit(str(error)) from error


def others(model: nn.Module, encoder: tokensieve.PrunedVisionEncoder, tokens: Tensor) -> tokensieve.Handle:
    reducers = tokensieve.Reducers.from_pretrained("folder")
    assert_type(reducers, tokensieve.Reducers)
    assert_type(tokensieve.__version__, str)
    assert_type(encoder(tokens) is None, bool)
    sparse: tokensieve.TokenSparse = tokensieve.TokenSparse(dim=int(torch.tensor(8)))
    print(sparse, tokensieve.Budget.parse("40%").kind, tokensieve.Uncuttable("reason").reason)
    return tokensieve.apply_pruning_to_model(model, k_anchors=10)
'''

WRONG = {  # line of code -> the mypy error it must have
    "tokensieve.aply": "attr-defined",
    "tokensieve.apply(model, 3)": "arg-type",
    "tokensieve.Plan.parse(None)": "arg-type",
    "tokensieve.Budget('kep', Fraction(1))": "arg-type",
    "tokensieve.load_plugin(3)": "arg-type",
    "tokensieve.method(sumary='x')": "call-arg",
}


def test_importing_needs_no_torch():
    code = "import sys, tokensieve; tokensieve.UserError; tokensieve.load_plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_names_at_run_time_are_those_for_type_checkers():
    tree = ast.parse(Path(tokensieve.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared == {name: f"tokensieve.{module}" for name, module in tokensieve._MODULES.items()}
    assert set(tokensieve.__all__) == {"__version__", *declared} == set(dir(tokensieve))
    for name in tokensieve.__all__:
        assert getattr(tokensieve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        tokensieve.aply  # noqa: B018


def test_the_version_is_in_one_place():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'attr = "tokensieve.__version__"' in text and not re.search(r'^version *= *"', text, re.MULTILINE)


@pytest.mark.parametrize("name", ["apply", "Handle", "Plan", "Method", "View", "Reduction", "method", "load_plugin"])
def test_public_names_are_documented(name):
    documented = inspect.getdoc(getattr(tokensieve, name))
    assert documented and len(documented.splitlines()[0]) > 30 and "TODO" not in documented
    for part in {"apply": ("Args:", "Returns:", "Raises:", "Example:"), "method": ("Args:", "Returns:", "Example:")}.get(
        name, ()
    ):
        assert part in documented


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "anchor@4:60"), r"a torch\.nn\.Module, not 'model' \(str\)"),
        ((None, "anchor@4:60"), r"not None \(NoneType\)"),
        ((torch.nn.Linear(2, 2), 3), r"a plan is a text, .* not 3 \(int\)"),
        ((torch.nn.Linear(2, 2), None), "not None"),
        ((torch.nn.Linear(2, 2), ["anchor@4:60"]), "a plan is one text"),
        ((torch.nn.Linear(2, 2), "anchor@4 60"), "Did you mean 'anchor@4:60'"),
    ],
)
def test_wrong_arguments_of_apply_are_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        tokensieve.apply(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "x"}, r"seed is a whole number, not 'x' \(str\)"),
        ({"seed": 1.5}, r"not 1\.5 \(float\)"),
        ({"context": [1]}, r"context is a mapping of names to values, not \[1\] \(list\)"),
        ({"weights": 3}, r"weights are a file, .* not 3 \(int\)"),
        ({"weights": [3]}, r"weights are a file, .* not \[3\] \(list\)"),
        ({"weights": {3: torch.nn.Identity()}}, r"weights are a file, .* not \{3: Identity\(\)\} \(dict\)"),
    ],
)
def test_wrong_options_of_apply_are_user_errors(tiny_clip, arguments, message):
    model, _, _ = tiny_clip.make()
    with pytest.raises(UserError, match=message):
        tokensieve.apply(model, "anchor@2(k=2,m=4)", **arguments)


TOKENS, ATTENTION = torch.randn(1, 25, 8), torch.nn.MultiheadAttention(8, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tokensieve.apply_pruning_to_model(torch.nn.Linear(2, 2), k_anchors=2.5), "k=2.5 is not a whole number"),
        (lambda: tokensieve.apply_pruning_to_model(torch.nn.Linear(2, 2), prune_layer="2"), "layers are whole numbers"),
        (lambda: tokensieve.apply_pruning_to_model(torch.nn.Linear(2, 2), rest="merg"), "rest=merg is not one of"),
        (lambda: tokensieve.apply_pruning_to_model(3), r"a torch\.nn\.Module, not 3 \(int\)"),
        (lambda: tokensieve.PrunedVisionEncoder(3), r"a torch\.nn\.Module, not 3 \(int\)"),
        (lambda: tokensieve.select_anchor_tokens(TOKENS, k=2.5, attention=ATTENTION), "k=2.5 is not a whole number"),
        (lambda: tokensieve.select_anchor_tokens(3, attention=ATTENTION), r"shape \(B, 1\+N, D\), not 3 \(int\)"),
        (lambda: tokensieve.select_anchor_tokens(TOKENS[0], attention=ATTENTION), r"not torch\.float32 of shape \(25, 8\)"),
        (lambda: tokensieve.select_anchor_tokens(TOKENS.long(), attention=ATTENTION), r"not torch\.int64"),
        (lambda: tokensieve.select_anchor_tokens(TOKENS, attention=3), r"attention is 3 \(int\); pass a block"),
        (lambda: tokensieve.compute_importance_scores(TOKENS, 3, attention=ATTENTION), r"anchors are .* not 3 \(int\)"),
        (lambda: tokensieve.compute_diversity_scores("a", torch.zeros(1, 2)), r"tokens are .* not 'a' \(str\)"),
        (lambda: tokensieve.compute_diversity_scores(TOKENS, torch.zeros(1, 2)), r"\(B, k\), not torch\.float32"),
        (lambda: tokensieve.compute_diversity_scores(TOKENS, torch.tensor([1])), r"not torch\.int64 of shape \(1,\)"),
        (lambda: tokensieve.select_tokens_with_scoring([3], attention=ATTENTION), r"tokens are .* not \[3\] \(list\)"),
        (lambda: tokensieve.apply_token_selection("a"), r"\(B, 1\+N, D\) or \(B, D\), not 'a' \(str\)"),
        (lambda: tokensieve.apply_token_selection(torch.zeros(2), attention=ATTENTION), r"of shape \(2,\)"),
        (lambda: tokensieve.TokenAggregation(dim="a"), r"dim is a whole number of at least 1, not 'a' \(str\)"),
        (lambda: tokensieve.TokenAggregation(keeped_patches=0), "keeped_patches is a whole number of at least 1, not 0"),
        (lambda: tokensieve.TokenAggregation(dim_ratio="a"), "dim_ratio is a number, not 'a'"),
        (lambda: tokensieve.TokenSparse(dim=1.5), "dim is a whole number of at least 1, not 1.5"),
        (lambda: tokensieve.TokenSparse(beta=None), "beta is a number, not None"),
    ],
)
def test_wrong_types_of_the_other_functions_are_user_errors(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 3}, r"samples are a tensor of whole numbers .* not 3 \(int\)"),
        ({"samples": [1, 2, 3]}, r"not \[1, 2, 3\] \(list\)"),
        ({"samples": torch.zeros(2)}, r"not torch\.float32 of shape \(2,\)"),
        ({"samples": torch.ones(2, dtype=torch.bool)}, r"not torch\.bool"),
        ({"samples": torch.arange(2)[None]}, r"not torch\.int64 of shape \(1, 2\)"),
        ({"context": 3}, r"context is a mapping of names to values, not 3 \(int\)"),
    ],
)
def test_wrong_options_of_a_call_are_user_errors(tiny_clip, options, message):
    model, _, _ = tiny_clip.make()
    with tokensieve.apply(model, "random@2:4") as handle, pytest.raises(UserError, match=message):
        handle.call(**options)


@pytest.mark.parametrize("plan", ["random@2:4", "random@out:4"])
def test_samples_are_as_many_as_the_batch_has(tiny_clip, plan):
    model, _, _ = tiny_clip.make()
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        with handle.call(samples=torch.arange(3)), pytest.raises(UserError, match="has 3 indices, but the batch has 2 samples"):
            model.encode_image(images)
        with handle.call(samples=torch.tensor([7, 8], dtype=torch.int32)):
            model.encode_image(images)
        assert handle.samples is not None and handle.samples.tolist() == [7, 8]


def test_an_observer_has_the_methods_of_one(tiny_clip):
    model, _, _ = tiny_clip.make()
    with tokensieve.apply(model, "random@2:4") as handle:
        with pytest.raises(UserError, match=r"plan_work and model_work, or it is None; got 3 \(int\)"):
            handle.observer = 3
        handle.observer = None


@pytest.mark.slow
def test_user_code_has_types(tmp_path):
    from mypy import api

    (tmp_path / "user_code.py").write_text(USER_CODE)
    body = "".join(f"    {line}\n" for line in WRONG)
    head = "from fractions import Fraction\nimport tokensieve\nfrom torch import nn\n\ndef wrong(model: nn.Module) -> None:\n"
    (tmp_path / "wrong.py").write_text(head + body)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT / 'src'}\n[mypy-open_clip.*]\nignore_missing_imports = True\n"
    )
    flags = ["--strict", "--python-version", "3.11", "--follow-imports", "silent", "--no-error-summary"]
    flags += ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(ROOT / ".mypy_cache" / "user_code")]
    report, errors, _ = api.run([*flags, str(tmp_path / "user_code.py"), str(tmp_path / "wrong.py")])
    assert not errors
    found = [line for line in report.splitlines() if ": error: " in line]
    assert [line for line in found if "user_code.py" in line] == []
    first = len(head.splitlines()) + 1
    wanted = [(str(first + number), kind) for number, kind in enumerate(WRONG.values())]
    assert [re.search(r"wrong\.py:(\d+): error: .*\[(.*)\]", line).groups() for line in found] == wanted
