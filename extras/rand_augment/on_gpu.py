"""Apply RandAugment and TrivialAugment on a GPU, bitwise identical to Pillow.

Step 5 of the data flow, after the copy to the device and before normalization. Workers only sample
the operations, as rows of numbers for the kernels in kernels.py. The host copies all rows of a
batch at once without synchronizing.
"""

import logging
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.errors import describe
from conf.schema import Config
from extras.rand_augment import MATRICES, NAMES, Operation, RandAugment, TrivialAugment
from pipeline.data.augment import Compose
from pipeline.data.dataset import calls_stage
from pipeline.data.decode import Picture
from pipeline.data.device_stage import DeviceStage
from pipeline.data.field import IMAGE, Field
from pipeline.feed.batch import DeviceSlot, channels_first

logger = logging.getLogger(__name__)

OPERATIONS = "operations"  # name of the field with the sampled operations
# Numbers per row: the operation's kind and up to seven more. With 8, every round's rows start at a
# multiple of 16 bytes; otherwise Triton would compile the kernels twice.
COLUMNS = 8
# MOVED plus an interpolation of Image.Resampling is the kind of all operations that move pixels by
# a matrix, because they use the same kernel.
MOVED = len(NAMES)


def on_gpu(dataset: Any, config: Config, device: torch.device) -> DeviceStage:
    """Return a stage with the last transform's operations, or the dataset's current stage.

    The operations are removed from the dataset's transform. See data.on_device.
    """
    stage: DeviceStage = dataset.stage
    if type(stage) is not DeviceStage or not calls_stage(dataset):
        return stage
    transforms = dataset.transform.transforms
    if not transforms or type(transforms[-1]) not in (RandAugment, TrivialAugment):
        return stage
    if not has_kernels(device):
        return stage
    dataset.transform = Compose(transforms[:-1], dataset.transform.image_size)
    return SampledOperations(transforms[-1])


class SampledOperations(DeviceStage):
    """Sample the operations in workers, and apply them on the device."""

    def __init__(self, operations: RandAugment) -> None:
        self.operations = operations
        self.fields = {OPERATIONS: Field(np.float64, (operations.count, COLUMNS))}

    def draw(self, picture: Picture, rng: random.Random) -> tuple[Picture, dict[str, Any]]:
        operations = self.operations.sample(picture.size, rng)
        rows = [kernel_row(operation, picture.size) for operation in operations]
        picture = Picture(picture.source, picture.geometry, untracked=True)  # no masks can follow
        return picture, {OPERATIONS: rows}

    def on_device(self, fields: Mapping[str, Tensor], slot: DeviceSlot) -> dict[str, Tensor]:
        levels = fields[IMAGE]
        if not levels.is_cuda:
            levels = slot.copy(IMAGE, levels)
        images = channels_first(levels)
        out = slot.images(IMAGE, images.shape)
        apply_operations(images, fields[OPERATIONS], out, slot.format.affine(3))
        return {IMAGE: out}


def apply_operations(images: Tensor, operations: Tensor, out: Tensor, affine: Tensor) -> None:
    """Apply each image's operations in sequence, and normalize.

    `operations`: float64 [B, count, COLUMNS] on the host, from `kernel_row`. `apply_rounds`
    describes the other arguments; channels_last images are overwritten.
    """
    from extras.rand_augment.kernels import apply_rounds

    rounds = operations.transpose(0, 1).contiguous()
    # Copy from pinned memory, which does not synchronize.
    on_device = rounds.pin_memory().to(images.device, non_blocking=True)
    interpolated = bool((rounds[:, :, 0] > MOVED).any())
    pixels = images.contiguous(memory_format=torch.channels_last)
    apply_rounds(pixels, on_device, out, affine, interpolated=interpolated)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether `apply_operations` works on this device. Warns with the reason if a GPU fails."""
    if device.type != "cuda":
        return False
    try:
        pixel = torch.zeros(1, 3, 1, 1, device=device)
        affine = torch.zeros(2, 3, device=device)
        operations = torch.zeros(1, 1, COLUMNS, dtype=torch.float64)
        apply_operations(pixel.byte(), operations, pixel, affine)
        pixel.cpu()
    except Exception as error:  # no Triton, no C compiler, an old GPU, ...
        logger.warning(
            "augment.train: workers apply the random operations, because Triton does not work on "
            "this GPU (%s); install a C compiler and Python's header files",
            describe(error).splitlines()[0],
        )
        return False
    return True


def kernel_row(operation: Operation, size: tuple[int, int]) -> list[float]:
    """Convert an operation on an image of (width, height) to numbers for the kernels, [COLUMNS].

    The numbers are the index in NAMES and the operation's number; or MOVED + interpolation, a
    matrix and the fill.
    """
    name, number, interpolation, fill = operation
    row = [0.0] * COLUMNS
    if name == "invert":
        name = "solarize"  # from level 0
    if name in NAMES:
        row[:2] = NAMES.index(name), number
        return row
    matrix: Sequence[float] = (1, 0, 0, 0, 1, 0)
    if name in MATRICES:
        matrix = MATRICES[name](number, size)
    if not interpolation:
        matrix = [*_fixed_point(*matrix[:3]), *_fixed_point(*matrix[3:])]
    row[:] = MOVED + interpolation, *matrix, fill
    return row


def _fixed_point(a: float, b: float, c: float) -> list[int]:
    """Convert a matrix row to Geometry.c's fixed point, in units of 1 / 65536."""
    centered = c + a * 0.5 + b * 0.5
    return [math.floor(value * 65536 + 0.5) for value in (a, b, centered)]
