"""Batches on the device, ahead of the step: copy, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, 3, S, S] in a pinned slot -> float [B, 3, S, S] on the device. The step never waits for a
copy that could have been made earlier, and the host waits for the device only so as not to run ahead of it without end.

Safe in both directions: the step's stream waits for `ready` before it reads a batch, and the side stream waits for `consumed`
before it writes into that batch's memory again. The memory is owned here and reused, so no allocator is involved.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.batch_augment import BatchTransform, batch_rng
from pipeline.clock import Marks, StepClock, Timing
from pipeline.gpu_decode.decoder import EngineError, GpuDecoder
from pipeline.loader import HostBatch, Loader

logger = logging.getLogger(__name__)

FIRST_SHARE = 0.6  # of a hybrid batch for the engines, until the rates are known


@dataclass(frozen=True)
class Batch:
    """A batch as the step takes it. On a GPU its memory is reused `depth` batches later: clone what must last.

    Attributes:
        images: [B, 3, S, S] in the training dtype, normalised.
        labels: int64 [B]; EMPTY_ROW where a short validation batch has no sample.
        targets: `labels`, or float32 [B, classes] when batch transforms mixed them.
        step: the sampler's step.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    step: int

    def clone(self) -> "Batch":
        """One that lasts. What was one tensor stays one: for targets that are not the labels a step is compiled anew."""
        labels = self.labels.clone()
        return Batch(self.images.clone(), labels, labels if self.targets is self.labels else self.targets.clone(), self.step)


