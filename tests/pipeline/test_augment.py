"""Transforms of one image: seeded, equal to torchvision's, with checked parameters."""

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

from conf.packages import import_torchvision
from conf.schema import UserError
from pipeline import augment
from pipeline.augment import (
    NAMES,
    STRENGTHS,
    TRANSFORMS,
    CenterCrop,
    Compose,
    RandomResizedCrop,
    Resize,
    build,
    operate,
    sample_rng,
    signed_strength,
)
from pipeline.decode import INTERPOLATIONS, Box, Picture
from tests.distributions import same_distribution
from tests.libraries import timm_module


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


def test_generator_depends_only_on_seed_epoch_and_index() -> None:
    corners = {
        (seed, epoch, index): sample_rng(seed, epoch, index).random()
        for seed, epoch, index in itertools.product(
            (0, 1, 2**32 - 1), (0, 1, 2, 89, 10**6), (0, 1, 2, 1_281_166)
        )
    }
    assert len(set(corners.values())) == len(corners)
    assert all(sample_rng(*corner).random() == drawn for corner, drawn in corners.items())


def test_neighbouring_samples_draw_independently() -> None:
    draws = np.array(
        [[sample_rng(0, epoch, index).random() for index in range(400)] for epoch in range(20)]
    )
    assert abs(draws.mean() - 0.5) < 0.02
    assert (
        abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05
    )  # the next index
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05  # the next epoch


def test_generator_is_the_same_on_every_machine() -> None:
    """A run resumed elsewhere continues with the same crops."""
    assert sample_rng(1, 2, 3).random() == 0.7449706389329016


# RandomResizedCrop.


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 500), (500, 1), (2, 3), (300, 200), (33, 1000), (4000, 20)]
)
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


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.5, 3.0)], ids=["usual", "wide"])
@pytest.mark.parametrize(
    "size", [(500, 375), pytest.param((100, 400), marks=pytest.mark.slow), (64, 64)]
)
def test_crop_is_distributed_as_torchvision_draws_it(
    transforms: ModuleType, size: tuple[int, int], ratio: tuple[float, float]
) -> None:
    """With boxes that are always wide, the test detects swapped width and height."""
    import torch

    width, height = size
    crop, rng = RandomResizedCrop(size=8, ratio=ratio), random.Random(0)
    ours = np.array([crop.box(width, height, rng) for _ in range(4000)])
    torch.manual_seed(0)
    like = torch.empty(3, height, width)
    theirs = np.array(
        [
            transforms.RandomResizedCrop.get_params(like, [0.08, 1.0], list(ratio))
            for _ in range(4000)
        ]
    )
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
def test_crop_of_an_image_of_impossible_ratio_is_torchvisions(
    transforms: ModuleType, size: tuple[int, int]
) -> None:
    """After ten tries, the crop is the largest centred region."""
    import torch

    width, height = size
    left, top, right, bottom = RandomResizedCrop(size=8, scale=(1.0, 1.0)).box(
        width, height, random.Random(0)
    )
    theirs = transforms.RandomResizedCrop.get_params(
        torch.empty(3, height, width), [1.0, 1.0], [3 / 4, 4 / 3]
    )
    assert (top, left, bottom - top, right - left) == tuple(theirs)


def test_crop_is_resized_as_torchvision_resizes(transforms: ModuleType, photo: Image.Image) -> None:
    """Within one level of torchvision's resize of a Pillow image, which rounds differently."""
    for box in ((0, 0, 300, 260), (20, 10, 220, 180), (100, 100, 140, 150)):
        left, top, right, bottom = box
        ours = Picture(np.asarray(photo)).resized((64, 64), box).pixels()
        theirs = transforms.functional.resized_crop(
            photo, top, left, bottom - top, right - left, [64, 64]
        )
        assert abs(ours.astype(int) - np.asarray(theirs, int)).max() <= 1


# Validation.


