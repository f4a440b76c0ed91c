"""YAML as files and the command line give it: values with the line of every key, read within limits.

A reader of its own instead of yaml.safe_load. Limits hold before anything is built, so a small file cannot take minutes or all
memory. Keys are texts, as they are written. Values are null, booleans (also yes, no, on, off), finite numbers (also 1e-3),
texts, lists and sections. Dates and times such as 1:30 are texts. Tags that make other objects are errors.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import yaml

from tokensieve.errors import UserError, short

KeyPath = tuple[int | str, ...]

MAX_BYTES = 1 << 20  # of a file
MAX_DEPTH = 20  # sections and lists inside each other
MAX_NODES = 10_000  # keys and values, each alias counted as often as it is used
MAX_KEYS = 1000  # of a section
MAX_KEY = 200  # letters of a key
MAX_TEXT = 10_000  # letters of a value
MAX_NUMBER = 100  # letters of a number

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_SCALARS = ("str", "null", "bool", "int", "float")
_TRUE, _FALSE = ("yes", "true", "on"), ("no", "false", "off")
_NUMBER_START = list("-+.0123456789")
_BOOL = re.compile("|".join(f"{word}|{word.title()}|{word.upper()}" for word in (*_TRUE, *_FALSE)))
_NULL = re.compile(r"~|null|Null|NULL|")
_INT = re.compile(r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class TextError(UserError):
    """A text that cannot be read. is_syntax: it is not YAML at all; otherwise it exceeds a limit."""

    def __init__(self, line: int, reason: str, is_syntax: bool = False) -> None:
        super().__init__(f"not valid YAML ({reason})" if is_syntax else reason)
        self.line, self.is_syntax = line, is_syntax


@dataclass
class Tree:
    """What a text says. Where it is wrong, there is a problem: a path, a line and a message."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[KeyPath, int, str]] = field(default_factory=list)
    unread: set[KeyPath] = field(default_factory=set)
    """Values that could not be read; something else stands in their places."""


def read(text: str) -> Tree:
    """The values of a text, with the line of every key. Raises TextError if there is no way to read it."""
    node = _compose(text)
    return Tree() if node is None else _Builder().build(node)


def read_value(text: str) -> Tree:
    """A value of the command line: as in a file, or the text itself where it is not YAML (such as a plan with @*)."""
    if len(text) > MAX_TEXT:
        raise TextError(1, f"has {len(text):,} letters, more than {MAX_TEXT:,}")
    try:
        node = _compose(text)
    except TextError as error:
        if not error.is_syntax:
            raise
        node = None
    if node is not None:
        return _Builder().build(node)
    if problem := _text_problem(text):
        return Tree(short(text), problems=[((), 1, problem)], unread={()})
    return Tree(text)


def write(value: Any) -> str:
    """The text of a value; `read` makes the value of it again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _compose(text: str) -> yaml.Node | None:
    """The nodes of a text, within the limits."""
    composer = None
    try:
        composer = _Composer(text)
        node: yaml.Node | None = composer.get_single_node()
        return node
    except TextError:
        raise
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise TextError(line, f"the character U+{int(error.character):04X} is not allowed", is_syntax=True) from None
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise TextError(line, short(error.problem, 200), is_syntax=True) from None
    except (ValueError, OverflowError):  # yaml does not check the numbers in \UFFFFFFFF and %YAML 99...
        line = 1 if composer is None else composer.line + 1
        raise TextError(line, "an escape or a version is out of range", is_syntax=True) from None


class _Composer(yaml.SafeLoader):
    """Makes nodes of a text and counts them. An alias counts as all that it stands for."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.deepest = self.count = 0
        self.extents: dict[int, tuple[int, int]] = {}  # of finished nodes, by id: how many nodes, how deep

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        before, outer = self.count, self.deepest
        self.depth += 1
        self.count += 1
        self.deepest = self.depth
        self._check(line)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self.extents:
                raise TextError(line, f"*{short(event.anchor)} stands inside of what it names")
            nodes, depth = self.extents[id(node)]
            self.count += nodes - 1
            self.deepest += depth - 1
            self._check(line)
        else:
            self.extents[id(node)] = self.count - before, self.deepest - self.depth + 1
        self.deepest = max(self.deepest, outer)
        self.depth -= 1
        return node

    def _check(self, line: int) -> None:
        if self.deepest > MAX_DEPTH:
            raise TextError(line, f"more than {MAX_DEPTH} sections and lists are nested here")
        if self.count > MAX_NODES:
            raise TextError(line, f"more than {MAX_NODES:,} keys and values, with all aliases written out")


