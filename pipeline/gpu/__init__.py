"""Optional: JPEG decoding and augmentation on a GPU.

The rest of the program reaches this part by `pipeline.gpu_part()`, and uses the names below.
"""

from pipeline.gpu.augment import apply_operations as apply_operations
from pipeline.gpu.augment import has_kernels as has_kernels
from pipeline.gpu.decoder import EngineUpload as EngineUpload
from pipeline.gpu.decoder import GpuDecoder as GpuDecoder
from pipeline.gpu.decoder import why_no_engines as why_no_engines
from pipeline.gpu.encoded import EncodedRows as EncodedRows
from pipeline.gpu.encoded import FileWriter as FileWriter
from pipeline.gpu.encoded import file_buffers as file_buffers
from pipeline.gpu.encoded import file_bytes_per_row as file_bytes_per_row
from pipeline.gpu.encoded import first_on_pixels as first_on_pixels
