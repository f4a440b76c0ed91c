"""Prefill of long videos under plans, against the stock model on as few tokens; what `cover` costs and loses on them.

A Qwen2-VL of random weights, 3 layers of width 384, reads videos of 20 and 80 frames of 196 tokens: a still picture with noise
and a square that moves. The features are computed before. The oracle is the stock model on a quarter of the frames. CPU time of
one thread; plans, oracle and full model one after the other in every round. What the output has already is not measured
again.

python benchmarks/video_speed.py --output benchmarks/results/video_speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokensieve
from tokensieve import Reduction, View, files, provenance
from tokensieve.methods.cover import cover
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.testing import make_view

SIDE, MERGE, PATCH = 14, 2, 4  # tokens of a side of a frame, patches of a side of a token, pixels of a side of a patch
VIDEO, IMAGE, START, END = 62, 63, 61, 60  # ids
LENGTHS = {20: 3, 80: 2}  # frames of a video: rounds
PLANS = [
    *("random:25%", "grid:25%", "frames:25%", "evs:25%", "vidcom2:25%", "vidcom2_vllm:25%", "vcast:25%"),
    *("cover:25%", "cover:25%(sizes=no)"),
    *("holitom:25%", "fastvid:25%", "flashvid:25%", "llava_scissor"),
]


def make_model() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "hidden_size": 384}
    text = {
        "vocab_size": 64,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    }
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config=text, **marks)).eval()


def make_prompt(frames: int) -> dict[str, Tensor]:
    """A prompt with a video; `frames` counts pairs of frames, of which the model makes one."""
    drawn = torch.Generator().manual_seed(0)
    side = SIDE * MERGE
    still = torch.randn(1, side, side, 3 * 2 * PATCH**2, generator=drawn)
    patches = still + 0.1 * torch.randn(frames, side, side, still.shape[-1], generator=drawn)
    for frame in range(frames):
        corner = frame * (side - 8) // max(1, frames - 1)
        patches[frame, corner : corner + 8, corner : corner + 8] += 2.0
    squares = patches.view(frames, SIDE, MERGE, SIDE, MERGE, -1).transpose(2, 3)  # in the order of Qwen's processor
    ids = torch.tensor([[1, START, *[VIDEO] * (frames * SIDE**2), END, 10, 11, 12, 13]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        "pixel_values_videos": squares.reshape(-1, still.shape[-1]),
        "video_grid_thw": torch.tensor([[frames, side, side]]),
    }


def prefill(model: Any, prompt: dict[str, Tensor]) -> float:
    """The CPU time of a prefill with features that were computed before."""
    video = {name: prompt[name] for name in ("pixel_values_videos", "video_grid_thw")}
    features = model.model.get_video_features(**video)
    rest = {name: value for name, value in prompt.items() if name != "pixel_values_videos"}
    model.model.rope_deltas = None
    started = time.process_time()
    model(**rest, mm_encoder_outputs={"video": features}, logits_to_keep=1, use_cache=True)
    return time.process_time() - started


def measure_prefill(model: Any, frames: int, rounds: int, known: dict[str, Any], save: Callable[[], None]) -> None:
    """Adds the seconds of each plan to `known`, and the mean of those of the oracle before and behind it."""
    prompt, fewer = make_prompt(frames), make_prompt(frames // 4)
    if "full" not in known:
        known["full"] = prefill(model, prompt)
    for number in range(rounds):
        before = None
        for plan in PLANS:
            row = known.setdefault(plan, {"seconds": [], "oracle": []})
            if len(row["seconds"]) > number:
                before = None
                continue
            before = prefill(model, fewer) if before is None else before
            name, _, budget = plan.partition(":")
            with tokensieve.apply(model, f"{name}@llm.0" + (f":{budget}" if budget else "")) as handle:
                row["seconds"].append(prefill(model, prompt))
                row["tokens"] = handle.ledger[0].tokens_out
            behind = prefill(model, fewer)
            row["oracle"].append((before + behind) / 2)
            before = behind
            print(f"{frames} frames, {plan}: {row['seconds'][-1]:.2f} s, oracle {row['oracle'][-1]:.2f} s", flush=True)
            save()


def measure_cover(known: dict[str, Any], save: Callable[[], None]) -> None:
    """The CPU time of choosing, by tokens: as `cover` does it, and all seeds at once."""

    def at_once(view: View) -> None:
        farthest_points(view.tokens, view.n // 4, 2.0)

    ways: dict[str, Callable[[View], Any]] = {"blocks": lambda view: cover(view, view.n // 4), "at_once": at_once}
    for frames in (5, 20, 80):
        n = frames * SIDE**2
        view = make_view(tokens=torch.randn(1, n, 384, generator=torch.Generator().manual_seed(0)), grid=(frames, SIDE, SIDE))
        for name, way in ways.items():
            if str(n) in known.setdefault(name, {}):
                continue
            seconds = []
            for _ in range(3 if name == "blocks" else 1):
                started = time.process_time()
                way(view)
                seconds.append(time.process_time() - started)
            known[name][str(n)] = statistics.median(seconds)
            print(f"cover {name}, {n} tokens: {known[name][str(n)]:.2f} s", flush=True)
            save()


def measure_error(model: Any, known: dict[str, Any]) -> None:
    """What merging loses of the tokens of the shorter video: squared error over variance, by share of tokens that is left."""
    prompt = make_prompt(20)
    video = {name: prompt[name] for name in ("pixel_values_videos", "video_grid_thw")}
    tokens = model.model.get_video_features(**video).pooler_output[0][None]  # (1, N, D)
    view = make_view(tokens=tokens, grid=(20, SIDE, SIDE))
    spread = (tokens - tokens.mean(1, keepdim=True)).square().sum()
    for share in (0.25, 0.1, 0.05):
        keep = int(share * view.n)
        blocks = cover(view, keep)
        ways = {"blocks": (blocks.index, blocks.groups), "at_once": farthest_points(tokens, keep, 2.0)}
        for name, (index, groups) in ways.items():
            merged = Reduction.merge(groups, index, view.sizes_or_ones()).apply(tokens)
            error = float((merged[:, groups[0]] - tokens).square().sum() / spread)
            known.setdefault(name, {})[str(share)] = error
            print(f"cover {name}, {share:.0%} of the tokens: {error:.2%} of the variance is lost", flush=True)


def summarise(known: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a plan and length: tokens left, the share of the oracle's speed that is reached, and the speed-up."""
    rows = []
    for frames, measured in known["prefill"].items():
        for plan in PLANS:
            seconds, oracle = measured[plan]["seconds"], measured[plan]["oracle"]
            rows.append(
                {
                    "plan": plan,
                    "tokens_in": int(frames) * SIDE**2,
                    "tokens_out": measured[plan]["tokens"],
                    "realised": statistics.median(o / s for o, s in zip(oracle, seconds, strict=True)),
                    "speedup": measured["full"] / statistics.median(seconds),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"cover": {}, "prefill": {}}

    def save() -> None:
        files.write_json(args.output, known | {"versions": provenance.versions()})

    with torch.inference_mode():
        measure_cover(known["cover"], save)
        model = make_model()
        measure_error(model, known.setdefault("error", {}))
        for frames, rounds in LENGTHS.items():
            measure_prefill(model, frames, rounds, known["prefill"].setdefault(str(frames), {}), save)
    known["rows"] = summarise(known)
    save()


if __name__ == "__main__":
    main()