for _name, _pattern, _first in (
    ("bool", _BOOL, list("yYnNtTfFoO")),
    ("int", _INT, _NUMBER_START),
    ("float", _FLOAT, _NUMBER_START),
    ("merge", re.compile("<<"), ["<"]),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    _Composer.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern.pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    """Puts those texts in quotes that the reader would take for something else."""

    yaml_implicit_resolvers = _Composer.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Builder:
    """Makes values of nodes. Everything that is wrong is noted, and the rest is read."""

    def __init__(self) -> None:
        self.tree = Tree()

    def build(self, node: yaml.Node) -> Tree:
        self.tree.value = self._value(node, ())
        return self.tree

    def _problem(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        self.tree.problems.append((path, node.start_mark.line + 1, message))

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            if isinstance(node, yaml.ScalarNode):
                return _scalar(node)
            if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
                raise ValueError(_tag_problem(node.tag))
        except ValueError as error:
            self._problem(path, node, str(error))
            self.tree.unread.add(path)
            return short(node.value) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(node, yaml.SequenceNode):
            self.tree.lines |= {(*path, index): item.start_mark.line + 1 for index, item in enumerate(node.value)}
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        pairs = self._pairs(node, path)
        self.tree.lines |= {(*path, name): key.start_mark.line + 1 for name, (key, _) in pairs.items()}
        return {name: self._value(value, (*path, name)) for name, (_, value) in pairs.items()}

    def _pairs(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The keys of a section and their values, those of merged sections (<<) included."""
        if len(node.value) > MAX_KEYS:
            raise TextError(node.start_mark.line + 1, f"{len(node.value):,} keys in one section, more than {MAX_KEYS:,}")
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                parts: list[yaml.Node] = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for part in parts:
                    if isinstance(part, yaml.MappingNode):
                        merged = self._pairs(part, path) | merged
                    else:
                        self._problem(path, key, "<< takes the anchor of a section, such as <<: *base")
            elif (problem := _key_problem(key)) is not None:
                self._problem(path, key, problem)
            else:
                if key.value in own:
                    first = own[key.value][0].start_mark.line + 1
                    self._problem((*path, key.value), key, f"given twice, first in line {first}; remove one of them")
                own[key.value] = key, value
        return merged | own


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a node. Raises ValueError with a message for users."""
    kind, text = node.tag.removeprefix(_TAG), node.value
    shown = repr(short(text))
    if kind in ("str", "merge"):
        if problem := _text_problem(text):
            raise ValueError(problem)
        return text
    if kind == "null" and _NULL.fullmatch(text):
        return None
    if kind == "bool" and _BOOL.fullmatch(text):
        return text.lower() in _TRUE
    if kind in ("int", "float"):
        if len(text) > MAX_NUMBER:
            raise ValueError(f"a number of {len(text):,} letters; at most {MAX_NUMBER} are allowed")
        if kind == "int" and _INT.fullmatch(text):
            return _whole_number(text)
        if kind == "float" and _FLOAT.fullmatch(text):
            number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            if not math.isfinite(number):
                raise ValueError(f"{short(text)} is not a finite number")
            return number
    if kind in _SCALARS:
        raise ValueError(f"{shown} is no value of the tag !!{kind}; remove the tag")
    raise ValueError(_tag_problem(node.tag))


def _whole_number(text: str) -> int:
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        raise ValueError(f"{short(text)} begins with 0, which some read as octal; write it without, or in quotes as a text")
    return int(text.replace("_", ""), 0)


def _tag_problem(tag: str) -> str:
    return f"the tag {short(tag.replace(_TAG, '!!'))} is not allowed; remove it"


def _key_problem(key: yaml.Node) -> str | None:
    """Why a node cannot be a key; None if it can."""
    if not isinstance(key, yaml.ScalarNode):
        return "a list or a section cannot be a key"
    if key.tag.removeprefix(_TAG) not in _SCALARS:
        return _tag_problem(key.tag)
    if not key.value:
        return "a key is empty"
    if len(key.value) > MAX_KEY:
        return f"a key of {len(key.value):,} letters; at most {MAX_KEY} are allowed"
    return _text_problem(key.value, allowed="")


def _text_problem(text: str, allowed: str = "\t\n\r") -> str | None:
    """Why a text cannot be a value; None if it can. allowed: control characters that it may have."""
    if len(text) > MAX_TEXT:
        return f"a text of {len(text):,} letters; at most {MAX_TEXT:,} are allowed"
    for letter in text:
        if letter not in allowed and unicodedata.category(letter) in ("Cc", "Cs"):
            return f"the character U+{ord(letter):04X} is not allowed"
    return None
