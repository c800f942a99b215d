"""A mask follows its image: cropped, resized and mirrored by the same draws."""

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.augment import TRANSFORMS, Compose, build, follow
from pipeline.decode import JpegFile, Picture, open_picture
from tests.reliability.odd_images import encoded, exif

# An image that is its own mask: blocks of 20 px of two levels, without any symmetry.
MASK = np.random.default_rng(5).integers(1, 3, (7, 8)).repeat(20, 0).repeat(20, 1)[:, :155]
IMAGE = np.stack([MASK * 100] * 3, axis=-1).astype(np.uint8)
FLIP: Any = "horizontal_flip"
CROP: Any = {"random_crop": {"size": 150, "padding": 40}}


def moved(entries: list[Any], seed: int, source: Any = IMAGE) -> Picture:
    chain = Compose(build(entries, TRANSFORMS, key="augment.train"))
    return chain(Picture(source), random.Random(seed))


@pytest.mark.parametrize("entries", [[CROP, FLIP, {"center_crop": {"size": 160}}], [FLIP, CROP]])
def test_every_pixel_of_a_mask_follows_exactly(entries: list[Any]) -> None:
    for seed in range(8):
        picture = moved(entries, seed)
        np.testing.assert_array_equal(picture.pixels()[..., 0], follow(MASK, picture) * 100)


@pytest.mark.parametrize(
    "entries",
    [
        [{"random_resized_crop": {"size": 120}}, FLIP],
        [{"resize": {"size": 100}}, {"center_crop": {"size": 90}}],
        [{"resize": {"size": [90, 160]}}, CROP, FLIP],
    ],
)
def test_a_mask_follows_where_pixels_are_means(entries: list[Any]) -> None:
    """Pixels near to an edge have a colour between those of both values."""
    for seed in range(4):
        picture = moved(entries, seed)
        mask, colours = follow(MASK, picture) * 100, picture.pixels()[..., 0].astype(int)
        assert np.median(abs(colours - mask)) < 5, seed
        assert (abs(colours - mask) > 50).mean() < 0.05, seed
        assert (abs(colours - mask[::-1]) > 50).mean() > 0.2  # the test has the power to tell


def test_no_mask_follows_a_transform_of_torchvision() -> None:
    """Nor what comes after it."""
    picture = moved([{"v2.RandomRotation": {"degrees": 30}}, FLIP], 3)
    with pytest.raises(ValueError, match=r"^a mask follows crops, resizes and flips only; leave"):
        follow(MASK, picture)


def test_no_mask_follows_a_turned_photo() -> None:
    """It may be of the stored or of the upright pixels."""
    data = encoded(Image.fromarray(IMAGE), exif=exif(3))
    follow(MASK, open_picture(data, "pillow").mirrored())
    turned = open_picture(data, "pillow", exif_orientation=True).mirrored()
    with pytest.raises(ValueError, match=r"turn photos with an EXIF orientation once"):
        follow(MASK, turned)


@pytest.mark.parametrize("mask", [MASK.astype(np.uint8), np.stack([MASK, MASK + 5], axis=-1)])
def test_a_file_that_stays_encoded_moves_a_mask_alike_without_decoding(mask: np.ndarray) -> None:
    file = JpegFile(b"", (155, 140), lambda *_: pytest.fail("decoded"))
    for seed in range(6):
        pictures = [moved([CROP, FLIP], seed, source) for source in (file, IMAGE)]
        ours, theirs = (follow(mask, picture, fill=9) for picture in pictures)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == mask.dtype and ours.shape == (150, 150, *mask.shape[2:])
        assert set(np.unique(ours)) == {*np.unique(mask).tolist(), 9}
    with pytest.raises(ValueError, match=r"is \(155, 140\), its image's \(156, 140\)"):
        follow(mask, Picture(np.zeros((140, 156, 3), np.uint8)).cropped((0, 0, 9, 9)))
