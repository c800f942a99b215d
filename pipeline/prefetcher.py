"""Batches on the device, ahead of the step: copy, augment, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, S, S, 3] in a pinned slot -> float [B, 3, S, S] on the device. The
fields that are not images are copied as they are.

Safe in both directions: the step's stream waits for the event after the copy before it reads a
batch, and the side stream waits for the event after the step before it overwrites the memory of
that batch. The memory is owned here and reused, so no allocator is involved.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.batch import TARGET, Batch, DeviceSlot, ImageFormat
from pipeline.batch_augment import BatchTransforms
from pipeline.clock import BatchEvents, StepClock
from pipeline.dataset import RefusedError
from pipeline.loader import Loader


class AtOnce(Executor):
    """Calls a function when it is submitted: on a CPU, nothing runs ahead."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@dataclass(eq=False)
class Prefetcher:
    """Moves a loader's batches to a device: a GPU gets up to `depth` ahead, a CPU one at a time."""

    loader: Loader
    format: ImageFormat
    batch_transforms: BatchTransforms | None = None  # for training; None for validation

    def __post_init__(self) -> None:
        device = self.format.device
        self.cuda = device.type == "cuda"
        self.depth = 1  # batches kept ready; one more is the consumer's
        self.side: torch.cuda.Stream | None = None
        self._on_side: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._thread: Executor = AtOnce()
        if self.cuda:
            self.depth = self.loader.in_use - 1
            # High priority: its kernels are small, and the step waits for their result.
            self.side = torch.cuda.Stream(device, priority=-1)
            self._on_side = partial(torch.cuda.stream, self.side)
            # `Dataset.on_device` may block the host for as long as a step takes.
            self._thread = ThreadPoolExecutor(1, "upload")
        mixed = self.batch_transforms is not None
        self.slots = [DeviceSlot(self.format, mixed) for _ in range(self.depth + 1)]
        self.clock = StepClock(self.cuda)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        # The thread may still fill a slot for an iteration that ended early, and kernels read it.
        self._thread.submit(lambda: None).result()
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.format.device))
        uploads = map(self._begin, self.loader.batches(start, stop))
        begun: deque[Future[Batch]] = deque()  # done when their kernels are launched
        self.clock.start()
        for _ in range(start, stop):
            self._fill(begun, uploads)
            while not begun[0].done():
                self.loader.pool.receive()  # meanwhile, workers get tasks
                self._fill(begun, uploads)
            batch = begun.popleft().result()
            events = self._slot(batch).events
            if self.cuda:
                torch.cuda.current_stream(self.format.device).wait_event(events.copy_end)
            self.clock.begin_step(events)
            yield batch
            self.clock.end_step()

    def _fill(self, begun: deque[Future[Batch]], uploads: Iterator[Future[Batch]]) -> None:
        """Begin uploads without waiting; wait for a batch only if the device would become idle."""
        while not begun or (len(begun) < self.depth and self.loader.ready()):
            begun.append(next(uploads))

    def _begin(self, host: Batch) -> Future[Batch]:
        return self._thread.submit(self._enqueue, host, self._slot(host))

    def _slot(self, batch: Batch) -> DeviceSlot:
        return self.slots[batch.step % len(self.slots)]

    def close(self) -> None:
        """Wait for the thread and the stream. After this the loader's memory may be freed."""
        self._thread.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Batch:
        """Launch upload and transforms of one batch into a slot, once its reader is done."""
        reader = slot.events
        slot.events = BatchEvents()
        with self._on_side():
            if self.side is not None and reader.end is not None:
                self.side.wait_event(reader.end)
            slot.events.copy_begin = self.clock.now()
            fields = self._upload(host, slot)
            samples = slot.copy("", host.samples)  # no field has this name
            self.loader.keep_until(self.clock.now(), host)
            if self.batch_transforms is not None:
                self._transform(self.batch_transforms, fields, host.step, slot)
            slot.events.copy_end = self.clock.now()
        return Batch(fields, samples, host.step)

    def _upload(self, host: Batch, slot: DeviceSlot) -> dict[str, Tensor]:
        """Make the fields of a batch on the device, if need be of another one by the CPU alone."""
        try:
            return self.loader.dataset.on_device(host.fields, slot)
        except RefusedError:
            self.loader.load_in_process(host)
            return self.loader.dataset.on_device(host.fields, slot)

    def _transform(
        self, transforms: BatchTransforms, fields: dict[str, Tensor], step: int, slot: DeviceSlot
    ) -> None:
        targets = unmixed = transforms.targets(fields)
        for name, field in self.loader.dataset.fields.items():
            if field.image:
                mixed, targets = transforms.apply(fields[name], unmixed, step)
                fields[name] = slot.images(name, mixed.shape).copy_(mixed)
        if transforms.label is not None:
            fields[TARGET] = slot.copy(TARGET, targets)
