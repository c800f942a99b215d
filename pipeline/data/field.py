"""Sample fields, which are named arrays with dtype and shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

IMAGE = "image"  # field with the network's input
TARGET = "target"  # field with mixed labels, float [B, classes], added by batch transforms


@dataclass(frozen=True)
class Field:
    dtype: Any  # numpy dtype, which torch must also support
    shape: tuple[int, ...] = ()  # shape in one sample; an image is [..., H, W, C]
    # Whether to normalize the field and apply batch transforms. On the device, it is
    # float [B, ..., C, H, W]; other fields are copied unchanged.
    image: bool = False

    @property
    def highest(self) -> int:
        """The image level that represents 1: 255 in uint8, 65535 in uint16, 1 in floats."""
        dtype = np.dtype(self.dtype)
        return 1 if dtype.kind == "f" else int(np.iinfo(dtype).max)

    @property
    def device_shape(self) -> tuple[int, ...]:
        """The image's shape on the device, (..., C, H, W)."""
        *rows, height, width, channels = self.shape
        return (*rows, channels, height, width)


Fields = Mapping[str, Field]
LABEL = Field(np.int64)  # a class index


def describe_fields(fields: Fields) -> dict[str, Any]:
    """Return the keywords of each Field by its name, for a checkpoint."""
    return {
        name: {"dtype": np.dtype(field.dtype).name, "shape": [*field.shape], "image": field.image}
        for name, field in fields.items()
    }


def image_field(size: int) -> Field:
    """Return the field of square RGB images of `size` pixels."""
    return Field(np.uint8, (size, size, 3), image=True)
