"""`tokensieve export`: files that run without tokensieve and give the model's features, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import tokensieve
from tests.support.paths import ROOT
from tests.support.rounding import assert_near
from tokensieve import UserError, embedded
from tokensieve.cli import main
from tokensieve.exporting import graph, verify
from tokensieve.exporting.encoders import ImageEncoder
from tokensieve.exporting.preprocessing import read_preprocessing
from tokensieve.models.loading import load
from tokensieve.models.loading.vlm import load as load_vlm
from tokensieve.testing import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")


def run_cli(*words: object) -> int:
    return main(["export", *map(str, words)])


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def shown(page: str) -> str:
    """The lines of a page that run an exported file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.S) if "InferenceSession" in block]
    return lines


@pytest.mark.slow
def test_an_onnx_file_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "tower.onnx"
    path.write_bytes(b"mine")
    assert run_cli("--plan", "anchor@4:49", "--output", path) == 0
    assert (tmp_path / "tower.onnx.1").read_bytes() == b"mine"  # an older file is kept
    told = capsys.readouterr()
    assert "196 -> 49 at 4" in told.out and "Checked on 8 random images" in told.out and "kept as" in told.err
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["tokensieve"])
    assert about["plan"] == "anchor@4:49" and about["model"]["name"] == embedded.MODEL
    assert about["tokens"] == [{"layer": "4", "tokens_in": 196, "tokens_out": 49}]
    loaded = load(embedded.MODEL, embedded.default_weights(embedded.MODEL))
    (side, _), constants = about["preprocessing"]["image_size"], about["preprocessing"]
    assert constants["interpolation"] == "bicubic" and len(constants["mean"]) == len(constants["std"]) == 3
    for batch in (1, 3):
        x = images(batch, side)
        with torch.no_grad(), tokensieve.apply(loaded.model, "anchor@4:49"):
            expected = loaded.model.encode_image(x)
        (features,) = session.run(["features"], {"images": x.numpy()})
        assert_near(torch.from_numpy(features), expected, steps=1000)
    # the lines of the documentation, on a photo of the model's size
    photo = Image.fromarray(torch.randint(256, (side, side, 3), dtype=torch.uint8).numpy())
    photo.save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(shown("docs/export.md"), names)
    with torch.no_grad(), tokensieve.apply(loaded.model, "anchor@4:49"):
        expected = loaded.model.encode_image(loaded.transform(photo)[None])
    assert_near(torch.from_numpy(names["features"]), expected, steps=1000)
    exec(shown("README.md"), names)
    assert names["features"].shape == (2, 128)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_tower_and_projector_of_a_llava(suffix: str, tmp_path: Path) -> None:
    path, plan = tmp_path / f"llava.{suffix}", "cover@out:49"
    loaded = load_vlm()
    x = images(2, loaded.model.config.vision_config.image_size)
    if suffix == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
    assert run_cli("--model", embedded.LLAVA, "--plan", plan, "--output", path, "--quiet") == 0
    if suffix == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        text = session.get_modelmeta().custom_metadata_map["tokensieve"]
        tokens, positions = (torch.from_numpy(out) for out in session.run(["tokens", "positions"], {"images": x.numpy()}))
    else:
        extra = {"tokensieve.json": ""}
        program = torch.export.load(path, extra_files=extra)
        text = extra["tokensieve.json"]
        with torch.no_grad():
            tokens, positions = program.module()(x)
    about = json.loads(text)
    assert about["outputs"] == ["tokens", "positions"] and about["plan"] == plan
    assert about["preprocessing"]["image_size"] == [x.shape[2], x.shape[3]]
    with torch.no_grad(), tokensieve.apply(loaded.model, plan):
        full = loaded.model.model.get_image_features(x).pooler_output  # zeros where nothing was kept
    for image, kept, at in zip(full, tokens, positions, strict=True):
        assert_near(kept, image[at], steps=1000)
        assert int((image.abs().sum(-1) > 0).sum()) == len(at) == 49


TINY: dict[str, Any] = {
    "open_clip": lambda: tiny_models.open_clip_model(layers=3).visual,
    "timm": lambda: tiny_models.timm_model(depth=3, global_pool="avg"),
    "SigLIP": lambda: tiny_models.hf_model("SiglipVision"),
    "DINOv2": lambda: tiny_models.hf_model("Dinov2"),
}
MANY = "anchor@1:12(k=3,rest=merge) + evit@2.attn:9 + cover@2:7 + tome@3.attn:5"


