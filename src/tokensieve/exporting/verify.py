"""A file against the model that it was made from, on random images in batches of several sizes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError

BATCHES = (1, 2, 5)
LARGEST = 1e-4  # difference of an image, relative to the largest number of the model's output
MAX_OTHER = 1  # images for which near-ties may be decided otherwise, out of all of BATCHES

Run = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Agreement:
    """How near the outputs of a file are to those of the model."""

    images: int
    difference: float  # the largest of the images that agree, relative to the largest number of the output
    other: int  # images for which the file chose other tokens


def run_onnx(content: bytes) -> Run:
    """ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: [torch.from_numpy(output) for output in session.run(None, {name: images.numpy()})]


def run_program(content: bytes) -> Run:
    """A saved program of torch.export."""
    module = torch.export.load(io.BytesIO(content)).module()

    def run(images: Tensor) -> Sequence[Tensor]:
        out = module(images)
        return [out] if isinstance(out, Tensor) else list(out)

    return run


def difference(got: Tensor, wanted: Tensor) -> Tensor:
    """How far each image of an output is from the model's, (B, ...) -> (B,): relative to the largest number of the model.

    Numbers of tokens are equal or infinitely far.
    """
    if not wanted.is_floating_point():
        return torch.where((got != wanted).flatten(1).any(1), torch.inf, 0.0)
    return (got.float() - wanted.float()).flatten(1).abs().amax(1) / wanted.float().abs().amax()


def compare(run: Run, encoder: nn.Module, handle: Handle, image_size: tuple[int, int], seed: int = 0) -> Agreement:
    """The agreement of a file with its encoder; a UserError if there is none.

    Rounding differs between engines, so of two tokens with nearly equal scores the file may choose the other one. That is
    allowed for a single image.
    """
    generator = torch.Generator().manual_seed(seed)
    differences: list[float] = []
    for batch in BATCHES:
        images = torch.randn(batch, 3, *image_size, generator=generator)
        # a graph counts the images of each batch from 0
        with torch.no_grad(), handle.call(samples=torch.arange(batch)):
            out = encoder(images)
        wanted, got = [out] if isinstance(out, Tensor) else list(out), list(run(images))
        if [tuple(x.shape) for x in got] != [tuple(x.shape) for x in wanted]:
            shapes = [" and ".join(str(tuple(x.shape)) for x in outputs) for outputs in (got, wanted)]
            raise UserError(f"the file gives {shapes[0]} for {batch} images, the model {shapes[1]}")
        of_outputs = torch.stack([difference(x, y) for x, y in zip(got, wanted, strict=True)])
        differences += of_outputs.amax(0).tolist()  # the largest of all outputs; NaN, if there is one
    other = sum(not each <= LARGEST for each in differences)
    if other > MAX_OTHER:
        raise UserError(
            f"the exported graph does not agree with the model: for {other} of {len(differences)} random images the outputs "
            f"differ by up to {max(differences):.2g} of the largest number. Nothing was written."
        )
    return Agreement(len(differences), max(each for each in differences if each <= LARGEST), other)
