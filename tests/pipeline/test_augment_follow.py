"""A mask follows its image: cropped, resized, mirrored and turned by the same draws."""

import random
from typing import Any

import numpy as np
import pytest

from pipeline.augment import TRANSFORMS, Compose, build, follow
from pipeline.decode import JpegFile, Picture
from pipeline.torchvision_transforms import MOVING
from tests.pipeline.test_augment import PARAMETERS
from tests.pipeline.test_torchvision_transforms import PARAMETERS as V2

# An image that is its own mask: blocks of 20 px of two levels, without any symmetry.
MASK = np.random.default_rng(5).integers(1, 3, (7, 8)).repeat(20, 0).repeat(20, 1)[:, :155]
IMAGE = np.stack([MASK * 100] * 3, axis=-1).astype(np.uint8)
FLIP, NEAREST = "horizontal_flip", {"interpolation": 0, "fill": [0, 0, 0]}


def chain(entries: list[Any]) -> Compose:
    return Compose(build(entries, TRANSFORMS, key="augment.train"))


@pytest.mark.parametrize(
    "entries",
    [
        [FLIP],
        [{"random_crop": {"size": 130, "padding": 30}}, FLIP, {"center_crop": {"size": 140}}],
        [{"v2.RandomVerticalFlip": {}}, {"random_crop": {"size": 90}}, "v2.RandomErasing"],
        [
            {"v2.RandomRotation": {"degrees": 60, "expand": True}},
            {"v2.RandomAffine": V2["RandomAffine"]},
        ],
        [FLIP, {"v2.RandomPerspective": NEAREST}, {"v2.ElasticTransform": NEAREST}],
    ],
)
def test_every_pixel_of_a_mask_follows_exactly(entries: list[Any]) -> None:
    """Where no pixel is a mean of several; erased ones are no move."""
    transform = chain(entries)
    for seed in range(8):
        picture, operations = transform.sample(Picture(IMAGE), random.Random(seed))
        levels, moved = picture.pixels()[..., 0], follow(MASK, picture, operations)
        if "v2.RandomErasing" in entries:
            moved[levels == 0] = 0
        np.testing.assert_array_equal(levels, moved * 100)


def agreement(pixels: np.ndarray, mask: np.ndarray) -> float:
    """Share of pixels that have the colour of their value; not of those near to an edge."""
    assert pixels.shape[:2] == mask.shape
    windows = np.lib.stride_tricks.sliding_window_view(mask, (5, 5))
    inner = windows.min((2, 3)) == windows.max((2, 3))
    colours, mask = pixels.astype(int).sum(axis=2)[2:-2, 2:-2][inner], mask[2:-2, 2:-2][inner]
    wrong = [abs(c - np.median(c)) > 30 for c in (colours[mask == value] for value in set(mask))]
    return 1 - float(np.concatenate(wrong).mean())


LISTS: list[list[Any]] = [
    *([{name: PARAMETERS.get(name, {})}] for name in TRANSFORMS if not name.startswith("v2.")),
    *([{f"v2.{name}": V2.get(name, {})}] for name in (*MOVING, "ColorJitter") if "Aug" not in name),
    [{"random_resized_crop": {"size": 120}}, FLIP, {"rand_augment": {"magnitude": 15}}],
    [{"rand_augment": {"count": 3}}, {"random_resized_crop": {"size": 120}}, FLIP],
    [{"resize": {"size": [90, 160]}}, {"center_crop": {"size": 140}}, "trivial_augment", FLIP],
    [{"trivial_augment": {"interpolation": "bicubic", "fill": [5, 0, 9]}}, FLIP],
]


@pytest.mark.parametrize("entries", LISTS, ids=str)
def test_a_mask_follows_every_transform(entries: list[Any]) -> None:
    transform, wrong = chain(entries), []
    for seed in (7, 8, 9, 18):  # each transform moves one of them
        picture, operations = transform.sample(Picture(IMAGE), random.Random(seed))
        pixels = transform(Picture(IMAGE), random.Random(seed)).pixels()
        mask = follow(MASK, picture, operations)
        assert agreement(pixels, mask) > 0.95, seed
        wrong.append(agreement(pixels, mask[::-1]))
    assert min(wrong) < 0.8  # the test has the power to tell


@pytest.mark.parametrize("name", [name for name in MOVING if "Aug" in name])
def test_no_mask_follows_where_torchvision_refuses_one(name: str) -> None:
    with pytest.raises(TypeError, match="Mask are not supported"):
        follow(MASK, chain([f"v2.{name}"])(Picture(IMAGE), random.Random(3)))


@pytest.mark.parametrize("mask", [MASK.astype(np.uint8), np.stack([MASK, MASK + 5], axis=-1)])
def test_a_file_that_stays_encoded_moves_a_mask_alike_without_decoding(mask: np.ndarray) -> None:
    file = JpegFile(b"", (155, 140), lambda *_: pytest.fail("decoded"))
    moved = 0
    for seed in range(6):
        transform = chain([{"random_crop": {"size": 150, "padding": 40}}, FLIP, "rand_augment"])
        ours, theirs = (
            follow(mask, *transform.sample(Picture(source), random.Random(seed)), fill=9)
            for source in (file, IMAGE)
        )
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == mask.dtype and ours.shape == (150, 150, *mask.shape[2:])
        assert set(np.unique(ours)) == {*np.unique(mask).tolist(), 9}
        moved += not np.array_equal(ours, mask)
    with pytest.raises(ValueError, match=r"is \(155, 140\), its image's \(156, 140\)"):
        follow(mask, Picture(np.zeros((140, 156, 3), np.uint8)).cropped((0, 0, 9, 9)))
    turned = Picture(file, orientation=3).mirrored()
    with pytest.raises(
        ValueError, match=r"^the image has the EXIF orientation 3, and its mask may"
    ):
        follow(mask, Picture(IMAGE, origin=(turned, [])))
