"""Class names and prompt templates for tasks that need them: the data's own, or those of JSON files of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.errors import UserError
from tokensieve.files import read_json
from tokensieve.provenance import digest

if TYPE_CHECKING:
    from tokensieve.data.source import Source


def set_texts(source: Source, name: str, bare_name: str, classname_file: str | None, template_file: str | None) -> None:
    """Put the texts of the user's files in place of the data's own; a UserError if there are none in the end.

    bare_name: the name of the data set without prefixes; an entry of a file may go by either.
    """
    keys = [name, bare_name]
    classes = _read_entry(classname_file, "--custom_classname_file", keys)
    templates = _read_entry(template_file, "--custom_template_file", [*keys, "imagenet1k"])
    source.classes = list(classes or source.classes)
    source.templates = templates or source.templates
    if not source.classes or not source.templates:
        what = "class names" if not source.classes else "prompt templates"
        raise UserError(f"{name} has no {what}: give --custom_classname_file and --custom_template_file.")
    source.fingerprint = digest([source.fingerprint, source.classes, source.templates])


def _read_entry(path: str | None, flag: str, keys: Sequence[str]) -> Any:
    """The entry of a JSON file by the first of these names it has; a bare file name may be one in clip_benchmark's folder."""
    if not path:
        return None
    file = Path(path)
    if not file.exists():
        import clip_benchmark.datasets

        file = Path(clip_benchmark.datasets.__file__).parent / path
    try:
        content = read_json(file)
    except UserError as error:
        raise UserError(f"{flag}: {error}.") from error
    for key in keys:
        if isinstance(content, dict) and key in content:
            return content[key]
    raise UserError(f'{flag} {path} has no entry for {keys[0]!r}; it must be {{"{keys[0]}": [...]}}.')
