"""What can be part of a graph or a file, and the reasons of what cannot; the table of the documentation says the same."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tokensieve.errors import UserError
from tokensieve.exporting.limits import check_plan, no_file_reason, no_graph_reason, no_onnx_reason
from tokensieve.methods.registry import REGISTRY, list_methods
from tokensieve.plan import as_plan


def test_reasons_build_on_each_other() -> None:
    for method in list_methods():
        graph, file, onnx = no_graph_reason(method), no_file_reason(method), no_onnx_reason(method)
        assert not graph or file == graph
        assert not file or onnx == file
        assert no_file_reason(method, is_vlm=True) or not file
    assert not any(no_onnx_reason(REGISTRY[name]) for name in ("anchor", "cover", "tome", "evit", "scope", "learned", "resize"))


def test_the_documentation_names_what_cannot_be_exported() -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    for method in list_methods():
        reason = no_onnx_reason(method)
        rows = [line for line in page.splitlines() if line.startswith(f"| `{method.name}` |")]
        assert len(rows) == bool(reason), method
        assert not reason or rows[0].endswith(f" {reason} |")


@pytest.mark.parametrize(
    "plan, decoder, reason",
    [
        ("ats@2", 0, "different number of tokens for each image"),
        ("pixelprune@0", 0, "different number of tokens for each image"),
        ("atc@2:50%", 0, "SciPy"),
        ("anchor@llm.1:50%", 6, "stands in the language model"),
        ("fastv", 6, "stands in the language model"),
        ("cdpruner@out:8", 0, "needs the text of each image"),
        ("dart@out:8", 6, "needs the question about each image"),
        ("sparsevlm", 6, "stands in the language model"),
        ("merger", 6, "stands in the language model"),
        ("random@2:8 + apet@out:4", 0, "no operator; --output tower.pt2 works"),
    ],
)
def test_refusals(plan: str, decoder: int, reason: str) -> None:
    with pytest.raises(UserError, match="cannot be exported") as told:
        check_plan(as_plan(plan), 4, decoder, is_onnx=True)
    assert reason in str(told.value)


def test_what_is_not_refused() -> None:
    check_plan(as_plan("apet@out:8"), 4, 0, is_onnx=False)
    check_plan(as_plan("dart@out:8"), 4, 0, is_onnx=True)
    check_plan(as_plan("fastv@out:8"), 4, 6, is_onnx=True)
    check_plan(as_plan("resize(size=160) + cover@2:8"), 4, 0, is_onnx=True)
    check_plan(as_plan("none"), 4, 6, is_onnx=True)
