"""Turn JPEG files into normalized crops on the GPU with hardware engines and a crop/resize kernel.

nvJPEG decodes the files of a batch on the hardware engines (14,000 images/s while an H200 also
trains; one host thread waits without the GIL), and one kernel writes the batch, float [B, 3, S, S].
Pixels that workers decoded pass through the same kernel.
"""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extras.gpu_decode.geometry import ADDRESS, BICUBIC, HEIGHT, LENGTH, OFFSET, PITCH, WIDTH

NO_ENGINES = 7  # NVJPEG_STATUS_ARCH_MISMATCH
ALIGNMENT = 256  # bytes; each decoded image starts at a multiple of this


class JpegEngineError(RuntimeError):
    """Raised if the JPEG engines are missing or report an error."""


class JpegEngines:
    """Call nvJPEG's batched decoder for the hardware engines through its C API.

    One call decodes a batch, and ctypes releases the GIL during the call. Python packages for the
    same library create an object per image, which takes milliseconds per batch. Raises
    JpegEngineError if this GPU has no JPEG engines or the driver does not support them.
    """

    HARDWARE_BACKEND = 3  # NVJPEG_BACKEND_HARDWARE
    RGB_INTERLEAVED = 5  # NVJPEG_OUTPUT_RGBI
    # nvJPEG's pipelining waits for a small kernel after every image: 18,300 images/s on an idle
    # H200, 2,200 while training steps queue their kernels. Without it: 15,500 and 14,400 images/s.
    NO_PIPELINE = 1  # NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        flags = ctypes.c_uint(self.NO_PIPELINE)
        self._handle = ctypes.c_void_p()
        self._state = ctypes.c_void_p()
        handle = ctypes.byref(self._handle)
        self._call("nvjpegCreateEx", self.HARDWARE_BACKEND, None, None, flags, handle)
        self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
        self._count = 0  # files in the last batch

    def decode(
        self, files: np.ndarray, lengths: np.ndarray, targets: np.ndarray, stream: torch.cuda.Stream
    ) -> None:
        """Decode a batch on `stream`. The caller keeps files and targets alive until it is done.

        The engines write immediately, even if kernels on `stream` still use the targets
        (torchcodec#1634). Raises JpegEngineError if a file is damaged or unsupported.

        Args:
            files: uint64 [n] host addresses of the files.
            lengths: uint64 [n] file sizes in bytes.
            targets: uint64 [n, 8] nvjpegImage_t: device address in column 0, pitch in column 4.
        """
        count = len(files)
        both = self._handle, self._state
        if count != self._count:
            self._count = 0
            self._call("nvjpegDecodeBatchedInitialize", *both, count, 1, self.RGB_INTERLEAVED)
        self._count = 0  # reset in case of an error
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (files, lengths, targets)]
        self._call("nvjpegDecodeBatched", *both, *arrays, ctypes.c_void_p(stream.cuda_stream))
        self._count = count

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            reason = ": this GPU has no JPEG engines" if status == NO_ENGINES else ""
            raise JpegEngineError(f"nvJPEG's {name} returned status {status}{reason}")


@cache  # takes 0.8 s; the engines are never closed
def open_engines() -> JpegEngines:
    """Open the engines of this process's device. Raises JpegEngineError if this fails.

    nvJPEG comes from NVIDIA's wheel, torchvision's wheel or the CUDA toolkit.
    """
    packages = Path(torch.__file__).parents[1]
    names = ["libnvjpeg.so.13", "libnvjpeg.so.12", "/usr/local/cuda/lib64/libnvjpeg.so"]
    for pattern in ("torchvision.libs/libnvjpeg*.so*", "nvidia/*/lib/libnvjpeg.so*"):
        names = [*sorted(map(str, packages.glob(pattern))), *names]
    for name in names:
        with suppress(OSError):
            return JpegEngines(ctypes.CDLL(name))
    raise JpegEngineError("nvJPEG not found; pip install nvidia-nvjpeg, or torchvision for CUDA")


