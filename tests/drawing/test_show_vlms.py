"""`show` and `Handle.picture` on vision-language models of every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokensieve
from tests.support.show_arguments import arguments
from tests.support.varying_vlms import save_varying
from tests.support.vlm_models import IMAGE, VARYING, relative
from tokensieve.drawing import show
from tokensieve.drawing.band import make_band
from tokensieve.drawing.stages import DROPPED
from tokensieve.errors import UserError

PLAN = "anchor@llm.1:50%(k=2)"


@pytest.mark.parametrize("family", VARYING)
def test_every_token_has_its_place_in_the_image(family: str) -> None:
    model, batch = relative(family)
    counts = (batch["input_ids"] == IMAGE).sum(1).tolist()
    with torch.no_grad(), tokensieve.apply(model, PLAN) as handle:
        model(**batch)
    grids = [handle.token_grid(number) for number in range(len(counts))]
    ends = [grid.rows if grid is not None and grid.before else 0 for grid in grids]  # a line end after each row of tiles
    for grid, count, n_ends in zip(grids, counts, ends, strict=True):
        assert grid is not None
        tokens = grid.indices().tolist()
        assert len(set(tokens)) == grid.rows * grid.columns and max(tokens) + 1 == count - n_ends
    with pytest.raises(UserError, match="run the model with this image alone"):
        handle.picture(Image.new("RGB", (48, 48)))


@pytest.mark.parametrize("family", VARYING)
def test_a_folder_is_drawn_without_its_type(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_varying(tmp_path / "model", family)
    (tmp_path / "cats").mkdir()
    sizes = {"a.png": (96, 64), "b.png": (60, 90)}
    for name, size in sizes.items():
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(
            tmp_path / "cats" / name
        )
    images = [str(tmp_path / "cats" / name) for name in sizes]
    output = tmp_path / "kept.png"
    args = arguments(
        images, model=folder, question="what is red ?", plan=PLAN, compare=["random@llm.2:30%"], output=str(output)
    )
    assert show.run(args) == [output]
    with Image.open(output) as drawn:
        assert drawn.height > 4 * 200  # a row for each image and plan
    with pytest.raises(UserError, match="give --question"):
        show.run(arguments(images, model=folder, plan=PLAN, output=str(output)))
    in_tower = tmp_path / "tower.png"
    args = arguments(images[:1], model=folder, question="what is red ?", plan="grid@1:10", output=str(in_tower))
    assert show.run(args) == [in_tower]


@pytest.mark.parametrize("plan", [PLAN, "grid@1:9"])
def test_what_is_drawn_is_what_is_kept(plan: str) -> None:
    model, batch = relative("qwen2_5_vl")
    alone = {name: batch[name][:1] for name in ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids")}
    alone["pixel_values"] = batch["pixel_values"][: int(batch["image_grid_thw"][0].prod())]
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        model(**alone)
    band = make_band(handle, Image.new("RGB", (64, 64)))
    assert band.grid == (4, 4) and len(band.patches) == 16
    kept = handle.kept
    assert kept is not None
    assert np.flatnonzero(band.stages[0].states > DROPPED).tolist() == kept[0].tolist()
    assert handle.picture(Image.new("RGB", (64, 64))).png()[:4] == b"\x89PNG"
