"""Prefill of vision-language models of every family under plans, against the stock model on as few tokens.

Models of random weights, 4 layers of width 384 or 1,024 behind a tiny tower, read one image of 576, 2,304 or 9,216 tokens
(with tiles about 2,900). The time of the stock tower and projector, measured beside, is taken off. The oracle is the stock
model whose layers get as many tokens, chosen at no cost. CPU time of one thread; plan and oracle one after the other in every
round. What the output has already is not measured again.

python benchmarks/family_speed.py --output benchmarks/results/family_speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokensieve
from tokensieve import files, provenance
from tokensieve.cutting.cache import cached_length
from tokensieve.measuring.oracle import StockOracle
from tokensieve.models.registry import open_vlm

IMAGE, VIDEO, START, END = 63, 62, 61, 60  # ids
QWEN, TILED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("llava_next", "llava_onevision")
# tokens of a side of an image or tile, width of the language model, families
JOBS = [(24, 1024, QWEN), (24, 384, (*QWEN, *TILED)), (48, 384, QWEN), (96, 384, QWEN)]
PLANS = ("grid@out:25%", "grid@llm.2:25%")
ROUNDS = 3
DEPTH = 4


def _text(width: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": width // 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        **more,
    }


def make_qwen(family: str, side: int, width: int) -> tuple[Any, dict[str, Tensor]]:
    """A model and a prompt with an image of side x side tokens."""
    import transformers

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    shared = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    wide = {"hidden_size": 32, "out_hidden_size": width, "intermediate_size": 48}
    vision = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": width},
        "qwen2_5_vl": {**wide, "fullatt_block_indexes": []},
        "qwen3_vl": {**wide, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    }[family]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    text = _text(width, rope_parameters=rope, head_dim=64)
    config = getattr(transformers, f"{name}Config")(vision_config=shared | vision, text_config=text, **marks)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    ids = torch.tensor([[1, START, *[IMAGE] * side**2, END, *range(10, 40)]])
    pixels = torch.randn(4 * side**2, 3 * 2 * 4 * 4)
    grid = torch.tensor([[1, 2 * side, 2 * side]])
    return model, {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), "pixel_values": pixels, "image_grid_thw": grid}


def make_tiled(family: str, side: int, width: int) -> tuple[Any, dict[str, Tensor]]:
    """A model and a prompt with an image of 2 x 2 tiles and a small one, of side x side tokens each."""
    import transformers

    pixels = 4 * side
    is_next = family == "llava_next"
    kind = transformers.CLIPVisionConfig if is_next else transformers.SiglipVisionConfig
    vision = kind(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=pixels, patch_size=4
    )
    text = (transformers.LlamaConfig if is_next else transformers.Qwen2Config)(**_text(width))
    name = "LlavaNext" if is_next else "LlavaOnevision"
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_grid_pinpoints=[[2 * pixels, 2 * pixels]]
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    given = {"pixel_values": torch.randn(1, 5, 3, pixels, pixels), "image_sizes": torch.tensor([[2 * pixels, 2 * pixels]])}
    total = len(model.model.get_image_features(**given, return_dict=True).pooler_output[0])
    return model, given | {"input_ids": torch.tensor([[1, *[IMAGE] * total, *range(10, 42)]])}


def seconds_of(call: Any) -> tuple[float, Any]:
    """The CPU time of a call, and what it returned."""
    started = time.process_time()
    out = call()
    return time.process_time() - started, out


def measure(family: str, side: int, width: int, plan: str) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    model, inputs = (make_qwen if family.startswith("qwen") else make_tiled)(family, side, width)
    vlm = open_vlm(model)
    assert vlm is not None
    image = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in inputs}
    rest = {name: value for name, value in inputs.items() if name != "pixel_values"}

    def see() -> Any:
        return vlm.inner.get_image_features(**image, return_dict=True)

    def read(features: Any, given: dict[str, Tensor]) -> Any:
        vlm.inner.rope_deltas = None
        return model(**given, mm_encoder_outputs={"image": features}, logits_to_keep=1, use_cache=True)

    with tokensieve.apply(model, plan) as handle:
        cache = model(**inputs, use_cache=True).past_key_values
    lengths = [cached_length(cache, layer) for layer in range(DEPTH)]
    realised, speedups = [], []
    stock = see()
    full = seconds_of(lambda: read(stock, rest))[0]
    for _ in range(ROUNDS):
        tower = seconds_of(see)[0]
        with tokensieve.apply(model, plan):
            spent, features = seconds_of(see)
            spent += seconds_of(lambda features=features: read(features, rest))[0] - tower
            known = StockOracle(vlm, handle, inputs, lengths) if "llm" in plan else None
        if known is not None:
            with known:
                best = seconds_of(lambda: read(stock, rest))[0]
        else:
            best = seconds_of(lambda: read(*shortened(stock, rest, lengths[0])))[0]
        realised.append(best / spent)
        speedups.append(full / spent)
    tokens = int((inputs["input_ids"] == IMAGE).sum())
    row = {"family": vlm.family, "width": width, "plan": plan, "tokens": tokens, "left": handle.ledger[0].tokens_out}
    return row | {"realised": statistics.median(realised), "each": realised, "speedup": statistics.median(speedups)}


def shortened(stock: Any, given: dict[str, Tensor], length: int) -> tuple[Any, dict[str, Tensor]]:
    """Features and a prompt of so many tokens in all."""
    ids = given["input_ids"]
    dropped = ids.shape[1] - length
    left = torch.ones(ids.shape[1], dtype=torch.bool)
    left[(ids[0] == IMAGE).nonzero()[:dropped, 0]] = False
    short = {"input_ids": ids[:, left]}
    if "mm_token_type_ids" in given:
        side = int((int((ids == IMAGE).sum()) - dropped) ** 0.5)
        short |= {
            "mm_token_type_ids": given["mm_token_type_ids"][:, left],
            "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
        }
    features = type(stock)(pooler_output=[stock.pooler_output[0][dropped:]])
    if getattr(stock, "deepstack_features", None) is not None:
        features.deepstack_features = [[layer[0][dropped:]] for layer in stock.deepstack_features]
    return features, short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"rows": {}}
    jobs = [(side, width, family, plan) for side, width, families in JOBS for family in families for plan in PLANS]
    with torch.inference_mode():
        for side, width, family, plan in jobs:
            key = f"{family} {side} {width} {plan}"
            if key not in known["rows"]:
                row = known["rows"][key] = measure(family, side, width, plan)
                print(f"{key}: {row['realised']:.3f} of the oracle's speed, {row['speedup']:.2f}x", flush=True)
                files.write_json(args.output, known | {"versions": provenance.versions()})


if __name__ == "__main__":
    main()
