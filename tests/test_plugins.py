"""Plug-ins: a user's file adds a method that works like the included ones; a broken one is named in one line."""

import hashlib
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

import tokensieve
from tokensieve import UserError, plugins
from tokensieve.methods.registry import REGISTRY
from tokensieve.testing import check_method

METHOD = '''
"""A toy method."""
from tokensieve import Reduction, View, method
from tokensieve.scoring import top

@method(summary="the tokens with the largest norm", paper="Nobody, 2026")
def toy_norm(view: View, keep: int, *, power: float = 1.0) -> Reduction:
    scores = view.tokens.float().norm(dim=-1) ** power
    return Reduction.keep(top(scores, keep), view.n, scores=scores)
'''

DATASET = """
from tokensieve.data.registry import DATASETS, DatasetSpec

DATASETS.add(DatasetSpec("toy", "a toy data set", f"{__name__}:build", "labels", None))
"""


@pytest.fixture
def write(tmp_path):
    """Writes a plug-in; afterwards everything is as if no plug-in had been loaded."""
    plugins.load_plugins()
    loaded, hashes, modules, methods = dict(plugins._loaded), dict(plugins._hashes), set(sys.modules), set(REGISTRY)

    def write(text, name="my_methods.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield write
    for name in set(REGISTRY) - methods:
        REGISTRY.remove(name)
    for name in [name for name in set(sys.modules) - modules if name.startswith("tokensieve_plugin")]:
        del sys.modules[name]
    for table, before in ((plugins._loaded, loaded), (plugins._hashes, hashes)):
        table.clear()
        table.update(before)


def test_a_method_of_a_file_works_like_any_other(write, tiny_clip):
    path = write(METHOD)
    module = tokensieve.load_plugin(path)
    assert tokensieve.load_plugin(str(path)) is module
    assert "toy_norm" in [m.name for m in tokensieve.list_methods()]
    check_method("toy_norm")
    assert plugins.plugin_hashes()["my_methods.py"] == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    model, _, _ = tiny_clip.make()
    with tokensieve.apply(model, "toy_norm@2:6(power=2.0,rest=merge)") as handle, torch.no_grad():
        features = model.encode_image(torch.randn(2, 3, 48, 32))
    assert features.shape == (2, 16)
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("2", 24, 6)]
    with pytest.raises(UserError, match="Did you mean 'toy_norm@2:6'"):
        tokensieve.apply(model, "toy_nrm@2:6")
    with pytest.raises(UserError, match="power=x is not a number"):
        tokensieve.apply(model, "toy_norm@2:6(power=x)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "SyntaxError: invalid syntax (my_methods.py, line 1)"),
        ("\nimport no_such_library\n", "line 2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('first\\nsecond')", "line 1: RuntimeError: first second"),
        ("raise RuntimeError", "line 1: RuntimeError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        (METHOD.replace("toy_norm", "anchor"), "a method named 'anchor' is registered already; choose another name"),
        (METHOD.replace("power: float = 1.0", "power: list = []"), "the option 'power' has the type"),
        (METHOD.replace("power: float = 1.0", "power: float"), "the option 'power' needs a default"),
        (METHOD.replace("power: float", "rest: float"), "the option 'rest' is added to methods by the engine"),
        (
            "from __future__ import annotations" + METHOD.replace("view: View", "view: Wiew"),
            "its type hints cannot be read: name 'Wiew' is not defined",
        ),
        (METHOD.replace("summary=", "needs=('cls',), summary="), "needs=['cls'] is not known"),
        (METHOD + "1 / 0\n", "ZeroDivisionError: division by zero"),
        ("\0", "null bytes"),
    ],
)
def test_a_broken_file_is_named_with_its_error_in_one_line(write, text, message):
    before = set(REGISTRY)
    path = write(text)
    for _ in range(2):  # and again: nothing of it is left
        with pytest.raises(UserError) as caught:
            tokensieve.load_plugin(path)
        assert str(caught.value).startswith(f"the plug-in {path} cannot be loaded: ") and message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert set(REGISTRY) == before and "my_methods.py" not in plugins.plugin_hashes()
    path.write_text(METHOD)  # repaired
    tokensieve.load_plugin(path)
    assert set(REGISTRY) == before | {"toy_norm"}


def test_what_is_not_a_file(write, tmp_path):
    for bad, message in ((tmp_path / "no.py", "No such file"), (tmp_path, "directory"), ("a\0b.py", "null")):
        with pytest.raises(UserError, match=message):
            tokensieve.load_plugin(bad)
    for bad in (None, 3, ""):
        with pytest.raises(UserError, match="the path of a Python file"):
            tokensieve.load_plugin(bad)
    with pytest.raises(UserError, match=r"must end with \.py"):
        tokensieve.load_plugin(write(METHOD, "methods.txt"))


def test_two_files_of_one_name_are_refused(write):
    tokensieve.load_plugin(write(METHOD))
    with pytest.raises(UserError, match="rename one of the two files"):
        tokensieve.load_plugin(write(METHOD.replace("toy_norm", "other"), "folder/my_methods.py"))
    with pytest.raises(UserError, match="'toy_norm' is registered already"):
        tokensieve.load_plugin(write(METHOD, "others.py"))


