"""File bytes to pixels, decoded as late and as little as the transforms allow.

Journey of a batch, 2: file bytes -> uint8 [H, W, 3], or only the region of a crop, in a worker.

A JPEG is a grid of frequency blocks, so a decoder can output it at 1/2, 1/4 or 1/8 of its size for
less work, and skip blocks outside a region (pipeline/region.py). `resized` uses both. Pillow
decodes all files that are not a plain colour JPEG.
"""

import fcntl
import importlib.util
import io
import math
import platform
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import cast

import numpy as np
import torch
from PIL import Image, ImageFile

from conf.files import default_cache_dir
from conf.schema import MAX_PIXELS, UserError
from pipeline import region
from pipeline.machine import free_memory

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
PROGRESSIVE = 0xC2
FRAMES = (0xC0, 0xC1, PROGRESSIVE)
SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
# A truncated file must be an error with its path, not an image whose lower half is grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False
MISSING = "the file ends before the image does"
# A progressive JPEG repeats the work of decoding for each scan, and an empty scan has 10 bytes.
# Encoders write about ten.
MOST_SCANS = 500
# Each JPEG marker, those without a length (restarts, start of an image, TEM), and a scan: its data
# and its restart markers. The first scan is searched for behind its header.
MARKER, RESTART = re.compile(rb"\xff+([^\x00\xff])"), re.compile(rb"\xff([\xd0-\xd7])")
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
SCAN = re.compile(rb"(?:\A|\xff\xda)[^\xff]*(?:\xff[\x00\xd0-\xd7][^\xff]*)*")
LOSSLESS, START_OF_SCAN, END_OF_IMAGE = 0xC3, 0xDA, b"\xff\xd9"
# Memory that decoding takes at most, measured for the modes of all FORMATS: 3 for a baseline JPEG,
# 8 for a PNG with alpha, 11 for a progressive CMYK JPEG, 17 for a lossless WebP.
BYTES_PER_PIXEL = 17
LARGE_BYTES = 512 << 20  # more than this is only taken in turns if it is scarce
MOST_PLACES = 256
STRIP = 1 << 22  # pixels that are converted at a time
# Entropy-coded data that no marker interrupts, and that changes the pixels wherever it is decoded.
FILLER = bytes(97 * number % 251 for number in range(1, 65))


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
        self._check_resize(size)
        left, top, right, bottom = box or (0, 0, *self.size)
        return Picture(resize(self.pixels()[top:bottom, left:right], size, interpolation))

    def _check_resize(self, size: tuple[int, int]) -> None:
        """Refuse a resize of an image of a few rows or columns, which can make gigabytes of it."""
        if size[0] * size[1] > MAX_PIXELS:
            width, height = self.size
            raise TooNarrowError(
                f"resizing {width}x{height} pixels would give {size[0]}x{size[1]}: too narrow"
            )

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
        self._check_resize(size)
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
            with memory_for(self._size):
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


class TooNarrowError(ValueError):
    """An image of a few rows or columns: an error of the file, in any picture made from it."""


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
    """Refuse an image whose decoding would need too much memory.

    Raises:
        ValueError: it has more pixels than `max_pixels`.
    """
    if size[0] * size[1] > max_pixels:
        raise ValueError(
            f"{size[0]}x{size[1]} pixels are more than data.max_pixels={max_pixels}; make the "
            "image smaller, or raise data.max_pixels if the workers have enough memory"
        )


