"""Named mixes: plans for a wanted speed-up of the tower, found by measurement. A plan can be written as one of their names.

They name no layer and no number of tokens, so that they fit every depth and grid: a somewhat smaller image, then a merge
after half the depth. docs/cover.md has what they cost and what they lose on each model they were measured on.
"""

from __future__ import annotations

MIXES = {
    "2x": "resize(scale=0.857) + cover:36%",
    "3x": "resize(scale=0.714) + cover:32%",
}
