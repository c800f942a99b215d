"""Optional: JPEG decoding and augmentation on a GPU.

The rest of the program reaches this part by `pipeline.gpu_part()`, and uses the names below.
"""

from pipeline.gpu.augment import apply_operations, has_kernels
from pipeline.gpu.decoder import EngineUpload, GpuDecoder, why_no_engines
from pipeline.gpu.encoded import EncodedRows, file_buffers, file_bytes_per_row, first_on_pixels

__all__ = [
    "EncodedRows",
    "EngineUpload",
    "GpuDecoder",
    "apply_operations",
    "file_buffers",
    "file_bytes_per_row",
    "first_on_pixels",
    "has_kernels",
    "why_no_engines",
]
