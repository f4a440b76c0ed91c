"""YAML of users: values with their lines, within limits; whatever else there is, is told."""

import math

import pytest
import yaml

from tests.support.paths import ROOT
from tokensieve.config import yaml_tree
from tokensieve.config.yaml_tree import TextError, read, read_value, write

BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.y*ml")), ids=lambda path: path.name)
def test_the_files_that_ship_are_read_as_yaml_reads_them(path):
    def numbers(value):
        if isinstance(value, dict):
            return {key: numbers(item) for key, item in value.items()}
        if isinstance(value, list):
            return [numbers(item) for item in value]
        return float(value) if isinstance(value, str) and value[0].isdigit() else value  # safe_load takes 1e-3 for a text

    text = path.read_text()
    tree = read(text)
    assert tree.value == numbers(yaml.safe_load(text)) and not tree.problems
    assert read(write(tree.value)).value == tree.value
    for keys, line in tree.lines.items():
        assert isinstance(keys[-1], int) or keys[-1] in text.splitlines()[line - 1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("2E5", 2e5),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("+3", 3),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-3'", "1e-3"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("<<", "<<"),
        ("=", "="),
        ("1.2.3", "1.2.3"),
    ],
)
def test_values(text, value):
    tree = read(f"key: {text}")
    assert tree.value == {"key": value} and type(tree.value["key"]) is type(value) and not tree.problems


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("!!int ''", "'' is no value of the tag !!int"),
        ("!!bool maybe", "no value of the tag !!bool"),
        ("!!timestamp x", "the tag !!timestamp is not allowed"),
        ("!!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system is not allowed"),
        ("!!binary aGk=", "!!binary is not allowed"),
        ("!!set {a}", "!!set is not allowed"),
        ("!own x", "the tag !own is not allowed"),
        ("010", "begins with 0, which some read as octal"),
        (".inf", ".inf is not a finite number"),
        ("-.INF", "not a finite number"),
        (".nan", ".nan is not a finite number"),
        ("1e400", "1e400 is not a finite number"),
        ("9" * 100_000, "a number of 100,000 letters"),
        ("x" * 20_000, "a text of 20,000 letters"),
        ('"\\0"', "the character U+0000 is not allowed"),
        ('"\\e[2J"', "the character U+001B is not allowed"),
        ('"\\ud800"', "the character U+D800 is not allowed"),
        ("{[a, b]: 1}", "a list or a section cannot be a key"),
        ("{'': 1}", "a key is empty"),
        ("{'" + "k" * 300 + "': 1}", "a key of 300 letters"),
        ('{"a\\nb": 1}', "the character U+000A is not allowed"),
        ("{<<: 3}", "<< takes the anchor of a section"),
    ],
)
def test_what_cannot_be_a_value_is_told_and_the_rest_is_read(text, told):
    tree = read(f"first: 1\n\nkey: {text}\nlast: 2")
    ((path, line, message),) = tree.problems
    assert path == ("key",) and line == 3 and told in message and len(message) < 200 and message.isprintable()
    assert tree.value["first"] == 1 and tree.value["last"] == 2
    assert all(len(str(value)) < 100 for value in tree.value.values())


def test_keys_are_what_is_written():
    tree = read("1: a\nnull: b\non: c\n2024-01-01: d\n1.50: e")
    assert list(tree.value) == ["1", "null", "on", "2024-01-01", "1.50"] and not tree.problems


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a: 1\nb: \0", 2, "the character U+0000 is not allowed"),
        ("a: 1\nb: [", 2, "not valid YAML"),
        ('a: "\\UFFFFFFFF"', 1, "out of range"),
        (f"%YAML {'9' * 5000}.1\n--- 1", 1, "out of range"),
        ("a: *nothing", 1, "undefined alias"),
        ("--- 1\n--- 2", 2, "another document"),
        ("a: 1\nb: &a [*a]", 2, "*a stands inside of what it names"),
        ("a: 1\nb: &a {x: {y: *a}}", 2, "*a stands inside of what it names"),
        ("a:\n  " + "[" * 100_000, 2, "more than 20 sections and lists are nested"),
        ("a:\n  " + "{b: " * 100_000, 2, "more than 20 sections and lists are nested"),
        ("- " * 100_000, 1, "more than 20 sections and lists are nested"),
        (f"a: &a {'[' * 15}{']' * 15}\nb: {'[' * 10}*a{']' * 10}", 2, "more than 20 sections and lists are nested"),
        ("a: 1\nb: [" + "1, " * 50_000 + "]", 2, "more than 10,000 keys and values"),
        (BOMB, 5, "more than 10,000 keys and values, with all aliases written out"),
        (MERGES, 5, "more than 10,000 keys and values, with all aliases written out"),
        ("".join(f"k{n}: 1\n" for n in range(2000)), 1, "2,000 keys in one section"),
    ],
)
def test_what_cannot_be_read_at_all_has_its_line(text, line, told):
    with pytest.raises(TextError) as caught:
        read(text)
    assert caught.value.line == line and told in str(caught.value) and len(str(caught.value)) < 300


def test_aliases_and_merged_sections():
    text = "base: &base {lr: 1, steps: 2}\nmore: &more {lr: 5, x: 6}\n"
    text += "a:\n  <<: *base\n  lr: 3\nb: {<<: [*base, *more]}\nc: *base\n"
    tree = read(text)
    assert tree.value["a"] == {"lr": 3, "steps": 2} and tree.value["b"] == {"lr": 1, "steps": 2, "x": 6}
    assert tree.lines["a", "lr"] == 5 and tree.lines["a", "steps"] == 1 and tree.lines["b", "x"] == 2
    assert tree.value == yaml.safe_load(text)
    tree.value["c"]["lr"] = 9
    assert tree.value["base"]["lr"] == 1  # a copy


def test_a_key_given_twice_is_told():
    assert read("a: 1\nb:\n  c: 1\n  c: 2\n").problems == [(("b", "c"), 4, "given twice, first in line 3; remove one of them")]


@pytest.mark.parametrize(
    "text", ["1e-3", "yes", "010", "1:30", "2024-01-01", "~", "", "<<", ".nan", "0x1", "5", "# a", "a: b", "é", "1_0"]
)
def test_written_texts_stay_texts(text):
    assert read(write({"key": text, "list": [text, 1e-05, True, None]})).value == {
        "key": text,
        "list": [text, 1e-05, True, None],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("[1, 2]", [1, 2]),
        ("", ""),
        ("#5", "#5"),
        ("tome@*:-8", "tome@*:-8"),
        ("*", "*"),
        ("[1, 2", "[1, 2"),
        ("null", None),
    ],
)
def test_values_of_the_command_line(text, value):
    assert read_value(text).value == value


def test_values_of_the_command_line_have_the_same_limits():
    for text in ("[" * 100, "&a [*a]", "x" * 20_000, "{a: &a [1, 1, 1], " + ", ".join(f"k{n}: 1" for n in range(1200)) + "}"):
        with pytest.raises(TextError):
            read_value(text)
    for text in (".inf", "9" * 200, "\0", "!!set {a}"):
        assert read_value(text).problems and read_value(text).unread == {()}
    assert math.isclose(read_value("1_0.5").value, 10.5)
    assert yaml_tree.MAX_BYTES == 2**20
