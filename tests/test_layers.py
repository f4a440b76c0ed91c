"""Imports point one way, without cycles; files stay small; declarations load no heavy library."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "tokensieve"

# A module may import its own layer and those above it in this list. "=" is the module itself, without what is inside.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "services",
        (
            "errors",
            "files",
            "installation",
            "provenance",
            "terminal",
            "device",
            "distributed",
            "registry",
            "plugins",
            "flags",
            "=embedded",
        ),
    ),
    ("tensors", ("core", "scoring", "rest")),
    ("methods and plans", ("methods", "plan")),
    ("models", ("models",)),
    ("trained parts of methods", ("parts",)),
    ("cutting", ("cutting",)),
    ("data", ("embedded", "data")),
    ("measuring and tasks", ("measuring", "tasks", "testing")),
    ("evaluation and pictures", ("evaluation", "drawing")),
    (
        "configurations, trainings, reports, serving",
        (
            "config",
            "training",
            "search",
            "tuning",
            "report",
            "leaderboard",
            "demo",
            "exporting",
            "harnesses",
            "serving",
            "embedded.recipes",
        ),
    ),
    ("re-identification", ("reid",)),
    ("command line", ("cli", "__main__", "train", "train_net", "=")),
)
EXCEPTIONS = {("cutting.handle", "drawing.sheet")}  # Handle.picture draws with what is above it, when it is called
MAX_FLAT, MAX_LINES, MAX_LONG = 15, 520, 2

# Modules that declare things; they are imported to list, validate and parse, so none of them may load a heavy library.
DECLARATIONS = (
    "tokensieve",
    "tokensieve.cli",
    "tokensieve.data.registry",
    "tokensieve.flags",
    "tokensieve.models.loading.registry",
    "tokensieve.plugins",
    "tokensieve.registry",
    "tokensieve.tasks.registry",
)
HEAVY = ("torch", "transformers", "open_clip", "timm", "clip_benchmark", "matplotlib", "PIL", "optuna", "webdataset", "numpy")


@dataclass(frozen=True)
class Import:
    """One import of a module of this package by another."""

    importer: str
    imported: str
    line: int
    for_types: bool  # under `if TYPE_CHECKING`

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    """The name below the package: "cutting.handle", "cutting" for its __init__, "" for that of the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def find_imports(name: str) -> list[Import]:
    """All imports of a module, also those inside functions."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    uses = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tokensieve"
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names if alias.name.split(".")[0] == "tokensieve"]
            if targets == ["tokensieve"] and uses <= {"__version__"}:
                continue
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".") if package else []
                base = ".".join(["tokensieve", *parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            if base.split(".")[0] == "tokensieve":
                for alias in node.names:
                    if (base, alias.name) == ("tokensieve", "__version__"):
                        continue
                    inner = f"{base}.{alias.name}"
                    targets.append(inner if inner.removeprefix("tokensieve.") in MODULES else base)
        for target in dict.fromkeys(targets):
            imported = target.removeprefix("tokensieve").removeprefix(".")
            if imported in MODULES and imported != name:
                found.append(Import(name, imported, node.lineno, id(node) in for_types))
    return found


IMPORTS = [found for name in MODULES for found in find_imports(name)]


def layer_of(name: str) -> int:
    """The number of a module's layer: that of the longest name that matches."""
    matches = [
        (len(entry) + (entry.startswith("=")), number)
        for number, (_, entries) in enumerate(LAYERS)
        for entry in entries
        if (entry == f"={name}" if entry.startswith("=") else name == entry or name.startswith(f"{entry}."))
    ]
    assert matches, f"{name or 'tokensieve'} is in no layer: add it to LAYERS"
    return max(matches)[1]


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(name) for name in MODULES} == set(range(len(LAYERS)))
    assert LAYERS[layer_of("embedded")][0] == "services" and LAYERS[layer_of("embedded.scenes")][0] == "data"
    assert LAYERS[layer_of("embedded.recipes.clip")][0].startswith("configurations")


def test_imports_point_one_way() -> None:
    upwards = [
        f"{found} ({LAYERS[layer_of(found.importer)][0]} -> {LAYERS[layer_of(found.imported)][0]})"
        for found in IMPORTS
        if found.importer  # the package itself names everything, for type checkers
        and found.imported  # it imports nothing when it is loaded, and holds the version
        and layer_of(found.imported) > layer_of(found.importer)
        and (found.importer, found.imported) not in EXCEPTIONS
    ]
    assert not upwards, "\n".join(["imports of a higher layer:", *upwards])


def find_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                cycles.append(sorted(members))

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return cycles


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count; those for type checkers do not run, so they may go in a circle within a layer."""
    edges: dict[str, set[str]] = {}
    for found in IMPORTS:
        if not found.for_types and (found.importer, found.imported) not in EXCEPTIONS:
            edges.setdefault(found.importer, set()).add(found.imported)
    assert not (cycles := find_cycles(edges)), "\n".join(", ".join(cycle) for cycle in cycles)


def test_the_check_finds_cycles() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert find_cycles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_the_check_sees_imports_inside_functions_and_for_types() -> None:
    inside = [found for found in IMPORTS if (found.importer, found.imported) in EXCEPTIONS]
    assert {found.for_types for found in inside} == {True, False}


def test_few_flat_modules_and_few_long_files() -> None:
    flat = sorted(path.name for path in SOURCE.glob("*.py"))
    assert len(flat) <= MAX_FLAT, flat
    long = {name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > MAX_LINES}
    assert len(long) <= MAX_LONG, long


def test_no_test_imports_a_test() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            modules = [name for name in names if name.startswith(("tests.", "test_"))]
            if any(part.startswith("test_") for module in modules for part in module.split(".")):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


@pytest.mark.parametrize("module", DECLARATIONS)
def test_declarations_load_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"{module} loads {done.stdout}"


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys, tokensieve.cli\n"
        "try:\n    tokensieve.cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
