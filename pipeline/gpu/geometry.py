"""Augmentation drawn in a worker and applied on the GPU: the region of the image for each pixel.

Journey of a batch, 3 for `loader.decoder=gpu` and `hybrid`. The transforms are those of the CPU
path, with the same random numbers. They run on a picture that records operations instead of
computing them.
"""

from typing import NamedTuple

import numpy as np

from conf.schema import MAX_PIXELS
from pipeline.decode import (
    START_OF_SCAN,
    Box,
    Picture,
    can_skip,
    check_length,
    check_size,
    colour_frame,
    has_end,
    open_image,
)

# Columns of a slot's geometry, float64 [B, COLUMNS]; integers below 2**53 are exact.
# The file of the row; LENGTH 0: the row holds pixels.
LENGTH, OFFSET, WIDTH, HEIGHT = 0, 1, 2, 3
# Source pixels that may be read.
CLIP_LEFT, CLIP_TOP, CLIP_RIGHT, CLIP_BOTTOM = 4, 5, 6, 7
# Source point = SOURCE + SCALE * (target pixel + 0.5).
SOURCE_LEFT, SOURCE_TOP, SCALE_X, SCALE_Y = 8, 9, 10, 11
MIRRORED = 12
# Source pixels on the device; written by the training process.
ADDRESS, PITCH = 13, 14
BICUBIC = 15  # 0: bilinear
COLUMNS = 16

# Second bytes of JPEG markers.
BASELINE, QUANTISATION, JFIF = 0xC0, 0xDB, 0xE0
ADOBE = 0xEE  # may say that the components are red, green and blue
# Sampling factors that hardware JPEG decoders support: 4:4:4, 4:2:2, 4:2:0 and 4:4:0. The files
# must also be baseline, with 8 bits and three components.
CHROMA = {
    ((1, 1), (1, 1), (1, 1)),
    ((2, 1), (1, 1), (1, 1)),
    ((2, 2), (1, 1), (1, 1)),
    ((1, 2), (1, 1), (1, 1)),
}


class NeedsPixelsError(Exception):
    """A transform needs pixels: a worker must decode this image."""


class NotedPicture(Picture):
    """A picture without pixels: its size and its region of the image in the file.

    Args:
        size: (width, height).
        clip: the source pixels that may be read.
        source: left and top of the region, source pixels per pixel of this picture in x and y.
        bicubic: the filter of the resize.
        mirrored: flip left and right after everything else.
    """

    def __init__(
        self,
        size: tuple[int, int],
        clip: Box,
        source: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
        *,
        bicubic: bool = False,
        mirrored: bool = False,
    ) -> None:
        self._size, self._clip, self._source = size, clip, source
        self._bicubic, self._mirrored = bicubic, mirrored

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def resized(
        self,
        size: tuple[int, int],
        box: Box | None = None,
        *,
        interpolation: str = "bilinear",
        quick: bool = False,
    ) -> "NotedPicture":
        if self._source != (0.0, 0.0, 1.0, 1.0) or self._mirrored:
            raise NeedsPixelsError  # two resizes are not equal to one
        left, top, right, bottom = box = box or (0, 0, *self.size)
        source = (left, top, (right - left) / size[0], (bottom - top) / size[1])
        return NotedPicture(size, box, source, bicubic=interpolation == "bicubic")

    def cropped(self, box: Box) -> "NotedPicture":
        left, top, right, bottom = box
        if left < 0 or top < 0 or right > self.size[0] or bottom > self.size[1]:
            raise NeedsPixelsError  # black borders
        if self._mirrored:
            left, right = self.size[0] - right, self.size[0] - left
        x, y, scale_x, scale_y = self._source
        source = (x + scale_x * left, y + scale_y * top, scale_x, scale_y)
        return self._with((right - left, bottom - top), source, mirrored=self._mirrored)

    def mirrored(self) -> "NotedPicture":
        return self._with(self._size, self._source, mirrored=not self._mirrored)

    def _with(
        self, size: tuple[int, int], source: tuple[float, float, float, float], *, mirrored: bool
    ) -> "NotedPicture":
        return NotedPicture(size, self._clip, source, bicubic=self._bicubic, mirrored=mirrored)

    def pixels(self) -> np.ndarray:
        raise NeedsPixelsError

    def write(self, row: np.ndarray) -> None:
        """Write CLIP, SOURCE, SCALE, MIRRORED and BICUBIC into a row, float64 [COLUMNS]."""
        row[CLIP_LEFT : CLIP_BOTTOM + 1] = self._clip
        row[SOURCE_LEFT : SCALE_Y + 1] = self._source
        row[MIRRORED] = self._mirrored
        row[BICUBIC] = self._bicubic


def open_noted(data: bytes, max_pixels: int = MAX_PIXELS) -> NotedPicture | None:
    """A picture that records transforms, or None if the JPEG engines do not support the file.

    The engines do not report a truncated file, so this looks for its end marker, and compares its
    length with its size.

    Args:
        max_pixels: data.max_pixels.

    Raises:
        OSError, ValueError, SyntaxError: Pillow cannot read the image, or it is too large.
    """
    header = _plain_header(data) or _header_by_pillow(data, max_pixels)
    if header is None or header.sampling not in CHROMA or not has_end(data):
        return None
    check_size(header.size, max_pixels)
    check_length(data, header.size, [factor for pair in header.sampling for factor in pair], bits=2)
    return NotedPicture(header.size, (0, 0, *header.size))


class _Header(NamedTuple):
    """The header of a baseline JPEG with three components: brightness and two colours."""

    size: tuple[int, int]  # (width, height) in pixels
    sampling: tuple[tuple[int, int], ...]  # (across, down) of each component


def _header_by_pillow(data: bytes, max_pixels: int) -> _Header | None:
    """Read a header; None if the file is of another kind.

    Raises:
        OSError, ValueError, SyntaxError: Pillow cannot read the image, or it is too large.
    """
    image = open_image(data, max_pixels)
    if (
        image.format != "JPEG"
        or image.mode != "RGB"
        or "progressive" in image.info
        or image.info.get("adobe_transform") == 0
    ):
        return None
    layers = image.layer  # type: ignore[attr-defined]
    return _Header(image.size, tuple((across, down) for _, across, down, _ in layers))


def _plain_header(data: bytes) -> _Header | None:
    """Read the header of a usual file; None if anything in it is unusual: then Pillow reads it.

    Pillow takes 50 us of the 300 that a worker needs for a file that stays encoded.
    """
    header, at = None, 2 if data.startswith(b"\xff\xd8") else len(data)
    while data.startswith(b"\xff", at) and at + 4 <= len(data):
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if end > len(data):
            return None
        if marker == START_OF_SCAN:
            return header if length == 12 and data[at + 4] == 3 else None
        if marker == BASELINE:
            if header is not None or length != 17:
                return None
            frame = colour_frame(data, at)
            if frame is None:
                return None
            header = _Header(*frame)
        elif not _is_usual(data, at, marker, length):
            return None
        at = end
    return None


def _is_usual(data: bytes, at: int, marker: int, length: int) -> bool:
    """Whether a segment of a header, other than the frame, is one that Pillow accepts."""
    if marker == QUANTISATION:  # whole tables of bytes, numbered 0 to 3
        count, rest = divmod(length - 2, 65)
        numbers = data[at + 4 : at + 2 + length : 65]
        return rest == 0 and len(numbers) == count and all(number < 4 for number in numbers)
    if marker == JFIF:
        return length == 16
    return marker != ADOBE and can_skip(data, at)
