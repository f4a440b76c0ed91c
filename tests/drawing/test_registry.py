"""Kinds of panels and kinds of input of `show`: ours are complete, and a user's file can add others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.show_arguments import arguments
from tokensieve import apply, cli, plugins
from tokensieve.cli.parser import parse
from tokensieve.drawing import panels, show
from tokensieve.drawing.registry import PANELS, SHOW_INPUTS
from tokensieve.drawing.stages import stages
from tokensieve.registry import resolve

PLUGIN = """
from pathlib import Path

from tokensieve.drawing.registry import PANELS, SHOW_INPUTS, PanelKind, ShowInput
from tokensieve.flags import Flag


def draw_sizes(axis, band, stage):
    axis.set_title(f"{len(band.patches)} patches")


def sizes_legend(bands):
    from matplotlib.patches import Patch

    return [Patch(label=f"{len(bands)} bands")]


def accepts(args):
    return args.noise > 0


def run(args):
    return [Path(f"{args.noise} of {args.images[0]}")]


PANELS.add(
    PanelKind(
        "sizes", draw_sizes, applies=lambda stage: True, caption="sizes of {stage.tokens_out}", legend=sizes_legend
    )
)
SHOW_INPUTS.add(
    ShowInput(
        "noise",
        "with --noise random images",
        accepts=f"{__name__}:accepts",
        run=f"{__name__}:run",
        datasets=f"{__name__}:NAMES",
        flags=(Flag("noise", "how much", 0, {"type": int}),),
    )
)
NAMES = ("static",)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file that declares a kind of panel and a kind of input, loaded for one test."""
    path = tmp_path / "sizes_panel.py"
    path.write_text(PLUGIN)
    for owner in (PANELS, SHOW_INPUTS):
        for name in ("_declared", "_origins"):
            monkeypatch.setattr(owner, name, dict(getattr(owner, name)))
    for name in ("_loaded", "_hashes"):
        monkeypatch.setattr(plugins, name, dict(getattr(plugins, name)))
    module = plugins.load_plugin(path)
    yield
    del sys.modules[module.__name__]


def test_what_declarations_name_exists() -> None:
    assert {"images", "questions", "reid"} <= set(SHOW_INPUTS)
    for kind in SHOW_INPUTS.values():
        assert callable(resolve(kind.accepts)) and callable(resolve(kind.run)) and kind.summary
    assert {"embedded", "embedded-reid", "RGBNT201"} <= set(show.dataset_names())
    assert list(PANELS) == ["kept", "scores", "shares", "original"]


def test_declarations_import_no_torch() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'PIL', 'matplotlib') if name in sys.modules]"
    code = f"import sys; from tokensieve.drawing.registry import SHOW_INPUTS; print(sorted(SHOW_INPUTS), {heavy})"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "['images', 'questions', 'reid', 'videos'] []\n"


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "images"),
        ({"question": "what is it?"}, "questions"),
        ({"model_type": "vlm"}, "questions"),
        ({"gallery": True}, "reid"),
        ({"modalities": "RGB"}, "reid"),
        ({"model": "sieve-reid-6"}, "reid"),
    ],
)
def test_flags_decide_the_kind_of_input(flags: dict[str, object], kind: str) -> None:
    args = arguments(["photo.jpg"], **flags)
    assert next(name for name in reversed(list(SHOW_INPUTS)) if resolve(SHOW_INPUTS[name].accepts)(args)) == kind


def test_a_panel_of_a_plug_in_is_drawn_with_its_legend(plugin: None, tiny_clip) -> None:
    model, transform, _ = tiny_clip.make()
    with torch.no_grad(), apply(model, "anchor@2(k=3,m=5)") as handle:
        model.encode_image(torch.rand(1, 3, 48, 32, generator=torch.Generator().manual_seed(0)))
    sheet = handle.picture(Image.new("RGB", (32, 48)), transform=transform)
    assert "after block 2: sizes of 8" in {text.get_text() for text in sheet.texts}
    assert "24 patches" in {axis.get_title() for axis in sheet.axes}
    assert "1 bands" in {text.get_text() for legend in sheet.legends for text in legend.get_texts()}
    (stage,) = stages(handle)
    assert next(kind.name for kind in panels.kinds_of(stage)) == "kept"
    assert [kind.name for kind in panels.kinds_of(stage, brief=True)] == ["kept"]


def test_an_input_of_a_plug_in_has_its_flags_and_is_shown(plugin: None, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["show", "static:3", "--noise", "2"])
    assert show.run(args) == [Path("2 of static:3")]
    with pytest.raises(SystemExit):
        parse(["show", "--help"])
    assert "with --noise random images" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["show", "statik:3"]) == 2
    assert "Did you mean static:N?" in capsys.readouterr().err
