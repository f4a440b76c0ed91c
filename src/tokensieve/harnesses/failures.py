"""Errors that a harness swallows: those of generate() are raised again, and an error ends the program with exit code 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokensieve.errors import UserError, one_line
from tokensieve.models.patching import replace


class GenerationFailed(RuntimeError):
    """generate() raised an error, so the answers of the run are not those of the model."""


@contextmanager
def end_run() -> Iterator[None]:
    """Ends the program on any error of the block, with one line and exit code 1.

    lmms-eval's command line catches every Exception, and ends with exit code 0; a script that calls it would go on.
    """
    try:
        yield
    except (GenerationFailed, UserError) as error:
        raise SystemExit(f"tokensieve: error: {error}") from error
    except Exception as error:
        raise SystemExit(f"tokensieve: error: {one_line(f'{type(error).__name__}: {error}')}") from error


@contextmanager
def raise_failures(model: Any) -> Iterator[None]:
    """Raises the first error of model.generate() at the end of the block, even if the code inside has caught it.

    After the first one no further call does any work.
    """
    failures: list[Exception] = []

    def generate(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures[0]
        try:
            return stock(*args, **kwargs)
        except Exception as error:
            failures.append(error)
            raise

    undo = replace(model, "generate", generate)
    try:
        yield
    finally:
        undo()
        if failures:
            error = failures[0]
            said = one_line(f"{type(error).__name__}: {error}")
            raise GenerationFailed(f"the model failed on a request, and no score was computed: {said}") from error
