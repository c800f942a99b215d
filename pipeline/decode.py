"""File bytes to pixels, decoded as late and as little as the transforms allow.

Journey of a batch, 2: file bytes -> uint8 [H, W, 3], or only the region of a crop, in a worker.

A JPEG is a grid of frequency blocks, so a decoder can output it at 1/2, 1/4 or 1/8 of its size for
less work, and skip blocks outside a region (pipeline/region.py). So a picture first collects what
the transforms draw, and its pixels are computed when they are needed. Pillow decodes all files that
are not a plain colour JPEG.
"""

import importlib.util
import io
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageFile

from conf.schema import MAX_PIXELS, UserError
from pipeline import region

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
INTERPOLATIONS = ("bilinear", "bicubic")

# `check_size` refuses what is larger than data.max_pixels. Pillow would only warn up to twice its
# own limit, and refuse what data.max_pixels allows above that.
Image.MAX_IMAGE_PIXELS = None
# The accepted file contents, whatever the name. Pillow reads many other formats: for EPS it starts
# Ghostscript, which runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Second bytes of JPEG markers: a Huffman-coded frame (baseline, extended, progressive); segments
# that can precede it (tables, restart interval, application data, comment).
BASELINE, PROGRESSIVE, LOSSLESS, START_OF_SCAN = 0xC0, 0xC2, 0xC3, 0xDA
FRAMES = (BASELINE, 0xC1, PROGRESSIVE)
SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
# A truncated file must be an error with its path, not an image whose lower half is grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False
MISSING = "the file ends before the image does"
# A progressive JPEG repeats the work of decoding for each scan. Encoders write about ten.
MOST_SCANS = 500
# Each JPEG marker, those without a length (restarts, start of an image, TEM), and a scan: its data
# and its restart markers. The first scan is searched for behind its header.
MARKER, RESTART = re.compile(rb"\xff+([^\x00\xff])"), re.compile(rb"\xff([\xd0-\xd7])")
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
SCAN = re.compile(rb"(?:\A|\xff\xda)[^\xff]*(?:\xff[\x00\xd0-\xd7][^\xff]*)*")
# Entropy-coded data that no marker interrupts, and that changes the pixels wherever it is decoded.
FILLER = bytes(97 * number % 251 for number in range(1, 65))


class UnreadableError(ValueError):
    """The file of a picture cannot be decoded; says why in one line."""


class DecodeError(Exception):
    """A quick decoder cannot decode this file."""


class Frame(NamedTuple):
    """The frame header of a JPEG with three components of 8 bits."""

    size: tuple[int, int]  # (width, height) in pixels
    sampling: tuple[tuple[int, int], ...]  # factors (across, down) of each component
    marker: int  # one of FRAMES
    end: int  # where the next segment begins


