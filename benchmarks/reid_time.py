"""Times of a re-identification model with several plans, in total and after the cut, in one interleaved run.

    python benchmarks/reid_time.py FILE.json

Measures CLIP ViT-B/16 at 256 x 128 and the shape of the embedded model, with random weights (speed does not depend on them) and
three modalities. "after" is the time from the block after the cut to the feature; for @out, from the head, including the
selection. The full model is measured from the same point.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tokensieve
from tokensieve import files, provenance
from tokensieve.cutting.handle import Handle
from tokensieve.models.registry import open_tower
from tokensieve.reid.build import build
from tokensieve.reid.model import ReidModel, Settings

SHAPES = {
    "ViT-B-16, 256 x 128": (Settings("open_clip", "ViT-B-16", (256, 128), cameras=4), 4),
    "sieve-reid-6": (
        Settings(
            "timm",
            "vit_tiny_patch16_224",
            (128, 64),
            arguments={"patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4, "pre_norm": True},
            cameras=4,
        ),
        32,
    ),
}
ROUNDS = 7


def plans(depth: int) -> list[str]:
    half = depth // 2
    return [f"{method}@{place}{keep}" for place in ("out", half) for method, keep in METHODS]


METHODS = (("sdtps", ""), ("random", ":26"), ("grid", ":26"), ("anchor", ":26"))


class Clock:
    """Records when a module starts within one call of the model."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.began = module, 0.0

    def time(self, run: Any) -> tuple[float, float]:
        """Seconds of the whole call, and from the start of the module."""
        hook = self.module.register_forward_pre_hook(self._note)
        try:
            start = time.perf_counter()
            run()
            end = time.perf_counter()
        finally:
            hook.remove()
        return end - start, end - self.began

    def _note(self, module: nn.Module, args: Any) -> None:
        self.began = time.perf_counter()


def encode(model: ReidModel, inputs: dict[str, torch.Tensor], handle: Handle | None) -> None:
    with torch.inference_mode():
        if handle is None:
            model.encode(inputs)
        else:
            with handle:
                model.encode(inputs)


def after(model: ReidModel, plan: str) -> nn.Module:
    """The first module after the cut."""
    at = plan.split("@")[1].split(":")[0]
    return model.head if at == "out" else open_tower(model).blocks[int(at)].module


def count(run: Any, module: nn.Module) -> dict[str, float]:
    """GFLOPs of a call, and of the part from the start of the module."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its FLOPs would be counted as 0
    before = 0
    try:
        with FlopCounterMode(display=False) as counter:

            def note(module: nn.Module, args: Any) -> None:
                nonlocal before
                before = counter.get_total_flops()

            hook = module.register_forward_pre_hook(note)
            run()
            hook.remove()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    total = counter.get_total_flops()
    return {"gflops": total / 1e9, "gflops_after": (total - before) / 1e9}


def measure(name: str, settings: Settings, batch: int) -> list[dict[str, Any]]:
    from dataclasses import replace

    torch.manual_seed(0)
    half = build(replace(settings, plan="sdtps")).eval()  # a part inside the backbone
    depth = open_tower(half).depth
    model = ReidModel(replace(half.settings, plan="sdtps@out"), dict(half.backbones.items())).eval()
    parts = {"out": model.parts["sdtps"], str(depth // 2): half.parts["sdtps"]}
    inputs = {modality: torch.randn(batch, 3, *settings.image_size) for modality in model.modalities}
    inputs["cameras"] = torch.zeros(batch, dtype=torch.long)
    handles: dict[str, Handle | None] = {}
    for plan in plans(depth):
        weights = {"sdtps": parts[plan.split("@")[1].split(":")[0]]} if plan.startswith("sdtps") else None
        handles[plan] = tokensieve.apply(model, plan, weights=weights)
        handles[plan].remove()  # type: ignore[union-attr]
    timings: dict[str, list[tuple[float, float, float, float]]] = {plan: [] for plan in handles}
    for turn in range(ROUNDS + 1):
        for plan, handle in handles.items():
            clock = Clock(after(model, plan))
            full = clock.time(partial(encode, model, inputs, None))
            cut = clock.time(partial(encode, model, inputs, handle))
            if turn:  # the first round is a warm-up
                timings[plan].append((*full, *cut))
    single = {key: value[:1] for key, value in inputs.items()}
    rows = []
    for plan, handle in handles.items():
        full, full_after, cut, cut_after = (statistics.median(column) for column in zip(*timings[plan], strict=True))
        module = after(model, plan)
        counted = {name: count(partial(encode, model, single, on), module) for name, on in (("full", None), ("plan", handle))}
        assert handle is not None
        rows.append(
            {
                "model": name,
                "plan": plan,
                "batch": batch,
                "tokens_in": handle.ledger[-1].tokens_in,
                "tokens_out": handle.ledger[-1].tokens_out,
                "full": {"seconds": full, "seconds_after": full_after, **counted["full"]},
                "reduced": {"seconds": cut, "seconds_after": cut_after, **counted["plan"]},
                "speed_up": statistics.median(row[0] / row[2] for row in timings[plan]),
                "speed_up_after": statistics.median(row[1] / row[3] for row in timings[plan]),
            }
        )
        print(name, plan, f"{rows[-1]['speed_up']:.2f}x", f"after the cut {rows[-1]['speed_up_after']:.2f}x", flush=True)
    return rows


def main(path: Path) -> None:
    rows = [row for name, (settings, batch) in SHAPES.items() for row in measure(name, settings, batch)]
    threads = {"threads": torch.get_num_threads(), "rounds": ROUNDS}
    files.write_json(path, {"rows": rows, **threads, "versions": provenance.versions()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
