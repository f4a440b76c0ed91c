"""A table of declarations: what a package, a plug-in or a user's file adds, found by name.

Declarations are small values without tensors. What they need to run is named as "module:attribute" and imported when it is
used, so that listing names, parsing flags and printing help never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeVar

from tokensieve import plugins
from tokensieve.errors import UserError, did_you_mean, one_line


class Declaration(Protocol):
    """What a registry holds: a value with a name."""

    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=Declaration)
_registries: list[Registry[Any]] = []


class Registry(Mapping[str, D]):
    """Declarations of one kind, by name, in the order in which they were added. Reading it loads the plug-ins first.

    Args:
        kind: what one of them is called in messages, such as "method" or "data set".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._declared: dict[str, D] = {}
        self._origins: dict[str, str] = {}
        plugins.on_failure(self._remove_origins)
        _registries.append(self)

    def add(self, declaration: D, origin: str | None = None) -> D:
        """Adds a declaration. One that is not of tokensieve itself is added after the built-in ones.

        Args:
            origin: the module that declares it; by default the one that calls. The same module may declare a name again (a
                reloaded module, a notebook cell). For another module the name is taken.
        """
        name = declaration.name
        origin = sys._getframe(1).f_globals.get("__name__", "") if origin is None else origin
        if not plugins.is_built_in(origin):
            plugins.load_built_in()
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

    def origin(self, name: str) -> str:
        """The module that declared that name."""
        plugins.load_plugins()
        return self._origins[name]

    def _remove_origins(self, is_removed: Callable[[str], bool]) -> None:
        for name in [name for name, origin in self._origins.items() if is_removed(origin)]:
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


def resolve(text: str) -> Any:
    """The object that "module:attribute" names.

    A UserError names the declaration if there is no such module or attribute. An ImportError of a library that the module
    needs is left as it is.
    """
    module_name, _, attribute = text.partition(":")
    module = _imported.get(module_name)
    if module is None or module is not sys.modules.get(module_name) or not hasattr(module, attribute):
        module = _imported[module_name] = _import(text, module_name, attribute)
    return getattr(module, attribute)


def _import(text: str, module_name: str, attribute: str) -> ModuleType:
    """The module of a text "module:attribute", which has that attribute."""
    if not attribute or not module_name or module_name.startswith("."):
        raise UserError(f'{_describe(text)} is not of the form "module:attribute"')
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"{_describe(text)} cannot be imported: {one_line(error)}") from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module))
        raise UserError(f"{_describe(text)} cannot be found: {module_name} has no {attribute!r}.{hint}")
    return module


def _describe(text: str) -> str:
    """The text of a declaration, with the declaration and its origin where they are known."""
    for registry in _registries:
        name = next((name for name, declared in registry._declared.items() if _has_value(declared, text)), None)
        if name is not None:
            return f"{text!r} of the {registry.kind} {name!r} ({plugins.describe_origin(registry.origin(name))})"
    return repr(text)


def _has_value(declaration: object, text: str) -> bool:
    return any(isinstance(value, str) and value == text for value in getattr(declaration, "__dict__", {}).values())