@pytest.mark.parametrize(
    "size", [(300, 260), (260, 300), (64, 64), (500, 65), (64, 700), (97, 101), (75, 64), (64, 75)]
)
def test_resize_and_center_crop_are_torchvisions(
    transforms: ModuleType, photo: Image.Image, size: tuple[int, int]
) -> None:
    image = photo.resize(size)
    picture = Compose([Resize(size=64), CenterCrop(size=56)])(
        Picture(np.asarray(image)), random.Random(0)
    )
    theirs = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(56)])(image)
    assert abs(picture.pixels().astype(int) - np.asarray(theirs, int)).max() <= 1


@pytest.mark.parametrize("size", [[64, 64], [48, 80]])
@pytest.mark.parametrize("given", [(300, 260), (64, 64), (500, 65), (40, 200)])
def test_resize_to_a_fixed_size_is_torchvisions(
    transforms: ModuleType, photo: Image.Image, given: tuple[int, int], size: list[int]
) -> None:
    """Both sides are scaled; the size is [height, width]."""
    image = photo.resize(given)
    transform = one({"resize": {"size": size}})
    pixels = transform(Picture(np.asarray(image)), random.Random(0)).pixels()
    assert pixels.shape == (*size, 3)
    theirs = np.asarray(transforms.Resize(size)(image), int)
    assert abs(pixels.astype(int) - theirs).max() <= 1
    assert Compose([transform]).image_size == (64 if size == [64, 64] else None)


def test_rotation_is_torchvisions(transforms: ModuleType, photo: Image.Image) -> None:
    rotation, seen = one({"rotation": {"degrees": 15}}), []
    for seed in range(20):
        ours = rotation(Picture(np.asarray(photo)), random.Random(seed)).pixels()
        angle = random.Random(seed).uniform(-15, 15)
        theirs = transforms.functional.rotate(photo, angle)
        np.testing.assert_array_equal(ours, np.asarray(theirs))
        seen.append(angle)
    assert min(seen) < -10 and max(seen) > 10


def test_center_crop_pads_a_small_image_with_black(photo: Image.Image) -> None:
    small = photo.resize((20, 30))
    pixels = CenterCrop(size=40)(Picture(np.asarray(small)), random.Random(0)).pixels()
    assert pixels.shape == (40, 40, 3)
    np.testing.assert_array_equal(pixels[5:35, 10:30], np.asarray(small))
    assert pixels.sum() == np.asarray(small).sum()


# The others.


def test_horizontal_flip(photo: Image.Image) -> None:
    straight, mirrored = np.asarray(photo), np.asarray(photo)[:, ::-1]
    rng = random.Random(0)
    np.testing.assert_array_equal(
        one({"horizontal_flip": {"p": 0}})(Picture(np.asarray(photo)), rng).pixels(), straight
    )
    np.testing.assert_array_equal(
        one({"horizontal_flip": {"p": 1}})(Picture(np.asarray(photo)), rng).pixels(), mirrored
    )
    flip, small = one("horizontal_flip"), Picture(np.asarray(photo.resize((8, 8))))
    flipped = sum(
        not np.array_equal(flip(small, rng).pixels(), small.pixels()) for _ in range(1000)
    )
    assert 430 < flipped < 570


def test_random_crop_uses_every_position_and_pads_with_black(photo: Image.Image) -> None:
    small = photo.resize((10, 12)).point(lambda value: max(value, 1))
    pixels = np.asarray(small)
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    windows = {
        padded[top : top + 9, left : left + 9].tobytes() for top in range(8) for left in range(6)
    }
    crop, rng = one({"random_crop": {"size": 9, "padding": 2}}), random.Random(0)
    assert {
        crop(Picture(np.asarray(small)), rng).pixels().tobytes() for _ in range(1000)
    } == windows
    exact = one({"random_crop": {"size": 10}})
    assert exact(Picture(np.asarray(small)), rng).pixels().shape == (10, 10, 3)
    with pytest.raises(ValueError, match="smaller than size 11"):
        one({"random_crop": {"size": 11}})(Picture(np.asarray(small)), rng)


