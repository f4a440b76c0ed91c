"""A YAML file with the line of every key, and errors that carry those lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokensieve.errors import UserError, one_line

KeyPath = tuple[int | str, ...]


@dataclass(frozen=True, order=True)
class ConfigError:
    """One error in a file."""

    line: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigErrors(UserError):
    """All errors of a file. The message is one line; `lines` has one line for each error.

    block: lines to paste into the file, if a section is missing; they end the message.
    """

    def __init__(self, file: Path, errors: Iterable[ConfigError], block: str = "") -> None:
        self.file, self.errors, self.block = file, sorted(set(errors)), block
        message = f"{file}: " + "; ".join(f"line {error.line}: {error}" for error in self.errors)
        super().__init__(f"{message}\n\n{block}" if block else message)

    @property
    def lines(self) -> list[str]:
        lines = [f"{self.file}:{error.line}: {error}" for error in self.errors]
        return [*lines, "", self.block] if self.block else lines


class Document:
    """A YAML file: its values, and the line of every key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(
                f"no file {str(path)!r}; give the path of a YAML file, such as configs/embedded_clip.yaml"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        loader = yaml.SafeLoader(text)
        try:
            self.node = loader.get_single_node()
            self.duplicates = [] if self.node is None else list(_duplicate_keys(self.node, (), set()))
            data = None if self.node is None else loader.construct_document(self.node)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            reason = one_line(getattr(error, "problem", None) or error)
            problem = ConfigError(1 if mark is None else mark.line + 1, "", f"not valid YAML ({reason})")
            raise ConfigErrors(path, [problem]) from None
        finally:
            loader.dispose()
        if not isinstance(data, dict):
            found = "nothing" if data is None else type(data).__name__
            raise ConfigErrors(path, [ConfigError(1, "", f"expected keys and values, such as 'task: clip', but found {found}")])
        self.data: dict[str, Any] = data
        self.overridden: set[KeyPath] = set()

    def override(self, path: KeyPath, value: Any) -> None:
        """Sets a key to a value of the command line; sections that the file does not have are made."""
        section: Any = self.data
        for step in path[:-1]:
            inner = section.get(step) if isinstance(section, dict) else None
            if inner is None and isinstance(section, dict):
                inner = section[step] = {}
            elif isinstance(section, list) and isinstance(step, int) and step < len(section):
                inner = section[step]
            section = inner
        last: Any = path[-1]
        if not isinstance(section, dict) and not (isinstance(section, list) and last in range(len(section))):
            raise UserError(f"{'.'.join(map(str, path))}: {self.path} has no such key")
        section[last] = value
        self.overridden.add(path)

    def line(self, path: Sequence[int | str]) -> int:
        """The line of a key, or of the nearest one above it that the file has."""
        node, line = self.node, 1
        for step in path:
            if isinstance(node, yaml.MappingNode):
                matches = [(key, value) for key, value in node.value if key.value == str(step)]
                if not matches:
                    break
                key, node = matches[-1]
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
            else:
                break
        return line

    def error(self, path: Sequence[int | str], message: str) -> ConfigError:
        source = " (command line)" if tuple(path) in self.overridden else ""
        return ConfigError(self.line(path), ".".join(map(str, path)) + source, message)


def _duplicate_keys(node: yaml.Node, above: KeyPath, seen: set[int]) -> Iterator[ConfigError]:
    """Errors for keys that a section has twice: YAML silently takes the last one."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicate_keys(item, (*above, index), seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first and key.tag != "tag:yaml.org,2002:merge":
                path = ".".join(map(str, (*above, name)))
                yield ConfigError(line, path, f"given twice, first in line {first[name]}; remove one of them")
            first.setdefault(name, line)
            yield from _duplicate_keys(value, (*above, name), seen)
