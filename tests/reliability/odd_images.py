"""Image files as a download, a camera or an attacker leaves them, made by code.

`KINDS` is the table: a name -> what makes the file, and what the trainer does with it. As a
program, this module loads them, or mutated JPEGs, in a process of its own with bounded memory:

    python -m tests.reliability.odd_images DECODER,DECODER,... kinds FOLDER
    python -m tests.reliability.odd_images DECODER,DECODER,... mutated FIRST LAST PROGRESS_FILE
"""

import hashlib
import io
import json
import os
import random
import resource
import struct
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeline import decode
from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.dataset import BadImageError, FolderDataset
from pipeline.decode import describe
from pipeline.index import load_index
from tests.drawings import draw_image

WIDTH, HEIGHT = 90, 70  # of an image that is trained, in pixels
MAX_PIXELS = 4_000_000  # data.max_pixels of the campaign
# What a process may allocate for an image beyond what it has. 20 bytes for each of MAX_PIXELS, and
# what the allocators and a first import keep.
SPARE_BYTES = 400 << 20

# What is in a file: its bytes.
Make = Callable[[], bytes]


@cache
def drawn(mode: str = "RGB") -> Image.Image:
    return draw_image("plaid", np.random.default_rng(0)).resize((WIDTH, HEIGHT)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(drawn(mode), **options)


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of the segments of a JPEG; the last one is that of the first scan."""
    at = 2
    while data[at + 1] != 0xD9:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield data[at + 1], at, end
        if data[at + 1] == 0xDA:
            return
        at = end


def place(data: bytes, *markers: int) -> int:
    """Start of the first segment with one of these markers."""
    return next(at for marker, at, _ in segments(data) if marker in markers)


def frame(data: bytes) -> int:
    return place(data, 0xC0, 0xC1, 0xC2)


def scan(data: bytes) -> int:
    """Start of the entropy-coded data of the first scan."""
    return [end for _, _, end in segments(data)][-1]


def patched(data: bytes, at: int, content: bytes) -> bytes:
    return data[:at] + content + data[at + len(content) :]


def inserted(data: bytes, at: int, content: bytes) -> bytes:
    return data[:at] + content + data[at:]


def resized(data: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header has another size."""
    return patched(data, frame(data) + 5, struct.pack(">HH", height, width))


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def half_scan(data: bytes) -> bytes:
    """Half of the data, and an end marker."""
    start = scan(data)
    middle = start + (len(data) - start) // 2
    return data[: middle - (data[middle - 1] == 0xFF)] + b"\xff\xd9"


def scans(data: bytes) -> list[int]:
    """Where the marker of each scan begins."""
    found, at = [], frame(data)
    while (at := data.find(b"\xff\xda", at)) >= 0:
        found.append(at)
        at += 2
    return found


def cut_scan(number: int) -> bytes:
    """A progressive file that ends in the middle of one of its scans."""
    data = jpeg(progressive=True)
    start, end = [*scans(data), len(data) - 2][number : number + 2]
    return data[: (start + 14 + end) // 2] + b"\xff\xd9"


def without_scans(number: int) -> bytes:
    """A progressive file that ends after some of its scans."""
    data = jpeg(progressive=True)
    return data[: scans(data)[number]] + b"\xff\xd9"


def many_scans(count: int) -> bytes:
    """A progressive file that repeats its last scan, with no data in it."""
    data = jpeg(progressive=True)
    last = scans(data)[-1]
    header = data[last : last + 2 + int.from_bytes(data[last + 2 : last + 4], "big")]
    return data[:-2] + count * (header + b"\0") + b"\xff\xd9"


def lossless() -> bytes:
    """A lossless JPEG, SOF3, in grey: each sample is coded as its difference to the left one."""
    samples = np.asarray(drawn("L")).astype(int)
    bits = ""
    for y, row in enumerate(samples):
        first = samples[y - 1, 0] if y else 128
        for difference in np.diff(row, prepend=first).tolist():
            size = abs(difference).bit_length()
            coded = difference if difference >= 0 else difference + (1 << size) - 1
            bits += f"{size:04b}" + (f"{coded:0{size}b}" if size else "")
    bits += "1" * (-len(bits) % 8)
    content = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    table = b"\0" + bytes((0, 0, 0, 9, *[0] * 12)) + bytes(range(9))
    return (
        b"\xff\xd8"
        + segment(0xC3, struct.pack(">BHHB3B", 8, HEIGHT, WIDTH, 1, 1, 0x11, 0))
        + segment(0xC4, table)
        + segment(0xDA, bytes((1, 1, 0, 1, 0, 0)))
        + content
        + b"\xff\xd9"
    )


# 24x16 pixels, as written by cjpeg -arithmetic: Pillow does not write this coding.


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(
    width: int,
    height: int,
    rows: bytes,
    *chunks: bytes,
    bits: int = 8,
    kind: int = 2,
    passes: int = 0,
) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, passes))
    content = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + content + chunk(b"IEND", b"")


