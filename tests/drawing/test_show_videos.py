"""`show` of videos: a sheet of all frames, a moving picture, and which patches of each frame are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokensieve
from tests.support.show_arguments import arguments
from tokensieve import embedded
from tokensieve.data import vqa
from tokensieve.data.videos import has_av
from tokensieve.drawing import show, show_videos
from tokensieve.drawing.panels import tints
from tokensieve.drawing.stages import PICKED
from tokensieve.errors import UserError
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.plan import Plan
from tokensieve.tasks.vqa.answering import answer, ask


def test_each_frame_shows_what_is_kept_of_it() -> None:
    loaded, item = load_vlm.load(embedded.LLAVA_VIDEO), vqa.load("embedded-clips")[3]
    plans = [Plan.parse("random@llm.0:25%"), Plan.parse("none")]
    heading, (cut, full) = show_videos.draw_plans(loaded, plans, "clip", item, 3)
    assert heading.startswith(f"clip: {item.question} Full model: ") and f"expected: {item.answer!r}" in heading
    with torch.no_grad(), tokensieve.apply(loaded.model, plans[0]) as handle, handle.call(samples=torch.tensor([3])):
        answer(loaded.model, loaded.processor, ask(loaded.processor, [item]))
    kept = np.zeros(8 * 49, bool)
    kept[handle.kept[0].numpy()] = True
    drawn = np.concatenate([band.stages[0].states >= PICKED for band in cut.bands])
    assert kept.sum() == 98 and np.array_equal(drawn, kept)
    assert cut.notes[0] == "392 → 98 tokens, before LLM layer 0"
    assert len(full.bands) == 8 and not any(band.stages for band in full.bands)
    assert [band.name for band in cut.bands] == [f"{second}.0 s" for second in range(8)]
    assert item.video is not None and all(band.image == frame for band, frame in zip(cut.bands, item.video.frames, strict=True))


def test_a_token_has_one_colour_in_all_frames() -> None:
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 9, 3 * 4 * 5))
    joint = np.bincount(groups)[groups] > 1
    colours = tints(groups, joint, (3, 4, 5))
    for group in np.unique(groups[joint]):
        assert len(set(colours[groups == group])) == 1
    space = groups.reshape(3, 4, 5)
    beside = [(space[1:], space[:-1]), (space[:, 1:], space[:, :-1]), (space[:, :, 1:], space[:, :, :-1])]
    colour_of = dict(zip(groups.tolist(), colours.tolist(), strict=True))
    for one, other in beside:
        for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True):
            assert a == b or not (colour_of[a] and colour_of[a] == colour_of[b])


def test_a_sheet_and_a_moving_picture_are_written(tmp_path: Path) -> None:
    output = tmp_path / "kept.png"
    args = arguments(["embedded-clips:2"], plan="cover@llm.1:40", compare=["random@llm.0:10%"], output=str(output), frames=3)
    assert show.run(args) == [output, tmp_path / "kept.gif"]
    with Image.open(tmp_path / "kept.gif") as moving, Image.open(output) as sheet:
        assert moving.n_frames == 3 and moving.info["duration"] == show_videos.STILL
        assert sheet.height > 3 * 200
    for wrong, told in (
        (["embedded-clips:5000"], "there are the clips embedded-clips:0 to embedded-clips:999"),
        (["a.mp4"], "cannot"),
    ):
        with pytest.raises(UserError, match=told):
            show.run(arguments(wrong, output=str(output)))
    with pytest.raises(UserError, match="one video at a time"):
        show.run(arguments(["embedded-clips:1", "embedded-clips:2"], output=str(output)))


@pytest.mark.skipif(not has_av(), reason="PyAV is not installed: pip install tokensieve[video]")
def test_a_file_is_drawn_with_a_question_of_its_own(tmp_path: Path) -> None:
    from tests.support.clip_files import write_video

    path = write_video(tmp_path / "a.mp4", range(0, 250, 10))
    output = tmp_path / "kept.png"
    args = arguments(
        [str(path)], plan="random@llm.1:50%", output=str(output), question="what does the red circle do?", frames=2
    )
    assert show.run(args) == [output, tmp_path / "kept.gif"]
