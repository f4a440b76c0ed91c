"""Hugging Face and timm models by folder, id and name: what is loaded is what was saved, and errors come at once."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import hf_models
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.models import loading
from tokensieve.models.features import encode_image, encode_text
from tokensieve.models.loading import fingerprints, hub
from tokensieve.models.loading import hf as load_hf

KINDS = ("clip", "siglip", "siglip2", "dinov2", "dinov3", "vit")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each kind, its name with a space in it."""
    return {kind: hf_models.save(kind, tmp_path_factory.mktemp("models") / f"a {kind}") for kind in KINDS}


def picture(height=60, width=90):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_loaded_as_it_was_saved(folders, kind):
    loaded = loading.load(folders[kind], "", model_type="hf")
    assert not loaded.model.training
    pixels = loaded.transform(picture())
    assert pixels.shape == (3, 48, 48) and pixels.dtype == torch.float32
    assert torch.equal(pickle.loads(pickle.dumps(loaded.transform))(picture()), pixels)  # workers get a copy
    assert loaded.transform(picture().convert("L")).shape == (3, 48, 48)
    saved = hf_models.build(kind)
    with torch.no_grad():
        assert_near(encode_image(loaded.model, pixels[None]), encode_image(saved, pixels[None]), steps=1000)
    assert loaded.fingerprint == fingerprints.identity(saved.vit if kind == "vit" else saved, loaded.transform)
    assert loaded.fingerprint == loading.load(folders[kind], "", model_type="hf").fingerprint
    assert (kind == "siglip2") == any("resized to 48 x 48" in note for note in loaded.notes)


def test_clips_processor_does_what_open_clips_transform_does(folders):
    from open_clip.transform import image_transform

    theirs = image_transform(48, is_train=False)
    ours = loading.load(folders["clip"], "", model_type="hf").transform
    for size in ((48, 48), (60, 90), (100, 50)):
        torch.testing.assert_close(ours(picture(*size)), theirs(picture(*size)), rtol=0, atol=2e-2)  # one grey level at most


def test_clips_tokens_are_padded_masked_and_truncated(folders):
    loaded = loading.load(folders["clip"], "", model_type="hf")
    tokens = loaded.tokenizer(["a cat", "dog", "dog " * 20])
    assert tokens["input_ids"].shape == (3, 16) and set(tokens) == {"input_ids", "attention_mask"}
    assert tokens["input_ids"][0, :6].tolist() == [52, 26, 2, 0, 45, 53]  # start, a, c, a, t, end
    with torch.no_grad():
        together = encode_text(loaded.model, tokens.to("cpu"))
        alone = encode_text(loaded.model, loaded.tokenizer(["dog"]))
    assert_near(together[1:2], alone, steps=1000)


def test_siglips_tokens_are_lower_case_of_full_length_without_a_mask(folders):
    for kind in ("siglip", "siglip2"):
        tokens = loading.load(folders[kind], "", model_type="hf").tokenizer(["a cat", "A CAT"])
        assert set(tokens) == {"input_ids"} and tokens["input_ids"].shape == (2, 16)
        assert torch.equal(tokens["input_ids"][0], tokens["input_ids"][1])


@pytest.mark.parametrize("kind", ["dinov2", "dinov3", "vit"])
def test_vision_models_have_no_tokenizer_and_say_what_they_are_for(folders, kind):
    with pytest.raises(UserError, match=r"no text tower.*--task linear_probe"):
        loading.load(folders[kind], "", model_type="hf").tokenizer(["a cat"])


def test_half_precision_weights_become_float32(tmp_path):
    hf_models.save("dinov2", tmp_path)
    hf_models.build("dinov2").half().save_pretrained(tmp_path)
    assert loading.load(str(tmp_path), "", model_type="hf").model.dtype == torch.float32


def test_defaults_are_never_those_of_the_embedded_model():
    assert loading.model_pairs(["a", "b"], None, None, "hf") == [("a", ""), ("b", "")]
    assert loading.model_pairs(["a"], ["x", "y"], None, "timm") == [("a", "x"), ("a", "y")]
    for kind, example in (("hf", "openai/clip-vit-base-patch16"), ("timm", "vit_base_patch16_224")):
        with pytest.raises(UserError, match=f"--model_type {kind} needs --model, for example --model {example}"):
            loading.model_pairs(None, None, None, kind)
        with pytest.raises(UserError, match="--pretrained_model names open_clip models"):
            loading.model_pairs(None, None, ["ViT-B-32,openai"], kind)


