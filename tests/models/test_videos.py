"""Videos in the language model, as the stock processors give them: alone, beside images, with text between their frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tests.support.video_prompts import FAMILIES, TEXTS, VIDEO, batch_of, model_and_batch, pictures_and_clips
from tests.support.vlm_models import IMAGE, in_float64
from tokensieve import Reduction, UserError, View, method
from tokensieve.errors import Uncuttable
from tokensieve.methods.registry import REGISTRY

VIEWS: list[View] = []
GRIDS = {"llava_onevision": [(4, 3, 3)] * 3}
QWEN_GRIDS = [(3, 2, 3), (2, 3, 2), (3, 2, 2)]
NEWLINES = {"llava_onevision": 1}  # tokens of a video that are of no frame
COLUMNS = {92: 6, 102: 10}  # of the tiles of OneVision's images, by their tokens: 36 of the small image, rows with line ends
HOW: dict[str, Any] = {
    "max_new_tokens": 3,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "suppress_tokens": [60, 61, IMAGE, VIDEO],  # without a cache, a generated placeholder would need a token
}


@pytest.fixture(autouse=True)
def every_second() -> Iterator[None]:
    """A method whose choice is known in advance."""

    @method(summary="every second token", needs=("question",))
    def every_second(view: View, keep: int) -> Reduction:
        VIEWS.append(view)
        return Reduction.keep(torch.arange(0, view.n, 2).expand(len(view.tokens), -1)[:, :keep], view.n)

    VIEWS.clear()
    yield
    REGISTRY.remove("every_second")


def spans(family: str, ids: Tensor) -> list[Tensor]:
    """The positions of the tokens of each image and each video of a prompt (L,), without line ends."""
    found = []
    for mark, media in ((IMAGE, 1), (VIDEO, 2)):
        at = (ids == mark).nonzero()[:, 0]
        while len(at):
            if family == "qwen3_vl" and mark == VIDEO:  # a video goes on behind the next time
                ends = [i for i in range(1, len(at)) if at[i] - at[i - 1] > 1 and 10 in ids[at[i - 1] : at[i]].tolist()]
            else:
                ends = [i for i in range(1, len(at)) if at[i] - at[i - 1] > 1]
            one, at = (at[: ends[0]], at[ends[0] :]) if ends else (at, at[:0])
            if media == 1 and family == "llava_onevision":
                rows = one[36:].view(-1, COLUMNS[len(one)] + 1)
                one = torch.cat([one[:36], rows[:, :-1].flatten()])
            found.append(one[: len(one) - NEWLINES.get(family, 0)] if media == 2 else one)
    return found


def model_and_videos(family: str) -> tuple[Any, dict[str, Tensor]]:
    """Two prompts, one with two videos, without images: at @out those have tiles."""
    model, _ = model_and_batch(family)
    return model, batch_of(family, [TEXTS[0], "{video} how many then {video} when"], [], pictures_and_clips(family)[1])


def language_inputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What the stock model gives to its language model."""
    seen: dict[str, Any] = {}
    hook = model.model.language_model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["llm.0", "out"])
