"""Plug-ins: modules that add methods, tasks, data sets and more by declaring them when they are imported.

    a package of tokensieve    BUILT_IN, imported first
    an installed package       its entry points in the group tokensieve.plugins, each the name of a module
    a user's own file          load_plugin("my_methods.py"), or --plugin my_methods.py on the command line

The source of a user's plug-in is part of a result's key: `plugin_hashes`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tokensieve.errors import UserError, describe_value, one_line

GROUP = "tokensieve.plugins"
BUILT_IN = (
    "tokensieve.embedded.declarations",
    "tokensieve.embedded.recipes",
    "tokensieve.data.clip_benchmark",
    "tokensieve.data.vqa",
    "tokensieve.training",
    "tokensieve.reid",
)

_lock = threading.RLock()
_loaded: dict[str, ModuleType] = {}  # by the name of a built-in module or an entry point, or by the path of a file
_hashes: dict[str, str] = {}  # of the plug-ins that are not part of tokensieve
_on_failure: list[Callable[[str], None]] = []
_is_started = _is_done = False


def load_plugins() -> None:
    """Imports the built-in plug-ins and those of installed packages, once.

    A plug-in of an installed package that cannot be imported is left out with a warning of one line.
    """
    global _is_started, _is_done
    if _is_done:
        return
    with _lock:  # another thread waits here until all are loaded
        if _is_started:
            return
        _is_started = True  # before the imports: they add to registries, and reading one must not start over
        try:
            for name in BUILT_IN:
                _loaded[name] = importlib.import_module(name)
            for entry in entry_points(group=GROUP):
                _load_entry_point(entry)
            _is_done = True
        finally:
            _is_started = _is_done  # interrupted: the next call starts over


def _load_entry_point(entry: EntryPoint) -> None:
    module_name = entry.value.partition(":")[0].strip()
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _forget(module_name)
        warnings.warn(f"the plug-in {entry.name} ({entry.value}) cannot be loaded: {_problem(error)}", stacklevel=4)
        return
    _loaded[entry.name] = module
    _hashes[entry.name] = _source_hash(module)


def load_plugin(file: str | Path) -> ModuleType:
    """Imports a Python file that declares methods, tasks or data sets, so that plans and commands can name them.

    Args:
        file: the path of the file. Loading the same file again returns the module that was imported before.

    Returns:
        The imported module.

    Raises:
        UserError: the file does not exist, cannot be imported, or declares a name that is taken. The message has one line.

    Example:
        >>> tokensieve.load_plugin("my_methods.py")
        >>> handle = tokensieve.apply(model, "my_method@6:50%")
    """
    if not isinstance(file, (str, os.PathLike)) or not str(file):
        raise UserError(f"a plug-in is the path of a Python file, such as my_methods.py, not {describe_value(file)}")
    with _lock:
        load_plugins()
        try:
            path = Path(file).resolve()
            if str(path) in _loaded:
                return _loaded[str(path)]
            source = path.read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error, 200)
            raise UserError(f"the plug-in {str(file)!r} cannot be read: {reason}; give the path of a Python file") from error
        name = f"tokensieve_plugin_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
        if name in sys.modules:
            raise UserError(f"a plug-in with the name of {file} is loaded already; rename one of the two files")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UserError(f"the plug-in {file} is not a Python file; its name must end with .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that dataclasses and pickled classes of the file find their module
        try:
            code = compile(source, str(path), "exec", dont_inherit=True)  # the very source that is hashed, not a cached one
            exec(code, vars(module))
        except BaseException as error:
            _forget(name)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise UserError(f"the plug-in {file} cannot be loaded: {_problem(error, path)}") from error
        _loaded[str(path)] = module
        _hashes[path.name] = hashlib.sha256(source).hexdigest()[:16]
        return module


def plugin_files() -> list[str]:
    """The paths of the users' files that were loaded, for processes that have to load them too."""
    return [path for path in _loaded if path.endswith(".py")]


class WithPlugins:
    """A base of what goes to another process: there, the users' files are loaded before its attributes are unpickled.

    A process that is spawned starts without them, so it could not find the classes and functions that they define.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_with_plugins, (type(self), plugin_files()), vars(self)  # the attributes come after the call


def _new_with_plugins(kind: type[WithPlugins], files: Sequence[str]) -> WithPlugins:
    for file in files:
        load_plugin(file)
    return kind.__new__(kind)


def plugin_hashes() -> dict[str, str]:
    """A hash of the source of every loaded plug-in that is not part of tokensieve, by its name."""
    load_plugins()
    return dict(sorted(_hashes.items()))


def on_failure(remove: Callable[[str], None]) -> None:
    """Has `remove` called with the name of a module whose import failed, to remove what it had declared by then."""
    _on_failure.append(remove)


def _forget(module_name: str) -> None:
    sys.modules.pop(module_name, None)
    for remove in _on_failure:
        remove(module_name)


def _problem(error: BaseException, path: Path | None = None) -> str:
    """An error of a plug-in in one line, with the line of its file where it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if path and frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    if isinstance(error, UserError):
        return where + one_line(error, 300)
    return f"{where}{type(error).__name__}: {one_line(error, 200)}".rstrip(": ")


def _source_hash(module: ModuleType) -> str:
    """A hash over the Python files of a module or package."""
    digest = hashlib.sha256()
    file = Path(module.__file__ or "")
    for path in sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
