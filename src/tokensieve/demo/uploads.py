"""Images that the page has sent: checked, decoded and kept in memory, the latest of them."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict

from PIL import Image

from tokensieve.data.images import FORMATS, BrokenImage, open_photo
from tokensieve.errors import UserError

MAX_UPLOAD = 32_000_000  # bytes
MAX_PIXELS = 50_000_000
MEMORY = 400_000_000  # bytes of decoded images; the latest one is kept in any case
PREVIEW = 1200  # pixels of the longer side, of what the page shows


class Uploads:
    """Decoded images by the hash of their file."""

    def __init__(self) -> None:
        self._images: OrderedDict[str, Image.Image] = OrderedDict()

    def add(self, content: bytes) -> tuple[str, Image.Image]:
        """Keeps an image; its name and the image. A UserError if it cannot be decoded or is too large."""
        name = hashlib.sha256(content).hexdigest()[:32]
        if name not in self._images:
            try:
                self._images[name] = open_photo(io.BytesIO(content), MAX_PIXELS)
            except BrokenImage as error:
                raise UserError(f"this file cannot be used: {error}. Use a {', '.join(FORMATS[:5])} image") from error
        self._images.move_to_end(name)
        while len(self._images) > 1 and sum(3 * image.width * image.height for image in self._images.values()) > MEMORY:
            self._images.popitem(last=False)
        return name, self._images[name]

    def get(self, name: str) -> Image.Image:
        """An image by its name; a UserError if it is gone."""
        image = self._images.get(name)
        if image is None:
            raise GoneError("this image is no longer in memory: send it again")
        self._images.move_to_end(name)
        return image


class GoneError(UserError):
    """An image that was sent before and is not kept any more. The page sends it again."""


def preview(image: Image.Image) -> bytes:
    """The image as the page shows it: a PNG of at most PREVIEW pixels a side, made of the decoded pixels alone."""
    shown = image.copy()
    shown.thumbnail((PREVIEW, PREVIEW))
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()
