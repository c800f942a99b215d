"""Prefetcher that copies, augments and normalizes batches on a side stream, ahead of the step.

Data flow, step 5: uint8 [B, S, S, 3] in a pinned slot -> float [B, 3, S, S] on the device. Fields
other than images are copied unchanged.

The step's stream waits for the event after the copy before it reads a batch. The side stream waits
for the event after the step before it overwrites that batch's memory. The prefetcher owns and
reuses the memory, so no allocator is involved.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.data.device_stage import DeviceDecodeError
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat
from pipeline.feed.clock import BatchEvents, StepClock
from pipeline.feed.loader import Loader


class InlineExecutor(Executor):
    """Calls a function when it is submitted, because nothing runs ahead on a CPU."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@dataclass(eq=False)
class Prefetcher:
    """Moves a loader's batches to a GPU, up to `depth` ahead, or to a CPU, one at a time."""

    loader: Loader
    format: ImageFormat
    # `BatchTransforms.draw`: (fields on the device, step) -> additional fields on the host
    draw: Callable[..., dict[str, Tensor]] = lambda fields, step: {}

    def __post_init__(self) -> None:
        device = self.format.device
        self.cuda = device.type == "cuda"
        self.depth = 1  # batches kept ready, in addition to the consumer's batch
        self.side: torch.cuda.Stream | None = None
        self._thread: Executor = InlineExecutor()
        if self.cuda:
            self.depth = self.loader.in_use - 1
            # The step waits for this stream. With only 8 to 32 SMs, it slows training by 1 to 18 %.
            self.side = torch.cuda.Stream(device, priority=-1)
            # `DeviceStage.on_device` may block the host for as long as a step takes.
            self._thread = ThreadPoolExecutor(1, "upload", torch.cuda.set_stream, (self.side,))
        self.slots = [DeviceSlot(self.format) for _ in range(self.depth + 1)]
        self.clock = StepClock(self.cuda)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        # If an iteration ended early, wait for its uploads and for kernels that read its slots.
        self._thread.submit(self.clock.now().wait).result()
        loaded = self.loader.batches(start, stop)
        pending: deque[Future[Batch]] = deque()  # done when their kernels are launched
        self.clock.start()
        for _ in range(start, stop):
            self._fill(pending, loaded)
            while not pending[0].done():
                self.loader.pool.receive()  # also sends tasks to workers
                self._fill(pending, loaded)
            batch = pending.popleft().result()
            slot = self._slot(batch)
            slot.events.copy_end.wait()
            self.clock.begin_step(slot.events)
            yield batch
            self.clock.end_step()

    def _fill(self, pending: deque[Future[Batch]], loaded: Iterator[Batch]) -> None:
        """Begin uploads without waiting; wait for a batch only if the device would become idle."""
        while not pending or (len(pending) < self.depth and self.loader.ready()):
            host = next(loaded)
            pending.append(self._thread.submit(self._enqueue, host, self._slot(host)))

    def _slot(self, batch: Batch) -> DeviceSlot:
        return self.slots[batch.step % len(self.slots)]

    def close(self) -> None:
        """Wait for the thread and the stream, after which the loader's memory may be freed."""
        self._thread.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Batch:
        """Launch the upload and transforms of a batch into a slot, once its reader is done."""
        slot.events.end.wait()
        slot.events = BatchEvents(copy_begin=self.clock.now())
        try:
            fields = self._on_device(host, slot)
        except DeviceDecodeError:
            self.loader.load_in_process(host)  # decodes on the CPU
            fields = self._on_device(host, slot)
        samples = slot.copy("", host.samples)  # a name that no field has
        self.loader.keep_until(self.clock.now(), host)
        for name, numbers in self.draw(fields, host.step).items():
            fields[name] = slot.copy(name, numbers.pin_memory() if self.cuda else numbers)
        slot.events.copy_end = self.clock.now()
        return Batch(fields, samples, host.step)

    def _on_device(self, host: Batch, slot: DeviceSlot) -> dict[str, Tensor]:
        """Return the training step's fields from those of a batch on the host."""
        dataset = self.loader.dataset
        tensors = dataset.stage.on_device(host.fields, slot)
        for name, field in dataset.fields.items():
            if name not in tensors:
                move = slot.normalize if field.image else slot.copy
                tensors[name] = move(name, host.fields[name])
        return tensors
