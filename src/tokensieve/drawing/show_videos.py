"""`tokensieve show` of videos: the frames with what plans keep of each, as one sheet (PNG) and as a moving picture (GIF).

A token that stands for patches of several frames has one colour in all of them.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tokensieve import embedded, files
from tokensieve.cutting.handle import Handle
from tokensieve.data import videos
from tokensieve.data.images import BrokenImage
from tokensieve.data.videos import Video
from tokensieve.data.vqa import CLIPS
from tokensieve.data.vqa import load as load_questions
from tokensieve.data.vqa_items import VqaItem
from tokensieve.device import to_device
from tokensieve.drawing import show
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import Frame
from tokensieve.drawing.panels import KEPT, tints
from tokensieve.drawing.sheet import Block, Panel, Picture, arrange, cut_panel, image_panel, where
from tokensieve.drawing.show_images import apply_quietly, file_name, load_model, read_plans
from tokensieve.drawing.stages import PICKED, stages
from tokensieve.errors import UserError
from tokensieve.models.image_grid import TokenGrid
from tokensieve.models.loading import vlm
from tokensieve.parts.protocol import Weights
from tokensieve.plan import Plan
from tokensieve.tasks.vqa.answering import answer, ask

PREFIX = f"{CLIPS}:"
DATASETS = (CLIPS,)
QUESTION = "what happens?"  # of a file without --question: what is kept may depend on it
IN_A_ROW, SIDE = 8, 1.62  # frames in a row of the sheet; inches of a panel's longer side
STILL = 700  # milliseconds that each frame of the moving picture is shown


@dataclass(frozen=True)
class Shown:
    """A video under one plan: a band for every frame, and what is written above them."""

    plan: str
    notes: list[str]
    bands: list[Band]


def accepts(args: argparse.Namespace) -> bool:
    return any(text.startswith(PREFIX) or text.lower().endswith(videos.SUFFIXES) for text in args.images)


def run(args: argparse.Namespace) -> list[Path]:
    """Draw one video under all plans; the files."""
    if len(args.images) > 1:
        raise UserError(f"show draws one video at a time, and there are {len(args.images)} arguments")
    plans, template = read_plans(args), args.output or show.DEFAULT_OUTPUT
    name, item, number = read(args.images[0], args.question, args.frames)
    (path,) = show.sheets(template, [name], str(plans[0]))
    moving = path.with_suffix(".gif")
    if not files.is_stream(path):
        files.check_writable(moving)
    args.model = args.model or embedded.LLAVA_VIDEO
    loaded = load_model(args, "vlm")
    assert isinstance(loaded, vlm.LoadedVlm)
    heading, shown = draw_plans(loaded, plans, name, item, number, seed=args.seed, weights=args.weights)
    written = show.write({path: contact_sheet(heading, shown)})
    if not files.is_stream(path):
        files.replace_file(moving, moving_picture(heading, shown))
        written.append(moving)
    return written


def read(text: str, question: str | None, frames: int | None) -> tuple[str, VqaItem, int]:
    """Name, video with a question, and number of what an argument means: a file, or embedded-clips:N."""
    if not text.startswith(PREFIX):
        try:
            video = videos.open_video(Path(text), frames or videos.FRAMES)
        except BrokenImage as error:
            raise UserError(f"cannot read {text}: {error}") from error
        return file_name(text), VqaItem(video.frames[0], question or QUESTION, [], text, video=video), 0
    data = load_questions(CLIPS, split="test")
    data = data if frames is None else data.with_frames(frames)
    index = text.removeprefix(PREFIX)
    if not (index.isascii() and index.isdigit() and int(index) < len(data)):
        raise UserError(f"{text}: there are the clips {PREFIX}0 to {PREFIX}{len(data) - 1}")
    item = data[int(index)]
    return text, item if question is None else replace(item, question=question, answers=[]), int(index)


def draw_plans(
    loaded: vlm.LoadedVlm,
    plans: Sequence[Plan],
    name: str,
    item: VqaItem,
    number: int = 0,
    *,
    seed: int = 0,
    weights: Weights = None,
) -> tuple[str, list[Shown]]:
    """A heading with the question and the full model's answer, and the video under every plan, with its answer."""
    assert item.video is not None
    inputs = to_device(ask(loaded.processor, [item]), loaded.model.device)
    full = answer(loaded.model, loaded.processor, inputs)[0]
    expected = f", expected: {item.answer!r}" if item.answers else ""
    handles, answers = [], []
    for plan in plans:
        with apply_quietly(loaded.model, plan, seed, weights) as handle, handle.call(samples=torch.tensor([number])):
            answers.append(answer(loaded.model, loaded.processor, inputs)[0])
        if handle.stages and not getattr(handle.token_grid(), "frames", 0):
            raise UserError(f"{loaded.name} does not tell which token is of which frame, so nothing can be drawn")
        handles.append(handle)
    grid = next((handle.token_grid() for handle in handles if handle.stages), None)  # a plan that cuts nothing has none
    video = item.video if grid is None or grid.frames == len(item.video.frames) else item.video.evenly(grid.frames)
    shown = [_shown(handle, said, video, grid) for handle, said in zip(handles, answers, strict=True)]
    return f"{name}: {item.question} Full model: {full!r}{expected}", shown


