"""The text of plans, read from left to right in one pass.

    plan   = step { "+" step }                  anchor@6(k=10,m=50) + pool@9:16
           | mix                                2x: a plan that has this name (mixes)
    step   = method [@ where] [: budget] [( name=value, ... )]
    where  = L | L,L,... | *                    after L blocks have run; -1 is after the last one; * after every block
           | L.attn                             inside block L, between its attention and its MLP
           | out                                at the tower's output tokens
           | llm.L                              at the input of decoder layer L
             (none)                             where the method says; most: after half the depth
    budget = count [/scope]                     of each image
    count  = 60 | 40% | -8                      keep 60 patch tokens, keep 40% of those that arrive, remove 8
    scope  = tile | prompt                      of each tile of an image; of all images of a prompt together

Spaces may stand between any two of these. Digits are those of ASCII. An error knows its position, and small changes of the text
that may repair it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn

from tokensieve.errors import UserError, did_you_mean, nearest, short
from tokensieve.plan.mixes import MIXES

MAX_LENGTH = 2000  # characters of a plan's text
MAX_LISTED = 12  # names in a message
EXAMPLES = "for example 'anchor@6(k=10,m=50)', 'random@3,6:70%' or 'none'"
PLACES = "write @6, @3,6,9, @-1, @*, @6.attn, @out or @llm.2"
BUDGETS = "write 60 (keep 60 tokens), 40% (keep 40%) or -8 (remove 8), of each image, or with /tile or /prompt behind it"
DIGITS = frozenset("0123456789")

BudgetKind = Literal["keep", "share", "remove"]
BudgetScope = Literal["image", "tile", "prompt"]
PositionKind = Literal["block", "attn", "out", "llm", "half"]
Edit = tuple[int, int, str]  # start and end of a part of the text, and what to write instead


class Unreadable(Exception):
    """A text that is not a plan: the reason, the position, edits that may repair it, and a hint in case none of them does."""

    def __init__(self, reason: str, position: int, edits: Collection[Edit] = (), hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.position, self.edits, self.hint = reason, position, edits, hint


@dataclass(frozen=True)
class OptionText:
    """One "name=value" of a step, and where it stands."""

    name: str
    value: str
    position: int


@dataclass(frozen=True)
class StepText:
    """One step as it is written, and where its parts stand."""

    name: str
    position: int
    where: tuple[PositionKind, tuple[int, ...]] | None
    where_position: int
    budget: tuple[BudgetKind, Fraction, BudgetScope] | None
    options: tuple[OptionText, ...]


def clean(text: str) -> str:
    """The text without spaces around it and with plain spaces inside; an error if it is long or has control characters."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise UserError(f"a plan has at most {MAX_LENGTH:,} characters, and this text has {len(text):,}")
    text = "".join(" " if letter.isspace() else letter for letter in text)
    for position, letter in enumerate(text):
        if not letter.isprintable():
            raise Unreadable("a plan holds no control characters", position, [(position, position + 1, "")])
    return text