def test_bicubic_resize_is_that_of_pillow(photo: Image.Image) -> None:
    """torch computes with other fixed-point numbers: up to 2 levels, 0.01 on average."""
    transform = one({"resize": {"size": 50, "interpolation": "bicubic"}})
    made = transform(Picture(np.asarray(photo)), random.Random(0)).pixels()
    theirs = photo.resize(made.shape[1::-1], Image.Resampling.BICUBIC)
    difference = np.abs(made.astype(int) - np.asarray(theirs).astype(int))
    assert difference.max() <= 2 and difference.mean() < 0.05
    plain = one({"resize": {"size": 50}})(Picture(np.asarray(photo)), random.Random(0)).pixels()
    assert np.abs(plain.astype(int) - made.astype(int)).mean() > 0.1
    for name, allowed in (("resize", "bicubic"), ("random_resized_crop", "bicubic or random")):
        with pytest.raises(UserError, match=f"interpolation=nearest: give bilinear or {allowed}$"):
            one({name: {"size": 50, "interpolation": "nearest"}})


def cropped(photo: Image.Image, interpolation: str, seed: int) -> tuple[np.ndarray, Box]:
    """Our crop of 64 px, as numbers, and its box."""
    crop = one({"random_resized_crop": {"size": 64, "interpolation": interpolation}})
    assert isinstance(crop, RandomResizedCrop)
    box = crop.box(*photo.size, random.Random(seed))
    return crop(Picture(np.asarray(photo)), random.Random(seed)).pixels().astype(int), box


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crop_is_pillows_crop_and_resize(photo: Image.Image, interpolation: str) -> None:
    """torch computes with other fixed-point numbers: up to 2 levels, 0.01 on average."""
    for seed in range(12):
        made, box = cropped(photo, interpolation, seed)
        filter = Image.Resampling[interpolation.upper()]
        difference = abs(made - np.asarray(photo.crop(box).resize((64, 64), filter), int))
        assert difference.max() <= 2 and difference.mean() < 0.05


def test_random_interpolation_draws_one_of_both_after_the_region(photo: Image.Image) -> None:
    """As timm's RandomResizedCropAndInterpolation; the region is that of any interpolation."""
    bicubic = 0
    for seed in range(200):
        both = [cropped(photo, name, seed)[0] for name in INTERPOLATIONS]
        drawn = [np.array_equal(cropped(photo, "random", seed)[0], made) for made in both]
        assert sum(drawn) == 1
        bicubic += drawn[1]
    assert 75 < bicubic < 125


PARAMETERS: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"size": 40},
    "resize": {"size": 40},
    "center_crop": {"size": 40},
    "random_crop": {"size": 40},
    "rotation": {"degrees": 15},
    "v2.ColorJitter": {"brightness": 0.4, "hue": 0.1},
    "v2.GaussianBlur": {"kernel_size": 5},
    "v2.RandomAdjustSharpness": {"sharpness_factor": 2},
    "v2.RandomAffine": {"degrees": 20, "translate": [0.1, 0.1]},
    "v2.RandomPosterize": {"bits": 3},
    "v2.RandomRotation": {"degrees": 20},
    "v2.RandomSolarize": {"threshold": 100},
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_makes_the_size_it_declares(photo: Image.Image, name: str) -> None:
    transform = one({name: PARAMETERS.get(name, {})})
    for seed, image in itertools.product(
        range(3), (photo, photo.resize((41, 200)), photo.resize((40, 40)))
    ):
        before = image.tobytes()
        pixels = transform(Picture(np.asarray(image)), random.Random(seed)).pixels()
        assert (pixels.dtype, pixels.ndim, pixels.shape[2]) == (np.uint8, 3, 3)
        again = transform(Picture(np.asarray(image)), random.Random(seed)).pixels()
        np.testing.assert_array_equal(pixels, again)
        assert image.tobytes() == before
        size = getattr(transform, "image_size", "kept")
        if size == "kept":
            assert pixels.shape[1::-1] == image.size
        elif size is not None:
            assert pixels.shape[:2] == (size, size) == (40, 40)
        else:
            assert min(pixels.shape[:2]) == 40


