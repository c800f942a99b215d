"""From file bytes to pixels, as late and as little as the transforms allow.

Journey of a batch, 2: file bytes -> uint8 [H, W, 3], or only the part a crop needs. Runs in a worker.

A JPEG is a grid of frequency blocks, so a decoder can give it at 1/2, 1/4 or 1/8 of its size for less work, and TurboJPEG can
leave out blocks outside a region. `resized` asks for both. What is not a plain colour JPEG goes through Pillow.
"""

import ctypes
import ctypes.util
import importlib.util
import io
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile

from conf.schema import UserError

Box = tuple[int, int, int, int]
"""left, top, right, bottom in pixels."""

# A 17 kB PNG can unpack to gigabytes (Pillow warns at this many pixels and refuses at twice as many).
MAX_PIXELS = 178_956_970
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# What a file may be, whatever its name. Pillow reads many other formats: for EPS it starts Ghostscript, which runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# A truncated file must be an error with its path, not an image whose lower half is grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False


class Picture:
    """One image on its way through the transforms. Every method gives another picture."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self._pixels.shape[1], self._pixels.shape[0]

    def resized(self, size: tuple[int, int], box: Box | None = None, *, quick: bool = False) -> "Picture":
        """The region `box` scaled to `size` = (width, height), bilinear and antialiased, as torchvision crops and resizes.

        With `quick`, a JPEG's decoder may shrink it first by 2, 4 or 8: much less work on large photos, a little softer.
        """
        left, top, right, bottom = box or (0, 0, *self.size)
        return Picture(resize(self.pixels()[top:bottom, left:right], size))

    def cropped(self, box: Box) -> "Picture":
        """The region `box`; outside the image it is black."""
        left, top, right, bottom = box
        width, height = self.size
        if left >= 0 and top >= 0 and right <= width and bottom <= height:
            return Picture(self.pixels()[top:bottom, left:right])
        made = np.zeros((bottom - top, right - left, 3), np.uint8)
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        made[y0 - top : y1 - top, x0 - left : x1 - left] = self.pixels()[y0:y1, x0:x1]
        return Picture(made)

    def mirrored(self) -> "Picture":
        # numpy copies a reversed axis pixel by pixel: 150 us for 224 px, torch takes 18
        return Picture(as_tensor(self.pixels()).flip(1).numpy())

    def pixels(self) -> np.ndarray:
        """uint8 [H, W, 3]; may be read-only or shared: copy it before you write."""
        return self._pixels

    def pillow(self) -> Image.Image:
        return Image.fromarray(self.pixels())

    @classmethod
    def of_pillow(cls, image: Image.Image) -> "Picture":
        return cls(np.asarray(image))


class EncodedPicture(Picture):
    """A colour JPEG of which only the header has been read.

    Args:
        data: the file.
        size: (width, height).
        decode: from DECODERS.
    """

    def __init__(self, data: bytes, size: tuple[int, int], decode: "Decode") -> None:
        self._data, self._size, self._decode = data, size, decode

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def resized(self, size: tuple[int, int], box: Box | None = None, *, quick: bool = False) -> Picture:
        box = box or (0, 0, *self.size)
        scale = reduction(box, size) if quick else 1
        if scale == 1:
            return Picture(resize(self._part(box, 1), size))
        # The region's edges lie between the pixels of the smaller image, which Pillow's resize takes as fractions.
        outer = box[0] // scale, box[1] // scale, -(-box[2] // scale), -(-box[3] // scale)
        part = Image.fromarray(np.ascontiguousarray(self._part(outer, scale)))
        left, top = box[0] / scale - outer[0], box[1] / scale - outer[1]
        right, bottom = min(box[2] / scale - outer[0], part.width), min(box[3] / scale - outer[1], part.height)
        return Picture(np.asarray(part.resize(size, Image.Resampling.BILINEAR, box=(left, top, right, bottom))))

    def pixels(self) -> np.ndarray:
        return self._part((0, 0, *self.size), 1)

    def _part(self, box: Box, scale: int) -> np.ndarray:
        """The region `box` of the image at 1 / scale: uint8 [h, w, 3]."""
        try:
            return self._decode(self._data, box, scale)
        except DecodeError:  # Pillow reads more than the quick decoders do, and its errors say more
            return decode_pillow(self._data, box, scale)


Decode = Callable[[bytes, Box, int], np.ndarray]
"""(file, box, scale) -> uint8 [bottom - top, right - left, 3]: the image at 1 / scale, cut to `box` of that smaller image."""


class DecodeError(Exception):
    """A quick decoder does not take this file."""


def resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [height, width, 3], bilinear with antialiasing: the kernel torchvision's resize calls."""
    if pixels.shape[1::-1] == size:
        return pixels
    # In this order the result keeps the layout of rows of pixels; else copying it into the batch takes 110 us instead of 2.
    planes = as_tensor(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(planes, size[::-1], mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    """The same memory. It may be Pillow's, which is read-only, and of which from_numpy would warn: do not write into it."""
    return torch.from_dlpack(pixels)


def reduction(box: Box, size: tuple[int, int]) -> int:
    """How many times smaller, 1, 2, 4 or 8, the region may be decoded and still not be smaller than the result."""
    factor = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    return 1 << min(3, max(0, int(math.log2(factor)) if factor >= 1 else 0))


def open_image(data: bytes) -> Image.Image:
    """Read the header of a file in one of FORMATS; its pixels are decoded when they are asked for.

    Raises:
        PIL.UnidentifiedImageError: the content is of another format, or no image.
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: the header is damaged, or the image is too large.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)


def open_picture(data: bytes, decoder: str) -> Picture:
    """Read the header of a file; decode it when it is not a plain colour JPEG.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image Pillow can read.
    """
    image = open_image(data)
    width, height = image.size
    if width * height > 2 * MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels")
    if image.format == "JPEG" and image.mode == "RGB":
        return EncodedPicture(data, image.size, DECODERS[decoder])
    return Picture(np.asarray(_to_rgb(image)))


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
        small = simplejpeg.decode_jpeg(data, min_height=-(-height // scale), min_width=-(-width // scale), min_factor=scale)
    except ValueError as error:
        raise DecodeError from error
    if small.shape[0] != -(-height // scale):
        raise DecodeError
    return small[box[1] : box[3], box[0] : box[2]]


class _Turbo:
    """TurboJPEG 3 through ctypes: the one library that can leave out what lies outside a region."""

    INIT_DECOMPRESS, SUBSAMPLING, WIDTH, RGB = 1, 4, 5, 0  # from turbojpeg.h
    # Width of a block row's unit (iMCU) for 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1
    UNIT = (8, 16, 16, 8, 8, 32, 8)

    class Factor(ctypes.Structure):
        _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]

    class Region(ctypes.Structure):
        _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int)]

    def __init__(self, library: ctypes.CDLL) -> None:
        void, integer, text, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
        signatures = {
            "tj3Init": (void, [integer]),
            "tj3DecompressHeader": (integer, [void, text, size]),
            "tj3Get": (integer, [void, integer]),
            "tj3SetScalingFactor": (integer, [void, self.Factor]),
            "tj3SetCroppingRegion": (integer, [void, self.Region]),
            "tj3Decompress8": (integer, [void, text, size, void, integer, integer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)  # AttributeError before version 3
            function.restype, function.argtypes = result, arguments
        self.library = library
        self.handle = library.tj3Init(self.INIT_DECOMPRESS)

    def decode(self, data: bytes, box: Box, scale: int) -> np.ndarray:
        tj, handle = self.library, self.handle
        tj.tj3SetCroppingRegion(handle, self.Region(0, 0, 0, 0))  # forget the last image's before its header is replaced
        tj.tj3SetScalingFactor(handle, self.Factor(1, 1))
        if tj.tj3DecompressHeader(handle, data, len(data)) or tj.tj3SetScalingFactor(handle, self.Factor(1, scale)):
            raise DecodeError
        subsampling = tj.tj3Get(handle, self.SUBSAMPLING)
        if not 0 <= subsampling < len(self.UNIT):
            raise DecodeError
        left, top, right, bottom = box
        unit = max(1, self.UNIT[subsampling] // scale)
        # A region begins where a block begins. A few columns more give the colours at its edges the neighbours they are
        # interpolated from, so that the pixels are those of the whole image.
        start = max(0, left - 1) // unit * unit
        end = min(right + 2, -(-tj.tj3Get(handle, self.WIDTH) // scale))
        if tj.tj3SetCroppingRegion(handle, self.Region(start, top, end - start, bottom - top)):
            raise DecodeError
        pixels = np.empty((bottom - top, end - start, 3), np.uint8)
        if tj.tj3Decompress8(handle, data, len(data), pixels.ctypes.data, 0, self.RGB):
            raise DecodeError
        return pixels[:, left - start : right - start]


@cache
def _turbo() -> _Turbo | None:
    """The installed TurboJPEG, if it is version 3 or newer. One handle a process: workers have one thread."""
    names = ["libturbojpeg.so.0", str(Path(sys.prefix) / "lib" / "libturbojpeg.so.0"), "libturbojpeg.dylib"]
    for name in names:
        try:
            return _Turbo(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None


def decode_turbojpeg(data: bytes, box: Box, scale: int) -> np.ndarray:
    turbo = _turbo()
    assert turbo is not None, "chosen by resolve() only where it is installed"
    return turbo.decode(data, box, scale)


DECODERS: dict[str, Decode] = {"turbojpeg": decode_turbojpeg, "simplejpeg": decode_simplejpeg, "pillow": decode_pillow}
"""Best first."""
ON_GPU = ("gpu", "hybrid")
"""Values of loader.decoder that leave files to the GPU."""


def installed() -> list[str]:
    """The decoders that can be used here, best first."""
    have = {"turbojpeg": lambda: _turbo() is not None, "simplejpeg": lambda: importlib.util.find_spec("simplejpeg") is not None}
    return [name for name in DECODERS if have.get(name, lambda: True)()]


def resolve(name: str) -> str:
    """The decoder `auto` stands for: the best that is installed.

    Raises:
        UserError: a decoder that is not installed.
    """
    usable = installed()
    if name == "auto":
        return usable[0]
    if name not in usable:
        cure = {"simplejpeg": "pip install simplejpeg", "turbojpeg": "install libturbojpeg 3 (conda install libjpeg-turbo)"}
        raise UserError(f"loader.decoder={name}: not installed; {cure[name]}, or use one of auto, {', '.join(usable)}")
    return name


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
