"""Batches on the device, ahead of the step: copy, augment, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, 3, S, S] in a pinned slot -> float [B, 3, S, S] on the device.

Safe in both directions: the step's stream waits for the event after the copy before it reads a
batch, and the side stream waits for the event after the step before it overwrites the memory of
that batch. The memory is owned here and reused, so no allocator is involved.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline import gpu_part
from pipeline.batch_augment import BatchTransform, batch_part
from pipeline.clock import Marks, StepClock
from pipeline.loader import HostBatch, Loader


@dataclass(frozen=True)
class Batch:
    """A batch for the step. On a GPU its memory is reused later: clone it to keep it."""

    images: Tensor  # [B, 3, S, S] in the training dtype, normalised
    labels: Tensor  # int64 [B]; EMPTY_ROW where a short validation batch has no sample
    # `labels`, or float32 [B, classes] when batch transforms mixed them. If they are the labels,
    # they are in copies and parts, too: otherwise a compiled step recompiles.
    targets: Tensor
    step: int  # of the sampler
    samples: Tensor  # int64 [B, 2], the (epoch, index) of each row

    def clone(self) -> "Batch":
        """A copy in memory of its own."""
        labels = self.labels.clone()
        targets = labels if self.targets is self.labels else self.targets.clone()
        return Batch(self.images.clone(), labels, targets, self.step, self.samples.clone())

    def split(self, count: int) -> "list[Batch]":
        """Views of `count` equal parts, in order."""
        images, labels = self.images.chunk(count), self.labels.chunk(count)
        targets = labels if self.targets is self.labels else self.targets.chunk(count)
        parts = zip(images, labels, targets, self.samples.chunk(count), strict=True)
        return [
            Batch(image, label, target, self.step, rows) for image, label, target, rows in parts
        ]

    def copy_(self, other: "Batch") -> None:
        """Copy the tensors of a batch of the same shapes into those of this one."""
        self.images.copy_(other.images)
        self.labels.copy_(other.labels)
        self.samples.copy_(other.samples)
        if self.targets is not self.labels:
            self.targets.copy_(other.targets)


class ImageFormat:
    """Format of the images on the device, normalised by `mean` and `std` in [0, 1].

    Attributes:
        scale, shift: float32 [3, 1, 1]; a pixel x in 0 ... 255 becomes scale * x + shift.
    """

    def __init__(
        self,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        # (x / 255 - mean) / std as one multiplication and one addition
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self.scale = torch.tensor(scale, device=device)[:, None, None]
        self.shift = torch.tensor(shift, device=device)[:, None, None]


class DeviceSlot:
    """Memory on the device for one batch. On a GPU it is allocated once and reused.

    Args:
        format: of the images.
        largest: side of the largest images in pixels. Smaller ones use the front of their memory.
    """

    def __init__(self, format: ImageFormat, largest: int = 0) -> None:
        self.format = format
        self.largest = largest
        self.reused = format.device.type == "cuda"
        self.consumed: Any = None  # the event after which the step no longer reads the batch
        self._memory: dict[str, Tensor] = {}

    def copy(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy into this memory, converting dtype and layout."""
        return self.memory(name, value.shape, dtype).copy_(value, non_blocking=True)

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of this name and shape; uninitialised when it is first asked for."""
        count, is_images = math.prod(shape), len(shape) == 4
        flat = self._memory.get(name)
        if flat is None:
            most = shape[0] * shape[1] * self.largest**2 if is_images and self.reused else count
            flat = torch.empty(max(count, most), dtype=dtype, device=self.format.device)
            if self.reused:
                self._memory[name] = flat
        # "raw" has the layout of the host memory
        if is_images and (name == "raw" or self.format.memory_format == torch.channels_last):
            rows, channels, height, width = shape
            return flat[:count].view(rows, height, width, channels).permute(0, 3, 1, 2)
        return flat[:count].view(tuple(shape))


# Makes normalised images [B, 3, S, S] from a batch on the host, in the "images" of a slot. The last
# argument tells whether batch transforms follow: then the images are float32, in other memory.
Upload = Callable[[HostBatch, DeviceSlot, bool], Tensor]


def upload_pixels(host: HostBatch, slot: DeviceSlot, to_mix: bool) -> Tensor:
    """Copy uint8 pixels to the device; apply sampled operations and normalise there, in float32."""
    return finish_pixels(slot.copy("raw", host.images, torch.uint8), host, slot, to_mix)


def finish_pixels(pixels: Tensor, host: HostBatch, slot: DeviceSlot, to_mix: bool) -> Tensor:
    """Apply the sampled operations of a batch to its pixels and normalise them, in float32.

    Args:
        pixels: uint8 [B, 3, S, S] on the device; their memory may be overwritten.
    """
    if host.operations is not None:
        pixels = gpu_part().apply_operations(pixels, host.operations)
    # Two passes over the memory, which the training step needs at the same time. One pass would
    # fuse multiplication and addition, and round differently than a CPU does.
    scaled = pixels * slot.format.scale
    if to_mix:
        return scaled.add_(slot.format.shift)
    images = slot.memory("images", pixels.shape, slot.format.dtype)
    return torch.add(scaled, slot.format.shift, out=images)


@dataclass(frozen=True)
class Mixing:
    """Batch transforms for training, in order; a batch is this rank's part of the global batch."""

    transforms: list[BatchTransform]
    num_classes: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def apply(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Transform float32 [B, 3, S, S] and the one-hot targets, float32 [B, classes]."""
        targets = torch.nn.functional.one_hot(labels, self.num_classes).to(torch.float32)
        total = len(images) * self.world_size
        part = batch_part(self.seed, step, total=total, rank=self.rank, world_size=self.world_size)
        for transform in self.transforms:
            images, targets = transform(images, targets, part)
        return images, targets


class InlineExecutor(Executor):
    """Runs a function in the thread that submits it."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


class Prefetcher:
    """Moves a loader's batches to a device, `depth` ahead; on a CPU it does not run ahead.

    Args:
        loader: created with `in_use` >= `depth` + 1.
        format: of the images on the device.
        depth: batches kept ready.
        mixing: batch transforms for training; None for validation.
    """

    def __init__(
        self, loader: Loader, format: ImageFormat, *, depth: int, mixing: Mixing | None = None
    ) -> None:
        self.loader = loader
        self.depth = depth
        self.mixing = mixing
        self.upload: Upload = upload_pixels
        self.format = format
        self.cuda = format.device.type == "cuda"
        # High priority: its kernels are small, and the step waits for their result.
        self.side = torch.cuda.Stream(format.device, priority=-1) if self.cuda else None
        largest = loader.images.shape[-1]
        self.slots = [DeviceSlot(format, largest) for _ in range(depth + 1)]
        self.clock = StepClock(self.cuda)
        self._current = self.slots[0]  # holds the consumer's batch
        self._executor: Executor = InlineExecutor()

    def set_upload(self, upload: Upload) -> None:
        """Upload the batches of later iterations with `upload`.

        In a thread if it is not `upload_pixels`: others block the host, and release the GIL.
        """
        self._executor.shutdown(cancel_futures=True)
        self.upload = upload
        self._executor = (
            InlineExecutor() if upload is upload_pixels else ThreadPoolExecutor(1, "upload")
        )

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        # A thread may still use a slot for an iteration that ended early, and kernels may read it.
        self._executor.submit(lambda: None).result()
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.format.device))
        host_batches = self.loader.batches(start, stop)
        ready: deque[tuple[DeviceSlot, Future[tuple[Batch, Marks]]]] = deque()
        taken = 0
        self.clock.start()
        while True:
            # Fill up without waiting; wait only if the device would become idle.
            while len(ready) < self.depth and (not ready or (self.cuda and self.loader.ready())):
                host_batch = next(host_batches, None)
                if host_batch is None:
                    break
                slot = self.slots[taken % len(self.slots)]
                ready.append((slot, self._executor.submit(self._enqueue, host_batch, slot)))
                taken += 1
            if not ready:
                return
            self._current, future = ready.popleft()
            batch, marks = future.result()
            if self.cuda:
                torch.cuda.current_stream(self.format.device).wait_event(marks.copy_end)
            self.clock.begin_step(marks)
            yield batch
            self.end_step()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the time in the `with` block, e.g. of a validation, out of the timing.

        The consumer is done with its batch.
        """
        self.end_step()
        yield
        self.clock.skip()

    def end_step(self) -> None:
        """Note that the consumer has launched all kernels that read its batch.

        Taking the next batch does the same.
        """
        end = self.clock.end_step()
        if end is not None:
            self._current.consumed = end

    def close(self) -> None:
        """Wait for the thread and the stream. After this the loader's memory may be freed."""
        self._executor.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _enqueue(self, host: HostBatch, slot: DeviceSlot) -> tuple[Batch, Marks]:
        """Launch upload and transforms of one batch into a slot, once its reader is done."""
        marks = Marks()
        with torch.cuda.stream(self.side) if self.side is not None else nullcontext():
            if self.side is not None and slot.consumed is not None:
                self.side.wait_event(slot.consumed)
            marks.copy_begin = self.clock.now()
            # Before the labels: the upload may replace an unreadable sample by another.
            images = self.upload(host, slot, self.mixing is not None)
            labels = targets = slot.copy("labels", host.labels, torch.int64)
            samples = slot.copy("samples", host.samples, torch.int64)
            host.release(self.clock.now())
            if self.mixing is not None:
                mixed, targets = self.mixing.apply(images, labels, host.step)
                targets = slot.copy("targets", targets, torch.float32)
                images = slot.copy("images", mixed, slot.format.dtype)
            marks.copy_end = self.clock.now()
        return Batch(images, labels, targets, host.step, samples), marks
