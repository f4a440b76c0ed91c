"""Positions of what stays are those of the uncut prompt, in chunks, after preemption, and for several images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokensieve.serving.positions import (
    fill_positions,
    first_positions,
    line_sections,
    offset_columns,
    read_offsets,
    span,
)

IMAGE = 7


def uncut(parts: list[int | tuple[int, int]], has_grid: bool) -> tuple[list[list[int]], list[list[list[int]]]]:
    """One position after another, of words and of each image: the slow formula. parts: numbers of words, grids of images."""
    words, images, at = [], [], 0
    for part in parts:
        if isinstance(part, int):
            words += [[at + i] * 3 for i in range(part)]
            at += part
            continue
        h, w = part
        if has_grid:
            images.append([[at, at + row, at + column] for row in range(h) for column in range(w)])
            at += max(h, w)
        else:
            images.append([[at + i] * 3 for i in range(h * w)])
            at += h * w
    return words, images


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 6), st.integers(1, 6))), min_size=1, max_size=6),
    has_grid=st.booleans(),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_positions_are_those_of_the_uncut_prompt(
    parts: list[int | tuple[int, int]], has_grid: bool, chunk: int, seed: int
) -> None:
    words, images = uncut(parts, has_grid)
    made = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    places, columns, wanted, seen = [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            ids += [1] * part
            wanted += words[:part]
            del words[:part]
            continue
        h, w = part
        kept = int(torch.randint(1, h * w + 1, (1,), generator=made))
        index = torch.randperm(h * w, generator=made)[:kept].sort().values
        places.append((len(ids), kept, span(part, has_grid)))
        columns.append(offset_columns(index[None], w, has_grid)[0])
        wanted += [images[seen][i] for i in index.tolist()]
        seen += 1
        ids += [IMAGE] * kept
    positions, delta = first_positions(len(ids), places)
    is_image = torch.tensor(ids) == IMAGE
    every = torch.cat(columns) if columns else torch.zeros(0, 4)
    for start in [*range(0, len(ids), chunk), 0]:  # in chunks; then from the beginning again, as after preemption
        length = len(ids) if start == 0 else chunk
        now = is_image.clone()
        now[:start] = False
        now[start + length :] = False
        of_chunk = every[(now.nonzero()[:, 0][:, None] > is_image.nonzero()[:, 0]).sum(1)] if len(every) else every
        positions = fill_positions(positions, is_image, of_chunk.to(torch.bfloat16), start)
    rows = positions[1:] if not has_grid else positions  # of plain RoPE, the first row is the start of the image
    assert rows.T.tolist() == [row[3 - len(rows) :] for row in wanted]
    ends = uncut([*parts, 1], has_grid)[0][-1][0]
    assert len(ids) + delta == ends  # the first generated token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_columns_are_exact_in_any_dtype(dtype: torch.dtype) -> None:
    index = torch.tensor([[0, 1, 127, 128, 255, 256, 727, 2879, 16383]])
    line = offset_columns(index, 1, False).to(dtype)
    assert torch.equal(read_offsets(line[0]), index.expand(2, -1))
    assert torch.equal(read_offsets(offset_columns(index, 300, True).to(dtype)[0]), torch.cat([index // 300, index % 300]))


def test_plain_rope_takes_the_second_row() -> None:
    """Rotary angles of mRoPE with these sections equal those of RoPE at the positions of the second row."""
    size = 32
    sections = line_sections({"hidden_size": 128, "num_attention_heads": 4})
    assert sum(sections) == size // 2 and line_sections({"head_dim": 64, "hidden_size": 1}) == [0, 32, 0]
    positions = torch.tensor([[5, 5, 5], [5, 9, 11], [1, 2, 3]])
    angles = positions[..., None] * (10000.0 ** -(torch.arange(0, size, 2) / size))
    of_mrope = torch.cat([each[row] for row, each in enumerate(angles.split(sections, dim=-1))], dim=-1)
    assert torch.equal(of_mrope, angles[1])
    partial = {"head_dim": 64, "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert line_sections(partial) == [0, 16, 0]
