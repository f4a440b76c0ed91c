"""What makes `cover` good: seeds x what happens to the rest x norm x number of tokens, on one model and its images.

    python benchmarks/ablation.py --split val --output benchmarks/results/ablation_val.json
    python benchmarks/ablation.py --model CLIP_FOLDER --model_type hf --dataset wds/photos --dataset_root PHOTOS \\
        --load_clfs CLASSIFIER --keep 60 32 16 --norms 0 2 --output benchmarks/results/ablation_clip.json

All variants cut at the same place. The blocks before the cut run once, and their output is replayed for every variant (for
`anchor`, which needs attention, without the last of them). Each row has top-1 accuracy and 1 - cos, the distance to the full
model's feature, with what is lost against the full model and the standard errors over images (of accuracy: of the paired
difference).
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from labelled_images import add_flags, load_problem
from torch import nn
from tqdm import tqdm

import tokensieve
from tokensieve import Reduction, View, files, method, provenance
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.models.registry import open_tower
from tokensieve.scoring import top

NEIGHBOURS = 5  # of a token, whose distances make its density


@method(summary="farthest points: the seeds of cover")
def far(view: View, keep: int) -> Reduction:
    return Reduction.keep(farthest_points(view.tokens, keep, 2.0)[0], view.n)


@method(summary="density peaks: dense tokens far from any denser one")
def peaks(view: View, keep: int) -> Reduction:
    x = view.tokens.float()
    distance = torch.cdist(x, x) / math.sqrt(x.shape[-1])  # (B, N, N)
    nearest = distance.topk(min(NEIGHBOURS + 1, view.n), largest=False).values  # its own distance, 0, is among them
    density = (-nearest.square().sum(-1) / NEIGHBOURS).exp()  # (B, N)
    denser = density[:, None] > density[:, :, None]  # (B, N, N): the column is denser than the row
    apart = distance.masked_fill(~denser, math.inf).amin(-1)
    apart = torch.where(apart.isinf(), distance.amax(-1), apart)  # the densest token
    return Reduction.keep(top(density * apart, keep), view.n)


@method(summary="cover with the nearest seed by Euclidean distance", selects=False, norm=2.0)
def near(view: View, keep: int) -> Reduction:
    index, _ = farthest_points(view.tokens, keep, 2.0)  # (B, K)
    x = view.tokens.float()
    seeds = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    groups = torch.cdist(x, seeds).argmin(-1)  # (B, N)
    groups.scatter_(1, index, torch.arange(keep, device=index.device).expand_as(index))
    return Reduction.merge(groups, index, view.sizes_or_ones())


def variants(place: int, keeps: list[int], norms: list[float]) -> Iterator[tuple[str, str, float | None, int, str]]:
    """(seeds, rest, norm, K, plan)"""
    for k in keeps:
        for seeds in ("far", "anchor", "peaks", "grid", "random"):
            options = f"k={k}," if seeds == "anchor" else ""
            yield seeds, "drop", None, k, f"{seeds}@{place}:{k}({options}rest=drop)"
            for norm in norms:
                yield seeds, "merge", norm, k, f"{seeds}@{place}:{k}({options}rest=merge,norm={norm})"
        for norm in norms:
            yield "far", "merge, Euclidean", norm, k, f"near@{place}:{k}(norm={norm})"
            yield "far", "merge, no sizes", norm, k, f"far@{place}:{k}(rest=merge,norm={norm},sizes=no)"


class Prefix:
    """The output of the first blocks: recorded once for each batch, then replayed."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self.outputs: list[Any] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        hook = self.blocks[-1].register_forward_hook(lambda module, args, output: self.outputs.append(output))
        yield
        hook.remove()

    @contextmanager
    def replayed(self, batch: int) -> Iterator[None]:
        stock = [block.forward for block in self.blocks]
        for block in self.blocks:
            block.forward = self._constant(self.outputs[batch])  # type: ignore[method-assign]
        yield
        for block, forward in zip(self.blocks, stock, strict=True):
            block.forward = forward  # type: ignore[method-assign]

    @staticmethod
    def _constant(output: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--place", type=int, help="blocks before the cut (default: half)")
    parser.add_argument("--keep", nargs="+", type=int, default=[98, 60, 32, 16, 8])
    parser.add_argument("--norms", nargs="+", type=float, default=[0.0, 1.0, 2.0])
    args = parser.parse_args()
    problem = load_problem(args)
    model = problem.model
    tower = open_tower(model)
    place = args.place or tower.depth // 2
    blocks = [block.module for block in tower.blocks[:place]]
    whole, open_prefix = Prefix(blocks), Prefix(blocks[:-1])

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with whole.recorded(), open_prefix.recorded():
            full = torch.cat([problem.encode(batch.images) for batch in problem.batches])
        full_right = problem.right(full)
        rows: list[dict[str, Any]] = []
        for seeds, rest, norm, keep, plan in tqdm(list(variants(place, args.keep, args.norms))):
            parts, prefix = [], open_prefix if seeds == "anchor" else whole
            for number, batch in enumerate(problem.batches):
                with prefix.replayed(number), tokensieve.apply(model, plan) as handle, handle.call(samples=batch.samples):
                    parts.append(problem.encode(batch.images))
            features = torch.cat(parts)
            lost, distance = full_right - problem.right(features), 1 - (features * full).sum(1).double()
            n = math.sqrt(len(problem.targets))
            rows.append(
                {
                    "seeds": seeds,
                    "rest": rest,
                    "norm": norm,
                    "keep": keep,
                    "plan": plan,
                    "acc1": problem.right(features).mean().item(),
                    "lost": lost.mean().item(),
                    "lost_stderr": lost.std().item() / n,
                    "distance": distance.mean().item(),
                    "distance_stderr": distance.std().item() / n,
                }
            )
            about = {
                "model": problem.name,
                "dataset": args.dataset,
                "split": args.split,
                "images": len(problem.targets),
                "place": place,
            }
            full_row = {"acc1_full": full_right.mean().item()}
            files.write_json(args.output, about | full_row | {"rows": rows, "versions": provenance.versions()})


if __name__ == "__main__":
    main()
