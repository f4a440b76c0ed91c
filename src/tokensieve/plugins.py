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
    "tokensieve.data.own",
    "tokensieve.data.clip_benchmark",
    "tokensieve.data.vqa",
    "tokensieve.training",
    "tokensieve.reid",
)

_lock = threading.RLock()
_built_in_lock = threading.RLock()  # of its own: a thread that imports a plug-in must not wait for one that loads all of them
_loaded: dict[str, ModuleType] = {}  # by the name of a built-in module or an entry point, or by the path of a file
_hashes: dict[str, str] = {}  # of the plug-ins that are not part of tokensieve
_on_failure: list[Callable[[Callable[[str], bool]], None]] = []
_is_started = _is_done = False
_is_built_in_started = _is_built_in_done = False


def load_plugins() -> None:
    """Imports the built-in plug-ins and those of installed packages, once.

    A plug-in of an installed package that cannot be imported is left out with a warning of one line.
    """
    global _is_started, _is_done
    if _is_done:
        return
    load_built_in()
    if not _is_built_in_done:  # one of them reads a registry while it is imported
        return
    with _lock:  # another thread waits here until all are loaded
        if _is_started:
            return
        _is_started = True  # before the imports: they add to registries, and reading one must not start over
        try:
            for entry in entry_points(group=GROUP):
                _load_entry_point(entry)
            _is_done = True
        finally:
            _is_started = _is_done  # interrupted: the next call starts over


def load_built_in() -> None:
    """Imports the built-in plug-ins, once. Registries call it before they take another declaration, so that no name of a
    built-in one can be taken before."""
    global _is_built_in_started, _is_built_in_done
    if _is_built_in_done:
        return
    with _built_in_lock:
        if _is_built_in_started:
            return
        _is_built_in_started = True
        try:
            for name in BUILT_IN:
                _loaded[name] = importlib.import_module(name)
            _is_built_in_done = True
        finally:
            _is_built_in_started = _is_built_in_done


def _load_entry_point(entry: EntryPoint) -> None:
    module_name = entry.value.partition(":")[0].strip()
    imported_before = set(sys.modules)
    try:
        module = importlib.import_module(module_name)
        source_hash = _source_hash(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _forget(module_name, imported_before)
        warnings.warn(f"the plug-in {entry.name} ({entry.value}) cannot be loaded: {_problem(error)}", stacklevel=4)
        return
    _loaded[entry.name] = module
    _hashes[entry.name] = source_hash


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
    load_plugins()
    with _lock:
        try:
            path = Path(os.path.realpath(file))
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
        imported_before = set(sys.modules)
        sys.modules[name] = module  # so that dataclasses and pickled classes of the file find their module
        try:
            code = compile(source, str(path), "exec", dont_inherit=True)  # the very source that is hashed, not a cached one
            exec(code, vars(module))
        except BaseException as error:
            _forget(name, imported_before)
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


def describe_origin(origin: str) -> str:
    """The plug-in that a module belongs to, for messages; the module itself if it is of no plug-in."""
    name = _plugin_of(origin)
    if name is None:
        return f"the module {origin}"
    return f"the plug-in {name} ({_loaded[name].__name__})" if is_installed(origin) else f"the plug-in {name}"


def is_built_in(origin: str) -> bool:
    """Whether a module is part of tokensieve."""
    return origin.partition(".")[0] == "tokensieve"


def is_installed(origin: str) -> bool:
    """Whether a module belongs to a plug-in of an installed package."""
    name = _plugin_of(origin)
    return name is not None and name not in plugin_files()


def _plugin_of(origin: str) -> str | None:
    package = origin.partition(".")[0]
    others = (name for name in _loaded if name not in BUILT_IN)
    return next((name for name in others if _loaded[name].__name__.partition(".")[0] == package), None)


def on_failure(remove: Callable[[Callable[[str], bool]], None]) -> None:
    """Has `remove` called after a failed import, to remove the declarations of the modules for which its argument is true."""
    _on_failure.append(remove)


def _forget(module_name: str, imported_before: set[str]) -> None:
    """Undo a failed import: the module, and what it imported of its own package, with their declarations."""
    package = module_name.partition(".")[0]

    def is_undone(name: str) -> bool:
        return name.partition(".")[0] == package and name not in imported_before

    for name in filter(is_undone, list(sys.modules)):
        del sys.modules[name]
    for remove in _on_failure:
        remove(is_undone)


def _problem(error: BaseException, path: Path | None = None) -> str:
    """An error of a plug-in in one line, with the line of its file where it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if path and frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    if isinstance(error, UserError):
        return where + one_line(error, 300)
    return f"{where}{type(error).__name__}: {one_line(error, 200)}".rstrip(": ")


def _source_hash(module: ModuleType) -> str:
    """A hash over all Python files of the top-level package that a module belongs to, or over its file if it has no package."""
    parents = module.__name__.split(".")
    names = [".".join(parents[:count]) for count in range(1, len(parents) + 1)]
    top = next(
        (sys.modules[name] for name in names if getattr(sys.modules.get(name), "__file__", None)), module
    )  # no namespace
    files: dict[str, Path] = {}
    for folder in map(Path, getattr(top, "__path__", ())):
        files |= {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
    if not hasattr(top, "__path__") and top.__file__:
        files = {"": Path(top.__file__)}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
