"""Transforms of one image: drawn from (seed, epoch, index), as torchvision's draw, and refused when they make no sense."""

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conf.schema import UserError
from models.zoo import import_torchvision
from pipeline.augment import OPERATIONS, TRANSFORMS, CenterCrop, Compose, RandomResizedCrop, Resize, build, sample_rng
from pipeline.decode import Picture


def one(entry: Any) -> Callable[[Picture, random.Random], Picture]:
    return build([entry], TRANSFORMS, key="augment.train")[0]


@pytest.fixture(scope="module")
def transforms() -> ModuleType:
    vision = import_torchvision()
    import torchvision.transforms as transforms

    assert vision
    return transforms


@pytest.fixture(scope="module")
def photo(image_root: Path) -> Image.Image:
    """An image that is larger than every crop here and not square."""
    with Image.open(image_root / "train" / "dots" / "03.jpg") as image:
        return image.convert("RGB").resize((300, 260))


# Draws.


def test_generator_depends_on_seed_epoch_and_index_and_nothing_else() -> None:
    corners = {
        (seed, epoch, index): sample_rng(seed, epoch, index).random()
        for seed, epoch, index in itertools.product((0, 1, 2**32 - 1), (0, 1, 2, 89, 10**6), (0, 1, 2, 1_281_166))
    }
    assert len(set(corners.values())) == len(corners)
    assert all(sample_rng(*corner).random() == drawn for corner, drawn in corners.items())


def test_neighbouring_samples_draw_independently() -> None:
    draws = np.array([[sample_rng(0, epoch, index).random() for index in range(400)] for epoch in range(20)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05  # the next index
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05  # the next epoch


def test_generator_is_the_same_on_every_machine() -> None:
    """A run resumed elsewhere must go on with the same crops."""
    assert sample_rng(1, 2, 3).random() == 0.7449706389329016


# RandomResizedCrop.


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (2, 3), (300, 200), (33, 1000), (4000, 20)])
def test_crop_lies_within_the_image(size: tuple[int, int]) -> None:
    width, height = size
    for scale, ratio in itertools.product(
        [(0.08, 1.0), (0.0001, 0.001), (1.0, 1.0)], [(3 / 4, 4 / 3), (0.1, 10.0), (2.0, 2.0)]
    ):
        crop = RandomResizedCrop(size=8, scale=scale, ratio=ratio)
        rng = random.Random(0)
        for _ in range(50):
            left, top, right, bottom = crop.box(width, height, rng)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


def test_crop_keeps_area_and_ratio_and_reaches_every_corner() -> None:
    crop, rng = RandomResizedCrop(size=8, scale=(0.2, 0.5)), random.Random(0)
    boxes = np.array([crop.box(400, 300, rng) for _ in range(3000)])
    width, height = (boxes[:, 2] - boxes[:, 0]), (boxes[:, 3] - boxes[:, 1])
    area, ratio = width * height / (400 * 300), width / height
    assert 0.195 < area.min() < 0.21
    assert 0.49 < area.max() < 0.505
    assert 0.74 < ratio.min() < 0.76
    assert 1.31 < ratio.max() < 1.35
    assert boxes.min(axis=0)[:2].tolist() == [0, 0]
    assert boxes.max(axis=0)[2:].tolist() == [400, 300]


