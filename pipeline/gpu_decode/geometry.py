"""Augmentation drawn in a worker, applied on the GPU: which region of an image becomes which pixels.

Journey of a batch, 3 for `loader.decoder=gpu` and `hybrid`. The transforms are those of the CPU path, with the same draws; they
run on a picture that notes what it is asked for instead of computing it.
"""

import numpy as np

from pipeline.decode import Box, Picture, open_image

# Columns of a slot's geometry, float64 [B, COLUMNS]; whole numbers below 2**53 are exact in it.
LENGTH, OFFSET, WIDTH, HEIGHT = (
    0,
    1,
    2,
    3,
)  # of the file in the slot's bytes; LENGTH 0: the row holds pixels already
CLIP_LEFT, CLIP_TOP, CLIP_RIGHT, CLIP_BOTTOM = 4, 5, 6, 7  # the source pixels that may be used
SOURCE_LEFT, SOURCE_TOP, SCALE_X, SCALE_Y = (
    8,
    9,
    10,
    11,
)  # source point = SOURCE + SCALE * (target pixel + 0.5)
MIRRORED = 12
ADDRESS, PITCH = 13, 14  # of the source pixels on the device; the training process fills them in
COLUMNS = 16

# What a hardware JPEG decoder takes: baseline, 8 bits, three components as 4:4:4, 4:2:2, 4:2:0 or 4:4:0.
CHROMA = {
    ((1, 1), (1, 1), (1, 1)),
    ((2, 1), (1, 1), (1, 1)),
    ((2, 2), (1, 1), (1, 1)),
    ((1, 2), (1, 1), (1, 1)),
}


class NeedsPixelsError(Exception):
    """A transform wants pixels: this image cannot be left to the GPU."""


class NotedPicture(Picture):
    """A picture without pixels: a size, and where it comes from in the file's image.

    Args:
        size: (width, height).
        clip: the source pixels that may be used.
        source: left, top of the region, and source pixels per pixel of this picture in x and y.
        mirrored: left and right are exchanged, after everything else.
    """

    def __init__(
        self,
        size: tuple[int, int],
        clip: Box,
        source: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
        *,
        mirrored: bool = False,
    ) -> None:
        self._size, self._clip, self._source, self._mirrored = size, clip, source, mirrored

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def resized(self, size: tuple[int, int], box: Box | None = None, *, quick: bool = False) -> "NotedPicture":
        if self._source != (0.0, 0.0, 1.0, 1.0) or self._mirrored:
            raise NeedsPixelsError  # a second resize is not one resize
        left, top, right, bottom = box = box or (0, 0, *self.size)
        return NotedPicture(size, box, (left, top, (right - left) / size[0], (bottom - top) / size[1]))

    def cropped(self, box: Box) -> "NotedPicture":
        left, top, right, bottom = box
        if left < 0 or top < 0 or right > self.size[0] or bottom > self.size[1]:
            raise NeedsPixelsError  # black borders
        if self._mirrored:
            left, right = self.size[0] - right, self.size[0] - left
        x, y, scale_x, scale_y = self._source
        source = (x + scale_x * left, y + scale_y * top, scale_x, scale_y)
        return NotedPicture((right - left, bottom - top), self._clip, source, mirrored=self._mirrored)

    def mirrored(self) -> "NotedPicture":
        return NotedPicture(self._size, self._clip, self._source, mirrored=not self._mirrored)

    def pixels(self) -> np.ndarray:
        raise NeedsPixelsError

    def write(self, row: np.ndarray) -> None:
        """Note CLIP, SOURCE, SCALE and MIRRORED in a row of the geometry, float64 [COLUMNS]."""
        row[CLIP_LEFT : CLIP_BOTTOM + 1] = self._clip
        row[SOURCE_LEFT : SCALE_Y + 1] = self._source
        row[MIRRORED] = self._mirrored


def open_noted(data: bytes) -> NotedPicture | None:
    """A picture to note transforms on, or None for a file that the decoder engines do not take.

    The engines do not say that a file ends early, so its end marker is looked for here.

    Raises:
        OSError, ValueError, SyntaxError: not an image Pillow can read.
    """
    image = open_image(data)
    if image.format != "JPEG" or image.mode != "RGB" or "progressive" in image.info or image.info.get("adobe_transform") == 0:
        return None
    layers = tuple((horizontal, vertical) for _, horizontal, vertical, _ in image.layer)  # type: ignore[attr-defined]
    if layers not in CHROMA or b"\xff\xd9" not in data[-64:]:
        return None
    return NotedPicture(image.size, (0, 0, *image.size))


def identity(rows: np.ndarray, side: int) -> None:
    """Note rows, float64 [..., COLUMNS], whose pixels lie in the batch already: every pixel is itself."""
    rows[...] = 0.0
    rows[..., [CLIP_RIGHT, CLIP_BOTTOM]] = side
    rows[..., [SCALE_X, SCALE_Y]] = 1.0
