"""Questions about videos: what the model gets, and an evaluation of the model that ships."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.data import vqa
from tokensieve.data.videos import has_av
from tokensieve.embedded.datasets import EmbeddedClips
from tokensieve.embedded.recipes.llava_video import answers
from tokensieve.errors import UserError
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.loading.vlm import LoadedVlm
from tokensieve.tasks.vqa.answering import answer_questions, ask


@pytest.fixture(scope="module")
def loaded() -> LoadedVlm:
    return load_vlm.load(embedded.LLAVA_VIDEO)


def test_all_frames_reach_the_model(loaded: LoadedVlm) -> None:
    data = vqa.load("embedded-clips", split="val")
    items = [data[0], data[1]]
    inputs = ask(loaded.processor, items)
    pixels = inputs["pixel_values_videos"]  # (B, frames, 3, h, w)
    assert pixels.shape == (2, 8, 3, 112, 112)
    video = items[1].video
    assert video is not None
    mean, std = (
        torch.tensor(getattr(loaded.processor.video_processor, f"image_{name}")).view(3, 1, 1) for name in ("mean", "std")
    )
    for frame, seen in zip(video.frames, pixels[1], strict=True):
        wanted = torch.from_numpy(np.array(frame)).permute(2, 0, 1) / 255
        torch.testing.assert_close(seen, (wanted - mean) / std, atol=1e-4, rtol=0)
    places = inputs["input_ids"] == loaded.model.config.video_token_id
    assert places.sum(1).tolist() == [8 * 49 + 1] * 2
    few = ask(loaded.processor, [data.with_frames(3)[0]])
    assert few["pixel_values_videos"].shape[1] == 3


def test_blind_means_that_nothing_is_seen(loaded: LoadedVlm) -> None:
    data = vqa.load("embedded-clips", split="val")
    seen, grey = (ask(loaded.processor, [data[0]], blind=blind) for blind in (False, True))
    assert grey["pixel_values_videos"].abs().max() < 0.01 < seen["pixel_values_videos"].abs().max()
    assert torch.equal(seen["input_ids"], grey["input_ids"])


def test_the_answers_are_those_of_the_recipe_and_do_not_depend_on_the_batch(loaded: LoadedVlm) -> None:
    data = vqa.load("embedded-clips", split="val", limit=6)
    items = [data[i] for i in range(6)]
    said = answer_questions(loaded.model, loaded.processor, items, batch_size=4, max_new_tokens=4)
    assert said == answers(loaded.model, loaded.processor, EmbeddedClips("val", length=6), batch=1)


def test_a_model_of_images_alone_is_told() -> None:
    images_only = load_vlm.load(embedded.LLAVA)
    with pytest.raises(UserError, match="takes images and no videos: give a video model"):
        ask(images_only.processor, [vqa.load("embedded-clips", split="val")[0]])


def test_clips_are_drawn_by_the_program() -> None:
    data = vqa.load("embedded-clips", split="val")
    assert len(data) == 1000 and data[4].kind == "count" and data[4].image == data[4].video.frames[0]  # type: ignore[union-attr]
    assert data.with_frames(8).fingerprint == data.fingerprint != data.with_frames(4).fingerprint
    with pytest.raises(UserError, match="have 8 frames"):
        data.with_frames(9)
    with pytest.raises(UserError, match="has no files"):
        vqa.load("embedded-clips", questions="a.json")
    with pytest.raises(UserError, match="are about images"):
        vqa.load("embedded-questions").with_frames(4)


def test_the_command_answers_with_the_video_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--limit", "5", "--num_workers", "0", "--plan", "none", "--compare", "random@llm.1:25%", "--output", "out/"]
    assert main(["eval", "--task", "vqa", "--dataset", "embedded-clips", *flags]) == 0
    rows = [json.loads(path.read_text()) for path in sorted(Path("out").glob("*.json"))]
    tokens = {row["reduction"]["plan"]: (row["reduction"]["tokens_in"], row["reduction"]["tokens_out"]) for row in rows}
    assert tokens["random@llm.1:25%"] == (392, 98)
    assert all(row["model"] == embedded.LLAVA_VIDEO and "vqa_score_direction" in row["metrics"] for row in rows)


@pytest.mark.skipif(not has_av(), reason="PyAV is not installed: pip install tokensieve[video]")
def test_videos_that_cannot_be_decoded_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.clip_files import write_video

    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_video(tmp_path / f"{name}.mp4", range(0, 250, 10))
    (tmp_path / "b.mp4").write_bytes(b"broken")
    rows = [f"{name}.mp4,what does the red circle do?,stay" for name in "abc"]
    (tmp_path / "questions.csv").write_text("\n".join(["video,question,answer", *rows]))
    flags = ["--model", embedded.LLAVA_VIDEO, "--num_workers", "0", "--plan", "none", "--max_broken", "0.5", "--frames", "4"]
    assert main(["eval", "--dataset", f"videos:{tmp_path}", *flags, "--output", "made.json"]) == 0
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["run"]["n_samples"] == 2 and made["run"]["n_skipped"] == 1 and made["reduction"]["tokens_in"] in (196, 197)
    assert "b.mp4 (question 3): it cannot be decoded" in capsys.readouterr().err


def test_a_question_about_several_kinds_is_not_mixed(loaded: LoadedVlm) -> None:
    item = vqa.load("embedded-clips", split="val")[0]
    with pytest.raises(UserError, match="some have a video"):
        ask(loaded.processor, [item, replace(item, video=None)])
