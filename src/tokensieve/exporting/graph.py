"""A module as one graph for batches of any size: a program of torch.export, or an ONNX model with its metadata."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import UserError, one_line

KEY = "tokensieve"  # of the metadata: a JSON object
MAX_ONNX = 2**31 - 2**20  # bytes: a protobuf message has less than 2 GiB
INSTALL = "ONNX files need packages that are not installed: pip install 'tokensieve[export]'"


def check_installed(is_onnx: bool) -> None:
    """Raises a UserError if a package that writes or runs the file is missing."""
    try:
        if is_onnx:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(INSTALL) from None


def trace(encoder: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The graph of an encoder of images (B, 3, h, w), for every B; a UserError if there is none."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(encoder, (images,), dynamic_shapes=shapes)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"torch.export makes no graph of this model and plan: {one_line(error, 300)}") from error


def program_file(program: torch.export.ExportedProgram, about: Mapping[str, Any]) -> bytes:
    """The content of a .pt2 file."""
    file = io.BytesIO()
    with _quiet():
        torch.export.save(program, file, extra_files={f"{KEY}.json": json.dumps(about)})
    return file.getvalue()


def onnx_file(program: torch.export.ExportedProgram, about: Mapping[str, Any], outputs: Sequence[str]) -> bytes:
    """The content of a .onnx file; a UserError if the graph has an operator that ONNX has not, or too large weights."""
    from tokensieve.exporting.operators import translations

    try:
        with torch.no_grad(), _quiet():
            written: Any = torch.onnx.export(
                program,
                (),
                input_names=["images"],
                output_names=list(outputs),
                dynamo=True,
                verbose=False,
                custom_translation_table=translations(),
            )
    except Exception as error:
        raise UserError(f"ONNX has no graph for this model and plan: {one_line(error.__cause__ or error, 300)}") from error
    size = sum(value.const_value.nbytes for value in written.model.graph.initializers.values() if value.const_value is not None)
    if size > MAX_ONNX:
        raise UserError(f"the weights have {size / 2**30:.1f} GiB, and an ONNX file has less than 2; use --output tower.pt2")
    written.model.metadata_props[KEY] = json.dumps(about)
    content: bytes = written.model_proto.SerializeToString()
    return content


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps exporters from printing graphs and progress, and libraries from logging."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
