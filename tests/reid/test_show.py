"""Pictures of re-identification: the modalities of an object under plans, and whom a query finds."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.paths import ROOT
from tests.support.reid_folders import write_msvr310
from tests.support.show_arguments import arguments
from tokensieve import apply, cli
from tokensieve.cli.parser import parse
from tokensieve.core import Reduction
from tokensieve.drawing import panels, stages
from tokensieve.drawing import show as drawing_show
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import Frame
from tokensieve.drawing.sheet import MAX_WIDTH, Picture
from tokensieve.drawing.stages import DROPPED, FOLDED, GONE, MIXED
from tokensieve.errors import PlanError, UserError
from tokensieve.plan import Plan
from tokensieve.reid import drawing, loading, show
from tokensieve.reid.build import build
from tokensieve.reid.config import ReidTraining
from tokensieve.reid.data import load as load_data
from tokensieve.reid.model import Settings

CAMERAS, SHOTS = 2, 2
IDENTITIES = (3, 8, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model on 32 x 16 pixels (8 x 4 = 32 patches), which SDTPS leaves 16 -> 6 + 1 of."""
    torch.manual_seed(0)
    arguments = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    made = build(Settings("timm", "vit_tiny_patch16_224", (32, 16), arguments=arguments, cameras=2, plan="sdtps@out"))
    folder = tmp_path_factory.mktemp("model")
    loading.save(made, folder)
    return str(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """RGBNT201's layout: 3 identities, each twice before each of 2 cameras."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for modality in ("RGB", "NI", "TI"):
        (folder / "test" / modality).mkdir(parents=True)
        for pid in IDENTITIES:
            for camera in range(CAMERAS):
                for shot in range(SHOTS):
                    pixels = rng.integers(0, 255, (32, 16, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / "test" / modality / f"{pid:06}_cam{camera + 1}_0_{shot:02}.jpg")
    return str(folder)


def pixels_of(sheet: Picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sheet.png())).convert("RGB"))


def words_of(sheet: Picture) -> str:
    return " ".join(text.get_text() for text in sheet.texts)


# ------------------------------------------------------------------------------------------------------ patches that are mixed


def mixing(selected: list[int], n: int, k: int) -> Reduction:
    """All of the selected in each of k tokens, all others in one more."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(1, k + 1, n)
    weight[0, :k, selected] = torch.rand(k, len(selected), generator=generator).softmax(-1)
    others = [token for token in range(n) if token not in selected]
    weight[0, k, others] = torch.rand(len(others), generator=generator).softmax(-1)
    scores = torch.rand(1, n, generator=generator)
    return Reduction(weight.argmax(-1), n, weight=weight, scores=scores, anchors=torch.tensor([selected]))


def told(*cuts: tuple[str, Reduction]) -> Any:
    return SimpleNamespace(stages=list(cuts), reduction=cuts[-1][1], samples=None)


def test_selected_patches_are_mixed_and_the_others_folded() -> None:
    reduction = mixing([1, 4, 5], 8, 2)
    (stage,) = stages.stages(told(("out", reduction)))
    assert np.flatnonzero(stage.states == MIXED).tolist() == [1, 4, 5]
    assert np.flatnonzero(stage.states == FOLDED).tolist() == [0, 2, 3, 6, 7]
    assert not stage.joint.any()
    assert stage.shares is not None and reduction.weight is not None
    for patch in range(8):
        assert stage.shares[patch] == pytest.approx(sum(float(row[patch]) for row in reduction.weight[0]) / 3, rel=1e-4)
    assert stage.shares.sum() == pytest.approx(1, rel=1e-4)


def test_mixing_what_an_earlier_cut_left_is_told_of_the_original_patches() -> None:
    left = [0, 2, 3, 5, 6, 9]
    first = Reduction.keep(torch.tensor([left]), 10)
    _, stage = stages.stages(told(("1", first), ("out", mixing([1, 4], 6, 2))))
    assert np.flatnonzero(stage.states == MIXED).tolist() == [2, 6]
    assert np.flatnonzero(stage.states == FOLDED).tolist() == [0, 3, 5, 9]
    assert np.flatnonzero(stage.states == GONE).tolist() == [1, 4, 7, 8]
    assert stage.shares is not None and stage.shares[[1, 4, 7, 8]].tolist() == [0, 0, 0, 0]


def test_selected_patches_are_in_full_colour_and_folded_ones_are_not() -> None:
    (stage,) = stages.stages(told(("out", mixing([1, 4, 5], 8, 2))))
    band = Band(Image.new("RGB", (80, 160), (250, 20, 20)), Frame(0, 0, 80, 160), "p", [stage], (4, 2))
    sheet = Picture(figsize=(0.8, 1.6))
    panels.draw_kept(sheet.add_axes((0, 0, 1, 1)), band, stage)
    drawn = np.asarray(Image.fromarray(pixels_of(sheet)).resize((80, 160))).astype(int)
    for number, (left, top, right, bottom) in enumerate(band.patches):
        red, green, _ = drawn[int(top + bottom) // 2, int(left + right) // 2]
        assert (red > 200 and green < 60) == (number in (1, 4, 5))


# -------------------------------------------------------------------------------------------------------- objects under plans


def test_each_modality_is_drawn_with_its_own_patches(model: str, root: str) -> None:
    """What is drawn of an object is what the plan does to it in a batch of an evaluation."""
    loaded = loading.load(model)
    plans = [Plan.parse(text) for text in ("sdtps@out", "random@1:9")]
    targets = show.read(["RGBNT201:7", "RGBNT201:2"], root, ("RGB", "NI", "TI"))
    made = show.make_objects(loaded, plans, targets)
    data = load_data("RGBNT201", root, "query")
    inputs = show._inputs(loaded, [data.read(i) for i in range(12)], [shot.camera for shot in data.shots])
    for place, plan in enumerate(plans):
        with torch.inference_mode(), apply(loaded.model, plan) as handle, handle.call(samples=torch.arange(12)):
            loaded.model.encode(inputs)
        reduction = handle.stages[0][1]
        for number, one in ((7, made[0][place]), (2, made[1][place])):
            assert list(one.bands) == ["RGB", "NI", "TI"] and one.bands["NI"].plan == str(plan)
            for m, band in enumerate(one.bands.values()):
                (stage,) = band.stages
                drawn = np.flatnonzero((stage.states == MIXED) if place == 0 else (stage.states >= stages.PICKED))
                kept = reduction.anchors if place == 0 else reduction.index
                assert kept is not None and drawn.tolist() == kept[m * 12 + number].tolist()
                assert place == 0 or np.flatnonzero(stage.states == DROPPED).size == 23
    words = words_of(drawing.draw(made[0]))
    assert "id 8, camera 2" in words and "32 → 7 tokens each" in words and "16 mixed into 6, 16 folded into 1" in words


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 32), (40, 20)], ids=["people", "vehicles"])
@pytest.mark.parametrize("modalities", [("RGB", "NI", "TI"), ("TI",)], ids=len)
def test_rows_fit_whatever_the_shape(model: str, shape: tuple[int, int], modalities: tuple[str, ...]) -> None:
    loaded = loading.load(model)
    target = show.ShowTarget("a", 0, {name: Image.new("RGB", shape, (200, 90, 40)) for name in modalities})
    plans = [Plan.parse(text) for text in ("sdtps@out", "none", "random@1:9 + grid@out:4")]
    (seen,) = show.make_objects(loaded, plans, [target])
    sheet = drawing.draw(seen)
    assert sheet.get_figwidth() < MAX_WIDTH + 0.5
    words = words_of(sheet)
    assert "all 32 patch tokens of each modality" in words and "random@1:9 + grid@out:4, continued" in words


