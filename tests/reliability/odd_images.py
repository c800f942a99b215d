"""Image files as a download or a camera leaves them, made by code.

`KINDS` is the table: a name -> what is in the file, and what the trainer does with it. `damaged`
mutates JPEGs, which `load_mutated` loads.
"""

import io
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from pipeline import decode
from pipeline.decode import describe
from tests.drawings import draw_image

WIDTH, HEIGHT = SIZE = (90, 70)  # of an image that is trained, in pixels


@cache
def drawn(mode: str = "RGB") -> Image.Image:
    return draw_image("plaid", np.random.default_rng(0)).resize(SIZE).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(drawn(mode), **options)


def segments(data: bytes) -> list[tuple[int, int]]:
    """Start and end of the segments of a JPEG; the last one is the header of the first scan."""
    return [(start, end) for _, start, end in decode.segments(data)]


def place(data: bytes, *markers: int) -> int:
    """Start of the first segment with one of these markers."""
    return next(at for at, _ in segments(data) if data[at + 1] in markers)


def frame(data: bytes) -> int:
    return place(data, 0xC0, 0xC1, 0xC2)


def patched(data: bytes, at: int, content: bytes) -> bytes:
    return data[:at] + content + data[at + len(content) :]


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def with_segment(marker: int, content: bytes) -> bytes:
    return jpeg()[:2] + segment(marker, content) + jpeg()[2:]


