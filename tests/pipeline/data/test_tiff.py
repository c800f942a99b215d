"""decode.open_picture reads a TIFF right or raises UnreadableError, whatever its layout."""

import struct
from itertools import product

import numpy as np
import pytest

from conf.errors import UnreadableError
from pipeline.data.decode import open_picture

HEIGHT, WIDTH = 24, 32
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # sample formats
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK = 0, 1, 2, 3, 5  # photometric interpretations
COLOR_MAP = 320
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
    extra: int | None = None,
    colors: list[int] | None = None,
    order: str = "<",
) -> bytes:
    """Write uncompressed `samples` (float [H, W, C] from 0 to 1); `order`: < or >."""
    count = samples.shape[2]
    if sample_format == FLOAT:
        levels = samples.astype(f"{order}f{bits // 8}")
    else:
        lowest = -(1 << (bits - 1)) if sample_format == SIGNED else 0
        levels = np.round(samples * ((1 << bits) - 1)).astype(np.int64) + lowest
    planes = [levels] if planar == 1 else np.split(levels, count, axis=2)
    strips = [packed(plane, bits, sample_format, order) for plane in planes]
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("I", [WIDTH]),
        257: ("I", [HEIGHT]),
        258: ("H", [bits] * count),
        259: ("H", [1]),
        262: ("H", [photometric]),
        273: ("I", [0] * len(strips)),
        277: ("H", [count]),
        278: ("I", [HEIGHT]),
        279: ("I", list(map(len, strips))),
        284: ("H", [planar]),
        COLOR_MAP: ("H", colors or []),
        338: ("H", [] if extra is None else [extra]),
        339: ("H", [sample_format] * count),
    }
    tags = {tag: entry for tag, entry in tags.items() if entry[1]}
    first_value = 8 + 2 + 12 * len(tags) + 4
    sizes = [struct.calcsize(kind) * len(values) for kind, values in tags.values()]
    first_strip = first_value + sum(size for size in sizes if size > 4)
    tags[273] = ("I", [first_strip + sum(map(len, strips[:i])) for i in range(len(strips))])
    entries, values = b"", b""
    for tag, (kind, numbers) in tags.items():
        content = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
        field = content.ljust(4, b"\0")
        if len(content) > 4:
            field = struct.pack(f"{order}I", first_value + len(values))
            values += content
        entries += struct.pack(f"{order}HHI", tag, 3 if kind == "H" else 4, len(numbers)) + field
    start = struct.pack(f"{order}2sHIH", {"<": b"II", ">": b"MM"}[order], 42, 8, len(tags))
    return start + entries + bytes(4) + values + b"".join(strips)


def packed(levels: np.ndarray, bits: int, sample_format: int, order: str) -> bytes:
    if sample_format == FLOAT:
        return levels.tobytes()
    if bits % 8 == 0:
        kind = "i" if sample_format == SIGNED else "u"
        return levels.astype(f"{order}{kind}{bits // 8}").tobytes()
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
def test_tiff_levels_are_right_or_unreadable(bits, sample_format, order):
    tolerance = QUANTIZATION.get(bits, 2)
    gray = COLORS[..., :1].round() if bits == 1 else COLORS[..., :1]
    files = 0
    for photometric, planar, extra in product((0, 1), (1, 2), (None, 0, 1, 2)):
        samples = 1 - gray if photometric == WHITE_IS_ZERO else gray
        if extra is not None:
            samples = np.dstack([samples, OPAQUE])
        layout = {"planar": planar, "extra": extra, "order": order}
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
def test_tiff_color_map_of_8_bits_is_unreadable(bits, highest):
    count = 1 << bits
    colors = np.linspace(0, highest, 3 * count).round().astype(int)
    numbers = COLUMNS * (count - 1) // (WIDTH - 1)
    expected = np.dstack([colors[numbers + i * count] for i in range(3)]) / highest
    samples = numbers[..., None] / (count - 1)
    data = tiff(samples, bits, UNSIGNED, PALETTE, colors=colors.tolist())
    assert check(data, expected) == (highest == 65_535)
