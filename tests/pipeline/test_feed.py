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
from tests.loader_plans import loader_plan, world_of

CPU = torch.device("cpu")


@contextmanager
def opened(
    image_root: Path,
    decoder: str,
    *,
    device: torch.device = CPU,
    others: tuple[str, ...] = (),
    workers: int = 1,
    processes: int = 0,
    dtype: torch.dtype = torch.float32,
    overrides: tuple[str, ...] = ("augment=demo",),
    operations: int | None = None,
) -> Iterator[Feed]:
    """`operations` is set to draw operations in the workers without a GPU, too."""
    config = cli.load(
        [
            f"data.root={image_root}",
            "loader.batch_size=6",
            "loader.start_method=fork",
            f"loader.decoder={decoder}",
            *overrides,
        ]
    )
    datasets, world = build_datasets(config), world_of(device)
    plan = loader_plan(
        config,
        datasets,
        world,
        workers=workers,
        ceiling=processes,
        processes=processes,
        decoder=decoder,
        others=others,
        dtype=dtype,
    )
    if operations is not None:
        plan = replace(plan, operations=operations)
    with open_feed(config, datasets, plan, world) as feed:
        yield feed


def validation(feed: Feed) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of every validation batch, on the host."""
    return [
        (batch.images.cpu(), batch.labels.cpu()) for batch in feed.val.batches(0, feed.val_batches)
    ]


def assert_equal(ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> None:
    assert len(ours) == len(theirs) == 3
    for pair, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(pair, other, strict=True))


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
def test_decoder_can_be_switched(image_root: Path) -> None:
    """Also in the middle of an iteration; every decoder makes the batches of the same samples."""
    from pipeline.gpu.geometry import engines_support

    with opened(image_root, "pillow", others=("hybrid", "gpu"), workers=2) as feed:
        assert feed.engines is not None and feed.decoder == "pillow"
        engines: Any = feed.engines.decoder
        dataset = feed.train.loader.pool.sources[0].dataset
        assert isinstance(dataset, FolderDataset)
        samples = [pair for step in range(9) for pair in feed.train.loader.samples(step).tolist()]
        most = sum(engines_support(dataset.read(index)) for _, index in samples)
        made: dict[str, list[Tensor]] = {}
        for decoder in ("gpu", "pillow", "hybrid", "gpu"):
            feed.decode_with(decoder)
            assert feed.decoder == decoder
            next(feed.train.batches(0, 9))
            feed.decode_with(decoder)  # the batches that were begun are done
            engines.files.clear()
            made[decoder] = [batch.images.clone() for batch in feed.train.batches(0, 9)]
            files = sum(engines.files)
            expected = {"gpu": files == most, "hybrid": 0 < files < most, "pillow": files == 0}
            assert expected[decoder]
        level = 1 / 255 / 0.22
        for one, other, third in zip(*made.values(), strict=True):
            assert (one - other).abs().max() < 40 * level and (one - third).abs().max() < 40 * level


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
        reply: Any = SimpleNamespace(decoded=1000, seconds=2.0)
        only_read: Any = SimpleNamespace(decoded=0, seconds=9.0)
        loader.pool.recent[loader.source] += [reply, only_read]
        feed.decode_with("hybrid", enough=enough)
        assert loader.encoded_share == pytest.approx(share)
        feed.decode_with("gpu")
        assert loader.encoded_share == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_decoders_validate_with_the_same_pixels(image_root: Path, dtype: torch.dtype) -> None:
    """Bit for bit, also while the engines decode training batches."""
    device = torch.device("cuda", 0)
    found = {}
    for decoder in [*installed(), "gpu", "hybrid"]:
        with opened(
            image_root, decoder, device=device, workers=2, processes=4, dtype=dtype
        ) as feed:
            training = feed.train.batches(0, 20)
            next(training)
            with feed.train.pause(), feed.for_validation():
                found[decoder] = validation(feed)
            assert len(list(training)) == 19
    for batches in found.values():
        assert_equal(batches, found["pillow"])


# RandAugment, drawn by the workers and applied on the device; without a GPU, by Pillow.

CROP = "{random_resized_crop: {size: 48}}"
PLAIN = f"augment.train=[{CROP}, horizontal_flip]"
RAND = f"augment.train=[{CROP}, horizontal_flip, {{rand_augment: {{magnitude: 17}}}}]"
TRIVIAL = f"augment.train=[{CROP}, horizontal_flip, trivial_augment]"
LEVELS = ("data.mean=[0,0,0]", f"data.std=[{1 / 255},{1 / 255},{1 / 255}]")


def images_of(feed: Feed) -> list[Tensor]:
    """The training images of nine batches, on the host."""
    return [batch.images.cpu() for batch in feed.train.batches(0, 9)]


# Sizes by epoch: batches of 8 from 36 images; epoch 1 begins with step 5, epoch 2 with step 9.

SIZES = {0: 24, 1: 32, 2: 48}
SIZE_OF_STEP = [24] * 5 + [32] * 4 + [48] * 5


def sized(decoder: str, overrides: tuple[str, ...], size: int | None) -> dict[str, Any]:
    """Options of `opened`: all images of this size, or sizes by epoch."""
    sizes = "data.sizes={0: 24, 1: 32, 2: 48}" if size is None else f"data.image_size={size}"
    side = () if size else ("data.image_size=48",)
    options = ("augment=demo", *side, sizes, "loader.batch_size=8", "train.epochs=3", *overrides)
    return {"decoder": decoder, "overrides": options}


def check_sizes(
    image_root: Path,
    decoder: str,
    *overrides: str,
    first: int = 0,
    share: float | None = None,
    **options: Any,
) -> None:
    """At each step, the batch is that of a run whose images all have the size of the step."""
    steps = range(first, len(SIZE_OF_STEP))
    expected = {}
    for size in SIZES.values():
        with opened(image_root, **sized(decoder, overrides, size), **options) as feed:
            if share is not None:
                feed.train.loader.encoded_share = share
            expected[size] = [
                batch.clone() for batch in feed.train.batches(steps.start, steps.stop)
            ]
    with opened(image_root, **sized(decoder, overrides, None), **options) as feed:
        if share is not None:
            feed.train.loader.encoded_share = share
        for place, batch in enumerate(feed.train.batches(steps.start, steps.stop)):
            size = SIZE_OF_STEP[batch.step]
            other = expected[size][place]
            assert batch.images.shape == (8, 3, size, size)
            assert batch.images.stride() == other.images.stride()
            assert torch.equal(batch.images, other.images)
            assert torch.equal(batch.targets, other.targets)
            assert torch.equal(batch.samples, other.samples)
        assert place == len(steps) - 1


@pytest.mark.parametrize(("workers", "first"), [(0, 0), (1, 7), (3, 3)])
def test_sizes_by_epoch(image_root: Path, workers: int, first: int) -> None:
    check_sizes(image_root, "pillow", workers=workers, first=first)


@pytest.mark.usefixtures("engines")
def test_sizes_with_engines(image_root: Path) -> None:
    check_sizes(image_root, "gpu", workers=2, share=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [PLAIN, RAND], ids=["plain", "rand"])
@pytest.mark.parametrize("decoder", ["pillow", "gpu"])
def test_sizes_on_a_gpu(image_root: Path, decoder: str, entries: str) -> None:
    check_sizes(
        image_root,
        decoder,
        entries.replace("48", "${data.image_size}"),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        workers=2,
    )


@pytest.mark.gpu
def test_sizes_use_the_memory_of_the_largest(image_root: Path) -> None:
    def taken(size: int | None) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        options = {"device": torch.device("cuda", 0), "workers": 2}
        with opened(image_root, **sized("pillow", (), size), **options) as feed:
            for _ in feed.train.batches(0, len(SIZE_OF_STEP)):
                pass
            return torch.cuda.memory_allocated() - before

    taken(None)  # allocates what every later feed shares
    assert taken(None) == taken(48) > 0


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("entries", "count", "batch", "workers"),
    [(RAND, 2, "[]", 2), (RAND, 2, "[mixup]", 0), (TRIVIAL, 1, "[]", 0)],
    ids=["rand", "rand with mixup", "trivial"],
)
def test_drawn_operations_make_the_batches_of_the_workers(
    image_root: Path, entries: str, count: int, batch: str, workers: int
) -> None:
    """Bit for bit, also after normalisation, mixup and rounding to bf16."""
    overrides = (entries, f"augment.batch={batch}")
    made = []
    for operations in (0, count):
        with opened(
            image_root,
            "pillow",
            workers=workers,
            dtype=torch.bfloat16,
            overrides=overrides,
            operations=operations,
        ) as feed:
            made.append(images_of(feed))
    assert all(map(torch.equal, *made))


@pytest.mark.usefixtures("engines")
def test_drawn_operations_are_those_of_the_sample_that_replaces_an_unreadable_one(
    image_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "images"
    shutil.copytree(image_root, root)
    for path in sorted(root.glob("train/*/0[3-5].jpg")):
        path.write_bytes(path.read_bytes()[:400])
    made = []
    for operations in (0, 2):
        overrides = (RAND, "data.on_error=skip")
        with opened(root, "pillow", overrides=overrides, operations=operations) as feed:
            made.append(images_of(feed))
    assert all(map(torch.equal, *made))


def operated_batches(feed: Feed, plain: list[Tensor]) -> list[Tensor]:
    """`plain`, whole levels, after the operations that the dataset of `feed` draws."""
    loader = feed.train.loader
    dataset = loader.pool.sources[loader.source].dataset
    assert isinstance(dataset, FolderDataset)
    expected = []
    for step, images in enumerate(plain):
        rows = []
        for image, (epoch, index) in zip(images, loader.samples(step).tolist(), strict=True):
            drawn = dataset.load_for_gpu(epoch, index)[2]
            levels = image.round().to(torch.uint8).permute(1, 2, 0).numpy()
            rows.append(torch.from_numpy(apply_operations(Picture(levels), drawn).pixels().copy()))
        expected.append(torch.stack(rows).permute(0, 3, 1, 2).float())
    return expected


@pytest.mark.usefixtures("engines")
def test_images_that_the_engines_decode_get_their_operations(image_root: Path) -> None:
    """Those of a batch that the workers decode, too."""
    share = 0.5
    with opened(image_root, "gpu", overrides=(PLAIN, *LEVELS)) as feed:
        feed.train.loader.encoded_share = share
        plain = images_of(feed)
    with opened(image_root, "gpu", overrides=(RAND, *LEVELS), operations=2) as feed:
        feed.train.loader.encoded_share = share
        assert feed.engines is not None
        made = images_of(feed)
        engines: Any = feed.engines.decoder
        assert 0 < sum(engines.files) <= 9 * 3
        for ours, expected in zip(made, operated_batches(feed, plain), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("engines")
def test_workers_decode_if_they_apply_the_operations(image_root: Path) -> None:
    """Without a GPU, no file stays encoded."""
    with opened(image_root, "pillow", overrides=(RAND,)) as feed:
        expected = images_of(feed)
    with opened(image_root, "gpu", overrides=(RAND,)) as feed:
        assert all(map(torch.equal, images_of(feed), expected))
        assert feed.engines is not None
        engines: Any = feed.engines.decoder
        assert engines.files == [0] * 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entries", [RAND, TRIVIAL], ids=["rand", "trivial"])
def test_drawn_operations_make_the_same_batches_on_a_gpu(
    image_root: Path, entries: str, dtype: torch.dtype
) -> None:
    made = []
    for device in (CPU, torch.device("cuda", 0)):
        with opened(
            image_root, "pillow", device=device, workers=2, dtype=dtype, overrides=(entries,)
        ) as feed:
            assert (feed.plan.operations > 0) == (device != CPU)
            made.append(images_of(feed))
    assert all(map(torch.equal, *made))


@pytest.mark.gpu
def test_images_that_a_gpu_decodes_get_their_operations(image_root: Path) -> None:
    device = torch.device("cuda", 0)
    with opened(image_root, "gpu", device=device, overrides=(PLAIN, *LEVELS)) as feed:
        plain = images_of(feed)
    with opened(image_root, "gpu", device=device, overrides=(RAND, *LEVELS)) as feed:
        assert feed.engines is not None
        made = images_of(feed)
        assert feed.engines.decoder.seconds_per_image > 0
        for ours, expected in zip(made, operated_batches(feed, plain), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
