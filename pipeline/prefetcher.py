"""Batches on the device, ahead of the step: copy, augment, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, S, S, 3] in a pinned slot -> float [B, 3, S, S] on the device. The
fields that are no images are copied as they are.

Safe in both directions: the step's stream waits for the event after the copy before it reads a
batch, and the side stream waits for the event after the step before it overwrites the memory of
that batch. The memory is owned here and reused, so no allocator is involved.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import UserError
from pipeline import gpu_part
from pipeline.batch_augment import BatchTransform, batch_part
from pipeline.clock import Marks, StepClock
from pipeline.dataset import IMAGE, Field
from pipeline.loader import HostBatch, Loader

TARGET = "target"  # the field that batch transforms add: the mixed form of `Mixing.label`


@dataclass(frozen=True)
class Batch:
    """A batch for the step. On a GPU its memory is reused later: clone it to keep it."""

    # Name -> tensor [B, ...], as `batch[name]`. Images are [B, ..., C, H, W] in the training dtype,
    # normalised. TARGET is there if batch transforms mixed the labels.
    fields: dict[str, Tensor]
    samples: Tensor  # int64 [B, 2], the (epoch, index) of each row
    step: int  # of the sampler

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            raise UserError(
                f"the samples have no field {name}, but {', '.join(self.fields)}: docs/tasks.md "
                "has training_loss and validation_values for other fields"
            )
        return self.fields[name]

    @property
    def valid(self) -> Tensor:
        """Rows with a sample, bool [B]: the last batch of a validation may have others."""
        return self.samples[:, 1] >= 0

    @property
    def shape(self) -> tuple[tuple[str, torch.Size], ...]:
        """Names and shapes of the fields."""
        return tuple((name, tensor.shape) for name, tensor in self.fields.items())

    @classmethod
    def zeros(cls, fields: Mapping[str, Field], device: torch.device, samples: int = 1) -> "Batch":
        """Samples of zeros, their images in float32, to find out what a network makes of them."""
        tensors = {}
        for name, field in fields.items():
            rows = torch.from_numpy(np.zeros((samples, *field.shape), field.dtype)).to(device)
            tensors[name] = channels_first(rows).float() if field.image else rows
        return cls(tensors, torch.zeros(samples, 2, dtype=torch.int64, device=device), 0)

    def clone(self) -> "Batch":
        """A copy in memory of its own."""
        fields = {name: tensor.clone() for name, tensor in self.fields.items()}
        return Batch(fields, self.samples.clone(), self.step)

    def split(self, count: int) -> "list[Batch]":
        """Views of `count` equal parts, in order."""
        columns = [tensor.chunk(count) for tensor in self.fields.values()]
        parts = zip(self.samples.chunk(count), *columns, strict=True)
        return [
            Batch(dict(zip(self.fields, tensors, strict=True)), samples, self.step)
            for samples, *tensors in parts
        ]

    def copy_(self, other: "Batch") -> None:
        """Copy the tensors of a batch of the same shapes into those of this one."""
        self.samples.copy_(other.samples)
        for name, tensor in self.fields.items():
            tensor.copy_(other.fields[name])


@dataclass(eq=False)
class ImageFormat:
    """Format of the images on the device, normalised by `mean` and `std` in [0, 1]."""

    device: torch.device
    mean: Sequence[float]  # of each channel, or one value for all channels; so is `std`
    std: Sequence[float]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    highest: int = 255  # the level that stands for 1: 255 for uint8, 65535 for uint16, 1 for floats

    def __post_init__(self) -> None:
        last, usual = torch.channels_last, torch.contiguous_format
        self.memory_format = last if self.channels_last else usual
        # (x / highest - mean) / std as one multiplication and one addition
        means, stds = (torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
        # float32 [C, 1, 1], or [1, 1, 1] for all channels: a level x becomes scale * x + shift.
        self.scale = (1 / (self.highest * stds)).float().to(self.device)[:, None, None]
        self.shift = (-means / stds).float().to(self.device)[:, None, None]

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return levels [..., H, W, C] as float32 [..., C, H, W], rounded as in training."""
        return (channels_first(pixels).float() * self.scale).add_(self.shift)


