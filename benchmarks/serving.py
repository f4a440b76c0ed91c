"""Requests per second, time to first token and KV-cache places of a LLaVA in vLLM, without a plan and under three.

    .venv-vllm/bin/python benchmarks/serving.py --output benchmarks/results/serving_embedded.json
    .venv-vllm/bin/python benchmarks/serving.py --model random --output benchmarks/results/serving_random.json

Run it in vLLM's virtual environment (`make test-vllm` makes it), from the root of the repository. The engines of all plans are
in this process, and one works at a time: in every round, each plan gets the same new images, at each number of requests at a
time. No engine has seen an image of a round before, so its caches do not help. The clock is the CPU time of the process, which
computes with one thread, so that other work on the machine counts little. The file is written after each load.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from PIL import Image

PLANS = ("none", "cover@out:50%", "cover@out:25%", "cover@out:10%")
AT_A_TIME = (1, 8, 32)
ANSWER = 16  # tokens
BLOCK, BLOCKS = 32, 560  # tokens of a block of the KV cache, and blocks: room for all requests
Asked = list[tuple[Image.Image, str]]
RANDOM = {  # a LLaVA with random weights, 75 million of them in its decoder and 6 million in its tower
    "vision": {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 3},
    "image": {"image_size": 336, "patch_size": 16},  # 441 tokens
    "text": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=["embedded", "random"], default="embedded")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.output.exists():
        sys.exit(f"{args.output} exists; results are never replaced")
    from tokensieve.embedded import llava_path

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = llava_path() if args.model == "embedded" else save_random(Path(folder))
        engines = {plan: Engine(model, plan) for plan in PLANS}
        for engine in engines.values():
            engine.measure(images(0, 4), 4)  # the first requests take longer
        for turn in range(args.rounds):
            for at_a_time in AT_A_TIME:
                rows += measure_load(engines, turn, at_a_time)
                args.output.write_text(json.dumps({"meta": describe(args), "rows": rows}, indent=1) + "\n")


class Engine:
    """vLLM's engine under a plan, asked as a server asks it."""

    def __init__(self, model: Path, plan: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            hf_overrides={"tokensieve_plan": plan},
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS,
        )
        self.engine = self.llm.llm_engine
        self.count = 0

    def add(self, image: Image.Image, question: str) -> str:
        """A request that begins."""
        from vllm import SamplingParams

        prompt: Any = {"prompt": f"USER: <image>\n{question} ASSISTANT:", "multi_modal_data": {"image": image}}
        (made,) = self.engine.renderer.render_cmpl([prompt])
        self.count += 1
        name = str(self.count)
        self.engine.add_request(name, made, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
        return name

    def measure(self, asked: Asked, at_a_time: int) -> dict[str, float]:
        """One load: as soon as a request ends, the next one begins."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        waiting, begins, firsts = deque(asked), dict[str, float](), dict[str, float]()
        tokens, running, usage = 0, 0, 0.0
        begin = time.process_time()
        while waiting or running:
            while waiting and running < at_a_time:
                now = time.process_time()
                begins[self.add(*waiting.popleft())] = now
                running += 1
            for reply in self.engine.step():
                firsts.setdefault(reply.request_id, time.process_time() - begins[reply.request_id])
                running -= reply.finished
                tokens = len(reply.prompt_token_ids)
            usage = max(usage, scheduler.kv_cache_manager.usage)
        seconds = time.process_time() - begin
        return {
            "requests_per_second": len(asked) / seconds,
            "first_token_seconds": statistics.median(firsts.values()),
            "prompt_tokens": tokens,
            "kv_places": round(usage * BLOCKS) * BLOCK,  # the most at any time
        }


def measure_load(engines: dict[str, Engine], turn: int, at_a_time: int) -> list[dict[str, Any]]:
    """Every plan at one number of requests at a time, beginning with another plan in each round."""
    counts = [max(8, each) for each in AT_A_TIME]
    place = AT_A_TIME.index(at_a_time)
    asked = images(4 + turn * sum(counts) + sum(counts[:place]), counts[place])
    rows: list[dict[str, Any]] = []
    for plan in PLANS[turn % len(PLANS) :] + PLANS[: turn % len(PLANS)]:
        rows.append({"plan": plan, "at_a_time": at_a_time, "round": turn, **engines[plan].measure(asked, at_a_time)})
        print(rows[-1], flush=True)
    return rows


def images(first: int, count: int) -> Asked:
    """Embedded test scenes with their questions. The number of an image is in a corner of it, so no two are the same."""
    from tokensieve.embedded.datasets import EmbeddedQuestions

    scenes, made = EmbeddedQuestions("test"), []
    for number in range(first, first + count):
        image, question = scenes[number % len(scenes)]
        image = image.copy()
        image.putpixel((0, 0), (number % 256, number // 256, 0))
        made.append((image, question.text))
    return made


def save_random(folder: Path) -> Path:
    """A LLaVA with random weights in a folder, with the words of the embedded one."""
    import torch
    import transformers

    from tokensieve.embedded import llava_path

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(llava_path())
    config.vision_config = transformers.CLIPVisionConfig(**RANDOM["vision"], **RANDOM["image"])
    words = {name: getattr(config.text_config, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config.text_config = transformers.LlamaConfig(**RANDOM["text"], **words)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(llava_path())
    side = RANDOM["image"]["image_size"]
    processor.image_processor.size = {"shortest_edge": side}
    processor.image_processor.crop_size = {"height": side, "width": side}
    processor.patch_size = RANDOM["image"]["patch_size"]
    processor.save_pretrained(folder)
    return folder


def describe(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    model = {"name": "sieve-llava-8"} if args.model == "embedded" else {"name": "LLaVA with random weights", **RANDOM}
    cache = {"block": BLOCK, "blocks": BLOCKS}
    return {"model": model, "rounds": args.rounds, "threads": 1, "cache": cache, "versions": versions}


if __name__ == "__main__":
    main()
