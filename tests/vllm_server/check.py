"""Checks a real vLLM server under plans, against what transformers with tokensieve answers. Run in vLLM's virtual environment.

    python -m tests.vllm_server.questions FOLDER    in the project's environment
    python -m tests.vllm_server.check FOLDER        in vLLM's

Each check prints one line, and the program ends with 1 if one failed. No process stays behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.vllm_server.server import Client, Server, environment, free_port, running, start

MIN_EQUAL = 0.99
MARGIN = 0.02  # between the log-probabilities of the two likeliest words, below which rounding may decide
SPECIAL = {  # plan: flags of its server, so that every feature is on under some plan
    "cover@out:49(sizes=no)": (),
    "anchor@out:49": ("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),  # prompts come in chunks
    "visionzip@out:64": ("--no-enable-prefix-caching",),
    "divprune@llm.0:40": ("--mm-processor-cache-gb", "0"),
}
failures: list[str] = []


def report(name: str, is_good: bool, detail: str = "") -> None:
    print(f"{'ok    ' if is_good else 'FAILED'} {name}{': ' if detail else ''}{detail}", flush=True)
    if not is_good:
        failures.append(name)


def attempt(name: str, check: Callable[[], Any]) -> None:
    """Runs a check; an error is a failure of it."""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        report(name, False, f"{type(error).__name__}: {str(error)[-400:]}")


def ask(server: Server, work: Callable[[Client], Awaitable[Any]], at_a_time: int = 8) -> Any:
    """What comes of asking a server."""

    async def run() -> Any:
        client = Client(server, at_a_time)
        try:
            return await work(client)
        finally:
            await client.openai.close()

    return asyncio.run(run())


# --- answers ------------------------------------------------------------------------------------------------------------


def check_plan(folder: Path, data: dict[str, Any], plan: str) -> None:
    with running(folder, f"server-{plan.partition('@')[0]}", "--plan", plan, *SPECIAL.get(plan, ())) as server:
        check_answers(server, data, plan)
        check_two_images(server, data, plan)
        if plan.startswith("cover"):
            check_streaming(server, data, plan)
            check_again(server, data, plan)
            check_bad_input(server, data)


def check_answers(server: Server, data: dict[str, Any], plan: str) -> None:
    questions, expected = data["questions"], data["answers"][plan]["one"]

    async def work(client: Client) -> list[str]:
        return await asyncio.gather(*(client.answer([each["image"]], each["question"]) for each in questions))

    begin = time.monotonic()
    answers = ask(server, work)
    seconds = time.monotonic() - begin
    differ = [number for number, (a, b) in enumerate(zip(answers, expected, strict=True)) if a != b]
    unexplained = [number for number in differ if not is_near_tie(server, questions[number])]
    right = sum(a == each["answer"] for a, each in zip(answers, questions, strict=True))
    share = 1 - len(differ) / len(questions)
    detail = f"{len(questions) - len(differ)} of {len(questions)} equal to transformers, {right} right, {seconds:.0f} s"
    for number in differ:
        detail += f"\n         {number}: {answers[number]!r}, not {expected[number]!r}"
    report(f"answers under {plan}", share >= MIN_EQUAL and not unexplained, detail)


def is_near_tie(server: Server, question: dict[str, Any]) -> bool:
    """Whether some word of an answer is hardly more likely than another, so that rounding decides."""

    async def work(client: Client) -> Any:
        return await client.ask([question["image"]], question["question"], logprobs=True, top_logprobs=2)

    words = ask(server, work).choices[0].logprobs.content
    tops = [[each.logprob for each in word.top_logprobs] for word in words]
    return any(len(top) > 1 and top[0] - top[1] < MARGIN for top in tops)


def check_two_images(server: Server, data: dict[str, Any], plan: str) -> None:
    questions, expected = data["questions"], data["answers"][plan]["two"]

    async def work(client: Client) -> list[str]:
        pairs = [([questions[n]["image"], questions[n + 1]["image"]], questions[n]["question"]) for n in range(len(expected))]
        return await asyncio.gather(*(client.answer(*pair) for pair in pairs))

    answers = ask(server, work)
    equal = sum(a == b for a, b in zip(answers, expected, strict=True))
    report(f"two images a prompt under {plan}", equal == len(expected), f"{equal} of {len(expected)} equal to transformers")


def check_streaming(server: Server, data: dict[str, Any], plan: str) -> None:
    async def work(client: Client) -> list[tuple[str, int, float]]:
        return await asyncio.gather(*(client.stream([each["image"]], each["question"]) for each in data["questions"][:24]))

    replies = ask(server, work)
    equal = sum(text == expected for (text, _, _), expected in zip(replies, data["answers"][plan]["one"], strict=False))
    report("streaming", equal == len(replies), f"{equal} of {len(replies)} equal")


def check_again(server: Server, data: dict[str, Any], plan: str) -> None:
    """The same images again, and with other questions: from the caches of images and of prefixes."""
    questions = data["questions"][:24]

    async def work(client: Client) -> list[str]:
        again = [client.answer([each["image"]], each["question"]) for each in questions]
        other = [client.answer([each["image"]], "what shape is above the circle ?") for each in questions[:8]]
        return (await asyncio.gather(*again, *other))[: len(questions)]

    answers = ask(server, work)
    equal = sum(a == b for a, b in zip(answers, data["answers"][plan]["one"], strict=False))
    report("prefix caching", equal == len(answers), f"{equal} of {len(answers)} equal when asked again")


# --- bad input ----------------------------------------------------------------------------------------------------------


def check_bad_input(server: Server, data: dict[str, Any]) -> None:
    """Each is an error for that request, and the server goes on."""
    good = data["questions"][0]
    broken = "data:image/png;base64,iVBORw0KGgoAAAA="
    tries: dict[str, Callable[[Client], Awaitable[Any]]] = {
        "a broken image": lambda client: client.ask([broken], good["question"]),
        "no image at all in its place": lambda client: client.ask(["data:image/png;base64,"], good["question"]),
        "an over-long prompt": lambda client: client.ask([good["image"]], "what is red ? " * 400),
        "more positions than the model has": lambda client: client.ask([good["image"]] * 4, good["question"]),
        "an unknown model": lambda client: client.ask([good["image"]], good["question"], extra_body={"model": "other"}),
    }
    for name, wrong in tries.items():
        try:
            ask(server, wrong)
            report(f"bad input, {name}", False, "it was answered")
        except Exception as error:
            status = getattr(error, "status_code", None)
            report(f"bad input, {name}", status in (400, 404, 422), f"{status}: {str(error)[:160]}")

    async def text_only(client: Client) -> Any:
        return await client.ask([], good["question"])

    reply = ask(server, text_only)
    report("a question without an image", bool(reply.choices), "answered from the text alone")
    code = (
        "import sys, urllib.request\n"
        "body = open(sys.argv[2], 'rb').read()\n"
        "urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, {'Content-Type': 'application/json'}))\n"
    )
    body = server.log.with_suffix(".body.json")
    message = {"role": "user", "content": [{"type": "text", "text": "what is red ?"}]}
    body.write_text(json.dumps({"model": server.model, "messages": [message], "max_tokens": 400, "ignore_eos": True}))
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"{server.url}/v1/chat/completions", str(body)], stderr=subprocess.DEVNULL
        )
        for _ in range(4)
    ]
    time.sleep(1.5)
    for client in clients:
        client.kill()
        client.wait()

    async def once_more(client: Client) -> str:
        return await client.answer([good["image"]], good["question"])

    report(
        "killed clients", ask(server, once_more) == data["answers"]["cover@out:49(sizes=no)"]["one"][0], "the server goes on"
    )


# --- starts -------------------------------------------------------------------------------------------------------------


def check_refusals(folder: Path) -> None:
    """What cannot be served is an error of one line before vLLM starts; under plain vLLM, an error that names the reason."""
    server = free_port()
    for name, words, message in (
        ("a plan that no engine can carry out", ["--plan", "cover@3:49"], "can be cut at @out"),
        ("a trained part", ["--plan", "cross@llm.0:49"], "trained part"),
        ("a folder that is not there", ["/no/such/folder", "--plan", "cover@out:49"], "there is no folder"),
    ):
        command = [sys.executable, "-m", "tokensieve", "serve", *words, "--port", str(server)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
        lines = done.stderr.strip().splitlines()
        report(name, done.returncode == 2 and len(lines) == 1 and message in lines[0], lines[-1] if lines else "")
    from tokensieve.embedded import llava_path

    module = "vllm.entrypoints.openai.api_server"
    overrides = json.dumps({"tokensieve_plan": "prumerge@out:49"})
    command = [sys.executable, "-m", module, "--model", str(llava_path()), "--hf-overrides", overrides, "--port", str(server)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    reason = "decides for each image how many tokens stay"
    report("plain vLLM refuses a plan with the reason", done.returncode != 0 and reason in done.stderr + done.stdout)


def check_taken_port(folder: Path, server: Server) -> None:
    command = [sys.executable, "-m", "tokensieve", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    report("a taken port", done.returncode == 2 and "is taken" in done.stderr, done.stderr.strip()[-150:])


def check_kill_and_restart(folder: Path, data: dict[str, Any]) -> None:
    """Killed in the middle of a load: every request ends, with an answer or an error; a new server at the port answers all."""
    plan = "cover@out:49(sizes=no)"
    questions, expected = data["questions"][:64], data["answers"][plan]["one"]
    server = start(folder, "server-killed", "--plan", plan)
    again: Server | None = None
    try:
        server.wait()
        check_taken_port(folder, server)

        async def load(client: Client) -> list[Any]:
            asked = [asyncio.create_task(client.answer([each["image"]], each["question"])) for each in questions]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            os.killpg(server.process.pid, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 120)

        replies = ask(server, load)
        failed = sum(isinstance(each, Exception) for each in replies)
        report("a server killed under load", failed > 0, f"{len(replies) - failed} answers, {failed} errors, nothing hangs")
        again = start(folder, "server-again", "--plan", plan, port=server.port)
        again.wait()

        async def everything(client: Client) -> list[str]:
            return await asyncio.gather(*(client.answer([each["image"]], each["question"]) for each in questions))

        equal = sum(a == b for a, b in zip(ask(again, everything), expected, strict=False))
        report("started again at the same port", equal >= MIN_EQUAL * len(questions), f"{equal} of {len(questions)} equal")
        seconds = again.stop()
        report("stopped by SIGTERM", seconds < 60, f"{seconds:.0f} s")
    finally:
        for each in (server, again):
            if each is not None and each.process.poll() is None:
                each.stop(signal.SIGKILL)


def check_two_processes(folder: Path, data: dict[str, Any]) -> None:
    """--tensor-parallel-size 2, with a method that reads the attention of all heads."""
    plan = "anchor@out:49"
    with running(folder, "server-tp2", "--plan", plan, "--tensor-parallel-size", "2") as server:
        check_answers(server, data | {"questions": data["questions"][:50], "answers": {plan: _first(data, plan, 50)}}, plan)


def _first(data: dict[str, Any], plan: str, count: int) -> dict[str, Any]:
    return {"one": data["answers"][plan]["one"][:count]}


def check_offline(folder: Path, name: str, *words: str) -> None:
    """A check that needs an engine but no server, in a process of its own."""
    command = [sys.executable, "-m", "tests.vllm_server.offline", name, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1800)
    (folder / f"offline-{'-'.join([name, *words])}.log".replace(" ", "_").replace("/", "_")).write_text(done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED"))]
    for line in lines:
        report(line[7:], line.startswith("ok"))
    if done.returncode or not lines:
        report(f"{name} {' '.join(words)}", False, done.stderr[-1500:])


def check_families(folder: Path, data: dict[str, Any]) -> None:
    """The tiny models of other families, under plans and without one."""
    for case in data["tokens"]:
        check_offline(folder, "family", case)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", nargs="+", help="names of checks: refusals, plans, restart, tensor_parallel, untouched, families"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    data = json.loads((folder / "llava.json").read_text())
    families = json.loads((folder / "families.json").read_text())
    checks: dict[str, Callable[[], None]] = {
        "refusals": lambda: check_refusals(folder),
        "untouched": lambda: check_offline(folder, "untouched"),
        "families": lambda: (
            [check_offline(folder, "family", each) for each in families["tokens"] if "none" not in each] and None
        ),
        "restart": lambda: check_kill_and_restart(folder, data),
        "tensor_parallel": lambda: check_two_processes(folder, data),
    }
    begin = time.monotonic()
    for name in args.only or ["refusals", "plans", "untouched", "families", "restart", "tensor_parallel"]:
        if name == "plans":
            for plan in data["answers"]:
                attempt(f"plan {plan}", lambda plan=plan: check_plan(folder, data, plan))
        elif name in data["answers"]:
            attempt(f"plan {name}", lambda name=name: check_plan(folder, data, name))
        else:
            attempt(name, checks[name])
    minutes = (time.monotonic() - begin) / 60
    print(f"{'all checks passed' if not failures else f'{len(failures)} failed: ' + '; '.join(failures)} ({minutes:.1f} min)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
