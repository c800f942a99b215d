"""Pillow stands in for the JPEG engines: it makes the pixels of the CPU path."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from extras.gpu_decode.decoder import EngineError
from extras.gpu_decode.geometry import BICUBIC, CLIP_BOTTOM, CLIP_LEFT, LENGTH, MIRRORED, OFFSET
from pipeline import decode


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
        files: Tensor,
        geometry: Tensor,
        pixels: Tensor,
        out: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> None:
        images, encoded = pixels.numpy().copy(), np.flatnonzero(geometry[:, LENGTH] > 0)
        if self.broken and len(encoded):
            raise EngineError("nvjpegDecodeBatched returned status 6 (execution failed)")
        for row in encoded:
            images[row] = _crop(files.flatten().numpy(), geometry[row].numpy(), images.shape[1])
        out.copy_((torch.from_numpy(images).float() * scale + shift).permute(0, 3, 1, 2))
        self.files.append(len(encoded))
        if len(encoded):
            self.seconds_per_image = 1e-3


def _crop(files: np.ndarray, row: np.ndarray, size: int) -> np.ndarray:
    first, length = int(row[OFFSET]), int(row[LENGTH])
    picture = decode.open_picture(files[first : first + length].tobytes(), "pillow")
    box: Any = tuple(map(int, row[CLIP_LEFT : CLIP_BOTTOM + 1]))
    interpolation = decode.INTERPOLATIONS[int(row[BICUBIC])]
    cropped = picture.resized((size, size), box, interpolation=interpolation, quick=True)
    return (cropped.mirrored() if row[MIRRORED] else cropped).pixels()
