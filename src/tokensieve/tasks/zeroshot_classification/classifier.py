"""Classifiers made of class names and prompts by the text tower, saved and loaded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import UserError, short
from tokensieve.files import format_template, replace_file
from tokensieve.models.features import encode_text
from tokensieve.parts.tensor_files import FLOATS, is_plain, read_torch


def zero_shot_classifier(
    model: Any,
    tokenizer: Callable[[list[str]], Any],
    classes: Iterable[str],
    templates: Sequence[str] | Mapping[str, Sequence[str]],
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """One unit vector a class: the mean of its prompts' unit features.  (E, C)"""
    columns = []
    with torch.inference_mode(), precision():
        for name in classes:
            tokens = tokenizer(prompts(name, templates)).to(device)
            features = F.normalize(encode_text(model, tokens), dim=-1)  # (T, E)
            mean = features.mean(dim=0)
            columns.append(mean / mean.norm())
        return torch.stack(columns, dim=1)


def prompts(name: str, templates: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The sentences for one class: its own (a mapping from class names), or every template with {c} filled in."""
    if isinstance(templates, Mapping):
        if name not in templates:
            raise UserError(f"the template file has no prompts for the class {name!r}.")
        return list(templates[name])
    try:
        return [format_template(template, "this one", c=name) for template in templates]
    except UserError as error:
        raise UserError(f"a prompt template may only hold {{c}} (the class name): {error}") from error


def load_classifiers(paths: Sequence[str], device: torch.device) -> Tensor:
    """The mean of saved classifiers.  (E, C)"""
    loaded: list[Tensor] = []
    for path in paths:
        try:
            classifier = read_torch(path)
        except UserError as error:
            raise UserError(f"--load_clfs: {error}. Make a classifier with --save_clf.") from error
        is_matrix = is_plain(classifier) and classifier.dtype in (*FLOATS, torch.float64) and classifier.dim() == 2
        if not is_matrix or not classifier.isfinite().all():
            raise UserError(
                f"{short(path, 200)} is not a classifier: a matrix (width, classes) of finite numbers was expected."
            )
        if loaded and classifier.shape != loaded[0].shape:
            raise UserError(f"{path} is {tuple(classifier.shape)}, {paths[0]} is {tuple(loaded[0].shape)}: no mean of them.")
        loaded.append(classifier)
    mean = loaded[0] / len(loaded)
    for classifier in loaded[1:]:
        mean = mean + classifier / len(loaded)
    return mean.to(device)


def save_classifier(path: Path, classifier: Tensor) -> None:
    """Write a classifier so that --load_clfs, ours or clip_benchmark's, reads it."""
    buffer = io.BytesIO()
    torch.save(classifier, buffer)
    replace_file(path, buffer.getvalue())
