"""Batches on the device: the same numbers as by hand, and on a GPU never overwritten while somebody reads them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.batch_augment import BATCH_TRANSFORMS, batch_rng
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.index import load_index
from pipeline.loader import Loader, Pinned, WorkerPool, slots_needed, start_source
from pipeline.prefetcher import Batch, Prefetcher
from pipeline.sampler import TrainSampler, ValSampler
from pipeline.worker import EMPTY_ROW

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, BATCH, CLASSES = 32, 16, 3
CPU = torch.device("cpu")
FAKE = FakeDataset(num_samples=512, num_classes=CLASSES, size=SIZE)


@contextmanager
def open_prefetcher(
    dataset: Dataset,
    *,
    device: torch.device = CPU,
    depth: int = 2,
    workers: int = 0,
    validation: bool = False,
    transforms: Sequence[Any] = (),
    **options: Any,
) -> Iterator[Prefetcher]:
    slots = slots_needed(batch_size=BATCH, workers=workers, prefetch_factor=2, prefetch_batches=depth)
    source = start_source(dataset, batch_size=BATCH, size=SIZE, slots=slots)
    sampler: Any = TrainSampler(num_samples=len(dataset), batch_size=BATCH, seed=3)
    if validation:
        sampler = ValSampler(num_samples=len(dataset), batch_size=BATCH)
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(Pinned([source.pixels, source.labels]))
        pool = stack.enter_context(WorkerPool([source], workers=workers))
        prefetcher = Prefetcher(
            Loader(pool, 0, sampler.samples, hold=depth + 1),
            device=device,
            depth=depth,
            mean=MEAN,
            std=STD,
            transforms=build(transforms, BATCH_TRANSFORMS, key="augment.batch"),
            num_classes=CLASSES,
            seed=11,
            **options,
        )
        stack.callback(prefetcher.close)
        yield prefetcher


@pytest.fixture(scope="module")
def dataset(image_root: Path) -> FolderDataset:
    transform = Compose(build([{"random_resized_crop": {"size": SIZE}}], TRANSFORMS, key="augment.train"))
    return FolderDataset(load_index(image_root / "train", key="data.train"), transform, seed=7)


def normalised(dataset: Dataset, samples: np.ndarray) -> tuple[Tensor, Tensor]:
    """The definition, in float64: (x / 255 - mean) / std."""
    pixels, labels = zip(*(dataset.load(epoch, index) for epoch, index in samples.tolist()), strict=True)
    images = (np.stack(pixels) / 255 - np.array(MEAN)) / np.array(STD)
    return torch.from_numpy(images.transpose(0, 3, 1, 2)), torch.tensor(labels)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_normalised_as_by_hand(dataset: FolderDataset, workers: int, channels_last: bool) -> None:
    with open_prefetcher(dataset, workers=workers, channels_last=channels_last) as prefetcher:
        batches = list(prefetcher.batches(2, 9))  # kept: on a CPU a batch has memory of its own
        assert [batch.step for batch in batches] == list(range(2, 9))
        for batch in batches:
            images, labels = normalised(dataset, prefetcher.loader.samples(batch.step))
            assert batch.images.dtype == torch.float32
            torch.testing.assert_close(batch.images.double(), images, rtol=0, atol=1e-6)
            assert torch.equal(batch.labels, labels)
            assert batch.targets is batch.labels
            layout = torch.channels_last if channels_last else torch.contiguous_format
            assert batch.images.is_contiguous(memory_format=layout)


def test_bf16_is_the_rounded_float32(dataset: FolderDataset) -> None:
    with open_prefetcher(dataset) as exact, open_prefetcher(dataset, dtype=torch.bfloat16) as rounded:
        for one, other in zip(exact.batches(0, 3), rounded.batches(0, 3), strict=True):
            assert other.images.dtype == torch.bfloat16
            assert torch.equal(other.images, one.images.to(torch.bfloat16))


@pytest.mark.parametrize("rank", [0, 1])
def test_batch_transforms_are_applied_in_order_with_their_draws(dataset: FolderDataset, rank: int) -> None:
    names = ["mixup", {"cutmix": {"p": 0.5}}, "random_erasing"]
    with open_prefetcher(dataset) as plain, open_prefetcher(dataset, transforms=names, rank=rank) as mixing:
        for before, after in zip(plain.batches(4, 7), mixing.batches(4, 7), strict=True):
            images, targets = before.images, torch.eye(CLASSES)[before.labels]
            rng = batch_rng(11, before.step, rank)
            for transform in build(names, BATCH_TRANSFORMS, key="augment.batch"):
                images, targets = transform(images, targets, rng)
            assert torch.equal(after.images, images)
            assert torch.equal(after.targets, targets)
            assert torch.equal(after.labels, before.labels)
            assert not torch.equal(after.images, before.images)


def test_short_validation_batch_marks_its_empty_rows(image_root: Path) -> None:
    transform = Compose(build([{"resize": {"size": 40}}, {"center_crop": {"size": SIZE}}], TRANSFORMS, key="augment.val"))
    dataset = FolderDataset(load_index(image_root / "train", key="data.train"), transform)
    with open_prefetcher(dataset, validation=True) as prefetcher:
        for _ in range(2):  # a second validation finds other images in the empty rows
            batches = list(prefetcher.batches(0, 3))
            assert [int((batch.labels == EMPTY_ROW).sum()) for batch in batches] == [0, 0, 3 * 16 - 36]
            images, labels = normalised(dataset, np.array([[0, index] for index in range(36)]))
            kept = torch.cat([batch.images for batch in batches])[:36]
            torch.testing.assert_close(kept.double(), images, rtol=0, atol=1e-6)
            assert torch.equal(torch.cat([batch.labels for batch in batches])[:36], labels)


def test_depth_makes_no_difference(dataset: FolderDataset) -> None:
    with open_prefetcher(dataset, depth=1) as shallow, open_prefetcher(dataset, depth=5, workers=2) as deep:
        for one, other in zip(shallow.batches(0, 12), deep.batches(0, 12), strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_iteration_can_be_left_and_another_begun(dataset: FolderDataset, workers: int) -> None:
    with open_prefetcher(dataset, workers=workers) as prefetcher:
        for batch in prefetcher.batches(0, 100):
            if batch.step == 3:
                break
        again = list(prefetcher.batches(50, 54))
        assert list(prefetcher.batches(7, 7)) == []
    for batch in again:
        images, labels = normalised(dataset, TrainSampler(num_samples=36, batch_size=BATCH, seed=3).samples(batch.step))
        torch.testing.assert_close(batch.images.double(), images, rtol=0, atol=1e-6)
        assert torch.equal(batch.labels, labels)


def test_timing_covers_what_has_finished_since_the_last_reading(dataset: FolderDataset) -> None:
    with open_prefetcher(dataset) as prefetcher:
        assert prefetcher.timing() is None
        batches = prefetcher.batches(0, 5)
        next(batches)
        assert prefetcher.timing() is None  # the consumer is not done with it
        next(batches)
        first = prefetcher.timing()
        assert first is not None
        assert 0 < first.wait_fraction < 1
        assert first.copy_ms > 0
        assert first.step_ms > 0
        assert prefetcher.timing() is None
        assert len(list(batches)) == 3
        assert prefetcher.timing() is not None


class Stream:
    """A CUDA stream as a clock: what it does comes after what it has waited for, and else at once."""

    def __init__(self) -> None:
        self.now = 0

    def wait_event(self, event: Any) -> None:
        self.now = max(self.now, event.time)

    def wait_stream(self, other: "Stream") -> None:
        self.now = max(self.now, other.now)

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_streams_wait_for_each_other_in_both_directions(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """CUDA's rules without a GPU: a copy takes 1, the consumer's kernels take 10, and the host takes no time at all."""
    main, side = Stream(), Stream()
    current = [main]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = -1

        def record(self) -> None:
            self.time = current[-1].now

        def synchronize(self) -> None:
            pass

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    written: list[tuple[int, int, int]] = []  # address, begin, end
    with open_prefetcher(FAKE, depth=depth, workers=2) as prefetcher:
        prefetcher.cuda, prefetcher.side = True, side  # type: ignore[assignment]
        monkeypatch.setattr(prefetcher.loader, "ready", lambda: True)
        own = prefetcher._own

        def copy(name: str, slot: int, value: Tensor, dtype: torch.dtype) -> Tensor:
            assert current[-1] is side
            result = own(name, slot, value, dtype)
            written.append((result.data_ptr(), side.now, side.now + 1))
            side.now += 1
            return result

        monkeypatch.setattr(prefetcher, "_own", copy)
        read: list[tuple[int, int, int]] = []
        for begin in (0, 100, 200):
            for batch in prefetcher.batches(begin, begin + 50):
                address = batch.images.data_ptr()
                assert main.now >= max(end for place, _, end in written if place == address)
                read.append((address, main.now, main.now + 10))
                main.now += 10
                if batch.step == begin + 30:
                    break  # with its kernels still waiting when the next iteration starts
    assert len({address for address, *_ in read}) == depth + 1
    clashes = [(w, r) for w in written for r in read if w[0] == r[0] and w[1] < r[2] and r[1] < w[2]]
    assert clashes == []


# On a GPU. The consumer lags behind: its kernels wait in the stream long after the host has gone on, so that memory which is
# written too early is read with the wrong content.

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
LAG_CYCLES = 3_000_000  # 1.5 to 3 ms: many times a copy of one of these batches


def checksum(images: Tensor) -> Tensor:
    """int64 [] of the bits of float32 images and their places, in integers: exact in any order of summation."""
    bits = images.contiguous().view(torch.int32).flatten().to(torch.int64)
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()


def facts(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """On the device, without waiting for it: checksum of the images, copies of labels and targets."""
    return checksum(batch.images), batch.labels.clone(), batch.targets.clone()


def assert_same(found: list[tuple[Tensor, Tensor, Tensor]], expected: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    assert len(found) == len(expected)
    wrong = [i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one[0].item() != other[0].item()]
    assert wrong == []  # numbers of the batches whose images differ
    for (_, labels, targets), (_, expected_labels, expected_targets) in zip(found, expected, strict=True):
        assert torch.equal(labels.cpu(), expected_labels)
        torch.testing.assert_close(targets.cpu(), expected_targets)  # lerp may round differently on a GPU


SELECTING = ["cutmix", {"random_erasing": {"p": 0.5}}]  # they choose pixels, and compute none: exact on any device
ALL = ["mixup", *SELECTING]


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("depth", "workers", "channels_last", "transforms"),
    [(2, 2, True, SELECTING), (1, 2, False, []), (4, 4, True, []), (2, 0, True, SELECTING)],
)
def test_lagging_consumer_sees_every_batch_as_it_was(
    depth: int, workers: int, channels_last: bool, transforms: list[Any]
) -> None:
    steps = 300
    with open_prefetcher(FAKE, transforms=transforms) as prefetcher:
        expected = [facts(batch) for batch in prefetcher.batches(0, steps)]
    found, places = [], set()
    with open_prefetcher(
        FAKE, device=torch.device("cuda"), depth=depth, workers=workers, channels_last=channels_last, transforms=transforms
    ) as prefetcher:
        for batch in prefetcher.batches(0, steps):
            torch.cuda._sleep(LAG_CYCLES)
            found.append(facts(batch))
            places.add(batch.images.data_ptr())
        torch.cuda.synchronize()
        assert len(places) == depth + 1  # memory is reused, not allocated
    assert_same(found, expected)


@gpu
@needs_gpu
def test_slow_host_and_fast_device_see_every_batch_too() -> None:
    """The other direction: copies run ahead of the consumer as far as they may."""
    with open_prefetcher(FAKE) as prefetcher:
        expected = [facts(batch) for batch in prefetcher.batches(0, 60)]
    with open_prefetcher(FAKE, device=torch.device("cuda"), depth=3, workers=2) as prefetcher:
        found = []
        for batch in prefetcher.batches(0, 60):
            torch.cuda.synchronize()
            found.append(facts(batch))
        torch.cuda.synchronize()
    assert_same(found, expected)


@gpu
@needs_gpu
def test_iteration_left_early_is_still_read_while_the_next_begins() -> None:
    with open_prefetcher(FAKE) as prefetcher:
        expected = [facts(batch) for begin in (0, 20, 40) for batch in prefetcher.batches(begin, begin + 5)]
    found = []
    with open_prefetcher(FAKE, device=torch.device("cuda"), depth=2, workers=2) as prefetcher:
        for begin in (0, 20, 40):
            for batch in prefetcher.batches(begin, begin + 100):
                torch.cuda._sleep(10 * LAG_CYCLES)
                found.append(facts(batch))
                if batch.step == begin + 4:
                    break
        torch.cuda.synchronize()
    assert_same(found, expected)


@gpu
@needs_gpu
def test_bf16_on_the_gpu_is_that_of_the_cpu() -> None:
    with open_prefetcher(FAKE, dtype=torch.bfloat16) as cpu:
        expected = [batch.images for batch in cpu.batches(0, 5)]
    with open_prefetcher(FAKE, device=torch.device("cuda"), dtype=torch.bfloat16, channels_last=True) as prefetcher:
        for batch, images in zip(prefetcher.batches(0, 5), expected, strict=True):
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(batch.images.cpu(), images)


@gpu
@needs_gpu
def test_loop_never_waits_for_the_device() -> None:
    weight = torch.randn(8, 3, 3, 3, device="cuda")
    with open_prefetcher(FAKE, device=torch.device("cuda"), workers=2, transforms=ALL, dtype=torch.bfloat16) as prefetcher:
        total = torch.zeros((), device="cuda")
        for batch in prefetcher.batches(0, 3):  # first uses of a kernel may load it
            total += torch.nn.functional.conv2d(batch.images.float(), weight).mean() + batch.targets.sum()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in prefetcher.batches(3, 60):
                total += torch.nn.functional.conv2d(batch.images.float(), weight).mean() + batch.targets.sum()
                prefetcher.timing()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert total.isfinite().item()
        with pytest.raises(RuntimeError):  # the mode does tell
            sync_in_debug_mode(total)


def sync_in_debug_mode(value: Tensor) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@needs_gpu
def test_device_memory_stays_flat_from_epoch_to_epoch() -> None:
    steps = 512 // BATCH
    with open_prefetcher(FAKE, device=torch.device("cuda"), workers=2, transforms=ALL) as prefetcher:
        reserved = []
        for epoch in range(10):
            for batch in prefetcher.batches(epoch * steps, (epoch + 1) * steps):
                torch.cuda._sleep(LAG_CYCLES // 10)
                batch.images.square().sum()
            reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[1:])) == 1, reserved


@gpu
@needs_gpu
def test_device_clock_times_the_copies_and_the_steps() -> None:
    with open_prefetcher(FAKE, device=torch.device("cuda"), workers=2) as prefetcher:
        for _ in prefetcher.batches(0, 20):
            torch.cuda._sleep(LAG_CYCLES)
        torch.cuda.synchronize()
        timing = prefetcher.timing()
    assert timing is not None
    assert 0 <= timing.wait_fraction <= 1
    assert timing.copy_ms > 0
    assert timing.step_ms > 0
