"""Images of datasets as sheets."""

import numpy as np
import pytest

from engine.log.sheet import rgb, sheet

GREY = [[[10] * 3, [255] * 3]]


@pytest.mark.parametrize(
    ("levels", "dtype", "expected"),
    [
        ([[[1, 2, 3]]], "uint8", [[[1, 2, 3]]]),
        ([[[10], [255]]], "uint8", GREY),
        ([[[10 * 257, 0, 0, 1, 2], [65535, 9, 9, 9, 9]]], "uint16", GREY),
        ([[[[0.04], [1.2]]], [[[0], [0]]]], "float32", GREY),
    ],
)
def test_images_of_any_channels_and_dtype(levels: object, dtype: str, expected: object) -> None:
    """The last one has two frames, and a level above 1."""
    found = rgb(np.array(levels, dtype))
    assert found.dtype == np.uint8 and found.tolist() == expected


STRANGE = ["plain", "a name far longer than any tile has room for " * 3, "ねこ", "\udcff", ""]


@pytest.mark.parametrize("side", [20, 192, 400])
def test_each_image_is_in_its_place_above_its_caption(side: int) -> None:
    pixels = [np.full((side, side, 3), 40 * i + 7, np.uint8) for i in range(5)]
    drawn = np.asarray(sheet("title", pixels, [f"{name}\n-> plain" for name in STRANGE]))
    for i in range(5):
        x, y = 8 + i % 4 * 200, 40 + i // 4 * 254
        assert (drawn[y : y + 192, x : x + 192] == 40 * i + 7).all()
        assert (drawn[y + 192, x : x + 192] == 255).all()
        assert (drawn[y + 193 : y + 254, x : x + 192] == 0).all(2).any()
        assert (drawn[y:, x + 192 : x + 200] == 255).all(), "a long caption is clipped"
