"""File bytes to pixels, decoded as late and as little as the transforms allow.

Journey of a batch, 2: file bytes -> uint8 [H, W, 3], or only the region of a crop, in a worker.

A JPEG is a grid of frequency blocks, so a decoder can output it at 1/2, 1/4 or 1/8 of its size for
less work, and skip blocks outside a region (pipeline/region.py). `resized` uses both. Pillow
decodes all files that are not a plain colour JPEG.
"""

import importlib.util
import io
import math
import struct
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageFile

from conf.schema import UserError
from pipeline import region

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
INTERPOLATIONS = ("bilinear", "bicubic")

# A 17 kB PNG can unpack to gigabytes. Pillow warns above this number of pixels, and refuses above
# twice this number.
MAX_PIXELS = 178_956_970
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# The accepted file contents, whatever the name. Pillow reads many other formats: for EPS it starts
# Ghostscript, which runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Second bytes of JPEG markers: a Huffman-coded frame (baseline, extended, progressive); segments
# that can precede it (tables, restart interval, application data, comment).
FRAMES = (0xC0, 0xC1, 0xC2)
SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
# A truncated file must be an error with its path, not an image whose lower half is grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False


class Picture:
    """An image between two transforms. Every method returns a new picture.

    Attributes:
        failure: why the file cannot be decoded, after an attempt that raised this error. It tells
            an error of the file from one of a transform.
    """

    failure: Exception | None = None

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self._pixels.shape[1], self._pixels.shape[0]

    def resized(
        self,
        size: tuple[int, int],
        box: Box | None = None,
        *,
        interpolation: str = "bilinear",
        quick: bool = False,
    ) -> "Picture":
        """Crop and resize as torchvision does, with antialiasing.

        Args:
            size: (width, height) of the result.
            box: region of this picture; None is all of it.
            interpolation: one of INTERPOLATIONS.
            quick: let the JPEG decoder shrink the image by 2, 4 or 8 first: much less work on large
                photos, a little softer.
        """
        left, top, right, bottom = box or (0, 0, *self.size)
        return Picture(resize(self.pixels()[top:bottom, left:right], size, interpolation))

    def cropped(self, box: Box) -> "Picture":
        """Crop the region `box`; pixels outside the image are black."""
        left, top, right, bottom = box
        width, height = self.size
        if left >= 0 and top >= 0 and right <= width and bottom <= height:
            return Picture(self.pixels()[top:bottom, left:right])
        made = np.zeros((bottom - top, right - left, 3), np.uint8)
        x0, x1 = max(left, 0), min(right, width)
        y0, y1 = max(top, 0), min(bottom, height)
        made[y0 - top : y1 - top, x0 - left : x1 - left] = self.pixels()[y0:y1, x0:x1]
        return Picture(made)

    def mirrored(self) -> "Picture":
        # numpy copies a reversed axis pixel by pixel: 150 us for 224 px, torch takes 18 us.
        return Picture(as_tensor(self.pixels()).flip(1).numpy())

    def pixels(self) -> np.ndarray:
        """Return uint8 [H, W, 3]; may be read-only or shared: copy it before writing."""
        return self._pixels

    def pillow(self) -> Image.Image:
        return Image.fromarray(self.pixels())


class EncodedPicture(Picture):
    """A colour JPEG whose header alone has been read.

    Args:
        data: content of the file.
        size: (width, height).
        decode: from DECODERS.
    """

    def __init__(self, data: bytes, size: tuple[int, int], decode: "Decode") -> None:
        self._data, self._size, self._decode = data, size, decode

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
    ) -> Picture:
        box = box or (0, 0, *self.size)
        scale = reduction(box, size) if quick else 1
        if scale == 1:
            return Picture(resize(self._region(box, 1), size, interpolation))
        # The region's edges lie between pixels of the smaller image, so Pillow gets fractions.
        outer = box[0] // scale, box[1] // scale, -(-box[2] // scale), -(-box[3] // scale)
        region = Image.fromarray(np.ascontiguousarray(self._region(outer, scale)))
        left, top = box[0] / scale - outer[0], box[1] / scale - outer[1]
        right = min(box[2] / scale - outer[0], region.width)
        bottom = min(box[3] / scale - outer[1], region.height)
        inner = (left, top, right, bottom)
        filter = Image.Resampling[interpolation.upper()]
        return Picture(np.asarray(region.resize(size, filter, box=inner)))

    def pixels(self) -> np.ndarray:
        return self._region((0, 0, *self.size), 1)

    def _region(self, box: Box, scale: int) -> np.ndarray:
        """Decode the region `box` of the image at 1 / scale: uint8 [h, w, 3]."""
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"the region {box} is empty")  # an error of the transform
        try:
            return self._decode_or_fall_back(box, scale)
        except Exception as error:
            self.failure = error
            raise

    def _decode_or_fall_back(self, box: Box, scale: int) -> np.ndarray:
        try:
            return self._decode(self._data, box, scale)
        except DecodeError:  # Pillow reads more files, and its errors are clearer
            return decode_pillow(self._data, box, scale)


