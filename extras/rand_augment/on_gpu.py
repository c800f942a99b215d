"""The operations of RandAugment and TrivialAugment on a GPU, with Pillow's pixels bit for bit.

Data flow, step 5: after the copy to the device, before normalisation. Workers only draw the
operations, as rows of numbers for the kernels in kernels.py. The host copies all rows of a batch at
once, and does not wait for the device.
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

OPERATIONS = "operations"  # the field of the drawn operations
# Numbers of a row: the kind of operation, and up to seven more. With 8, the rows of every round
# start at a multiple of 16 bytes; otherwise Triton compiles the kernels twice.
COLUMNS = 8
# Plus the interpolation of Image.Resampling, stands for all operations that move pixels by a
# matrix, because the kernel is the same.
MOVED = len(NAMES)


def on_gpu(dataset: Any, config: Config, device: torch.device) -> DeviceStage:
    """Return a stage with the operations that end augment.train, or the dataset's present stage.

    The dataset's transform loses these operations. See data.on_device.
    """
    present: DeviceStage = dataset.stage
    if type(present) is not DeviceStage or not calls_stage(dataset):
        return present
    transforms = dataset.transform.transforms
    if not transforms or type(transforms[-1]) not in (RandAugment, TrivialAugment):
        return present
    if not has_kernels(device):
        return present
    dataset.transform = Compose(transforms[:-1], dataset.transform.image_size)
    return DrawnOperations(transforms[-1])


class DrawnOperations(DeviceStage):
    """Workers draw the operations, and the device applies them."""

    def __init__(self, operations: RandAugment) -> None:
        self.operations = operations
        self.fields = {OPERATIONS: Field(np.float64, (operations.count, COLUMNS))}

    def draw(self, picture: Picture, rng: random.Random) -> tuple[Picture, dict[str, Any]]:
        operations = self.operations.sample(picture.size, rng)
        rows = [kernel_row(operation, picture.size) for operation in operations]
        picture = Picture(picture.source, picture.geometry, untracked=True)  # no mask can follow
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
    """Apply the operations of a batch, one after another, and normalise.

    The operations are float64 [B, count, COLUMNS] on the host, of `kernel_row`. For the others, see
    `apply_rounds`; images that are channels_last are overwritten.
    """
    from extras.rand_augment.kernels import apply_rounds

    rounds = operations.transpose(0, 1).contiguous()
    # From page-locked memory, the copy does not wait for the device.
    there = rounds.pin_memory().to(images.device, non_blocking=True)
    interpolated = bool((rounds[:, :, 0] > MOVED).any())
    pixels = images.contiguous(memory_format=torch.channels_last)
    apply_rounds(pixels, there, out, affine, interpolated=interpolated)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether `apply_operations` works on this device. On a GPU, a warning says why it does not."""
    if device.type != "cuda":
        return False
    try:
        pixel = torch.zeros(1, 3, 1, 1, device=device)
        affine = torch.zeros(2, 3, device=device)
        nothing = torch.zeros(1, 1, COLUMNS, dtype=torch.float64)
        apply_operations(pixel.byte(), nothing, pixel, affine)
        pixel.cpu()
    except Exception as error:  # no Triton, no C compiler, a GPU that is too old, ...
        logger.warning(
            "augment.train: the workers apply the random operations, because Triton does not work "
            "on this GPU (%s); it needs a C compiler and Python's header files",
            describe(error).splitlines()[0],
        )
        return False
    return True


def kernel_row(operation: Operation, size: tuple[int, int]) -> list[float]:
    """Return the numbers of an operation on an image of (width, height) for the kernels, [COLUMNS].

    The first is the position in NAMES, followed by the operation's number; or MOVED +
    interpolation, followed by a matrix and the fill.
    """
    name, number, interpolation, fill = operation
    row = [0.0] * COLUMNS
    if name == "invert":
        name = "solarize"  # from level 0 on
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
    """Return a line of a matrix as in Geometry.c, which copies pixels in units of 1 / 65536."""
    centred = c + a * 0.5 + b * 0.5
    return [math.floor(value * 65536 + 0.5) for value in (a, b, centred)]
