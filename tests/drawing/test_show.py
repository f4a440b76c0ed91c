"""Pictures: every patch is drawn where it sees, and in the state in which the plan left it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.show_arguments import arguments
from tokensieve import apply
from tokensieve.core import Reduction
from tokensieve.drawing import band as drawing_band
from tokensieve.drawing import panels, show, show_images, stages
from tokensieve.drawing.geometry import Frame, find_frame
from tokensieve.drawing.sheet import Picture, draw
from tokensieve.drawing.stages import ANCHOR, DROPPED, GONE, MERGED, PICKED
from tokensieve.errors import PlanError, UserError
from tokensieve.plan import Plan

SHAPES = [(640, 400), (300, 700), (97, 97), (1600, 120), (20, 31)]


def transform_of(size: tuple[int, int], mode: str, interpolation: str = "bicubic") -> Any:
    from open_clip.transform import image_transform

    return image_transform(size, is_train=False, resize_mode=mode, interpolation=interpolation)


def seeing(transform: Any, image: Image.Image, grid: tuple[int, int]) -> set[int]:
    """The patches of the model's input whose pixels a white mark on black changes by more than half of the most changed one."""
    h, w = grid
    blank = transform(Image.new("RGB", image.size))
    change = (transform(image) - blank).abs().sum(0)  # (H, W)
    high, wide = change.shape[0] // h, change.shape[1] // w
    per_patch = change[: h * high, : w * wide].reshape(h, high, w, wide).sum((1, 3)).flatten()
    return set(torch.nonzero(per_patch > 0.5 * per_patch.max()).flatten().tolist()) if per_patch.max() > 1e-3 else set()


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize(("size", "grid"), [((112, 112), (14, 14)), ((48, 32), (6, 4)), ((60, 60), (4, 4))])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_patches_lie_where_they_see(mode: str, size: tuple[int, int], grid: tuple[int, int], shape: tuple[int, int]) -> None:
    transform = transform_of(size, mode, "bilinear" if shape[0] % 2 else "bicubic")
    patches = find_frame(transform, shape).patches(grid)
    tried = 0
    for number in np.random.default_rng(0).permutation(len(patches))[:6]:
        left, top, right, bottom = patches[number]
        corners = np.array([left, top, right, bottom]) + np.array([1, 1, -1, -1]) * 0.2 * (right - left)
        x0, y0, x1, y1 = (round(float(edge)) for edge in corners)
        if x0 < 0 or y0 < 0 or x1 > shape[0] or y1 > shape[1] or x1 <= x0 or y1 <= y0:
            continue  # padding, or finer than the pixels of the original
        mark = Image.new("RGB", shape)
        mark.paste((255, 255, 255), (x0, y0, x1, y1))
        assert seeing(transform, mark, grid) == {number}
        tried += 1
    assert tried or min(shape) < 60 or mode == "longest" or 120 in shape


def test_outside_of_the_crop_nothing_is_seen() -> None:
    transform = transform_of((112, 112), "shortest")
    frame = find_frame(transform, (640, 400))
    assert (frame.top, frame.bottom) == pytest.approx((0, 400), abs=0.5)
    assert (frame.left, frame.right) == pytest.approx((34 * 640 / 179, 146 * 640 / 179), abs=0.5)  # resized to 179 x 112
    assert frame.size == (112, 112)
    beside = Image.new("RGB", (640, 400))
    beside.paste((255, 255, 255), (0, 0, round(frame.left) - 8, 400))
    beside.paste((255, 255, 255), (round(frame.right) + 8, 0, 640, 400))
    assert seeing(transform, beside, (14, 14)) == set()


def test_narrow_crop_of_a_very_long_image_is_exact() -> None:
    frame = find_frame(transform_of((112, 112), "shortest"), (6000, 30))
    assert (frame.left, frame.right) == pytest.approx((2985, 3015), abs=0.5)


def test_tiny_images_are_seen_whole() -> None:
    for shape in ((1, 1), (2, 3), (3, 3)):
        frame = find_frame(transform_of((112, 112), "squash"), shape)
        assert (frame.left, frame.top, frame.right, frame.bottom) == pytest.approx((0, 0, *shape), abs=0.05)


def test_patches_that_do_not_fill_the_input_leave_its_end_unseen() -> None:
    patches = Frame(0, 0, 60, 60, size=(60, 60)).patches((4, 7))  # 15 high, 8 wide: 4 columns at the right are left
    assert patches[:, 2].max() == 56 and patches[:, 3].max() == 60
    assert patches[8].tolist() == [8, 15, 16, 30]


