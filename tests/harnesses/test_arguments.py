"""Plans in --model_args, in forms that survive the parsing of both harnesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokensieve import UserError, embedded
from tokensieve.harnesses.arguments import model_path, read_plan, read_seed


def parse_by_commas(text: str) -> dict[str, str]:
    """As lm-eval's simple_evaluate does: at every comma, then at the first equals sign."""
    return dict(argument.split("=", 1) for argument in text.split(","))


@pytest.mark.parametrize(
    "plan",
    [
        "anchor@out(k=5;m=20)",
        "tome@*.attn:-2(inflect=-1;sizes=no) + anchor@out(k=5;m=20;rest=merge)",
        "grid@2;4:9 + cover@out:4",
    ],
)
def test_semicolons_survive(plan: str) -> None:
    arguments = parse_by_commas(f"pretrained=x,plan={plan},seed=3")
    assert str(read_plan(arguments["plan"])) == str(read_plan(plan.replace(";", ","))) and arguments["seed"] == "3"


def test_quotes_and_none() -> None:
    assert str(read_plan("'cover@out:25%'")) == str(read_plan('"cover@out:25%"')) == "cover@out:25%"
    assert read_plan(None).is_identity and read_plan("none").is_identity


def test_files(tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("anchor@out(k=5,m=20)\n")
    (tmp_path / "tune.json").write_text('{"plan": "grid@out:7"}')
    assert str(read_plan(f"@{tmp_path}/plan.txt")) == "anchor@out(k=5,m=20)"
    assert str(read_plan(f"@{tmp_path}/tune.json")) == "grid@out:7"
    with pytest.raises(UserError, match="read from a file"):
        read_plan(f"@{tmp_path}/other.txt")


@pytest.mark.parametrize("given", [3, True, ["grid@2:4"], "grit@2:4"])
def test_what_is_no_plan(given: object) -> None:
    with pytest.raises(UserError):
        read_plan(given)


def test_seeds_and_models() -> None:
    assert read_seed("7") == 7
    with pytest.raises(UserError, match="whole number"):
        read_seed("x")
    assert model_path("some/model") == "some/model" and Path(model_path(embedded.LLAVA), "config.json").is_file()
