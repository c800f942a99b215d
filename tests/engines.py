"""Stands in for GpuDecoder where there is no GPU: Pillow decodes the files of a batch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import decode
from pipeline.gpu_decode import geometry
from pipeline.gpu_decode.decoder import EngineError


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
        cropped = picture.resized((size, size), box)
        return (cropped.mirrored() if row[geometry.MIRRORED] else cropped).pixels()