class Prefetcher:
    """Moves a loader's batches to a device, `depth` ahead; on a CPU it makes the same batches without running ahead.

    Args:
        loader: created with `hold` >= `depth` + 1.
        device: where batches go.
        depth: batches kept ready.
        mean, std: per channel, in [0, 1].
        dtype: of the images; bf16 halves what the first layer reads.
        channels_last: memory format of the images.
        transforms: batch transforms for training, none for validation.
        num_classes: width of mixed targets.
        seed, rank: of the batch transforms.
        gpu_decoder: decodes what the workers left encoded; its calls run in a thread, where they wait without the interpreter
            lock.
        hybrid: share each batch between workers and engines by the rates that are seen.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        device: torch.device,
        depth: int,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        transforms: Sequence[BatchTransform] = (),
        num_classes: int = 0,
        seed: int = 0,
        rank: int = 0,
        gpu_decoder: GpuDecoder | None = None,
        hybrid: bool = False,
    ) -> None:
        self.loader, self.device, self.depth, self.dtype = loader, device, depth, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.transforms, self.num_classes, self.seed, self.rank = list(transforms), num_classes, seed, rank
        # (x / 255 - mean) / std as one multiplication and one addition
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self.scale = torch.tensor(scale, device=device)[:, None, None]
        self.shift = torch.tensor(shift, device=device)[:, None, None]
        self.cuda = device.type == "cuda"
        # First in line for the multiprocessors: its kernels are small, and what they make is waited for.
        self.side = torch.cuda.Stream(device, priority=-1) if self.cuda else None
        self.slots: list[dict[str, Tensor]] = []
        self.clock = StepClock(self.cuda)
        self._slot = 0  # of the batch that the consumer uses
        self._consumed: dict[int, Any] = {}  # slot -> when its last reader was done
        self.gpu_decoder, self.hybrid = gpu_decoder, hybrid
        self._thread = ThreadPoolExecutor(1, "gpu decode") if gpu_decoder is not None else None
        loader.encoded_share = 0.0 if gpu_decoder is None else FIRST_SHARE if hybrid else 1.0

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        if self._thread is not None:  # an iteration that was left early may still be at a slot, which goes to others now
            self._thread.submit(lambda: None).result()
        host = self.loader.batches(start, stop)
        ready: deque[tuple[int, Future[tuple[Batch, Any, Marks]]]] = deque()
        taken = 0
        self.clock.start()
        self._consumed.clear()
        if self.side is not None:  # an iteration that was left early may still have readers
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        while True:
            # Top up without waiting; wait only when the device would have nothing to do.
            while len(ready) < self.depth and (not ready or (self.cuda and self.loader.ready())):
                batch = next(host, None)
                if batch is None:
                    break
                slot = taken % (self.depth + 1)
                ready.append((slot, self._begin(batch, slot, self._consumed.get(slot))))
                taken += 1
            if not ready:
                return
            slot, future = ready.popleft()
            batch_ready, event, marks = future.result()
            if self.cuda:
                torch.cuda.current_stream(self.device).wait_event(event)
            self.clock.begin_step(marks)
            self._slot = slot
            yield batch_ready
            self.end_step()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """End the step; work inside, such as a validation, counts neither as a step nor as waiting."""
        self.end_step()
        yield
        self.clock.skip()

    def end_step(self) -> None:
        """End the step: all its kernels are launched. Taking the next batch does the same."""
        if (end := self.clock.end_step()) is not None:
            self._consumed[self._slot] = end

    def timing(self, batches: int | None = None) -> Timing | None:
        """Read the figures of the oldest unread batches; see `StepClock.timing`."""
        return self.clock.timing(batches)

    def close(self) -> None:
        """Bring thread and stream to rest: after this the loader's memory may go."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _begin(self, host: HostBatch, slot: int, after: Any) -> "Future[tuple[Batch, Any, Marks]]":
        """Enqueue a batch now, or in the thread when the engines decode."""
        if self._thread is not None:
            return self._thread.submit(self._enqueue, host, slot, after)
        done: Future[tuple[Batch, Any, Marks]] = Future()
        done.set_result(self._enqueue(host, slot, after))
        return done

    def _enqueue(self, host: HostBatch, slot: int, after: Any) -> tuple[Batch, Any, Marks]:
        """Start copy, normalisation and transforms of one batch into a slot, once `after` has completed."""
        marks = Marks()
        with torch.cuda.stream(self.side) if self.side is not None else nullcontext():
            if self.side is not None and after is not None:
                self.side.wait_event(after)
            marks.copy_begin = self.clock.now()
            images = self._normalised(host, slot)  # before the labels: it may replace an unreadable sample by another
            labels = targets = self._own("labels", slot, host.labels, torch.int64)
            host.release(self.clock.now() if self.cuda else None)
            if self.transforms:
                targets = torch.nn.functional.one_hot(labels, self.num_classes).to(torch.float32)
                rng = batch_rng(self.seed, host.step, self.rank)
                for transform in self.transforms:
                    images, targets = transform(images, targets, rng)
                targets = self._own("targets", slot, targets, torch.float32)
            images = self._own("images", slot, images, self.dtype)
            marks.copy_end = self.clock.now()
        return Batch(images, labels, targets, host.step), marks.copy_end, marks

    def _normalised(self, host: HostBatch, slot: int) -> Tensor:
        """[B, 3, S, S] on the device, from the slot's pixels or its files; float32 whenever batch transforms follow."""
        if self.gpu_decoder is None:
            raw = self._own("raw", slot, host.images, torch.uint8)
            return raw.to(torch.float32).mul_(self.scale).add_(self.shift)
        assert host.files is not None and host.geometry is not None
        if self.transforms:  # they compute in float32, as after a CPU decoder, and make new images of these
            out = torch.empty(host.images.shape, device=self.device, memory_format=self.memory_format)
        else:  # the kernel writes what the step takes
            out = self._memory("images", slot, host.images.shape, self.dtype)
        pixels = host.images.permute(0, 2, 3, 1)
        scale, shift = self.scale.flatten(), self.shift.flatten()
        try:
            self.gpu_decoder.make_batch(host.files, host.geometry, pixels, out, scale, shift)
        except EngineError as error:
            logger.warning("%s for a batch: a worker's decoder takes it over", error)
            host.decode_here()
            self.gpu_decoder.make_batch(host.files, host.geometry, pixels, out, scale, shift)
        if self.hybrid:
            self._share_out()
        return out

    def _share_out(self) -> None:
        """Leave the engines the share of a batch that lets them and the workers finish together."""
        assert self.gpu_decoder is not None
        pool, engine_seconds = self.loader.pool, self.gpu_decoder.seconds_per_image
        if pool.replies and engine_seconds:
            engines, workers = 1 / engine_seconds, max(1, len(pool.workers)) / max(pool.decode_seconds, 1e-9)
            self.loader.encoded_share = engines / (engines + workers)

    def _own(self, name: str, slot: int, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy into this slot's own memory, converting type and layout on the way; on a CPU into new memory."""
        if not self.cuda:
            layout = self.memory_format if value.dim() == 4 else torch.contiguous_format
            return value.to(dtype=dtype, memory_format=layout, copy=True)
        owned = self._memory(name, slot, value.shape, dtype)
        return owned if owned is value else owned.copy_(value, non_blocking=True)

    def _memory(self, name: str, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This slot's own memory on the device."""
        while len(self.slots) <= slot:
            self.slots.append({})
        if name not in self.slots[slot]:
            layout = self.memory_format if len(shape) == 4 else torch.contiguous_format
            layout = torch.channels_last if name == "raw" else layout  # as it lies in host memory
            self.slots[slot][name] = torch.empty(shape, dtype=dtype, device=self.device, memory_format=layout)
        return self.slots[slot][name]
