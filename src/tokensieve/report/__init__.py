"""`tokensieve report`: results as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tokensieve import files
from tokensieve.errors import UserError
from tokensieve.evaluation import results
from tokensieve.report.examples import SCENES, render_examples
from tokensieve.report.fields import Result, mapping_at, split_older
from tokensieve.report.page import render_page
from tokensieve.report.sections import group_sections, render_section


def run(args: argparse.Namespace) -> Path:
    """Write the page and print its name."""
    path = Path(args.output)
    files.check_writable(path)
    found = results.read_results(args.files)
    page = build(found, title=args.title, images=args.images)
    files.replace_file(path, page.encode(errors="replace"))
    if args.plots is not None:
        from tokensieve.report import plot_files

        plot_files.write(group_sections(split_older(found)[0]), args.plots)
    if not args.quiet and not files.is_stream(path):
        print(path)
    return path


def build(found: Sequence[Result], *, title: str | None = None, images: int = 2) -> str:
    """The page of these results; images: how many example pictures each model gets."""
    if images > len(SCENES):
        raise UserError(f"--images {images}: at most {len(SCENES)}")
    shown, n_older = split_older(found)
    sections = group_sections(shown)
    heading = title or "Token reduction: quality and cost"
    body = [f"<h1>{escape(heading)}</h1>", f"<p class='soft'>{_summary(shown, n_older)}</p>"]
    if len(sections) > 1:
        entries = (f"<li><a href='#s{n}'>{escape(name)}</a></li>" for n, (name, _) in enumerate(sections, start=1))
        body.append(f"<nav><ul>{''.join(entries)}</ul></nav>")
    for number, (name, rows) in enumerate(sections, start=1):
        body.append(render_section(number, name, rows))
    if images:
        body.append(render_examples(shown, images))
    return render_page(heading, "\n".join(body))


def _summary(found: Sequence[Result], n_older: int) -> str:
    parts = [f"{len(found)} results"]
    for name, word in (("model", "model"), ("dataset", "data set"), ("task", "task")):
        values = dict.fromkeys(str(result.get(name)) for result in found)
        parts.append(f"{len(values)} {word}{'s' if len(values) != 1 else ''}")
    versions = mapping_at(mapping_at(found[0], "run"), "versions").get("tokensieve")
    made = f"; made with tokensieve {versions}" if versions else ""
    older = f"; not shown: {n_older} older, with the same settings as one that is shown" if n_older else ""
    return escape(f"{', '.join(parts)}{made}{older}")
