"""Transforms of one image: seeded, equal to torchvision's, with checked parameters."""

import itertools
import math
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conf.packages import import_torchvision
from conf.schema import UserError
from pipeline.augment import (
    NAMES,
    OPERATIONS,
    STRENGTHS,
    TRANSFORMS,
    Compose,
    Operation,
    RandomResizedCrop,
    argument,
    build,
    sample_rng,
)
from pipeline.decode import INTERPOLATIONS, Box, Picture
from tests.distributions import same_distribution
from tests.drawings import draw_image

PHOTO = draw_image("dots", np.random.default_rng(3)).resize((300, 260))


def one(name: str, **parameters: Any) -> Any:
    return build([{name: parameters}], TRANSFORMS, key="augment.train")[0]


def made(transform: Any, image: Image.Image, seed: int = 0) -> np.ndarray:
    return transform(Picture(np.asarray(image)), random.Random(seed)).pixels()


@pytest.fixture(scope="module")
def transforms() -> ModuleType:
    import_torchvision()
    import torchvision.transforms as transforms

    return transforms


# Draws.


def test_generator_depends_only_on_seed_epoch_and_index() -> None:
    keys = [(0, 1, 2**32 - 1), (0, 1, 2, 89, 10**6), (0, 1, 2, 1_281_166)]
    drawn = {corner: sample_rng(*corner).random() for corner in itertools.product(*keys)}
    assert len(set(drawn.values())) == len(drawn)
    assert all(sample_rng(*corner).random() == value for corner, value in drawn.items())
    # The same on every machine: a run resumed elsewhere continues with the same crops.
    assert sample_rng(1, 2, 3).random() == 0.7449706389329016


def test_crop_lies_within_the_image() -> None:
    for size in [(1, 1), (1, 500), (2, 3), (300, 200), (4000, 20)]:
        for scale in [(0.08, 1.0), (0.0001, 0.001), (1.0, 1.0)]:
            for ratio in [(3 / 4, 4 / 3), (0.1, 10.0), (2.0, 2.0)]:
                crop, rng = RandomResizedCrop(size=8, scale=scale, ratio=ratio), random.Random(0)
                for _ in range(30):
                    left, top, right, bottom = crop.box(*size, rng)
                    assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


def test_crop_is_distributed_as_torchvision_draws_it(transforms: ModuleType) -> None:
    """With boxes that are always wide, the test detects swapped width and height."""
    size, ratio = (500, 375), [1.5, 3.0]
    crop, rng = RandomResizedCrop(size=8, ratio=ratio), random.Random(0)
    x, y, right, bottom = np.array([crop.box(*size, rng) for _ in range(3000)]).T
    torch.manual_seed(0)
    draw, like = transforms.RandomResizedCrop.get_params, torch.empty(3, size[1], size[0])
    top, left, tall, wide = np.array([draw(like, [0.08, 1.0], ratio) for _ in range(3000)]).T
    pairs = [(x, left), (y, top), (right - x, wide), (bottom - y, tall)]
    pairs.append(((right - x) / (bottom - y), wide / tall))
    assert all(same_distribution(*pair) for pair in pairs)
    assert not same_distribution(x, left + 0.05 * size[0])  # the test has the power to tell
    for size in ((30, 1000), (1000, 30)):  # after ten tries, the largest centred region
        x, y, right, bottom = RandomResizedCrop(size=8, scale=(1, 1)).box(*size, random.Random(0))
        theirs = draw(torch.empty(3, size[1], size[0]), [1.0, 1.0], [3 / 4, 4 / 3])
        assert (y, x, bottom - y, right - x) == tuple(theirs)


# Pixels.


def cropped(interpolation: str, seed: int) -> tuple[np.ndarray, Box]:
    """Our crop of 64 px, as numbers, and its box."""
    crop = one("random_resized_crop", size=64, interpolation=interpolation)
    return made(crop, PHOTO, seed).astype(int), crop.box(*PHOTO.size, random.Random(seed))


