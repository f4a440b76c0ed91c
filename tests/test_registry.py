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
