"""RandAugment and TrivialAugment in a worker, with the operations of torchvision and timm."""

import itertools
import random
import re
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageFilter

from extras.rand_augment import (
    LISTS,
    MATRICES,
    NAMES,
    STRENGTHS,
    Operation,
    RandAugment,
    ThreeAugment,
    TrivialAugment,
    apply,
    number_of,
)
from pipeline.data.augment import Compose, build_by_name, transform_target
from pipeline.data.decode import INTERPOLATIONS, Picture
from tests.helpers.drawings import draw_image

THEIRS = {name: name.title().replace("_", "") for name in ("identity", *MATRICES, *NAMES)}
THEIRS["autocontrast"] = "AutoContrast"
IMAGE = draw_image("dots", np.random.default_rng(3)).resize((176, 120))  # not square
# List name -> torchvision's class, and arguments of its list of strengths
FAMILIES = {
    "torchvision": ("RandAugment", (STRENGTHS + 1, IMAGE.size[::-1])),
    "wide": ("TrivialAugmentWide", (STRENGTHS + 1,)),
}


@pytest.fixture(scope="module")
def transforms() -> ModuleType:
    import torchvision.transforms as transforms

    return transforms


def applied(name: str, value: float, interpolation: str = "nearest", fill: int = 0) -> np.ndarray:
    """Return IMAGE after an operation, int [H, W, 3]."""
    operation = Operation(name, value, Image.Resampling[interpolation.upper()], fill)
    return np.asarray(apply(IMAGE, operation), int)


@pytest.mark.parametrize(
    ("name", "interpolation"),
    [(name, "nearest") for name in LISTS["torchvision"]]
    + [(name, mode) for name in MATRICES for mode in INTERPOLATIONS],
)
@pytest.mark.parametrize("operations", FAMILIES)
def test_operations_equal_torchvision(transforms, operations, name, interpolation):
    """Interpolated pixels may differ by 1 level and at borders (last bit of the matrices)."""
    family, arguments = FAMILIES[operations]
    space = getattr(transforms.autoaugment, family)()._augmentation_space(*arguments)
    assert {THEIRS[name] for name in LISTS[operations]} == space.keys()
    magnitudes, signed = space[THEIRS[name]]  # per strength; whether it has a sign
    mode = transforms.InterpolationMode[interpolation.upper()]
    changed = 0
    for strength, sign in itertools.product(range(STRENGTHS + 1), (1, -1)):
        # In float32, torchvision's translation by 16 pixels is 15.999999, truncated to 15.
        size = round(magnitudes[strength].item(), 4) if magnitudes.ndim else 0.0
        size *= sign if signed else 1
        expected = transforms.autoaugment._apply_op(IMAGE, THEIRS[name], size, mode, None)
        ours = number_of(name, sign * strength / STRENGTHS, IMAGE.size, operations)
        found = applied(name, ours, interpolation)
        difference = abs(found - np.asarray(expected, int))
        if interpolation == "nearest":
            assert not difference.any(), (sign, strength)
        assert (difference > 1).mean() < 0.001, (sign, strength)
        changed += not np.array_equal(found, IMAGE)
    assert changed > STRENGTHS or magnitudes.ndim == 0


@pytest.mark.parametrize("name", LISTS["timm"])
def test_operations_equal_timm(monkeypatch, name):
    timm = pytest.importorskip("timm.data.auto_augment")
    theirs = re.sub("^Translate.$", r"\g<0>Rel", THEIRS[name])
    if f"{theirs}Increasing" in timm._RAND_INCREASING_TRANSFORMS:
        theirs += "Increasing"
    for magnitude, sign, mode in itertools.product(range(10), (1, -1), INTERPOLATIONS):
        hparams = {"img_mean": (9, 8, 7), "interpolation": Image.Resampling[mode.upper()]}
        their_sign = -sign if "translate" in name else sign
        monkeypatch.setattr(timm, "_randomly_negate", lambda level, by=their_sign: level * by)
        expected = timm.AugmentOp(theirs, 1, magnitude, hparams)(IMAGE)
        ours = number_of(name, sign * magnitude / 10, IMAGE.size, "timm")
        found = applied(name, ours, mode, 9 | 8 << 8 | 7 << 16)
        # A translation's last bit differs, and so may a level that is truncated to an integer.
        assert abs(found - np.asarray(expected, int)).max() <= ("translate" in name)


def test_rand_augment_rejects_fill_pixels_and_masks():
    with pytest.raises(ValueError, match=r": fill=.*: invalid value; expected "):
        build_by_name([{"extras.rand_augment:RandAugment": {"fill": [0, 256, 0]}}], {}, key="a")
    for pixels in (np.zeros((9, 9, 1), np.uint8), np.zeros((9, 9, 3), np.uint16)):
        with pytest.raises(ValueError, match="Augment: expected uint8 RGB images"):
            TrivialAugment()(pixels, random.Random(0))
    picture = Compose([RandAugment()])(Picture(np.asarray(IMAGE)), random.Random(0)).mirrored()
    with pytest.raises(ValueError, match=r"^a mask follows crops, resizes and flips only"):
        transform_target(np.zeros((120, 176), np.uint8), picture)


def test_three_augment_equals_deit_iii(transforms):
    """Its operations equal torchvision's and Pillow's; each of the three is equally likely."""
    theirs, kinds = transforms.functional, []
    for seed in range(60):
        rng = random.Random(seed)
        blurred = IMAGE.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2)))
        kinds.append(int(rng.random() * 3))
        expected = [transforms.Grayscale(3)(IMAGE), theirs.solarize(IMAGE, 128), blurred][kinds[-1]]
        for position in np.argsort([rng.random() for _ in range(3)]):
            name = ("brightness", "contrast", "saturation")[position]
            expected = getattr(theirs, f"adjust_{name}")(expected, rng.uniform(0.7, 1.3))
        found = ThreeAugment()(np.asarray(IMAGE), random.Random(seed))
        np.testing.assert_array_equal(found, expected)
    assert min(map(kinds.count, range(3))) >= 12
