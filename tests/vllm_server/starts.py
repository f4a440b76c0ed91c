"""Starts and ends of servers: refused with the reason, killed and started again, and left alone where there is no plan."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm_server.answers import MIN_EQUAL
from tests.vllm_server.reporting import report
from tests.vllm_server.server import (
    ANSWER_SECONDS,
    START_SECONDS,
    Client,
    Server,
    ask,
    environment,
    free_port,
    running,
    start_plain,
)

BARE_TOWER = "vision_tower."
WRONG = (
    ("a plan that no engine can carry out", ["--plan", "cover@3:49"], "can be cut at @out"),
    ("an unknown method", ["--plan", "covr@out:49"], "Did you mean 'cover@out:49'"),
    ("a trained part", ["--plan", "cross@llm.0:49"], "trained part"),
    ("a folder that is not there", ["/no/such/folder", "--plan", "cover@out:49"], "there is no folder"),
)


def serve_refused(*words: str) -> list[str]:
    """What `tokensieve serve` prints to stderr where it ends with 2; elsewhere its last lines, and how it ended."""
    command = [sys.executable, "-m", "tokensieve", "serve", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=START_SECONDS)
    lines = done.stderr.strip().splitlines()
    return lines if done.returncode == 2 else [*lines[-3:], f"ended with {done.returncode}"]


def check_refusals(folder: Path) -> None:
    """What cannot be served is an error of one line before vLLM starts; under plain vLLM, an error that names the reason."""
    for name, words, message in WRONG:
        lines = serve_refused(*words, "--port", str(free_port()))
        is_good = 1 <= len(lines) <= 3 and message in lines[0]  # a plan that cannot be read is shown, with a mark below it
        report(name, is_good, lines[0] if lines else "nothing was said")
    from tokensieve.embedded import llava_path

    server = start_plain(folder, "server-refused", str(llava_path()), {"tokensieve_plan": "prumerge@out:49"})
    try:
        ended = server.process.wait(600)
    finally:
        server.stop(signal.SIGKILL)
    reason = "decides for each image how many tokens stay"
    report("plain vLLM refuses a plan with the reason", ended != 0 and reason in server.log.read_text())


def check_curl(folder: Path, server: Server, data: dict[str, Any]) -> None:
    """The line that `tokensieve serve` prints, in a shell, in a folder with an image."""
    line = next(line for line in server.log.read_text().splitlines() if line.startswith("curl "))
    (folder / "image.png").write_bytes(base64.b64decode(data["questions"][0]["image"].partition(",")[2]))
    done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    try:
        text = json.loads(done.stdout)["choices"][0]["message"]["content"]
    except (ValueError, KeyError):
        text = ""
    report("the printed curl line", bool(text.strip()), repr(text or done.stdout[-300:] or done.stderr[-300:]))


def check_taken_port(server: Server) -> None:
    lines = serve_refused("--port", str(server.port))
    report("a taken port", len(lines) == 1 and "is taken" in lines[0], lines[-1] if lines else "")


def check_kill_and_restart(folder: Path, server: Server, data: dict[str, Any], plan: str) -> None:
    """Killed in the middle of a load: every request ends, with an answer or an error; a new server at the port answers all.

    The new one is vLLM's own command with the alias image_pruning_rate, for a plan that keeps 49 of 196 tokens.
    """
    questions, expected = data["questions"][:64], data["answers"][plan]["one"]

    async def load(client: Client) -> list[Any]:
        asked = [asyncio.create_task(client.answer([each["image"]], each["question"])) for each in questions]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        server.signal_all(signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 120)

    replies = ask(server, load)
    server.process.wait(60)
    failed = sum(isinstance(each, Exception) for each in replies)
    report("a server killed under load", failed > 0, f"{len(replies) - failed} answers, {failed} errors, nothing hangs")
    from tokensieve.embedded import llava_path

    rate = {"image_pruning_rate": 0.75}
    with running(start_plain(folder, "server-again", str(llava_path()), rate, port=server.port)) as again:

        async def everything(client: Client) -> list[str]:
            return await asyncio.gather(*(client.answer([each["image"]], each["question"]) for each in questions))

        equal = sum(a == b for a, b in zip(ask(again, everything), expected, strict=False))
        name = "started again at the same port, by image_pruning_rate"
        report(name, equal >= MIN_EQUAL * len(questions), f"{equal} of {len(questions)} equal")
        warned = again.log.read_text().count("log(size) is not added")
        report("the warning about log(size)", warned == 1, f"it comes {warned} times in the log")
        seconds = again.stop()
        report("stopped by SIGTERM", seconds < 60, f"{seconds:.0f} s")


def check_untouched(folder: Path, with_plan_none: Server, data: dict[str, Any]) -> None:
    """Log-probabilities under the plan none, and without any key, are those of vLLM without the plug-in, bit for bit."""
    model = str(with_names_of_vllm(folder / "llava-untouched"))
    found = {"--plan none": log_probabilities(with_plan_none, data)}
    for name, with_plugin in (("no key", True), ("no plug-in", False)):
        server = start_plain(folder, f"server-{name.replace(' ', '-')}", model, {}, with_plugin=with_plugin)
        with running(server):
            found[name] = log_probabilities(server, data)
        loaded = "Loading plugin tokensieve" in server.log.read_text()
        report(f"the plug-in with {name}", loaded == with_plugin, "loaded" if loaded else "not loaded")
    for name in ("--plan none", "no key"):
        steps = sum(map(len, found[name]))
        equal = found[name] == found["no plug-in"]
        report(f"{name}, and vLLM without the plug-in", equal, f"{steps} log-probabilities, compared bit for bit")


def log_probabilities(server: Server, data: dict[str, Any], count: int = 32) -> list[Any]:
    """Of the words of replies, and of the next likeliest. One question at a time: batches change rounding."""
    questions = data["questions"][:count]

    async def work(client: Client) -> list[Any]:
        more = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
        replies = [await client.ask([each["image"]], each["question"], **more) for each in questions]
        words = [word for reply in replies for word in reply.choices[0].logprobs.content]
        return [[(top.token, top.logprob) for top in word.top_logprobs] for word in words]

    found: list[Any] = ask(server, work, at_a_time=1)
    return found


def with_names_of_vllm(folder: Path) -> Path:
    """The embedded LLaVA with the names of weights that vLLM 0.32 knows: it was saved by a newer transformers."""
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
