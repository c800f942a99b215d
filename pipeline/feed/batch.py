"""Batches of named arrays, on the host and on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from pipeline.data.field import Field
from pipeline.feed.clock import BatchEvents

NO_MEMORY = torch.empty(0)
# Suffixes of names in `DeviceSlot.memory`: images of a field in each order have their own memory.
ROWS, PLANES = " [H, W, C]", " [C, H, W]"


@dataclass(frozen=True)
class Batch:
    """A batch. Its memory is reused later: clone it to keep it."""

    # Name -> tensor [B, ...], as `batch[name]`. For the step, images are [B, ..., C, H, W] in the
    # training dtype, normalised, and TARGET is there if batch transforms mixed the labels.
    fields: dict[str, Tensor]
    # int64 [B, 2], the (epoch, index) of each row; EMPTY_ROW in the rows of a short batch
    # without a sample, whose fields still hold an earlier batch
    samples: Tensor
    step: int  # step of the sampler

    def __getitem__(self, name: str) -> Tensor:
        """Return a field. Raises UserError if samples have no such field."""
        if name not in self.fields:
            wrong = f"samples have no such field, only {', '.join(self.fields)}"
            raise UserError(f'batch["{name}"]', wrong, "add it to the samples of the dataset")
        return self.fields[name]

    @classmethod
    def zeros(cls, fields: Mapping[str, Field], device: torch.device, samples: int = 1) -> "Batch":
        """Return samples of zeros, images in float32, to find out what a network makes of them."""
        tensors = {}
        for name, field in fields.items():
            rows = torch.from_numpy(np.zeros((samples, *field.shape), field.dtype)).to(device)
            tensors[name] = rows
            if field.image:
                tensors[name] = channels_first(rows).float().contiguous()
        return cls(tensors, torch.zeros(samples, 2, dtype=torch.int64, device=device), step=0)

    def clone(self) -> "Batch":
        """Return a copy in memory of its own."""
        fields = {name: tensor.clone() for name, tensor in self.fields.items()}
        return Batch(fields, self.samples.clone(), self.step)

    def split(self, count: int) -> "list[Batch]":
        """Return views of `count` parts, in order. Their sizes differ by at most one."""
        split = [tensor.tensor_split(count) for tensor in self.fields.values()]
        parts = []
        for samples, *tensors in zip(self.samples.tensor_split(count), *split, strict=True):
            fields = dict(zip(self.fields, tensors, strict=True))
            parts.append(Batch(fields, samples, self.step))
        return parts

    def copy_(self, other: "Batch") -> None:
        """Copy the tensors of a batch of the same shapes into those of this one."""
        self.samples.copy_(other.samples)
        for name, tensor in self.fields.items():
            tensor.copy_(other.fields[name])


@dataclass(eq=False)
class ImageFormat:
    """Format of the images on the device, normalised by `mean` and `std` in [0, 1]."""

    device: torch.device
    mean: Sequence[float]  # one value per channel, or one for all channels; so is `std`
    std: Sequence[float]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    highest: int = 255  # the level that stands for 1: 255 for uint8, 65535 for uint16, 1 for floats

    def __post_init__(self) -> None:
        self.memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        means = torch.tensor(self.mean, dtype=torch.float64)
        stds = torch.tensor(self.std, dtype=torch.float64)
        # (x / highest - mean) / std as one multiplication and one addition: scale * x + shift.
        scale, shift = 1 / (self.highest * stds), -means / stds
        # float32 [C, 1, 1], or [1, 1, 1] for all channels
        self.scale = scale.float().to(self.device)[:, None, None]
        self.shift = shift.float().to(self.device)[:, None, None]

    def affine(self, channels: int) -> Tensor:
        """Return scale and shift of each channel, float32 [2, channels], on the device."""
        return torch.stack([self.scale, self.shift]).flatten(1).expand(2, channels).contiguous()

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return levels [..., H, W, C] as float32 [..., C, H, W], rounded as in training."""
        return (channels_first(pixels).float() * self.scale).add_(self.shift)


@dataclass(eq=False)
class DeviceSlot:
    """Memory on the device for one batch, allocated once and reused."""

    format: ImageFormat

    def __post_init__(self) -> None:
        self.events = BatchEvents()  # events of the batch; after `end`, the step no longer reads it
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Copy a field into this memory, for example from the host."""
        # Other devices than CUDA's read pageable memory of the host after the call, too.
        cuda = self.format.device.type == "cuda"
        return self.memory(name, value.shape, value.dtype).copy_(value, non_blocking=cuda)

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of a field in this shape and dtype; at first, it is uninitialised."""
        tensor = self._memory.get((name, dtype), NO_MEMORY)
        if tensor.shape != tuple(shape):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.format.device)
            self._memory[name, dtype] = tensor
        return tensor

    def images(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the tensor of images [B, ..., C, H, W] that `DeviceStage.on_device` returns."""
        if not self.format.channels_last:
            return self.memory(name + PLANES, shape, self.format.dtype)
        *rows, channels, height, width = shape
        memory = self.memory(name + ROWS, (*rows, height, width, channels), self.format.dtype)
        return channels_first(memory)

    def normalise(self, name: str, levels: Tensor) -> Tensor:
        """Normalise images [B, ..., H, W, C] on the host, in float32, into `images`."""
        *rows, height, width, channels = levels.shape
        out = self.images(name, (*rows, channels, height, width))
        if self.format.device.type == "cpu":
            # Rows of W * C values: loops over C values take a CPU ten times as long.
            scale, shift = self.format.affine(channels).repeat(1, width)
            floats = self.memory(name + ROWS, levels.shape, torch.float32)  # perhaps that of `out`
            floats.flatten(-2).copy_(levels.flatten(-2)).mul_(scale).add_(shift)
            return out.copy_(channels_first(floats))
        levels = channels_first(self.copy(name, levels))
        if levels.dtype != torch.uint8:  # torch multiplies no uint16
            levels = levels.float()
        # Two passes over the memory, which the training step needs at the same time. One pass would
        # fuse multiplication and addition, and round differently than a CPU does.
        scaled = levels * self.format.scale
        return torch.add(scaled, self.format.shift, out=out)


def channels_first(pixels: Tensor) -> Tensor:
    """View [..., H, W, C] as [..., C, H, W]."""
    return pixels.movedim(-1, -3)
