"""Transforms of one image: seeded, equal to torchvision's, with checked parameters."""

import itertools
import pickle
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conf.packages import import_torchvision
from pipeline.augment import (
    TRANSFORMS,
    V2_NAMES,
    RandomResizedCrop,
    build,
    sample_rng,
)
from pipeline.decode import Picture, open_picture
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


# Transforms of torchvision v2: the sample's own draws, and a late import.


def picture(size: int = 24) -> Picture:
    return Picture(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


PARAMETERS: dict[str, dict[str, Any]] = {
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "GaussianBlur": {"kernel_size": 5, "sigma": [0.1, 2.0]},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 30},
    "RandomGrayscale": {"p": 0.5},
    "RandomPosterize": {"bits": 3},
    "RandomRotation": {"degrees": 30},
    "RandomSolarize": {"threshold": 128},
}


@pytest.mark.parametrize("name", V2_NAMES)
def test_pixels_are_torchvisions_for_the_seed_that_the_sample_draws(
    image_root: Path, name: str
) -> None:
    """As torchvision makes them from the file itself: RGB, uint8."""
    import_torchvision()
    from torchvision.transforms import v2

    parameters = PARAMETERS.get(name, {})
    transform, changed = one(f"v2.{name}", **parameters), 0
    path = next((image_root / "train" / "dots").iterdir())
    image = v2.functional.pil_to_tensor(Image.open(path))
    for seed in range(4 if name == "ElasticTransform" else 12):
        opened = open_picture(path.read_bytes(), "pillow")
        ours = transform(opened, random.Random(seed)).pixels()
        torch.manual_seed(random.Random(seed).getrandbits(63))
        theirs = getattr(v2, name)(**parameters)(image)
        assert (ours.dtype, theirs.shape) == (np.uint8, image.shape)
        np.testing.assert_array_equal(ours, theirs.permute(1, 2, 0).numpy())
        changed += not torch.equal(theirs, image)
    assert changed


def test_draws_come_from_the_sample_and_leave_torchs_generator_as_it_was() -> None:
    """Also in a worker, which gets the transform without torchvision's."""
    transform = one("v2.RandomErasing", p=1)
    before = torch.get_rng_state()
    first = transform(picture(), random.Random(1)).pixels()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    given = pickle.dumps(transform)
    assert b"torchvision.transforms" not in given
    for again in (transform, pickle.loads(given)):
        np.testing.assert_array_equal(again(picture(), random.Random(1)).pixels(), first)
    assert not np.array_equal(transform(picture(), random.Random(2)).pixels(), first)
