"""Batches on the device, ahead of the step: copy, augment, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, S, S, 3] in a pinned slot -> float [B, 3, S, S] on the device. The
fields that are not images are copied as they are.

Safe in both directions: the step's stream waits for the event after the copy before it reads a
batch, and the side stream waits for the event after the step before it overwrites the memory of
that batch. The memory is owned here and reused, so no allocator is involved.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from pipeline.batch import TARGET, Batch, DeviceSlot, ImageFormat
from pipeline.batch_augment import BatchTransforms
from pipeline.clock import BatchEvents, StepClock
from pipeline.dataset import RefusedError
from pipeline.loader import Loader


@dataclass(eq=False)
class Prefetcher:
    """Moves a loader's batches to a device: a GPU gets up to `depth` ahead, a CPU one at a time."""

    loader: Loader
    format: ImageFormat
    batch_transforms: BatchTransforms | None = (
        None  # batch transforms for training; None for validation
    )

    def __post_init__(self) -> None:
        device, mixed = self.format.device, self.batch_transforms is not None
        self.cuda = device.type == "cuda"
        # High priority: its kernels are small, and the step waits for their result.
        self.side = torch.cuda.Stream(device, priority=-1) if self.cuda else None
        # `Dataset.on_device` may block the host for as long as a step takes.
        self._thread = ThreadPoolExecutor(1, "upload") if self.cuda else None
        self.slots = [DeviceSlot(self.format, mixed) for _ in range(self.loader.in_use)]
        self.depth = self.loader.in_use - 1  # batches kept ready; one more is the consumer's
        self.clock = StepClock(self.cuda)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        # The thread may still fill a slot for an iteration that ended early, and kernels read it.
        if self._thread is not None and self.side is not None:
            self._thread.submit(lambda: None).result()
            self.side.wait_stream(torch.cuda.current_stream(self.format.device))
        host_batches = self.loader.batches(start, stop)
        ready: deque[tuple[DeviceSlot, Future[Batch]]] = deque()
        count = 0
        self.clock.start()
        while True:
            # Fill up without waiting; wait only if the device would become idle.
            while len(ready) < self.depth and (not ready or (self.cuda and self.loader.ready())):
                if (host_batch := next(host_batches, None)) is None:
                    break
                slot = self.slots[count % len(self.slots)]
                ready.append((slot, self._begin(host_batch, slot)))
                count += 1
            if not ready:
                return
            if not ready[0][1].done():
                self.loader.pool.receive()  # meanwhile, workers get tasks
                continue
            slot, upload = ready.popleft()
            batch = upload.result()
            if self.cuda:
                torch.cuda.current_stream(self.format.device).wait_event(slot.events.copy_end)
            self.clock.begin_step(slot.events)
            yield batch
            self.clock.end_step()

    def _begin(self, host: Batch, slot: DeviceSlot) -> Future[Batch]:
        """Fill a slot in the thread, or at once if there is none."""
        if self._thread is not None:
            return self._thread.submit(self._enqueue, host, slot)
        uploaded: Future[Batch] = Future()
        uploaded.set_result(self._enqueue(host, slot))
        return uploaded

    def close(self) -> None:
        """Wait for the thread and the stream. After this the loader's memory may be freed."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Batch:
        """Launch upload and transforms of one batch into a slot, once its reader is done."""
        before, slot.events = slot.events, BatchEvents()
        events, dataset = slot.events, self.loader.dataset
        with torch.cuda.stream(self.side) if self.side is not None else nullcontext():
            if self.side is not None and before.end is not None:
                self.side.wait_event(before.end)
            events.copy_begin = self.clock.now()
            try:
                fields = dataset.on_device(host.fields, slot)
            except RefusedError:
                self.loader.load_in_process(host)
                fields = dataset.on_device(host.fields, slot)
            samples = slot.copy("", host.samples)  # no field has this name
            if self.cuda:
                self.loader.keep_until(self.clock.now(), host)
            if self.batch_transforms is not None:
                targets = unmixed = self.batch_transforms.targets(fields)
                for name in (name for name, field in dataset.fields.items() if field.image):
                    mixed, targets = self.batch_transforms.apply(fields[name], unmixed, host.step)
                    fields[name] = slot.images(name, mixed.shape).copy_(mixed)
                if self.batch_transforms.label is not None:
                    fields[TARGET] = slot.copy(TARGET, targets)
            events.copy_end = self.clock.now()
        return Batch(fields, samples, host.step)
