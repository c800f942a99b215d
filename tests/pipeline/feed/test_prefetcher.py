"""Device batches equal a reference and are never overwritten while a kernel reads them."""

import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.data.dataset import Dataset, FakeDataset
from pipeline.data.device_stage import DeviceStage
from pipeline.data.field import Field
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat, channels_first
from pipeline.feed.clock import StepClock
from pipeline.feed.loader import slots_needed
from pipeline.feed.prefetcher import InlineExecutor, Prefetcher
from tests.helpers.batches import forbid_sync
from tests.pipeline.loaders import SIZE, open_loader, same

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEVELS = (0.0,) * 3, (1 / 255,) * 3  # images are the integer pixels, exact in bf16
BATCH, CLASSES = 16, 3
# 2 to 4 ms, many times longer than copying such a batch, and longer than a step on the host
LAG_CYCLES = 4_000_000
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)]
ON_CPU = ImageFormat(CPU, MEAN, STD)
FAKE = FakeDataset(num_samples=512, num_classes=CLASSES, size=SIZE)


def draws(fields: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return fields from the host like `BatchTransforms.draw`."""
    return {"drawn": torch.full((len(fields["image"]), 2), step / 8)}


@contextmanager
def open_prefetcher(
    dataset: Dataset,
    format: ImageFormat = ON_CPU,
    *,
    kind: type[Prefetcher] = Prefetcher,
    depth: int = 2,
    **options: Any,
) -> Iterator[Prefetcher]:
    """Open a prefetcher; `options` are passed to `open_loader`."""
    on_gpu = format.device.type == "cuda"
    start_method = "forkserver" if on_gpu else "fork"
    options = {"workers": 0, "local_batch_size": BATCH, "start_method": start_method} | options
    size, workers = options["local_batch_size"], options["workers"]
    slots = slots_needed(dataset, size, workers=workers, in_use=depth + 1)
    options = {"slots": slots, "pinned": on_gpu, "in_use": depth + 1} | options
    with open_loader(dataset, **options) as loader:
        prefetcher = kind(loader, format, draws)
        try:
            yield prefetcher
        finally:
            prefetcher.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("levels", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_device_stage_normalizes_in_float32(levels, dtype, device):
    """Rounded after each, and once to the training dtype; equal bits on every device."""
    field = Field(levels, (8, 8, 3), image=True)
    format = ImageFormat(device, MEAN, STD, dtype, channels_last=True, highest=field.highest)
    pixels = (np.random.default_rng(0).random((4, 8, 8, 3)) * field.highest).astype(levels)
    found = DeviceStage().on_device({"image": torch.from_numpy(pixels)}, DeviceSlot(format))
    means, stds = (np.array(each, np.float64) for each in (MEAN, STD))
    scale, shift = (x.astype(np.float32) for x in (1 / (field.highest * stds), -means / stds))
    expected = torch.from_numpy(pixels.astype(np.float32) * scale + shift).to(dtype)
    assert torch.equal(found["image"].cpu(), channels_first(expected))
    assert found["image"].is_contiguous(memory_format=torch.channels_last)


def test_prefetcher_timing(clock):
    """Loading a batch takes 0.1 s, a step 0.1 s, and a pause 1 s."""

    class Slow(FakeDataset):
        def load(self, index, rng):
            clock.now += 0.1 / BATCH
            return super().load(index, rng)

    with open_prefetcher(Slow(num_samples=512, num_classes=CLASSES, size=SIZE)) as prefetcher:
        for batch in prefetcher.batches(0, 4):
            clock.now += 0.1
            if batch.step == 1:
                with prefetcher.clock.pause():
                    clock.now += 1
        found = prefetcher.clock.step_times()
    assert (found.steps, found.copy_fraction, found.copy_ms) == (4, 0, 0)
    assert found.step_ms == pytest.approx(100) == found.step_worst_ms
    assert (found.data_wait_fraction, found.late_fraction) == pytest.approx((0.5, 0), abs=1e-9)


class Stream:
    """A CUDA stream as a clock; work starts after the events that it waits for."""

    now = 0
    current: "Stream"  # shared by all


class Event:
    """A CUDA event that records the current stream's time."""

    time = -1
    asked = False

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        self.time = Stream.current.now

    def wait(self) -> None:
        Stream.current.now = max(Stream.current.now, self.time)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        self.asked, before = True, self.asked
        return before  # the host is ahead, until it waits


class OnStream(InlineExecutor):
    """A stream's thread, without a thread."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def submit(self, *call: Any, **_: Any) -> Any:
        before, Stream.current = Stream.current, self.stream
        done = super().submit(*call)
        Stream.current = before
        return done


@dataclass(frozen=True)
class Access:
    """Access to a step's images in the memory of a slot."""

    address: int
    begin: int
    end: int
    step: int = -1

    def overlaps(self, other: "Access") -> bool:
        if self.address != other.address:
            return False
        return self.begin < other.end and other.begin < self.end


@pytest.mark.parametrize("depth", [1, 2])
def test_prefetcher_streams_wait_for_each_other(monkeypatch, depth):
    """By CUDA's rules. A copy takes 1, the step's kernels 10, and the host 0."""
    main, side = Stream(), Stream()
    Stream.current = main
    monkeypatch.setattr(torch.cuda, "Event", Event)
    written, read, early = list[Access](), list[Access](), list[int]()
    filled: dict[int, int] = {}  # address -> end of the newest copy to it
    with open_prefetcher(FAKE, depth=depth, workers=2) as prefetcher:
        prefetcher.clock = StepClock(cuda=True)
        prefetcher.depth, prefetcher._thread = depth, OnStream(side)
        monkeypatch.setattr(prefetcher.loader, "ready", lambda: True)
        prefetcher.slots = [DeviceSlot(ON_CPU) for _ in range(depth + 1)]  # like on a GPU
        memory_of = DeviceSlot.memory

        def memory(slot: DeviceSlot, *args: Any) -> Tensor:
            assert Stream.current is side
            result = memory_of(slot, *args)
            written.append(Access(result.data_ptr(), side.now, side.now + 1))
            side.now += 1
            filled[result.data_ptr()] = side.now
            return result

        monkeypatch.setattr(DeviceSlot, "memory", memory)
        for begin in (0, 100, 200):
            for batch in itertools.islice(prefetcher.batches(begin, begin + 50), 31):
                address = batch["image"].data_ptr()
                if main.now < filled[address]:
                    early.append(batch.step)
                read.append(Access(address, main.now, main.now + 10, batch.step))
                main.now += 10
            # The last step's kernels are still pending when the next iteration starts.
    assert len({access.address for access in read}) == depth + 1
    assert not early
    assert not [r.step for w, r in itertools.product(written, read) if w.overlaps(r)]


# GPU tests. The consumer lags behind; its kernels are still queued when the host continues, so
# memory that is written too early is read with wrong content.

# Two tasks, and more than the 64 KiB that a driver may copy from the host within the call
LARGE_BATCH = 64


class Noise(FakeDataset):
    """Noise from a start drawn by the sample, so all differ at no cost."""

    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)

    def load(self, index: int, rng: random.Random) -> Mapping[str, Any]:
        start = rng.randrange(len(self.noise) - SIZE * SIZE * 3)
        pixels = self.noise[start : start + SIZE * SIZE * 3].reshape(SIZE, SIZE, 3)
        return {"image": pixels, "label": index % self.num_classes}