def png_rows(height: int = HEIGHT) -> bytes:
    """The rows of a PNG, each with its filter."""
    return b"".join(b"\0" + row.tobytes() for row in np.asarray(drawn())[:height])


def interlaced(rows: int = HEIGHT) -> bytes:
    """An interlaced PNG with the rows below `rows` missing in its last pass."""
    pixels, data = np.asarray(drawn()), b""
    steps = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
    for top, left, down, right in steps:
        data += b"".join(b"\0" + row.tobytes() for row in pixels[top::down, left::right])
    data += b"".join(b"\0" + row.tobytes() for row in pixels[1:rows:2])
    return png(WIDTH, HEIGHT, data, passes=1)


def tiff(order: str = "<", **tags: Any) -> bytes:
    """An uncompressed TIFF; `tags` override its fields, each (type, value)."""
    pixels = np.asarray(drawn()).tobytes()
    names = {"width": 256, "height": 257, "bits": 258, "compression": 259, "photometric": 262}
    names |= {"offset": 273, "samples": 277, "rows": 278, "length": 279}
    names |= {"tile_width": 322, "tile_height": 323, "tile_offset": 324, "tile_length": 325}
    fields = {"width": (4, WIDTH), "height": (4, HEIGHT), "bits": (3, 8), "compression": (3, 1)}
    fields |= {"photometric": (3, 2), "offset": (4, 8), "samples": (3, 3), "rows": (4, HEIGHT)}
    fields |= {"length": (4, len(pixels))} | tags
    entries = b""
    for name, (kind, value) in sorted(fields.items(), key=lambda item: names[item[0]]):
        content = struct.pack(
            order + {3: "HH", 4: "I"}[kind], *([value, 0] if kind == 3 else [value])
        )
        entries += struct.pack(order + "HHI", names[name], kind, 1) + content
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8 + len(pixels))
    return head + pixels + struct.pack(order + "H", len(fields)) + entries + bytes(4)


def bmp(height: int) -> bytes:
    data = encoded(drawn(), "BMP")
    return patched(data, 22, struct.pack("<i", height))


def gif(width: int, height: int) -> bytes:
    """A GIF with another size of its screen and of its frame."""
    data = jpeg_free_gif()
    at = data.index(b"\x2c\0\0\0\0")
    data = patched(data, 6, struct.pack("<HH", width, height))
    return patched(data, at + 5, struct.pack("<HH", width, height))


@cache
def jpeg_free_gif() -> bytes:
    return encoded(drawn("P"), "GIF")


def with_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(exif=exif.tobytes())


def with_alpha() -> Image.Image:
    image = drawn("RGBA").copy()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def wide_grey(dtype: str = "<u2") -> Image.Image:
    values = np.asarray(drawn("L")).astype(dtype) * 257
    return Image.fromarray(values.astype(dtype))


def ppm(head: str) -> bytes:
    return head.encode() + np.asarray(drawn()).tobytes()


def ended_before(marker: int) -> bytes:
    data = jpeg()
    return data[: place(data, marker)]


