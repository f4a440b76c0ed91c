"""The re-identification model that ships, on the people that are drawn for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.reid import loading


def test_what_ships_is_small_and_says_how_it_was_made() -> None:
    for name in loading.OURS:
        folder = embedded.reid_path(name)
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        assert (folder / "model.safetensors").stat().st_size < 4_000_000
        assert card["recipe"]["SOLVER"]["SEED"] == card["seed"] and len(card["loss_curve"]) > 3
        assert card["accuracy"]["val"]["mAP"] > 0.4
        assert "/" not in card["recipe"]["MODEL"]["PRETRAINED"]  # no path of the machine that made it


def test_the_plan_it_was_trained_with_is_its_own() -> None:
    model = loading.load(embedded.REID).model
    assert model.plan == "sdtps@out" and model.grid == (16, 8) and model.modalities == ("RGB", "NI", "TI")
    with torch.no_grad(), tokensieve.apply(model, model.plan) as handle:
        model.encode({name: torch.zeros(1, 3, 128, 64) for name in model.modalities})
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(128, 26)]


def test_the_one_with_a_merge_inside_saves_compute() -> None:
    model = loading.load(embedded.REID_MERGE).model
    assert model.plan == "sdtps@3(aggregation=merge,norm=2)"
    with torch.no_grad(), tokensieve.apply(model, model.plan) as handle:
        model.encode({name: torch.rand(1, 3, 128, 64) for name in model.modalities})
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("3", 128, 26)]


@pytest.mark.slow
def test_it_finds_people_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the identities that chose it; the card has what it reached before its weights were rounded to 16 bits."""
    monkeypatch.setenv("TOKENSIEVE_CACHE", str(tmp_path))
    flags = [
        "--task",
        "reid",
        "--split",
        "val",
        "--modalities",
        "RGB,NI,TI",
        "RGB",
        "--plan",
        "sdtps@out",
    ]
    assert main(["eval", *flags, "--num_workers", "0", "--quiet", "--output", str(tmp_path / "{plan}.json")]) == 0
    rows = {row["reduction"]["plan"]: row for row in (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))}
    card = json.loads((embedded.reid_path() / "card.json").read_text(encoding="utf-8"))
    numbers = rows["sdtps@out"]["metrics"]
    assert numbers["mAP"] == pytest.approx(card["accuracy"]["val"]["mAP"], abs=0.01)
    assert numbers["mAP"] > numbers["mAP_RGB"] + 0.1  # the modalities complement each other