def claiming(data: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header has another size."""
    return patched(data, frame(data) + 5, struct.pack(">HH", height, width))


def half_scan(data: bytes) -> bytes:
    """Half of the data, and an end marker."""
    start = segments(data)[-1][1]
    middle = start + (len(data) - start) // 2
    return data[: middle - (data[middle - 1] == 0xFF)] + b"\xff\xd9"


def ended_before(marker: int) -> bytes:
    return jpeg()[: place(jpeg(), marker)]


def png(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(drawn(mode), "PNG", **options)


def with_alpha() -> Image.Image:
    image = drawn("RGBA").copy()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def wide_grey() -> Image.Image:
    return Image.fromarray(np.asarray(drawn("L")).astype("<u2") * 257)


def before_frame(content: bytes) -> bytes:
    """A JPEG with more bytes before its frame header."""
    return ended_before(0xC0) + content + jpeg()[frame(jpeg()) :]


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


# The size of the image if it is trained, or a part of the message.
Verdict = tuple[int, int] | str
NO_IMAGE = "cannot identify image file"
KINDS: dict[str, tuple[Callable[[], bytes], Verdict]] = {
    "jpeg": (jpeg, SIZE),
    "jpeg progressive": (lambda: jpeg(progressive=True), SIZE),
    "jpeg grey": (lambda: jpeg("L"), SIZE),
    "jpeg CMYK": (lambda: jpeg("CMYK"), SIZE),
    "jpeg 12 bits": (lambda: patched(jpeg(), frame(jpeg()) + 4, b"\x0c"), ""),
    "jpeg 1x1": (lambda: encoded(drawn().resize((1, 1))), (1, 1)),
    "jpeg 65500x1": (lambda: encoded(drawn().resize((65500, 1))), (65500, 1)),
    "jpeg EXIF rotation": (lambda: jpeg(exif=exif(6)), SIZE),
    "jpeg corrupt EXIF": (lambda: with_segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"), SIZE),
    "jpeg trailing garbage": (lambda: jpeg() + random.Random(0).randbytes(5000), SIZE),
    "jpeg without bytes": (lambda: b"", NO_IMAGE),
    "jpeg ends before its scan": (lambda: ended_before(0xDA), ""),
    "jpeg ends in its scan": (lambda: jpeg()[:-300], "truncated"),
    "jpeg lacks its end marker": (lambda: jpeg()[:-2], "truncated"),
    "jpeg has half of its data and an end marker": (lambda: half_scan(jpeg()), SIZE),
    "jpeg claims twice its height": (
        lambda: claiming(jpeg(), WIDTH, 2 * HEIGHT),
        (WIDTH, 2 * HEIGHT),
    ),
    "jpeg garbage before its frame": (lambda: before_frame(b"garbage"), SIZE),
    "png": (png, SIZE),
    "png palette": (lambda: png("P"), SIZE),
    "png palette with transparency": (lambda: png("P", transparency=bytes(range(256))), SIZE),
    "png alpha": (lambda: encoded(with_alpha(), "PNG"), SIZE),
    "png 16 bits grey": (lambda: encoded(wide_grey(), "PNG"), SIZE),
    "png ends in its data": (lambda: png()[:-2000], "truncated"),
    "gif animated": (
        lambda: encoded(drawn("P"), "GIF", save_all=True, append_images=[drawn("L").convert("P")]),
        SIZE,
    ),
    "tiff JPEG": (lambda: encoded(drawn(), "TIFF", compression="jpeg"), SIZE),
    "tiff orientation": (lambda: encoded(drawn(), "TIFF", tiffinfo={274: 6}), SIZE),
    "tiff of 32-bit floats": (lambda: encoded(drawn("F"), "TIFF"), "32-bit levels"),
    "webp": (lambda: encoded(drawn(), "WEBP"), SIZE),
    "webp ends in its data": (lambda: encoded(drawn(), "WEBP")[:-200], ""),
    "html": (lambda: b"<!DOCTYPE html><html><body>404 Not Found</body></html>", NO_IMAGE),
    "eps": (lambda: encoded(drawn(), "EPS"), NO_IMAGE),
}


# Mutated JPEGs.


def small_files() -> list[bytes]:
    """Small JPEGs of every kind; odd sizes end in the middle of a block."""
    options: tuple[dict[str, Any], ...] = (
        dict(quality=90),
        dict(subsampling=0),
        dict(subsampling=1, optimize=True),
        dict(progressive=True),
        dict(progressive=True, subsampling=0, quality=30),
        dict(restart_marker_blocks=3),
        dict(restart_marker_rows=1, subsampling=0),
    )
    made = []
    for number, size in enumerate([(131, 150), (97, 64), (34, 70), (18, 9)]):
        image = draw_image("plaid", np.random.default_rng(number)).resize(size)
        made += [encoded(image, **chosen) for chosen in options]
        made += [encoded(image.convert(mode)) for mode in ("L", "CMYK")]
    return made


FILES = small_files()


def damage_header(data: bytes, rng: random.Random) -> bytes:
    """Change the size or the sampling factors."""
    made, at = bytearray(data), frame(data) + 5
    if rng.random() < 0.5:
        made[at : at + 4] = bytes((0, rng.randrange(160), 0, rng.randrange(160)))
    else:
        factors = (0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x13, 0x31, 0x42)
        made[at + 6 + 3 * rng.randrange(3)] = rng.choice(factors)
    return bytes(made)


def damage_segments(data: bytes, rng: random.Random) -> bytes:
    """Repeat, remove or change a segment before the pixels, such as a table."""
    start, end = rng.choice(segments(data))
    changed = bytearray(data[start:end])
    changed[rng.randrange(len(changed))] = rng.randrange(256)
    middle = rng.choice([data[start:end] * 2, b"", bytes(changed)])
    return data[:start] + middle + data[end:]


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 4, 16])):
        made[rng.randrange(2, len(data))] ^= 1 << rng.randrange(8)
    at = rng.randrange(2, len(data))
    if rng.random() < 0.3:
        made[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
    return bytes(made)


def splice(data: bytes, rng: random.Random) -> bytes:
    """Replace a part by a part of the same or another kind of file."""
    other = rng.choice(FILES)
    at, start = rng.randrange(len(other)), rng.randrange(2, len(data))
    end = start + rng.randrange(200)
    return data[:start] + other[at : at + rng.randrange(200)] + data[end:]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(2, len(data))] + rng.choice([b"", b"\xff\xd9"])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in one or two ways; the header, which must be intact for that, comes first."""
    ways = (damage_header, damage_segments, damage_bytes, splice, cut)
    for number in sorted(rng.sample(range(len(ways)), rng.choice([1, 1, 2]))):
        data = ways[number](data, rng)
    return data


def outcome(data: bytes, decoder: str, draws: Sequence[float], scale: int = 1) -> np.ndarray | str:
    """The pixels of a region, made about 1 / scale as large, or the error of a decoder."""
    try:
        picture = decode.open_picture(data, decoder)
        width, height = picture.size
        left, top = int(draws[0] * width), int(draws[1] * height)
        right = min(left + 1 + int(draws[2] * (width - left)), width)
        bottom = top + 1 + int(draws[3] * (height - top - 1))
        size = -(-(right - left) // scale), -(-(bottom - top) // scale)
        return picture.resized(size, (left, top, right, bottom), quick=True).pixels()
    except MemoryError:
        raise
    except Exception as error:
        return describe(error)


def load_mutated(decoders: Sequence[str], numbers: range) -> dict[str, Counter[str]]:
    """Load a region of each of many damaged JPEGs with each decoder, and count what happens.

    Raises:
        AssertionError: the region differs from Pillow's.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in decoders}
    for number in numbers:
        rng = random.Random(number)
        data = damaged(rng.choice(FILES), rng)
        draws, scale = [rng.random() for _ in range(4)], rng.choice([1, 1, 1, 2, 4, 8])
        pillows = outcome(data, "pillow", draws, scale)
        for name in decoders:
            made = pillows if name == "pillow" else outcome(data, name, draws, scale)
            counts[name][judge(made, pillows, f"random.Random({number}) and {name}")] += 1
    return counts


def judge(made: np.ndarray | str, pillows: np.ndarray | str, what: str) -> str:
    """Compare the pixels or the error of a decoder with those of Pillow."""
    if isinstance(made, str):
        assert isinstance(pillows, str) and "\n" not in made, f"{what}: {made}"
        return "named"
    if isinstance(pillows, str):
        assert what.endswith("region"), f"{what}: {pillows}"
        return "trained, damaged below the region"  # which this decoder does not read
    np.testing.assert_array_equal(made, pillows, what)
    return "trained"
