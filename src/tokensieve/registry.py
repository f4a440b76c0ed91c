"""A table of declarations: what a package, a plug-in or a user's file adds, found by name.

Declarations are small values without tensors. What they need to run is named as "module:attribute" and imported when it is
used, so that listing names, parsing flags and printing help never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeVar

from tokensieve import plugins
from tokensieve.errors import UserError, did_you_mean


class Declaration(Protocol):
    """What a registry holds: a value with a name."""

    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=Declaration)


class Registry(Mapping[str, D]):
    """Declarations of one kind, by name, in the order in which they were added. Reading it loads the plug-ins first.

    Args:
        kind: what one of them is called in messages, such as "method" or "data set".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._declared: dict[str, D] = {}
        self._origins: dict[str, str] = {}
        plugins.on_failure(self._remove_origin)

    def add(self, declaration: D, origin: str | None = None) -> D:
        """Adds a declaration.

        Args:
            origin: the module that declares it; by default the one that calls. The same module may declare a name again (a
                reloaded module, a notebook cell). For another module the name is taken.
        """
        name = declaration.name
        origin = sys._getframe(1).f_globals.get("__name__", "") if origin is None else origin
        if name in self._declared and self._origins[name] != origin:
            raise UserError(f"a {self.kind} named {name!r} is registered already; choose another name")
        self._declared[name], self._origins[name] = declaration, origin
        return declaration

    def remove(self, name: str) -> None:
        """Removes a declaration, if it is there."""
        self._declared.pop(name, None)
        self._origins.pop(name, None)

    def get_or_fail(self, name: str) -> D:
        """The declaration of that name, or a UserError that lists the names and the nearest one."""
        if name in self:
            return self[name]
        known = ", ".join(sorted(self))
        raise UserError(f"no {self.kind} named {name!r}.{did_you_mean(name, self)} Known: {known}")

    def _remove_origin(self, origin: str) -> None:
        for name in [name for name, declared_by in self._origins.items() if declared_by == origin]:
            self.remove(name)

    def __getitem__(self, name: str) -> D:
        plugins.load_plugins()
        return self._declared[name]

    def __iter__(self) -> Iterator[str]:
        plugins.load_plugins()
        return iter(list(self._declared))

    def __len__(self) -> int:
        plugins.load_plugins()
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        plugins.load_plugins()
        return name in self._declared


_imported: dict[str, ModuleType] = {}  # by name; torch.compile cannot trace an import, so that one is done only once


def resolve(name: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    imported = _imported.get(module)
    if imported is None or imported is not sys.modules.get(module):
        imported = _imported[module] = import_module(module)
    return getattr(imported, attribute)
