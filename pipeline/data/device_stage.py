"""Last stage of a training sample, from a Picture in a worker to an image on the device.

Subclasses move work to the device. Functions in data.on_device select one (docs/fork.md).
"""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.data.decode import Picture
from pipeline.data.field import IMAGE, Fields


class DeviceDecodeError(RuntimeError):
    """The device cannot decode a batch that the workers wrote, so the CPU must decode all of it."""


class DeviceStage:
    """Workers write pixels, and the device normalizes them."""

    # Fields of the batch buffers that `Dataset.fields` lacks or that a sample may lack, in which
    # case the row still contains an earlier sample.
    fields: Fields = {}
    # Decode modes: `cpu`, the default, and values of loader.decoder that are not CPU decoders.
    # loader.workers=auto compares the first two.
    decode_modes: Sequence[str] = ("cpu",)
    device_decodes = False  # whether workers only read files in the current mode

    def set_decode_mode(self, mode: str, *, workers: int = 1, demand: float = math.inf) -> None:
        """Set the mode of later samples; `workers` processes must reach `demand` images/s."""
        assert mode in self.decode_modes

    def begin_rows(self, fields: Mapping[str, np.ndarray], rows: range) -> None:
        """Prepare, in a worker, for samples in these rows of `fields`, a batch's buffers."""

    def draw(self, picture: Picture, rng: Random) -> tuple[Picture, dict[str, Any]]:
        """Sample random parameters for the device, in a worker, after augment.train.

        Returns the picture, which masks follow, and the fields with the parameters.
        """
        return picture, {}

    def image_fields(self, picture: Picture) -> dict[str, Any]:
        """Return, in a worker, the fields from which `on_device` computes the image."""
        return {IMAGE: picture.pixels()}

    def on_device(self, fields: Mapping[str, Tensor], slot: Any) -> dict[str, Tensor]:
        """Return IMAGE, and any other field of the training step, from a batch on the host.

        Other fields in the dataset are copied. Runs in the training process; on a GPU, in a
        separate thread and CUDA stream. Raises DeviceDecodeError to be called again with fields
        that the CPU has decoded. `slot`: a DeviceSlot (pipeline/feed/batch.py).
        """
        return {IMAGE: slot.normalize(IMAGE, fields[IMAGE])}