@cache
def engines_error(device: torch.device) -> str | None:
    """Return why GpuDecoder does not work on this device; None if it works."""
    if device.type != "cuda":
        return "training does not run on CUDA"
    try:
        with ThreadPoolExecutor(1) as thread:  # import a module that most models need, in 1 s
            thread.submit(import_module, "torchvision.models")
            torch.cuda.init()
            open_engines()
    except RuntimeError as error:  # JpegEngineError, or a CUDA error
        return str(error)
    return None


class GpuDecoder:
    """Decode the encoded rows of a batch, then crop and normalize all rows.

    Raises JpegEngineError if nvJPEG or the engines are missing. The attribute `seconds_per_image`
    is the engines' host time in the newest batch.
    """

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self.engines = open_engines()
        self.device = device
        self.seconds_per_image = 0.0
        # nvjpegImage_t has four device pointers and four pitches.
        self._targets = np.zeros((batch_size, 8), np.uint64)
        # Double buffer: the engines write into one while the kernel reads the other.
        self._decoded = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._done = torch.cuda.Event()
        self._raw: torch.Tensor | None = None  # uint8 [B, S, S, 3]: rows that workers decoded

    def make_batch(
        self,
        files: torch.Tensor,  # uint8 [B, bytes] in host memory, concatenated files
        geometry: torch.Tensor,  # float64 [B, COLUMNS], pinned; ADDRESS and PITCH are filled in
        pixels: torch.Tensor,  # uint8 [B, S, S, 3], pinned; rows decoded by workers
        out: torch.Tensor,  # float or uint8 [B, 3, S, S] on the device
        affine: torch.Tensor,  # float32 [2, 3] on the device, from `ImageFormat.affine`
    ) -> None:
        """Enqueue decoding and the kernel on the current stream.

        The host waits until the engines have read the files. Raises JpegEngineError if the engines
        do not support a file.
        """
        from extras.gpu_decode.crop_kernel import crop_resize

        table = geometry.numpy()
        files_here = table[:, LENGTH] > 0
        if self._raw is None:
            self._raw = torch.empty_like(pixels, device=self.device)
        made = np.flatnonzero(~files_here)
        gaps = np.flatnonzero(np.diff(made) > 1)
        for part in np.split(made, gaps + 1):  # one copy for adjacent rows
            if len(part):
                rows = slice(int(part[0]), int(part[-1]) + 1)
                self._raw[rows].copy_(pixels[rows], non_blocking=True)
        row_bytes = pixels[0].nbytes
        table[:, PITCH] = np.where(files_here, 3 * table[:, WIDTH], row_bytes // len(pixels[0]))
        table[:, ADDRESS] = self._raw.data_ptr() + row_bytes * np.arange(len(table))
        if files_here.any():
            address = self._addresses(table[files_here])
            table[files_here, ADDRESS] = address
            source = files.data_ptr() + table[files_here, OFFSET].astype(np.uint64)
            lengths = table[files_here, LENGTH].astype(np.uint64)
            # The engines decode one batch at a time, and a kernel may still read this buffer.
            self._done.synchronize()
            targets = self._targets[: len(address)]
            targets[:, 0] = address
            targets[:, 4] = table[files_here, PITCH]
            began = time.perf_counter()
            stream = torch.cuda.current_stream(self.device)
            try:
                self.engines.decode(source, lengths, targets, stream)
            finally:  # some files may have been decoded before an error
                self._done.record()
                self._decoded.reverse()
            self.seconds_per_image = (time.perf_counter() - began) / len(source)
        on_device = geometry.to(self.device, non_blocking=True)
        for bicubic in np.unique(table[:, BICUBIC]):  # both occur only with interpolation: random
            crop_resize(on_device, out, affine, bicubic=bool(bicubic))

    def _addresses(self, rows: np.ndarray) -> np.ndarray:
        """Allocate the decoded images of geometry rows; return device addresses, int64 [n]."""
        size = (rows[:, PITCH] * rows[:, HEIGHT]).astype(np.int64)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        total = int(size.sum())
        if total > len(self._decoded[0]):
            self._decoded[0] = self._decoded[0].new_empty(total + total // 4)
            # Synchronize, because kernels may still use the old buffer. It grows only a few times.
            torch.cuda.current_stream(self.device).synchronize()
        address: np.ndarray = self._decoded[0].data_ptr() + np.cumsum(size) - size
        return address