def test_image_size_of_a_list_is_that_of_its_last_crop() -> None:
    def image_size(*entries: Any) -> int | None:
        return Compose(build(entries, TRANSFORMS, key="augment.train")).image_size

    crop, resize = {"random_resized_crop": {"size": 40}}, {"resize": {"size": 50}}
    assert image_size(crop, "horizontal_flip", "rand_augment") == 40
    assert image_size(resize, {"center_crop": {"size": 30}}) == 30
    assert image_size(crop, resize) is None
    assert image_size("horizontal_flip") is None
    assert image_size() is None


# Strong augmentation.


FAMILIES = [("RandAugment", "rand_augment"), ("TrivialAugmentWide", "trivial_augment")]
THEIRS = {name: name.title().replace("_", "") for name in NAMES} | {"autocontrast": "AutoContrast"}


@pytest.fixture(scope="module")
def autoaugment(transforms: ModuleType) -> ModuleType:
    return transforms.autoaugment


def their_space(
    autoaugment: ModuleType, family: str, image: Image.Image
) -> dict[str, tuple[Any, bool]]:
    """torchvision's name of an operation -> (magnitude of each strength, whether it is signed)."""
    space = getattr(autoaugment, family)()._augmentation_space
    return space(31, (image.height, image.width)) if family == "RandAugment" else space(31)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [family for family, _ in FAMILIES])
def test_operation_of_every_strength_is_torchvisions(
    transforms: ModuleType, autoaugment: ModuleType, photo: Image.Image, family: str, name: str
) -> None:
    """All strengths with both signs, on an image that is not square."""
    image, changed = photo.resize((176, 120)), 0
    magnitudes, signed = their_space(autoaugment, family, image)[THEIRS[name]]
    for strength, sign in itertools.product(range(STRENGTHS + 1), (1, -1)):
        # torchvision's are float32: unrounded, a translation by 16 pixels is 15.999999, cut to 15.
        magnitude = (
            (sign if signed else 1) * round(magnitudes[strength].item(), 4)
            if magnitudes.ndim
            else 0.0
        )
        expected = autoaugment._apply_op(
            image, THEIRS[name], magnitude, transforms.InterpolationMode.NEAREST, None
        )
        wide = family == "TrivialAugmentWide"
        ours = signed_strength(name, sign * strength / STRENGTHS, image.size, wide=wide)
        found = operate(image, name, ours)
        np.testing.assert_array_equal(
            np.asarray(found), np.asarray(expected), err_msg=f"{sign} {strength}"
        )
        changed += found.tobytes() != image.tobytes()
    assert changed > STRENGTHS or magnitudes.ndim == 0


