"""The operations of RandAugment on a device: Pillow's pixels, byte for byte."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.augment import (
    NAMES,
    STRENGTHS,
    RandAugment,
    TrivialAugment,
    as_rows,
    operate,
    operated,
    signed_strength,
)
from pipeline.decode import Picture
from pipeline.gpu_augment import BLENDED, MAPPED, MOVED, apply_operations

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def example_images(size: int, photo: Path) -> np.ndarray:
    """Noise, a photo, few levels, one level and nearly one level: uint8 [8, size, size, 3]."""
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    with Image.open(photo) as image:
        real = np.asarray(image.convert("RGB").resize((size, size)))
    flat = np.full((size, size, 3), (3, 200, 77), np.uint8)
    halves = np.where(np.tri(size, dtype=bool)[..., None], np.uint8(10), np.uint8(250))
    corner = np.zeros((size, size, 3), np.uint8)
    corner[0, 0] = 9
    # Equalize divides the number of pixels below the highest level by 255.
    steps = np.zeros((size**2, 3), np.uint8)
    steps[:509], steps[-1] = 7, 9
    return np.stack(
        [
            noise,
            real,
            real[::-1] // 3 + 40,
            noise // 128 * 255,
            flat,
            halves.repeat(3, -1),
            corner,
            steps.reshape(size, size, 3),
        ]
    )


def on_device(images: np.ndarray, operations: np.ndarray, device: str) -> np.ndarray:
    """Apply operations to uint8 [B, S, S, 3] on a device."""
    pixels = torch.from_numpy(images.copy()).to(device).permute(0, 3, 1, 2)
    return apply_operations(pixels, operations).permute(0, 2, 3, 1).cpu().numpy()


def test_every_operation_has_kernels() -> None:
    assert sorted((*MOVED, *MAPPED, *BLENDED, "identity")) == sorted(NAMES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 3, 33, 48])
@pytest.mark.parametrize("name", NAMES)
def test_operation_makes_the_pixels_of_pillow(
    image_root: Path, name: str, size: int, device: str
) -> None:
    """All strengths with both signs and units."""
    images = example_images(size, image_root / "train" / "dots" / "03.jpg")
    for wide in (False, True):
        strengths = [
            signed_strength(name, sign * strength / STRENGTHS, (size, size), wide=wide)
            for strength, sign in itertools.product(range(STRENGTHS + 1), (1, -1))
        ]
        operations = np.repeat([as_rows([(name, strength)]) for strength in strengths], 8, axis=0)
        found = on_device(np.concatenate([images] * len(strengths)), operations, device)
        expected = [
            np.asarray(operate(Image.fromarray(image), name, strength))
            for strength, image in itertools.product(strengths, images)
        ]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [48, pytest.param(224, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transform", [RandAugment(count=3, magnitude=17), TrivialAugment()], ids=["rand", "trivial"]
)
def test_operations_of_a_batch_are_applied_in_their_order(
    image_root: Path, transform: RandAugment | TrivialAugment, size: int, device: str
) -> None:
    images = example_images(size, image_root / "train" / "dots" / "02.jpg")
    images = np.concatenate([images] * 16)
    drawn = [transform.draw((size, size), random.Random(seed)) for seed in range(len(images))]
    expected = [
        operated(Picture(image), operations).pixels()
        for image, operations in zip(images, drawn, strict=True)
    ]
    operations = np.stack([as_rows(each) for each in drawn])
    np.testing.assert_array_equal(on_device(images, operations, device), expected)
    # In groups of few images, most kernels have nothing to do.
    for first in range(0, 24, 3):
        part = slice(first, first + 3)
        found = on_device(images[part], operations[part], device)
        np.testing.assert_array_equal(found, expected[part])


@pytest.mark.gpu
def test_deterministic_algorithms_are_enough(image_root: Path) -> None:
    """None of the kernels is refused."""
    images = example_images(48, image_root / "train" / "dots" / "02.jpg")
    names = [*NAMES, "equalize", "rotate"]
    operations = np.stack([as_rows([(name, 0.4)]) for name in names])
    batch = np.concatenate([images, images])
    expected = on_device(batch, operations, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        np.testing.assert_array_equal(on_device(batch, operations, "cuda"), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_operations_do_not_wait_for_the_device() -> None:
    images = torch.zeros(16, 3, 32, 32, dtype=torch.uint8, device="cuda")
    names = [[(name, 0.5)] for name in (*NAMES, "rotate", "equalize")]
    operations = np.stack([as_rows(drawn) for drawn in names])
    apply_operations(images, operations)
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_operations(images, operations)
    finally:
        torch.cuda.set_sync_debug_mode("default")
