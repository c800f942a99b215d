"""The operations of RandAugment on a GPU: Pillow's pixels, byte for byte."""

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conf import cli
from extras.rand_augment import (
    MATRICES,
    NAMES,
    OPERATIONS,
    STRENGTHS,
    Operation,
    RandAugment,
    TrivialAugment,
    argument,
    as_rows,
    on_gpu,
)
from extras.rand_augment import apply_operations as apply_on_cpu
from extras.rand_augment.on_gpu import (
    COLUMNS,
    MOVED,
    DrawnOperations,
    apply_operations,
    has_kernels,
    kernel_rows,
)
from pipeline.augment import Compose
from pipeline.batch import Field
from pipeline.dataset import FakeDataset, FolderDataset
from pipeline.decode import Picture
from tests.extras.rand_augment.test_operations import TIMM
from tests.pipeline.loaders import CPU, SIZE, assert_equal, crops, open_loader, opened, training
from tests.processes import run_python

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
FILL = 124 | 116 << 8 | 104 << 16
MODES = Image.Resampling


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


def made_on_gpu(images: np.ndarray, operations: np.ndarray) -> np.ndarray:
    """Apply operations to uint8 [B, S, S, 3] on a GPU."""
    pixels = torch.from_numpy(images).cuda().permute(0, 3, 1, 2)
    return apply_operations(pixels, operations).permute(0, 2, 3, 1).cpu().numpy()


def all_operations(name: str, size: int) -> list[Operation]:
    """With both signs, of every list, the nearest pixel; some of them interpolated."""
    drawn = {}
    for each, strength in itertools.product(("torchvision", "wide", "timm"), range(STRENGTHS + 1)):
        if getattr(OPERATIONS[name], each) is None:
            continue
        for sign in (1, -1):
            value = argument(name, sign * strength / STRENGTHS, (size, size), each)
            drawn[Operation(name, value)] = None
            if name in MOVES and strength in (0, 1, 7, 21, 30):
                drawn[Operation(name, value, MODES.NEAREST, FILL)] = None
                drawn[Operation(name, value, MODES.BILINEAR, FILL)] = None
                drawn[Operation(name, value, MODES.BICUBIC)] = None
    return list(drawn)


def applied(image: np.ndarray, operation: Operation) -> np.ndarray:
    return np.asarray(OPERATIONS[operation.name].apply(Image.fromarray(image), operation))


# The rows for the kernels, read here as the kernels read them.


@pytest.mark.parametrize("size", [1, 2, 33])
@pytest.mark.parametrize("name", ["identity", *MOVES])
def test_matrices_move_pixels_as_pillow_does(name: str, size: int) -> None:
    image = np.random.default_rng(0).integers(1, 256, (size, size, 3), np.uint8)
    y, x = np.indices((size, size))
    for operation in all_operations(name, size):
        (row,) = kernel_rows(as_rows([operation])[None], size)[0]
        assert row[0] == MOVED + operation.interpolation
        fill = [int(row[7]) >> shift & 255 for shift in (0, 8, 16)]
        if operation.interpolation:
            assert tuple(row[1:7]) == MATRICES[name](operation.argument, (size, size))
            continue
        from_x, from_y = (
            (a * x + b * y + c) >> 16 for a, b, c in row[1:7].astype(int).reshape(2, 3)
        )
        inside = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
        found = np.where(inside[..., None], image[from_y * inside, from_x * inside], fill)
        np.testing.assert_array_equal(found, applied(image, operation), str(operation))


@pytest.mark.parametrize("name", ["brightness", "posterize", "solarize", "invert", "solarize_add"])
def test_numbers_make_the_levels_that_pillow_makes(name: str) -> None:
    level = np.arange(256)
    image = level.astype(np.uint8).repeat(3).reshape(16, 16, 3)
    for operation in all_operations(name, 16):
        (row,) = kernel_rows(as_rows([operation])[None], 16)[0]
        kind = NAMES[int(row[0])]
        assert kind == ("solarize" if name == "invert" else name)
        found = {
            "brightness": np.clip(level.astype(np.float32) * np.float32(row[1]), 0, 255),
            "posterize": level & int(row[1]),
            "solarize": np.where(level < row[1], level, 255 - level),
            "solarize_add": np.where(level < 128, np.minimum(level + row[1], 255), level),
        }[kind].astype(np.uint8)
        np.testing.assert_array_equal(found, applied(image, operation)[..., 0].flatten())


