"""What a search has to know of a model: its blocks and layers, its grid, and how many tokens a plan leaves in each of them."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.cutting.placement import place_plan, resize_tower
from tokensieve.data.source import Inputs
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Tower
from tokensieve.plan import Plan
from tokensieve.tuning.subject import Subject


@dataclass(frozen=True)
class Outline:
    """The parts of a model that a plan can change."""

    tower: Tower | None  # None: only the language model can be cut
    decoder: int | None  # layers of the language model; None: there is none
    tokens: int  # patch tokens of an image
    no_resize_reason: str = ""  # why images cannot be made smaller; "": they can

    @property
    def depth(self) -> int:
        """Blocks of the tower that can be cut."""
        return 0 if self.tower is None else self.tower.depth

    @property
    def side(self) -> int:
        """Patches on the shorter side of a full image; 1 if images cannot be resized."""
        return 1 if self.tower is None or self.no_resize_reason else min(self.tower.grid)

    @property
    def patch(self) -> int:
        """Pixels of a patch along the shorter side."""
        assert self.tower is not None
        return min(self.tower.image_size) // min(self.tower.grid)

    def counts(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Patch tokens in every block of the tower and every layer of the language model, of an image of the usual size."""
        tower, n = self.tower, self.tokens
        if plan.image_step is not None and tower is not None:
            tower = resize_tower(plan.image_step, tower)[0].tower
            n = tower.grid[0] * tower.grid[1]
        cuts, first = place_plan(plan, tower, 0, self.decoder), n
        blocks: list[int] = []
        layers: list[int] = []
        for cut in cuts:
            if cut.part == "llm":
                blocks += [n] * (self.depth - len(blocks))
                layers += [n] * (cut.layer - len(layers))
            else:
                blocks += [n] * (cut.layer - len(blocks))
            n = max(1, cut.outputs(n, first))
        blocks += [n] * (self.depth - len(blocks))
        layers += [n] * ((self.decoder or 0) - len(layers))
        return blocks, layers


def outline(subject: Subject, sample: Inputs) -> Outline:
    """The outline of the subject's model; Uncuttable if nothing of it can be cut. sample: the inputs of one image."""
    model = subject.loaded.model
    vlm = open_vlm(model)
    tower = open_tower(model) if vlm is None else vlm.tower
    decoder = None if vlm is None else vlm.decoder.depth
    if tower is None:
        assert vlm is not None
        reason = vlm.no_resize_reason or "a search resizes images of one size only; try resize(scale=0.7) yourself"
        return Outline(None, decoder, subject.image_tokens(sample), reason)
    reason = "" if tower.resize is not None else tower.no_resize_reason or "its tower takes one image size"
    return Outline(tower, decoder, tower.grid[0] * tower.grid[1], reason)