def test_random_interpolation_draws_one_of_both_after_the_region() -> None:
    """As timm's RandomResizedCropAndInterpolation; the region is that of any interpolation."""
    bicubic = 0
    for seed in range(60):
        found = cropped("random", seed)[0]
        same = [np.array_equal(found, cropped(name, seed)[0]) for name in INTERPOLATIONS]
        assert sum(same) == 1
        bicubic += same[1]
    assert 18 < bicubic < 42


@pytest.mark.parametrize("size", [(300, 260), (64, 64), (500, 65), (97, 101)])
def test_resize_and_center_crop_are_torchvisions(
    transforms: ModuleType, size: tuple[int, int]
) -> None:
    image, crop = PHOTO.resize(size), transforms.CenterCrop(56)
    for side, shape in ((64, 64), ([48, 80], [48, 80])):
        resize, theirs = one("resize", size=side), transforms.Resize(shape)(image)
        pairs = [(made(resize, image), theirs)]
        pairs.append((made(Compose([resize, one("center_crop", size=56)]), image), crop(theirs)))
        for ours, expected in pairs:
            assert abs(ours.astype(int) - np.asarray(expected, int)).max() <= 1
    bicubic = made(one("resize", size=70, crop_ratio=0.875, interpolation="bicubic"), image)
    theirs = transforms.Resize(80, transforms.InterpolationMode.BICUBIC)(image)
    assert abs(bicubic.astype(int) - np.asarray(theirs, int)).mean() < 0.05


def test_center_crop_pads_a_small_image_with_black() -> None:
    small = np.asarray(PHOTO.resize((20, 30)))
    pixels = made(one("center_crop", size=40), PHOTO.resize((20, 30)))
    np.testing.assert_array_equal(pixels, np.pad(small, ((5, 5), (10, 10), (0, 0))))


def test_horizontal_flip() -> None:
    straight, small = np.asarray(PHOTO), PHOTO.resize((8, 8))
    np.testing.assert_array_equal(made(one("horizontal_flip", p=0), PHOTO), straight)
    np.testing.assert_array_equal(made(one("horizontal_flip", p=1), PHOTO), straight[:, ::-1])
    flip, rng = one("horizontal_flip"), random.Random(0)
    flipped = sum(len(flip(Picture(np.asarray(small)), rng).geometry) for _ in range(1000))
    assert 430 < flipped < 570


def test_random_crop_uses_every_position_and_pads_with_black() -> None:
    small = PHOTO.resize((10, 12)).point(lambda value: max(value, 1))
    padded = np.pad(np.asarray(small), ((2, 2), (2, 2), (0, 0)))
    windows = {
        padded[top : top + 9, left : left + 9].tobytes() for top in range(8) for left in range(6)
    }
    crop = one("random_crop", size=9, padding=2)
    assert {made(crop, small, seed).tobytes() for seed in range(1000)} == windows
    with pytest.raises(ValueError, match="smaller than size 11"):
        made(one("random_crop", size=11), small)


PARAMETERS: dict[str, dict[str, Any]] = {
    **{name: {"size": 40} for name in ("random_resized_crop", "resize", "center_crop")},
    "random_crop": {"size": 40},
}


# Strong augmentation.

FAMILIES = {"torchvision": "RandAugment", "wide": "TrivialAugmentWide"}
THEIRS = {name: name.title().replace("_", "") for name in NAMES} | {"autocontrast": "AutoContrast"}
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
MEAN = {"interpolation": "random", "fill": [124, 116, 104]}  # of ImageNet, as timm fills
TIMM = {"operations": "timm", "magnitude": 21, "magnitude_std": 1.5, "p": 0.5, **MEAN}
IMAGE = PHOTO.resize((176, 120))  # not square


def names_of(operations: str) -> list[str]:
    return one("rand_augment", operations=operations).names


def applied(name: str, value: float, interpolation: str = "nearest", fill: int = 0) -> np.ndarray:
    """IMAGE after an operation, int [H, W, 3]."""
    operation = Operation(name, value, Image.Resampling[interpolation.upper()], fill)
    return np.asarray(OPERATIONS[name].apply(IMAGE, operation), int)


