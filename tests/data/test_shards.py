"""Web datasets are read without starting a program, from a folder or an address; no data set of any name reaches a shell."""

from __future__ import annotations

import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from torchvision.transforms.functional import to_tensor

from tokensieve.data import clip_benchmark, registry
from tokensieve.data.no_commands import CommandError, no_commands
from tokensieve.data.source import Source
from tokensieve.data.streams import WebSamples
from tokensieve.errors import UserError
from tokensieve.models.loading import hub


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address(shards: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(shards)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def read(source: Source) -> list[tuple[int, Any, int]]:
    stream = source.samples
    assert isinstance(stream, WebSamples)
    return [(number, *stream.decode(sample)) for number, sample in stream.read_encoded()]


def test_an_address_gives_the_samples_of_the_folder(shards: Path, address: str, tmp_path: Path) -> None:
    local = registry.build_source("wds/any", to_tensor, root=str(shards))
    kept = tmp_path / "kept"
    for cache in (None, str(kept), str(kept)):
        remote = registry.build_source("wds/any", to_tensor, root=address, wds_cache_dir=cache)
        assert (remote.classes, remote.templates) == (local.classes, local.templates) and remote.classes
        for (a, image, label), (b, other, same) in zip(read(remote), read(local), strict=True):
            assert a == b and label == same and image.equal(other)
    assert sorted(path.name[-6:] for path in kept.iterdir()) == ["-0.tar", "-1.tar"]


def test_what_is_kept_is_not_fetched_again(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = registry.build_source("wds/any", to_tensor, root=address, wds_cache_dir=str(tmp_path))
    first = read(source)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("fetched again"))
    assert [number for number, *_ in read(source)] == [number for number, *_ in first]


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("x://'; touch PWNED; '", "neither a folder nor an http"),
        ("http://a'; touch PWNED; '", "neither a folder nor an http"),
        ("pipe://touch PWNED", "neither a folder nor an http"),
        ("file:///etc", "neither a folder nor an http"),
        ("http://127.0.0.1:1", "cannot be read"),
        ("'; touch PWNED; '", "there is no"),
    ],
)
def test_a_root_is_never_run(root: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        registry.build_source("wds/x", to_tensor, root=root)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", ["", "x", "-1", "0", "1e3", "99999999", "\N{ARABIC-INDIC DIGIT FIVE}"])
def test_a_number_of_shards_is_a_number(count: str, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test/nshards.txt").write_text(count, encoding="utf-8")
    with pytest.raises(UserError, match="not a number of shards"):
        registry.build_source("wds/x", to_tensor, root=str(tmp_path))


def refused(*_: Any, **__: Any) -> Any:
    pytest.fail("a program was started")


NAMES = [*clip_benchmark.CLASSIFICATION, *clip_benchmark.CAPTIONS, "wds/x", "tfds/x", "vtab/caltech101", "vtab/resisc45"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_there_or_a_clear_error_and_no_program_starts(
    name: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a network, where nothing answers."""

    def no_answer(*_: Any, **__: Any) -> Any:
        raise urllib.error.URLError("no answer")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "reachable", lambda *_, **__: True)
    monkeypatch.setattr(urllib.request, "urlopen", no_answer)
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", no_answer)
    monkeypatch.setattr("requests.Session.request", no_answer)
    monkeypatch.setattr(os, "system", refused)
    monkeypatch.setattr(os, "popen", refused)
    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    root = tmp_path / "'; touch PWNED; '"
    if exists:
        root.mkdir()
    try:
        registry.build_source(name, to_tensor, root=str(root))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    assert not (tmp_path / "PWNED").exists()


def test_a_command_that_is_refused_is_told_without_letters_that_steer_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "reachable", lambda *_, **__: True)
    with pytest.raises(UserError, match="no program is started") as caught:
        registry.build_source("imagenet1k", to_tensor, root=str(tmp_path / "a\u200b\x1b[2J"))
    assert str(caught.value).isprintable()


def test_commands_are_refused_in_this_thread_only() -> None:
    with no_commands():
        for start in (os.system, os.popen, subprocess.call):
            with pytest.raises(CommandError, match="echo x"):
                start("echo x")  # type: ignore[operator]
        with no_commands(), pytest.raises(CommandError, match="a b"):
            subprocess.run(["a", "b"])
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(subprocess.call(["true"])))
        thread.start()
        thread.join()
        assert codes == [0]
        with pytest.raises(CommandError):
            os.system("echo y")
    assert subprocess.call(["true"]) == 0