class Reader:
    """A text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    @property
    def next(self) -> str:
        """The next character; "" at the end."""
        return self.text[self.at : self.at + 1]

    def skip_spaces(self) -> None:
        while self.next == " ":
            self.at += 1

    def take(self, word: str) -> bool:
        """Reads the word if it comes next."""
        found = self.text.startswith(word, self.at)
        self.at += len(word) if found else 0
        return found

    def digits(self) -> str:
        """Reads the digits that come next."""
        start = self.at
        while self.next in DIGITS:
            self.at += 1
        return self.text[start : self.at]

    def name(self) -> str:
        """Reads the name that comes next; "" if none does."""
        start = self.at
        if self.next.isascii() and (self.next.isalpha() or self.next == "_"):
            while self.next.isalnum() or self.next == "_":
                self.at += 1
        return self.text[start : self.at]

    def until(self, stops: str, start: int) -> str:
        """The text from `start` up to the next of these characters, without reading it."""
        end = start
        while end < len(self.text) and self.text[end] not in stops:
            end += 1
        return self.text[start:end].strip()

    def fail(self, reason: str, position: int, *edits: Edit, hint: str = "") -> NoReturn:
        letter = self.text[position : position + 1]
        is_surplus = letter and letter in "@:,)%" and (letter == ")" or self.text[:position].endswith(letter))
        delete: list[Edit] = [(position, position + 1, "")] if is_surplus else []
        raise Unreadable(reason, position, [*edits, *delete], hint)


def read_steps(text: str, names: Collection[str]) -> list[StepText]:
    """The steps of a plan.

    Args:
        text: as `clean` returns it.
        names: of the methods that exist.
    """
    reader, steps = Reader(text), []
    while True:
        steps.append(_read_step(reader, names))
        if not reader.take("+"):
            return steps


def _read_step(reader: Reader, names: Collection[str]) -> StepText:
    reader.skip_spaces()
    start = reader.at
    name = reader.name()
    if not name:
        if reader.next in ("", "+"):
            reader.fail(f"empty step; {EXAMPLES}", start, (max(0, start - 1), start, ""))
        reader.fail(f"a step starts with the name of a method, {EXAMPLES}, or the plan is a mix: {', '.join(MIXES)}", start)
    if name not in names:
        _fail_name(reader, name, start, names)
    where = budget = None
    options: tuple[OptionText, ...] = ()
    _check_next(reader, "@:(+")
    where_position = reader.at
    if reader.take("@"):
        where = read_where(reader)
        _check_next(reader, ":(+")
    if reader.take(":"):
        budget = read_budget(reader)
        _check_next(reader, "(+")
    if reader.take("("):
        options = _read_options(reader)
        _check_next(reader, "+")
    return StepText(name, start, where, where_position, budget, options)


def _fail_name(reader: Reader, name: str, start: int, names: Collection[str]) -> NoReturn:
    edits: list[Edit] = []
    bare = name.rstrip("0123456789")
    if bare != name and bare in names:
        edits.append((start, reader.at, f"{bare}@{name[len(bare) :]}"))
    if (near := nearest(name, names)) is not None:
        edits.append((start, reader.at, near))
    reader.fail(f"no method named {short(name)!r} ({_list_names(names)})", start, *edits, hint=did_you_mean(name, names))


def _list_names(names: Collection[str]) -> str:
    known = sorted(names)
    if len(known) <= MAX_LISTED:
        return f"known: {', '.join(known)}"
    return f"`tokensieve methods` lists the {len(known)} that are known"


def _check_next(reader: Reader, allowed: str) -> None:
    """Skips spaces up to one of the allowed characters or the end; anything else is an error at the gap."""
    gap = reader.at
    reader.skip_spaces()
    if reader.next == "" or reader.next in allowed:
        return
    after = reader.until(" @:(+)", reader.at) or reader.next
    end = reader.at if reader.next.isalnum() or reader.next in "-*%" else reader.at + 1  # another sign is replaced
    separators = {"@:(+": (":", "@"), ":(+": (":", ",", "."), "(+": ("",)}.get(allowed, ())
    edits: list[Edit] = [(gap, end, separator) for separator in (*separators, " + ")]
    rest = reader.until("+", reader.at)
    edits.append((gap, reader.at + len(rest), f"({rest.strip('[]{}')})"))
    if allowed == "+" and reader.next == ":":  # options before the budget
        opened = reader.text.rindex("(", 0, gap)
        edits.insert(0, (opened, reader.at + len(rest), rest + reader.text[opened:gap]))
    signs = [repr(sign) for sign in allowed]
    expected = f"{', '.join(signs[:-1])} or {signs[-1]}" if len(signs) > 1 else signs[0]
    reader.fail(f"expected {expected} before {short(after)!r}", gap, *edits)


def read_where(reader: Reader) -> tuple[PositionKind, tuple[int, ...]]:
    """The positions of a step, after the "@"."""
    reader.skip_spaces()
    start = reader.at
    kind: PositionKind = "block"
    layers: tuple[int, ...] = ()
    if reader.take("out"):
        kind = "out"
    elif reader.take("llm."):
        kind, layers = "llm", _read_layers(reader, start)
    elif not reader.take("*"):
        layers = _read_layers(reader, start)
    end = reader.at
    if kind == "block":
        reader.skip_spaces()
        if reader.take(".attn"):
            kind, end = "attn", reader.at
    reader.at = end
    if reader.next and (reader.next.isalnum() or reader.next in "._-"):
        _fail_where(reader, start)
    return kind, layers


def _read_layers(reader: Reader, start: int) -> tuple[int, ...]:
    layers = []
    while True:
        reader.skip_spaces()
        sign, digits = reader.take("-"), reader.digits()
        if not digits:
            _fail_where(reader, start)
        layers.append(-int(digits) if sign else int(digits))
        end = reader.at
        reader.skip_spaces()
        if not reader.take(","):
            reader.at = end
            return tuple(layers)


def _fail_where(reader: Reader, start: int) -> NoReturn:
    written = reader.until(":(+", start)
    number = re.search(r"-?[0-9]+", written)
    meant = None
    if number is None:
        meant = nearest(written, ["out", "output"]) and "out"
    else:
        words = {"llm": f"llm.{number[0]}", "attn": f"{number[0]}.attn", "attention": f"{number[0]}.attn"}
        words |= dict.fromkeys(("layer", "block", "l"), number[0])
        word = nearest(re.sub(r"[^a-z]", "", written.lower()), words)
        meant = None if word is None else words[word]
    edits: list[Edit] = [] if meant is None else [(start, start + len(written), meant)]
    if reader.next in ("-", "."):
        edits.append((reader.at, reader.at + 1, ":"))
    reader.fail(f"place '@{short(written)}' is not understood; {PLACES}", reader.at, *edits)


def read_budget(reader: Reader) -> tuple[BudgetKind, Fraction, BudgetScope]:
    """The budget of a step, after the ":"."""
    reader.skip_spaces()
    start = reader.at
    removes, digits = reader.take("-"), reader.digits()
    dot = bool(digits) and reader.take(".")
    digits += f".{reader.digits()}" if dot else ""
    percent = bool(digits) and reader.take("%")
    written = reader.until(" (:+/)", start)
    end = start + len(written)
    if not written:
        reader.fail(f"the budget after ':' is missing; {BUDGETS}", start, (start, start, "60"))
    problem = f"budget {short(written)!r} is not understood; {BUDGETS}"
    if not digits or digits.endswith(".") or end != reader.at or (removes and percent):
        reader.fail(problem, reader.at if end != reader.at else start)
    amount = Fraction(digits)
    if dot and not percent:
        reader.fail(problem, start, (start, end, f"{float(amount * 100):g}%"))
    if amount == 0 and not removes:
        reader.fail(f"budget {short(written)!r} keeps nothing; keep at least 1 token", start)
    if amount > 100 and percent:
        reader.fail(f"budget {short(written)!r} is more than all tokens; at most 100%", start)
    scope = _read_scope(reader)
    if percent:
        return "share", amount / 100, scope
    return ("remove" if removes else "keep"), amount, scope


def _read_scope(reader: Reader) -> BudgetScope:
    """What a budget is for, behind its number."""
    start = reader.at
    if not reader.take("/"):
        return "image"
    word = reader.name()
    if word == "tile":
        return "tile"
    if word == "prompt":
        return "prompt"
    near = nearest(word, ("tile", "prompt"))
    edit = (start, reader.at, "" if near is None else f"/{near}")
    reader.fail(f"a budget is for each image, '/tile' or '/prompt', not {short('/' + word)!r}", start, edit)


def _read_options(reader: Reader) -> tuple[OptionText, ...]:
    """The options of a step, after the "(" up to the ")"."""
    options: list[OptionText] = []
    opened = reader.at
    while True:
        start = reader.at
        while reader.next and reader.next not in ",()":
            reader.at += 1
        if reader.next in ("", "("):
            edits: list[Edit] = [(reader.at, reader.at, ")")]
            if "+" in reader.text[opened:]:
                plus = reader.text.index("+", opened)
                edits.append((plus, plus, ") "))
            reader.fail("the '(' is not closed", reader.at, *edits)
        pair = reader.text[start : reader.at]
        if pair.strip():
            position = start + len(pair) - len(pair.lstrip())
            name, _, value = (part.strip() for part in pair.partition("="))
            if not value:
                reader.fail(f"option {short(pair.strip())!r} should read name=value, for example rest=merge", position)
            if any(option.name == name for option in options):
                reader.fail(f"option {short(name)!r} is given twice", position)
            options.append(OptionText(name, value, position))
        if reader.take(")"):
            return tuple(options)
        reader.take(",")
