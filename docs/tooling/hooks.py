"""Hooks of the site: pages from outside docs/, notebooks and decisions become pages, and links to them lead there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
OUTSIDE = {  # pages that stand outside docs/, because other tools look for them there: their place on the site
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
ORIGINS: dict[str, str] = {}  # pages of the site that are made here: the file in the repository they are made of
NAME = re.compile(r"\[(?:[\w-]+/)*[\w-]+\.md\]\(([^)\s#]+\.md)((?:#[^)\s]*)?)\)")  # a link whose text is the name of a file
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"(^```.*?^```$)", flags=re.S | re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every decision in the navigation, and pages that it does not name at the end of the guide."""
    sections = {name: entries for section in config.nav or [] for name, entries in section.items()}
    pages = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).glob("**/*.md"))]
    named = set(re.findall(r"'([^']*\.md)'", str(config.nav)))
    decisions = [page for page in pages if page.startswith("decisions/") and page != "decisions/README.md"]
    sections["Project"].insert(1, {"Decisions": ["decisions/README.md", *decisions]})
    sections["Guide"] += [page for page in pages if page not in named and not page.startswith(("decisions/", "tooling/"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the notebooks, and every file that a page links to."""
    for path, uri in OUTSIDE.items():
        _add(files, config, uri, (ROOT / path).read_text(encoding="utf-8"), path)
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = MarkdownExporter().from_notebook_node(nbformat.read(notebook, as_version=4))
        for name, content in pictures["outputs"].items():
            _add(files, config, f"examples/{notebook.stem}_{name}", content)
        text = re.sub(r"\]\((output_\w+\.png)\)", rf"]({notebook.stem}_\1)", text)
        note = f"\n\n*This page is the notebook [`examples/{notebook.name}`](../files/examples/{notebook.name}).*\n"
        title, _, rest = text.partition("\n\n")
        _add(files, config, f"examples/{notebook.stem}.md", f"{title}{note}\n{rest}", f"examples/{notebook.name}")
        _add(files, config, f"files/examples/{notebook.name}", notebook.read_bytes())
    for file in list(files.documentation_pages()):
        for link in LINK.findall(file.content_string):
            path = _repository_path(file.src_uri, link[1])
            if path is not None and path not in OUTSIDE and not path.startswith("docs/") and (ROOT / path).is_file():
                _add(files, config, f"files/{path}", (ROOT / path).read_bytes())
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links between files of the repository as links between pages of the site, with titles instead of names of files."""

    def rewrite(text: str) -> str:
        text = NAME.sub(lambda m: f"[{_title(m, page, files)}]({m[1]}{m[2]})", text)
        return LINK.sub(lambda m: _link(m, page), text)

    return "".join(piece if piece.startswith("```") else rewrite(piece) for piece in FENCED.split(markdown))


def _title(match: re.Match[str], page: Page, files: Files) -> str:
    """The first heading of the page that a link leads to."""
    path = _repository_path(page.file.src_uri, match[1])
    file = files.get_file_from_path(_uri(path)) if path is not None else None
    heading = re.search(r"^# (.*)$", file.content_string, flags=re.M) if file is not None else None
    return heading[1] if heading else match[1]


def _link(match: re.Match[str], page: Page) -> str:
    path = _repository_path(page.file.src_uri, match[2])
    if path is None:
        return match[0]
    return match[1] + posixpath.relpath(_uri(path), posixpath.dirname(page.file.src_uri) or ".") + match[3]


def _uri(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path in ORIGINS.values():
        return path.replace(".ipynb", ".md")
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def _repository_path(uri: str, link: str) -> str | None:
    """The file of the repository that a link on a page leads to; None for addresses and links of generated pages."""
    if re.match(r"\w+:", link) or link.startswith("#"):
        return None
    start = posixpath.dirname(ORIGINS.get(uri, f"docs/{uri}"))
    path = posixpath.normpath(posixpath.join(start, link))
    if uri in ORIGINS and ORIGINS[uri].endswith(".ipynb") and not (ROOT / path).exists():
        return None  # its pictures
    return path


def _add(files: Files, config: MkDocsConfig, uri: str, content: str | bytes, origin: str | None = None) -> None:
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=content))
    if origin is not None:
        ORIGINS[uri] = origin
