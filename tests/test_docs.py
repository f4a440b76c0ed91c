"""README and docs are correct: plans parse, commands are understood, examples run, and links, paths and module names exist."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokensieve
from tests.support.paths import ROOT
from tests.support.processes import alone
from tokensieve import Plan
from tokensieve.cli.parser import parse
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.errors import UserError
from tokensieve.methods.registry import REGISTRY
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.plan.mixes import MIXES
from tokensieve.testing import check_method

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
OUTSIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "benchmarks/README.md")
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in OUTSIDE}
COMMENTED = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("configs/**/*.y*ml")}
README, PLUGINS = PAGES["README.md"], PAGES["docs/plugins.md"]
SOURCE = ROOT / "src" / "tokensieve"


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


def commands(text):
    """The commands of the plain blocks, without comments."""
    lines = "\n".join(blocks(text)).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+(#|> ).*", "", line) for line in lines if line.startswith("tokensieve ")]


def example(page, words):
    """The only Python block of a page that contains these words."""
    (found,) = [block for block in blocks(PAGES[page], "python") if words in block]
    return found


# The commands of plugins.md run below; add-a-method.md shows a method that is not registered.
SHOWN = [
    line for page, text in PAGES.items() if page not in ("docs/plugins.md", "docs/add-a-method.md") for line in commands(text)
]


@pytest.mark.parametrize("line", dict.fromkeys(SHOWN))
def test_commands_are_understood(line):
    args = parse(shlex.split(line)[1:])
    plans = args.plan if isinstance(getattr(args, "plan", None), list) else [getattr(args, "plan", None) or "none"]
    for plan in [*plans, *getattr(args, "compare", [])]:
        Plan.parse(plan)
    if line.startswith("tokensieve bench"):
        kind = MODEL_TYPES[args.model_type]
        assert kind.architecture or kind.bench_model, f"bench refuses models of type {kind.name}"


def test_plans_parse():
    (shown,) = [block for block in blocks(PAGES["docs/plans.md"]) if block.startswith("2x ")]
    for line in shown.splitlines():
        text = re.split(r"\s{2,}", line)[0]
        if not text.startswith("@"):  # a file
            assert str(Plan.parse(text)) == MIXES.get(text, text)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/add-a-method.md"])
def test_the_example_method_conforms(page):
    try:
        exec(example(page, "def loudest"), {"__name__": "example"})
        check_method("loudest")
    finally:
        REGISTRY.remove("loudest")


def test_the_five_lines(tiny_clip):
    lines = example("README.md", "create_model_and_transforms")
    lines = lines.replace('"ViT-B-16"', repr(tiny_clip.name)).replace('"openai"', repr(tiny_clip.weights))
    lines = lines.replace("size=192", "size=24").replace("@7:40", "@2:6")
    names = {"images": torch.randn(2, 3, 48, 32)}
    with torch.no_grad():
        exec(lines, names)
    assert [vars(row) for row in names["sieve"].ledger] == [
        {"layer": "image", "tokens_in": 24, "tokens_out": 12},
        {"layer": "2", "tokens_in": 12, "tokens_out": 6},
    ]


def test_the_lines_of_the_start_page():
    names = {}
    exec(example("docs/start.md", "EmbeddedScenes"), names)
    assert [vars(row) for row in names["sieve"].ledger] == [{"layer": "4", "tokens_in": 196, "tokens_out": 32}]
    assert torch.cosine_similarity(names["full"], names["fast"]).min() > 0.98


def test_the_service_answers_from_several_threads():
    names = {}
    exec(example("docs/tasks/serve.md", "threading"), names)
    with names["handle"]:
        for request in names["requests"]:
            assert names["answer"](request).shape == (2, 128)


def test_the_example_of_re_identification_runs():
    names = {}
    exec(example("docs/tasks/reid.md", "tokensieve.reid"), names)
    assert [row.tokens_out for row in names["sieve"].ledger] == [26]
    assert len(names["feature"]) == 1


def test_the_call_with_sample_indices(tiny_clip):
    lines = example("docs/guide.md", "handle.call").replace("@6:60", "@2:6")
    names = {"tokensieve": tokensieve, "model": tiny_clip.make()[0], "images": torch.randn(2, 3, 48, 32)}
    with torch.no_grad():
        exec(lines, names | {"indices": torch.tensor([3, 5])})


def test_public_names_exist_and_importing_is_cheap():
    for name in tokensieve.__all__:
        assert getattr(tokensieve, name) is not None
    code = "import sys, tokensieve; print([m for m in ('torch', 'open_clip', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_example_of_vision_language_models_runs():
    picture, question = EmbeddedQuestions("val", length=3)[2]
    assert question.text == "how many objects are there?"
    names = {"picture": picture}
    exec(example("docs/vlm.md", "llava_path"), names)
    assert [row.tokens_out for row in names["sieve"].ledger] == [79, 48, 28, 14]
    assert names["processor"].decode(names["ids"][0], skip_special_tokens=True).endswith(question.answer)


@pytest.mark.slow
def test_the_example_plug_in_works_in_every_command(tmp_path):
    pytest.importorskip("tokensieve.cli.registry")
    (tmp_path / "my_plugin.py").write_text(example("docs/plugins.md", "def loudest"), encoding="utf-8")
    small = "--limit 12 --batch_size 6 --num_workers 0 --output {dataset}_{task}_{plan}.json"
    lines = [f"{line} {small}" if " eval " in line else line for line in commands(PLUGINS)]
    lines += [f"tokensieve eval --plugin my_plugin.py --task feature_norm --plan none {small}", "tokensieve build ."]
    runs = [shlex.split(line)[1:] for line in lines]
    loop = "for words in runs:\n    print('>>', *words, flush=True)\n    assert main(words) == 0"
    done = alone(["-c", f"from tokensieve.cli import main\nruns = {runs!r}\n{loop}"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loudest       tokens with the largest norm" in done.stdout
    results = sorted(path.name for path in tmp_path.glob("*.json"))
    assert any(name.startswith("colours_zeroshot_classification_loudest") for name in results), results
    assert any(name.startswith("colours_feature_norm_none") for name in results), results
    assert "norm" in (tmp_path / "benchmark.csv").read_text().splitlines()[0].split(",")


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        file, _, heading = link.partition("#")
        if file.startswith(("http:", "https:")):
            continue
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize("page", [*PAGES, *COMMENTED])
def test_paths_and_modules_exist(page):
    """What is written as a path or a module exists, so that moved files are not named by their old places."""
    if page == "docs/decisions/0020-package-layout.md":  # names files of the proposal too
        return
    text = (PAGES | COMMENTED)[page].replace("src/tokensieve/methods/loudest.py", "")  # the example, to be written
    for path in re.findall(r"\b(?:benchmarks|configs|docs|src|tests)/[\w/.-]*\w", text):
        assert (ROOT / path).exists() or path.startswith("benchmarks/results/"), path
    folders = SOURCE, ROOT, ROOT / "benchmarks"
    for path in set(re.findall(r"`(\w+(?:/\w+)*\.py)`", text)) - {"my_plugin.py"}:
        if path.startswith(("clip_benchmark/", "modeling/")):  # of the original documents, in origins.md
            continue
        assert any((folder / path).exists() for folder in folders), path
    for name in re.findall(r"\btokensieve(?:\.[a-z_]\w*)+(?!\w|[/.]\w)", text):
        assert _exists(name), name
    for module, names in re.findall(r"^from (tokensieve[\w.]*) import ([\w, ]+)$", text, flags=re.MULTILINE):
        for name in names.split(", "):
            assert _exists(f"{module}.{name}"), f"{module}.{name}"


def _exists(name):
    """Whether a dotted name is a module or an attribute of one."""
    if name == "tokensieve.plugins" or name.endswith((".yaml", ".yml", ".py", ".md", ".fish", ".json")):
        return True
    module, attributes = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except UserError:  # it needs a package that is not installed, and says so
            return True
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


SPEC_ROWS = PAGES["docs/spec-rows.md"]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", SPEC_ROWS))))
def test_tests_of_the_specification_exist(name):
    file, _, test = name.partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), name


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`(tokensieve [^`]+)` \|$", SPEC_ROWS, flags=re.MULTILINE))))
def test_commands_of_the_specification_are_understood(line):
    test_commands_are_understood(line)


def test_every_requirement_has_a_test():
    rows = [line.split(" | ") for line in SPEC_ROWS.splitlines() if line.startswith("| ") and not line.startswith("| row ")]
    assert len(rows) > 40
    assert [row[0] for row in rows if "`tests/" not in row[1]] == []


def test_labels_of_the_specifications_are_only_in_the_table_of_origins():
    for page, text in (PAGES | COMMENTED | {"CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}).items():
        if page == "docs/design.md":
            text = text[: text.index("## Origins")]
        if page != "docs/decisions/0019-plain-names.md":
            assert not re.findall(r"\bS[1-5]\b", text), page


def test_the_version_is_the_same_everywhere():
    assert f"version = {{{tokensieve.__version__}}}" in re.sub(r" +", " ", README)
    assert f"version: {tokensieve.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_page_is_linked():
    linked = {
        ((ROOT / page).parent / link.partition("#")[0]).resolve() for page, text in PAGES.items() for link in _links(text)
    }
    for page in PAGES:
        assert page in ("README.md", "docs/index.md") or Path(ROOT / page).resolve() in linked, page


def _links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)