def test_a_cut_is_the_stock_language_model_on_the_tokens_that_are_left(family: str, place: str) -> None:
    model, batch = in_float64(*(model_and_batch(family) if place == "llm.0" else model_and_videos(family)))
    given = language_inputs(model, batch)
    before = snapshot(model)
    with torch.no_grad(), tokensieve.apply(model, f"every_second@{place}:50%") as handle:
        got = model(**batch).logits
        assert [row.layer for row in handle.ledger] == [place]
    assert all(view.frames is not None and view.grid is not None for view in VIEWS if place == "out")
    assert_untouched(model, before)
    for row, ids in enumerate(batch["input_ids"]):
        left = batch["attention_mask"][row].bool()
        for at in spans(family, ids):
            left[at] = torch.arange(len(at)) % 2 == 0
            left[at[(len(at) + 1) // 2 * 2 :]] = False
        inputs: dict[str, Any] = {"inputs_embeds": given["inputs_embeds"][row][left][None]}
        inputs["attention_mask"] = torch.ones(inputs["inputs_embeds"].shape[:2])  # gaps of positions would part the sequence
        if given.get("position_ids") is not None:
            inputs["position_ids"] = given["position_ids"][:, row : row + 1, left]
        elif family == "llava_onevision":
            inputs["position_ids"] = torch.arange(len(ids))[left][None]
        if given.get("deepstack_visual_embeds") is not None:
            where = given["visual_pos_masks"]
            planes = []
            for values in given["deepstack_visual_embeds"]:
                planes.append(values.new_zeros(*where.shape, values.shape[-1]))
                planes[-1][where] = values
            inputs["visual_pos_masks"] = where[row][left][None]
            inputs["deepstack_visual_embeds"] = [plane[row][left & where[row]] for plane in planes]
        with torch.no_grad():
            wanted = model.lm_head(model.model.language_model(**inputs).last_hidden_state)
        text = left & (ids != IMAGE) & (ids != VIDEO)
        assert_near(got[row][text], wanted[0][text[left]], steps=3000)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_sees_each_video_with_its_frames(family: str) -> None:
    model, batch = model_and_batch(family)
    with torch.no_grad(), tokensieve.apply(model, "every_second@llm.1:50% + every_second@llm.2:50%"):
        model(**batch)
    first = [view for view in VIEWS if view.place == "llm.1"]
    seen = [view.grid for view in first for _ in view.tokens if view.frames is not None]
    assert sorted(map(str, seen)) == sorted(map(str, GRIDS.get(family, QWEN_GRIDS)))
    for view in first:
        if view.frames is None:
            assert view.grid is None or len(view.grid) == 2
            continue
        frames, h, w = view.grid or ()
        assert view.n == frames * h * w
        assert torch.equal(view.frames, torch.arange(frames).repeat_interleave(h * w).expand(len(view.tokens), -1))
    for view in VIEWS:
        if view.place == "llm.2":
            assert view.grid is None
    cut = [view for view in VIEWS if view.place == "llm.2" and view.frames is not None]
    wanted = {
        str(view.frames[row, ::2].tolist()) for view in first if view.frames is not None for row in range(len(view.tokens))
    }
    assert {str(row.tolist()) for view in cut for row in view.frames} == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_times_and_line_ends_are_no_question(family: str) -> None:
    model, batch = model_and_batch(family)
    with torch.no_grad(), tokensieve.apply(model, "every_second@llm.0:50%"):
        model(**batch)
    around = {"qwen3_vl": 8, "llava_onevision": 0}.get(family, 2)  # marks of a video, and the time before its first frame
    marks = 0 if family == "llava_onevision" else 2  # of an image
    words = {3 + around, 4 + marks + 2 * around, 2 + marks}  # of each prompt of TEXTS
    assert {int(mask.sum()) for view in VIEWS for mask in view.question.mask} == words  # type: ignore[union-attr]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_prompts_one_by_one(family: str) -> None:
    model, batch = in_float64(*model_and_batch(family))
    plan = "evs@llm.0:50% + cover@llm.2:50%"
    with torch.no_grad(), tokensieve.apply(model, plan):
        together = model(**batch).logits
        cached, uncached = model.generate(**batch, **HOW), model.generate(**batch, **HOW, use_cache=False)
        beams = [model.generate(**batch, **HOW, num_beams=2, use_cache=cache).sequences for cache in (True, False)]
    assert torch.equal(*beams)
    for one, other in zip(cached.logits, uncached.logits, strict=True):
        assert_near(one, other, steps=3000)
    prompts = batch_by_prompt(family)
    for row, alone in enumerate(prompts):
        _, alone = in_float64(model, alone)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.no_grad(), tokensieve.apply(model, plan):
            single = model(**alone).logits[0]
        assert_near(together[row][batch["attention_mask"][row].bool()][-2:], single[-2:].float())  # rotary tables are float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["vidcom2:40%", "frames:50%", "llava_scissor(tau=0.6)", "cover:30%", "vcast:5"])
def test_at_out_as_before_the_first_layer(family: str, method: str) -> None:
    """Without sizes and deep features the two places are one."""
    model, batch = in_float64(*model_and_videos(family))
    name, _, rest = method.partition(":" if ":" in method else "(")
    rest = f":{rest}(sizes=no)" if name == "cover" else f":{rest}" if ":" in method else f"({rest}"
    logits = []
    for place in ("out", "llm.0"):
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.no_grad(), tokensieve.apply(model, f"{name}@{place}{rest}") as handle:
            answered = model.generate(**batch, **HOW)
            logits.append(torch.stack(answered.logits))
            assert handle.ledger[0].tokens_out < handle.ledger[0].tokens_in
    if family == "qwen3_vl" and name in ("cover", "llava_scissor"):
        return  # at @out deep features are merged too
    assert_near(logits[0], logits[1].float())


def batch_by_prompt(family: str) -> list[dict[str, Tensor]]:
    """The prompts of `model_and_batch`, each processed alone."""
    images, videos = pictures_and_clips(family)
    return [
        batch_of(family, TEXTS[:1], [], videos[:1]),
        batch_of(family, TEXTS[1:2], images[:1], videos[1:]),
        batch_of(family, TEXTS[2:], images[1:], []),
    ]


def patches(t: int, h: int, w: int) -> list[tuple[int, int, int]]:
    """The patches of a video in the order of Qwen's processor, as (pair of frames, row, column)."""
    squares = itertools.product(range(t), range(0, h, 2), range(0, w, 2), (0, 1), (0, 1))
    return [(i, y + dy, x + dx) for i, y, x, dy, dx in squares]


def half_size(pixels: Tensor, grids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Patches of images or videos of half the size, made by loops, and their grids."""
    flat, sizes = [], []
    for rows, (t, h, w) in zip(pixels.float().split([t * h * w for t, h, w in grids]), grids, strict=True):
        frames = torch.zeros(2 * t, 3, h * 4, w * 4)
        for row, (i, y, x) in zip(rows, patches(t, h, w), strict=True):
            frames[2 * i : 2 * i + 2, :, y * 4 : y * 4 + 4, x * 4 : x * 4 + 4] = row.view(3, 2, 4, 4).transpose(0, 1)
        h, w = (2 * max(1, round(side / 4)) for side in (h, w))
        small = F.interpolate(frames, (h * 4, w * 4), mode="bicubic")
        for i, y, x in patches(t, h, w):
            flat.append(small[2 * i : 2 * i + 2, :, y * 4 : y * 4 + 4, x * 4 : x * 4 + 4].transpose(0, 1).flatten())
        sizes.append([t, h, w])
    return torch.stack(flat), torch.tensor(sizes)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("qwen")])
def test_smaller_frames_are_the_stock_model_on_smaller_frames(family: str) -> None:
    model, batch = in_float64(*model_and_batch(family))
    smaller, ids, left = dict(batch), batch["input_ids"], batch["attention_mask"].bool()
    for mark, pixels, grids in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        smaller[pixels], smaller[grids] = half_size(batch[pixels], batch[grids].tolist())
        places = (ids == mark).nonzero().tolist()
        for (t, h, w), (_, new_h, new_w) in zip(batch[grids].tolist(), smaller[grids].tolist(), strict=True):
            for _ in range(t):  # of each frame the first placeholders are left out
                n = h * w // 4
                for row, at in places[: n - new_h * new_w // 4]:
                    left[row, at] = False
                places = places[n:]
    rows = [row[kept] for row, kept in zip(ids, left, strict=True)]
    length = max(map(len, rows))
    smaller["input_ids"] = torch.stack([F.pad(row, (length - len(row), 0)) for row in rows])
    smaller["attention_mask"] = torch.stack([(torch.arange(length) >= length - len(row)).long() for row in rows])
    smaller["mm_token_type_ids"] = (smaller["input_ids"] == IMAGE).int() + 2 * (smaller["input_ids"] == VIDEO).int()
    _, smaller = in_float64(model, smaller)
    with torch.no_grad():
        wanted = model(**smaller).logits
        model.model.rope_deltas = None
        with tokensieve.apply(model, "resize(scale=0.5)") as handle:
            got = model(**batch).logits
            assert [row.layer for row in handle.ledger] == ["image", "video"]
    assert_near(got[left], wanted[smaller["attention_mask"].bool()].float(), steps=3000)  # resized in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_both_kinds_computed_before(family: str) -> None:
    model, batch = model_and_batch(family)
    with torch.no_grad(), tokensieve.apply(model, "random@llm.0:50%") as handle:
        images = {name: value for name, value in batch.items() if name in ("pixel_values", "image_grid_thw", "image_sizes")}
        videos = {name: value for name, value in batch.items() if name in ("pixel_values_videos", "video_grid_thw")}
        with handle.call(samples=torch.arange(5)):
            wanted = model(**batch).logits
            made = {"image": model.model.get_image_features(**images), "video": model.model.get_video_features(**videos)}
            rest = {
                name: value for name, value in batch.items() if not name.startswith("pixel") and name not in ("image_sizes",)
            }
            got = model(**rest, mm_encoder_outputs=made).logits
        assert torch.equal(got, wanted)
        with pytest.raises(UserError, match="samples"), handle.call(samples=torch.arange(6)):
            model(**batch)


def test_where_frames_cannot_be_made_smaller() -> None:
    model, _ = model_and_batch("llava_onevision")
    with pytest.raises(Uncuttable, match="tiles"):
        tokensieve.apply(model, "resize(scale=0.5)")


@pytest.mark.parametrize("place", ["llm.0", "out"])
def test_different_numbers_of_tokens_need_no_mask(place: str) -> None:
    """Of one video there is no padding, and tokens that stay as they are have no sizes: attention is causal alone."""
    model, _ = model_and_batch("qwen2_vl")
    batch = batch_of("qwen2_vl", TEXTS[:1], [], pictures_and_clips("qwen2_vl")[1][:1])
    masks: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        for layer in model.model.language_model.layers
    ]
    with torch.no_grad(), tokensieve.apply(model, f"frames@{place}:50%") as handle:
        model(**batch)
        assert handle.ledger[0].tokens_out < handle.ledger[0].tokens_in
    for hook in hooks:
        hook.remove()
    assert len(masks) == 4 and all(mask is None for mask in masks)
