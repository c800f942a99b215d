"""RandAugment operations on a GPU, with the same pixels as Pillow, byte for byte."""

import functools
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conf.compose import from_overrides
from extras.rand_augment import (
    LISTS,
    MATRICES,
    NAMES,
    STRENGTHS,
    Operation,
    RandAugment,
    apply,
    number_of,
    on_gpu,
)
from extras.rand_augment.on_gpu import (
    MOVED,
    SampledOperations,
    apply_operations,
    has_kernels,
    kernel_row,
)
from pipeline.data.augment import Compose, HorizontalFlip
from pipeline.data.dataset import FakeDataset, FolderDataset
from pipeline.data.field import Field
from tests.helpers.batches import forbid_sync
from tests.pipeline.loaders import CPU, SIZE, assert_equal, crops, opened, training

ALL = ("identity", *MATRICES, *NAMES)
FILL = 124 | 116 << 8 | 104 << 16
MODES = Image.Resampling


def example_images(size: int, photo: Path) -> np.ndarray:
    """Return noise, a photo, few levels, one and nearly one level: uint8 [8, size, size, 3]."""
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
    few = [real[::-1] // 3 + 40, noise // 128 * 255, flat, halves.repeat(3, -1), corner]
    return np.stack([noise, real, *few, steps.reshape(size, size, 3)])


def rows_of(drawn: Sequence[Sequence[Operation]], size: int) -> Tensor:
    """Return a batch's operations as rows for the kernels."""
    rows = [[kernel_row(each, (size, size)) for each in operations] for operations in drawn]
    return torch.tensor(rows, dtype=torch.float64)


def all_operations(name: str, size: int) -> list[Operation]:
    """Return nearest-pixel operations of both signs from every list; interpolate some."""
    drawn = {}
    for each, strength in itertools.product(LISTS, range(STRENGTHS + 1)):
        for sign in (1, -1) if name in LISTS[each] else ():
            value = number_of(name, sign * strength / STRENGTHS, (size, size), each)
            drawn[Operation(name, value)] = None
            if name in MATRICES and strength in (0, 1, 7, 21, 30):
                drawn[Operation(name, value, MODES.NEAREST, FILL)] = None
                drawn[Operation(name, value, MODES.BILINEAR, FILL)] = None
                drawn[Operation(name, value, MODES.BICUBIC)] = None
    return list(drawn)


def applied(image: np.ndarray, *operations: Operation) -> np.ndarray:
    made = Image.fromarray(image)
    for each in operations:
        made = apply(made, each)
    return np.asarray(made)


def by_row(image: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Apply an operation as its row describes it. Pillow interpolates and computes statistics."""
    size, kind, values, level = len(image), int(row[0]), row[1:7], image.astype(int)
    fill, y, x = int(row[7]), *np.indices((size, size))
    if kind == MOVED:
        from_x, from_y = ((a * x + b * y + c) >> 16 for a, b, c in values.astype(int).reshape(2, 3))
        inside = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
        outside = np.array([fill >> shift & 255 for shift in (0, 8, 16)], np.uint8)
        return np.where(inside[..., None], image[from_y * inside, from_x * inside], outside)
    if kind > MOVED:
        way, mode = Image.Transform.AFFINE, MODES(kind - MOVED)
        made = Image.fromarray(image).transform((size, size), way, values, mode, fillcolor=fill)
        return np.asarray(made)
    first = int(row[1])
    levels: dict[str, Any] = {
        "brightness": np.clip(image.astype(np.float32) * np.float32(row[1]), 0, 255),
        "posterize": level & first,
        "solarize": np.where(level < first, level, 255 - level),
        "solarize_add": np.where(level < 128, np.minimum(level + first, 255), level),
    }
    name = NAMES[kind]
    assert name != "invert", "the kernels do not implement invert"
    made = levels.get(name)
    return applied(image, Operation(name, row[1])) if made is None else made.astype(np.uint8)


@pytest.mark.parametrize("size", [1, 2, 33])
@pytest.mark.parametrize("name", ALL)
def test_kernel_row_describes_pillow_operation(name, size):
    image = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    for operation in all_operations(name, size):
        row = np.array(kernel_row(operation, (size, size)))
        np.testing.assert_array_equal(by_row(image, row), applied(image, operation), str(operation))


# Images from workers that only draw operations; without a GPU, Pillow replaces the kernels.
CROP = "{random_resized_crop: {size: 48}}, horizontal_flip"
RAND = rf"augment.train=[{CROP}, {{extras.rand_augment\:RandAugment: {{magnitude: 17}}}}]"
TRIVIAL = f"augment.train=[{CROP}, extras.rand_augment:TrivialAugment]"
CUDA = torch.device("cuda", 0)
ON_GPU = "data.on_device=[extras.rand_augment.on_gpu:on_gpu]"


def pillow_operations(images: Tensor, operations: Tensor, out: Tensor, affine: Tensor) -> None:
    """Apply drawn operations like `apply_operations`, but on a CPU."""
    scale, shift = affine[:, :, None, None]
    for image, rows, target in zip(images.permute(0, 2, 3, 1), operations, out, strict=True):
        made = torch.tensor(functools.reduce(by_row, rows.numpy(), image.numpy()))
        target.copy_(made.permute(2, 0, 1) * scale + shift)


@pytest.fixture
def pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "apply_operations", pillow_operations)
    monkeypatch.setattr(on_gpu, "has_kernels", lambda device: True)


@pytest.mark.parametrize(
    ("entries", "batch", "workers", "device"),
    [
        (RAND, "[mixup]", 2, CPU),
        (TRIVIAL, "[]", 0, CPU),
        pytest.param(RAND, "[]", 2, CUDA, marks=pytest.mark.gpu),
        pytest.param(TRIVIAL, "[random_erasing]", 2, CUDA, marks=pytest.mark.gpu),
    ],
)
def test_drawn_operations_equal_worker_batches(
    image_root, tmp_path, request, entries, batch, workers, device
):
    """Bitwise identical, even for replaced unreadable images, and after mixup and rounding."""
    if device == CPU:
        request.getfixturevalue("pillow")
    root = shutil.copytree(image_root, tmp_path / "images")
    for path in sorted(root.glob("train/*/0[3-5].jpg")):
        path.write_bytes(path.read_bytes()[:400])
    skipping = ("data.on_error=skip", "data.max_bad_fraction=1")
    overrides = (entries, f"augment.batch={batch}", "data.image_size=48", *skipping)
    options = {"dtype": torch.bfloat16, "workers": workers, "channels_last": entries == RAND}
    with opened(root, *overrides, **options) as feed:
        expected = training(feed)
    with opened(root, *overrides, ON_GPU, device=device, **options) as feed:
        assert isinstance(feed.datasets.train.stage, SampledOperations)
        assert_equal(training(feed), expected)


class Negative(FolderDataset):
    def load(self, index: int, rng: Any) -> dict[str, Any]:
        sample = super().load(index, rng)
        return {**sample, "image": 255 - sample["image"]}


class Inverted(RandAugment):
    def __call__(self, image: np.ndarray, rng: Any) -> np.ndarray:
        return 255 - super().__call__(image, rng)


class Deep(FolderDataset):
    fields = {"image": Field(np.uint8, (SIZE, SIZE, 5), image=True)}


@pytest.mark.usefixtures("pillow")
def test_on_gpu_keeps_operations_in_workers(image_root):
    """Operations stay unless the transforms end in them and the images are FolderDataset's."""
    flip, rand = HorizontalFlip(p=1), RandAugment()
    for kind, transforms, drawn in (
        (FolderDataset, [flip, rand], True),
        (FolderDataset, [rand, flip], False),
        (FolderDataset, [], False),
        (FolderDataset, [Inverted()], False),
        (Negative, [flip, rand], False),
        (Deep, [flip, rand], False),
    ):
        dataset = crops(image_root / "train", kind)
        dataset.transform = Compose(transforms, SIZE)
        found = on_gpu.on_gpu(dataset, from_overrides(["data=fake"]), CPU)
        assert isinstance(found, SampledOperations) == drawn
        assert list(dataset.transform.transforms) == transforms[: len(transforms) - drawn]
        assert drawn or found is dataset.stage
    fake = FakeDataset(num_samples=9, num_classes=2, size=SIZE)
    assert on_gpu.on_gpu(fake, from_overrides(["data=fake"]), CPU) is fake.stage
    assert not has_kernels(CPU)  # the imported function


def levels_of(pixels: Tensor, operations: Tensor) -> Tensor:
    """Apply the operations on a GPU; return uint8 [B, 3, S, S]."""
    out = torch.empty(pixels.shape, dtype=torch.uint8, device=pixels.device)
    apply_operations(pixels, operations, out, torch.empty(2, 3, device=pixels.device))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 32, 33, 160, 224])