# (file, box, scale) -> uint8 [bottom - top, right - left, 3]: the region `box` of the image at
# 1 / scale; `box` is in pixels of that smaller image.
Decode = Callable[[bytes, Box, int], np.ndarray]


class DecodeError(Exception):
    """A quick decoder cannot decode this file."""


def has_end(data: bytes) -> bool:
    """Whether a JPEG has its end marker, which a truncated file lacks; a few bytes may follow."""
    return b"\xff\xd9" in data[-64:]


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Resize with the kernel of torchvision's resize of uint8 tensors, with antialiasing.

    Within 2 levels of Pillow's, which has the same filters and takes five times as long.

    Args:
        pixels: uint8 [H, W, 3].
        size: (width, height) of the result.
        interpolation: one of INTERPOLATIONS.
    """
    if pixels.shape[1::-1] == size:
        return pixels
    # In this order the result keeps the layout [H, W, 3] in memory; otherwise copying it into the
    # batch takes 110 us instead of 2.
    planes = as_tensor(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(planes, size[::-1], mode=interpolation, antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    """Return a tensor on the same memory. Do not write to it: it may be read-only memory of Pillow.

    For read-only memory, torch.from_numpy would print a warning.
    """
    return torch.from_dlpack(pixels)


def reduction(box: Box, size: tuple[int, int]) -> int:
    """Return the largest of 1, 2, 4, 8 by which the region can shrink and still cover `size`."""
    factor = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    return 1 << min(3, max(0, int(math.log2(factor)) if factor >= 1 else 0))


def open_image(data: bytes) -> Image.Image:
    """Read the header of a file in one of FORMATS; Pillow decodes the pixels at their first use.

    Raises:
        PIL.UnidentifiedImageError: the content has another format, or is no image.
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: the header is damaged, or
            the image is too large.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)


def open_picture(data: bytes, decoder: str) -> Picture:
    """Read the header of a file; decode the file unless it is a plain colour JPEG.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: Pillow cannot read it.
    """
    size = colour_jpeg_size(data)
    if size:
        return EncodedPicture(data, size, DECODERS[decoder])
    image = open_image(data)
    width, height = image.size
    if width * height > 2 * MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels")
    if image.format == "JPEG" and image.mode == "RGB":
        return EncodedPicture(data, image.size, DECODERS[decoder])
    return Picture(np.asarray(_to_rgb(image)))


def colour_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Read (width, height) of a common colour JPEG; None if Pillow has to open the file.

    Pillow takes 50 us to read a header, as long as flipping three images.
    """
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            usual = bits == 8 and components == 3 and 0 < width * height <= MAX_PIXELS
            return (width, height) if usual else None
        if marker not in SKIPPED or data[at + 4 : at + 8] == b"MPF\0":  # several images
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def decode_pillow(data: bytes, box: Box, scale: int) -> np.ndarray:
    image = open_image(data)
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    return np.asarray(image.crop(box))


def decode_simplejpeg(data: bytes, box: Box, scale: int) -> np.ndarray:
    import simplejpeg

    try:
        if scale == 1:
            return simplejpeg.decode_jpeg(data)[box[1] : box[3], box[0] : box[2]]
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        height, width = -(-height // scale), -(-width // scale)
        small = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, min_factor=scale)
    except ValueError as error:
        raise DecodeError from error
    if small.shape[0] != height:
        raise DecodeError
    return small[box[1] : box[3], box[0] : box[2]]


def decode_region(data: bytes, box: Box, scale: int) -> np.ndarray:
    decoder = region.load()
    assert not isinstance(decoder, str), "resolve() returns only installed decoders"
    if not has_end(data):  # the region may be there, but a truncated file is an error
        raise DecodeError
    left, top, right, bottom = box
    pixels = np.empty((bottom - top, right - left, 3), np.uint8)
    if not decoder(data, box, scale, pixels.ctypes.data):
        raise DecodeError
    return pixels


# Fastest first.
DECODERS: dict[str, Decode] = {
    "region": decode_region,
    "simplejpeg": decode_simplejpeg,
    "pillow": decode_pillow,
}
ON_GPU = ("gpu", "hybrid")  # values of loader.decoder that use the GPU's JPEG engines


def installed() -> list[str]:
    """Return the installed decoders, fastest first."""
    usable = {
        "region": not isinstance(region.load(), str),
        "simplejpeg": importlib.util.find_spec("simplejpeg") is not None,
        "pillow": True,
    }
    return [name for name in DECODERS if usable[name]]


def resolve(name: str) -> str:
    """Return the name of a CPU decoder; `auto` is the fastest installed one.

    Raises:
        UserError: the decoder is not installed.
    """
    usable = installed()
    if name == "auto":
        return usable[0]
    if name not in usable:
        remedy = {
            "simplejpeg": "pip install simplejpeg",
            "region": region.load(),
        }[name]
        raise UserError(
            f"loader.decoder={name}: not installed; {remedy}, "
            f"or use one of auto, {', '.join(usable)}"
        )
    return name


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert as torchvision's loader, but keep the upper byte of 16-bit grey, unclipped."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
