"""Images that the page has sent: checked, decoded and kept in memory, the latest of them."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict

from PIL import Image

from tokensieve.data.images import FORMATS, BrokenImage, open_photo
from tokensieve.errors import UserError

MAX_UPLOAD = 32_000_000  # bytes
MAX_PIXELS = 50_000_000
MEMORY = 400_000_000  # bytes of decoded images; the latest that go together are kept in any case
PREVIEW = 1200  # pixels of the longer side, of what the page shows


class Uploads:
    """Decoded images by the hash of their file. Several threads may use it.

    Attributes:
        together: images that one request may name, which are kept however large they are.
    """

    def __init__(self) -> None:
        self.together = 1
        self._images: OrderedDict[str, Image.Image] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, content: bytes) -> tuple[str, Image.Image]:
        """Keeps an image; its name and the image. A UserError if it cannot be decoded or is too large."""
        name = hashlib.sha256(content).hexdigest()[:32]
        image = self._find(name)
        if image is None:
            try:
                image = open_photo(io.BytesIO(content), MAX_PIXELS)
            except BrokenImage as error:
                raise UserError(f"this file cannot be used: {error}. Use a {', '.join(FORMATS[:5])} image") from error
            with self._lock:
                self._images[name] = image
                kept = self._images.values()
                while len(kept) > self.together and sum(3 * one.width * one.height for one in kept) > MEMORY:
                    self._images.popitem(last=False)
        return name, image

    def get(self, name: str) -> Image.Image:
        """An image by its name; a UserError if it is gone."""
        image = self._find(name)
        if image is None:
            raise GoneError("this image is no longer in memory: send it again")
        return image

    def _find(self, name: str) -> Image.Image | None:
        with self._lock:
            if name in self._images:
                self._images.move_to_end(name)
            return self._images.get(name)


class GoneError(UserError):
    """An image that was sent before and is not kept any more. The page sends it again."""


def preview(image: Image.Image) -> bytes:
    """The image as the page shows it: a PNG of at most PREVIEW pixels a side, made of the decoded pixels alone."""
    shown = image.copy()
    shown.thumbnail((PREVIEW, PREVIEW))
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()
