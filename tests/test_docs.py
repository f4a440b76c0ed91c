"""What README and docs show is what works: plans parse, commands are understood, the example method conforms."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve import Plan, cli
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.methods.registry import REGISTRY
from tokensieve.testing import check_method

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
USE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def blocks(text, language=""):
    """The fenced blocks of one language."""
    found, inside = [], None
    for line in text.splitlines():
        if line.startswith("```"):
            if inside is not None and inside[0] == language:
                found.append("\n".join(inside[1]))
            inside = None if inside is not None else (line[3:], [])
        elif inside is not None:
            inside[1].append(line)
    return found


def commands():
    lines = "\n".join([*blocks(README), *blocks(USE)]).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("tokensieve ")]


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line):
    args = cli.parse(shlex.split(line)[1:])
    plans = args.plan if isinstance(getattr(args, "plan", None), list) else [getattr(args, "plan", None) or "none"]
    for plan in [*plans, *getattr(args, "compare", [])]:
        Plan.parse(plan)


def test_plans_parse():
    (shown,) = [block for block in blocks(README) if block.startswith("anchor@6")]
    for line in shown.splitlines():
        text = re.split(r"\s{2,}", line)[0]
        assert str(Plan.parse(text)) == text


@pytest.mark.parametrize("text", [README, GUIDE], ids=["readme", "guide"])
def test_the_example_method_conforms(text):
    (example,) = [block for block in blocks(text, "python") if "def loudest" in block]
    try:
        exec(example, {})
        check_method("loudest")
    finally:
        REGISTRY.remove("loudest")


def test_the_five_lines(tiny_clip):
    (example,) = [block for block in blocks(README, "python") if "create_model_and_transforms" in block]
    example = example.replace('"ViT-B-16"', repr(tiny_clip.name)).replace('"openai"', repr(tiny_clip.weights))
    example = example.replace("@6(k=10,m=50", "@2(k=2,m=4")
    names = {"images": torch.randn(2, 3, 48, 32)}
    with torch.no_grad():
        exec(example, names)
    assert [vars(row) for row in names["sieve"].ledger] == [{"layer": "2", "tokens_in": 24, "tokens_out": 6}]


def test_public_names_are_there_and_importing_is_cheap():
    import subprocess
    import sys

    for name in tokensieve.__all__:
        assert getattr(tokensieve, name) is not None
    code = "import sys, tokensieve; print([m for m in ('torch', 'open_clip', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_example_of_vision_language_models_runs():
    text = (ROOT / "docs" / "vlm.md").read_text(encoding="utf-8")
    (example,) = [block for block in blocks(text, "python") if "llava_path" in block]
    picture, question = EmbeddedQuestions("val", length=3)[2]
    assert question.text == "how many objects are there?"
    names = {"picture": picture}
    exec(example, names)
    assert [row.tokens_out for row in names["sieve"].ledger] == [79, 48, 28, 14]
    assert names["processor"].decode(names["ids"][0], skip_special_tokens=True).endswith(question.answer)