def _shown(handle: Handle, said: str, video: Video, grid: TokenGrid | None) -> Shown:
    """What is drawn of the plan of a handle that has just answered. video: a frame for each that the model tells apart."""
    cuts, plan, notes = stages(handle), str(handle.plan), [f"answer: {said!r}", *handle.notes]
    names = [f"{time:.1f} s" for time in video.times]
    frames = [Frame(0, 0, *image.size) for image in video.frames]
    if not cuts or grid is None:
        bands = [
            Band(image, frame, plan, [], None, name) for image, frame, name in zip(video.frames, frames, names, strict=True)
        ]
        return Shown(plan, ["all tokens", *notes], bands)
    last, space = cuts[-1].of(grid.indices().numpy()), grid.rows * grid.columns
    last = replace(last, colours=tints(last.groups, last.joint, (grid.frames, grid.rows, grid.columns)))
    bands = [
        Band(image, frame, plan, [last.of(np.arange(place * space, (place + 1) * space))], (grid.rows, grid.columns), name)
        for place, (image, frame, name) in enumerate(zip(video.frames, frames, names, strict=True))
    ]
    return Shown(plan, [f"{cuts[0].tokens_in} → {last.tokens_out} tokens, {where(last.layer)}", *notes], bands)


def contact_sheet(heading: str, shown: Sequence[Shown]) -> Picture:
    """All frames in rows, then under every plan."""
    rows = [[Block(heading if not number else "", [], panels, _size(shown), 0.1)] for number, panels in _rows(shown[0], True)]
    for one in shown:
        rows += [
            [Block(one.plan if not number else "", one.notes if not number else [], panels, _size(shown), 0.1)]
            for number, panels in _rows(one, False)
        ]
    return arrange(rows, [band for one in shown for band in one.bands])


def moving_picture(heading: str, shown: Sequence[Shown]) -> bytes:
    """A GIF: frame after frame, beside it what every plan keeps."""
    pictures = []
    wide, high = (2 * side for side in _size(shown))
    every = [band for one in shown for band in one.bands]
    for place, band in enumerate(shown[0].bands):
        blocks = [Block(heading, [], [image_panel(band.name, band)], (wide, high))]
        for one in shown:
            blocks.append(Block(one.plan, one.notes, [_kept_panel("", one.bands[place])], (wide, high)))
        drawn = Image.open(io.BytesIO(arrange([blocks], every).png())).convert("RGB")
        pictures.append(drawn.quantize(256, dither=Image.Dither.NONE))
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=STILL, loop=0)
    return out.getvalue()


def _rows(one: Shown, plain: bool) -> list[tuple[int, list[Panel]]]:
    """The frames in rows, by the number of the row. plain: without what the plan did."""
    panels = []
    for band in one.bands:
        count = f"{band.name}, {_kept(band)}" if band.stages else band.name
        panels.append(image_panel(band.name, band) if plain else _kept_panel(count, band))
    return [(start, panels[start : start + IN_A_ROW]) for start in range(0, len(panels), IN_A_ROW)]


def _kept_panel(caption: str, band: Band) -> Panel:
    return cut_panel(caption, KEPT, band, band.stages[-1]) if band.stages else image_panel(caption, band)


def _kept(band: Band) -> str:
    """How many patches of a frame are kept, or stand for their groups."""
    states = band.stages[-1].states
    return f"{int((states >= PICKED).sum())} of {len(states)}"


def _size(shown: Sequence[Shown]) -> tuple[float, float]:
    """Width and height of a panel, in inches."""
    wide, high = shown[0].bands[0].image.size
    return SIDE * min(1.0, wide / high), SIDE * min(1.0, high / wide)
