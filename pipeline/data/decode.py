"""Decode image files to pixels, as late and as little as the transforms allow.

Data flow, step 3: file bytes -> uint8 [H, W, 3], or only the cropped region, in a worker.

A JPEG is a grid of frequency blocks, so a decoder can output it at 1/2, 1/4 or 1/8 of its size for
less work, and skip blocks outside a region (region.py). So a picture first collects the geometry
that the transforms sample, and its pixels are computed when they are needed. torchcodec decodes
most PNG and WebP files. Pillow decodes all others, and JPEGs that the region decoder cannot read.
"""

import io
import logging
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps

from conf.errors import UnreadableError, UserError, describe
from pipeline.data import region

logger = logging.getLogger(__name__)

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
Size = tuple[int, int]  # width, height in pixels
INTERPOLATIONS = ("bilinear", "bicubic")
DARK_LEVEL = 64  # a 16-bit image with only lower levels, in 8 bits, is nearly black
MAX_PIXELS = 178_956_970  # Pillow's limit: decoding takes up to 17 bytes per pixel
# Pillow warns of "Corrupt EXIF data", many pixels and the like, which do not affect the pixels.
warnings.filterwarnings("ignore", module="PIL")
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # its errors are also raised
# A truncated file must raise an error with its path, not become an image with a gray lower half.
ImageFile.LOAD_TRUNCATED_IMAGES = False
# Accepted file contents, whatever the file name. Pillow supports many other formats, but starts
# Ghostscript for EPS, which runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Content that is often named .jpg: marker in the first 32 bytes -> description and fix
OTHER_CONTENTS = {
    b"jP  ": "JPEG 2000 is not supported; convert it to JPEG or PNG",
    b"JXL ": "JPEG XL is not supported; convert it to JPEG or PNG",
    b"ftyp": "AVIF and HEIC are not supported; convert it to JPEG or PNG",  # also in JPEG 2000, XL
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull`",
    b"<!DOCTYPE": "a web page; download the image again",
    b"<html": "a web page; download the image again",
}
# Features that together make Pillow 12 read a TIFF with wrong levels, silently
MISREAD_TIFFS = (
    {"12 bits"},
    {"8 bits", "signed samples"},
    {"16 bits", "several samples", "planes"},
    {"16 bits", "white zeros"},
    {"planes", "white zeros"},
    {"an 8-bit color map"},
)
# Mode and palette of images that Pillow would convert to a black or white one
BLACK_OR_WHITE: dict[Any, str] = dict.fromkeys([("I", None), ("F", None)], "32-bit levels")
BLACK_OR_WHITE["P", None] = "no palette"
UNUSED = 16  # more bytes than a WebP decoder ignores at the end of the pixels
JPEG_START = b"\xff\xd8"  # first bytes of a JPEG
ORIENTATION = 0x0112  # EXIF tag
BITS, PHOTOMETRIC, PLANAR, COLOR_MAP, SAMPLE_FORMAT = 258, 262, 284, 320, 339  # TIFF tags
# Orientations whose pixels are mirrored (after a transposition), upside down, on their side
MIRRORED, UPSIDE_DOWN, ON_SIDE = (2, 3, 6, 7), (3, 4, 7, 8), (5, 6, 7, 8)
# Second bytes of JPEG markers. FRAMES: a Huffman-coded frame in one pass (baseline, extended).
# SKIPPED: segments that can precede it (tables, restart interval, application data, comment).
BASELINE, LOSSLESS, START_OF_SCAN = 0xC0, 0xC3, 0xDA
FRAMES = (BASELINE, 0xC1)
SKIPPED = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)
# Image content that training ignores, following "3 of 32 images checked have "
DARK = "16-bit levels that are nearly black in the 8 bits that training keeps; multiply the levels"
TRANSPARENT = "transparent pixels, and training uses the colors under them; add a background"
PAGES = "several pages or frames, and training uses the first; save the others as files"

# (file, box, scale) -> uint8 [bottom - top, right - left, 3]: the region `box` of the image at
# 1 / scale; `box` is in pixels of that smaller image.
Decode = Callable[[bytes, Box, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class CropResize:
    """One geometry step: crop the region `box`, resize it to `size`, optionally mirror it."""

    box: Box
    size: Size
    interpolation: str = "bilinear"  # one of INTERPOLATIONS, with antialiasing
    # Let the JPEG decoder shrink by 2, 4 or 8 first: less work on large photos, slightly softer
    quick: bool = False
    mirrored: bool = False  # flip left and right
    # level or color outside the image; None reflects the image at its edges, like numpy.pad
    fill: int | Sequence[int] | None = 0


@dataclass(frozen=True, slots=True)
class JpegFile:
    """A color JPEG of which only the header has been read."""

    data: bytes  # file content
    size: Size
    decode: Decode  # one of DECODERS

    def cropped(self, step: CropResize) -> np.ndarray:
        """Decode as little as a crop and resize need: uint8 [height, width, 3]."""
        left, top, right, bottom = step.box
        width, height = self.size
        if min(left, top, width - right, height - bottom) < 0:
            whole = self.region((0, 0, width, height), 1)
            return resize(crop(whole, step.box, step.fill), step.size, step.interpolation)
        scale = reduction(step.box, step.size) if step.quick else 1
        if scale == 1:
            return resize(self.region(step.box, 1), step.size, step.interpolation)
        x, y = left // scale, top // scale
        outer = self.region((x, y, math.ceil(right / scale), math.ceil(bottom / scale)), scale)
        small = Image.fromarray(np.ascontiguousarray(outer))
        # The region's edges lie between pixels of the smaller image, so Pillow gets fractions.
        x_stop = min(right / scale - x, small.width)
        y_stop = min(bottom / scale - y, small.height)
        box = (left / scale - x, top / scale - y, x_stop, y_stop)
        kernel = Image.Resampling[step.interpolation.upper()]
        return np.asarray(small.resize(step.size, kernel, box))

    def region(self, box: Box, scale: int) -> np.ndarray:
        """Decode the region `box` of the image at 1 / scale: uint8 [h, w, 3]."""
        try:
            return self.decode(self.data, box, scale)
        except Exception as error:
            raise UnreadableError(describe(error)) from error


@dataclass(frozen=True, slots=True)
class RotatedJpeg:
    """A color JPEG with an EXIF orientation; only the decoded crop is rotated."""

    stored: JpegFile
    orientation: int  # EXIF, from 2 to 8

    @property
    def size(self) -> Size:  # upright
        if self.orientation in ON_SIDE:
            return self.stored.size[::-1]
        return self.stored.size

    def cropped(self, step: CropResize) -> np.ndarray:
        """Decode as little as a crop and resize need: uint8 [height, width, 3]."""
        left, top, right, bottom = step.box
        width, height = self.size
        if self.orientation in MIRRORED:
            left, right = width - right, width - left
        if self.orientation in UPSIDE_DOWN:
            top, bottom = height - bottom, height - top
        step = replace(step, box=(left, top, right, bottom))
        if self.orientation in ON_SIDE:
            step = replace(step, box=(top, left, bottom, right), size=step.size[::-1])
        return upright_pixels(self.stored.cropped(step), self.orientation)


@dataclass(eq=False)
class Picture:
    """An image between two transforms, with its source and the geometry sampled for it.

    `pixels` applies the geometry on the CPU; a dataset may leave that to a device. All other
    methods return a new picture and compute nothing.
    """

    source: np.ndarray | JpegFile | RotatedJpeg  # pixels: uint8 or float32 [H, W, C]
    geometry: tuple[CropResize, ...] = ()  # the steps, in order
    untracked: bool = False  # changed in a way that `geometry` lacks, so that no mask can follow

    @property
    def full_size(self) -> Size:  # before the geometry
        if isinstance(self.source, np.ndarray):
            return size_of(self.source)
        return self.source.size

    @property
    def size(self) -> Size:
        return self.geometry[-1].size if self.geometry else self.full_size

    def resized(self, size: Size, box: Box | None = None, **options: Any) -> "Picture":
        """Crop the region `box`, None for all, and resize with `options` of `CropResize`."""
        if size[0] * size[1] > MAX_PIXELS:
            raise UnreadableError(f"too narrow to resize: {self.size} pixels would become {size}")
        step = CropResize(box or (0, 0, *self.size), size, **options)
        return Picture(self.source, (*self.geometry, step), self.untracked)  # replace takes 4 us

    def cropped(self, box: Box, *, fill: int | Sequence[int] | None = 0) -> "Picture":
        left, top, right, bottom = box
        return self.resized((right - left, bottom - top), box, fill=fill)

    def mirrored(self) -> "Picture":
        return self.resized(self.size, mirrored=True)

    def pixels(self) -> np.ndarray:
        """Decode and transform: [H, W, C]. May be read-only or shared: copy before writing.

        Raises UnreadableError if the file cannot be decoded.
        """
        image = self.source
        steps = self.geometry or (CropResize((0, 0, *self.size), self.size),)  # the whole image
        for step in steps:
            if isinstance(image, np.ndarray):
                image = resize(crop(image, step.box, step.fill), step.size, step.interpolation)
            else:
                image = image.cropped(step)
            if step.mirrored:
                # numpy copies a reversed axis pixel by pixel: 150 us for 224 px, torch takes 18 us.
                image = torch.from_dlpack(image).flip(1).numpy()
        assert isinstance(image, np.ndarray)
        return image


def open_picture(data: bytes, decoder: str, *, exif_orientation: bool = False) -> Picture:
    """Read a file's header; decode the file unless it is a plain color JPEG.

    `decoder`: a name in DECODERS. Raises UnreadableError if the file is not an image or too large.
    """
    try:
        stored = _open_stored(data, decoder)
        orientation = orientation_of(open_image(data)) if exif_orientation else 1
    except Exception as error:  # Pillow's plugins raise many types: struct.error, IndexError, ...
        raise UnreadableError(describe(error)) from error
    if orientation == 1:
        return Picture(stored)
    if isinstance(stored, JpegFile):
        return Picture(RotatedJpeg(stored, orientation), untracked=True)
    return Picture(upright_pixels(stored, orientation), untracked=True)


def _open_stored(data: bytes, decoder: str) -> JpegFile | np.ndarray:
    size = color_size(data)
    if size is None:
        image = open_image(data)
        # libjpeg decodes neither a region nor a smaller image of a lossless file.
        markers = next(zip(*segments(data), strict=True), ())
        kind = image.format, image.mode, LOSSLESS in markers
        if kind == ("JPEG", "L", False):
            return DECODERS[decoder](data, (0, 0, *image.size), 1)
        if kind != ("JPEG", "RGB", False):
            return whole_pixels(image, data)
        size = image.size
    return JpegFile(data, size, DECODERS[decoder])


def whole_pixels(image: ImageFile.ImageFile, data: bytes) -> np.ndarray:
    """Decode all pixels of an opened file: uint8 [H, W, 3]."""
    # The first chunk, and offset and raw mode of a PNG's pixels
    kind = data[12:16], image.mode, *[tile[2:] for tile in image.tile]
    decoder = torchcodec_decoders().get(kind)
    if decoder is None:
        open_image(data).verify()  # compares a PNG's checksums, which decoding does not
        if image.format == "TIFF":  # otherwise Pillow rotates it while decoding
            image.getexif()[ORIENTATION] = 1
        return rgb_pixels(image)
    try:
        pixels = decoder(torch.from_dlpack(np.frombuffer(data, np.uint8)))
    except RuntimeError:
        open_image(data).verify()  # raises a clearer error for most files
        raise UnreadableError("damaged or incomplete; download it again") from None
    return pixels.permute(1, 2, 0).numpy()


@cache  # importing torchcodec takes 0.1 s and 5 MB
def torchcodec_decoders() -> dict[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return torchcodec's decoders, which take 0.8 of Pillow's time; {} if it is not installed.

    Files with metadata are left to Pillow, because libpng prints a warning for each file with
    certain color profiles, and torchcodec applies the EXIF orientation.
    """
    with suppress(ImportError, OSError, RuntimeError):
        from torchcodec.decoders import decode_png, decode_webp

        webps = dict.fromkeys([(b"VP8 ", "RGB"), (b"VP8L", "RGB")], decode_webp)
        return {(b"IHDR", "RGB", (41, "RGB")): decode_png, **webps}
    return {}


def crop(pixels: np.ndarray, box: Box, fill: int | Sequence[int] | None) -> np.ndarray:
    """Crop the region `box` of [H, W, ...]; for `fill`, see `CropResize`."""
    left, top, right, bottom = box
    inside = pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    height, width = inside.shape[:2]
    if (height, width) == (bottom - top, right - left):
        return inside
    if fill is None:
        rows = _reflected(top, bottom, pixels.shape[0])
        columns = _reflected(left, right, pixels.shape[1])
        return pixels.take(rows, 0).take(columns, 1)
    padded = np.full((bottom - top, right - left, *pixels.shape[2:]), fill, pixels.dtype)
    y, x = max(-top, 0), max(-left, 0)
    padded[y : y + height, x : x + width] = inside
    return padded


def _reflected(start: int, stop: int, length: int) -> np.ndarray:
    """Return the source indices of the pixels `start` to `stop` of a row reflected at its ends."""
    last = length - 1
    shifted = np.arange(start, stop) + last
    return abs(shifted % max(1, 2 * last) - last)


def size_of(pixels: np.ndarray) -> Size:
    """Return (width, height) of [H, W, ...]."""
    height, width = pixels.shape[:2]
    return width, height


def resize(pixels: np.ndarray, size: Size, interpolation: str) -> np.ndarray:
    """Resize with the kernel that torchvision uses for uint8 tensors, with antialiasing.

    Bilinear is within 2 levels of Pillow, which uses the same filters and takes 5 times as long.
    `pixels`: uint8 or float32 [H, W, C].
    """
    if size_of(pixels) == size:
        return pixels
    # In this order the result keeps the layout [H, W, 3] in memory; otherwise copying it into the
    # batch takes 110 us instead of 2. from_numpy would warn about Pillow's read-only memory.
    planes = torch.from_dlpack(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    planes = torch.nn.functional.interpolate(planes, size[::-1], mode=interpolation, antialias=True)
    return planes[0].permute(1, 2, 0).numpy()


def reduction(box: Box, size: Size) -> int:
    """Return the largest of 1, 2, 4, 8 by which the region can shrink and still cover `size`."""
    left, top, right, bottom = box
    factor = min((right - left) / size[0], (bottom - top) / size[1], 8)
    return 2 ** int(math.log2(max(1, factor)))


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Read a file's header in one of FORMATS; Pillow decodes the pixels on first use.

    Raises UnreadableError for OTHER_CONTENTS and an empty file. Pillow raises other types for a
    damaged header or an image that is too large, and UnidentifiedImageError for other contents.
    """
    if not data:
        raise UnreadableError("empty, 0 bytes")
    for marker, advice in OTHER_CONTENTS.items():
        if marker in data[:32]:
            raise UnreadableError(advice)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format == "TIFF":
        check_tiff(image)
    if image.format == "WEBP":
        check_webp(data)
    return image


def check_webp(data: bytes) -> None:
    """Raise UnreadableError for a WebP that ends in zeros which libwebp does not need.

    They are the end of a preallocated file that was never written, which libwebp decodes as gray.
    A complete image may also end in zeros, but cannot be decoded without its last bytes.
    """
    start = max(data.find(b"VP8 "), data.find(b"VP8L"))  # the chunk with the pixels
    size = int.from_bytes(data[start + 4 : start + 8], "little")
    content = data[start + 8 : start + 8 + size // 2 * 2]  # a chunk's length is even
    if not content.endswith(bytes(2 * UNUSED)):
        return
    kept = len(content) - UNUSED
    chunk = data[start : start + 4] + kept.to_bytes(4, "little") + content[:kept]
    shorter = b"RIFF" + (len(chunk) + 4).to_bytes(4, "little") + b"WEBP" + chunk
    try:
        Image.open(io.BytesIO(shorter), formats=["WEBP"]).load()
    except Exception:  # as it should be
        return
    raise UnreadableError("WebP that ends in zeros instead of pixels; download it again")


def check_tiff(image: Any) -> None:
    """Raise UnreadableError for a TIFF layout that Pillow 12 silently reads with wrong levels.

    The list is complete for 1 to 64 bits, gray, RGB, CMYK and palette, with and without alpha,
    signed, float, interleaved and planar (tests/pipeline/data/test_tiff.py).
    """
    tags = image.tag_v2
    bits = tags.get(BITS, (1,))
    features = {
        f"{bits[0]} bits": True,
        "several samples": len(bits) > 1,
        "signed samples": tags.get(SAMPLE_FORMAT) == (2,),
        "planes": tags.get(PLANAR) == 2,
        "white zeros": tags.get(PHOTOMETRIC) == 0,
        "an 8-bit color map": max(tags.get(COLOR_MAP, ()), default=256) < 256,
    }
    present = set(filter(features.get, features))
    if any(map(present.issuperset, MISREAD_TIFFS)):
        layout = ", ".join(sorted(present))
        raise UnreadableError(f"TIFF that Pillow misreads ({layout}); convert it to PNG")


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment of a JPEG up to its first scan."""
    if not data.startswith(JPEG_START):
        return
    marker = 0
    start = len(JPEG_START)
    while marker != START_OF_SCAN and data[start : start + 1] == b"\xff":
        marker = int.from_bytes(data[start + 1 : start + 2], "big")
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        yield marker, start, end
        start = end


def color_size(data: bytes) -> Size | None:
    """Read the size of a common color JPEG; None if Pillow has to open the file."""
    # Opening the file with Pillow takes 50 us, as long as flipping three images.
    for marker, start, end in segments(data):
        if marker in FRAMES:
            # Zeros pad a truncated file, so that its size is 0, and Pillow reports the error.
            content = data[start + 4 : min(end, start + 10)].ljust(6, b"\0")
            bits, height, width, components = struct.unpack(">BHHB", content)
            if (bits, components) == (8, 3) and 0 < width * height <= MAX_PIXELS:
                return width, height
            return None
        if marker not in SKIPPED or data.startswith(b"MPF\0", start + 4):  # MPF: several images
            return None
    return None


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, from 1 to 8; 1 if it is missing or damaged."""
    with suppress(Exception):  # Pillow raises many types for damaged EXIF data
        return range(1, 9).index(image.getexif()[ORIENTATION]) + 1  # raises for other values
    return 1


def upright_pixels(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate (and flip) uint8 [H, W, 3] upright according to an EXIF orientation."""
    image = Image.fromarray(pixels)
    image.getexif()[ORIENTATION] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


def unsupported_features(data: bytes) -> list[str]:
    """Return a readable image's features that training ignores: DARK, TRANSPARENT or PAGES."""
    found = []
    with suppress(Exception):
        image = open_image(data)
        if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO has a preview
            found.append(PAGES)
        has_16_bits = ";16" in str(image.tile)  # RGB;16B or I;16 in a PNG or TIFF file
        if has_16_bits and rgb_pixels(image).max() < DARK_LEVEL:
            found.append(DARK)
        if image.has_transparency_data:
            lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
            if lowest != 255:
                found.append(TRANSPARENT)
    return found


def decode_pillow(data: bytes, box: Box, scale: int) -> np.ndarray:
    image = open_image(data)
    image.draft("RGB", (image.width // scale, image.height // scale))
    return rgb_pixels(image.crop(box))


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """Convert to uint8 [H, W, 3] like torchvision's loader, but keep the high byte of 16-bit gray.

    Raises OSError, ValueError or SyntaxError for damaged data and for 32-bit levels.
    """
    image.load()
    if image.mode == "La":  # premultiplied gray, which Pillow converts only to LA
        image = image.convert("LA")
    if image.mode.startswith("I;16"):
        # A copy has the correct shape even if a TIFF's orientation was ignored.
        image = Image.fromarray((np.asarray(image.copy()) >> 8).astype(np.uint8))
    problem = BLACK_OR_WHITE.get((image.mode, image.palette))
    if problem:
        raise UnreadableError(f"Pillow reads {problem}; save it as an 8-bit or 16-bit PNG")
    if (image.mode, image.size) != ("RGB", image.im.size):  # a needless copy takes up to 20 %
        image = image.convert("RGB")
    return np.asarray(image)


def decode_region(data: bytes, box: Box, scale: int) -> np.ndarray:
    left, top, right, bottom = box
    pixels = np.empty((bottom - top, right - left, 3), np.uint8)
    decoder = region.load()
    if decoder(data, box, scale, pixels.ctypes.data):
        return pixels
    return decode_pillow(data, box, scale)  # supports more files, and reports errors more clearly


# Name -> decoder, the fastest first
DECODERS: dict[str, Decode] = {"region": decode_region, "pillow": decode_pillow}


@cache  # warns once
def resolve(name: str) -> str:
    """Return the CPU decoder for loader.decoder, the first that works unless it names one.

    Raises UserError if `name` is a CPU decoder that does not work on this machine.
    """
    if name != "pillow":
        try:
            region.load()
            return "region"
        except UserError as error:
            if name == "region":
                raise
            logger.warning("decoding with pillow takes up to twice as long: %s", error)
    return "pillow"
