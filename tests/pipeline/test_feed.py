"""open_feed: the pixels of each split, and the number of workers that make them."""

import gc
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf import cli
from pipeline.augment import apply_operations
from pipeline.build import build_datasets
from pipeline.dataset import FolderDataset
from pipeline.decode import Picture, installed
from pipeline.feed import Feed, open_feed
from pipeline.prefetcher import Batch
from tests.loader_plans import loader_plan, world_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@contextmanager
def opened(
    image_root: Path,
    decoder: str,
    *overrides: str,
    device: torch.device = CPU,
    workers: int = 1,
    operations: int | None = None,
    **plan: Any,
) -> Iterator[Feed]:
    """Open a feed of small batches.

    Args:
        operations: number of operations that the device applies, also without a GPU.
        plan: further arguments of `loader_plan`.
    """
    fixed = (f"data.root={image_root}", "loader.batch_size=6", "loader.start_method=fork")
    config = cli.load([*fixed, f"loader.decoder={decoder}", *(overrides or ["augment=demo"])])
    datasets, world = build_datasets(config), world_of(device)
    chosen = loader_plan(config, datasets, world, workers=workers, decoder=decoder, **plan)
    if operations is not None:
        chosen = replace(chosen, operations=operations)
    with open_feed(config, datasets, chosen, world) as feed:
        yield feed


def validation(feed: Feed) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of every validation batch, on the host."""
    return [
        (batch["image"].cpu(), batch["label"].cpu())
        for batch in feed.val.batches(0, feed.val_batches)
    ]


def assert_equal(ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> None:
    assert len(ours) == len(theirs) == 3
    for pair, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(pair, other, strict=True))


def images_of(feed: Feed) -> list[Tensor]:
    """The training images of nine batches, on the host."""
    return [batch["image"].cpu() for batch in feed.train.batches(0, 9)]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow stands in for the JPEG engines, and for RandAugment's kernels."""
    module = pytest.importorskip("tests.engines")
    monkeypatch.setattr("pipeline.gpu.GpuDecoder", module.PillowEngines)
    monkeypatch.setattr("pipeline.gpu.apply_operations", module.pillow_operations)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("decoder", ["gpu", "hybrid"])
def test_validation_does_not_use_the_engines(image_root: Path, decoder: str) -> None:
    with opened(image_root, installed()[0]) as plain, opened(image_root, decoder) as feed:
        assert feed.engines is not None and feed.train.upload is feed.engines
        assert_equal(validation(feed), validation(plain))
        assert feed.engines.decoder.files == []
        # hybrid balances by the rate of the workers on training images only
        train, val = feed.train.loader.pool.recent
        assert not train and val


def test_validation_uses_all_workers(image_root: Path) -> None:
    """No process is started or ended for it."""
    with opened(image_root, "pillow", workers=1, processes=3) as feed:
        pool = feed.train.loader.pool
        pids = pool.pids
        assert len(pids) == 3 and pool.active == 1
        for _ in range(2):
            with feed.for_validation():
                assert pool.active == 3
                validation(feed)
            assert pool.active == 1 and pool.pids == pids


