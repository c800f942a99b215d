"""Models by name: `build(name, num_classes=..., image_size=...)` returns an nn.Module."""

from models.published import Preprocessing, published
from models.weights import (
    file_fingerprint,
    fit_weights,
    load_weights,
    read_file,
    safetensors_metadata,
    weights_in,
    write_safetensors,
)
from models.zoo import available, build, is_convnet, num_classes_in, parameter_count

__all__ = [
    "Preprocessing",
    "available",
    "build",
    "file_fingerprint",
    "fit_weights",
    "is_convnet",
    "load_weights",
    "num_classes_in",
    "parameter_count",
    "published",
    "read_file",
    "safetensors_metadata",
    "weights_in",
    "write_safetensors",
]
