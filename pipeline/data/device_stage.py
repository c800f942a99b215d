"""The last stage of a training sample, from a Picture in a worker to an image on the device.

Subclasses move work to the device. Functions in data.on_device select one (docs/fork.md).
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.data.decode import Picture
from pipeline.data.field import IMAGE, Field


class DeviceDecodeError(RuntimeError):
    """The device cannot decode a batch that the workers wrote; the CPU has to decode all of it."""


class DeviceStage:
    """Workers write pixels, and the device normalizes them."""

    # Fields of the batch buffers that `Dataset.fields` lacks or that a sample may lack: the row of
    # a missing field still holds an earlier sample.
    fields: Mapping[str, Field] = {}
    # Ways to make a sample: `cpu`, the default, and values of loader.decoder that are not a CPU
    # decoder. loader.workers=auto compares the first two.
    decode_modes: Sequence[str] = ("cpu",)
    device_decodes = False  # whether workers only read files in the current mode

    def set_decode_mode(self, mode: str, *, workers: int = 1, demand: float = math.inf) -> None:
        """Set the mode of later samples: `demand` images/s are needed of `workers` processes."""
        assert mode in self.decode_modes

    def begin_rows(self, fields: Mapping[str, np.ndarray], rows: range) -> None:
        """Prepare, in a worker, for samples in these rows of `fields`, the memory of a batch."""

    def draw(self, picture: Picture, rng: random.Random) -> tuple[Picture, dict[str, Any]]:
        """Draw random parameters for the device, in a worker, after augment.train.

        Returns the picture, which masks follow, and the fields of the parameters.
        """
        return picture, {}

    def image_fields(self, picture: Picture) -> dict[str, Any]:
        """Return the fields, in a worker, from which `on_device` makes the image."""
        return {IMAGE: picture.pixels()}

    def on_device(self, fields: Mapping[str, Tensor], slot: Any) -> dict[str, Tensor]:
        """Return IMAGE, and any other field of the training step, from a batch on the host.

        The other fields of the dataset are copied. Runs in the training process; on a GPU, in a
        separate thread and CUDA stream. Raises DeviceDecodeError to be called again with fields
        that the CPU has decoded. `slot`: a DeviceSlot of pipeline/feed/batch.py.
        """
        return {IMAGE: slot.normalize(IMAGE, fields[IMAGE])}
