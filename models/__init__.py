"""Models by name: `build(name, num_classes=..., image_size=...)` returns an nn.Module."""

from models.zoo import available, build, file_fingerprint, is_convnet, load_weights, parameter_count

__all__ = [
    "available",
    "build",
    "file_fingerprint",
    "is_convnet",
    "load_weights",
    "parameter_count",
]