@dataclass(eq=False)
class DeviceSlot:
    """Memory on the device for one batch. On a GPU it is allocated once and reused."""

    format: ImageFormat
    # Field -> number of elements of the largest batch. Smaller ones use the front of its memory.
    largest: Mapping[str, int]

    def __post_init__(self) -> None:
        self.reused = self.format.device.type == "cuda"
        self.consumed: Any = None  # the event after which the step no longer reads the batch
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Copy a field from the host into this memory."""
        return self.memory(name, value.shape, value.dtype).copy_(value, non_blocking=self.reused)

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of a field in this shape and dtype; uninitialised when first asked for."""
        count = math.prod(shape)
        flat = self._memory.get((name, dtype))
        if flat is None:
            size = max(count, self.largest.get(name, 0)) if self.reused else count
            flat = torch.empty(size, dtype=dtype, device=self.format.device)
            if self.reused:
                self._memory[name, dtype] = flat
        return flat[:count].view(tuple(shape))

    def images(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of images [B, ..., C, H, W] that the step reads."""
        if self.format.memory_format != torch.channels_last:
            return self.memory(name, shape, self.format.dtype)
        *rows, channels, height, width = shape
        return channels_first(
            self.memory(name, (*rows, height, width, channels), self.format.dtype)
        )


def channels_first(pixels: Tensor) -> Tensor:
    """View [..., H, W, C] as [..., C, H, W]."""
    return pixels.movedim(-1, -3)


# Makes normalised images [B, ..., C, H, W] from a field of a batch on the host, in the `images` of
# a slot. The last argument tells whether batch transforms follow: then the images are float32, in
# other memory.
Upload = Callable[[HostBatch, str, DeviceSlot, bool], Tensor]


def upload_pixels(host: HostBatch, name: str, slot: DeviceSlot, to_mix: bool) -> Tensor:
    """Copy pixels to the device; apply sampled operations and normalise there, in float32."""
    pixels = channels_first(slot.copy(name, host.fields[name]))
    return finish_pixels(pixels, host, name, slot, to_mix)


def finish_pixels(
    pixels: Tensor, host: HostBatch, name: str, slot: DeviceSlot, to_mix: bool
) -> Tensor:
    """Apply the sampled operations of a batch to its pixels and normalise them, in float32.

    `pixels`: [B, ..., C, H, W] on the device; their memory may be overwritten.
    """
    if host.operations is not None and name == IMAGE:
        pixels = gpu_part().apply_operations(pixels, host.operations)
    if pixels.dtype != torch.uint8:  # torch multiplies no uint16
        pixels = pixels.float()
    # Two passes over the memory, which the training step needs at the same time. One pass would
    # fuse multiplication and addition, and round differently than a CPU does.
    scaled = pixels * slot.format.scale
    if to_mix:
        return scaled.add_(slot.format.shift)
    return torch.add(scaled, slot.format.shift, out=slot.images(name, pixels.shape))


@dataclass(frozen=True)
class Mixing:
    """Batch transforms for training, in order; a batch is this rank's part of the global batch."""

    transforms: list[BatchTransform]
    num_classes: int
    seed: int
    rank: int = 0
    world_size: int = 1
    # The field to mix: class numbers, or floating numbers. None: the transforms change images only.
    label: str | None = "label"

    def targets(self, fields: Mapping[str, Tensor]) -> Tensor:
        """What is mixed: one-hot float32 [B, classes], or the numbers, float32 [B, ...]."""
        if self.label is None:
            return torch.zeros(len(next(iter(fields.values()))), 0)
        label = fields[self.label]
        if label.is_floating_point():
            return label.float()
        return torch.nn.functional.one_hot(label, self.num_classes).to(torch.float32)

    def apply(self, images: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Transform float32 [B, ..., C, H, W], and targets if there are any.

        All images of a step get the same draws.
        """
        total = len(images) * self.world_size
        part = batch_part(self.seed, step, total=total, rank=self.rank, world_size=self.world_size)
        found, mixed = images.flatten(1, -3), targets[:, None].flatten(1)  # [B, C, H, W], [B, n]
        for transform in self.transforms:
            found, mixed = transform(found, mixed, part)
        return found.reshape(images.shape), mixed.view(targets.shape)


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
        rings = loader.pool.sources[loader.source].fields
        largest = {name: ring.array[0].size for name, ring in rings.items()}
        self.slots = [DeviceSlot(format, largest) for _ in range(depth + 1)]
        self.clock = StepClock(self.cuda)
        # IMAGE first: its upload may replace an unreadable sample by another.
        images = [name for name, field in loader.dataset.fields.items() if field.image]
        self._images = sorted(images, key=lambda name: name != IMAGE)
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
                if (host_batch := next(host_batches, None)) is None:
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
        if (end := self.clock.end_step()) is not None:
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
            fields: dict[str, Tensor] = {}
            for name in self._images:
                upload = self.upload if name == IMAGE else upload_pixels
                fields[name] = upload(host, name, slot, self.mixing is not None)
            for name, rows in host.fields.items():
                if name not in self._images:
                    fields[name] = slot.copy(name, rows)
            samples = slot.copy("", host.samples)  # no field has this name
            host.release(self.clock.now())
            if self.mixing is not None:
                targets = unmixed = self.mixing.targets(fields)
                for name in self._images:
                    mixed, targets = self.mixing.apply(fields[name], unmixed, host.step)
                    fields[name] = slot.images(name, mixed.shape).copy_(mixed)
                if self.mixing.label is not None:
                    fields[TARGET] = slot.copy(TARGET, targets)
            marks.copy_end = self.clock.now()
        return Batch(fields, samples, host.step), marks