def same_distribution(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two samples pass Kolmogorov and Smirnov's test at the 0.1 % level."""
    places = np.sort(np.concatenate([one, other]))
    one, other = (np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (one, other))
    return bool(abs(one - other).max() < 1.95 * math.sqrt(2 / len(places) * 2))


@pytest.mark.parametrize("size", [(500, 375), (100, 400), (64, 64)])
def test_crop_is_distributed_as_torchvision_draws_it(transforms: ModuleType, size: tuple[int, int]) -> None:
    import torch

    width, height = size
    crop, rng = RandomResizedCrop(size=8), random.Random(0)
    ours = np.array([crop.box(width, height, rng) for _ in range(4000)])
    torch.manual_seed(0)
    like = torch.empty(3, height, width)
    theirs = np.array([transforms.RandomResizedCrop.get_params(like, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    top, left, tall, wide = theirs.T
    for mine, their in (
        (ours[:, 0], left),
        (ours[:, 1], top),
        (ours[:, 2] - ours[:, 0], wide),
        (ours[:, 3] - ours[:, 1], tall),
        ((ours[:, 2] - ours[:, 0]) / (ours[:, 3] - ours[:, 1]), wide / tall),
    ):
        assert same_distribution(mine, their)
    assert not same_distribution(ours[:, 0], left + 0.05 * width)  # the test has the power to tell


@pytest.mark.parametrize("size", [(30, 1000), (1000, 30)])
def test_crop_of_an_image_of_impossible_ratio_is_torchvisions(transforms: ModuleType, size: tuple[int, int]) -> None:
    """Only the largest centred region is left after ten tries."""
    import torch

    width, height = size
    left, top, right, bottom = RandomResizedCrop(size=8, scale=(1.0, 1.0)).box(width, height, random.Random(0))
    theirs = transforms.RandomResizedCrop.get_params(torch.empty(3, height, width), [1.0, 1.0], [3 / 4, 4 / 3])
    assert (top, left, bottom - top, right - left) == tuple(theirs)


def test_crop_is_resized_as_torchvision_resizes(transforms: ModuleType, photo: Image.Image) -> None:
    """To one level of torchvision's resize of a Pillow image, which rounds elsewhere; exactly its resize of a tensor."""
    for box in ((0, 0, 300, 260), (20, 10, 220, 180), (100, 100, 140, 150)):
        left, top, right, bottom = box
        ours = Picture.of_pillow(photo).resized((64, 64), box).pixels()
        theirs = transforms.functional.resized_crop(photo, top, left, bottom - top, right - left, [64, 64])
        assert abs(ours.astype(int) - np.asarray(theirs, int)).max() <= 1


# Validation.


@pytest.mark.parametrize("size", [(300, 260), (260, 300), (64, 64), (500, 65), (64, 700), (97, 101), (75, 64), (64, 75)])
def test_resize_and_center_crop_are_torchvisions(transforms: ModuleType, photo: Image.Image, size: tuple[int, int]) -> None:
    image = photo.resize(size)
    picture = Compose([Resize(size=64), CenterCrop(size=56)])(Picture.of_pillow(image), random.Random(0))
    theirs = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(56)])(image)
    assert abs(picture.pixels().astype(int) - np.asarray(theirs, int)).max() <= 1


def test_center_crop_pads_a_small_image_with_black(photo: Image.Image) -> None:
    small = photo.resize((20, 30))
    pixels = CenterCrop(size=40)(Picture.of_pillow(small), random.Random(0)).pixels()
    assert pixels.shape == (40, 40, 3)
    np.testing.assert_array_equal(pixels[5:35, 10:30], np.asarray(small))
    assert pixels.sum() == np.asarray(small).sum()


# The others.


def test_horizontal_flip(photo: Image.Image) -> None:
    straight, mirrored = np.asarray(photo), np.asarray(photo)[:, ::-1]
    rng = random.Random(0)
    np.testing.assert_array_equal(one({"horizontal_flip": {"p": 0}})(Picture.of_pillow(photo), rng).pixels(), straight)
    np.testing.assert_array_equal(one({"horizontal_flip": {"p": 1}})(Picture.of_pillow(photo), rng).pixels(), mirrored)
    flip, small = one("horizontal_flip"), Picture.of_pillow(photo.resize((8, 8)))
    flipped = sum(not np.array_equal(flip(small, rng).pixels(), small.pixels()) for _ in range(1000))
    assert 430 < flipped < 570


def test_random_crop_takes_every_place_and_pads_with_black(photo: Image.Image) -> None:
    small = photo.resize((10, 12)).point(lambda value: max(value, 1))
    pixels = np.asarray(small)
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    windows = {padded[top : top + 9, left : left + 9].tobytes() for top in range(8) for left in range(6)}
    crop, rng = one({"random_crop": {"size": 9, "padding": 2}}), random.Random(0)
    assert {crop(Picture.of_pillow(small), rng).pixels().tobytes() for _ in range(1000)} == windows
    exact = one({"random_crop": {"size": 10}})
    assert exact(Picture.of_pillow(small), rng).pixels().shape == (10, 10, 3)
    with pytest.raises(ValueError, match="smaller than size 11"):
        one({"random_crop": {"size": 11}})(Picture.of_pillow(small), rng)


PARAMETERS: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"size": 40},
    "resize": {"size": 40},
    "center_crop": {"size": 40},
    "random_crop": {"size": 40},
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_runs_and_makes_the_side_it_declares(photo: Image.Image, name: str) -> None:
    transform = one({name: PARAMETERS.get(name, {})})
    for seed, image in itertools.product(range(10), (photo, photo.resize((41, 200)), photo.resize((40, 40)))):
        before = image.tobytes()
        pixels = transform(Picture.of_pillow(image), random.Random(seed)).pixels()
        assert (pixels.dtype, pixels.ndim, pixels.shape[2]) == (np.uint8, 3, 3)
        again = transform(Picture.of_pillow(image), random.Random(seed)).pixels()
        np.testing.assert_array_equal(pixels, again)
        assert image.tobytes() == before
        side = getattr(transform, "side", "kept")
        if side == "kept":
            assert pixels.shape[1::-1] == image.size
        elif side is not None:
            assert pixels.shape[:2] == (side, side) == (40, 40)
        else:
            assert min(pixels.shape[:2]) == 40


def test_side_of_a_list_is_that_of_its_last_crop() -> None:
    def side(*entries: Any) -> int | None:
        return Compose(build(entries, TRANSFORMS, key="augment.train")).side

    crop, resize = {"random_resized_crop": {"size": 40}}, {"resize": {"size": 50}}
    assert side(crop, "horizontal_flip", "rand_augment") == 40
    assert side(resize, {"center_crop": {"size": 30}}) == 30
    assert side(crop, resize) is None
    assert side("horizontal_flip") is None
    assert side() is None


# Strong augmentation.

COLOURS: list[tuple[str, float, Callable[[ModuleType, Image.Image], Image.Image]]] = [
    ("brightness", -0.4, lambda f, image: f.adjust_brightness(image, 0.6)),
    ("color", 0.7, lambda f, image: f.adjust_saturation(image, 1.7)),
    ("contrast", -0.9, lambda f, image: f.adjust_contrast(image, 0.1)),
    ("sharpness", 0.5, lambda f, image: f.adjust_sharpness(image, 1.5)),
    ("posterize", -2.6, lambda f, image: f.posterize(image, 5)),
    ("solarize", 0.4, lambda f, image: f.solarize(image, 153)),
    ("autocontrast", 0, lambda f, image: f.autocontrast(image)),
    ("equalize", 0, lambda f, image: f.equalize(image)),
    ("rotate", 20, lambda f, image: f.rotate(image, 20)),
    ("identity", 0, lambda f, image: image),
]


@pytest.mark.parametrize(("name", "strength", "theirs"), COLOURS, ids=[name for name, *_ in COLOURS])
def test_operation_is_torchvisions(
    transforms: ModuleType,
    photo: Image.Image,
    name: str,
    strength: float,
    theirs: Callable[[ModuleType, Image.Image], Image.Image],
) -> None:
    ours = OPERATIONS[name][0](photo, strength)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs(transforms.functional, photo)))


