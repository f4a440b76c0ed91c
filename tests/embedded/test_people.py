"""Drawn people: the same on every machine, registered over the modalities, and files as RGBNT201 has them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tokensieve.embedded.people import attributes, body, dataset
from tokensieve.embedded.people import camera as people_camera
from tokensieve.embedded.people.canvas import Canvas
from tokensieve.errors import UserError


@pytest.fixture
def few(monkeypatch):
    """The data sets with one identity a split, so that drawing them takes a blink."""
    small = {
        name: {split: replace(part, identities=1, shots=1) for split, part in parts.items()}
        for name, parts in dataset.DATASETS.items()
    }
    monkeypatch.setattr(dataset, "DATASETS", small)


def test_no_identity_is_in_two_splits_and_there_are_as_many_as_promised():
    sizes = {
        (name, split): (part.identities, part.shots)
        for name, parts in dataset.DATASETS.items()
        for split, part in parts.items()
    }
    assert sizes == {
        ("embedded-reid", "train_171"): (171, 3),
        ("embedded-reid", "test"): (100, 3),
        ("embedded-reid-pretrain", "train_171"): (600, 2),
    }
    pids = [pid for parts in dataset.DATASETS.values() for part in parts.values() for pid in part.pids]
    assert len(pids) == len(set(pids)) == 871
    assert len(list(dataset.shots(dataset.DATASETS["embedded-reid"]["train_171"]))) == 2052


def test_a_shot_depends_on_pid_camera_and_number_alone():
    first, again = people_camera.draw(5, 2, 1), people_camera.draw(5, 2, 1)
    for modality, shape in zip(dataset.MODALITIES, [(128, 64, 3), (128, 64), (128, 64)], strict=True):
        image = first.images[modality]
        assert image.dtype == np.uint8 and image.shape == shape
        assert np.array_equal(image, again.images[modality])
        for other in ((6, 2, 1), (5, 1, 1), (5, 2, 0)):
            assert not np.array_equal(image, people_camera.draw(*other).images[modality])


def test_pictures_are_those_of_this_version():
    """Whoever changes what is drawn raises VERSION (cached drawings would stay as they were) and writes the new means here."""
    means = [
        [people_camera.draw(*shot).images[modality].mean() for modality in dataset.MODALITIES]
        for shot in ((1, 0, 1), (172, 1, 0))
    ]
    assert attributes.VERSION == 1
    assert means == [pytest.approx(expected, abs=0.5) for expected in MEANS]


MEANS = [[122.7, 113.7, 127.5], [102.3, 127.5, 106.3]]


def test_the_person_is_at_the_same_place_in_every_modality(monkeypatch):
    """Other clothes on the same body change every modality there, and nowhere else."""
    known = attributes.person

    def dressed_otherwise(pid):
        who = known(pid)
        names = ("upper", "lower", "shoes", "hat", "bag")
        return replace(who, **{name: _other(getattr(who, name)) for name in names}, skin=1 - who.skin, hair=1 - who.hair)

    shots = [(pid, camera, 0) for pid in range(1, 6) for camera in range(dataset.CAMERAS)]
    shots = [shot for shot in shots if not any(people_camera.draw(*shot).light.bad.values())]
    assert len(shots) >= 5
    before = [people_camera.draw(*shot) for shot in shots]
    monkeypatch.setattr(people_camera, "person", dressed_otherwise)
    for shot, old in zip(shots, before, strict=True):
        new = people_camera.draw(*shot)
        assert np.array_equal(old.visible, new.visible) and np.array_equal(old.whole, new.whole)
        inside = _grown(old.visible > 0, 3)  # blur of a pixel or two, and a shift of at most one
        for modality in dataset.MODALITIES:
            change = np.abs(old.images[modality].astype(int) - new.images[modality]).reshape(128, 64, -1).max(axis=-1)
            assert not change[~inside].any()
            assert (change[old.visible > 0.9] > 3).mean() > (0.75 if modality == "RGB" else 0.5)  # bare skin stays in infrared


def _other(cloth):
    near = tuple(0.1 if value > 0.5 else 0.95 for value in cloth.near)
    return replace(
        cloth, colour=1 - cloth.colour, second=1 - cloth.second, near=near, warmth=0.1 if cloth.warmth > 0.4 else 0.85
    )


def _grown(mask, steps):
    for _ in range(steps):
        padded = np.pad(mask, 1)
        mask = np.logical_or.reduce([padded[1 + y : 129 + y, 1 + x : 65 + x] for y in (-1, 0, 1) for x in (-1, 0, 1)])
    return mask


def test_the_person_fills_a_third_of_the_box_and_at_most_a_quarter_is_hidden():
    drawn = [people_camera.draw(pid, pid % dataset.CAMERAS, 0) for pid in range(300, 340)]
    share = np.array([drawing.whole.mean() for drawing in drawn])
    hidden = np.array([1 - drawing.visible.sum() / drawing.whole.sum() for drawing in drawn])
    assert 0.25 < share.mean() < 0.4 and share.min() > 0.12 and share.max() < 0.6
    assert hidden.max() <= 0.25 and 0.1 < (hidden > 0.02).mean() < 0.5


def test_light_spoils_as_many_shots_as_promised_but_never_all_modalities_of_one():
    rng = np.random.default_rng(0)
    bad = np.array([list(people_camera._light(rng).bad.values()) for _ in range(4000)])
    shares = np.array([people_camera.RGB_BAD, people_camera.NI_BAD, people_camera.TI_BAD])
    assert np.abs(bad.mean(axis=0) - shares).max() < 0.02 + shares.prod()
    assert not bad.all(axis=1).any()


def test_a_spoilt_modality_has_lost_its_contrast():
    drawn = [people_camera.draw(pid, camera, 0) for pid in range(400, 410) for camera in range(dataset.CAMERAS)]
    for modality in dataset.MODALITIES:
        contrast = {True: [], False: []}
        for drawing in drawn:
            image = drawing.images[modality].reshape(128, 64, -1).mean(axis=-1)
            contrast[drawing.light.bad[modality]].append(image.reshape(16, 8, 8, 8).mean(axis=(1, 3)).std())
        assert contrast[True] and max(contrast[True]) < min(contrast[False])


def test_a_backpack_is_seen_from_behind():
    who = attributes.person(1)
    changed = {}
    for view in ("front", "back"):
        pictures = []
        for kind in ("none", "backpack"):
            canvas = Canvas()
            pose = body.Pose(view, 0.5, 105, 32, 124, 0)
            body.Body(canvas, replace(who, bag_kind=kind), pose, 1.0).draw()
            pictures.append(canvas.pixels)
        changed[view] = (np.abs(pictures[0] - pictures[1]).max(axis=0) > 0.01).sum()
    assert changed["back"] > 3 * changed["front"] > 0


def test_files_have_the_layout_and_the_names_of_rgbnt201(tmp_path, few):
    dataset.write(tmp_path, "embedded-reid")
    for split, first in (("train_171", 1), ("test", 172)):
        assert {path.name for path in (tmp_path / split).iterdir()} == {"RGB", "NI", "TI"}
        names = [{path.name for path in (tmp_path / split / modality).iterdir()} for modality in dataset.MODALITIES]
        assert names[0] == names[1] == names[2] and len(names[0]) == dataset.CAMERAS
        assert {(int(name[:6]), int(name.split("_")[1][3])) for name in names[0]} == {
            (first, camera) for camera in (1, 2, 3, 4)
        }
    drawn = people_camera.draw(172, 3, 0).images
    for modality in dataset.MODALITIES:
        with Image.open(tmp_path / "test" / modality / "000172_cam4_0_00.jpg") as image:
            assert image.format == "JPEG" and image.size == (64, 128)
            assert np.abs(np.asarray(image).astype(int) - drawn[modality]).mean() < 6


def test_pretraining_has_no_test_split(tmp_path, few):
    assert {path.name for path in dataset.folder("embedded-reid-pretrain", tmp_path).iterdir()} == {
        "train_171",
        dataset.MANIFEST,
    }


def test_a_folder_is_drawn_once_and_again_where_it_is_not_whole(tmp_path, few, monkeypatch):
    drawings = []
    write = dataset.write
    monkeypatch.setattr(dataset, "write", lambda root, name: (drawings.append(name), write(root, name)))
    found = dataset.folder("embedded-reid", tmp_path)
    assert dataset.folder("embedded-reid", tmp_path) == found and len(drawings) == 1
    lost = found / "test" / "NI" / "000172_cam1_0_00.jpg"
    lost.unlink()
    assert dataset.folder("embedded-reid", tmp_path) == found and len(drawings) == 2 and lost.exists()
    manifest = found / dataset.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 0}))
    assert dataset.folder("embedded-reid", tmp_path) == found and len(drawings) == 3
    manifest.unlink()
    assert dataset.folder("embedded-reid", tmp_path) == found and len(drawings) == 4
    assert list(tmp_path.iterdir()) == [found]


def test_an_interrupted_drawing_leaves_nothing_behind(tmp_path, few, monkeypatch):
    draw, drawn = people_camera.draw, []

    def interrupted(*shot):
        drawn.append(shot)
        if len(drawn) == 5:
            raise KeyboardInterrupt
        return draw(*shot)

    monkeypatch.setattr(dataset, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataset.folder("embedded-reid", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_that_draw_at_once_the_second_takes_the_firsts(tmp_path, few, monkeypatch):
    write = dataset.write

    def outrun(root, name):
        write(root, name)
        write(tmp_path / f"{name}-v{attributes.VERSION}", name)
        (tmp_path / f"{name}-v{attributes.VERSION}" / "first").touch()

    monkeypatch.setattr(dataset, "write", outrun)
    assert (dataset.folder("embedded-reid", tmp_path) / "first").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_folder_is_the_users_or_the_one_of_the_environment(tmp_path, few, monkeypatch):
    monkeypatch.delenv("TOKENSIEVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert dataset.cache_folder() == tmp_path / "tokensieve"
    monkeypatch.setenv("TOKENSIEVE_CACHE", str(tmp_path / "mine"))
    assert dataset.folder("embedded-reid-pretrain").parent == tmp_path / "mine"


def test_a_folder_that_cannot_be_written_and_a_wrong_name_are_told(tmp_path, few):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the drawn data set embedded-reid"):
        dataset.folder("embedded-reid", tmp_path / "file")
    with pytest.raises(UserError, match="Did you mean 'embedded-reid'"):
        dataset.folder("embeded-reid", tmp_path)