NOISE = Noise(num_samples=512, num_classes=CLASSES, size=SIZE)


def count_wrong(found: list[Batch], dtype: torch.dtype = torch.float32) -> int:
    """Count batches that differ from those on a CPU, which has no streams."""
    format = ImageFormat(CPU, *LEVELS, dtype)
    begin, end = found[0].step, found[-1].step + 1
    with open_prefetcher(NOISE, format, local_batch_size=len(found[0].samples)) as prefetcher:
        expected = [batch.clone() for batch in prefetcher.batches(begin, end)]
    return sum(not same(*pair) for pair in zip(found, expected, strict=True))


class LateCopies(Prefetcher):
    """Copies start late; the host and the consumer are as far ahead as allowed."""

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Any:
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(10 * LAG_CYCLES)
        return super()._enqueue(host, slot)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("steps", "lag", "kind", "dtype", "options"),
    [
        (500, 1, Prefetcher, torch.bfloat16, dict(workers=2)),
        (500, 2, Prefetcher, torch.float32, dict(workers=2)),
        (500, 2, Prefetcher, torch.float32, dict(workers=4, depth=4)),
        (500, 2, Prefetcher, torch.float32, dict(depth=1)),  # the host also decodes
        (100, 1, LateCopies, torch.float32, dict(workers=2)),
    ],
)
def test_prefetcher_with_consumer_three_steps_behind(steps, lag, kind, dtype, options, monkeypatch):
    monkeypatch.setattr("pipeline.feed.loader.MAX_BYTES", 0)
    copies = []
    unread = deque()
    ahead = []  # steps by which the host is ahead
    format = ImageFormat(CUDA, *LEVELS, dtype, channels_last=True)
    with open_prefetcher(
        NOISE, format, kind=kind, local_batch_size=LARGE_BATCH, **options
    ) as prefetcher:
        for batch in prefetcher.batches(0, steps):
            copies = copies or [batch.clone() for _ in range(steps)]  # allocating waits
            torch.cuda._sleep(lag * LAG_CYCLES)
            copies[batch.step].copy_(batch)
            unread.append(torch.cuda.Event())
            unread[-1].record()
            while unread and unread[0].query():
                unread.popleft()
            ahead.append(len(unread))
            if batch.step % 100 == 99:
                prefetcher.clock.step_times()  # otherwise, the clock keeps all events
        found = [replace(copy, step=step) for step, copy in enumerate(copies)]
    assert not count_wrong(found, dtype)
    assert median(ahead) >= 3


