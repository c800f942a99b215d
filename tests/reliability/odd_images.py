"""Image files as left by downloads and cameras, most of them generated.

`KINDS` maps a name to a file and to the result of training on it. `damaged` mutates JPEGs, which
`load_mutated` loads.
"""

import io
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline.data import decode
from tests.helpers.drawings import draw_image

# Error of the region decoder. Pillow returns gray or wrong pixels instead.
DAMAGED = "the JPEG data is damaged or truncated"
SIZE = (90, 70)  # trained images, in pixels
# Pillow writes neither lossless JPEG nor PNG with 16 bits per channel; this one has 12.
LOSSLESS, DEEP = (Path(__file__).with_name(name) for name in ("lossless.jpg", "16_bits.png"))


@cache
def drawn(mode: str = "RGB") -> Image.Image:
    return draw_image("plaid", np.random.default_rng(0)).resize(SIZE).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(drawn(mode), **options)


def place(data: bytes, *markers: int) -> int:
    """Return the start of the first segment with one of these markers."""
    return next(start for marker, start, _ in decode.segments(data) if marker in markers)


def png(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(drawn(mode), "PNG", **options)


def changed(
    data: bytes, name: bytes, change: Callable[[bytes], bytes], *, new_name: bytes = b""
) -> bytes:
    """Change the contents or the name of a PNG's first chunk with this name."""
    start = data.index(name)
    end = start + 4 + int.from_bytes(data[start - 4 : start], "big")
    chunk = (new_name or name) + change(data[start + 4 : end])
    length, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", zlib.crc32(chunk))
    return data[: start - 4] + length + chunk + check + data[end + 4 :]


def first_rows(pixels: bytes) -> bytes:
    """Keep 10 rows of a PNG in RGB; each begins with the number of its filter."""
    return zlib.compress(zlib.decompress(pixels)[: 10 * (1 + 3 * SIZE[0])])


def with_alpha() -> Image.Image:
    image = drawn("RGBA").copy()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def wide_gray(dtype: str) -> Image.Image:
    return Image.fromarray(np.asarray(drawn("L")).astype(dtype) * 257)


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


CORRUPT_EXIF = b"\xff\xe1\0\x10Exif\0\0II*\0\xff\xff\xff\xff"
# Name -> file, and the image's size if it is trained, or part of the message.
KINDS: dict[str, tuple[Callable[[], bytes], tuple[int, int] | str]] = {
    "jpeg": (jpeg, SIZE),
    "jpeg progressive": (lambda: jpeg(progressive=True), SIZE),
    "jpeg gray": (lambda: jpeg("L"), SIZE),
    "jpeg CMYK": (lambda: jpeg("CMYK"), SIZE),
    "jpeg 1x1": (lambda: encoded(drawn().resize((1, 1))), (1, 1)),
    "jpeg 65500x1": (lambda: encoded(drawn().resize((65500, 1))), (65500, 1)),
    "jpeg EXIF rotation": (lambda: jpeg(exif=exif(6)), SIZE),
    "jpeg corrupt EXIF": (lambda: jpeg()[:2] + CORRUPT_EXIF + jpeg()[2:], SIZE),
    "jpeg trailing garbage": (lambda: jpeg() + random.Random(0).randbytes(5000), SIZE),
    "jpeg bytes before its end marker": (lambda: jpeg()[:-2] + bytes(9) + jpeg()[-2:], SIZE),
    "jpeg without bytes": (lambda: b"", "empty, 0 bytes"),
    "jpeg ends before its scan": (lambda: jpeg()[: place(jpeg(), 0xDA)], ""),
    "jpeg ends in its scan": (lambda: jpeg()[:-300], "truncated"),
    "jpeg lacks its end marker": (lambda: jpeg()[:-2], "truncated"),
    "png": (png, SIZE),
    "png gray": (lambda: png("L"), SIZE),
    "png palette with transparency": (lambda: png("P", transparency=bytes(range(256))), SIZE),
    "png alpha": (lambda: encoded(with_alpha(), "PNG"), SIZE),
    "png 16 bits gray": (lambda: encoded(wide_gray("<u2"), "PNG"), SIZE),
    "png 16 bits color": (DEEP.read_bytes, (30, 20)),
    "png ends in its data": (lambda: png()[:-2000], "Truncated File Read"),
    "png with metadata ends in zeros": (
        lambda: png(dpi=(72, 72))[:-2000] + bytes(2000),
        "broken PNG file",
    ),
    "png interlaced": (  # with a single pixel, which is stored in the same way
        lambda: changed(encoded(drawn().resize((1, 1)), "PNG"), b"IHDR", lambda c: c[:-1] + b"\1"),
        (1, 1),
    ),
    "png black": (lambda: encoded(Image.new("1", SIZE), "PNG"), SIZE),
    "png without its palette": (
        lambda: changed(png("P"), b"PLTE", bytes, new_name=b"teXt"),
        "Pillow reads no palette",
    ),
    "gif animated": (
        lambda: encoded(drawn("P"), "GIF", save_all=True, append_images=[drawn("L").convert("P")]),
        SIZE,
    ),
    "tiff JPEG": (lambda: encoded(drawn(), "TIFF", compression="jpeg"), SIZE),
    "tiff 16 bits gray, high byte first": (lambda: encoded(wide_gray(">u2"), "TIFF"), SIZE),
    "tiff orientation": (lambda: encoded(drawn(), "TIFF", tiffinfo={274: 6}), SIZE),
    "tiff of 32-bit floats": (lambda: encoded(drawn("F"), "TIFF"), "32-bit levels"),
    "webp": (lambda: encoded(drawn(), "WEBP"), SIZE),
    "webp flat": (lambda: encoded(Image.new("RGB", (900, 700)), "WEBP"), (900, 700)),
    "webp ends in zeros": (
        lambda: encoded(drawn(), "WEBP", quality=100)[:2500].ljust(5000, b"\0"),
        "ends in zeros",
    ),
    "avif": (lambda: b"\0\0\0\x1cftypavif" + bytes(50), "AVIF and HEIC are not supported"),
    "html": (lambda: b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "a web page"),
    "jpeg 2000": (lambda: encoded(drawn(), "JPEG2000"), "JPEG 2000 is not supported"),
    "pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "git lfs pull",
    ),
    "jpeg lossless": (LOSSLESS.read_bytes, (30, 20)),
    "eps": (lambda: encoded(drawn(), "EPS"), "cannot identify image file"),
}
if decode.torchcodec_decoders():  # without it, the other rows are black
    KINDS["png of rows that end early"] = (
        lambda: changed(png(), b"IDAT", first_rows),
        "damaged or incomplete",
    )