def test_mirrored_input_is_drawn_where_it_came_from() -> None:
    straight = transform_of((48, 48), "squash")
    mirrored = find_frame(lambda image: straight(image).flip(-1), (96, 96))
    assert (mirrored.left, mirrored.right) == pytest.approx((96, 0), abs=0.5)
    assert mirrored.patches((6, 6))[0][:4] == pytest.approx([80, 0, 96, 16], abs=0.5)


def test_transforms_that_cannot_be_drawn() -> None:
    with pytest.raises(UserError, match="same for a black and for a white"):
        find_frame(lambda image: torch.zeros(3, 8, 8), (30, 30))
    scrambled = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="more than resize"):
        find_frame(lambda image: transform_of((48, 48), "squash")(image)[:, :, scrambled], (96, 96))


@pytest.fixture(scope="module")
def tiny(tiny_clip: SimpleNamespace) -> tuple[Any, Any, torch.Tensor]:
    model, transform, _ = tiny_clip.make()
    images = torch.rand(3, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    return model, transform, images


def run_plan(tiny: tuple[Any, Any, torch.Tensor], plan: str, seed: int = 0) -> Any:
    model, _, images = tiny
    with torch.no_grad(), apply(model, plan, seed=seed) as handle:
        model.encode_image(images)
    return handle


@pytest.mark.parametrize(
    "plan", ["anchor@2(k=3,m=5)", "random@2:9", "grid@1:6", "anchor@1(k=2,m=4,rest=merge)", "anchor@out(k=2,m=4,rest=zero)"]
)
@pytest.mark.filterwarnings("ignore:.*only output tokens become 0")
@pytest.mark.parametrize("number", [0, 2])
def test_drawn_patches_are_those_that_were_kept(tiny: tuple[Any, Any, torch.Tensor], plan: str, number: int) -> None:
    handle = run_plan(tiny, plan)
    (stage,) = stages.stages(handle, number)
    drawn = np.flatnonzero(np.isin(stage.states, (PICKED, ANCHOR)))
    assert drawn.tolist() == handle.kept[number].tolist()
    assert stage.groups.tolist() == handle.groups[number].tolist()
    assert (stage.tokens_in, stage.tokens_out) == (24, handle.ledger[-1].tokens_out)
    reduction = handle.stages[0][1]
    anchors = [] if reduction.anchors is None else sorted(reduction.anchors[number].tolist())
    assert np.flatnonzero(stage.states == ANCHOR).tolist() == anchors
    if reduction.scores is None:
        assert stage.scores is None
    else:
        assert stage.scores.tolist() == pytest.approx(reduction.scores[number].tolist(), rel=1e-5)
    rest = stage.states[~np.isin(np.arange(24), drawn)]
    assert set(rest.tolist()) == {MERGED if "merge" in plan else DROPPED}


def test_fused_rest_is_one_group(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    (stage,) = stages.stages(run_plan(tiny, "anchor@2(k=3,m=5,rest=fuse)"))
    assert stage.tokens_out == 9
    assert (stage.groups == 8).sum() == 16 and stage.joint.sum() == 16
    assert (stage.states == MERGED).sum() == 15  # one of the rest stands for it


def test_pooled_cells_are_groups(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    (stage,) = stages.stages(run_plan(tiny, "pool@2:6"))
    assert stage.joint.all() and np.bincount(stage.groups).tolist() == [4] * 6
    colours = panels.tints(stage.groups, stage.joint, (6, 4)).reshape(6, 4)
    groups = stage.groups.reshape(6, 4)
    for one, other in (((0, 0), (0, 2)), ((0, 0), (2, 0)), ((0, 0), (2, 2)), ((2, 2), (4, 1))):
        assert groups[one] != groups[other] and colours[one] != colours[other]


def test_later_cuts_are_told_of_the_original_patches(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    """Against a slow walk with lists: which patches each token stands for, cut by cut."""
    handle = run_plan(tiny, "random@0:16 + pool@1:8 + anchor@2:5(k=2) + anchor@3:3(k=1,rest=merge)", seed=3)
    made = stages.stages(handle, 1)
    members: list[list[int]] = [[patch] for patch in range(24)]
    heads = list(range(24))
    for stage, (layer, reduction) in zip(made, handle.stages, strict=True):
        assert (stage.layer, stage.tokens_in, stage.tokens_out) == (layer, len(members), reduction.k)
        joins = reduction.groups[1].tolist()
        if stage.scores is not None:
            expected = {patch: float(reduction.scores[1][token]) for token in range(len(members)) for patch in members[token]}
            told = {patch: float(value) for patch, value in enumerate(stage.scores) if np.isfinite(value)}
            assert told == pytest.approx(expected)
        there = {patch for token in members for patch in token}
        anchors = [] if reduction.anchors is None else [heads[token] for token in reduction.anchors[1].tolist()]
        members = [sorted(p for t, g in enumerate(joins) if g == out for p in members[t]) for out in range(reduction.k)]
        heads = [heads[token] for token in reduction.index[1].tolist()]
        for patch in range(24):
            group = next((out for out, patches in enumerate(members) if patch in patches), -1)
            state = MERGED if group >= 0 else DROPPED if patch in there else GONE
            state = ANCHOR if patch in anchors else PICKED if patch in heads else state
            assert (stage.groups[patch], stage.states[patch]) == (group, state)
    assert np.array_equal(made[-1].groups, handle.groups[1].numpy())
    assert sorted(np.flatnonzero(made[-1].states >= PICKED)) == sorted(handle.kept[1].tolist())


def test_nothing_cut_nothing_told(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match="everything is kept"):
        handle = run_plan(tiny, "anchor@2(k=10,m=50)")
    band = drawing_band.make_band(handle, Image.new("RGB", (32, 48)))
    assert band.stages == [] and band.grid == (6, 4) and band.tokens == "all 24 patch tokens"
    assert "everything is kept" in band.notes[0]
    assert stages.stages(run_plan(tiny, "none")) == []


def test_image_that_was_not_in_the_batch(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    with pytest.raises(UserError, match="batch_index 7: the last batch had 3 images"):
        stages.stages(run_plan(tiny, "random@2:9"), 7)


def test_links_join_scattered_pieces_of_groups_that_share_a_colour() -> None:
    groups = np.array([0, 1, 0, 1] + [2] * 4)  # two rows of four: groups 0 and 1 in two pieces each
    states = np.array([PICKED, PICKED, MERGED, MERGED, PICKED, MERGED, MERGED, MERGED])
    stage = stages.Stage("1", 8, 3, states, groups, None)
    colours = np.array(["red"] * 4 + ["blue"] * 4, dtype=object)
    assert panels._links(stage, colours, (2, 4)).tolist() == [[2, 0], [3, 1]]


def pixels_of(sheet: Picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sheet.png())).convert("RGB"))


@pytest.mark.parametrize("plan", ["anchor@2(k=3,m=5)", "none", "pool@2:6", "anchor@2(k=3,m=5,rest=fuse)", "random@*:-3"])
@pytest.mark.parametrize("shape", [(200, 90), (60, 170)])
def test_handle_draws_itself(tiny: tuple[Any, Any, torch.Tensor], plan: str, shape: tuple[int, int]) -> None:
    handle = run_plan(tiny, plan)
    sheet = handle.picture(Image.new("RGB", shape, (200, 40, 40)), transform=tiny[1], name="$a_b$ 猫.png")
    assert sheet._repr_png_().startswith(b"\x89PNG")
    assert pixels_of(sheet).std() > 5
    words = {text.get_text() for text in sheet.texts}
    assert plan in words and any("24" in word or "all patch" in word for word in words)


def test_picture_that_would_be_too_high() -> None:
    bands = [drawing_band.Band(Image.new("RGB", (20, 20)), Frame(0, 0, 20, 20), "none", [], (2, 2)) for _ in range(200)]
    with pytest.raises(UserError, match="too many images and plans"):
        draw(bands)


def test_picture_of_the_input_tensor(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    handle = run_plan(tiny, "anchor@2(k=3,m=5)")
    assert pixels_of(handle.picture(tiny[2][1], 1)).std() > 5
    with pytest.raises(UserError, match=r"Tensor of shape \(1, 48, 32\) is not an image"):
        handle.picture(tiny[2][1][:1])


def test_kept_patches_are_in_full_colour_and_dropped_ones_are_not() -> None:
    """A sheet of one panel: pixels in the middle of each patch."""
    from tokensieve.drawing.band import Band
    from tokensieve.drawing.panels import draw_kept
    from tokensieve.drawing.sheet import Picture
    from tokensieve.drawing.stages import Stage

    states = np.full(24, DROPPED)
    states[[3, 10, 20]] = PICKED
    groups = np.full(24, -1)
    groups[[3, 10, 20]] = [0, 1, 2]
    image = Image.new("RGB", (320, 480), (250, 20, 20))
    band = Band(image, Frame(0, 0, 320, 480), "p", [Stage("2", 24, 3, states, groups, None)], (6, 4))
    sheet = Picture(figsize=(3.2, 4.8))
    draw_kept(sheet.add_axes((0, 0, 1, 1)), band, band.stages[0])
    drawn = np.asarray(Image.open(io.BytesIO(sheet.png())).convert("RGB").resize((320, 480))).astype(int)
    for number, (left, top, right, bottom) in enumerate(band.patches):
        red, green, _ = drawn[int(top + bottom) // 2, int(left + right) // 2]
        assert (red > 200 and green < 60) == (number in (3, 10, 20))
        assert number in (3, 10, 20) or abs(red - green) < 12


def test_show_writes_one_picture_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (90, 50), (10, 200, 30)).save("photo.jpg")
    (path,) = show.run(arguments(["embedded:17", "photo.jpg"], compare=["pool:49"]))
    assert capsys.readouterr().out == "tokensieve-show.png\n"
    with Image.open(path) as drawn:
        assert drawn.format == "PNG" and drawn.width > 600
    before = path.read_bytes()
    show.run(arguments(["embedded:17", "photo.jpg"], compare=["pool:49"]))
    assert not Path("tokensieve-show.png.1").exists()  # the same picture again
    show.run(arguments(["embedded:17"]))
    assert Path("tokensieve-show.png.1").read_bytes() == before


def test_show_writes_a_picture_for_each_image(tmp_path: Path, tiny_clip: SimpleNamespace) -> None:
    Image.new("RGB", (90, 50)).save(tmp_path / "a.png")
    Image.new("L", (40, 95)).save(tmp_path / "b.png")
    files = [str(tmp_path / name) for name in ("a.png", "b.png")]
    output = str(tmp_path / "{image}_{plan}.png")
    tiny = {"model": tiny_clip.name, "pretrained": tiny_clip.weights, "plan": "random@2:9"}
    made = show.run(arguments(files, output=output, **tiny))
    assert [path.name for path in made] == ["a_random@2-9.png", "b_random@2-9.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_embedded_scenes_keep_their_number() -> None:
    """What random keeps of a scene is what it keeps of it in an evaluation, whatever else is drawn beside it."""
    from tokensieve import embedded
    from tokensieve.models import loading

    loaded = loading.load(embedded.MODEL, embedded.PRETRAINED)
    originals = [show_images.read(text, place) for place, text in enumerate(["embedded:5", "embedded:2"])]
    ((five,), (two,)) = show_images.make_bands(loaded, [Plan.parse("random:60")], originals)
    batch = torch.stack([loaded.transform(show_images.read(f"embedded:{number}", 0)[1]) for number in range(6)])
    with torch.no_grad(), apply(loaded.model, "random:60") as handle:
        loaded.model.encode_image(batch)
    assert isinstance(handle.reduction, Reduction)
    for band, number in ((five, 5), (two, 2)):
        assert np.flatnonzero(band.stages[-1].states == PICKED).tolist() == handle.kept[number].tolist()


@pytest.mark.parametrize(
    ("images", "flags", "said"),
    [
        (["absent.png"], {}, "cannot read absent.png"),
        (["text.png"], {}, "cannot read text.png"),
        (["embedded:4000"], {}, "embedded:0 to embedded:3999"),
        (["embedded:-1"], {}, "embedded:0 to embedded:3999"),
        (["embedded:x"], {}, "embedded:0 to embedded:3999"),
        (["embeded:3"], {}, "Did you mean embedded:N?"),
        (["embeded-reid:3"], {}, "Did you mean embedded-reid:N?"),
        (["embedded:1"], {"plan": "ancor:60"}, "anchor"),
        (["embedded:1"], {"output": "a.svg"}, "end in .png"),
        (["embedded:1"], {"output": "{img}.png"}, "{image}"),
        (["embedded:1", "embedded:1"], {"output": "{image}.png"}, "for several images"),
        (["embedded:1"], {"output": "."}, "end in .png"),
    ],
)
def test_mistakes_are_one_line(
    images: list[str], flags: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("no image")
    with pytest.raises(UserError) as caught:
        show.run(arguments(images, **flags))
    lines = str(caught.value).splitlines()
    assert said in lines[0] and len(lines) == (3 if isinstance(caught.value, PlanError) else 1)
    assert sorted(path.name for path in Path().iterdir()) == ["text.png"]