# ----------------------------------------------------------------------------------------------------------------- the gallery


def test_gallery_is_ranked_by_distance_without_the_own_camera(model: str, root: str) -> None:
    loaded = loading.load(model)
    targets = show.read(["RGBNT201:5"], root, ("RGB", "TI"))
    ((strip,),) = show.make_strips(loaded, [Plan.parse("sdtps@out")], targets, root, ranks=4)
    data = load_data("RGBNT201", root, "gallery")
    features = []
    for index in range(12):  # one at a time, against batches
        inputs = show._inputs(loaded, [data.read(index, ("RGB", "TI"))], [data.shots[index].camera])
        with torch.inference_mode(), apply(loaded.model, "sdtps@out"):
            features.append(torch.nn.functional.normalize(loaded.model.encode(inputs)[0].double(), dim=0))
    query = data.shots[5]
    ranked = sorted(
        (
            float((features[5] - features[i]).square().sum()),
            shot.pid == query.pid,
            f"id {shot.pid}",
            f"camera {shot.camera + 1}",
        )
        for i, shot in enumerate(data.shots)
        if (shot.pid, shot.camera) != (query.pid, query.camera)
    )
    for found, (distance, right, *about) in zip(strip.hits, ranked[:4], strict=True):
        assert found.distance == pytest.approx(distance, abs=1e-5)
        assert (found.is_match, found.about) == (right, about) and list(found.images) == ["RGB", "TI"]
    places = [place for place, (_, right, *_) in enumerate(ranked, start=1) if right]
    precision = sum(number / place for number, place in enumerate(places, start=1)) / len(places)
    assert strip.notes == [
        "10 of the gallery are ranked, 2 of the same identity and camera are left out",
        f"average precision {precision:.3f}; 2 are right, the first at rank {places[0]}",
    ]