SIZE = (WIDTH, HEIGHT)
# What makes each kind, and the size of the image if it is trained, or a part of the message.
Verdict = tuple[int, int] | str
TRUNCATED = "truncated"
SHORT = "the file ends before the image does"
PIXELS = "more than data.max_pixels=4000000"
NO_IMAGE = "cannot identify image file"
KINDS: dict[str, tuple[Make, Verdict]] = {
    # JPEG: the usual kinds.
    "jpeg": (jpeg, SIZE),
    "jpeg 4:4:4": (lambda: jpeg(subsampling=0), SIZE),
    "jpeg progressive": (lambda: jpeg(progressive=True), SIZE),
    "jpeg grey": (lambda: jpeg("L"), SIZE),
    "jpeg CMYK": (lambda: jpeg("CMYK"), SIZE),
    "jpeg 12 bits": (
        lambda: patched(patched(jpeg(), frame(jpeg()) + 1, b"\xc1"), frame(jpeg()) + 4, b"\x0c"),
        "",
    ),
    "jpeg 1x1": (lambda: encoded(drawn().resize((1, 1))), (1, 1)),
    "jpeg 65500x1": (lambda: encoded(drawn().resize((65500, 1))), (65500, 1)),
    "jpeg EXIF rotation": (lambda: with_exif(6), SIZE),
    "jpeg corrupt EXIF": (
        lambda: inserted(jpeg(), 2, segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff")),
        SIZE,
    ),
    "jpeg corrupt ICC": (lambda: jpeg(icc_profile=b"no profile" * 100), SIZE),
    "jpeg trailing garbage": (lambda: jpeg() + random.Random(0).randbytes(5000), SIZE),
    # JPEG: damaged.
    "jpeg without bytes": (lambda: b"", NO_IMAGE),
    "jpeg start marker alone": (lambda: b"\xff\xd8\xff", ""),
    "jpeg ends before its frame": (lambda: ended_before(0xC0), ""),
    "jpeg ends before its scan": (lambda: ended_before(0xDA), ""),
    "jpeg ends in its scan": (lambda: jpeg()[:-300], TRUNCATED),
    "jpeg lacks its end marker": (lambda: jpeg()[:-2], TRUNCATED),
    "jpeg has half of its data and an end marker": (lambda: half_scan(jpeg()), SHORT),
    "jpeg grey with half of its data": (lambda: half_scan(jpeg("L")), SHORT),
    "jpeg claims twice its height": (lambda: resized(jpeg(), WIDTH, 2 * HEIGHT), SHORT),
    "jpeg claims twice its width": (lambda: resized(jpeg(), 2 * WIDTH, HEIGHT), SHORT),
    "jpeg claims 65,500 x 65,500 pixels": (lambda: resized(jpeg(), 65500, 65500), PIXELS),
    "jpeg grey claims 65,500 x 65,500 pixels": (lambda: resized(jpeg("L"), 65500, 65500), PIXELS),
    "jpeg without data": (lambda: jpeg()[: scan(jpeg())] + b"\xff\xd9", SHORT),
    "jpeg without quantisation": (
        lambda: jpeg()[: place(jpeg(), 0xDB)] + jpeg()[frame(jpeg()) :],
        "",
    ),
    "jpeg garbage between segments": (lambda: inserted(jpeg(), frame(jpeg()), b"garbage"), SIZE),
    "jpeg progressive, cut in its first scan": (lambda: cut_scan(0), SHORT),
    "jpeg progressive, cut in a later scan": (lambda: cut_scan(5), SIZE),
    "jpeg progressive without scans": (lambda: without_scans(0), ""),
    "jpeg progressive with 100,000 scans": (lambda: many_scans(100_000), "scans"),
    # PNG.
    "png": (lambda: encoded(drawn(), "PNG"), SIZE),
    "png palette with transparency": (
        lambda: encoded(drawn("P"), "PNG", transparency=bytes(range(256))),
        SIZE,
    ),
    "png 16 bits grey": (lambda: encoded(wide_grey(), "PNG"), SIZE),
    "png 1x1": (lambda: encoded(drawn().resize((1, 1)), "PNG"), (1, 1)),
    "png interlaced": (interlaced, SIZE),
    "png named jpg": (lambda: encoded(drawn(), "PNG"), SIZE),
    "png ends in its data": (lambda: encoded(drawn(), "PNG")[:-2000], TRUNCATED),
    "png claims 65,500 x 65,500 pixels": (lambda: png(65500, 65500, png_rows()), PIXELS),
    # GIF, BMP, PPM.
    "gif": (jpeg_free_gif, SIZE),
    "gif animated": (
        lambda: encoded(drawn("P"), "GIF", save_all=True, append_images=[drawn("L").convert("P")]),
        SIZE,
    ),
    "gif claims 65,000 x 65,000 pixels": (lambda: gif(65000, 65000), PIXELS),
    "bmp": (lambda: encoded(drawn(), "BMP"), SIZE),
    "bmp claims 2,147,483,647 rows": (lambda: bmp(2**31 - 1), PIXELS),
    "ppm": (lambda: ppm(f"P6 {WIDTH} {HEIGHT} 255\n"), SIZE),
    "ppm claims twice its height": (lambda: ppm(f"P6 {WIDTH} {2 * HEIGHT} 255\n"), TRUNCATED),
    "ppm claims 10^9 columns": (lambda: ppm(f"P6 1000000000 {HEIGHT} 255\n"), PIXELS),
    # TIFF.
    "tiff": (tiff, SIZE),
    "tiff big-endian": (lambda: tiff(">"), SIZE),
    "tiff JPEG": (lambda: encoded(drawn(), "TIFF", compression="jpeg"), SIZE),
    "tiff 16 bits grey": (lambda: encoded(wide_grey(), "TIFF"), SIZE),
    "tiff orientation": (lambda: encoded(drawn(), "TIFF", tiffinfo={274: 6}), (HEIGHT, WIDTH)),
    "tiff floats in [0, 1]": (
        lambda: encoded(Image.fromarray(np.asarray(drawn("L")).astype("f4") / 255), "TIFF"),
        "32-bit levels",
    ),
    "tiff claims 65,500 x 65,500 pixels": (
        lambda: tiff(width=(4, 65500), height=(4, 65500)),
        PIXELS,
    ),
    # WebP.
    "webp": (lambda: encoded(drawn(), "WEBP"), SIZE),
    "webp lossless with alpha": (lambda: encoded(with_alpha(), "WEBP", lossless=True), SIZE),
    "webp ends in its data": (lambda: encoded(drawn(), "WEBP")[:-200], ""),
    "webp of 3,000 x 3,000 pixels": (
        lambda: encoded(Image.new("RGB", (3000, 3000)), "WEBP", method=0),
        PIXELS,
    ),
    # No images.
    "html": (lambda: b"<!DOCTYPE html><html><body>404 Not Found</body></html>", NO_IMAGE),
    "eps": (lambda: encoded(drawn(), "EPS"), NO_IMAGE),
    "git-lfs pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
        NO_IMAGE,
    ),
    "gzip of a jpeg": (lambda: b"\x1f\x8b" + zlib.compress(jpeg()), NO_IMAGE),
}


