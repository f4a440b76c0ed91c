"""Trained parts in files: kept, checked, found, and refused in one line where they do not fit."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokensieve
from tests.support import vlm_models
from tokensieve import Plan, UserError
from tokensieve.methods.learned import SelectionNetwork
from tokensieve.methods.registry import REGISTRY, get_method
from tokensieve.models import loading
from tokensieve.models.registry import open_tower
from tokensieve.parts import files as part_files
from tokensieve.parts import header, resolve, signature, tensor_files
from tokensieve.parts.fit import SHIPPED
from tokensieve.testing import fresh_part

METHOD = get_method("learned")
IMAGES = torch.randn(3, 3, 112, 112, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return loading.load("sieve-vit-8", "scenes-v1").model.requires_grad_(False)


@pytest.fixture
def scorer():
    return fresh_part(METHOD, 128)


def feature(model, plan, part):
    with tokensieve.apply(model, plan, weights={"learned": part}) as handle:
        return model.encode_image(IMAGES), handle


def test_saved_and_loaded_weights_choose_the_same(model, scorer, tmp_path):
    part_files.save_part(tmp_path / "learned.safetensors", "learned", scorer, model, {"plans": ["learned@4:32"]})
    assert part_files.read_header(tmp_path / "learned.safetensors")["trained"] == {"plans": ["learned@4:32"]}
    with torch.no_grad():
        one, first = feature(model, "learned@4:32", scorer)
        for weights in (tmp_path, tmp_path / "learned.safetensors", [str(tmp_path / "learned.safetensors")]):
            with tokensieve.apply(model, "learned@4:32", weights=weights) as handle:
                assert torch.equal(model.encode_image(IMAGES), one) and torch.equal(handle.kept, first.kept)
    assert (
        resolve.parts_fingerprint(handle.parts)
        == resolve.parts_fingerprint({"learned": scorer})
        != resolve.parts_fingerprint({"learned": SelectionNetwork(128)})
    )
    assert resolve.parts_fingerprint({}) is None


def test_the_shipped_weights_are_for_the_shipped_model_alone(model):
    other = loading.load("sieve-vit-8", "").model
    assert set(resolve.load_parts(Plan.parse("learned@4:32"), model)) == {"learned"}
    with pytest.raises(UserError, match=r"learned needs trained weights: --weights FILE, made by tokensieve train configs/"):
        resolve.load_parts(Plan.parse("learned@4:32"), other)
    assert resolve.load_parts(Plan.parse("anchor@4:32"), other) == {}


def made(tmp_path, model, scorer):
    path = tmp_path / "part.safetensors"
    part_files.save_part(path, "learned", scorer, model, {"model": "one"})
    return path


def refused(model, weights, plan="learned@4:32"):
    with pytest.raises(UserError) as caught:
        resolve.load_parts(Plan.parse(plan), model, weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_part_is_refused_in_one_line(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:5000])
    assert "damaged" in refused(model, tmp_path / "cut.safetensors")
    (tmp_path / "pickled.bin").write_bytes(pickle.dumps({"a": 1}))
    assert "not a safetensors file" in refused(model, tmp_path / "pickled.bin")
    torch.save(scorer.state_dict(), tmp_path / "saved.pt")
    assert "a .pt file needs the name and the folder" in refused(model, tmp_path / "saved.pt")
    save_file(load_file(path), tmp_path / "bare.safetensors")
    assert "not the trained part of a method" in refused(model, tmp_path / "bare.safetensors")
    assert "no file" in refused(model, tmp_path / "nowhere.safetensors")
    (tmp_path / "empty").mkdir()
    assert "no .safetensors file" in refused(model, tmp_path / "empty")


def rewrite(path, about, tensors=None):
    """The file with another header, which has the right checksum."""
    tensors = load_file(path) if tensors is None else tensors
    about = {key: value for key, value in about.items() if key != "sha256"}
    if about.get("format") == part_files.FIRST_FORMAT:
        about["sha256"] = part_files.part_checksum(tensors)
    else:
        about["sha256"] = header.checksum(about, tensor_files.tensor_blocks(tensors))
    save_file(tensors, path, metadata={part_files.HEADER: json.dumps(about)})


def test_a_flipped_bit_is_found(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)
    assert "damaged, it is not as it was saved" in refused(model, path)


class Single(torch.nn.Module):
    """A part with one small tensor, so that all bits of its file can be tried."""

    def __init__(self, width):
        super().__init__()
        self.settings, self.weight = {"width": width}, torch.nn.Parameter(torch.zeros(width))


@pytest.fixture
def single():
    @tokensieve.method(part=Single)
    def single(view, keep):
        raise NotImplementedError

    yield Single(2)
    REGISTRY.remove("single")


@pytest.mark.slow
def test_every_flipped_bit_of_a_file_is_found_or_changes_nothing(single, tmp_path):
    path = tmp_path / "single.safetensors"
    about = part_files.describe_part("single", single, {"tower": [1.5, None]}, {"model": "one"})
    whole = part_files.pack_part(single, about)
    path.write_bytes(whole)
    right = part_files.read_part(path)
    same = 0
    for bit in range(8 * len(whole)):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        try:
            loaded = part_files.read_part(path)
        except UserError:
            continue
        assert loaded.about == right.about and torch.equal(loaded.part.weight, right.part.weight), bit
        same += 1
    assert same < 100  # spaces that became tabs or line ends


def test_tensors_that_are_one_are_saved_and_stay_one(single, tmp_path, monkeypatch):
    class Tied(Single):
        def __init__(self, width):
            super().__init__(width)
            self.same = self.weight

    monkeypatch.setitem(vars(get_method("single")), "part", Tied)
    about = part_files.describe_part("single", Tied(3), {"tower": []}, {})
    (tmp_path / "x.safetensors").write_bytes(part_files.pack_part(Tied(3), about))
    loaded = part_files.read_part(tmp_path / "x.safetensors").part
    assert loaded.same is loaded.weight and torch.equal(loaded.weight, torch.zeros(3))


def test_changes_of_the_header_alone_are_found(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    about, tensors = part_files.read_part_file(path)
    changes = ({"trained": {"model": "two"}}, {"tower": [1.0]}, {"more": 1}, {"format": part_files.FIRST_FORMAT})
    for change in changes:
        save_file(tensors, path, metadata={part_files.HEADER: json.dumps(about | change)})
        assert "damaged, it is not as it was saved" in refused(model, path)


@pytest.mark.parametrize("tower", ["[NaN]", "[Infinity]", "[1e999]", "[true]", '["1"]', "[[1]]", "[-1]", "{}", "null"])
def test_a_signature_holds_finite_numbers(model, scorer, tmp_path, tower):
    path = made(tmp_path, model, scorer)
    about, tensors = part_files.read_part_file(path)
    text = json.dumps(about | {"tower": "HERE"}).replace('"HERE"', tower)
    for form in (part_files.FORMAT, part_files.FIRST_FORMAT):
        save_file(tensors, path, metadata={part_files.HEADER: text.replace(part_files.FORMAT, form)})
        told = refused(model, path)
        assert "not finite" in told or "its header has no tower" in told
    assert not signature.signatures_match({"tower": [1.0]}, {"tower": [float("nan")]})


@pytest.mark.parametrize("kind", ["int32", "int64", "float64", "complex64", "float8_e4m3fn", "bool", "uint8"])
def test_weights_of_other_types_are_refused(model, scorer, tmp_path, kind):
    path = made(tmp_path, model, scorer)
    about, tensors = part_files.read_part_file(path)
    rewrite(path, about, {name: value.to(getattr(torch, kind)) for name, value in tensors.items()})
    assert f"is of type {kind}, not float32 or float16 or bfloat16" in refused(model, path)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_double_is_not_written(model, scorer, tmp_path, kind):
    path = made(tmp_path, model, scorer.to(kind))
    loaded = resolve.load_parts(Plan.parse("learned@4:32"), model, path)["learned"]
    assert all(torch.equal(value.float(), scorer.state_dict()[name].float()) for name, value in loaded.state_dict().items())
    with pytest.raises(UserError, match=r"float64; convert the part with \.float\(\)"):
        made(tmp_path, model, scorer.double())


def test_settings_of_any_size_allocate_nothing(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    about = part_files.read_header(path)
    for width, told in ((10**9, "is (128,), not (1000000000,)"), (10**18, "whole number"), (10**30, "integer of 100 bits")):
        rewrite(path, about | {"settings": {"width": width}})
        assert told in refused(model, path)
    rewrite(path, about | {"trained": {"x": json.loads("[" * 30 + "]" * 30)}})
    assert "nested more than 20 deep" in refused(model, path)
    rewrite(path, about | {"trained": {"model": "x" * (2 << 20)}})
    assert "its header has 2,0" in refused(model, path)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("learned", {"width": -3}),
        ("merger", {"hidden": 0}),
        ("merger", {"keep": "7"}),
        ("merger", {"temperature": float("nan")}),
        ("merger", {"kind": ["simple"]}),
        ("cross", {"layers": [1, 1]}),
        ("cross", {"layers": list(range(1001))}),
        ("cross", {"layers": ["1"]}),
        ("cross", {"keep": [-1], "layers": [2]}),
        ("cross", {"heads": 0}),
        ("sdtps", {"modalities": ["RGB", "RGB"]}),
        ("sdtps", {"patches": 10**12}),
        ("sdtps", {"aggr_ratio": 10**400}),
        ("sdtps", {"aggregation": ["mix"]}),
        ("sdtps", {"place": 3}),
    ],
)
def test_settings_that_mean_nothing_are_refused(method, settings):
    with pytest.raises(UserError):
        get_method(method).part(**{"width": 16, **settings})


def test_the_parts_that_ship_have_a_checksum_of_all_they_hold():
    shipped = sorted(SHIPPED.glob("*.safetensors"))
    assert [path.stem for path in shipped] == ["cross", "learned", "merger", "patchmerger"]
    assert all(part_files.read_part(path).about["format"] == part_files.FORMAT for path in shipped)


def test_what_cannot_be_read_again_is_not_written(model, scorer, tmp_path):
    for trained in ({"loss": float("nan")}, {"model": object()}, {"model": "x" * (2 << 20)}):
        with pytest.raises(UserError, match="learned: "):
            part_files.save_part(tmp_path / "x.safetensors", "learned", scorer, model, trained)
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_files_are_refused_in_one_line(model, tmp_path):
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(10 << 30)
    names = ("empty", "folder", "pipe", "sparse")
    for weights in (
        3,
        2.5,
        b"x",
        object(),
        [3],
        ["", None],
        "x" * 5000,
        "x/" * 3000,
        "a\0b.safetensors",
        "a\0b",
        "\x1b[31m.pt",
    ):
        assert len(refused(model, weights)) < 600
    for name in names:
        assert len(refused(model, tmp_path / f"{name}.safetensors")) < 600


@pytest.mark.parametrize("key", ["method", "settings", "tower", "sha256", "trained"])
def test_a_header_that_lacks_something_says_what(model, scorer, tmp_path, key):
    path = made(tmp_path, model, scorer)
    about = {name: value for name, value in part_files.read_header(path).items() if name != key}
    save_file(load_file(path), path, metadata={part_files.HEADER: json.dumps(about)})
    assert f"its header has no {key};" in refused(model, path)
    save_file(load_file(path), path, metadata={part_files.HEADER: json.dumps([about])})
    assert "not the trained part of a method" in refused(model, path)


def test_what_does_not_fit_is_refused_in_one_line(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    assert "does not use it" in refused(model, path, "anchor@4:32")
    assert "another of the files" in refused(model, [path, path])
    assert "not a SelectionNetwork" in refused(model, {"learned": torch.nn.Linear(1, 1)})
    assert "no method" in refused(model, {"lerned": scorer})
    assert "not a trained method" in refused(model, {"anchor": scorer})
    with torch.no_grad():
        scorer.out.weight[0, 0] = float("nan")
    assert "NaN" in refused(model, made(tmp_path, model, scorer))
    del scorer.token
    assert "another version" in refused(model, made(tmp_path, model, scorer))


def test_weights_for_another_width_are_refused(model, scorer, tmp_path, tiny_clip):
    other = loading.load(tiny_clip.name, tiny_clip.weights).model
    width = signature.token_width(open_tower(other))
    assert width != 128
    told = refused(other, made(tmp_path, model, scorer), "learned@1:5")
    assert "width 128 (one)" in told and str(width) in told


# ------------------------------------------------------------------------------------------------------------ the model


def test_weights_that_were_trained_on_another_model_are_refused(model, scorer, tmp_path):
    """The width fits, the model does not; a module that a user hands over is used all the same."""
    path, other = made(tmp_path, model, scorer), loading.load("sieve-vit-8", "").model
    told = refused(other, path)
    assert "was trained on one, and this model" in told and "tokensieve train configs/learned_selector.yaml" in told
    assert resolve.load_parts(Plan.parse("learned@4:32"), other, {"learned": scorer})["learned"] is scorer


def test_number_formats_do_not_make_another_model(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        held = loading.load("sieve-vit-8", "scenes-v1").model.to(kind)
        assert set(resolve.load_parts(Plan.parse("learned@4:32"), held, path)) == {"learned"}


def test_what_cannot_be_signed_is_not_compared():
    plain, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    quantised = torch.nn.Module()
    quantised.weight = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)
    signed = signature.layer_norms([plain, quantised, torch.nn.Linear(3, 3, device="meta")])
    by_hand = sum(p.double().square().sum().item() for p in plain.parameters()) ** 0.5
    assert signed[0] == pytest.approx(by_hand, abs=1e-4) and signed[1:] == [None, None]
    assert signature.signatures_match({"tower": [1.0, None]}, {"tower": [1.0, 5.0]})
    assert not signature.signatures_match({"tower": signature.layer_norms([plain])}, {"tower": signature.layer_norms([other])})
    assert not signature.signatures_match({"tower": [1.0]}, {"tower": [1.0, 5.0]})


def test_a_vlm_is_signed_with_its_decoder_and_each_place_has_its_width(tmp_path):
    vlm = vlm_models.llava()
    signed = signature.model_signature(vlm)
    assert len(signed["tower"]) == 3 and len(signed["decoder"]) == 6  # it takes the tokens before the tower's last block
    at_out, in_llm = fresh_part(METHOD, 24), fresh_part(METHOD, 32)
    for part, plan, wrong in ((at_out, "learned@out:5", "learned@llm.2:5"), (in_llm, "learned@llm.2:5", "learned@out:5")):
        part_files.save_part(tmp_path / "x.safetensors", "learned", part, vlm, {"model": "tiny"})
        assert set(resolve.load_parts(Plan.parse(plan), vlm, tmp_path / "x.safetensors")) == {"learned"}
        for weights in (tmp_path / "x.safetensors", {"learned": part}):
            told = refused(vlm, weights, wrong)
            assert f"width {part.settings['width']}" in told and f"{wrong} sees tokens of width" in told
    with torch.no_grad():
        vlm.model.language_model.layers[2].mlp.up_proj.weight.mul_(2)
    assert "is another or has other weights" in refused(vlm, tmp_path / "x.safetensors", "learned@llm.2:5")
    tower = vlm.model.vision_tower
    part_files.save_part(tmp_path / "x.safetensors", "learned", at_out, vlm, {})
    assert "is another" in refused(tower, tmp_path / "x.safetensors", "learned@2:5")


def test_what_a_plan_does_not_use_is_left_aside(model, scorer):
    """So that one folder serves several plans; but weights that no step uses are a mistake."""

    class Other(SelectionNetwork):
        pass

    @tokensieve.method(part=Other)
    def another(view, keep):
        raise NotImplementedError

    try:
        both = {"learned": scorer, "another": Other(width=128)}
        assert resolve.load_parts(Plan.parse("learned@4:32"), model, both) == {"learned": scorer}
        assert "does not use it" in refused(model, {"another": Other(width=128)})
    finally:
        REGISTRY.remove("another")


def test_a_header_whose_settings_build_no_module_is_refused(model, scorer, tmp_path):
    path = made(tmp_path, model, scorer)
    about = part_files.read_header(path)
    for settings, told in (({"width": 128, "depth": 3}, "another version of learned"), ({"width": "128"}, "settings.width")):
        rewrite(path, {**about, "settings": settings})
        assert told in refused(model, path)


@pytest.mark.parametrize("form", ["width", "settings"])
def test_files_of_the_first_version_still_load(model, scorer, tmp_path, form):
    """Their checksum was that of the tensors; the oldest had the width in place of the settings."""
    path = made(tmp_path, model, scorer)
    about = part_files.read_header(path) | {"format": part_files.FIRST_FORMAT}
    if form == "width":
        about["width"] = about.pop("settings")["width"]
    rewrite(path, about)
    loaded = resolve.load_parts(Plan.parse("learned@4:32"), model, path)["learned"]
    assert part_files.part_checksum(loaded) == part_files.part_checksum(scorer)


def test_a_state_dict_is_found_by_name_only_in_its_folder(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "mine.pt")
    (tmp_path / "learned_step_3.pt").write_bytes(b"not a file of torch")
    torch.save([1], tmp_path / "learned_step_4.pt")
    for name, reason in (
        ("mine.pt", "needs the name and the folder that the training gave it"),
        ("learned_step_2.pt", "no file"),
        ("learned_step_3.pt", "damaged, or not tensors that torch.save wrote"),
        ("learned_step_4.pt", "not a state dict, which holds tensors by name"),
    ):
        with pytest.raises(UserError, match=reason):
            resolve.read_weights(str(tmp_path / name))
