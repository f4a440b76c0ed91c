"""Re-identification data: what is in the folders is read, what is wrong there is told, and batches are P x K."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.reid_folders import KINDS, SMALL, TEST, TRAIN, picture, save, write_msvr310, write_rgbnt100, write_rgbnt201
from tokensieve.data.images import BrokenImage, open_image
from tokensieve.embedded.people import attributes, dataset
from tokensieve.errors import UserError
from tokensieve.reid import layouts, scan
from tokensieve.reid.batches import Augment, Balanced, Plain, inputs_of
from tokensieve.reid.data import ReidData, check_dataset, load
from tokensieve.reid.layouts import MODALITIES
from tokensieve.reid.scan import Shot


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return write_rgbnt201(tmp_path / "mes données 数据" / "RGBNT201")


def test_rgbnt201(people: Path) -> None:
    assert check_dataset("RGBNT201", people) == []
    for root in (people, people.parent):  # itself, or the folder that holds it
        train, query, gallery = (load("RGBNT201", root, split) for split in ("train", "query", "gallery"))
        assert (train.pids, query.pids, gallery.pids) == ([*TRAIN], [*TEST], [*TEST])
        assert (len(train), len(query)) == (20, 8) and query.shots == gallery.shots
        assert (train.rule, train.cameras, train.identities, train.notes) == ("camera", 4, 5, [])
    assert [shot.name for shot in train.shots] == sorted(shot.name for shot in train.shots)
    shot = train.shots[3]
    assert (shot.pid, shot.camera, shot.scene) == (1, 1, None)
    assert shot.name == "train_171/RGB/000001_cam2_0_01.jpg"
    assert train.groups == [0, 0, 1, 1] * 5
    images = train.read(3)
    for modality in MODALITIES:
        assert shot.files[modality] == str(people / "train_171" / modality / "000001_cam2_0_01.jpg")
        assert np.array_equal(images[modality], Image.open(shot.files[modality]))
    assert list(train.read(3, ["TI"])) == ["TI"]


def test_rgbnt100(tmp_path: Path) -> None:
    folder = write_rgbnt100(tmp_path / "RGBNT100")
    assert check_dataset("RGBNT100", folder) == []
    for root in (tmp_path, folder, folder / "rgbir"):
        gallery = load("RGBNT100", root, "gallery")
        assert gallery.pids == [*TEST]  # without the junk
    assert "identity -1, which is none: 2" in gallery.notes[0]
    assert (gallery.rule, gallery.cameras, gallery.groups) == ("camera", 8, [0, 7, 0, 7])
    for m, (modality, image) in enumerate(gallery.read(1).items()):
        assert modality == MODALITIES[m] and image.size == (256, 128)
        assert (np.asarray(image) == (7, 8, 80 * m)).all()


def test_msvr310(tmp_path: Path) -> None:
    folder = write_msvr310(tmp_path / "MSVR310")
    assert check_dataset("MSVR310", tmp_path) == []
    query = load("MSVR310", folder, "query")
    assert (query.rule, query.cameras) == ("scene", 8)
    assert [(shot.pid, shot.scene, shot.camera) for shot in query.shots] == [(7, 1, 4), (7, 2, 5), (8, 1, 4), (8, 2, 5)]
    assert query.groups == [1, 2, 1, 2]
    assert [Path(query.shots[0].files[m]).parent.name for m in MODALITIES] == [*KINDS.values()]


def test_embedded_people_are_drawn_where_they_belong(people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "tokensieve.embedded.people.dataset.folder", lambda name, root=None: asked.append((name, root)) or people
    )
    monkeypatch.chdir(people.parent)
    write_rgbnt201(Path("root"))  # somebody's own: the embedded people are not there
    for root in ("root", None, people.parent, people):
        data = load("embedded-reid", root)
        assert (data.name, data.pids, data.rule) == ("embedded-reid", [*TRAIN], "camera")
        assert data.shots[0].files["RGB"].startswith(str(people))
    assert asked == [("embedded-reid", root) for root in (None, None, people.parent, people)]
    for name in layouts.EMBEDDED:  # the folder itself, by its manifest
        (people / "manifest.json").write_text(json.dumps(dataset._manifest(name)))
        assert load(name, people).pids == [*TRAIN] and len(asked) == 4
    shutil.rmtree(people / "test")
    assert check_dataset("embedded-reid-pretrain", people) == []  # has training identities only
    assert load("embedded-reid-pretrain", people, "val", 2).pids == [2, 4]
    with pytest.raises(UserError, match="there are train, val"):
        load("embedded-reid-pretrain", people, "query")


@pytest.mark.parametrize(("count", "held_out"), [(1, [3]), (2, [2, 4]), (4, [1, 2, 4, 5])])
def test_validation_identities_are_spread_over_the_training_set(people: Path, count: int, held_out: list[int]) -> None:
    train, val = load("RGBNT201", people, "train", count), load("RGBNT201", people, "val", count)
    assert val.pids == held_out and train.pids == [pid for pid in TRAIN if pid not in held_out]
    assert len(train) + len(val) == 20
    assert train.fingerprint != load("RGBNT201", people).fingerprint


def test_shots_travel_and_their_fingerprint_tells_changes(people: Path, tmp_path: Path) -> None:
    data = load("RGBNT201", people)
    again = pickle.loads(pickle.dumps(data))
    assert again.shots == data.shots and again.fingerprint == data.fingerprint
    moved = shutil.copytree(people, tmp_path / "elsewhere")
    assert load("RGBNT201", moved).fingerprint == data.fingerprint
    changed = moved / "train_171" / "TI" / "000001_cam1_0_00.jpg"
    os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))  # as after writing as many bytes
    assert load("RGBNT201", moved).fingerprint != data.fingerprint


def test_drawn_people_have_one_fingerprint_whenever_they_were_drawn(people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokensieve.embedded.people.dataset.folder", lambda name, root=None: people)
    before = load("embedded-reid").fingerprint
    file = people / "train_171" / "TI" / "000001_cam1_0_00.jpg"
    os.utime(file, ns=(0, 1))
    assert load("embedded-reid").fingerprint == before
    monkeypatch.setattr("tokensieve.embedded.people.attributes.VERSION", attributes.VERSION + 1)
    assert load("embedded-reid").fingerprint != before
    monkeypatch.undo()
    monkeypatch.setattr("tokensieve.embedded.people.dataset.folder", lambda name, root=None: people)
    file.write_bytes(file.read_bytes() + b"more")
    assert load("embedded-reid").fingerprint != before


@pytest.mark.parametrize("modalities", [["RGB"], ["RGB", "TI"], [*MODALITIES]])
def test_validation_identities_do_not_depend_on_modalities(people: Path, modalities: list[str]) -> None:
    for file in (people / "train_171" / "TI").glob("000001_*"):
        file.unlink()
    assert load("RGBNT201", people, "val", 2, modalities).pids == [2, 4]
    assert load("RGBNT201", people, "train", 2, modalities).pids == [1, 3, 5][len(modalities) > 1 :]


def test_many_files_are_listed_in_a_moment(tmp_path: Path) -> None:
    for modality in ("RGB", "NI"):
        (tmp_path / "train_171" / modality).mkdir(parents=True)
        for number in range(200):
            (tmp_path / "train_171" / modality / f"{number // 10:06d}_cam{1 + number % 4}_{number}.jpg").touch()
    begun = time.process_time()
    data = load("RGBNT201", tmp_path, modalities=("RGB", "NI"))
    assert len(data.fingerprint) == 32 and len(data) == 200
    assert time.process_time() - begun < 0.5  # of this process alone; it needs some milliseconds


def test_missing_folders_are_told_with_the_nearest_name(people: Path) -> None:
    (people / "test").rename(people / "tests")
    shutil.rmtree(people / "train_171" / "NI")
    (people / "train_171" / "TI").rename(people / "train_171" / "TIR")
    told = check_dataset("RGBNT201", people)
    assert told[0].startswith("folders missing: 3 (train_171/NI, train_171/TI Did you mean 'TIR'?, test Did you mean 'tests'?)")
    assert any("shots without a file of NI (NI): 20 (train_171/RGB/000001_cam1_0_00.jpg, " in line for line in told)
    assert any(" and 17 more" in line for line in told)
    with pytest.raises(UserError, match=r"folders missing: 3 .*shots without a file of TI.*on request.*AAAI 2021") as error:
        load("RGBNT201", people)
    assert "\n" not in str(error.value)
    assert len(load("RGBNT201", people, modalities=["RGB"])) == 20  # what is asked for is there


def test_no_data_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RGBNT100 \(query\).*folders missing: 3.*Li et al., AAAI 2020.*--dataset_root"):
        load("RGBNT100", tmp_path / "nowhere", "query")
    (tmp_path / "rgbnt-201").mkdir()
    assert "RGBNT201 Did you mean 'rgbnt-201'?" in check_dataset("RGBNT201", tmp_path)[0]
    for modality in MODALITIES:
        (tmp_path / "empty" / "train_171" / modality).mkdir(parents=True)
    assert "splits without a shot: 1 (train_171)" in check_dataset("RGBNT201", tmp_path / "empty")
    with pytest.raises(UserError, match="splits without a shot"):
        load("RGBNT201", tmp_path / "empty")


def test_a_shot_that_lacks_a_modality_is_left_out_and_counted(people: Path) -> None:
    (people / "train_171" / "TI" / "000002_cam1_0_00.jpg").unlink()
    (people / "train_171" / "RGB" / "000003_cam1_0_00.jpg").unlink()
    data = load("RGBNT201", people)
    assert len(data) == 18
    lost = ["train_171/RGB/000002_cam1_0_00.jpg", "train_171/NI/000003_cam1_0_00.jpg"]
    assert data.notes == [
        f"RGBNT201: shots without a file of RGB (RGB): 1 ({lost[1]})",
        f"RGBNT201: shots without a file of TI (TI): 1 ({lost[0]})",
        f"RGBNT201 (train): left out, shots that lack a modality: 2 ({lost[0]}, {lost[1]})",
    ]
    assert data.incomplete == lost == [*data.left_out] and not data.misnamed
    assert load("RGBNT201", people, "val", 2).incomplete == lost[:1] and load("RGBNT201", people, "query").incomplete == []
    assert len(load("RGBNT201", people, whole=False)) == 20
    assert not load("RGBNT201", people, modalities=["NI"]).notes
    assert len(check_dataset("RGBNT201", people)) == 2
    thermal = load("RGBNT201", people, modalities=["TI"])
    assert len(thermal) == 19 and set(thermal.read(0)) == {"TI"}
    with pytest.raises(BrokenImage, match="no file of RGB"):
        thermal.read([shot.name.startswith("train_171/NI") for shot in thermal.shots].index(True), ["RGB"])


def test_misnamed_files_are_told(people: Path) -> None:
    folder = people / "train_171" / "RGB"
    for name in (
        "1_cam1_0.jpg",
        "000001-cam1.jpg",
        "000001_cam0_0.jpg",
        "000001_camx_0.jpg",
        "readme.txt",
        "._000001_cam1_0.jpg",
    ):
        (folder / name).write_bytes(b"")
    shutil.copy(folder / "000001_cam1_0_00.jpg", folder / "000001_cam1_0_00.png")
    told = check_dataset("RGBNT201", people)
    assert any(
        line.startswith("files whose names have no identity and camera: 4 (train_171/RGB/000001-cam1.jpg") for line in told
    )
    assert "files that differ from another in the ending only: 1 (train_171/RGB/000001_cam1_0_00.png)" in told
    assert len(told) == 2
    data = load("RGBNT201", people)
    assert len(data) == 20 and len(data.notes) == 3 and len(data.misnamed) == 5 and len(data.left_out) == 5
    assert "left out, shots that are misnamed: 5 (" in data.notes[2] and not load("RGBNT201", people, "val", 2).misnamed


def test_faults_of_strips(tmp_path: Path) -> None:
    folder = write_rgbnt100(tmp_path)
    save(picture(1, size=(256, 128)), folder / "rgbir" / "query" / "0007_c2_0001.jpg")
    (folder / "rgbir" / "query" / "0007_c3_0001.jpg").write_bytes(b"no image")
    save(Image.new("RGB", (768, 128)), folder / "rgbir" / "query" / "00-7_c1_0001.jpg")
    told = check_dataset("RGBNT100", tmp_path)
    assert any(line.startswith("strips that are not 768 x 128 pixels: 2 (query/0007_c2_0001.jpg: 256 x 128, ") for line in told)
    assert any(line.startswith("files whose names have no identity and camera: 1") for line in told)
    query = load("RGBNT100", tmp_path, "query")
    with pytest.raises(BrokenImage, match="256 x 128 pixels, not 768 x 128"):
        query.read(next(i for i, shot in enumerate(query.shots) if "c2" in shot.name))


def test_faults_between_splits(people: Path, tmp_path: Path) -> None:
    for modality in MODALITIES:
        shutil.copy(people / "train_171" / modality / "000001_cam1_0_00.jpg", people / "test" / modality)
    assert check_dataset("RGBNT201", people) == [
        "identities both in training and test: 1 (1)",
        "identities with queries that have no right answer (no other camera in the gallery): 1 (1)",
    ]
    vehicles = write_msvr310(tmp_path / "MSVR310")
    for kind in KINDS.values():
        (vehicles / "bounding_box_test" / "0007" / kind / "0007_s002_v5_000.jpg").unlink()
        (vehicles / "query3" / "0008" / kind / "0008_s001_v4_000.jpg").rename(
            vehicles / "query3" / "0007" / kind / "0008_s001_v4_000.jpg"
        )
    assert check_dataset("MSVR310", vehicles) == [
        "files in the folder of another identity: 1 (query3/0007/vis/0008_s001_v4_000.jpg)",
        "identities with queries that have no right answer (no other scene in the gallery): 1 (7)",
    ]


def test_wrong_words_are_told(people: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'RGBNT201'"):
        load("rgbnt201", people)
    with pytest.raises(UserError, match="Did you mean 'gallery'"):
        load("RGBNT201", people, "galery")
    with pytest.raises(UserError, match="no modality 'rgb'"):
        load("RGBNT201", people, modalities=["rgb"])
    for split, count in (("val", 0), ("val", 5), ("train", 5), ("train", -1)):
        with pytest.raises(UserError, match="5 identities for training"):
            load("RGBNT201", people, split, count)


@pytest.mark.parametrize("kind", ["uint16 png", "uint16 tif", "int32 tif", "float32 tif"])
def test_thermal_images_are_scaled_by_their_own_range(people: Path, kind: str) -> None:
    dtype, ending = kind.split()
    values = np.random.default_rng(0).integers(29_000, 30_500, (16, 8)).astype(dtype)  # hundredths of a kelvin
    old = people / "train_171" / "TI" / "000001_cam1_0_00.jpg"
    old.unlink()
    Image.fromarray(values).save(old.with_suffix(f".{ending}"))
    image = load("RGBNT201", people).read(0)["TI"]
    assert image.mode == "RGB"
    low, high = sorted(values.flatten().tolist())[1 :: values.size - 3]
    expected = [[min(max((v - low) * 255 / (high - low), 0), 255) for v in row] for row in values.tolist()]
    for channel in range(3):
        assert np.abs(np.asarray(image)[..., channel] - np.array(expected)).max() <= 0.5
    assert len(np.unique(np.asarray(image))) > 90  # not crushed, not saturated


def test_a_hot_and_a_dead_pixel_leave_a_thermal_image_as_it_is() -> None:
    values = np.random.default_rng(0).integers(29_000, 30_500, (64, 32)).astype(np.uint16)
    before = np.asarray(scan.eight_bits(Image.fromarray(values))).astype(int)
    values[10, 10], values[20, 20] = 65_535, 0
    after = np.asarray(scan.eight_bits(Image.fromarray(values))).astype(int)
    assert (after[10, 10] == 255).all() and (after[20, 20] == 0).all()
    after[[10, 20], [10, 20]] = before[[10, 20], [10, 20]]
    assert np.abs(after - before).max() <= 2
    few = np.full((64, 32), 29_000, np.uint16)
    few[3, 3] = 29_500  # all that there is to be seen
    assert np.unique(np.asarray(scan.eight_bits(Image.fromarray(few)))).tolist() == [0, 255]


def test_float_images_are_not_cut(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(290, 310, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "heat.tif")
    assert len(np.unique(np.asarray(open_image(tmp_path / "heat.tif")))) > 50


def test_a_broken_image_is_named_by_its_own_file(people: Path) -> None:
    (people / "train_171" / "TI" / "000001_cam1_0_01.jpg").write_bytes(b"no image")
    data = load("RGBNT201", people)
    with pytest.raises(BrokenImage, match=r"^train_171/TI/000001_cam1_0_01\.jpg: "):
        data.read(1)


def test_odd_values_of_thermal_images() -> None:
    constant = scan.eight_bits(Image.fromarray(np.full((4, 4), 31_000, np.uint16)))
    assert np.unique(np.asarray(constant)).tolist() == [128]
    odd = np.array([[np.nan, 20.0], [30.0, np.inf]], np.float32)
    assert np.asarray(scan.eight_bits(Image.fromarray(odd)))[..., 0].tolist() == [[0, 0], [255, 255]]
    with pytest.raises(BrokenImage, match="finite"):
        scan.eight_bits(Image.fromarray(np.full((2, 2), np.nan, np.float32)))
    grey = Image.fromarray(np.arange(100, 116, dtype=np.uint8).reshape(4, 4))  # 8 bits stay as they are
    assert np.array_equal(np.asarray(scan.eight_bits(grey))[..., 0], grey)


def test_plain_is_resizing_and_normalising() -> None:
    image = picture(5, size=(20, 40))
    made = Plain(SMALL, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))({"NI": image})
    assert list(made) == ["NI"] and made["NI"].shape == (3, *SMALL)
    pixels = np.asarray(image.resize((8, 16), Image.Resampling.BICUBIC)) / 255
    expected = (pixels - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    assert np.allclose(made["NI"].permute(1, 2, 0), expected, atol=1e-6)


def test_all_modalities_of_an_object_are_moved_alike() -> None:
    image = picture(6)
    augment = Augment(SMALL, padding=3, erasing=0)
    plain = Plain(SMALL)({"RGB": image})["RGB"]
    framed = torch.nn.functional.pad(plain, (3, 3, 3, 3), value=-1)  # black is -1
    seen = set()
    for seed in range(40):
        made = augment(dict.fromkeys(MODALITIES, image), np.random.default_rng(seed))
        assert torch.equal(made["RGB"], made["NI"]) and torch.equal(made["RGB"], made["TI"])
        fits = [
            (flipped, top, left)
            for flipped in (False, True)
            for top in range(7)
            for left in range(7)
            if torch.equal((framed.flip(2) if flipped else framed)[:, top : top + 16, left : left + 8], made["RGB"])
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) > 20 and {flipped for flipped, _, _ in seen} == {False, True}
    never = Augment(SMALL, flip=0, padding=0, erasing=0)
    assert torch.equal(never({"RGB": image}, np.random.default_rng(0))["RGB"], plain)


def _run(which: torch.Tensor) -> int:
    """From the first to the last."""
    places = which.nonzero()
    return int(places.max() - places.min()) + 1


def test_erasing_hides_a_box_of_noise_in_each_modality_by_itself() -> None:
    image = Image.new("RGB", (32, 64), (128, 128, 128))
    augment = Augment((64, 32), padding=0, erasing=0.5)
    grey = (128 / 255 - 0.5) / 0.5
    boxes: Counter[str] = Counter()
    shares, values = [], []
    for seed in range(200):
        made = augment(dict.fromkeys(MODALITIES, image), np.random.default_rng(seed))
        erased = {modality: (x - grey).abs().amax(0) > 1e-5 for modality, x in made.items()}  # (h, w)
        for modality, mask in erased.items():
            if mask.any():
                rows, columns = mask.any(1), mask.any(0)
                assert torch.equal(mask, rows[:, None] & columns) and mask.sum() == _run(rows) * _run(columns)
                boxes[modality] += 1
                shares.append(float(mask.float().mean()))
                values.append(made[modality][:, mask].flatten())
        assert not erased["RGB"].any() or not torch.equal(erased["RGB"], erased["NI"])
    assert all(70 < boxes[m] < 130 for m in MODALITIES)
    assert min(shares) > 0.01 and 0.25 < max(shares) < 0.36
    noise = torch.cat(values)
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05


def uneven(counts: tuple[int, ...]) -> ReidData:
    """Shots of identities that have no files: enough to see which are drawn."""
    shots = [Shot(10 + pid, i % 3, None, {}, f"{pid}-{i}") for pid, count in enumerate(counts) for i in range(count)]
    return ReidData("RGBNT201", "train", shots, 4, MODALITIES, [])


def draw(counts: tuple[int, ...], identities: int = 3, shots: int = 4, seed: int = 0) -> Balanced:
    return Balanced(uneven(counts), Augment(SMALL), identities=identities, shots=shots, seed=seed, stop=10_000)


@pytest.mark.parametrize(
    "counts", [(4,) * 6, (9, 3, 8, 8, 5, 12, 4), (100, 4, 4, 4), (1, 2, 3), (8, 8, 8, 4, 4), (40, 40, 4, 4, 4, 4, 4, 4, 4)]
)
def test_an_epoch_is_p_identities_by_k_shots_and_balanced(counts: tuple[int, ...]) -> None:
    batches = draw(counts)
    groups = [max(1, count // 4) for count in counts]
    steps = batches.steps_per_epoch
    best = max(r for r in range(sum(groups) + 1) if sum(min(group, r) for group in groups) >= 3 * r)
    assert steps == best
    for epoch in (0, 3):
        times: Counter[int] = Counter()
        used: Counter[int] = Counter()
        for index in range(epoch * steps, (epoch + 1) * steps):
            drawn = batches.drawn(index)
            labels = [label for label, _ in drawn]
            assert len(set(labels)) == 3
            times.update(labels)
            for label, shots in drawn:
                assert len(shots) == 4 and set(shots) <= set(batches.members[label])
                assert len(set(shots)) == min(4, counts[label])  # all different, where there are as many
                used.update(map(int, shots))
        assert sum(times.values()) == 3 * steps
        assert all(times[label] <= group for label, group in enumerate(groups))
        usable = [min(group, steps) for group in groups]
        left_out = sum(usable) - 3 * steps
        assert 0 <= left_out < 3
        assert all(times[label] >= count - left_out for label, count in enumerate(usable))
        assert max(usable) == 1 or all(times[label] > 0 for label in range(len(counts)))  # nobody waits
        assert all(used[i] <= 1 for members in batches.members if len(members) >= 4 for i in members)


def test_epochs_and_seeds_differ_and_nothing_else_does() -> None:
    def told(batches: Balanced, index: int) -> list[tuple[int, list[int]]]:
        return [(label, list(map(int, shots))) for label, shots in batches.drawn(index)]

    counts = (9, 6, 8, 8, 5, 12, 4)
    first, again, other = draw(counts), draw(counts), draw(counts, seed=1)
    steps = first.steps_per_epoch
    assert [told(first, i) for i in range(12)] == [told(again, i) for i in reversed(range(12))][::-1]
    assert told(first, 0) != told(first, steps) and told(first, 0) != told(other, 0)


def test_every_identity_is_drawn_as_often_as_another() -> None:
    batches = draw((4,) * 10)  # 10 groups, 3 batches of 3: one identity waits
    times = Counter(label for index in range(3 * 400) for label, _ in batches.drawn(index))
    assert all(abs(times[label] - 360) < 30 for label in range(10))


def same(one: tuple, other: tuple) -> bool:
    return (
        one[0].keys() == other[0].keys()
        and all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        and torch.equal(one[1], other[1])
        and one[2] == other[2]
    )


def batches_of(data: ReidData, **changed: object) -> Balanced:
    given = {"identities": 4, "shots": 3, "seed": 3, "stop": 9, **changed}
    return Balanced(data, Augment(SMALL, padding=2), **given)  # type: ignore[arg-type]


def test_a_batch_depends_on_the_seed_and_its_number_only(people: Path) -> None:
    data = load("RGBNT201", people)
    whole = batches_of(data)
    expected = [whole[i] for i in range(9)]
    inputs, labels, broken = expected[0]
    assert list(inputs) == [*MODALITIES, "cameras"] and broken == []
    assert inputs["RGB"].shape == (12, 3, *SMALL) and inputs["RGB"].dtype == torch.float32
    assert inputs["cameras"].dtype == labels.dtype == torch.int64
    assert [len(set(labels[i : i + 3].tolist())) for i in range(0, 12, 3)] == [1] * 4 and labels.unique().numel() == 4
    shots = [data.shots[int(shot)] for _, chosen in whole.drawn(0) for shot in chosen]
    assert inputs["cameras"].tolist() == [shot.camera for shot in shots]
    assert labels.tolist() == [data.pids.index(shot.pid) for shot in shots]
    resumed = batches_of(data, start=5)
    assert len(resumed) == 4
    assert all(same(resumed[i], expected[5 + i]) for i in range(4))
    kept = batches_of(pickle.loads(pickle.dumps(data)), keep_in_memory=True)
    assert all(same(kept[i], expected[i]) for i in reversed(range(9)))
    assert all(same(kept[i], expected[i]) for i in range(9))  # from memory
    assert not same(batches_of(data, seed=4)[0], expected[0])
    with pytest.raises(IndexError):
        whole[9]


def test_every_object_of_a_batch_is_altered_by_itself(tmp_path: Path) -> None:
    same_for_all = Image.linear_gradient("L").resize((8, 16)).rotate(45)
    for pid in TRAIN:
        for modality in MODALITIES:
            save(same_for_all, tmp_path / "train_171" / modality / f"{pid:06d}_cam1_0_00.png")
    images = batches_of(load("RGBNT201", tmp_path), identities=5, stop=1)[0][0]["RGB"]
    assert len(images) == 15 and len({image.numpy().tobytes() for image in images}) > 12


def test_the_shares_of_processes_are_what_one_process_draws(people: Path) -> None:
    data = load("RGBNT201", people)
    for index in range(4):
        whole = batches_of(data, drop=0.4)[index]
        shares = [batches_of(data, rank=rank, world=2, drop=0.4)[index] for rank in (0, 1)]
        assert not set(shares[0][1].tolist()) & set(shares[1][1].tolist())
        joined = {name: torch.cat([share[0][name] for share in shares]) for name in whole[0]}
        assert same(whole, (joined, torch.cat([share[1] for share in shares]), []))
        assert all(share[0].keys() == whole[0].keys() for share in shares)


def test_modalities_drop_out_of_whole_batches(people: Path) -> None:
    batches = batches_of(load("RGBNT201", people), drop=0.5, stop=2000)
    seen = Counter(batches.present(index) for index in range(2000))
    assert len(seen) == 7 and () not in seen
    for modality in MODALITIES:  # dropped with 1/2, but not as the last: (1 + 1/8 / 3) x 1/2 ...
        share = sum(count for present, count in seen.items() if modality in present) / 2000
        assert abs(share - (0.5 + 0.125 / 3)) < 0.04
    assert set(batches[0][0]) == {*batches.present(0), "cameras"}
    assert batches_of(load("RGBNT201", people), drop=1.0).present(0) != ()
    only = batches_of(load("RGBNT201", people), modalities=["NI", "TI"])[0][0]
    assert list(only) == ["NI", "TI", "cameras"]


@pytest.mark.parametrize("keep_in_memory", [False, True])
def test_a_broken_image_is_replaced_by_another_of_the_same_identity_and_told(people: Path, keep_in_memory: bool) -> None:
    file = people / "train_171" / "NI" / "000002_cam1_0_00.jpg"
    file.write_bytes(file.read_bytes()[:200])
    data = load("RGBNT201", people)
    broken = next(i for i, shot in enumerate(data.shots) if shot.files["NI"] == str(file))
    batches = batches_of(data, keep_in_memory=keep_in_memory, identities=5)
    hit = 0
    for index in range(9):
        inputs, labels, told = batches[index]
        drawn = [int(shot) for _, shots in batches.drawn(index) for shot in shots]
        assert len(told) == drawn.count(broken)
        assert all("train_171/NI/000002_cam1_0_00.jpg" in line for line in told)
        assert len(labels) == 15 and inputs["NI"].shape[0] == 15
        hit += len(told)
        if told:  # the rest of the identity is what stands there
            assert labels[drawn.index(broken)] == data.pids.index(2)
            assert same((inputs, labels, told), batches_of(data, identities=5)[index])
    assert hit
    for other in (people / "train_171" / "NI").glob("000002*"):
        other.write_bytes(b"")
    inputs, labels, told = batches_of(data, identities=5)[0]
    assert inputs == {} and len(labels) == 0
    assert "RGBNT201 (train): none of the 4 shots of identity 2 can be read" in told[-1]


def test_batches_that_cannot_be(people: Path) -> None:
    data = load("RGBNT201", people)
    with pytest.raises(UserError, match=r"6 identities cannot be drawn from the 5 of RGBNT201 \(train\)"):
        batches_of(data, identities=6)
    with pytest.raises(UserError, match="cannot be shared by 3 processes"):
        batches_of(data, world=3)
    image = torch.zeros(3, 2, 2)
    with pytest.raises(ValueError, match="same modalities"):
        inputs_of([{"RGB": image}, {"NI": image}], [0, 1])
    assert inputs_of([{"NI": image}, {"NI": image + 1}], [2, 0])["cameras"].tolist() == [2, 0]


@pytest.mark.slow
def test_workers_give_the_same_batches(people: Path) -> None:
    data = load("RGBNT201", people)
    expected = [batches_of(data)[i] for i in range(9)]
    loader = torch.utils.data.DataLoader(batches_of(data, keep_in_memory=True), batch_size=None, num_workers=2)
    assert all(same(one, other) for one, other in zip(loader, expected, strict=True))
