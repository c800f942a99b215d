"""Pillow stands in for the JPEG engines and for the kernels of RandAugment without a GPU.

Tests that import this are skipped in a copy without pipeline/gpu.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline import decode
from pipeline.augment import NAMES, Operation, apply_operations
from pipeline.decode import Picture

geometry = pytest.importorskip("pipeline.gpu.geometry")
EngineError = pytest.importorskip("pipeline.gpu.decoder").EngineError


def pillow_operations(images: Tensor, operations: np.ndarray) -> Tensor:
    """Apply drawn operations as `pipeline.gpu.apply_operations`, but on a CPU."""
    made = [
        apply_operations(
            Picture(image),
            [
                Operation(NAMES[int(n)], value, int(mode), int(fill))
                for n, value, mode, fill in rows
            ],
        )
        for image, rows in zip(images.permute(0, 2, 3, 1).numpy(), operations, strict=True)
    ]
    return torch.from_numpy(np.stack([each.pixels() for each in made])).permute(0, 3, 1, 2)


class PillowEngines:
    """Decodes as GpuDecoder, after random_resized_crop and horizontal_flip only.

    Args:
        device, batch_size: as for GpuDecoder.

    Attributes:
        broken: whether it refuses every batch with files.
        files: number of files in each batch that it decoded.
    """

    broken = False

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self.seconds_per_image = 0.0
        self.files: list[int] = []

    def make_batch(
        self,
        files: np.ndarray,
        rows: Tensor,
        pixels: Tensor,
        out: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> None:
        table, images = rows.numpy(), pixels.numpy().copy()
        encoded = np.flatnonzero(table[:, geometry.LENGTH] > 0)
        if self.broken and len(encoded):
            raise EngineError("nvjpegDecodeBatched returned status 6 (execution failed)")
        for row in encoded:
            images[row] = self._crop(files, table[row], images.shape[1])
        out.copy_((torch.from_numpy(images).float() * scale + shift).permute(0, 3, 1, 2))
        self.files.append(len(encoded))
        if len(encoded):
            self.seconds_per_image = 1e-3

    def close(self) -> None:
        pass

    @staticmethod
    def _crop(files: np.ndarray, row: np.ndarray, size: int) -> np.ndarray:
        offset, length = int(row[geometry.OFFSET]), int(row[geometry.LENGTH])
        picture = decode.open_picture(files[offset : offset + length].tobytes(), "pillow")
        box: Any = tuple(map(int, row[geometry.CLIP_LEFT : geometry.CLIP_BOTTOM + 1]))
        interpolation = decode.INTERPOLATIONS[int(row[geometry.BICUBIC])]
        cropped = picture.resized((size, size), box, interpolation=interpolation)
        return (cropped.mirrored() if row[geometry.MIRRORED] else cropped).pixels()
