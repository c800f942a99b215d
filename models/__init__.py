"""Models by name: `build(name, num_classes=..., image_size=...)` returns an nn.Module."""

from models.published import Exported, Preprocessing, exported, published, published_model
from models.stages import Stage, freeze, stages, train_mode
from models.weights import (
    file_fingerprint,
    fit_weights,
    load_weights,
    read_file,
    read_torch_file,
    safetensors_metadata,
    stored_name,
    weights_in,
    write_safetensors,
)
from models.zoo import (
    available,
    build,
    is_convnet,
    num_classes_in,
    parameter_count,
    rewrite_layers,
)

__all__ = [
    "Exported",
    "Preprocessing",
    "Stage",
    "available",
    "build",
    "exported",
    "file_fingerprint",
    "fit_weights",
    "freeze",
    "is_convnet",
    "load_weights",
    "num_classes_in",
    "parameter_count",
    "published",
    "published_model",
    "read_file",
    "read_torch_file",
    "rewrite_layers",
    "safetensors_metadata",
    "stages",
    "stored_name",
    "train_mode",
    "weights_in",
    "write_safetensors",
]
