"""Starting the server: its address, a port that is taken, the extra that is missing."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")

from tokensieve.cli import main
from tokensieve.demo.serve import bind
from tokensieve.demo.session import Session
from tokensieve.demo.subject import ModelName, find_models
from tokensieve.errors import UserError


def test_a_port_that_is_taken_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"--port {port}" in error and "--port 0" in error and "Traceback" not in error


def test_the_default_is_this_machine_only() -> None:
    with bind("127.0.0.1", 0) as opened:
        assert opened.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UserError, match="no address"):
        bind("not-a-host.invalid", 0)


def test_a_missing_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None\nfrom tokensieve.cli import main\nsys.exit(main(['demo', '--port', '0']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and 'pip install "tokensieve[demo]"' in done.stderr and "Traceback" not in done.stderr


def test_a_model_whose_library_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session([ModelName("sieve-vit-8", "", "open_clip")], "cpu")

    def load(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'open_clip'", name="open_clip")

    monkeypatch.setattr("tokensieve.demo.session.loading.load", load)
    with pytest.raises(UserError, match=r'pip install "tokensieve\[clip\]"'):
        session.setup("")


def test_models_are_named_as_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    def named(**given: str | None) -> list[tuple[str, str, str]]:
        args = argparse.Namespace(**({"model": None, "pretrained": None, "model_type": None} | given))
        return [(name.model, name.pretrained, name.model_type) for name in find_models(args)]

    assert [model for model, _, _ in named()] == ["sieve-vit-8", "sieve-llava-8", "sieve-reid-6"]
    assert named(model="sieve-llava-8") == [("sieve-llava-8", "", "vlm")]
    assert named(model="sieve-reid-6-merge") == [("sieve-reid-6-merge", "", "reid")]
    assert named(model="sieve-coca-8") == [("sieve-coca-8", "captions-v1", "open_clip")]
    assert main(["demo", "--model", "ViT-B-61", "--port", "0"]) == 2
    assert "Did you mean" in capsys.readouterr().err