@pytest.mark.parametrize(("family", "ours"), FAMILIES)
def test_operations_strengths_and_signs_have_torchvisions_distribution(
    autoaugment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    photo: Image.Image,
    family: str,
    ours: str,
) -> None:
    import torch

    image, wide = photo.resize((176, 120)), family == "TrivialAugmentWide"
    draws = 6000 if wide else 2000  # RandAugment has one strength per operation
    space = their_space(autoaugment, family, image)
    drawn: dict[str, list[float]] = {name: [] for name in NAMES}
    taken: dict[str, list[float]] = {name: [] for name in THEIRS.values()}

    def note(name: str, strength: float, size: tuple[int, int], *, wide: bool) -> float:
        magnitudes, signed = space[THEIRS[name]]
        place = round(abs(strength) * STRENGTHS)
        assert place == pytest.approx(abs(strength) * STRENGTHS)
        sign = math.copysign(1, strength) if signed else 1
        drawn[name].append(sign * magnitudes[place].item() if magnitudes.ndim else 0.0)
        return 0.0

    monkeypatch.setattr(augment, "signed_strength", note)
    transform, picture = one({ours: {} if wide else {"count": 1}}), Picture(np.asarray(image))
    for seed in range(draws):
        transform(picture, random.Random(seed))
    monkeypatch.setattr(
        autoaugment, "_apply_op", lambda image, name, magnitude, **_: taken[name].append(magnitude)
    )
    theirs = getattr(autoaugment, family)(**({} if wide else {"num_ops": 1}))
    torch.manual_seed(0)
    for _ in range(draws):
        theirs(image)
    for name in NAMES:
        mine, their = np.array(drawn[name]), np.array(taken[THEIRS[name]])
        deviation = math.sqrt(2 * draws / len(NAMES) * (1 - 1 / len(NAMES)))  # of the difference
        assert abs(len(mine) - len(their)) < 5 * deviation, name
        assert set(abs(mine)) == set(abs(their)), name  # no strength is left out
        assert same_distribution(mine, their), name


def test_rand_augment_applies_count_operations(photo: Image.Image) -> None:
    image = Picture(np.asarray(photo.resize((40, 32))))
    once, twice = (one({"rand_augment": {"count": count, "magnitude": 12}}) for count in (1, 2))
    for seed in range(20):
        rng = random.Random(seed)
        expected = once(once(image, rng), rng).pixels()
        np.testing.assert_array_equal(twice(image, random.Random(seed)).pixels(), expected)


def strengths_of(monkeypatch: pytest.MonkeyPatch, parameters: dict[str, float]) -> list[int]:
    """The strengths of the operations of 4,000 images, without those that are left out."""
    drawn = []

    def note(name: str, strength: float, size: tuple[int, int], *, wide: bool) -> float:
        drawn.append(round(abs(strength) * STRENGTHS))
        assert drawn[-1] == pytest.approx(abs(strength) * STRENGTHS)
        return 0.0

    monkeypatch.setattr(augment, "signed_strength", note)
    transform = TRANSFORMS["rand_augment"](**parameters)
    for seed in range(4000):
        assert len(transform.draw((8, 8), random.Random(seed))) == 2
    return drawn


def test_rand_augment_leaves_operations_out_with_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = strengths_of(monkeypatch, {"magnitude": 21, "p": 0.25})
    assert len(found) == pytest.approx(2000, abs=4 * math.sqrt(8000 * 0.25 * 0.75))
    assert set(found) == {21}
    assert strengths_of(monkeypatch, {"p": 0}) == []


@pytest.mark.parametrize(("magnitude", "spread"), [(7, 0.5), (9.8, 0.5), (0.2, 1.0)])
def test_magnitudes_have_timms_distribution(
    monkeypatch: pytest.MonkeyPatch, magnitude: float, spread: float
) -> None:
    """Also where it is clipped to 0 or to the maximum; timm's scale ends at 10."""
    ours = {"magnitude": 3 * magnitude, "magnitude_std": 3 * spread, "p": 0.5}
    found = strengths_of(monkeypatch, ours)
    timm = timm_module("data.auto_augment")
    operation = timm.AugmentOp("Rotate", 0.5, magnitude, {"magnitude_std": spread})
    drawn: list[float] = []
    operation.level_fn = lambda level, _: drawn.append(level) or (0.0,)
    random.seed(0)
    picture = Image.new("RGB", (8, 8))
    for _ in range(8000):
        operation(picture)
    assert len(found) == pytest.approx(len(drawn), abs=4 * math.sqrt(2 * 8000 / 4))
    theirs = np.array([round(3 * level) for level in drawn])
    assert same_distribution(np.array(found), theirs)
    assert len(set(found)) > 3