@pytest.mark.slow
def test_right_and_wrong_differ_in_sign_and_colour() -> None:
    images = {name: Image.new("RGB", (16, 32), (90, 90, 90)) for name in ("RGB", "NI")}
    found = [drawing.GalleryHit(images, [f"id {n}", "camera 1"], 0.1 * n, n == 2) for n in range(3)]
    strips = [drawing.Strip(plan, ["told"], "a:1", images, ["id 2", "camera 2"], found) for plan in ("p", "q")]
    sheet = drawing.draw_gallery(strips)
    words = words_of(sheet)
    assert words.count("3 ✓") == 2 and words.count("1 ✗") == 2 and "0.200" in words and "a:1: q" in words
    drawn = pixels_of(sheet).reshape(-1, 3)
    for colour in (drawing.RIGHT, drawing.WRONG):
        assert (drawn == [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).all(1).sum() > 100


# ------------------------------------------------------------------------------------------------------------------- command


@pytest.mark.slow
def test_command_draws_objects_and_galleries(
    model: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, shade in (("day", 200), ("night", 10), ("heat", 120)):
        Image.new("RGB", (20, 40), (shade, shade // 2, 30)).save(f"{name}.png")
    common = ["--model", model, "--dataset_root", root, "--device", "cpu"]
    assert cli.main(["show", "RGBNT201:3", "RGBNT201:4", "--output", "{image}.png", "--compare", "grid@out:7", *common]) == 0
    assert cli.main(["show", "RGB=day.png", "TI=heat.png", "ti=night.png", "--output", "files.png", *common]) == 0
    strip = ["show", "RGBNT201:3", "--gallery", "--ranks", "3", "--modalities", "TI,RGB", "--output", "gallery.png"]
    assert cli.main([*strip, *common]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["RGBNT201-3.png", "RGBNT201-4.png", "files.png", "gallery.png"]
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in said.out.split())


def test_second_file_of_a_modality_begins_another_object(tmp_path: Path) -> None:
    for name in "abc":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    texts = [f"NI={tmp_path / 'a.png'}", f"RGB={tmp_path / 'b.png'}", f"NI={tmp_path / 'c.png'}"]
    first, second = show.read(texts, "root", ("RGB", "NI"))
    assert (first.name, list(first.images), first.about) == ("a", ["RGB", "NI"], "")
    assert (second.name, list(second.images), second.number) == ("c", ["NI"], 1)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_files_are_read_as_those_of_data_sets(tmp_path: Path, dtype: Any) -> None:
    """Heat in hundredths of a kelvin is neither black nor white all over."""
    values = np.linspace(29_000, 30_500, 32 * 16).reshape(32, 16).astype(dtype)
    Image.fromarray(values).save(tmp_path / "heat.tif")
    (target,) = show.read([f"TI={tmp_path / 'heat.tif'}"], "root", ("RGB", "TI"))
    assert len(np.unique(np.asarray(target.images["TI"]))) > 200


def test_queries_have_one_number_whatever_is_shown(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(root, tmp_path / "data")
    (folder / "test" / "TI" / "000003_cam1_0_00.jpg").unlink()
    numbers = [show.read(["RGBNT201:2"], str(folder), shown)[0].shot for shown in (("RGB", "NI"), ("RGB", "TI"))]
    assert [shot.name for shot in numbers if shot] == ["test/RGB/000003_cam2_0_00.jpg"] * 2
    assert "tokensieve: RGBNT201: shots without a file of TI (TI): 1 (test/RGB/000003_cam1_0_00.jpg)" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"RGBNT201:0: cannot read .*there is no file of TI"):
        show.read(["RGBNT201:0"], str(folder), ("RGB", "TI"))


def test_cameras_are_called_as_in_the_files(root: str, tmp_path: Path) -> None:
    write_msvr310(tmp_path / "MSVR310")
    (target,) = show.read(["MSVR310:0"], str(tmp_path), ("RGB",))
    assert target.about == "id 7, scene 1, camera 4"  # 0007_s001_v4_000.jpg
    assert show.read(["RGBNT201:2"], root, ("RGB",))[0].about == "id 3, camera 2"  # 000003_cam2


@pytest.mark.parametrize(
    ("images", "flags", "said"),
    [
        (["RGBNT201:1"], {"gallery": True, "ranks": 51}, "--ranks 51: at most 50 fit into a picture"),
        (["RGBNT201:12"], {}, "there are the queries RGBNT201:0 to RGBNT201:11"),
        (["RGBNT201:x"], {}, "there are the queries RGBNT201:0 to RGBNT201:11"),
        (["RGBNT21:1"], {}, "Did you mean 'RGBNT201'?"),
        (["RGBNT100:1"], {}, "RGBNT100 (query) cannot be read"),
        (["embedded:3"], {}, "RGB=a.jpg NI=b.jpg TI=c.jpg"),
        (["photo.jpg"], {}, "RGB=a.jpg NI=b.jpg TI=c.jpg"),
        (["RGB=absent.png"], {}, "cannot read absent.png"),
        (["NI=absent.png"], {"modalities": "RGB,TI"}, "are RGB, TI, and this is none of them"),
        (["RGBNT201:1"], {"modalities": "RGB,NIR"}, "'NIR' is not one of the model's, RGB, NI, TI. Did you mean 'NI'?"),
        (["RGBNT201:1"], {"modalities": ","}, "not one of the model's"),
        (["RGBNT201:1"], {"model": "nowhere"}, "nowhere is no folder"),
        (["RGBNT201:1"], {"plan": "sdtps@out:8"}, "leave 7 tokens, not 8"),
        (["RGBNT201:1"], {"plan": "sdps@out"}, "sdtps"),
        (["RGBNT201:1"], {"question": "who?"}, "--question does not go with"),
        (["RGBNT201:1"], {"model_type": "vlm"}, "--model_type vlm does not go with"),
        (["RGBNT201:1"], {"output": "a.svg"}, "end in .png"),
        (["RGB=photo.png"], {"gallery": True}, "--gallery ranks the gallery of a data set"),
    ],
)
def test_mistakes_are_one_line(
    images: list[str],
    flags: dict[str, Any],
    said: str,
    model: str,
    root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 4)).save("photo.png")
    with pytest.raises(UserError) as caught:
        drawing_show.run(arguments(images, **({"model": model, "dataset_root": root} | flags)))
    lines = str(caught.value).splitlines()
    assert said in lines[0] and len(lines) == (3 if isinstance(caught.value, PlanError) else 1)
    assert sorted(path.name for path in Path().iterdir()) == ["photo.png"]


# --------------------------------------------------------------------------------------------------------------- docs/reid.md

GUIDE = (ROOT / "docs" / "reid.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", [line for line in GUIDE.splitlines() if line.startswith("tokensieve ")])
def test_commands_of_the_guide_are_understood(line: str) -> None:
    args = parse(shlex.split(re.sub(r"\s+#.*", "", line))[1:])
    for plan in [getattr(args, "plan", None) or "none", *getattr(args, "compare", [])]:
        Plan.parse(plan)


def test_keys_of_the_guide_are_those_of_the_file() -> None:
    """Every key of a training file with its default, and no other."""

    def shown(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    made = ReidTraining()
    keys: dict[str, str] = {}
    for section in ("MODEL", "INPUT", "DATASETS", "DATALOADER", "SOLVER", "TEST"):
        values = getattr(made, section)
        keys |= {f"{section}.{name}": shown(getattr(values, name)) for name in type(values).model_fields}
    keys["OUTPUT_DIR"] = str(made.OUTPUT_DIR)
    told = dict(re.findall(r"^\| `([A-Z_.]+)` \| (.*?) \|", GUIDE, flags=re.MULTILINE))
    assert told == keys