def their_space(transforms: ModuleType, operations: str) -> dict[str, tuple[torch.Tensor, bool]]:
    """torchvision's name of an operation -> (magnitude of each strength, whether it is signed)."""
    space = getattr(transforms.autoaugment, FAMILIES[operations])()._augmentation_space
    return space(31, IMAGE.size[::-1]) if operations == "torchvision" else space(31)


@pytest.mark.parametrize(
    ("name", "interpolation"),
    [(name, "nearest") for name in names_of("torchvision")]
    + [(name, mode) for name in MOVES for mode in INTERPOLATIONS],
)
@pytest.mark.parametrize("operations", FAMILIES)
def test_operation_of_every_strength_is_torchvisions(
    transforms: ModuleType, operations: str, name: str, interpolation: str
) -> None:
    """Interpolated, up to 1 level: the last bit of torchvision's matrices is another one.

    It also decides whether a point on the very border is inside the image.
    """
    magnitudes, signed = their_space(transforms, operations)[THEIRS[name]]
    mode = transforms.InterpolationMode[interpolation.upper()]
    changed = 0
    strengths = range(0, STRENGTHS + 1, 1 if interpolation == "nearest" else 3)
    for strength, sign in itertools.product(strengths, (1, -1)):
        # torchvision's are float32: unrounded, a translation by 16 pixels is 15.999999, cut to 15.
        size = round(magnitudes[strength].item(), 4) if magnitudes.ndim else 0.0
        size = (sign if signed else 1) * size
        expected = transforms.autoaugment._apply_op(IMAGE, THEIRS[name], size, mode, None)
        ours = argument(name, sign * strength / STRENGTHS, IMAGE.size, operations)
        found = applied(name, ours, interpolation)
        difference = abs(found - np.asarray(expected, int))
        if interpolation == "nearest":
            assert not difference.any(), (sign, strength)
        assert (difference > 1).mean() < 0.001, (sign, strength)
        changed += not np.array_equal(found, IMAGE)
    assert changed > max(strengths) / strengths.step or magnitudes.ndim == 0


@pytest.mark.parametrize("operations", FAMILIES)
def test_operations_strengths_and_signs_have_torchvisions_distribution(
    transforms: ModuleType, monkeypatch: pytest.MonkeyPatch, operations: str
) -> None:
    wide = operations == "wide"
    draws = 6000 if wide else 2000  # RandAugment has one strength per operation
    drawn: dict[str, list[float]] = {name: [] for name in names_of(operations)}
    taken: dict[str, list[float]] = {name: [] for name in THEIRS.values()}
    transform = one("trivial_augment") if wide else one("rand_augment", count=1)
    for seed in range(draws):
        ((name, value, *_),) = transform.sample(IMAGE.size, random.Random(seed))
        drawn[name].append(round(value, 4))
    note = lambda image, name, magnitude, **_: taken[name].append(round(magnitude, 4))  # noqa: E731
    monkeypatch.setattr(transforms.autoaugment, "_apply_op", note)
    theirs = getattr(transforms.autoaugment, FAMILIES[operations])(
        **({} if wide else {"num_ops": 1})
    )
    torch.manual_seed(0)
    for _ in range(draws):
        theirs(IMAGE)
    for name, values in drawn.items():
        mine, their = np.array(values), np.array(taken[THEIRS[name]])
        if "translate" in name:
            their = their.astype(int)
        deviation = math.sqrt(2 * draws / len(drawn) * (1 - 1 / len(drawn)))  # of the difference
        assert abs(len(mine) - len(their)) < 5 * deviation, name
        assert set(abs(mine)) == set(abs(their)), name  # no strength is left out
        assert same_distribution(mine, their), name


# Arguments of timm's increasing list for magnitude 7, computed with timm 1.0.31 (auto_augment.py).
TIMM_7 = {
    **{"shear_x": 0.21, "shear_y": 0.21, "rotate": 21, "posterize": 2, "solarize": 77},
    **{"translate_x": 0.315 * IMAGE.size[0], "translate_y": 0.315 * IMAGE.size[1]},
    **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.63),
    **{"autocontrast": 0, "equalize": 0, "invert": 0, "solarize_add": 77},
}