# Bad configs.


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "horizontal_flp",
            r"no transform horizontal_flp; choose from random_resized_crop, .*; "
            r"did you mean horizontal_flip\?",
        ),
        ({"center_corp": {"size": 3}}, r"did you mean center_crop\?"),
        ("__import__", "choose from random_resized_crop"),
        ({"_target_": "os.system"}, "not a transform"),
        ({"horizontal_flip": {"prob": 1}}, "horizontal_flip has no parameter prob; it has p$"),
        ({"trivial_augment": {"size": 3}}, "trivial_augment has no parameter size; it has none"),
        ({"random_resized_crop": {"size": 8, "self": 1}}, "no parameter self"),
        (
            {"random_resized_crop": {}},
            r"random_resized_crop needs size; write random_resized_crop: \{size: 224\}$",
        ),
        ("center_crop", r"center_crop needs size; write center_crop: \{size: 224\}$"),
        (
            {"random_resized_crop": {"scale": [0.1, 1.0]}},
            r"random_resized_crop needs size; "
            r"write random_resized_crop: \{size: 224, scale: \[0.1, 1.0\]\}$",
        ),
        ({"center_crop": 8}, "not a transform"),
        ({"center_crop": [8]}, "not a transform"),
        ({"center_crop": {"size": 8}, "resize": {"size": 8}}, "not a transform"),
        ({}, "not a transform"),
        (None, "not a transform"),
        (3, "not a transform"),
        (["horizontal_flip"], "not a transform"),
    ],
)
def test_invalid_entry_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^augment.train: (.*){message}"):
        build(["horizontal_flip", entry], TRANSFORMS, key="augment.train")


class Shift:
    """A custom transform."""

    def __init__(self, *, across: int, down: int, fill: int = 0) -> None:
        self.box = across, down, fill


def test_missing_parameters_are_named() -> None:
    """Also in a list for whole batches."""
    with pytest.raises(UserError) as error:
        build([{"shift": {"fill": 3}}], {"shift": Shift}, key="augment.batch")
    assert str(error.value) == (
        "augment.batch: shift needs across and down; write shift: {across: ..., down: ..., fill: 3}"
    )


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("center_crop", {"size": size}) for size in (0, -1, 4097, 2.5, "8", None, NAN, [8])),
        *(("resize", {"size": size}) for size in (0, 10**9, [8], [8, 8, 8], [8, 0], [8, "8"], "8")),
        ("resize", {"crop_ratio": 0.875, "size": [8, 8]}),
        *(("rotation", {"degrees": degrees}) for degrees in (-1, 181, NAN, [15], None)),
        *(
            ("random_resized_crop", {"size": 8, "scale": scale})
            for scale in (
                [0, 1],
                [0.5, 0.2],
                [0.1, 1.1],
                [NAN, 1],
                [0.1, NAN],
                [-1, 1],
                0.5,
                [0.5],
                [0.1, 0.5, 1],
                "ab",
                None,
            )
        ),
        *(
            ("random_resized_crop", {"size": 8, "ratio": ratio})
            for ratio in ([0, 1], [2, 1], [-1, 1], [NAN, 2], [1, INF], [1], [1, 1, 1], 1, None)
        ),
        *(("horizontal_flip", {"p": p}) for p in (-0.1, 1.1, NAN, "x", None, [1])),
        *(("random_crop", {"size": 8, "padding": padding}) for padding in (-1, 1.5, NAN, None)),
        *(("rand_augment", {"count": count}) for count in (0, -1, 1.5, NAN, INF, None)),
        *(("rand_augment", {"magnitude": magnitude}) for magnitude in (-1, 31, NAN, None)),
        *(("rand_augment", {"magnitude_std": spread}) for spread in (-1, 31, NAN, None)),
        *(("rand_augment", {"p": p}) for p in (-0.1, 1.1, NAN, None)),
    ],
)
def test_invalid_parameter_is_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^augment.val: {name}: {list(parameters)[-1]}=.*: give "):
        build([{name: parameters}], TRANSFORMS, key="augment.val")
