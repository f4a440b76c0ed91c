"""Videos: which frames are read, and what is said of files that are none, are damaged, or are unusual."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.data.videos import Video, has_av, open_video, read_header
from tokensieve.errors import UserError

needs_av = pytest.mark.skipif(not has_av(), reason="PyAV is not installed: pip install tokensieve[video]")
if has_av():
    from tests.support import clip_files

NOISE = 6  # by which lossy coding may change a grey


def greys(video: Video) -> list[int]:
    """The grey in the middle of every frame."""
    return [int(np.asarray(frame)[frame.height // 2, frame.width // 2].mean()) for frame in video.frames]


@needs_av
def test_frames_are_spread_evenly_over_the_time(tmp_path: Path) -> None:
    path = clip_files.write_video(tmp_path / "a.mp4", range(0, 250, 5))  # 50 frames, ten a second: frame i has the grey 5 i
    video = open_video(path, 8)
    wanted = [
        int((2 * i + 1) / 16 * 50) for i in range(8)
    ]  # the frames that are shown in the middle of eighths of five seconds
    assert video.times == pytest.approx([i / 10 for i in wanted])
    assert np.abs(np.array(greys(video)) - 5 * np.array(wanted)).max() <= NOISE
    header = read_header(path)
    assert header.seconds == pytest.approx(5) and not header.is_turned and not header.has_variable_rate
    assert video.frames[0].size == clip_files.SIZE


@needs_av
def test_a_variable_rate_counts_by_time_not_by_frames(tmp_path: Path) -> None:
    path = clip_files.write_video(tmp_path / "a.mp4", [0, 60, 120, 180, 240], [0, 0.1, 0.2, 0.3, 6.0])
    assert np.abs(np.array(greys(open_video(path, 4))) - [180, 180, 180, 180]).max() <= NOISE  # one frame is shown for 5.7 s
    early, *_, late = greys(open_video(path, 100))
    assert early <= NOISE and late >= 240 - NOISE


@needs_av
def test_frames_are_turned_upright(tmp_path: Path) -> None:
    path = clip_files.write_video(tmp_path / "a.mp4", [200] * 5)
    assert np.asarray(open_video(path, 1).frames[0])[:, :10].max() <= 2 * NOISE  # the black third is on the left
    clip_files.turn_by_header(path)
    frame = open_video(path, 1).frames[0]
    assert frame.size == clip_files.SIZE[::-1]
    assert np.asarray(frame)[:10].max() <= 2 * NOISE  # by a quarter, clockwise: it is at the top
    assert np.asarray(frame)[-10:].min() >= 200 - 2 * NOISE


@needs_av
def test_of_a_long_video_only_what_is_near_is_decoded(tmp_path: Path) -> None:
    times = [7.2 * i for i in range(500)]  # an hour, a key frame every 86 seconds
    path = clip_files.write_video(tmp_path / "a.mp4", [i // 2 for i in range(500)], times)
    video = open_video(path, 4)
    wanted = [int((7.2 * 499 + 0.1) * (2 * i + 1) / 8 / 7.2) for i in range(4)]  # the last frame is shown for 0.1 s
    assert video.times == pytest.approx([7.2 * i for i in wanted], abs=0.01)
    assert np.abs(np.array(greys(video)) - [i // 2 for i in wanted]).max() <= NOISE
    (tmp_path / "questions.csv").write_text("video,question,answer\na.mp4,what?,yes\n")
    remark = next(line for line in vqa.load(f"videos:{tmp_path}").check() if "longer" in line)
    assert "1 videos are longer than 10 minutes, and 8 frames of each are shown: a.mp4 (60 min)" in remark


@needs_av
def test_turned_videos_and_variable_rates_are_counted_and_told(tmp_path: Path) -> None:
    clip_files.write_video(tmp_path / "even.mp4", [1] * 30, [i / 29.97 for i in range(30)])  # 33 and 34 ticks of its clock
    for name in ("uneven.mp4", "both.mov"):
        clip_files.write_video(tmp_path / name, [1, 2, 3, 4, 5], [0, 0.1, 0.2, 0.3, 6.0])
    for name in ("turned.mp4", "both.mov"):
        clip_files.turn_by_header(clip_files.write_video(tmp_path / name, [1] * 5) if "turned" in name else tmp_path / name)
    (tmp_path / "broken.mp4").write_bytes(b"broken")
    names = ("even.mp4", "uneven.mp4", "both.mov", "turned.mp4", "broken.mp4")
    (tmp_path / "questions.csv").write_text("\n".join(["video,question,answer", *(f"{name},what?,yes" for name in names)]))
    remarks = [line.partition("): ")[2] for line in vqa.load(f"videos:{tmp_path}").check()]
    assert remarks == [
        "2 videos are turned upright, as their headers say: both.mov, turned.mp4",
        "2 videos have a variable rate, and their frames are picked by time: uneven.mp4, both.mov",
    ]


@needs_av
def test_a_single_frame_is_shown_again(tmp_path: Path) -> None:
    video = open_video(clip_files.write_video(tmp_path / "a.mp4", [100]), 3)
    assert video.times == (0, 0, 0) and video.rate == 1
    assert np.abs(np.array(greys(video)) - 100).max() <= NOISE


@needs_av
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.mp4", "No such file"),
        ("empty.mp4", "the file is empty"),
        ("text.mp4", "it cannot be decoded"),
        ("cut.mp4", "it cannot be decoded"),
        ("cut.mkv", "it ends after"),
        ("sound.mp4", "it has no video"),
        ("codec.mkv", "no codec that is known"),
        ("playlist.mp4", "it cannot be decoded"),
        ("folder.mp4", "not a regular file|Is a directory"),
    ],
)
def test_a_file_that_is_no_whole_video_is_broken(name: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.startswith("cut"):
        clip_files.write_video(path, range(0, 250, 5))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif name == "codec.mkv":  # of which damage made one that nobody knows
        content = clip_files.write_video(path, [1, 2, 3]).read_bytes()
        assert content.count(b"V_MPEG4") == 1
        path.write_bytes(content.replace(b"V_MPEG4", b"V_MPEG\x96"))
    elif name == "sound.mp4":
        clip_files.write_sound(path)
    elif name == "folder.mp4":
        path.mkdir()
    elif name == "playlist.mp4":  # it names another file, which nobody asked for
        other = clip_files.write_video(tmp_path / "other.mp4", [1, 2, 3])
        path.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{other}\n#EXT-X-ENDLIST\n")
    elif name != "missing.mp4":
        path.write_text("" if name == "empty.mp4" else "no video")
    with pytest.raises(BrokenImage, match=reason):
        open_video(path)


@needs_av
def test_questions_about_videos_in_a_folder(tmp_path: Path) -> None:
    clip_files.write_video(tmp_path / "a.mp4", range(0, 250, 5))
    (tmp_path / "b.mp4").write_bytes(b"broken")
    rows = ["a.mp4,what is it?,grey|gray", "b.mp4,what is it?,black", "a.mp4,is it grey?,yes"]
    (tmp_path / "questions.csv").write_text("\n".join(["video,question,answers", *rows]))
    for name in (f"videos:{tmp_path}", f"csv:{tmp_path / 'questions.csv'}"):
        data = vqa.load(name)
        assert len(data) == 3 and not any("no video in" in remark for remark in data.check())
        assert data[0].video is not None and len(data[0].video.frames) == 8
        assert data[0].answers == ["grey", "gray"]
        few = data.with_frames(3)
        assert few[2].video is not None and len(few[2].video.frames) == 3
        assert few.fingerprint != data.fingerprint
        with pytest.raises(BrokenImage, match=r"b\.mp4 \(question 3\): it cannot be decoded"):
            data[1]


def test_questions_whose_videos_are_not_there_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "questions.csv").write_text("video,question,answer\nlost.mp4,what is it?,grey\n")
    with pytest.raises(UserError, match=r"1 of 1 questions have no video in .*lost\.mp4"):
        vqa.load(f"videos:{tmp_path}").check()
    (tmp_path / "questions.csv").write_text("image,question,answer\nlost.png,what is it?,grey\n")
    with pytest.raises(UserError, match="no column video"):
        vqa.load(f"videos:{tmp_path}")
    with pytest.raises(UserError, match=r"no questions\.csv"):
        (tmp_path / "questions.csv").unlink()
        vqa.load(f"videos:{tmp_path}")


def test_without_pyav_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    path = tmp_path / "a.mp4"
    path.write_bytes(b"something")
    with pytest.raises(UserError, match=r'av is not installed, which is needed for videos.*pip install "tokensieve\[video\]"'):
        open_video(path)


def test_some_frames_of_a_video_are_evenly_spread() -> None:
    video = Video(tuple(Image.new("RGB", (2, 2), (i, i, i)) for i in range(8)), tuple(map(float, range(8))))
    assert video.evenly(8) == video
    assert video.evenly(4).times == (1, 3, 5, 7)
    assert video.evenly(1).times == (4,)
    assert video.rate == 1