@contextmanager
def memory_for(size: tuple[int, int]) -> Iterator[None]:
    """Wait for other processes if free memory is not enough for one more large image.

    One of them always decodes. The locks are files, which the system unlocks if a process dies.

    Args:
        size: (width, height) of the image that is decoded in the block.
    """
    needed = size[0] * size[1] * BYTES_PER_PIXEL
    if needed <= LARGE_BYTES:
        yield
        return
    places = max(1, free_memory() // 2 // needed)
    # A home directory can be shared by machines.
    folder = default_cache_dir() / "decoding" / platform.node()
    with ExitStack() as stack:
        with suppress(OSError):  # no locks: a folder that cannot be written, some network storage
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for place in range(min(places, MOST_PLACES)):
                file = stack.enter_context(open(folder / f"{place}.lock", "ab"))
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            else:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_scans(data: bytes) -> None:
    """Refuse a progressive JPEG that takes minutes to decode.

    Raises:
        ValueError: it has more scans than encoders write.
    """
    scans = data.count(bytes((0xFF, START_OF_SCAN)))
    if scans > MOST_SCANS:
        raise ValueError(f"a JPEG of about {scans} scans; at most {MOST_SCANS} are decoded")


def check_length(data: bytes, size: tuple[int, int], factors: Sequence[int], *, bits: int) -> None:
    """Refuse a JPEG that is shorter than any image of the size in its header.

    Args:
        size: (width, height).
        factors: across and down for each component: its sampling factors.
        bits: that a block of 8x8 values has at least.

    Raises:
        ValueError: it is shorter.
    """
    across, down = factors[::2], factors[1::2]
    values = sum(a * d for a, d in zip(across, down, strict=True)) / max(across) / max(down)
    if len(data) * 8 < bits * values * size[0] * size[1] / 64:
        raise ValueError(f"{MISSING}: {len(data)} bytes for {size[0]}x{size[1]} pixels")


def open_picture(data: bytes, decoder: str, max_pixels: int = MAX_PIXELS) -> Picture:
    """Read the header of a file; decode the file unless it is a plain colour JPEG.

    Args:
        decoder: a name in DECODERS.
        max_pixels: data.max_pixels.

    Raises:
        OSError, ValueError, SyntaxError: Pillow cannot read it, or it is too large.
    """
    size = colour_jpeg_size(data, max_pixels)
    if size:
        return EncodedPicture(data, size, DECODERS[decoder])
    image = open_image(data, max_pixels)
    if image.format == "JPEG" and image.mode == "RGB":
        return EncodedPicture(data, image.size, DECODERS[decoder])
    with memory_for(image.size):
        return Picture(region_of(load_all(data, image), (0, 0, *image.size)))


def colour_jpeg_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int] | None:
    """Read (width, height) of a common colour JPEG; None if Pillow has to open the file.

    Pillow takes 50 us to read a header, as long as flipping three images.

    Raises:
        ValueError: it is too large, or too short for this size.
    """
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    while at + 19 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in FRAMES:
            frame = colour_frame(data, at)
            if frame is None:
                return None
            size, sampling = frame
            check_size(size, max_pixels)
            factors = [factor for pair in sampling for factor in pair]
            check_length(data, size, factors, bits=1 if marker == PROGRESSIVE else 2)
            if marker == PROGRESSIVE:
                check_scans(data)
            return size
        if not can_skip(data, at):
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def colour_frame(
    data: bytes, at: int
) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None:
    """Read the frame of a JPEG that begins at `at`; None unless it has three components of 8 bits.

    Returns:
        (width, height), and for each component its sampling factors (across, down).
    """
    bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
    sampling = tuple(divmod(data[at + place], 16) for place in (11, 14, 17))
    if bits != 8 or components != 3 or not width * height or not all(map(all, sampling)):
        return None
    return (width, height), sampling


def can_skip(data: bytes, at: int) -> bool:
    """Whether the segment of a JPEG that begins at `at` holds tables or notes on a single image."""
    return data[at + 1] in SKIPPED and data[at + 4 : at + 8] != b"MPF\0"


def load_all(data: bytes, image: Image.Image) -> Image.Image:
    """Decode an image of which `open_image` has read the header, to at most 16 bits per channel.

    Raises:
        OSError, ValueError, SyntaxError: the data are damaged, or end before the image does.
    """
    if ends_unnoticed(image):
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


def ends_unnoticed(image: Image.Image) -> bool:
    """Whether Pillow lets the data end early: the pixels that are missing are then black."""
    # Pillow turns an image that has another orientation, and its size before it is decoded.
    upright = image.format == "TIFF" and image.tag_v2.get(274, 1) == 1  # type: ignore[attr-defined]
    return image.format == "PNG" or upright


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
    """Whether a pixel may be one for which a JPEG has no data: such pixels have medium luma.

    Their colour can be that of the neighbours, whose chroma is interpolated.

    Args:
        pixel: of an image with the mode L, RGB or CMYK.
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
    end = data.find(END_OF_IMAGE, at)
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


def decode_pillow(data: bytes, box: Box, scale: int) -> np.ndarray:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    pixels = region_of(image, box)
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


def region_of(image: Image.Image, box: Box) -> np.ndarray:
    """Return a region of a Pillow image as uint8 [h, w, 3].

    In strips: converting an image at once takes three times the memory of its pixels.
    """
    left, top, right, bottom = box
    rows = max(1, STRIP // max(1, right - left))
    if bottom - top <= rows:
        return np.asarray(_to_rgb(image.crop(box)))
    pixels = np.empty((bottom - top, right - left, 3), np.uint8)
    for row in range(top, bottom, rows):
        end = min(bottom, row + rows)
        pixels[row - top : end - top] = np.asarray(_to_rgb(image.crop((left, row, right, end))))
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert as torchvision's loader, but keep the upper byte of 16-bit grey, unclipped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
