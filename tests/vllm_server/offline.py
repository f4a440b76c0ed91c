"""Checks of vLLM's engine without a server, each in a process: `python -m tests.vllm_server.offline NAME FOLDER`."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BARE_TOWER = "vision_tower."
OPTIONS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    name, folder = sys.argv[1], Path(sys.argv[2])
    {"untouched": untouched, "logprobs": logprobs, "family": family}[name](folder, *sys.argv[3:])


def engine(model: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(model=str(model), distributed_executor_backend="uni", **{**OPTIONS, **options})


def picture(url: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def say(is_good: bool, text: str) -> None:
    print(f"{'ok    ' if is_good else 'FAILED'} {text}", flush=True)


def family(folder: Path, case: str) -> None:
    """A tiny model of another family: its tokens equal those of transformers. Prompts come in chunks of 48 tokens."""
    from vllm import SamplingParams

    data = json.loads((folder / "families.json").read_text())
    name, _, plan = case.partition(" ")
    overrides = {"tokensieve_plan": plan}
    chunk = 48 if plan.startswith("cover") else 1024
    llm = engine(folder / name, hf_overrides=overrides, max_model_len=1024, max_num_batched_tokens=chunk, max_num_seqs=8)
    images = [picture(image) for image in data["images"]]
    prompts = [{"prompt": p, "multi_modal_data": {"image": i}} for p, i in zip(data["prompts"], images, strict=True)]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in out]
    equal = sum(a == b for a, b in zip(tokens, data["tokens"][case], strict=True))
    say(equal == len(tokens), f"{case}: the tokens of {equal} of {len(tokens)} prompts equal those of transformers")


def untouched(folder: Path) -> None:
    """Without a plan, log-probabilities are those of vLLM without the plug-in, bit for bit."""
    model = with_names_of_vllm(folder / "llava-untouched")
    found = []
    for plugins in ("", "tokensieve"):
        out = folder / f"logprobs-{plugins or 'none'}.json"
        command = [sys.executable, "-m", "tests.vllm_server.offline", "logprobs", str(folder), str(model), str(out)]
        subprocess.run(command, env={**os.environ, "VLLM_PLUGINS": plugins}, check=True, timeout=1500, stdout=sys.stderr)
        found.append(json.loads(out.read_text()))
    (without, loaded), (with_plugin, loaded_then) = found[0], found[1]
    say(not loaded and loaded_then, "the plug-in is in one of the two engines")
    say(without == with_plugin, f"without a plan, {len(without)} replies have the same log-probabilities, bit for bit")


def logprobs(folder: Path, model: str, out: str) -> None:
    from vllm import ModelRegistry, SamplingParams

    data = json.loads((folder / "llava.json").read_text())["questions"][:16]
    llm = engine(Path(model))
    prompts = [
        {"prompt": f"USER: <image>\n{each['question']} ASSISTANT:", "multi_modal_data": {"image": picture(each["image"])}}
        for each in data
    ]
    replies = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3), use_tqdm=False)
    rows = [
        [sorted((token, each.logprob) for token, each in step.items()) for step in reply.outputs[0].logprobs]
        for reply in replies
    ]
    loaded = "tokensieve" in repr(vars(ModelRegistry.models["LlavaForConditionalGeneration"]))
    Path(out).write_text(json.dumps([rows, loaded]))


def with_names_of_vllm(folder: Path) -> Path:
    """The embedded LLaVA with the names of weights that vLLM 0.32 knows: it was saved by a newer transformers."""
    import shutil

    from safetensors.torch import load_file, save_file

    from tokensieve.embedded import llava_path

    shutil.copytree(llava_path(), folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    named = {
        name.replace(BARE_TOWER, f"{BARE_TOWER}vision_model.", 1) if name.startswith(BARE_TOWER) else name: value
        for name, value in weights.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()