# (file, box, scale) -> uint8 [bottom - top, right - left, 3]: the region `box` of the image at
# 1 / scale; `box` is in pixels of that smaller image.
Decode = Callable[[bytes, Box, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Resize:
    """Crop the region `box` and resize it to `size`, (width, height), with antialiasing.

    Attributes:
        interpolation: one of INTERPOLATIONS.
        quick: let the JPEG decoder shrink the image by 2, 4 or 8 first: much less work on large
            photos, a little softer.
    """

    box: Box
    size: tuple[int, int]
    interpolation: str
    quick: bool

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> [height, width, 3]."""
        left, top, right, bottom = self.box
        return resize(pixels[top:bottom, left:right], self.size, self.interpolation)


@dataclass(frozen=True, slots=True)
class Crop:
    """Crop the region `box`; pixels outside the image are black."""

    box: Box

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> [bottom - top, right - left, 3]."""
        left, top, right, bottom = self.box
        height, width, _ = pixels.shape
        if left >= 0 and top >= 0 and right <= width and bottom <= height:
            return pixels[top:bottom, left:right]
        made = np.zeros((bottom - top, right - left, 3), np.uint8)
        x0, x1 = max(left, 0), min(right, width)
        y0, y1 = max(top, 0), min(bottom, height)
        made[y0 - top : y1 - top, x0 - left : x1 - left] = pixels[y0:y1, x0:x1]
        return made


@dataclass(frozen=True, slots=True)
class Mirror:
    """Flip left and right."""

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> the same shape."""
        # numpy copies a reversed axis pixel by pixel: 150 us for 224 px, torch takes 18 us.
        return as_tensor(pixels).flip(1).numpy()


Step = Resize | Crop | Mirror


@dataclass(frozen=True, slots=True)
class JpegFile:
    """A colour JPEG whose header alone has been read.

    Attributes:
        data: content of the file.
        size: (width, height).
        decode: from DECODERS.
        frame: None if only Pillow understands the header.
    """

    data: bytes
    size: tuple[int, int]
    decode: Decode
    frame: Frame | None

    def resized(self, step: Resize) -> np.ndarray:
        """Decode as little as a resize needs, and resize: uint8 [height, width, 3]."""
        box, size = step.box, step.size
        scale = reduction(box, size) if step.quick else 1
        if scale == 1:
            return resize(self.region(box, 1), size, step.interpolation)
        # The region's edges lie between pixels of the smaller image, so Pillow gets fractions.
        outer = box[0] // scale, box[1] // scale, -(-box[2] // scale), -(-box[3] // scale)
        small = Image.fromarray(np.ascontiguousarray(self.region(outer, scale)))
        left, top = box[0] / scale - outer[0], box[1] / scale - outer[1]
        right = min(box[2] / scale - outer[0], small.width)
        bottom = min(box[3] / scale - outer[1], small.height)
        method = Image.Resampling[step.interpolation.upper()]
        return np.asarray(small.resize(size, method, box=(left, top, right, bottom)))

    def region(self, box: Box, scale: int) -> np.ndarray:
        """Decode the region `box` of the image at 1 / scale: uint8 [h, w, 3]."""
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"the region {box} is empty")  # an error of the transform
        try:
            try:
                return self.decode(self.data, box, scale)
            except DecodeError:  # Pillow reads more files, and its errors are clearer
                return decode_pillow(self.data, box, scale)
        except Exception as error:
            raise UnreadableError(describe(error)) from error


class Picture:
    """An image between two transforms: where it is from, and the geometry that was drawn for it.

    The geometry is a value that `pixels` computes on a CPU, and the GPU's engines and kernels read
    (pipeline/gpu). Every other method returns a new picture and computes nothing.

    Args:
        source: a file, or pixels, uint8 [H, W, 3].
        steps: the drawn geometry, in order.
        size: (width, height) after the steps; of the source if there are none.
    """

    def __init__(
        self,
        source: np.ndarray | JpegFile,
        steps: tuple[Step, ...] = (),
        size: tuple[int, int] | None = None,
    ) -> None:
        self.source, self.steps = source, steps
        if size is not None:
            self.size = size
        elif isinstance(source, JpegFile):
            self.size = source.size
        else:
            self.size = source.shape[1], source.shape[0]

    def resized(
        self,
        size: tuple[int, int],
        box: Box | None = None,
        *,
        interpolation: str = "bilinear",
        quick: bool = False,
    ) -> "Picture":
        """Crop the region `box`, None for all, and resize as torchvision does; see `Resize`."""
        if size[0] * size[1] > MAX_PIXELS:
            raise UnreadableError(
                f"resizing {self.size[0]}x{self.size[1]} pixels would give {size[0]}x{size[1]}: "
                "too narrow"
            )
        box = box or (0, 0, *self.size)
        return Picture(self.source, (*self.steps, Resize(box, size, interpolation, quick)), size)

    def cropped(self, box: Box) -> "Picture":
        """Crop the region `box`; pixels outside the image are black."""
        size = box[2] - box[0], box[3] - box[1]
        return Picture(self.source, (*self.steps, Crop(box)), size)

    def mirrored(self) -> "Picture":
        return Picture(self.source, (*self.steps, Mirror()), self.size)

    def pixels(self) -> np.ndarray:
        """Decode and compute: uint8 [H, W, 3]. May be read-only or shared: copy before writing.

        Raises:
            UnreadableError: the file cannot be decoded.
        """
        steps = self.steps
        if not isinstance(self.source, JpegFile):
            pixels = self.source
        elif steps and isinstance(steps[0], Resize):
            pixels, steps = self.source.resized(steps[0]), steps[1:]
        else:
            pixels = self.source.region((0, 0, *self.source.size), 1)
        for step in steps:
            pixels = step.apply(pixels)
        return pixels

    def pillow(self) -> Image.Image:
        return Image.fromarray(self.pixels())


def open_picture(data: bytes, decoder: str, max_pixels: int = MAX_PIXELS) -> Picture:
    """Read the header of a file; decode the file unless it is a plain colour JPEG.

    Args:
        decoder: a name in DECODERS.
        max_pixels: data.max_pixels.

    Raises:
        UnreadableError: Pillow cannot read it, or it is too large.
    """
    try:
        frame = colour_frame(data)
        if frame is not None:
            check_size(frame.size, max_pixels)
            if frame.marker == PROGRESSIVE:
                check_scans(data)
            return Picture(JpegFile(data, frame.size, DECODERS[decoder], frame))
        image = open_image(data, max_pixels)
        if image.format == "JPEG" and image.mode == "RGB":
            return Picture(JpegFile(data, image.size, DECODERS[decoder], None))
        return Picture(np.asarray(to_rgb(load_all(data, image))))
    except Exception as error:  # Pillow's plugins raise many kinds: struct.error, IndexError, ...
        raise UnreadableError(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return the type and the message of an error without the address of an in-memory file."""
    text = re.sub(r" <_io.BytesIO object at 0x[0-9a-f]+>", "", str(error))
    if text and isinstance(error, UnreadableError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


# Headers.


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the header of a file in one of FORMATS; Pillow decodes the pixels at their first use.

    Args:
        max_pixels: data.max_pixels.

    Raises:
        PIL.UnidentifiedImageError: the content has another format, or is no image.
        OSError, ValueError, SyntaxError: the header is damaged, or the image is too large.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_size(image.size, max_pixels)
    if image.format == "TIFF":  # decoding needs the memory of a whole tile
        check_size((image.tag_v2.get(322, 0), image.tag_v2.get(323, 0)), max_pixels)  # type: ignore[attr-defined]
    if "progressive" in image.info:
        check_scans(data)
    return image


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels`: decoding it would need too much memory."""
    if size[0] * size[1] > max_pixels:
        raise ValueError(
            f"{size[0]}x{size[1]} pixels are more than data.max_pixels={max_pixels}; make the "
            "image smaller, or raise data.max_pixels if the workers have enough memory"
        )


def check_scans(data: bytes) -> None:
    """Refuse a progressive JPEG with so many scans that decoding it takes minutes."""
    if data.count(bytes((0xFF, START_OF_SCAN))) > MOST_SCANS:
        raise ValueError(f"a JPEG of more than {MOST_SCANS} scans")


def colour_frame(data: bytes) -> Frame | None:
    """Read the frame header of a common colour JPEG; None if Pillow has to open the file.

    Pillow takes 50 us to read a header, as long as flipping three images.
    """
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    while at + 19 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            sampling = tuple(divmod(data[at + place], 16) for place in (11, 14, 17))
            if bits != 8 or components != 3 or not width * height or not all(map(all, sampling)):
                return None
            return Frame((width, height), sampling, marker, end)
        if marker not in SKIPPED or data.startswith(b"MPF\0", at + 4):  # several images
            return None
        at = end
    return None


def has_end(data: bytes) -> bool:
    """Whether a JPEG has its end marker, which a truncated file lacks; a few bytes may follow."""
    return b"\xff\xd9" in data[-64:]


# Files that end early, and Pillow.


def load_all(data: bytes, image: Image.Image) -> Image.Image:
    """Decode an image of which `open_image` has read the header, to at most 16 bits per channel.

    Raises:
        OSError, ValueError, SyntaxError: the data are damaged, or end before the image does.
    """
    # Pillow turns an image that has another orientation, and its size before it is decoded.
    upright = image.format == "TIFF" and image.tag_v2.get(274, 1) == 1  # type: ignore[attr-defined]
    if image.format == "PNG" or upright:  # Pillow lets the data end early
        # Some other pixels may have the first level, but then they do not have the second one.
        missing = load_into(image, 77)
        if any(missing):
            again = load_into(Image.open(io.BytesIO(data), formats=FORMATS), 0)
            missing = [first and second for first, second in zip(missing, again, strict=True)]
        if any(missing):
            raise OSError(MISSING)
    image.load()
    if image.format in ("JPEG", "MPO"):
        last = image.getpixel((image.width - 1, image.height - 1))
        if is_grey(last) and lacks_data(data):
            raise OSError(MISSING)
    if image.mode == "I" and image.format == "PPM":  # of 16 bits
        return image.point(lambda level: level * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        low, high = cast(tuple[float, float], image.getextrema())
        if not 0 <= low <= high <= 255 or 0 < high <= 1:  # it would become black or white
            raise ValueError(f"32-bit levels from {low} to {high}; save it with 8 or 16 bits")
    return image


def load_into(image: Image.Image, level: int) -> list[bool]:
    """Decode over a blank image of one level; return whether the last two rows still end with it.

    Two rows, because the last pass of an interlaced PNG has the odd ones.
    """
    blank = Image.new(image.mode, image.size, level)
    expected = blank.getpixel((0, 0))
    image.im = blank.im
    image.load()
    ends = ((image.width - 1, max(0, image.height - row)) for row in (1, 2))
    return [image.getpixel(end) == expected for end in ends]


def is_grey(pixel: float | tuple[int, ...] | None) -> bool:
    """Whether a pixel of L, RGB or CMYK may be one for which a JPEG has no data.

    Such pixels have medium luma. Their colour can be that of the neighbours, whose chroma is
    interpolated.
    """
    levels = pixel if isinstance(pixel, tuple) else (pixel, pixel, pixel)
    luma = np.dot((0.299, 0.587, 0.114), np.asarray(levels[:3], float))
    return abs(float(luma) - 127.5) < 3


def lacks_data(data: bytes) -> bool:
    """Whether a JPEG has no data for some of its blocks.

    libjpeg makes them grey, and Pillow does not tell. More data at the end of scans and restart
    intervals change the pixels only if blocks are missing there.
    """
    at, markers = 2, []
    while START_OF_SCAN not in markers and (found := MARKER.search(data, at)):
        at, marker = found.end(), found[1][0]
        markers.append(marker)
        if marker not in WITHOUT_LENGTH:
            at += int.from_bytes(data[at : at + 2], "big")
    if PROGRESSIVE in markers and data[at - 3]:
        return True  # the first scan, with the mean of each block
    end = data.find(b"\xff\xd9", at)
    body = data[at:end]
    restarts = [RESTART.findall(scan) for scan in SCAN.findall(body)]
    if any(found[0] != 0xD0 + i % 8 for scan in restarts for i, found in enumerate(scan)):
        return True  # whole intervals
    made = []
    for content in (data, data[:at] + SCAN.sub(_filled, body) + data[end:]):
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if LOSSLESS not in markers:
            image.draft(image.mode, (max(1, image.width // 8), max(1, image.height // 8)))
        made.append(image.tobytes())
    return made[0] != made[1]


def _filled(scan: re.Match[bytes]) -> bytes:
    """A scan with more data at the end of each restart interval, and for one more interval."""
    following = bytes((0xFF, 0xD0 + len(RESTART.findall(scan[0])) % 8))
    return RESTART.sub(lambda marker: FILLER + marker[0], scan[0]) + FILLER + following + FILLER


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert as torchvision's loader, but keep the upper byte of 16-bit grey, unclipped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


# Decoders.


def decode_pillow(data: bytes, box: Box, scale: int) -> np.ndarray:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    pixels = np.asarray(to_rgb(image.crop(box)))
    if is_grey(tuple(pixels[-1, -1])) and lacks_data(data):
        raise OSError(MISSING)
    return pixels


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


def missing_decoders() -> dict[str, str]:
    """Return for each decoder that is not installed what to do to get it."""
    missing = {}
    if isinstance(remedy := region.load(), str):
        missing["region"] = remedy
    if importlib.util.find_spec("simplejpeg") is None:
        missing["simplejpeg"] = "pip install simplejpeg"
    return missing


def installed() -> list[str]:
    """Return the installed decoders, fastest first."""
    missing = missing_decoders()
    return [name for name in DECODERS if name not in missing]


def resolve(name: str) -> str:
    """Return the name of a CPU decoder; `auto` is the fastest installed one.

    Raises:
        UserError: the decoder is not installed.
    """
    usable = installed()
    if name == "auto":
        return usable[0]
    if name not in usable:
        raise UserError(
            f"loader.decoder={name}: not installed; {missing_decoders()[name]}, "
            f"or use one of auto, {', '.join(usable)}"
        )
    return name