def load_kinds(folder: str, decoder: str) -> Iterator[dict[str, Any]]:
    """Load the file of each kind in `folder`: whole, and as training does.

    Yields:
        The name of the kind with `size` and a hash of the pixels, or `error`.
    """
    index = load_index(Path(folder), key="data.train")
    chain = build([{"random_resized_crop": {"size": 32}}], TRANSFORMS, key="augment.train")
    dataset = FolderDataset(index, Compose(chain), decoder=decoder, max_pixels=MAX_PIXELS)
    for i in range(len(dataset)):
        kind = list(KINDS)[int(Path(dataset.name(i)).stem)]
        try:
            pixels = decode.open_picture(dataset.read(i), decoder, MAX_PIXELS).pixels()
            found: dict[str, Any] = {"size": pixels.shape[1::-1], "hash": digest(pixels)}
            found["flat"] = int(np.ptp(pixels[-8:, -8:])) < 3
            assert dataset.load(0, i)[0].shape == (32, 32, 3)
        except Exception:
            try:
                dataset.load(0, i)
                found = {"error": "only as a whole"}
            except BadImageError as error:
                found = {"error": str(error)}
        yield {"kind": kind, "decoder": decoder} | found


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16]


def outcome(data: bytes, decoder: str, box: Callable[[tuple[int, int]], decode.Box]) -> Any:
    """The pixels of a region, or the error of a decoder."""
    try:
        picture = decode.open_picture(data, decoder, MAX_PIXELS)
        region = box(picture.size)
        size = region[2] - region[0], region[3] - region[1]
        return picture.resized(size, region).pixels()
    except MemoryError:
        raise
    except Exception as error:
        return describe(error)


