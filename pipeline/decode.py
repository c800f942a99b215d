"""From file bytes to pixels, as late and as little as the transforms allow.

Journey of a batch, 2: file bytes -> uint8 [H, W, 3]. Runs in a worker.
"""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFile

Box = tuple[float, float, float, float]
"""left, top, right, bottom in pixels of the full image; fractions are allowed."""

# A 17 kB PNG can unpack to gigabytes (Pillow warns at this many pixels and refuses at twice as many).
MAX_PIXELS = 178_956_970
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# A truncated file must be an error with its path, not an image whose lower half is grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False

BILINEAR = Image.Resampling.BILINEAR


class Picture:
    """One image on its way through the transforms; Pillow behind it.

    Every method returns a picture, so that a transform reads as what it does. Nothing is decoded before the first method
    that needs pixels.
    """

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    @property
    def size(self) -> tuple[int, int]:
        """(width, height); from the header while nothing has been decoded."""
        return self._image.size

    def resized(self, size: tuple[int, int], box: Box | None = None) -> "Picture":
        """The region `box` scaled to `size` = (width, height), bilinear and antialiased."""
        return Picture(self.pillow().resize(size, BILINEAR, box=box))

    def cropped(self, box: tuple[int, int, int, int]) -> "Picture":
        """The region `box`; outside the image it is black."""
        return Picture(self.pillow().crop(box))

    def mirrored(self) -> "Picture":
        return Picture(self.pillow().transpose(Image.Transpose.FLIP_LEFT_RIGHT))

    def pillow(self) -> Image.Image:
        """The decoded RGB image."""
        self._image = _to_rgb(self._image)
        return self._image

    def pixels(self) -> np.ndarray:
        """uint8 [H, W, 3]."""
        return np.asarray(self.pillow())


def open_pillow(data: bytes) -> Picture:
    """Read a header.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image Pillow can read.
    """
    image = Image.open(io.BytesIO(data))
    width, height = image.size
    if width * height > 2 * MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels")
    return Picture(image)


DECODERS: dict[str, Callable[[bytes], Picture]] = {"pillow": open_pillow}


def resolve(name: str) -> str:
    """The decoder `auto` stands for: the best that is installed."""
    return "pillow" if name == "auto" else name


def _to_rgb(image: Image.Image) -> Image.Image:
    """As torchvision's loader converts, except that 16-bit grey keeps its upper byte instead of being clipped to white."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