def test_rows_keep_the_order_of_operations_and_images() -> None:
    names = [("color", "posterize"), ("equalize", "rotate"), ("sharpness", "color")]
    drawn = np.stack(
        [as_rows([Operation(first, 0.5), Operation(second, 2)]) for first, second in names]
    )
    rows = kernel_rows(drawn, 8)
    assert rows.shape == (2, 3, COLUMNS)
    positions = [[NAMES.index(name) for name in each] for each in zip(*names, strict=True)]
    positions[1][1] = MOVED
    np.testing.assert_array_equal(rows[..., 0], positions)
    np.testing.assert_array_equal(rows[0, ::2, 1], [1.5, 1.5])
    np.testing.assert_array_equal(rows[1, ::2, 1], [192, 3])


# The dataset that only draws them; without a GPU, Pillow stands in for the kernels.

CROP = "{random_resized_crop: {size: 48}}, horizontal_flip"
RAND = rf"augment.train=[{CROP}, {{extras.rand_augment\:RandAugment: {{magnitude: 17}}}}]"
TRIVIAL = f"augment.train=[{CROP}, extras.rand_augment:TrivialAugment]"
CUDA = torch.device("cuda", 0)
ON_GPU = "data.on_device=[extras.rand_augment.on_gpu:on_gpu]"


def pillow_operations(images: Tensor, operations: np.ndarray) -> Tensor:
    """Apply drawn operations as `apply_operations`, but on a CPU."""
    made = []
    for image, rows in zip(images.permute(0, 2, 3, 1).numpy(), operations, strict=True):
        drawn = [Operation(NAMES[int(n)], value, int(mode), int(f)) for n, value, mode, f in rows]
        made.append(apply_on_cpu(Picture(image), drawn).pixels())
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


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
        pytest.param(TRIVIAL, "[]", 2, CUDA, marks=pytest.mark.gpu),
    ],
)
def test_operations_on_the_device_make_the_batches_of_the_workers(
    image_root: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    entries: str,
    batch: str,
    workers: int,
    device: torch.device,
) -> None:
    """Bit for bit, also of images that replace unreadable ones, and after mixup and rounding."""
    if device == CPU:
        request.getfixturevalue("pillow")
    root = shutil.copytree(image_root, tmp_path / "images")
    for path in sorted(root.glob("train/*/0[3-5].jpg")):
        path.write_bytes(path.read_bytes()[:400])
    overrides = (entries, f"augment.batch={batch}", "data.on_error=skip", "data.max_bad_fraction=1")
    options: Any = {"dtype": torch.bfloat16, "workers": workers}
    with opened(root, *overrides, **options) as feed:
        expected = training(feed)
    with opened(root, *overrides, ON_GPU, device=device, **options) as feed:
        assert isinstance(feed.train.loader.dataset, DrawnOperations)
        assert_equal(training(feed), expected)