def load_mutated(
    decoders: Sequence[str], numbers: range, progress: Callable[[int], object] = lambda number: None
) -> dict[str, Counter[str]]:
    """Load a region of each of many damaged JPEGs with each decoder, and count what happens.

    Raises:
        AssertionError: the region differs from Pillow's, or has what libjpeg makes of missing data.
    """
    from tests.pipeline.test_region import FILES, damaged

    counts: dict[str, Counter[str]] = {name: Counter() for name in decoders}
    for number in numbers:
        progress(number)
        rng = random.Random(number)
        data = damaged(rng.choice(FILES), rng)
        draws = [rng.random() for _ in range(4)]

        def box(size: tuple[int, int], draws: list[float] = draws) -> decode.Box:
            left, top = int(draws[0] * size[0]), int(draws[1] * size[1])
            right = left + 1 + int(draws[2] * (size[0] - left))
            return left, top, min(right, size[0]), top + 1 + int(draws[3] * (size[1] - top - 1))

        pillows = outcome(data, "pillow", box)
        for name in decoders:
            made = pillows if name == "pillow" else outcome(data, name, box)
            counts[name][judge(made, pillows, f"random.Random({number}) and {name}")] += 1
    return counts


def judge(made: Any, pillows: Any, what: str) -> str:
    """Compare the pixels or the error of a decoder with those of Pillow."""
    if isinstance(made, str):
        assert isinstance(pillows, str) and "\n" not in made, f"{what}: {made}"
        return "named"
    assert not is_missing(made), f"{what}: grey: {made[-8:, -8:]}"
    if isinstance(pillows, str):
        assert what.endswith("region"), f"{what}: {pillows}"
        return "trained, damaged below the region"  # which this decoder does not read
    np.testing.assert_array_equal(made, pillows, what)
    return "trained"


def is_missing(pixels: np.ndarray) -> bool:
    """Whether an image ends in what libjpeg makes of missing data."""
    end = pixels[-8:, -8:]
    return min(end.shape[:2]) >= 4 and bool((end == 128).all())


def fill_new_memory() -> None:
    """Fill the memory of new arrays: pixels that a decoder leaves out are then the same for all."""
    empty = np.empty

    def filled(*args: Any, **options: Any) -> np.ndarray:
        array: np.ndarray = empty(*args, **options)
        array.view(np.uint8).fill(171)
        return array

    np.empty = filled  # type: ignore[assignment]


def limit_memory() -> None:
    """Let this process allocate SPARE_BYTES."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(decoder: str, what: str, *arguments: str) -> None:
    warnings.filterwarnings("ignore", module="PIL")  # as in a worker
    torch.set_num_threads(1)
    fill_new_memory()
    for name in decoder.split(","):  # loads what it needs
        outcome(jpeg(), name, lambda size: (0, 0, *size))
    limit_memory()
    if what == "kinds":
        for name in decoder.split(","):
            for answer in load_kinds(arguments[0], name):
                print(json.dumps(answer), flush=True)
        return
    first, last, path = int(arguments[0]), int(arguments[1]), arguments[2]
    with open(path, "wb", buffering=0) as file:
        found = load_mutated(
            decoder.split(","),
            range(first, last),
            lambda number: os.pwrite(file.fileno(), b"%9d" % number, 0),
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
