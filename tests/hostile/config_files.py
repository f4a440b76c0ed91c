"""Damaged and nonsensical configuration files: loaded with sane numbers, or refused in short lines about keys of the file."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.attack import Attack, check_message, refused
from tests.hostile.mutate import insert_nonsense, mutate_bytes, mutate_text
from tests.support.original_pruning import ORIGINAL
from tests.support.paths import ROOT
from tokensieve import config
from tokensieve.config import yaml_tree
from tokensieve.config.document import ConfigErrors, Document

TEXTS = [ORIGINAL, *(path.read_text() for path in sorted((ROOT / "configs").rglob("*.y*ml")))]
ALIAS_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30))
SNIPPETS = (
    *("!!int ''", "!!timestamp x", "!!python/object/apply:os.system [touch x]", "!!binary aGk=", "!!set {a, b}", "!!float x"),
    *("!!omap [a: 1]", "!!bool maybe", "!!null x", "!foo bar", "!<tag:yaml.org,2002:int> 5", "!!str 5", "!!map {}", "!!seq []"),
    *("2024-01-01", "2024-13-45", "2024-01-01 10:00:00", "1:30", "010", "0x1F", "0o17", "1_000", "yes", "No", "on", "~", "''"),
    *(".inf", "-.inf", ".nan", "1e308", "1e400", "-1e308", "1e-400", "'.nan'", "'1e400'", "'nan'", "'1e308'", "'-1'", "'5'"),
    *(
        "9" * 30,
        "9" * 5000,
        "9" * 100_000,
        f"'{'9' * 5000}'",
        str(2**63),
        str(2**64),
        str(-(2**63)),
        "-1",
        "0",
        "0.5",
        "1e-300",
    ),
    *(
        "x" * 5000,
        "x" * 100_000,
        '"\\0"',
        '"\\x1b[2J"',
        '"\\ud800"',
        '"\\UFFFFFFFF"',
        '"a\\nb"',
        "../" * 2000 + "x",
        "٣",
        "１２",
    ),
    *(
        "[" * 2000,
        "[" * 15 + "]" * 15,
        "{a: " * 2000,
        "{a: " * 15 + "1" + "}" * 15,
        "[1, 2, three]",
        "{low: 1, high: 2}",
        "[]",
        "{}",
    ),
    *(
        "{low: -.inf, high: .inf}",
        "{low: '.inf', high: 5}",
        "{choices: [1e308, .nan]}",
        "{low: 0.5, high: 2.5}",
        "{choices: []}",
    ),
    *(
        "&a [*a]",
        "&a {b: *a}",
        "*undefined",
        "&b x",
        "<<",
        "{<<: 3}",
        "{<<: [1]}",
        "[clip]",
        "clip",
        "{? [a] : b}",
        "{1: 2, null: 3}",
    ),
    *(
        "{a: 1, a: 2}",
        "? x",
        "|\n  text\n",
        ">\n  text\n",
        "%",
        "@",
        "`",
        "- x",
        "a: b",
        "[clip",
        "\t",
        "#",
        "sdtps@6",
        "tome@*:-8",
    ),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        10**9,
        10**18,
        10**30,
        2**63,
        -(2**63),
        10**400,
        0.5,
        1.5,
        -0.5,
        1e-9,
        1e-320,
        1e9,
        1e308,
    ),
    *(
        math.inf,
        -math.inf,
        math.nan,
        "",
        "x",
        "x" * 300,
        "x" * 5000,
        "1e-3",
        "1e308",
        "1e400",
        "nan",
        ".nan",
        "inf",
        "5",
        "true",
    ),
    *(
        "yes",
        "no",
        "\x1b[2J",
        "a\nb",
        "../../x",
        "~",
        "none",
        "all",
        b"bytes",
        [],
        [1],
        [1, 2, 3],
        ["x"],
        [None],
        [[1]],
        [1e308] * 3,
    ),
    *({}, {"a": 1}, {"lr": 1}, {1: 2}, {"low": 1, "high": 2}, {"low": -math.inf, "high": math.inf}, {"choices": [math.nan]}),
    *({"low": 1e-300, "high": 1e300, "log": True}, {"low": 5, "high": 1}, [0] * 2000, {f"k{n}": n for n in range(1500)}),
)


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _mutate_tree(rng: random.Random, tree: Any) -> Any:
    """The values of a file with one to four of them replaced, removed, renamed, repeated or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        paths = list(_paths(tree))
        if not paths:
            break
        *above, key = rng.choice(paths)
        section = tree
        for step in above:
            section = section[step]
        kind = rng.randrange(8)
        if kind == 0:
            del section[key]
        elif kind == 1 and isinstance(section, dict):
            other = rng.choice(
                (mutate_text(rng, str(key)), rng.choice(paths)[-1], rng.choice((1, None, True, 1.5, "", "task")))
            )
            section[other] = section.pop(key)
        elif kind == 2:
            section[key] = [section[key]] * rng.choice((1, 2, 3))
        elif kind == 3:
            for _ in range(rng.choice((1, 2, 30, 100))):
                section[key] = rng.choice(({"a": section[key]}, [section[key]]))
        elif kind == 4 and isinstance(tree, dict):
            tree[mutate_text(rng, str(key))] = copy.deepcopy(section[key])
        elif kind == 5:
            section[key] = copy.deepcopy(rng.choice(list(_values(tree))))
        else:
            section[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def _values(tree: Any) -> Iterator[Any]:
    for path in _paths(tree):
        value = tree
        for step in path:
            value = value[step]
        yield value


def _mutate_lines(rng: random.Random, text: str) -> str:
    """The text with lines repeated, moved, indented, given another value, or turned into anchors and merges."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, kind = rng.randrange(len(lines)), rng.randrange(7)
        head, colon, _ = lines[at].partition(":")
        if kind == 0:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 1:
            lines[at] = " " * rng.choice((1, 2, 4)) + lines[at]
        elif kind == 2 and colon:
            lines[at] = f"{head}: &anchor {rng.choice(SNIPPETS)}"
            lines.append(rng.choice(("more: *anchor", "<<: *anchor", "MODEL: {<<: *anchor}", "optimizer: *anchor")))
        elif kind == 3:
            lines.insert(
                at, rng.choice((ALIAS_BOMB, MERGE_BOMB, "---", "...", "%YAML 1.1", f"%YAML {'9' * 5000}.1", "? [a]\n: b"))
            )
        elif colon:
            lines[at] = f"{head}: {rng.choice(SNIPPETS)}"
    return "\n".join(lines) + "\n"


def _check(path: Path, overrides: dict[str, str] | None = None, searching: bool = False) -> None:
    """Loads a file and checks what comes of it."""
    made: list[Any] = []
    error = refused(lambda: made.append(config.load(path, overrides, searching=searching)))
    if error is None:
        _check_numbers(made[0].model_dump())
        data = Document(path).data
        again = yaml_tree.read(yaml_tree.write(data))
        assert again.value == data and not again.problems
    elif isinstance(error, ConfigErrors):
        _check_lines(error, path.read_text(encoding="utf-8-sig", errors="replace"))


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert math.isfinite(value) and abs(value) < 2**63, value
    elif isinstance(value, str):
        assert len(value) <= 10_000 and "\0" not in value


def _check_lines(errors: ConfigErrors, text: str) -> None:
    """Every line has a place in the file, and what it is about is there, or is missing."""
    file_lines = text.splitlines() or [""]
    assert len(errors.lines) <= 70
    for line in errors.lines:
        if line.strip():
            check_message(line)
    for error in errors.errors:
        assert 1 <= error.line <= len(file_lines) + 1, error
        key = error.path.removesuffix(" (command line)")
        elsewhere = key != error.path or "the default" in error.message
        elsewhere = elsewhere or error.message.startswith(("missing", "names nothing to search"))
        name, line = key.rpartition(".")[2], [*file_lines, ""][error.line - 1]
        if key and not elsewhere and not name.isdigit() and not key.endswith("...") and line.isprintable() and "\\" not in line:
            starts = ("a key", "a list or", "the tag", "the character", "<<")  # of what is wrong with a key inside a section
            inside = error.message.startswith(starts) or "&" in line or "<<" in line  # an anchor has a line of its own
            first = [*name.split(), ""][0]  # a key in quotes may go on in the next line
            assert first in (text if inside else line), f"{error}: the line is {line[:100]!r}"


def _check_validate(path: Path) -> None:
    """`tokensieve validate` has a summary, or lines about errors."""
    checked = config.validate(path)
    assert bool(checked.summary) != bool(checked.errors)
    for line in (*checked.errors, *checked.notes):
        check_message(line)


def _try_text(rng: random.Random, folder: Path) -> None:
    text, path = rng.choice(TEXTS), folder / "file.yaml"
    kind = rng.randrange(5)
    if kind == 0:
        path.write_bytes(mutate_bytes(rng, text.encode()))
    else:
        change = (mutate_text, insert_nonsense, _mutate_lines, _mutate_lines)[kind - 1]
        path.write_bytes(change(rng, text).encode(errors="surrogatepass"))
    _check(path, searching=rng.random() < 0.2)
    if rng.random() < 0.1:
        _check_validate(path)


def _try_tree(rng: random.Random, folder: Path) -> None:
    path = folder / "file.yaml"
    tree = _mutate_tree(rng, yaml.safe_load(rng.choice(TEXTS)))
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=rng.random() < 0.5))
    _check(path, searching=rng.random() < 0.2)
    if rng.random() < 0.1:
        _check_validate(path)


def _try_overrides(rng: random.Random, folder: Path) -> None:
    text, path = rng.choice(TEXTS), folder / "file.yaml"
    path.write_text(text)
    keys = [".".join(map(str, key)) for key in _paths(yaml.safe_load(text))]
    overrides = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(keys)
        if rng.random() < 0.3:
            key = rng.choice((mutate_text(rng, key), insert_nonsense(rng, key), f"{key}.0", ".", "a." * 5000, "x" * 5000))
        value = rng.choice(SNIPPETS)
        overrides[key] = rng.choice((value, value, mutate_text(rng, value[:200]), insert_nonsense(rng, value[:200])))
    _check(path, overrides, searching=rng.random() < 0.2)


ATTACKS = (
    Attack("config_texts", "damaged texts of configuration files", _try_text, short=250, seconds=10),
    Attack("config_values", "configuration files with hostile values and structures", _try_tree, short=150, seconds=10),
    Attack("config_overrides", "hostile values on the command line", _try_overrides, short=200, seconds=10),
)
