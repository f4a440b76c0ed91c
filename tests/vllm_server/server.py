"""Starts `tokensieve serve` and asks it through the OpenAI client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_SECONDS = 900  # a start takes half a minute where nothing else runs
ANSWER_SECONDS = 300


class Server:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, model: str) -> None:
        self.process, self.port, self.log, self.model = process, port, log, model
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

    def stop(self, by: signal.Signals = signal.SIGTERM) -> float:
        """Ends it and all its processes; the seconds that took."""
        start = time.monotonic()
        if by == signal.SIGKILL:
            os.killpg(self.process.pid, by)
        else:
            self.process.send_signal(by)
        try:
            self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what it left
        return time.monotonic() - start


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def start(folder: Path, name: str, *words: str, port: int | None = None, model: str = "sieve-llava-8") -> Server:
    """A server that is starting. words: of `tokensieve serve`."""
    port = port or free_port()
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "tokensieve", "serve", *words, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
    return Server(process, port, log, model)


@contextmanager
def running(folder: Path, name: str, *words: str) -> Iterator[Server]:
    """A server that answers, stopped in the end."""
    server = start(folder, name, *words)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def content(images: Sequence[str], question: str) -> list[dict[str, Any]]:
    """What a user says."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": question}]


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
                model=self.server.model,
                messages=[{"role": "user", "content": content(images, question)}],
                temperature=0,
                **{"max_tokens": 16, **more},
            )

    async def answer(self, images: Sequence[str], question: str) -> str:
        """The text of a reply."""
        reply = await self.ask(images, question)
        return str(reply.choices[0].message.content).strip()

    async def stream(self, images: Sequence[str], question: str) -> tuple[str, int, float]:
        """The text of a reply that came in pieces, how many these were, and the seconds to the first."""
        begin, first, pieces = time.monotonic(), 0.0, []
        async with self.slots:
            reply = await self.openai.chat.completions.create(
                model=self.server.model,
                messages=[{"role": "user", "content": content(images, question)}],
                temperature=0,
                max_tokens=16,
                stream=True,
            )
            async for piece in reply:
                text = piece.choices[0].delta.content if piece.choices else None
                if text:
                    first = first or time.monotonic() - begin
                    pieces.append(text)
        return "".join(pieces).strip(), len(pieces), first
