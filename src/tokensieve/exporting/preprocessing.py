"""The constants by which an image becomes the input of a model, read from the model's own transform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokensieve.errors import UserError


@dataclass(frozen=True)
class Preprocessing:
    """pixels = (image / 255 - mean) / std, channels first, after the image is resized and cropped to image_size."""

    image_size: tuple[int, int]  # (h, w)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str  # bicubic, bilinear, ...
    resize: tuple[int, ...]  # one number: the shorter side; two: (h, w), whatever the shape of the image
    steps: str  # the transform in words, with all of its settings

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_preprocessing(transform: Any) -> Preprocessing:
    """The constants of a transform; a UserError if it is of a kind that is not known."""
    from PIL import Image

    h, w = transform(Image.new("RGB", (64, 48))).shape[-2:]
    processor = getattr(transform, "processor", None)
    if processor is not None:
        return _of_processor(processor, (h, w))
    steps = {type(step).__name__: step for step in getattr(transform, "transforms", ())}
    resizing = next((step for name, step in steps.items() if "Resize" in name), None)
    if resizing is None or "Normalize" not in steps:
        raise UserError(f"the transform of this model, a {type(transform).__name__}, has no constants that can be written down")
    size = resizing.size
    return Preprocessing(
        image_size=(h, w),
        mean=_numbers(steps["Normalize"].mean),
        std=_numbers(steps["Normalize"].std),
        interpolation=str(getattr(resizing.interpolation, "value", resizing.interpolation)),
        resize=(size,) if isinstance(size, int) else tuple(size),
        steps=" ".join(str(transform).split()),
    )


def _of_processor(processor: Any, image_size: tuple[int, int]) -> Preprocessing:
    """Of an image processor of transformers."""
    from PIL import Image

    size: Mapping[str, int] = processor.size
    shorter = size.get("shortest_edge")
    about = processor.to_dict()
    steps = [f"{name}={about[name]}" for name in sorted(about) if name.startswith(("do_", "crop_", "size", "rescale"))]
    return Preprocessing(
        image_size=image_size,
        mean=_numbers(processor.image_mean),
        std=_numbers(processor.image_std),
        interpolation=Image.Resampling(processor.resample).name.lower(),
        resize=(shorter,) if shorter else (size["height"], size["width"]),
        steps=", ".join(steps),
    )


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(round(float(value), 8) for value in values)
