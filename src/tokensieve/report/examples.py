"""Example pictures of the page: which patches the plans of a result keep of the images that it was measured on."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.errors import UserError, one_line
from tokensieve.evaluation.flags import DEFAULT_MODEL_TYPE
from tokensieve.report.fields import Result, mapping_at, plan_text
from tokensieve.tasks.registry import TASKS

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

    from tokensieve.drawing.show_images import NamedImage
    from tokensieve.plan import Plan


SCENES = [3 + 8 * number for number in range(100)]  # test scenes that are drawn, in this order


def render_examples(found: Sequence[Result], images: int) -> str:
    """What the plans of each model keep of a few images of each data set, for models that are on this machine."""
    runs: dict[tuple[str, str, str], list[Result]] = {}
    for result in found:
        runs.setdefault((str(result["model"]), str(result["pretrained"]), str(result["dataset"])), []).append(result)
    parts = ["<section id='examples'><h2>What the plans keep</h2>"]
    for (model, pretrained, dataset), rows in runs.items():
        named = f"{model} ({Path(pretrained).name})" if pretrained else model
        parts.append(f"<h3>{escape(f'{named} on {dataset}')}</h3>")
        parts.append(_pictures(model, pretrained, rows, images))
    return "\n".join([*parts, "</section>"])


def _pictures(model: str, pretrained: str, rows: Sequence[Result], images: int) -> str:
    texts = list(dict.fromkeys(plan_text(row) for row in rows))
    model_type = str(mapping_at(rows[0], "run").get("model_type", DEFAULT_MODEL_TYPE))
    if not _is_here(model, pretrained, model_type):
        return (
            "<p class='soft'>No pictures: they are drawn here for models that encode images and whose weights ship with "
            "tokensieve or are a file or a folder. To draw some:</p>"
            f"<pre>{escape(_show_command(model, pretrained, rows[0], texts))}</pre>"
        )
    from tokensieve.drawing import sheet, show_images
    from tokensieve.drawing.band import Band
    from tokensieve.models import loading
    from tokensieve.plan import Plan

    try:
        originals = _own_images(rows[0], images)
        loaded = loading.load(model, pretrained, model_type=model_type)
    except UserError as error:
        return f"<p class='soft'>No pictures: {escape(str(error))}</p>"
    bands: list[list[Band]] = [[] for _ in originals]
    notes = []
    weights = loaded.fingerprint.partition("-")[0]
    if any(str(mapping_at(row, "run").get("weights", weights)).partition("-")[0] != weights for row in rows):
        notes.append("These are drawn with the weights that ship now; some of the results were made with others.")
    for text in (text for text in texts if text != "none"):
        try:
            plan = Plan.parse(text)
            trained, more_notes = _trained_parts(plan, loaded.model, [row for row in rows if plan_text(row) == text])
            for so_far, more in zip(bands, show_images.make_bands(loaded, [plan], originals, weights=trained), strict=True):
                so_far += more
            notes += more_notes
        except UserError as error:
            notes.append(f"{text} is not drawn: {one_line(error)}")
    if not any(bands):
        notes.append("No pictures: no plan here cuts anything.")
    figures = []
    for (name, _, _), of_image in zip(originals, bands, strict=True):
        if of_image:
            drawn = sheet.draw(of_image, brief=True)
            described = escape(f"{name}: the patches that are kept under {', '.join(band.plan for band in of_image)}")
            figures.append(f"<figure class='card'><img alt='{described}' src='{_data(drawn.png())}'></figure>")
    return "".join([*figures, *(f"<p class='soft'>{escape(line)}</p>" for line in notes)])


def _is_here(model: str, pretrained: str, model_type: str) -> bool:
    """Whether the model encodes images, and is on this machine."""
    from tokensieve import embedded

    if pretrained in embedded.MODELS.get(model, ()):
        return True
    return Path(model).is_dir() if model_type == "hf" else model_type in ("open_clip", "timm") and Path(pretrained).is_file()


def _own_images(row: Result, count: int) -> list[NamedImage]:
    """A few of the images that a result was measured on, by their numbers in its data; a UserError if they are gone."""
    from tokensieve.data.registry import build_source
    from tokensieve.data.source import Broken, Stream

    run, dataset = mapping_at(row, "run"), str(row["dataset"])
    arguments, limit = mapping_at(run, "arguments"), run.get("limit")
    source = build_source(
        dataset,
        _to_tensor,
        root=str(arguments.get("dataset_root", "root")),
        split=str(run.get("split", "test")),
        language=str(row.get("language") or "en"),
        limit=limit if isinstance(limit, int) else None,
        task=str(row.get("task")),
        annotation_file=str(arguments.get("annotation_file", "")),
        needs_class_names=False,
    )
    samples = source.samples
    found: Iterator[tuple[int, Any]]
    if isinstance(samples, Stream):
        found = ((number, samples.decode(sample)) for number, sample in samples.read_encoded())
    else:
        wanted = [number for number in SCENES if number < len(source)]
        rest = (number for number in range(len(source)) if number not in wanted)
        found = ((number, samples[number]) for number in (*wanted, *rest))
    readable = ((number, sample[0]) for number, sample in found if not isinstance(sample, Broken))
    return [(f"{dataset}:{number}", _to_image(pixels), number) for number, pixels in islice(readable, count)]


def _to_tensor(image: Image.Image) -> Tensor:
    """An image as it is, (3, h, w)."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _to_image(pixels: Tensor) -> Image.Image:
    """(3, h, w), or (n, 3, h, w) with several images a sample, of which the first is taken."""
    from PIL import Image

    return Image.fromarray((pixels[0] if pixels.dim() == 4 else pixels).permute(1, 2, 0).numpy())


def _show_command(model: str, pretrained: str, row: Result, plans: Sequence[str]) -> str:
    """What to type to draw these plans."""
    from tokensieve.data.registry import folder_of

    run, dataset = mapping_at(row, "run"), str(row["dataset"])
    model_type = str(run.get("model_type", DEFAULT_MODEL_TYPE))
    task = TASKS.get(str(row.get("task")))
    drawn = task.show_input.replace("{dataset}", dataset) if task else "IMAGE"
    words = ["--model", model]
    words += ["--pretrained", pretrained] if pretrained else []
    words += ["--model_type", model_type] if model_type != DEFAULT_MODEL_TYPE else []
    root = mapping_at(run, "arguments").get("dataset_root")
    if root is not None and dataset in drawn:
        with suppress(UserError):  # a folder that eval would refuse, too
            words += ["--dataset_root", folder_of(dataset, str(root))]
    words += ["--plan", plans[0], *(["--compare", *plans[1:]] if plans[1:] else [])]
    return f"tokensieve show {drawn} {shlex.join(words)}"


def _trained_parts(plan: Plan, model: nn.Module, rows: Sequence[Result]) -> tuple[dict[str, nn.Module], list[str]]:
    """The trained weights of a result, from the files it names or those that ship; and a note if results have others."""
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
