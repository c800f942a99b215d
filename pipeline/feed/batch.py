"""Batches of named arrays, on the host and on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from pipeline.data.field import Fields
from pipeline.feed.clock import BatchEvents

NO_MEMORY = torch.empty(0)
# Suffixes of names in `DeviceSlot.memory`, which keep a field's memory layouts apart
ROWS, PLANES = " [H, W, C]", " [C, H, W]"


@dataclass(frozen=True)
class Batch:
    """A batch of named tensors. Their memory is reused, so clone the batch to keep it."""

    # Name -> tensor [B, ...]. In the training step, images are normalized, [B, ..., C, H, W], in
    # the training dtype. TARGET is present if batch transforms mixed the labels.
    fields: dict[str, Tensor]
    # int64 [B, 2], (epoch, index) of each row. Rows without a sample in a short batch hold
    # EMPTY_ROW, and their fields still hold data of an earlier batch.
    samples: Tensor
    step: int  # step of the sampler

    def __getitem__(self, name: str) -> Tensor:
        """Return a field. Raises UserError if the samples lack it."""
        if name not in self.fields:
            problem = f"samples have no such field, only {', '.join(self.fields)}"
            raise UserError(f'batch["{name}"]', problem, "add it to the dataset's samples")
        return self.fields[name]

    @classmethod
    def zeros(cls, fields: Fields, device: torch.device, samples: int = 1) -> "Batch":
        """Return samples of zeros to probe a network's outputs; images are contiguous float32."""
        tensors = {}
        for name, field in fields.items():
            rows = torch.from_numpy(np.zeros((samples, *field.shape), field.dtype)).to(device)
            tensors[name] = rows
            if field.image:
                tensors[name] = channels_first(rows).float().contiguous()
        return cls(tensors, torch.zeros(samples, 2, dtype=torch.int64, device=device), step=0)

    def clone(self) -> "Batch":
        fields = {name: tensor.clone() for name, tensor in self.fields.items()}
        return Batch(fields, self.samples.clone(), self.step)

    def split(self, count: int) -> "list[Batch]":
        """Return `count` micro-batches as views, in order. Their sizes differ by at most one."""
        split = [tensor.tensor_split(count) for tensor in self.fields.values()]
        parts = []
        for samples, *tensors in zip(self.samples.tensor_split(count), *split, strict=True):
            fields = dict(zip(self.fields, tensors, strict=True))
            parts.append(Batch(fields, samples, self.step))
        return parts

    def copy_(self, other: "Batch") -> None:
        """Copy the tensors of `other`, which has the same shapes, into this batch."""
        self.samples.copy_(other.samples)
        for name, tensor in self.fields.items():
            tensor.copy_(other.fields[name])


@dataclass(eq=False)
class ImageFormat:
    """Format of the images on the device, whose levels in [0, 1] are normalized by mean and std."""

    device: torch.device
    mean: Sequence[float]  # one value per channel, or one for all channels
    std: Sequence[float]  # one value per channel, or one for all channels
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    highest: int = 255  # level that represents 1; 255 for uint8, 65535 for uint16, 1 for floats

    def __post_init__(self) -> None:
        self.memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        means = torch.tensor(self.mean, dtype=torch.float64)
        stds = torch.tensor(self.std, dtype=torch.float64)
        # scale * x + shift is (x / highest - mean) / std in one multiplication and one addition.
        scale, shift = 1 / (self.highest * stds), -means / stds
        # float32 [C, 1, 1], or [1, 1, 1] for all channels
        self.scale = scale.float().to(self.device)[:, None, None]
        self.shift = shift.float().to(self.device)[:, None, None]

    def affine(self, channels: int) -> Tensor:
        """Return each channel's scale and shift, float32 [2, channels], on the device."""
        return torch.stack([self.scale, self.shift]).flatten(1).expand(2, channels).contiguous()


@dataclass(eq=False)
class DeviceSlot:
    """Memory on the device for one batch, allocated once and reused."""

    format: ImageFormat

    def __post_init__(self) -> None:
        self.events = BatchEvents()  # The step no longer reads the batch after `events.end`.
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Copy a field into this memory, for example from the host."""
        # Devices other than CUDA also read pageable host memory after the call returns.
        cuda = self.format.device.type == "cuda"
        return self.memory(name, value.shape, value.dtype).copy_(value, non_blocking=cuda)

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a field's tensor of this shape and dtype; a new tensor is uninitialized."""
        tensor = self._memory.get((name, dtype), NO_MEMORY)
        if tensor.shape != tuple(shape):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.format.device)
            self._memory[name, dtype] = tensor
        return tensor

    def images(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the memory for images [B, ..., C, H, W] that `DeviceStage.on_device` returns."""
        if not self.format.channels_last:
            return self.memory(name + PLANES, shape, self.format.dtype)
        *rows, channels, height, width = shape
        memory = self.memory(name + ROWS, (*rows, height, width, channels), self.format.dtype)
        return channels_first(memory)

    def normalize(self, name: str, levels: Tensor) -> Tensor:
        """Normalize host images [B, ..., H, W, C] in float32 and write them into `images`."""
        *rows, height, width, channels = levels.shape
        out = self.images(name, (*rows, channels, height, width))
        if self.format.device.type == "cpu":
            # Rows of W * C values, because loops over C values take a CPU ten times as long.
            scale, shift = self.format.affine(channels).repeat(1, width)
            floats = self.memory(name + ROWS, levels.shape, torch.float32)  # may be that of `out`
            floats.flatten(-2).copy_(levels.flatten(-2)).mul_(scale).add_(shift)
            return out.copy_(channels_first(floats))
        levels = channels_first(self.copy(name, levels))
        if levels.dtype != torch.uint8:  # torch cannot multiply uint16
            levels = levels.float()
        # Two passes use more memory bandwidth, which the training step needs at the same time. One
        # pass would fuse multiplication and addition, and round differently than a CPU does.
        scaled = levels * self.format.scale
        return torch.add(scaled, self.format.shift, out=out)


def channels_first(pixels: Tensor) -> Tensor:
    """View [..., H, W, C] as [..., C, H, W]."""
    return pixels.movedim(-1, -3)