@pytest.mark.parametrize(
    "start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_it_is_sent_to_workers(image_root: Path, start_method: str) -> None:
    plain = crops(image_root / "train")
    plain.transform = Compose([*plain.transform.transforms, RandAugment()], SIZE)
    dataset: Any = DrawnOperations(plain)
    with open_loader(dataset, start_method=start_method) as loader:
        (batch,) = loader.batches(0, 1)
        for row, (epoch, index) in enumerate(loader.samples(0).tolist()):
            drawn = dataset.load(epoch, index)["operations"]
            np.testing.assert_array_equal(batch.fields["operations"][row], drawn)


class Negative(FolderDataset):
    def image_fields(self, picture: Picture) -> dict[str, Any]:
        return {"image": 255 - picture.pixels()}


class Deep(FolderDataset):
    fields = {"image": Field(np.uint8, (SIZE, SIZE, 5), image=True)}


@pytest.mark.usefixtures("pillow")
def test_datasets_whose_operations_stay_in_the_workers(image_root: Path) -> None:
    """Those that do not end in them, and those that make other images than a FolderDataset."""
    flip, rand = (lambda picture, rng: picture.mirrored()), RandAugment()
    for kind, transforms, drawn in (
        (FolderDataset, [flip, rand], True),
        (FolderDataset, [rand, flip], False),
        (FolderDataset, [], False),
        (Negative, [flip, rand], False),
        (Deep, [flip, rand], False),
    ):
        dataset: Any = crops(image_root / "train", kind)
        dataset.transform = Compose(transforms, SIZE)
        found = on_gpu.on_gpu(dataset, cli.load(["data=fake"]), CPU)
        assert isinstance(found, DrawnOperations) == drawn and (drawn or found is dataset)
    fake = FakeDataset(num_samples=9, num_classes=2, size=SIZE)
    assert on_gpu.on_gpu(fake, cli.load(["data=fake"]), CPU) is fake


def test_the_kernels_need_a_gpu() -> None:
    assert not has_kernels(CPU)


# The pixels.


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 32, 33, 160, 224])
@pytest.mark.parametrize("name", NAMES)
def test_operation_makes_the_pixels_of_pillow(image_root: Path, name: str, size: int) -> None:
    images = example_images(size, image_root / "train" / "dots" / "03.jpg")
    drawn = all_operations(name, size)
    operations = np.repeat([as_rows([each]) for each in drawn], 8, axis=0)
    found = made_on_gpu(np.concatenate([images] * len(drawn)), operations)
    expected = [applied(image, each) for each, image in itertools.product(drawn, images)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [48, pytest.param(224, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transform",
    [
        RandAugment(count=3, magnitude=17),
        RandAugment(count=3, magnitude=17, magnitude_std=5, p=0.5),
        RandAugment(**TIMM),
        TrivialAugment(),
        TrivialAugment(interpolation="bilinear"),
    ],
    ids=["rand", "some", "timm", "trivial", "bilinear"],
)
def test_operations_of_a_batch_are_applied_in_their_order(
    image_root: Path, transform: RandAugment, size: int
) -> None:
    images = example_images(size, image_root / "train" / "dots" / "02.jpg")
    images = np.concatenate([images] * 16)
    drawn = [transform.sample((size, size), random.Random(seed)) for seed in range(len(images))]
    expected = [
        apply_on_cpu(Picture(image), operations).pixels()
        for image, operations in zip(images, drawn, strict=True)
    ]
    operations = np.stack([as_rows(each) for each in drawn])
    np.testing.assert_array_equal(made_on_gpu(images, operations), expected)
    # Small batches, whose size is odd.
    for first in range(0, 24, 3):
        part = slice(first, first + 3)
        found = made_on_gpu(images[part], operations[part])
        np.testing.assert_array_equal(found, expected[part])


@pytest.mark.gpu
def test_operations_do_not_wait_for_the_device() -> None:
    drawn = [Operation(name, 1) for name in NAMES]
    drawn += [Operation("rotate", 1, mode) for mode in (MODES.BILINEAR, MODES.BICUBIC)]
    operations = np.stack([as_rows([each]) for each in drawn])
    images = torch.zeros(len(drawn), 3, 32, 32, dtype=torch.uint8, device="cuda")
    apply_operations(images, operations)
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)  # refuses none of the kernels
    try:
        apply_operations(images, operations)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_offsets_of_a_large_batch(image_root: Path) -> None:
    """More than 2**31 bytes."""
    size, batch = 224, 2**31 // (3 * 224**2) + 2
    photo = example_images(size, image_root / "train" / "dots" / "03.jpg")[1]
    pixels = torch.from_numpy(photo).cuda().expand(batch, -1, -1, -1).permute(0, 3, 1, 2)
    drawn = [Operation("rotate", 9, mode, FILL) for mode in (MODES.NEAREST, MODES.BICUBIC)]
    drawn += [Operation(name, 0.5) for name in ("equalize", "sharpness")]
    made = apply_operations(pixels, np.repeat(as_rows(drawn)[None], batch, axis=0))
    expected = torch.from_numpy(apply_on_cpu(Picture(photo), drawn).pixels().copy()).cuda()
    for part in made.permute(0, 2, 3, 1).split(1024):
        assert (part == expected).all()


@pytest.mark.gpu
def test_without_a_compiler_the_workers_apply_the_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says why; Triton keeps what it compiled in a folder of its own."""
    code = (
        "import torch, extras.rand_augment.on_gpu as gpu;"
        "print(gpu.has_kernels(torch.device('cuda', 0)))"
    )
    monkeypatch.delenv("CC", raising=False)
    variables = {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ended = run_python("-c", code, **variables)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "False"
    assert "augment.train: the workers apply the random operations" in ended.stderr
    assert "Failed to find C compiler" in ended.stderr
    assert has_kernels(torch.device("cuda", 0))
