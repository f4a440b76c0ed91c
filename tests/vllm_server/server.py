"""Starts servers, mostly with `tokensieve serve`, and asks them through the OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

LLAVA = "sieve-llava-8"
START_SECONDS = 900  # a start takes half a minute where nothing else runs
ANSWER_SECONDS = 300


class Server:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            if self.is_alive():
                return
            time.sleep(1)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def is_alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """The sum of what the server's /metrics has under a name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.partition("{")[0] == name]
        if not values:
            raise RuntimeError(f"the server has no metric {name}")
        return sum(values)

    def signal_all(self, by: signal.Signals) -> None:
        """A signal to all its processes; nothing where it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, by)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> float:
        """Ends it and all its processes; the seconds that took."""
        start = time.monotonic()
        if by == signal.SIGTERM:
            self.process.send_signal(by)
        else:
            self.signal_all(by)
        try:
            self.process.wait(60)
        finally:
            self.signal_all(signal.SIGKILL)  # what it left
        return time.monotonic() - start


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def start(folder: Path, name: str, *words: str, port: int | None = None) -> Server:
    """A server that is starting. words: of `tokensieve serve`."""
    port = port or free_port()
    return _run(folder / f"{name}.log", [sys.executable, "-m", "tokensieve", "serve", *words, "--port", str(port)], port)


def start_plain(
    folder: Path, name: str, model: str, overrides: dict[str, Any], port: int | None = None, with_plugin: bool = True
) -> Server:
    """vLLM's own server of the embedded LLaVA in a folder, that is starting."""
    from tokensieve.serving.launch import prepare

    port = port or free_port()
    command = prepare(LLAVA, "none", None, ["--port", str(port)]).command
    command[command.index("--model") + 1] = model
    command[command.index("--hf-overrides") + 1] = json.dumps(overrides)
    variables = {"VLLM_PLUGINS": "tokensieve" if with_plugin else "", "VLLM_LOGGING_LEVEL": "DEBUG"}  # the log names plug-ins
    return _run(folder / f"{name}.log", command, port, variables)


def _run(log: Path, command: list[str], port: int, variables: Mapping[str, str] | None = None) -> Server:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=environment() | dict(variables or {}),
            start_new_session=True,
        )
    return Server(process, port, log)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server as soon as it answers; stopped in the end."""
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def ask(server: Server, work: Callable[[Client], Awaitable[Any]], at_a_time: int = 8) -> Any:
    """What comes of asking a server."""

    async def run() -> Any:
        client = Client(server, at_a_time)
        try:
            return await work(client)
        finally:
            await client.openai.close()

    return asyncio.run(run())


def content(images: Sequence[str], question: str) -> list[dict[str, Any]]:
    """What a user says."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": question}]


class Stream(NamedTuple):
    """A reply that came in pieces."""

    text: str
    pieces: int
    first: float  # seconds to the first piece
    last: float


class Client:
    """Asks one server, so many at a time."""

    def __init__(self, server: Server, at_a_time: int = 8) -> None:
        from openai import AsyncOpenAI

        self.server = server
        self.openai = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECONDS)
        self.slots = asyncio.Semaphore(at_a_time)

    async def ask(self, images: Sequence[str], question: str, **more: Any) -> Any:
        """A reply."""
        async with self.slots:
            return await self.openai.chat.completions.create(
                model=LLAVA,
                messages=[{"role": "user", "content": content(images, question)}],
                temperature=0,
                **{"max_tokens": 16, **more},
            )

    async def answer(self, images: Sequence[str], question: str) -> str:
        """The text of a reply."""
        reply = await self.ask(images, question)
        return str(reply.choices[0].message.content).strip()

    async def stream(self, images: Sequence[str], question: str, tokens: int) -> Stream:
        """A reply of so many tokens, in pieces."""
        times, pieces = [], []
        async with self.slots:
            begin = time.monotonic()
            reply = await self.openai.chat.completions.create(
                model=LLAVA,
                messages=[{"role": "user", "content": content(images, question)}],
                temperature=0,
                stream=True,
                max_tokens=tokens,
                extra_body={"min_tokens": tokens},  # no end before
            )
            async for piece in reply:
                text = piece.choices[0].delta.content if piece.choices else None
                if text:
                    times.append(time.monotonic() - begin)
                    pieces.append(text)
        return Stream("".join(pieces).strip(), len(pieces), times[0], times[-1])
