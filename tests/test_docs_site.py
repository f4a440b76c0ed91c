"""The site: generated pages are in step with the program, both languages say the same, defaults are right, notebooks run."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tokensieve.cli.parser import build_parser
from tokensieve.config.learned_selector import SelectorTraining
from tokensieve.config.pruning import PruningTraining
from tokensieve.reid.config import ReidTraining

DOCS = ROOT / "docs"
TRANSLATED = {"README.md": "README.zh-CN.md"} | {
    page.relative_to(ROOT).as_posix().replace("/zh/", "/"): page.relative_to(ROOT).as_posix() for page in DOCS.glob("zh/*.md")
}


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def tool(name):
    """A module of docs/tooling."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "tooling" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_in_step(tmp_path):
    """In a process of its own, because other tests declare methods and flags."""
    subprocess.run([sys.executable, DOCS / "tooling/generate.py", tmp_path], check=True)
    for page in tmp_path.iterdir():
        assert (DOCS / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), "run: make docs"
    assert {page.name for page in tmp_path.iterdir()} == {"methods.md", "command-line.md"}


def code_blocks(text):
    """The fenced blocks with their languages, without comments and spaces at the ends of lines."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    return [(language, re.sub(r"\s*(#.*)?$", "", block, flags=re.M)) for language, block in found]


def tables(text):
    """The rows of each table: of every cell its code, and its numbers where it has no words."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in block.splitlines()]
        found.append([[re.findall(r"`[^`]*`", cell) or re.findall(r"\d[\d.,]*\d|\d", cell) for cell in row] for row in rows])
    return found


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_show_the_same_commands_and_tables(page):
    english, chinese = read(page), read(TRANSLATED[page])
    assert code_blocks(chinese) == code_blocks(english)
    assert tables(chinese) == tables(english)
    assert re.findall(r"^#+ ", chinese, flags=re.M) == re.findall(r"^#+ ", english, flags=re.M)
    images = [re.findall(r"!\[[^\]]*\]\((?:\.\./)?([^)]*)\)", text) for text in (english, chinese)]
    assert images[0] == images[1]


def test_the_number_of_published_methods():
    rows = [line for line in read("docs/methods.md").splitlines() if line.startswith("| `")]
    published = str(sum(not row.endswith("|  |") for row in rows))  # those with a paper
    for page in ("README.md", "docs/plans.md"):
        assert re.findall(r"(\d+) published methods", read(page)) == [published]


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 150
    assert len(read("README.zh-CN.md").splitlines()) <= 150


SCHEMAS = {
    "Token fusion": SelectorTraining,
    "Two-stage VLM": PruningTraining,
    "SDTPS": ReidTraining,
}  # by the begin of a heading


def rows_of_settings():
    """(heading, name, default) of every row of docs/settings.md; the name of a key is its path."""
    heading = prefix = ""
    for line in read("docs/settings.md").splitlines():
        if line.startswith("## "):
            heading, prefix = line[3:], ""
        elif line.endswith(":"):
            prefix = f"{found[1]}." if (found := re.match(r"`([\w.]+)`:$", line)) else ""
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) == 3 and (name := re.match(r" `(.*)` ", cells[0])):
            yield heading, prefix + name[1], cells[1].strip()


@pytest.mark.parametrize(("heading", "name", "default"), list(rows_of_settings()))
def test_defaults_of_the_page_of_settings(heading, name, default):
    if name.startswith("--"):
        (action,) = [action for action in build_parser("eval")[1]["eval"]._actions if name in action.option_strings]
        if action.default not in (None, False):
            assert default == f"`{action.default}`"
        elif default.startswith("`"):  # the default holds where another flag is given, and the help says it
            assert re.search(
                rf"default:? {default.strip('`')}|{default.strip('`')}[^,]*\(default\)|own \(default\)", action.help
            )
        else:
            assert "default:" not in action.help or name == "--prune_layer"
        return
    found = field_default(next(schema for begin, schema in SCHEMAS.items() if heading.startswith(begin)), name)
    if default.startswith("`"):
        value = yaml.safe_load(default.strip("`"))
        value = float(value) if isinstance(found, float) else value  # YAML takes 1e-4 for a text
        assert found == (tuple(value) if isinstance(value, list) else value)
    else:
        assert found in (None, "required")


def field_default(schema, path):
    """The default of a key of a file."""
    first, _, rest = path.partition(".")
    field = schema.model_fields[first]
    if not rest:
        return "required" if field.is_required() else field.get_default(call_default_factory=True)
    value = field.get_default(call_default_factory=True)
    for key in rest.split("."):
        value = getattr(value, key)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_are_saved_with_outputs(path: Path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    saved = nbformat.read(path, as_version=4)
    assert all(cell.get("outputs") for cell in saved.cells if cell.cell_type == "code" and not cell.source.startswith("def "))
    assert any("image/png" in output.get("data", {}) for cell in saved.cells for output in cell.get("outputs", []))
    assert path.stat().st_size < 400_000
    assert not re.search(r"/work/|/tmp/|/root/|/home/", path.read_text(encoding="utf-8"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tool("notebooks").run(path, tmp_path)
