"""The fields of a sample: named arrays with a dtype and a shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

IMAGE = "image"  # the field that is the input of the network
TARGET = "target"  # the field that batch transforms add: mixed labels, float [B, classes]


@dataclass(frozen=True)
class Field:
    dtype: Any  # numpy dtype, which torch must have too
    shape: tuple[int, ...] = ()  # shape in one sample; an image is [..., H, W, C]
    # Whether the field is normalised and goes through batch transforms. On the device, it is
    # float [B, ..., C, H, W]; other fields are copied unchanged.
    image: bool = False

    @property
    def highest(self) -> int:
        """The level of an image that stands for 1: 255 in uint8, 65535 in uint16, 1 in floats."""
        dtype = np.dtype(self.dtype)
        return 1 if dtype.kind == "f" else int(np.iinfo(dtype).max)

    @property
    def device_shape(self) -> tuple[int, ...]:
        """The shape of an image on the device, (..., C, H, W)."""
        *rows, height, width, channels = self.shape
        return (*rows, channels, height, width)


LABEL = Field(np.int64)  # a class index


def describe_fields(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields as a checkpoint stores them: keywords of Field, by name."""
    return {
        name: {"dtype": np.dtype(field.dtype).name, "shape": [*field.shape], "image": field.image}
        for name, field in fields.items()
    }


def image_field(size: int) -> Field:
    """Return the field of square RGB images of `size` pixels."""
    return Field(np.uint8, (size, size, 3), image=True)