def to_onnx(model: nn.Module, plan: str) -> float:
    """The difference of an ONNX file from the model, relative to the largest number."""
    with tokensieve.apply(model, plan) as handle:
        encoder = ImageEncoder(model).eval()
        content = graph.onnx_file(graph.trace(encoder, images(2, 32)), {}, encoder.outputs)
        agreement = verify.compare(verify.run_onnx(content), encoder, handle, (32, 32))
    assert agreement.images == 8 and not agreement.other
    return agreement.difference


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_families_in_onnx(family: str) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    assert to_onnx(TINY[family]().eval(), MANY) < 1e-5


def test_a_file_that_does_not_agree_is_not_written() -> None:
    torch.manual_seed(0)
    model = TINY["timm"]().eval()
    with tokensieve.apply(model, "grid@2:8") as handle:
        encoder = ImageEncoder(model).eval()
        assert verify.compare(lambda x: [encoder(x)], encoder, handle, (32, 32)).difference == 0
        with pytest.raises(UserError, match="does not agree"):
            verify.compare(lambda x: [encoder(x) + 1], encoder, handle, (32, 32))
        with pytest.raises(UserError, match="does not agree"):
            verify.compare(lambda x: [encoder(x) * torch.nan], encoder, handle, (32, 32))
        with pytest.raises(UserError, match="the file gives"):
            verify.compare(lambda x: [encoder(x)[:, :3]], encoder, handle, (32, 32))


def test_numbers_of_tokens_are_equal_or_wrong() -> None:
    wanted = torch.tensor([[1, 4], [2, 3]])
    assert verify.difference(wanted, wanted).tolist() == [0, 0]
    assert verify.difference(torch.tensor([[1, 4], [3, 2]]), wanted).tolist() == [0, float("inf")]
    values = torch.tensor([[1.0, -4.0], [2.0, 3.0]])
    assert verify.difference(values + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), values).tolist() == [0.25, 0]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--plan", "ats@2", "--output", "x.onnx"), "different number of tokens"),
        (("--plan", "anchor@llm.1:8", "--output", "x.onnx", "--model", embedded.LLAVA), "stands in the language model"),
        (("--plan", "pixelprune", "--output", "x.onnx"), "cannot be exported"),
        (("--plan", "grid@4:8", "--output", "x.txt"), "ends in .onnx"),
        (("--plan", "grid@4:8", "--output", "x.onnx", "--model", "ViT-B-99"), "no model"),
        (("--plan", "grid@99:8", "--output", "x.pt2"), "no layer 99"),
        (("--output", "x.pt2"), "--plan"),
    ],
)
def test_refused_before_work(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(*words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not list(tmp_path.iterdir())


def test_a_missing_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert run_cli("--plan", "grid@4:8", "--output", tmp_path / "x.onnx") == 2
    assert capsys.readouterr().err.strip().endswith("pip install 'tokensieve[export]'")


def test_constants_of_transforms() -> None:
    from torchvision import transforms

    steps = [
        transforms.Resize(40),
        transforms.CenterCrop(32),
        transforms.ToTensor(),
        transforms.Normalize((0.5,) * 3, (0.25,) * 3),
    ]
    found = read_preprocessing(transforms.Compose(steps))
    assert (found.image_size, found.resize, found.mean, found.std) == ((32, 32), (40,), (0.5,) * 3, (0.25,) * 3)
    assert found.interpolation == "bilinear" and "CenterCrop" in found.steps
    with pytest.raises(UserError, match="no constants"):
        read_preprocessing(lambda image: torch.zeros(3, 32, 32))


def test_metadata_of_a_program() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    content = graph.program_file(graph.trace(Twice(), images(2, 8)), {"plan": "none"})
    extra = {"tokensieve.json": ""}
    program = torch.export.load(io.BytesIO(content), extra_files=extra)
    assert json.loads(extra["tokensieve.json"]) == {"plan": "none"}
    assert program.module()(images(5, 8)).shape == (5, 3, 8, 8)