@pytest.mark.parametrize(("name", "axis"), [("translate_x", 1), ("translate_y", 0)])
def test_translation_moves_by_its_share_of_224_pixels(photo: Image.Image, name: str, axis: int) -> None:
    image = photo.resize((112, 112))
    moved = np.asarray(OPERATIONS[name][0](image, 32))  # 32 of 224: 16 of 112
    np.testing.assert_array_equal(
        np.take(moved, range(112 - 16), axis=axis), np.take(np.asarray(image), range(16, 112), axis=axis)
    )


@pytest.mark.parametrize(("name", "axis"), [("shear_x", 1), ("shear_y", 0)])
def test_shear_moves_each_line_by_its_place(photo: Image.Image, name: str, axis: int) -> None:
    image = photo.resize((100, 100))
    pixels, sheared = np.asarray(image), np.asarray(OPERATIONS[name][0](image, 0.5))
    if axis == 0:
        pixels, sheared = pixels.transpose(1, 0, 2), sheared.transpose(1, 0, 2)
    np.testing.assert_array_equal(sheared[0], pixels[0])
    np.testing.assert_array_equal(sheared[80, :60], pixels[80, 40:])


@pytest.mark.parametrize(("name", "ours"), [("RandAugment", "rand_augment"), ("TrivialAugmentWide", "trivial_augment")])
def test_operations_and_strengths_are_torchvisions(transforms: ModuleType, name: str, ours: str) -> None:
    space = getattr(transforms, name)()._augmentation_space
    theirs = space(31, (224, 224)) if name == "RandAugment" else space(31)
    ours_by_name = {key.replace("_", "").lower(): units for key, (_, *units) in OPERATIONS.items()}
    assert {key.lower() for key in theirs} == set(ours_by_name)
    for key, (magnitudes, _) in theirs.items():
        unit = ours_by_name[key.lower()][0 if ours == "rand_augment" else 1]
        if key == "Posterize":
            assert 8 - round(unit) == magnitudes[-1].item()
        elif key == "Solarize":
            assert 255 * (1 - unit) == magnitudes[-1].item()
        else:
            assert unit == pytest.approx(magnitudes.flatten()[-1].item())