class SlowThread(Prefetcher):
    """Slow; records when it enqueues a batch."""

    busy = False

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Any:
        self.busy = True
        time.sleep(0.1)
        done = super()._enqueue(host, slot)
        self.busy = False
        return done


@pytest.mark.gpu
def test_prefetcher_next_iteration_waits_for_thread():
    """The thread may still read a slot for an iteration that ended early."""
    format = ImageFormat(CUDA, *LEVELS)
    with open_prefetcher(NOISE, format, kind=SlowThread, workers=2) as prefetcher:
        batches = prefetcher.batches(0, 100)
        next(batches)
        while not prefetcher.busy:
            next(batches)
        begin = prefetcher.loader.batches

        def at_rest(*steps):
            assert not prefetcher.busy
            return begin(*steps)

        prefetcher.loader.batches = at_rest
        found = [batch.clone() for batch in prefetcher.batches(50, 56)]
    assert len(found) == 6
    assert not count_wrong(found)


@pytest.mark.gpu
def test_prefetcher_does_not_synchronize():
    weight = torch.randn(8, 3, 3, 3, device="cuda")

    def used(batch):
        images = batch["image"].float()
        return torch.nn.functional.conv2d(images, weight).mean() + batch["drawn"].sum()

    format = ImageFormat(CUDA, MEAN, STD, torch.bfloat16)
    with open_prefetcher(FAKE, format, workers=2) as prefetcher:
        total = torch.zeros((), device="cuda")
        for batch in prefetcher.batches(0, 3):  # a kernel's first use may load it
            total += used(batch)
        with forbid_sync():
            for batch in prefetcher.batches(3, 60):
                total += used(batch)
        assert total.isfinite().item()