def test_ctrl_c_is_not_an_error_of_the_file(write):
    with pytest.raises(KeyboardInterrupt):
        tokensieve.load_plugin(write("raise KeyboardInterrupt"))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name=module, ...): entry points of installed packages, whose modules are files under tmp_path."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def install(**entries):
        listed = [EntryPoint(name, module, plugins.GROUP) for name, module in entries.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: listed)
        monkeypatch.setattr(plugins, "_is_started", False)
        monkeypatch.setattr(plugins, "_is_done", False)

    yield install
    for name in [name for name in set(sys.modules) - modules if name.partition(".")[0].endswith("_package")]:
        del sys.modules[name]


def test_packages_add_plug_ins_by_entry_points(write, install):
    write(METHOD, "toy_package.py")
    write("import no_such_library", "broken_package.py")
    install(toy="toy_package", broken="broken_package", missing="missing_package")
    with pytest.warns(UserWarning, match="cannot be loaded") as caught:
        assert "toy_norm" in REGISTRY
    assert [str(warning.message) for warning in caught] == [
        "the plug-in broken (broken_package) cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'",
        "the plug-in missing (missing_package) cannot be loaded: ModuleNotFoundError: No module named 'missing_package'",
    ]
    assert set(plugins.plugin_hashes()) == {"toy"} and isinstance(plugins._loaded["toy"], types.ModuleType)


@pytest.mark.parametrize("entry", ["toy_package", "toy_package.plugin", "toy_package.plugin.main"])
def test_a_package_that_fails_leaves_nothing(write, install, entry):
    """Its modules declare something before another one fails: below the entry point, next to it, and in the one that fails."""
    write(METHOD.replace("toy_norm", "toy_first"), "toy_package/methods.py")
    write(METHOD.replace("toy_norm", "toy_second"), "toy_package/plugin/methods.py")
    write(METHOD.replace("toy_norm", "toy_last") + "import no_such_library\n", "toy_package/plugin/main.py")
    for file in ("toy_package/__init__.py", "toy_package/plugin/__init__.py"):
        write("import toy_package.methods, toy_package.plugin.methods, toy_package.plugin.main\n", file)
    write(METHOD, "good_package/methods.py")
    before = set(REGISTRY)
    install(good="good_package.methods", toy=entry, worse="good_package.missing")
    with pytest.warns(UserWarning, match="cannot be loaded") as caught:
        assert set(REGISTRY) == before | {"toy_norm"}
    assert len(caught) == 2
    assert not [name for name in sys.modules if name.partition(".")[0] == "toy_package"]
    assert "good_package.methods" in sys.modules  # another entry point of the same package failed


@pytest.mark.parametrize("entry", ["toy_package", "toy_package.declared", "toy_package.deep.declared"])
def test_the_hash_of_an_entry_point_covers_its_whole_package(write, install, entry):
    for file in ("__init__.py", "declared.py", "implementation.py"):
        write("x = 1", f"toy_package/{file}")
    for file in ("__init__.py", "declared.py"):
        write("x = 1", f"toy_package/deep/{file}")
    write("x = 1", "other_package.py")

    def hashed():
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy_package"]:
            del sys.modules[name]
        install(toy=entry)
        return plugins.plugin_hashes()["toy"]

    found = [hashed(), hashed()]
    for file in ("toy_package/implementation.py", "toy_package/deep/__init__.py", "other_package.py"):
        write("x = 12", file)
        found.append(hashed())
    assert found[0] == found[1] and found[3] == found[4] and len(set(found)) == 3


def test_a_namespace_is_not_part_of_the_hash(write, install):
    write("x = 1", "space_package/mine/__init__.py")
    install(toy="space_package.mine")
    before = plugins.plugin_hashes()["toy"]
    write("x = 1", "space_package/another.py")
    install(toy="space_package.mine")
    assert plugins.plugin_hashes()["toy"] == before
    write("x = 2", "space_package/mine/more.py")
    install(toy="space_package.mine")
    assert plugins.plugin_hashes()["toy"] != before


def test_loading_needs_no_torch(tmp_path):
    (tmp_path / "nothing.py").write_text("x = 1\n")
    code = "import sys, tokensieve; m = tokensieve.load_plugin(sys.argv[1]); print(m.x, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "nothing.py")], capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr


def test_two_threads_may_import_and_load_the_same_plug_in(tmp_path):
    """One imports the module of an entry point by itself while the other loads all plug-ins: neither waits for the other."""
    (tmp_path / "toy_package.py").write_text("import time\ntime.sleep(0.3)\n" + DATASET)
    code = """
import importlib, sys, threading, time
from importlib.metadata import EntryPoint
from tokensieve import plugins
from tokensieve.data.registry import DATASETS

plugins.entry_points = lambda group: [EntryPoint("toy", "toy_package", group)]
first = threading.Thread(target=importlib.import_module, args=("toy_package",), daemon=True)
first.start()
while "toy_package" not in sys.modules:
    time.sleep(0.01)
second = threading.Thread(target=plugins.load_plugins, daemon=True)
second.start()
for thread in (first, second):
    thread.join(60)
print(first.is_alive(), second.is_alive(), "toy" in DATASETS._declared)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "False False True\n", done.stderr