def test_timms_list_has_timms_operations_and_strengths() -> None:
    found = {name: argument(name, 0.7, IMAGE.size, "timm") for name in names_of("timm")}
    assert found == pytest.approx(TIMM_7)
    levels = np.asarray(IMAGE, int)
    np.testing.assert_array_equal(applied("invert", 0), 255 - levels)
    brighter = np.where(levels < 128, np.minimum(levels + 77, 255), levels)
    np.testing.assert_array_equal(applied("solarize_add", 77), brighter)


@pytest.mark.parametrize("name", names_of("timm"))
def test_operation_of_every_strength_is_timms(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    timm = pytest.importorskip("timm.data.auto_augment")
    theirs = THEIRS[name] + "Rel" * ("translate" in name)
    theirs += "Increasing" * (f"{theirs}Increasing" in timm._RAND_INCREASING_TRANSFORMS)
    for magnitude, sign, mode in itertools.product(range(10), (1, -1), INTERPOLATIONS):
        hparams = {"img_mean": (9, 8, 7), "interpolation": Image.Resampling[mode.upper()]}
        their_sign = -sign if "translate" in name else sign
        monkeypatch.setattr(timm, "_randomly_negate", lambda level, by=their_sign: level * by)
        expected = timm.AugmentOp(theirs, 1, magnitude, hparams)(IMAGE)
        ours = argument(name, sign * magnitude / 10, IMAGE.size, "timm")
        found = applied(name, ours, mode, 9 | 8 << 8 | 7 << 16)
        # The last bit of a translation differs, hence a level that is cut to a whole number.
        assert abs(found - np.asarray(expected, int)).max() <= ("translate" in name)


def test_timms_list_changes_images_as_much_as_timm() -> None:
    """timm 1.0.31's rand-m7-mstd0.5-inc1 changes this image by 36.0 levels, mean of 20,000."""
    image, transform = PHOTO.resize((64, 64)), one("rand_augment", **TIMM)
    levels = np.asarray(image, int)
    changes = [abs(made(transform, image, seed) - levels).mean() for seed in range(1000)]
    assert np.mean(changes) == pytest.approx(36.0, abs=4 * np.std(changes) / math.sqrt(1000))


def test_random_interpolation_draws_one_of_both_for_each_operation_that_moves() -> None:
    drawn = {
        mode: [
            one("rand_augment", **TIMM | {"interpolation": mode, "count": 1, "p": 1}).sample(
                IMAGE.size, random.Random(seed)
            )[0]
            for seed in range(600)
        ]
        for mode in (*INTERPOLATIONS, "random")
    }
    bicubic = [
        (bilinear, bicubic).index(either)
        for bilinear, bicubic, either in zip(*drawn.values(), strict=True)
        if either.name in MOVES
    ]
    assert len(bicubic) > 150 and 0.4 < np.mean(bicubic) < 0.6
    assert {each[2:] for each in drawn["random"] if each.name not in MOVES} == {(0, 0)}


@pytest.mark.parametrize(("fill", "corner"), [(7, [7, 7, 7]), ([124, 116, 104], [124, 116, 104])])
def test_pixels_from_outside_have_the_fill(fill: Any, corner: list[int]) -> None:
    transform = one("trivial_augment", fill=fill, interpolation="bicubic")
    assert applied("rotate", 40, "bicubic", transform.fill)[0, 0].tolist() == corner
    drawn = [transform.sample(IMAGE.size, random.Random(seed))[0] for seed in range(20)]
    assert {each.fill for each in drawn if each.name in MOVES} == {transform.fill}


@pytest.mark.parametrize("name", ["rand_augment", "trivial_augment"])
def test_other_pixels_than_pillows_are_refused(name: str) -> None:
    for pixels in (np.zeros((9, 9, 1), np.uint8), np.zeros((9, 9, 3), np.uint16)):
        with pytest.raises(ValueError, match="_augment: needs uint8 images of 3 channels"):
            one(name)(Picture(pixels), random.Random(0))


def strengths_of(**parameters: float) -> list[int]:
    """The strengths of the operations of 4,000 images, without those that are left out."""
    transform = TRANSFORMS["rand_augment"](**parameters)
    images = [transform.sample((8, 8), random.Random(seed)) for seed in range(4000)]
    assert {len(drawn) for drawn in images} == {2}
    return [
        round((1 - value / 255) * STRENGTHS)
        for drawn in images
        for name, value, *_ in drawn
        if name == "solarize"
    ]


def test_rand_augment_leaves_operations_out_with_probability() -> None:
    found = strengths_of(magnitude=21, p=0.25)
    chance = 0.25 / len(names_of("torchvision"))
    assert len(found) == pytest.approx(8000 * chance, abs=4 * math.sqrt(8000 * chance))
    assert set(found) == {21}
    assert strengths_of(p=0) == []


def test_strengths_are_drawn_from_a_rounded_normal_distribution() -> None:
    """Clipped to the scale, as in timm."""
    found = np.array(strengths_of(magnitude=27.4, magnitude_std=3))
    assert found.max() == STRENGTHS and (found == STRENGTHS).mean() > 0.15
    theirs = np.random.default_rng(0).normal(27.4, 3, len(found)).round().clip(0, STRENGTHS)
    assert same_distribution(found, theirs)
    assert min(strengths_of(magnitude=0.5, magnitude_std=3)) == 0


# Bad configs.


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("horizontal_flp", r"choose from random_resized_crop, .*; did you mean horizontal_flip\?"),
        ("__import__", "choose from random_resized_crop"),
        ({"horizontal_flip": {"prob": 1}}, "horizontal_flip: .*'prob'; it takes p$"),
        ("center_crop", "center_crop: .*missing .*'size'; it takes size$"),
        ({"v2.RandAugment": {"count": 2}}, "v2.RandAugment: .*'count'"),
        ("v2.RandomPosterize", "v2.RandomPosterize: .*missing .*'bits'"),
        ("v2.__class__", "there is no transform v2.__class__; choose from "),
        *(
            (entry, "is not a transform; write `name` or")
            for entry in ({"center_crop": 8}, {}, None, {"center_crop": {}, "resize": {}})
        ),
    ],
)
def test_invalid_entry_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^augment.train: (.*){message}"):
        build(["horizontal_flip", entry], TRANSFORMS, key="augment.train")