@pytest.mark.usefixtures("engines")
def test_decoder_can_be_switched(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of an iteration; every decoder makes the batches of the same samples."""
    from pipeline.gpu.geometry import engines_support

    # With hybrid, the first share stays: on a busy machine, slow workers would decode nothing.
    monkeypatch.setattr("pipeline.gpu.decoder.EngineUpload._balance", lambda upload: None)
    with opened(image_root, "pillow", others=("hybrid", "gpu"), workers=2) as feed:
        assert feed.engines is not None and feed.decoder == "pillow"
        engines: Any = feed.engines.decoder
        dataset = feed.train.loader.dataset
        assert isinstance(dataset, FolderDataset)
        samples = [pair for step in range(9) for pair in feed.train.loader.samples(step).tolist()]
        most = sum(engines_support(dataset.read(index)) for _, index in samples)
        found: dict[str, list[Tensor]] = {}
        for decoder in ("gpu", "pillow", "hybrid", "gpu"):
            feed.decode_with(decoder)
            assert feed.decoder == decoder
            next(feed.train.batches(0, 9))
            feed.decode_with(decoder)  # the batches that were begun are done
            engines.files.clear()
            found[decoder] = images_of(feed)
            files = sum(engines.files)
            assert {"gpu": files == most, "hybrid": 0 < files < most, "pillow": not files}[decoder]
        level = 1 / 255 / 0.22
        for one, *others in zip(*found.values(), strict=True):
            assert all((one - other).abs().max() < 40 * level for other in others)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("enough", "share"),
    [(math.inf, 0.75), (4000.0, 0.75), (2000.0, 0.5), (1250.0, 0.2), (500.0, 0.0)],
)
def test_engines_take_the_smallest_share_that_is_enough(
    image_root: Path, enough: float, share: float
) -> None:
    """Two workers decode 1,000 images/s, the engines 3,000: together 4,000."""
    with opened(image_root, "hybrid", workers=2) as feed:
        loader = feed.train.loader
        assert loader.encoded_share == 0.6  # until the rates are known
        assert feed.engines is not None
        feed.engines.decoder.seconds_per_image = 1 / 3000
        decoded: Any = SimpleNamespace(decoded=1000, seconds=2.0)
        only_read: Any = SimpleNamespace(decoded=0, seconds=9.0)
        loader.pool.recent[loader.source] += [decoded, only_read]
        feed.decode_with("hybrid", enough=enough)
        assert loader.encoded_share == pytest.approx(share)
        feed.decode_with("gpu")
        assert loader.encoded_share == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_decoders_validate_with_the_same_pixels(image_root: Path, dtype: torch.dtype) -> None:
    """Bit for bit, also while the engines decode training batches."""
    found = {}
    options: Any = {"device": CUDA, "workers": 2, "processes": 4, "ceiling": 4, "dtype": dtype}
    for decoder in [*installed(), "gpu", "hybrid"]:
        with opened(image_root, decoder, **options) as feed:
            training = feed.train.batches(0, 20)
            next(training)
            with feed.train.pause(), feed.for_validation():
                found[decoder] = validation(feed)
            assert len(list(training)) == 19
    for batches in found.values():
        assert_equal(batches, found["pillow"])


# Sizes by epoch: batches of 8 from 36 images; epoch 1 begins with step 5, epoch 2 with step 9.

SIZE_OF_STEP = [24] * 5 + [32] * 4 + [48] * 5


def sized(size: int | None) -> tuple[str, ...]:
    """Overrides for images of this size, or of a size by epoch."""
    sizes = [f"data.image_size={size}"]
    if size is None:
        sizes = ["data.image_size=48", "data.sizes={0: 24, 1: 32, 2: 48}"]
    return ("augment=demo", *sizes, "loader.batch_size=8", "train.epochs=3")


def check_sizes(
    image_root: Path, decoder: str, *overrides: str, first: int = 0, **options: Any
) -> None:
    """At each step, the batch is that of a run whose images all have the size of the step."""

    def batches(size: int | None) -> dict[int, Batch]:
        with opened(image_root, decoder, *sized(size), *overrides, **options) as feed:
            if decoder == "gpu" and feed.train.format.device == CPU:
                feed.train.loader.encoded_share = 0.5
            found = feed.train.batches(first, len(SIZE_OF_STEP))
            return {batch.step: batch.clone() for batch in found}

    found, of_size = batches(None), {size: batches(size) for size in set(SIZE_OF_STEP)}
    assert list(found) == list(range(first, len(SIZE_OF_STEP)))
    for step, batch in found.items():
        size = SIZE_OF_STEP[step]
        expected = of_size[size][step]
        assert batch["image"].shape == (8, 3, size, size)
        assert batch["image"].stride() == expected["image"].stride()
        assert all(torch.equal(batch[name], rows) for name, rows in expected.fields.items())
        assert torch.equal(batch.samples, expected.samples)


@pytest.mark.parametrize(("workers", "first"), [(0, 0), (3, 3)])
def test_sizes_by_epoch(image_root: Path, workers: int, first: int) -> None:
    check_sizes(image_root, "pillow", workers=workers, first=first)


@pytest.mark.usefixtures("engines")
def test_sizes_with_engines(image_root: Path) -> None:
    check_sizes(image_root, "gpu", workers=2)


# RandAugment, sampled by the workers and applied on the device; without a GPU, by Pillow.

CROP = "{random_resized_crop: {size: 48}}"
PLAIN = f"augment.train=[{CROP}, horizontal_flip]"
RAND = f"augment.train=[{CROP}, horizontal_flip, {{rand_augment: {{magnitude: 17}}}}]"
TRIVIAL = f"augment.train=[{CROP}, horizontal_flip, trivial_augment]"
LEVELS = ("data.mean=[0,0,0]", f"data.std=[{1 / 255},{1 / 255},{1 / 255}]")


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [PLAIN, RAND], ids=["plain", "rand"])
@pytest.mark.parametrize("decoder", ["pillow", "gpu"])
def test_sizes_on_a_gpu(image_root: Path, decoder: str, entries: str) -> None:
    entries = entries.replace("48", "${data.image_size}")
    check_sizes(image_root, decoder, entries, device=CUDA, dtype=torch.bfloat16, workers=2)


@pytest.mark.gpu
def test_sizes_use_the_memory_of_the_largest(image_root: Path) -> None:
    def taken(size: int | None) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        with opened(image_root, "pillow", *sized(size), device=CUDA, workers=2) as feed:
            for _ in feed.train.batches(0, len(SIZE_OF_STEP)):
                pass
            return torch.cuda.memory_allocated() - before

    taken(None)  # allocates what every later feed shares
    assert taken(None) == taken(48) > 0


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("entries", "count", "batch", "workers"),
    [(RAND, 2, "[mixup]", 2), (TRIVIAL, 1, "[]", 0)],
    ids=["rand with mixup", "trivial"],
)
def test_operations_on_the_device_make_the_batches_of_the_workers(
    image_root: Path, tmp_path: Path, entries: str, count: int, batch: str, workers: int
) -> None:
    """Bit for bit, also of images that replace unreadable ones, and after mixup and rounding."""
    root = shutil.copytree(image_root, tmp_path / "images")
    for path in sorted(root.glob("train/*/0[3-5].jpg")):
        path.write_bytes(path.read_bytes()[:400])
    overrides = (entries, f"augment.batch={batch}", "data.on_error=skip")
    found = []
    for operations in (0, count):
        options: Any = {"dtype": torch.bfloat16, "operations": operations}
        with opened(root, "pillow", *overrides, workers=workers, **options) as feed:
            found.append(images_of(feed))
    assert all(map(torch.equal, *found))


def after_operations(feed: Feed, plain: list[Tensor]) -> list[Tensor]:
    """`plain`, whole levels, after the operations that the dataset of `feed` samples."""
    loader = feed.train.loader
    assert isinstance(loader.dataset, FolderDataset)
    expected = []
    for step, images in enumerate(plain):
        rows = []
        for image, (epoch, index) in zip(images, loader.samples(step).tolist(), strict=True):
            operations = loader.dataset.load_for_gpu(epoch, index)[1]
            levels = image.round().to(torch.uint8).permute(1, 2, 0).numpy()
            pixels = apply_operations(Picture(levels), operations).pixels()
            rows.append(torch.from_numpy(pixels.copy()))
        expected.append(torch.stack(rows).permute(0, 3, 1, 2).float())
    return expected


def check_operations(image_root: Path, device: torch.device, operations: int | None) -> Any:
    """Compare the images of the engines with and without operations; return the engines."""
    found: list[list[Tensor]] = []
    for entries, count in ((PLAIN, None), (RAND, operations)):
        overrides = (entries, *LEVELS)
        with opened(image_root, "gpu", *overrides, device=device, operations=count) as feed:
            if device == CPU:
                feed.train.loader.encoded_share = 0.5
            found.append(images_of(feed))
            expected = after_operations(feed, found[0]) if len(found) == 2 else []
    for ours, theirs in zip(found[1], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert feed.engines is not None
    return feed.engines.decoder


@pytest.mark.usefixtures("engines")
def test_images_that_the_engines_decode_get_their_operations(image_root: Path) -> None:
    """Those of a batch that the workers decode, too."""
    assert 0 < sum(check_operations(image_root, CPU, 2).files) <= 9 * 3


@pytest.mark.gpu
def test_images_that_a_gpu_decodes_get_their_operations(image_root: Path) -> None:
    assert check_operations(image_root, CUDA, None).seconds_per_image > 0


@pytest.mark.usefixtures("engines")
def test_workers_decode_if_they_apply_the_operations(image_root: Path) -> None:
    """Without a GPU, no file stays encoded."""
    with opened(image_root, "pillow", RAND) as feed:
        expected = images_of(feed)
    with opened(image_root, "gpu", RAND) as feed:
        assert all(map(torch.equal, images_of(feed), expected))
        assert feed.engines is not None
        engines: Any = feed.engines.decoder
        assert engines.files == [0] * 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entries", [RAND, TRIVIAL], ids=["rand", "trivial"])
def test_operations_make_the_same_batches_on_a_gpu(
    image_root: Path, entries: str, dtype: torch.dtype
) -> None:
    found = []
    for device in (CPU, CUDA):
        with opened(image_root, "pillow", entries, device=device, workers=2, dtype=dtype) as feed:
            assert (feed.plan.operations > 0) == (device != CPU)
            found.append(images_of(feed))
    assert all(map(torch.equal, *found))