@pytest.mark.parametrize("name", ALL)
def test_apply_operations_equals_pillow(image_root, name, size):
    images = example_images(size, image_root / "train" / "dots" / "03.jpg")
    drawn = all_operations(name, size)
    operations = [[each] for each in drawn for _ in images]
    pixels = torch.from_numpy(np.concatenate([images] * len(drawn))).cuda().permute(0, 3, 1, 2)
    found = levels_of(pixels, rows_of(operations, size)).permute(0, 2, 3, 1)
    expected = [applied(image, each) for each, image in itertools.product(drawn, images)]
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


@pytest.mark.gpu
def test_apply_operations_does_not_synchronize():
    drawn = [[Operation(name, 1)] for name in ALL]
    drawn += [[Operation("rotate", 1, mode)] for mode in (MODES.BILINEAR, MODES.BICUBIC)]
    operations = rows_of(drawn, 32)
    images = torch.zeros(len(drawn), 3, 32, 32, dtype=torch.uint8, device="cuda")
    levels_of(images, operations)
    with forbid_sync(deterministic=True):  # allows all of the kernels
        levels_of(images, operations)


@pytest.mark.gpu
def test_apply_operations_large_batch_offsets(image_root):
    """The batch has more than 2**31 bytes."""
    size, batch = 224, 2**31 // (3 * 224**2) + 2
    photo = example_images(size, image_root / "train" / "dots" / "03.jpg")[1]
    pixels = torch.from_numpy(photo).cuda().expand(batch, -1, -1, -1).permute(0, 3, 1, 2)
    drawn = [Operation("rotate", 9, mode, FILL) for mode in (MODES.NEAREST, MODES.BICUBIC)]
    drawn += [Operation("equalize", 0), Operation("sharpness", 1.5)]
    made = levels_of(pixels, rows_of([drawn], size).expand(batch, -1, -1))
    expected = torch.from_numpy(applied(photo, *drawn).copy()).cuda()
    for part in made.permute(0, 2, 3, 1).split(1024):
        assert (part == expected).all()
