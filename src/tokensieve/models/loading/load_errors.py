"""What goes wrong while a library loads a model, as one line for the user."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tokensieve.errors import UserError, one_line
from tokensieve.installation.packages import missing_package
from tokensieve.models.loading.hub import hub_host


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings of the libraries as short notes; keep their log lines off the terminal."""
    notes: list[str] = []
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield notes
        notes.extend(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
    finally:
        logging.disable(disabled)


@contextmanager
def translate_load_errors(model: str, pretrained: str) -> Iterator[None]:
    """Turn what goes wrong in loading into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        if (told := missing_package(error)) is not None:
            raise told from error
        text = one_line(error)
        named = [package for package in ("sentencepiece", "protobuf", "tiktoken") if package in text.lower()]
        hint = f"type pip install {named[0]}" if named else text[:200]
        raise UserError(f"{model} needs a package that is not installed: {hint}") from error
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        text = one_line(error)
        raise UserError(
            f"{pretrained or model} is damaged, or more than tensors (which could run code): {text[:200]}"
        ) from error
    except (RuntimeError, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        text = one_line(error)
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise UserError(
                f"{pretrained or model} is damaged, or more than tensors (which could run code): {text[:200]}"
            ) from error
        if "loading state_dict" in text or isinstance(error, (LookupError, TypeError, AttributeError, StopIteration)):
            raise UserError(f"the weights {pretrained or 'there'} do not fit {model}: {text[:200]}") from error
        from huggingface_hub import constants

        here = os.path.isdir(model) or os.path.isfile(pretrained)
        offline = f" ({hub_host()} cannot be reached)" if constants.HF_HUB_OFFLINE and not here else ""
        weights = f" with weights {pretrained!r}" if pretrained else ""
        raise UserError(f"cannot load {model}{weights}{offline}: {text[:200]}") from error
