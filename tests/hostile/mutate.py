"""Random damage to texts and bytes."""

from __future__ import annotations

import random

NONSENSE = (
    *("\x00", "\x1b[31m", "\r\n", "\u202e", "\ud800", "\u200b", "Ａ", "𝟞", "٦", "½", "1_0", "1e308", "nan", "inf", "-inf"),
    *("9" * 400, "'", '"', "\\", "$(touch x)", "`touch x`", "; touch x;", "{}", "{0.__class__}", "%s%n", "<script>", "../../x"),
    *(
        "~",
        "=1+1",
        "anchor",
        "@",
        ":",
        "(",
        ")",
        ",",
        "+",
        "%",
        "-",
        ".",
        "*",
        "=",
        " ",
        "\t",
        "#",
        "&a",
        "*a",
        "!!int ''",
        "- ",
    ),
)


def insert_nonsense(rng: random.Random, text: str) -> str:
    """The text with one to three strange strings in it."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(NONSENSE) + text[at:]
    return text


def mutate_text(rng: random.Random, text: str) -> str:
    """The text with a few letters removed, repeated, exchanged or replaced."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((1, 1, 1, 2, 5)))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:at] + text[at:end] * rng.randint(2, 3) + text[end:]
        elif kind == 2:
            text = text[:at] + text[at:end][::-1] + text[end:]
        elif kind == 3:
            text = text[:at] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x250)))) + text[end:]
        else:
            other = rng.randrange(len(text) + 1)
            text = text[:at] + text[other : other + 6] + text[at:]
    return text


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """The bytes with bits flipped, parts cut out, doubled, zeroed or overwritten by noise."""
    if not content:
        return rng.randbytes(rng.randrange(20))
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(max(1, len(content)))
        end = min(len(content), at + rng.choice((1, 2, 4, 16, 200, len(content))))
        kind = rng.randrange(6)
        if kind == 0 and content:
            content = content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at]
        elif kind == 2:
            content = content[:at] + content[end:]
        elif kind == 3:
            content = content[:at] + content[at:end] * 2 + content[end:]
        elif kind == 4:
            content = content[:at] + bytes(end - at) + content[end:]
        else:
            content = content[:at] + rng.randbytes(end - at) + content[end:]
        if not content:
            break
    return content


def flip_bit(rng: random.Random, content: bytes, end: int | None = None) -> bytes:
    """The bytes with one bit flipped, among the first `end` bytes."""
    if not content:
        return b"x"
    place = rng.randrange(len(content) if end is None else min(end, len(content)))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
