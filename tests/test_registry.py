"""Registries: declarations by name, clashes, the nearest name, and "module:attribute"."""

import math
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tokensieve.errors import UserError
from tokensieve.registry import Registry, resolve


@dataclass(frozen=True)
class Fruit:
    name: str
    colour: str = "green"


@pytest.fixture
def fruits():
    registry = Registry("fruit")
    registry.add(Fruit("pear"), "one")
    registry.add(Fruit("apple"), "one")
    return registry


def test_it_is_a_mapping_in_the_order_of_declarations(fruits):
    assert list(fruits) == ["pear", "apple"] and len(fruits) == 2 and "pear" in fruits and "plum" not in fruits
    assert fruits["apple"] is fruits.get_or_fail("apple") and fruits.get("plum") is None


def test_an_unknown_name_is_an_error_with_the_nearest_one(fruits):
    with pytest.raises(UserError, match=r"no fruit named 'aple'\. Did you mean 'apple'\? Known: apple, pear"):
        fruits.get_or_fail("aple")


def test_a_name_belongs_to_the_module_that_declared_it(fruits):
    fruits.add(Fruit("apple", "red"), "one")  # a reloaded module
    assert fruits["apple"].colour == "red"
    with pytest.raises(UserError, match="a fruit named 'apple' is registered already; choose another name"):
        fruits.add(Fruit("apple"), "two")
    with pytest.raises(UserError, match="registered already"):
        fruits.add(Fruit("apple"))  # of this module
    fruits.add(Fruit("plum"))
    fruits.add(Fruit("plum", "blue"))
    assert fruits["plum"].colour == "blue"


def test_names_can_be_removed(fruits):
    fruits.remove("apple")
    fruits.remove("apple")
    fruits.add(Fruit("apple"), "two")
    assert list(fruits) == ["pear", "apple"]


def test_declarations_may_be_added_while_it_is_read(fruits):
    for name in fruits:
        fruits.add(Fruit(f"dried {name}"))
    assert len(fruits) == 4


def test_module_and_attribute():
    assert resolve("math:pi") == math.pi


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nomod:build", "cannot be imported: No module named 'nomod'"),
        ("math.nomod:build", "cannot be imported: No module named 'math.nomod'; 'math' is not a package"),
        ("email.nomod:build", "cannot be imported: No module named 'email.nomod'"),
        ("nomod.deep.deeper:build", "cannot be imported: No module named 'nomod'"),
        ("math:pii", "cannot be found: math has no 'pii'. Did you mean 'pi'?"),
        ("math", 'is not of the form "module:attribute"'),
        (":build", 'is not of the form "module:attribute"'),
        (".mod:build", 'is not of the form "module:attribute"'),
    ],
)
def test_what_is_not_there_is_named_with_its_declaration(fruits, text, expected):
    with pytest.raises(UserError) as caught:
        resolve(text)
    assert str(caught.value) == f"{text!r} {expected}"
    fruits.add(Fruit("fig", colour=text), "some.module")
    with pytest.raises(UserError) as caught:
        resolve(text)
    assert str(caught.value) == f"{text!r} of the fruit 'fig' (the module some.module) {expected}"


def test_a_missing_library_and_errors_of_a_module_stay_what_they_are(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_library.py").write_text("import no_such_library")
    (tmp_path / "needs_name.py").write_text("from math import no_such_name")
    (tmp_path / "fails.py").write_text("None.attribute")
    for module, error in (("needs_library", ModuleNotFoundError), ("needs_name", ImportError), ("fails", AttributeError)):
        with pytest.raises(error):
            resolve(f"{module}:build")


DECLARE = """
from tokensieve.data.registry import DATASETS, DatasetSpec
from tokensieve.errors import UserError

def declare(name):
    try:
        DATASETS.add(DatasetSpec(name, "mine", "mine:build", "labels", None))
        return "added"
    except UserError as error:
        return str(error)
"""
FIRST = """
print(declare("cifar10"))
print(declare("mine"))
print(DATASETS["cifar10"].group, DATASETS["mine"].group)
"""
THREADS = """
import threading

start, found = threading.Barrier(8), []

def work(number):
    start.wait()
    found.append(declare("cifar10") if number % 2 else len(DATASETS) > 3)

threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(sorted(map(str, found)) == ["True"] * 4 + [declare("cifar10")] * 4)
"""
TAKEN = "a data set named 'cifar10' is registered already; choose another name"


@pytest.mark.parametrize(
    ("code", "expected"),
    [(FIRST, f"{TAKEN}\nadded\nclip_benchmark plug-ins\n"), (THREADS, "True\n")],
    ids=["one", "threads"],
)
def test_a_name_of_a_built_in_cannot_be_taken_before_it_is_loaded(code, expected):
    done = subprocess.run([sys.executable, "-c", DECLARE + code], capture_output=True, text=True)
    assert done.stdout == expected, done.stderr
