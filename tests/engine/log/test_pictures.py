"""Images of datasets as pictures."""

import numpy as np
import pytest

from engine.log.pictures import rgb

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
