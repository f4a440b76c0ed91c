"""What users send by mistake is an error of its request, and the server goes on."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.vllm_server.reporting import report
from tests.vllm_server.server import LLAVA, Client, Server, ask, content

RUNNING, GENERATED = "vllm:num_requests_running", "vllm:generation_tokens_total"
CLIENTS, LONG = 4, 400  # tokens


def check_bad_input(server: Server, data: dict[str, Any], plan: str) -> None:
    good = data["questions"][0]
    broken = "data:image/png;base64,iVBORw0KGgoAAAA="
    head, _, pixels = good["image"].partition(",")
    cut_short = f"{head},{pixels[: len(pixels) // 8 * 4]}"
    tries: dict[str, Callable[[Client], Awaitable[Any]]] = {
        "a broken image": lambda client: client.ask([broken], good["question"]),
        "an image that ends too early": lambda client: client.ask([cut_short], good["question"]),
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
    kill_clients(server, good["image"])

    async def once_more(client: Client) -> str:
        return await client.answer([good["image"]], good["question"])

    report("the server goes on", ask(server, once_more) == data["answers"][plan]["one"][0], "and answers as before")


def kill_clients(server: Server, image: str) -> None:
    """Clients that hang up while the server works for them, as if killed: it lets go of their requests."""
    message = {"role": "user", "content": content([image], "what is red ?")}
    body = json.dumps({"model": LLAVA, "messages": [message], "max_tokens": LONG, "ignore_eos": True})
    before = server.metric(GENERATED)
    clients = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(CLIENTS)]
    for client in clients:
        client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    ran = until(lambda: server.metric(GENERATED) > before, 60)
    for client in clients:
        client.close()
    ended = until(lambda: server.metric(RUNNING) == 0, 60)
    generated = server.metric(GENERATED) - before
    detail = f"{generated:.0f} of {CLIENTS * LONG} tokens were generated for {CLIENTS} clients with an image"
    report("killed clients", ran and ended and generated < CLIENTS * LONG, detail)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether something holds within these seconds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
