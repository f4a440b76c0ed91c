"""Commands in odd surroundings: environment variables, narrow or ASCII terminals, closed streams, paths with any characters."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from tests.hostile.attack import Attack
from tests.support.paths import ROOT
from tests.support.processes import python

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
VARIABLES = {
    "HOME": ("", "/nonexistent", "/dev/null"),
    "LANG": ("C", "xx_XX.bad", ""),
    "LC_ALL": ("C", "POSIX", "xx"),
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-8"),
    "TERM": ("dumb", "", "xterm-256color"),
    "COLUMNS": ("20", "1", "0", "x", "500"),
    "LINES": ("1", "x"),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
    "TZ": ("x", "UTC"),
    "XDG_CACHE_HOME": ("/nonexistent", "/dev/null"),
}
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


def _run(rng: random.Random, folder: Path) -> None:
    for _ in range(rng.choice((0, 1, 2))):  # in a folder with an odd name
        folder = folder / rng.choice(NAMES)
        folder.mkdir(exist_ok=True)
    words = _command(rng, folder)
    variables = {name: rng.choice(values) for name, values in VARIABLES.items() if rng.random() < 0.3}
    if rng.random() < 0.2:
        os.umask(0o077)
    try:
        started = python(["-m", "tokensieve", *words], folder, **variables)
        code = started.wait(120)
    finally:
        os.umask(0o022)
    told = f"{words} with {variables}: exit code {code}, {started.said[-300:]!r}"
    assert "Traceback" not in started.said and "unexpected error" not in started.said, told
    refuses = any(ord(letter) < 32 for letter in " ".join(words[-3:]))  # names with control characters may be refused
    assert code == 0 or (code == 2 and refuses), told
    assert not list(folder.rglob("PWNED")), told


ATTACKS = (
    Attack(
        "surroundings",
        "commands with odd variables, terminals, folders and names",
        _run,
        per_thousand=10,
        short=4,
        seconds=120,
        is_slow=True,
    ),
)
