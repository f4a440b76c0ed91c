"""Checks of vLLM's engine without a server: tiny models of the other families, one after another in this process.

python -m tests.vllm_server.offline FOLDER [--only FAMILY ...]
"""

from __future__ import annotations

import argparse
import base64
import gc
import io
import json
import os
import traceback
from pathlib import Path
from typing import Any

MARGIN = 0.02  # between the log-probabilities of two tokens, below which rounding may decide
CHUNK = 48  # tokens of a step, under the plans whose prompts come in chunks


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+")
    args = parser.parse_args()
    data = json.loads((args.folder / "families.json").read_text())
    hashes: dict[str, dict[str, set[str]]] = {}
    for case in data["tokens"]:
        name, _, plan = case.partition(" ")
        if args.only and name not in args.only:
            continue
        try:
            hashes.setdefault(name, {})[plan] = check_family(args.folder / name, data, case, plan)
        except Exception as error:
            traceback.print_exc()
            say(False, f"{case}: {type(error).__name__}: {str(error)[-300:]}")
    for name, of_plans in hashes.items():
        different = {each for of_plan in of_plans.values() for each in of_plan}
        total = sum(map(len, of_plans.values()))
        say(len(different) == total, f"{name}: {total} images under {len(of_plans)} plans have {len(different)} cache keys")


def check_family(model: Path, data: dict[str, Any], case: str, plan: str) -> set[str]:
    """The tokens of a tiny model equal those of transformers. Returns the keys of the images in vLLM's caches.

    plan: with the word compact behind it where the tokens that stay are numbered anew.
    """
    from vllm import LLM, SamplingParams

    text, _, is_compact = plan.partition(" ")
    overrides = {"tokensieve_plan": text} | ({"tokensieve_positions": "compact"} if is_compact else {})
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        hf_overrides=overrides,
        max_model_len=1024,
        max_num_batched_tokens=CHUNK if plan.startswith("cover") else 1024,
        max_num_seqs=8,
    )
    requests = data["requests"][model.name]
    prompts = [
        {"prompt": each["prompt"], "multi_modal_data": {"image": list(map(picture, each["images"]))}} for each in requests
    ]
    # At least 8 tokens, as transformers was asked: the end of a text is suppressed until then.
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, min_tokens=8, logprobs=2), use_tqdm=False)
    replies = [each.outputs[0] for each in out]
    expected = data["tokens"][case]
    differ = [number for number, reply in enumerate(replies) if list(reply.token_ids) != expected[number]]
    is_explained = all(is_near_tie(replies[number], expected[number]) for number in differ)
    lengths = [len(each.prompt_token_ids) for each in out]
    found = f"{len(out) - len(differ)} of {len(out)} replies equal those of transformers"
    if differ and is_explained:
        found += ", the first word that differs is a near-tie"
    say(is_explained and len(differ) <= 1, f"{case}: {found}; prompts of {min(lengths)} to {max(lengths)} tokens")
    keys = image_keys(llm, prompts)
    del llm
    clean_up()
    return keys


def is_near_tie(reply: Any, expected: list[int]) -> bool:
    """Whether the first token that differs from the expected is hardly likelier than that one, so that rounding decides."""
    first = next(number for number, pair in enumerate(zip(reply.token_ids, expected, strict=True)) if pair[0] != pair[1])
    likely = reply.logprobs[first]
    if expected[first] not in likely:
        return False
    margin = likely[reply.token_ids[first]].logprob - likely[expected[first]].logprob
    return float(margin) < MARGIN


def image_keys(llm: Any, prompts: list[Any]) -> set[str]:
    """The keys of images in vLLM's caches. An image of several prompts has one."""
    keys: set[str] = set()
    for prompt in prompts:
        made = llm.llm_engine.renderer.render_cmpl([prompt])[0]
        keys.update(made["mm_hashes"]["image"])
    return keys


def clean_up() -> None:
    """Room for the next engine."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def picture(url: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def say(is_good: bool, text: str) -> None:
    print(f"{'ok    ' if is_good else 'FAILED'} {text}", flush=True)


if __name__ == "__main__":
    main()