def test_folders_that_cannot_be_loaded(folders, tmp_path):
    def error(model, pretrained=""):
        with pytest.raises(UserError) as caught:
            loading.load(str(model), pretrained, model_type="hf")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such folder" in error(tmp_path / "nothing")
    assert "there is no such folder" in error("./nothing")
    assert "no config.json" in error(tmp_path)
    assert "holds its own weights" in error(folders["clip"], "openai")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "is a bert, which makes no features of images" in error(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    assert "cannot load" in error(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot load" in error(tmp_path)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_in_which_something_is_missing_says_so(tmp_path, file):
    hf_models.save("clip", tmp_path)
    for path in tmp_path.glob("tokenizer*" if file == "tokenizer.json" else file):
        path.unlink()
    says = r"knows \d+ of 54 tokens: its files" if file == "tokenizer.json" else "cannot load"
    with pytest.raises(UserError, match=says) as caught:
        loading.load(str(tmp_path), "", model_type="hf")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_whose_package_is_not_installed_says_what_to_type(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    def refuse(*args, **kwargs):
        raise ImportError("SiglipTokenizer requires the SentencePiece library but it was not found")

    hf_models.save("siglip", tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UserError, match="pip install sentencepiece"):
        loading.load(str(tmp_path), "", model_type="hf")


def test_weights_that_are_damaged_or_lack_something_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    hf_models.save("clip", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    lacking = {key: value for key, value in state.items() if "visual_projection" not in key}
    save_file(lacking, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors, which would be random: visual_projection.weight"):
        loading.load(str(tmp_path), "", model_type="hf")
    file.write_bytes(b"\x00" * 100)
    with pytest.raises(UserError, match="damaged"):
        loading.load(str(tmp_path), "", model_type="hf")


def test_offline_an_id_that_was_not_fetched_answers_at_once(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reachable", lambda *hosts: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)  # a miss that is retried waits in between, however busy the machine
    with pytest.raises(UserError, match=r"openai/clip-vit-base-patch16 is not on this machine.*--model /path/to/model"):
        loading.load("openai/clip-vit-base-patch16", "", model_type="hf", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"not on this machine.*Only bench knows 'dinov2-base'"):
        loading.load("dinov2-base", "", model_type="hf", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"vit_base_patch16_224.augreg_in21k are not on this machine.*--pretrained /path"):
        loading.load("vit_base_patch16_224", "augreg_in21k", model_type="timm", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"hf-hub:timm/thing are not on this machine"):
        loading.load("hf-hub:timm/thing", "", model_type="timm", cache_dir=str(tmp_path))
    assert not waited


def edited(folder, copy, file, change):
    """A copy of the folder in which change() was done to the JSON of one of its files."""
    shutil.copytree(folder, copy)
    known = json.loads((copy / file).read_text())
    change(known)
    (copy / file).write_text(json.dumps(known))
    return str(copy)


def test_an_edited_configuration_is_another_model(folders, tmp_path):
    def mark(number, file, change):
        return loading.load(edited(folders["clip"], tmp_path / str(number), file, change), "", model_type="hf").fingerprint

    known = loading.load(folders["clip"], "", model_type="hf").fingerprint
    assert mark(0, "config.json", lambda config: config.update(transformers_version="5.0.0")) == known
    marks = [
        mark(1, "config.json", lambda config: config["vision_config"].update(num_attention_heads=2)),
        mark(2, "config.json", lambda config: config["vision_config"].update(hidden_act="gelu")),
        mark(3, "config.json", lambda config: config["text_config"].update(layer_norm_eps=1e-3)),
        mark(4, "preprocessor_config.json", lambda config: config.update(image_mean=[0.5, 0.5, 0.5])),
    ]
    assert len({known, *marks}) == 5
    assert {known.partition("-")[0]} == {mark.partition("-")[0] for mark in marks}  # the weights are the same


def test_an_edited_open_clip_folder_is_another_model(tiny_clip, tmp_path):
    import open_clip

    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_clip.weights, folder / "open_clip_model.safetensors")
    config = {"model_cfg": open_clip.get_model_config(tiny_clip.name), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))

    def mark(number, change):
        copy = tmp_path / str(number)
        edited(folder, copy, "open_clip_config.json", change)
        return loading.load(f"local-dir:{copy}", "").fingerprint

    marks = [
        mark(0, lambda config: None),
        mark(1, lambda config: config["model_cfg"]["vision_cfg"].update(head_width=16)),
        mark(2, lambda config: config["model_cfg"].update(quick_gelu=True)),
        mark(3, lambda config: config["model_cfg"]["vision_cfg"].update(pool_type="avg")),
        mark(4, lambda config: config["preprocess_cfg"].update(interpolation="bilinear")),
    ]
    assert len(set(marks)) == 5
    assert marks[0] == mark(5, lambda config: None) == loading.load(tiny_clip.name, tiny_clip.weights).fingerprint


def test_other_heads_are_another_timm_model():
    import timm

    def mark(**options):
        torch.manual_seed(0)
        return fingerprints.identity(timm.create_model(TIMM, num_classes=0, **options), None)

    marks = [mark(), mark(num_heads=4), mark(global_pool="avg", fc_norm=False), mark(act_layer="relu")]
    assert len(set(marks)) == 4 and len({mark.partition("-")[0] for mark in marks}) == 1
    assert marks[0] == mark()


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process():
    """Addresses, and the order of sets, differ from process to process."""
    code = "from tokensieve.models import loading; print(loading.load('sieve-vit-8', 'scenes-v1').fingerprint)"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert other.stdout.split()[-1] == loading.load("sieve-vit-8", "scenes-v1").fingerprint
    steps = [[object(), test_the_fingerprint_is_the_same_in_another_process] for _ in range(2)]  # as a transform shows them
    assert len({fingerprints.identity(torch.nn.Identity(), step) for step in steps}) == 1


def test_a_projection_that_the_config_names_is_loaded(tmp_path):
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    saved = CLIPVisionModelWithProjection(CLIPVisionConfig(**hf_models.VISION, projection_dim=24)).eval()
    saved.save_pretrained(tmp_path / "whole")
    CLIPImageProcessor(size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}).save_pretrained(tmp_path / "whole")
    pixels = torch.randn(2, 3, 48, 48)
    loaded = loading.load(str(tmp_path / "whole"), "", model_type="hf")
    with torch.no_grad():
        assert torch.equal(encode_image(loaded.model, pixels), saved(pixels).image_embeds)
    assert not loaded.notes
    assert hasattr(loading.architecture(str(tmp_path / "whole"), image_size=64, model_type="hf"), "visual_projection")
    # a config that does not name it: what is left out is said
    bare = edited(tmp_path / "whole", tmp_path / "bare", "config.json", lambda config: config.pop("architectures"))
    assert loading.load(bare, "", model_type="hf").notes == [f"CLIPVisionModel does not use visual_projection.weight of {bare}"]


def test_a_text_tower_without_a_longest_text_takes_the_tokenizers(folders, tmp_path):
    from types import SimpleNamespace

    text = SimpleNamespace(vocab_size=54)
    config = SimpleNamespace(model_type="other", text_config=text)
    tokenize = load_hf._tokenizer(folders["clip"], config, {})
    assert tokenize(["dog " * 20])["input_ids"].shape == (1, 16)
    text.max_position_embeddings = -1  # as some say "any length"
    endless = edited(
        folders["clip"], tmp_path / "endless", "tokenizer_config.json", lambda c: c.update(model_max_length=10**30)
    )
    assert load_hf._tokenizer(endless, config, {})(["dog " * 20])["input_ids"].shape == (1, 62)


def test_an_id_that_was_fetched_is_loaded_offline(folders, tmp_path):
    """The cache as huggingface_hub lays it out."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--clip"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folders["clip"], repository / "snapshots" / commit)
    loaded = loading.load("someone/clip", "", model_type="hf", cache_dir=str(tmp_path))
    assert loaded.fingerprint == loading.load(folders["clip"], "", model_type="hf").fingerprint
    with pytest.raises(UserError, match="not on this machine"):
        loading.load("someone/clip", "other", model_type="hf", cache_dir=str(tmp_path))  # that revision was not


# ------------------------------------------------------------------------------------------------------------------- timm


TIMM = "test_vit"


def test_timm_random_weights_are_noted_and_the_transform_is_the_models():
    loaded = loading.load(TIMM, "", model_type="timm")
    assert loaded.notes == [f"{TIMM} has random weights: --pretrained is empty"]
    pixels = loaded.transform(picture())
    with torch.no_grad():
        assert encode_image(loaded.model, pixels[None]).shape == (1, loaded.model.num_features)
    with pytest.raises(UserError, match=r"--task linear_probe"):
        loaded.tokenizer(["a cat"])


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_timm_weights_from_a_file_whatever_its_classifier(tmp_path, suffix):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(3)
    model = timm.create_model(TIMM, num_classes=7).eval()
    file = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": model.state_dict()}, file)
    else:
        save_file(model.state_dict(), file)
    loaded = loading.load(TIMM, str(file), model_type="timm")
    assert not loaded.notes
    pixels = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(encode_image(loaded.model, pixels), encode_image(model, pixels))


def test_timm_errors(tmp_path):
    def error(model, pretrained=""):
        with pytest.raises(UserError) as caught:
            loading.load(model, str(pretrained), model_type="timm")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "Did you mean 'vit_base_patch16_224'?" in error("vit_base_patch16_244")
    assert "Did you mean 'augreg_in21k'?" in error("vit_base_patch16_224", "augreg_in21")
    assert "Did you mean 'augreg_in21k'?" in error("vit_base_patch16_224.augreg_in21")
    assert "names its weights already" in error("vit_base_patch16_224.augreg_in21k", "dino")
    assert "there is no such file" in error(TIMM, tmp_path / "no.safetensors")
    (tmp_path / "text.pth").write_text("hello there")
    assert "is not a file of weights" in error(TIMM, tmp_path / "text.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pth")
    assert "do not fit" in error(TIMM, tmp_path / "other.pth")

    class Danger:
        def __reduce__(self):
            return (print, ("this ran",))

    torch.save({"state_dict": Danger()}, tmp_path / "danger.pth")
    assert "damaged, or more than tensors" in error(TIMM, tmp_path / "danger.pth")


# ---------------------------------------------------------------------------------------------------------- architectures


def test_architectures_of_every_type_can_be_measured(folders, tiny_clip):
    from tokensieve.models.registry import open_tower

    def size(*args, **kwargs):
        return open_tower(loading.architecture(*args, **kwargs)).image_size

    assert size(tiny_clip.name) == (48, 32)
    assert size(TIMM, model_type="timm") == (160, 160)
    assert size(TIMM, image_size=96, model_type="timm") == (96, 96)
    assert size(folders["clip"], model_type="hf") == (48, 48)
    for kind in KINDS:
        assert size(folders[kind], image_size=64, model_type="hf") == (64, 64)
    with pytest.raises(UserError, match="resnet10t cannot be made with the image size"):
        loading.architecture("resnet10t", image_size=96, model_type="timm")
    with pytest.raises(UserError, match="Did you mean 'clip-vit-base-patch16'"):
        loading.architecture("clip-vit-base-patch-16", model_type="hf")
    with pytest.raises(UserError, match="random weights here"):
        loading.architecture("clip-vit-base-patch16", "openai", model_type="hf")
    with pytest.raises(UserError, match="ja_clip has no architectures"):
        loading.architecture("x", model_type="ja_clip")


def test_well_known_towers_have_the_sizes_they_are_known_for():
    """(parameters in millions, patches), from the configurations alone."""
    from tokensieve.models.registry import open_tower

    known = {
        "clip-vit-base-patch32": (87.8, 49),
        "clip-vit-base-patch16": (86.2, 196),
        "clip-vit-large-patch14": (303.9, 256),
        "clip-vit-large-patch14-336": (304.3, 576),
        "siglip-base-patch16-224": (92.9, 196),
        "siglip-so400m-patch14-384": (428.2, 729),
        "dinov2-base": (86.6, 1369),
        "dinov2-large": (304.4, 1369),
        "dinov3-vitb16": (85.7, 196),
        "vit-base-patch16-224": (85.8, 196),
        "vit-large-patch16-224": (303.3, 196),
    }
    assert known.keys() == load_hf.ARCHITECTURES.keys()
    for name, (millions, patches) in known.items():
        with torch.device("meta"):
            model = loading.architecture(name, model_type="hf")
        h, w = open_tower(model).grid
        assert h * w == patches, name
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.15), name
