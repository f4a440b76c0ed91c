"""Plug-ins: modules that add methods, tasks, data sets and more by declaring them when they are imported.

    a package of ours          BUILT_IN, imported first
    an installed package       its entry points in the group tokensieve.plugins, each the name of a module
    a user's own file          load_plugin("my_methods.py"), or --plugin my_methods.py on the command line

The source of a user's plug-in is part of a result's key: `plugin_hashes`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from tokensieve.errors import UserError, one_line

GROUP = "tokensieve.plugins"
BUILT_IN = ("tokensieve.embedded.recipes", "tokensieve.training", "tokensieve.reid")

_lock = threading.RLock()
_loaded: dict[str, ModuleType] = {}  # by the name of a built-in module or an entry point, or by the path of a file
_hashes: dict[str, str] = {}  # of the plug-ins that are not ours
_started = False


def load_plugins() -> None:
    """Import the built-in plug-ins and those of installed packages, once.

    A plug-in of an installed package that cannot be imported is left out with a warning of one line.
    """
    global _started
    if _started:
        return
    with _lock:
        if _started:
            return
        _started = True  # before the imports: they add to registries, and reading one must not start over
        for name in BUILT_IN:
            _loaded[name] = importlib.import_module(name)
        for entry in entry_points(group=GROUP):
            try:
                module = importlib.import_module(entry.value.partition(":")[0])
            except Exception as error:
                problem = f"{type(error).__name__}: {one_line(error, 200)}"
                warnings.warn(f"the plug-in {entry.name} ({entry.value}) cannot be loaded: {problem}", stacklevel=3)
                continue
            _loaded[entry.name] = module
            _hashes[entry.name] = _source_hash(module)


def load_plugin(file: str | Path) -> ModuleType:
    """Import a Python file that declares methods, tasks or data sets; a UserError of one line if it cannot be imported.

    The same file again is the module that was imported before.
    """
    path = Path(file).resolve()
    with _lock:
        if str(path) in _loaded:
            return _loaded[str(path)]
        load_plugins()
        if not path.is_file():
            raise UserError(f"no plug-in {str(file)!r}: give the path of a Python file, such as my_methods.py")
        name = f"tokensieve_plugin_{path.stem}"
        if name in sys.modules:
            raise UserError(f"{file}: another plug-in is called {path.name} too; rename one of the two files")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UserError(f"{file} is not a Python file, so it cannot be a plug-in")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that dataclasses and pickled classes of the file find their module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise UserError(f"the plug-in {file} cannot be loaded: {type(error).__name__}: {one_line(error, 200)}") from error
        _loaded[str(path)] = module
        _hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return module


def plugin_files() -> list[str]:
    """The paths of the users' files that were loaded, for processes that have to load them too."""
    return [path for path in _loaded if path.endswith(".py")]


def plugin_hashes() -> dict[str, str]:
    """A hash of the source of every loaded plug-in that is not part of tokensieve, by its name."""
    load_plugins()
    return dict(sorted(_hashes.items()))


def _source_hash(module: ModuleType) -> str:
    """A hash over the Python files of a module or package."""
    digest = hashlib.sha256()
    file = Path(module.__file__ or "")
    for path in sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
