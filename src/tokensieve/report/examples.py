"""TODO docstring."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tokensieve.errors import UserError, one_line
from tokensieve.report.fields import Result, mapping_at, plan_text

if TYPE_CHECKING:
    from torch import nn

    from tokensieve.plan import Plan


SCENES = [3 + 8 * number for number in range(100)]  # test scenes that are drawn, in this order


def render_examples(found: Sequence[Result], images: int) -> str:
    """What the plans of each model keep of a few scenes, for models that ship with the package."""
    models: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        models.setdefault((str(result["model"]), str(result["pretrained"])), []).append(result)
    parts = ["<section id='examples'><h2>What the plans keep</h2>"]
    for (model, pretrained), rows in models.items():
        parts.append(f"<h3>{escape(f'{model} ({Path(pretrained).name})' if pretrained else model)}</h3>")
        parts.append(_pictures(model, pretrained, rows, images))
    return "\n".join([*parts, "</section>"])


def _pictures(model: str, pretrained: str, rows: Sequence[Result], images: int) -> str:
    from tokensieve import embedded
    from tokensieve.data.registry import folder_of

    texts = list(dict.fromkeys(plan_text(row) for row in rows))
    if pretrained not in embedded.MODELS.get(model, ()):
        kind = str(mapping_at(rows[0], "run").get("model_type", "open_clip"))
        named = shlex.join(
            ["--model", model]
            + (["--pretrained", pretrained] if pretrained else [])
            + (["--model_type", kind] if kind != "open_clip" else [])
        )
        what = f"{rows[0]['dataset']}:0" if kind == "reid" else "IMAGE"
        root = mapping_at(mapping_at(rows[0], "run"), "arguments").get("dataset_root")
        if kind == "reid" and root is not None:
            named += f" {shlex.join(['--dataset_root', folder_of(str(rows[0]['dataset']), str(root))])}"
        command = shlex.join(["--plan", texts[0], *(["--compare", *texts[1:]] if texts[1:] else [])])
        return (
            "<p class='soft'>No pictures: they are drawn here for the models that ship with tokensieve only. To draw some:</p>"
            f"<pre>{escape(f'tokensieve show {what} {named} {command}')}</pre>"
        )
    from tokensieve.drawing import sheet, show_images
    from tokensieve.drawing.band import Band
    from tokensieve.models import loading
    from tokensieve.plan import Plan

    try:
        loaded = loading.load(model, pretrained)
    except UserError as error:
        return f"<p class='soft'>No pictures: {escape(str(error))}</p>"
    originals = [show_images.read(f"{show_images.EMBEDDED}{scene}", 0) for scene in SCENES[:images]]
    bands: list[list[Band]] = [[] for _ in originals]
    said = []
    weights = loaded.fingerprint.partition("-")[0]
    if any(str(mapping_at(row, "run").get("weights", weights)).partition("-")[0] != weights for row in rows):
        said.append("These are drawn with the weights that ship now; some of the results were made with others.")
    for text in (text for text in texts if text != "none"):
        try:
            plan = Plan.parse(text)
            trained, remarks = _trained_parts(plan, loaded.model, [row for row in rows if plan_text(row) == text])
            for so_far, more in zip(bands, show_images.make_bands(loaded, [plan], originals, weights=trained), strict=True):
                so_far += more
            said += remarks
        except UserError as error:
            said.append(f"{text} is not drawn: {one_line(error)}")
    if not any(bands):
        said.append("No pictures: no plan here cuts anything.")
    figures = []
    for (name, _, _), of_image in zip(originals, bands, strict=True):
        if of_image:
            drawn = sheet.draw(of_image, brief=True)
            described = escape(f"{name}: the patches that are kept under {', '.join(band.plan for band in of_image)}")
            figures.append(f"<figure class='card'><img alt='{described}' src='{_data(drawn.png())}'></figure>")
    return "".join([*figures, *(f"<p class='soft'>{escape(line)}</p>" for line in said)])


def _trained_parts(plan: Plan, model: nn.Module, rows: Sequence[Result]) -> tuple[dict[str, nn.Module], list[str]]:
    """The trained weights of a result, from the files it names or those that ship; what to say if results have others."""
    from tokensieve.parts import resolve

    wanted = {str(mark) for row in rows if (mark := mapping_at(row, "reduction").get("trained")) is not None}
    named = [mapping_at(mapping_at(row, "run"), "arguments").get("weights") for row in rows]
    for files in named:
        try:
            found = resolve.load_parts(plan, model, list(map(str, files)) if isinstance(files, list) else None)
        except UserError:  # the files are gone, or others now
            continue
        if resolve.parts_fingerprint(found) in wanted:
            break
    else:
        found = resolve.load_parts(plan, model)
    if wanted <= {resolve.parts_fingerprint(found)}:
        return found, []
    return found, [f"{plan} is drawn with trained weights that are at hand; some of its results were made with others."]


def _data(png: bytes) -> str:
    """The picture as an address that holds it, in a format that takes less room."""
    from PIL import Image

    small = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(small, "WEBP", quality=86, method=4)
    return f"data:image/webp;base64,{base64.b64encode(small.getvalue()).decode()}"