OPTIONS = (
    dict(quality=90),
    dict(subsampling=0),
    dict(subsampling=1, optimize=True),
    dict(progressive=True),
    dict(progressive=True, subsampling=0, quality=30),
    dict(restart_marker_blocks=3),
    dict(restart_marker_rows=1, subsampling=0),
)
# Small JPEGs of every kind; odd sizes end in the middle of a block.
FILES: list[bytes] = []
for number, size in enumerate([(131, 150), (97, 64), (34, 70), (18, 9)]):
    image = draw_image("plaid", np.random.default_rng(number)).resize(size)
    FILES += [encoded(image, **chosen) for chosen in OPTIONS]
    FILES += [encoded(image.convert(mode)) for mode in ("L", "CMYK")]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in one or two ways, first in the header, which must be intact for that."""
    ways = sorted(rng.sample(range(5), rng.choice([1, 1, 2])))
    made = bytearray(data)
    if 0 in ways:  # the size or the sampling factors
        at = place(data, 0xC0, 0xC1, 0xC2) + 5
        if rng.random() < 0.5:
            made[at : at + 4] = bytes((0, rng.randrange(160), 0, rng.randrange(160)))
        else:
            factors = (0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x13, 0x31, 0x42)
            made[at + 6 + 3 * rng.randrange(3)] = rng.choice(factors)
    if 1 in ways:  # change, repeat or remove a segment before the pixels, such as a table
        _, start, end = rng.choice(list(decode.segments(bytes(made))))
        changed = made[start:end]
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        made[start:end] = rng.choice([made[start:end] * 2, b"", changed])
    if 2 in ways:
        for _ in range(rng.choice([1, 1, 4, 16])):
            made[rng.randrange(2, len(made))] ^= 1 << rng.randrange(8)
    if 3 in ways:  # a part of the same or a different kind of file
        other = rng.choice(FILES)
        at, start = rng.randrange(len(other)), rng.randrange(2, len(made))
        made[start : start + rng.randrange(200)] = other[at : at + rng.randrange(200)]
    if 4 in ways:
        made[rng.randrange(2, len(made)) :] = rng.choice([b"", b"\xff\xd9"])
    return bytes(made)


def outcome(data: bytes, decoder: str, draws: Sequence[float], scale: int) -> np.ndarray | str:
    """Return a region's pixels, reduced to about 1 / scale, or the error of a decoder."""
    try:
        picture = decode.open_picture(data, decoder)
        width, height = picture.size
        left, top = int(draws[0] * width), int(draws[1] * height)
        right = min(left + 1 + int(draws[2] * (width - left)), width)
        bottom = top + 1 + int(draws[3] * (height - top - 1))
        size = -(-(right - left) // scale), -(-(bottom - top) // scale)
        return picture.resized(size, (left, top, right, bottom), quick=True).pixels()
    except decode.UnreadableError as error:
        return str(error)


def load_mutated(numbers: range) -> Counter[str]:
    """Compare regions of many damaged JPEGs with Pillow's, and count the outcomes."""
    counts = Counter[str]()
    for number in numbers:
        rng = random.Random(number)
        data = damaged(rng.choice(FILES), rng)
        draws, scale = [rng.random() for _ in range(4)], rng.choice([1, 1, 1, 2, 4, 8])
        made, pillows = (outcome(data, name, draws, scale) for name in ("region", "pillow"))
        what = f"random.Random({number})"
        if isinstance(made, str):
            assert isinstance(pillows, str) or made == DAMAGED, f"{what}: {made}"
            assert "\n" not in made, what
        elif not isinstance(pillows, str):  # an error if the damage is below the region
            np.testing.assert_array_equal(made, pillows, what)
        counts["named" if isinstance(made, str) else "trained"] += 1
    return counts