def test_strong_augmentation_uses_every_operation_both_ways() -> None:
    grey = Image.new("RGB", (32, 32), (128, 100, 60))
    grey.paste((250, 10, 30), (4, 4, 20, 12))
    for name in ("trivial_augment", "rand_augment"):
        results = {one(name)(Picture.of_pillow(grey), random.Random(seed)).pixels().tobytes() for seed in range(300)}
        assert len(results) > 20
    still = one({"rand_augment": {"count": 1, "magnitude": 0}})
    same = sum(
        np.array_equal(still(Picture.of_pillow(grey), random.Random(seed)).pixels(), np.asarray(grey)) for seed in range(100)
    )
    assert same > 70  # at strength 0 all but autocontrast, equalize and rounding leave the image as it is


# Bad configs.


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("horizontal_flp", r"no transform horizontal_flp; choose from random_resized_crop, .*; did you mean horizontal_flip\?"),
        ({"center_corp": {"size": 3}}, r"did you mean center_crop\?"),
        ("__import__", "choose from random_resized_crop"),
        ({"_target_": "os.system"}, "not a transform"),
        ({"horizontal_flip": {"prob": 1}}, "horizontal_flip has no parameter prob; it has p$"),
        ({"trivial_augment": {"size": 3}}, "trivial_augment has no parameter size; it has none"),
        ({"random_resized_crop": {"size": 8, "self": 1}}, "no parameter self"),
        ({"random_resized_crop": {}}, "random_resized_crop: .*size"),
        ("center_crop", "center_crop: .*size"),
        ({"center_crop": 8}, "not a transform"),
        ({"center_crop": [8]}, "not a transform"),
        ({"center_crop": {"size": 8}, "resize": {"size": 8}}, "not a transform"),
        ({}, "not a transform"),
        (None, "not a transform"),
        (3, "not a transform"),
        (["horizontal_flip"], "not a transform"),
    ],
)
def test_entry_that_is_no_transform_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^augment.train: (.*){message}"):
        build(["horizontal_flip", entry], TRANSFORMS, key="augment.train")


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("center_crop", {"size": size}) for size in (0, -1, 4097, 2.5, "8", None, NAN, [8])),
        *(("resize", {"size": size}) for size in (0, 10**9)),
        *(
            ("random_resized_crop", {"size": 8, "scale": scale})
            for scale in ([0, 1], [0.5, 0.2], [0.1, 1.1], [NAN, 1], [0.1, NAN], [-1, 1], 0.5, [0.5], [0.1, 0.5, 1], "ab", None)
        ),
        *(
            ("random_resized_crop", {"size": 8, "ratio": ratio})
            for ratio in ([0, 1], [2, 1], [-1, 1], [NAN, 2], [1, INF], [1], [1, 1, 1], 1, None)
        ),
        *(("horizontal_flip", {"p": p}) for p in (-0.1, 1.1, NAN, "x", None, [1])),
        *(("random_crop", {"size": 8, "padding": padding}) for padding in (-1, 1.5, NAN, None)),
        *(("rand_augment", {"count": count}) for count in (0, -1, 1.5, NAN, INF, None)),
        *(("rand_augment", {"magnitude": magnitude}) for magnitude in (-1, 31, NAN, None)),
    ],
)
def test_parameter_without_sense_is_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^augment.val: {name}: {list(parameters)[-1]}=.*: give "):
        build([{name: parameters}], TRANSFORMS, key="augment.val")
