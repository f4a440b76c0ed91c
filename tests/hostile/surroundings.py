"""Commands in odd surroundings: environment variables, narrow or ASCII terminals, closed streams, paths with any characters."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.hostile.attack import Attack
from tests.support.paths import ROOT
from tests.support.processes import environment

NAMES = (
    "a b",
    "it's",
    'say "x"',
    "new\nline",
    "ünïcödé",
    "日本",
    "-dash",
    "$(touch PWNED)",
    "100%",
    "{x}",
    "tab\there",
    "x" * 200,
)
VARIABLES: dict[str, tuple[str | None, ...]] = {  # None: it is not set
    "HOME": (None, "", "/nonexistent", "/dev/null"),
    "LANG": (None, "C", "xx_XX.bad", ""),
    "LC_ALL": ("C", "POSIX", "xx"),
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-8"),
    "TERM": ("dumb", "", "xterm-256color"),
    "COLUMNS": ("20", "1", "0", "x", "500"),
    "LINES": ("1", "x"),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
    "TZ": ("x", "UTC"),
    "XDG_CACHE_HOME": ("/nonexistent", "/dev/null"),
    "PYTHONUTF8": ("0", "1"),
}
CLOSED = {"stdin closed": 0, "stdout closed": 1, "stderr closed": 2}
STREAMS = ("files", "files", "files", "reader gone", *CLOSED)
READER_GONE = 141  # the exit code of `tokensieve ... | head`
RESULT = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {"acc1": 0.5}, "run": {"key": "k"}}


def _command(rng: random.Random, folder: Path) -> list[str]:
    """A command that works, with its files in the folder."""
    name = rng.choice(("methods", "validate", "build", "report", "eval", "help"))
    if name == "methods":
        return ["methods"]
    if name == "help":
        return [rng.choice(("eval", "train", "bench", "show")), "--help"]
    if name == "validate":
        config = folder / "config.yaml"
        config.write_bytes((ROOT / "configs" / "embedded_clip.yaml").read_bytes())
        return ["validate", str(config)]
    if name == "eval":
        plan = rng.choice(("grid:60", "none", "cover:16"))
        output = f"./{rng.choice(NAMES)}.json"
        return ["eval", "--dataset", "embedded", "--limit", "16", "--batch_size", "8", "--plan", plan, "--output", output]
    (folder / "one.json").write_text(json.dumps(RESULT))
    ending = {"build": ".csv", "report": ".html"}[name]
    return [name, "one.json", "--output", f"./{rng.choice(NAMES)}{ending}", *(["--images", "0"] if name == "report" else [])]


def _surround(variables: dict[str, str | None]) -> dict[str, str]:
    """The variables of a new process. What Python reads at its start, such as LANG, has no effect in a fork."""
    return {name: value for name, value in (environment() | variables).items() if value is not None}


def _start(words: list[str], folder: Path, variables: dict[str, str | None], streams: str) -> tuple[int, str]:
    """Runs the command in a process of its own; the exit code, and what it said on stderr."""
    closed = CLOSED.get(streams)
    read, write = os.pipe()
    if streams == "reader gone":
        os.close(read)
    said = folder / "said.log"
    with said.open("wb") as errors, (folder / "printed.log").open("wb") as printed:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tokensieve", *words],
                cwd=folder,
                env=_surround(variables),
                stdin=subprocess.DEVNULL,
                stdout=write if streams == "reader gone" else printed,
                stderr=errors,
                timeout=300,
                preexec_fn=None if closed is None else lambda: os.close(closed),
            )
        finally:
            os.close(write)
            if streams != "reader gone":
                os.close(read)
    return done.returncode, said.read_text(encoding="utf-8", errors="replace")


def _may_refuse(words: list[str], folder: Path, variables: dict[str, str | None]) -> bool:
    """Whether a name has control characters, or bytes that Python cannot read: without UTF-8 it may know ASCII only."""
    unread = variables.get("PYTHONUTF8") == "0" and not " ".join((*words, str(folder))).isascii()
    return unread or any(ord(letter) < 32 for letter in " ".join(words[-3:]))


def _run(rng: random.Random, folder: Path) -> None:
    for _ in range(rng.choice((0, 1, 2))):  # in a folder with an odd name
        folder = folder / rng.choice(NAMES)
        folder.mkdir(exist_ok=True)
    if rng.random() < 0.3:  # that is reached by a link
        target, link = folder / "target", folder / "link"
        target.mkdir()
        link.symlink_to(target, target_is_directory=True)
        folder = link
    words = _command(rng, folder)
    variables = {name: rng.choice(values) for name, values in VARIABLES.items() if rng.random() < 0.3}
    streams = rng.choice(STREAMS)
    before = os.umask(0o077 if rng.random() < 0.2 else 0o022)
    try:
        code, said = _start(words, folder, variables, streams)
    finally:
        os.umask(before)
    told = f"{words} with {variables}, {streams}: exit code {code}, {said[-300:]!r}"
    assert "Traceback" not in said and "unexpected error" not in said and "Exception ignored" not in said, told
    gone = streams == "reader gone" and code == READER_GONE
    if words[0] == "eval" and "./{x}.json" in words:  # no such field of a template
        assert code == 2 and (streams == "stderr closed" or "--output has {x}; allowed are" in said), told
    else:
        assert code == 0 or (code == 2 and _may_refuse(words, folder, variables)) or gone, told
    if code == 0 and "--output" in words:
        output = folder / words[words.index("--output") + 1]
        assert output.is_file() and output.stat().st_size, f"{told}: there is no {output.name!r}"
    assert not list(folder.rglob("PWNED")), told


ATTACKS = (
    Attack(
        "surroundings",
        "commands with odd variables, terminals, streams, folders and names",
        _run,
        per_thousand=10,
        short=4,
        seconds=120,
        is_slow=True,
    ),
)
