"""decode.open_picture reads TIFF files of any layout correctly or raises UnreadableError."""

import struct
from itertools import product

import numpy as np
import pytest

from conf.errors import UnreadableError
from pipeline.data.decode import open_picture

HEIGHT, WIDTH = 24, 32
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # sample formats
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK = 0, 1, 2, 3, 5  # photometric interpretations
COLOR_MAP, EXTRA_SAMPLES = 320, 338  # tags
QUANTIZATION = {2: 22, 4: 5}  # mean error of bits per sample, in levels of 255
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]
COLORS = np.dstack([COLUMNS / (WIDTH - 1), ROWS / (HEIGHT - 1), (ROWS + COLUMNS) / 54])
OPAQUE = np.ones((HEIGHT, WIDTH, 1))


def tiff(
    samples: np.ndarray,
    bits: int,
    sample_format: int,
    photometric: int,
    *,
    planar: int = 1,
    tags: dict[int, list[int]] | None = None,
    order: str = "<",
) -> bytes:
    """Write uncompressed `samples` (float [H, W, C] from 0 to 1); `order`: < or >.

    `tags`: number of an additional tag -> 16-bit values.
    """
    count = samples.shape[2]
    planes = [samples] if planar == 1 else np.split(samples, count, axis=2)
    strips = [packed(plane, bits, sample_format, order) for plane in planes]
    body = b"".join(strips)
    short: dict[int, list[int]] = {
        258: [bits] * count,
        259: [1],
        262: [photometric],
        277: [count],
        284: [planar],
        339: [sample_format] * count,
        **(tags or {}),
    }
    long: dict[int, list[int]] = {
        256: [WIDTH],
        257: [HEIGHT],
        273: list(range(8, 8 + len(body), len(strips[0]))),
        278: [HEIGHT],
        279: list(map(len, strips)),
    }
    entries = b""
    for tag, values in sorted((short | long).items()):
        kind, number = ("H", 3) if tag in short else ("I", 4)
        field = struct.pack(f"{order}{len(values)}{kind}", *values).ljust(4, b"\0")
        if len(field) > 4:
            body, field = body + field, struct.pack(f"{order}I", 8 + len(body))
        entries += struct.pack(f"{order}HHI", tag, number, len(values)) + field
    mark = {"<": b"II", ">": b"MM"}[order]
    start = struct.pack(f"{order}2sHI", mark, 42, 8 + len(body))
    return start + body + struct.pack(f"{order}H", len(short | long)) + entries + bytes(4)


def packed(samples: np.ndarray, bits: int, sample_format: int, order: str) -> bytes:
    if sample_format == FLOAT:
        return samples.astype(f"{order}f{bits // 8}").tobytes()
    levels = np.round(samples * ((1 << bits) - 1)).astype(np.int64)
    if sample_format == SIGNED:
        return (levels - (1 << (bits - 1))).astype(f"{order}i{bits // 8}").tobytes()
    if bits % 8 == 0:
        return levels.astype(f"{order}u{bits // 8}").tobytes()
    rows = levels.reshape(HEIGHT, -1, 1) >> np.arange(bits)[::-1] & 1
    return np.packbits(rows.reshape(HEIGHT, -1).astype(np.uint8), axis=1).tobytes()


def check(data: bytes, expected: np.ndarray, tolerance: float = 2) -> bool:
    """Return whether the file is read; it must then have the expected pixels."""
    try:
        pixels = open_picture(data, "pillow").pixels()
    except UnreadableError as error:
        assert "conversion from" not in str(error)
        return False
    assert abs(pixels - 255 * expected).mean() < tolerance
    return True


KINDS = [*product((1, 2, 4, 6, 8, 10, 12, 14, 16, 32), [UNSIGNED])]
KINDS += [*product((8, 16, 32), [SIGNED]), *product((16, 32, 64), [FLOAT])]


@pytest.mark.parametrize(("bits", "sample_format"), KINDS)
@pytest.mark.parametrize("order", "<>")
def test_open_picture_tiff_levels(bits, sample_format, order):
    tolerance = QUANTIZATION.get(bits, 2)
    gray = COLORS[..., :1].round() if bits == 1 else COLORS[..., :1]
    files = 0
    for photometric, planar, extra in product((0, 1), (1, 2), (None, 0, 1, 2)):
        samples = 1 - gray if photometric == WHITE_IS_ZERO else gray
        layout = {"planar": planar, "order": order}
        if extra is not None:
            samples = np.dstack([samples, OPAQUE])
            layout["tags"] = {EXTRA_SAMPLES: [extra]}
        data = tiff(samples, bits, sample_format, photometric, **layout)
        files += check(data, gray, tolerance)
        for photometric, colors in ((RGB, COLORS), (CMYK, np.dstack([1 - COLORS, 0 * OPAQUE]))):
            if extra is not None:
                colors = np.dstack([colors, OPAQUE])
            data = tiff(colors, bits, sample_format, photometric, **layout)
            files += check(data, COLORS, tolerance)
    if (bits, sample_format) in [(8, UNSIGNED), (16, UNSIGNED)]:
        assert files >= 8


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("highest", [255, 65_535])
def test_open_picture_rejects_8_bit_color_map(bits, highest):
    count = 1 << bits
    colors = np.linspace(0, highest, 3 * count).round().astype(int)
    numbers = COLUMNS * (count - 1) // (WIDTH - 1)
    expected = np.dstack([colors[numbers + i * count] for i in range(3)]) / highest
    samples = numbers[..., None] / (count - 1)
    data = tiff(samples, bits, UNSIGNED, PALETTE, tags={COLOR_MAP: colors.tolist()})
    assert check(data, expected) == (highest == 65_535)