NAN, INF = math.nan, math.inf
INVALID: dict[str, dict[str, tuple[Any, ...]]] = {
    "center_crop": {"size": (0, 4097, 2.5, "8", None)},
    "resize": {"size": (0, [8], [8, 0]), "interpolation": ("nearest", "random")},
    "random_resized_crop": {
        "scale": ([0, 1], [0.5, 0.2], [0.1, 1.1], [NAN, 1], 0.5, "ab"),
        "ratio": ([2, 1], [-1, 1], [1, INF], [1, 1, 1]),
        "interpolation": ("nearest",),
    },
    "horizontal_flip": {"p": (-0.1, 1.1, NAN, None)},
    "random_crop": {"padding": (-1, 1.5)},
    "rand_augment": {
        "count": (0, 1.5),
        **dict.fromkeys(("magnitude", "magnitude_std"), (-1, 31)),
        "p": (-0.1, 1.1),
        "operations": ("timms", None),
    },
    "trivial_augment": {
        "interpolation": ("lanczos",),
        "fill": (-1, 256, 0.5, [1, 2], [0, 0, 256], "red"),
    },
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_parameter_is_refused(name: str) -> None:
    for key, values in INVALID[name].items():
        for value in values:
            given = PARAMETERS.get(name, {}) | {key: value}
            with pytest.raises(UserError, match=f"^augment.val: {name}: {key}=.*: give "):
                build([{name: given}], TRANSFORMS, key="augment.val")
    with pytest.raises(UserError, match=r"size=\[8, 8\]: give \[height, width\] without"):
        one("resize", size=[8, 8], crop_ratio=0.9)
