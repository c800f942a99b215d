"""Transforms of torchvision v2: the sample's own draws, checked parameters, a late import."""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conf.packages import import_torchvision
from pipeline.augment import V2_NAMES
from pipeline.decode import Picture, open_picture
from tests.pipeline.test_augment import one


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
    transform = one("v2.RandomErasing", p=1)
    before = torch.get_rng_state()
    first = transform(picture(), random.Random(1)).pixels()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    np.testing.assert_array_equal(transform(picture(), random.Random(1)).pixels(), first)
    assert not np.array_equal(transform(picture(), random.Random(2)).pixels(), first)


def test_a_list_is_sent_to_a_worker_without_the_imported_transform() -> None:
    transform = one("v2.RandomErasing", p=1)
    expected = transform(picture(), random.Random(1)).pixels()
    given = pickle.dumps(transform)
    assert b"torchvision.transforms" not in given
    np.testing.assert_array_equal(
        pickle.loads(given)(picture(), random.Random(1)).pixels(), expected
    )
