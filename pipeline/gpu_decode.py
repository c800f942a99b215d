"""JPEG bytes to normalised crops on the GPU: the decoder engines of the chip, then one kernel that crops and resizes.

Journey of a batch, 2-5 for `loader.decoder=gpu` and `hybrid`: a worker reads a file, draws its augmentation and writes bytes
and geometry into the slot; here nvJPEG decodes a batch on the hardware engines (20,800 images/s on an H200, one host thread that
waits without the interpreter lock), and `crop_resize` makes the batch: float [B, 3, S, S], normalised.

The engines take baseline YCbCr JPEGs. Whatever else is in the batch was decoded by a worker and goes through the same kernel.
"""

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Columns of a slot's geometry, float64 [B, COLUMNS]; whole numbers below 2**53 are exact in it.
LENGTH, OFFSET, WIDTH, HEIGHT = 0, 1, 2, 3  # of the file in the slot's bytes; LENGTH 0: the row's pixels are decoded already
CLIP_LEFT, CLIP_TOP, CLIP_RIGHT, CLIP_BOTTOM = 4, 5, 6, 7  # the pixels that may be used
SOURCE_LEFT, SOURCE_TOP, SCALE_X, SCALE_Y = 8, 9, 10, 11  # source = SOURCE + SCALE * (target pixel + 0.5)
MIRRORED = 12
ADDRESS, PITCH = 13, 14  # of the decoded pixels on the device, filled in by the training process
COLUMNS = 16

ALIGNMENT = 256


class EngineError(RuntimeError):
    """The engines refused a batch."""


class _Image(ctypes.Structure):
    """nvjpegImage_t: device pointers and pitches of up to four planes; interleaved RGB uses the first."""

    _fields_ = [("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4)]


class Engines:
    """nvJPEG's batched decoder on the hardware engines, called through its C interface.

    One call decodes a batch, and ctypes lets go of the interpreter lock for its length; the per-image objects of the Python
    packages over the same library cost the training process milliseconds a batch.

    Args:
        library: from `find_library`.

    Raises:
        EngineError: this GPU has no JPEG engines, or the driver does not offer them.
    """

    HARDWARE_BACKEND, RGB_INTERLEAVED = 3, 5  # NVJPEG_BACKEND_HARDWARE, NVJPEG_OUTPUT_RGBI

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(
            library.nvjpegCreateEx(self.HARDWARE_BACKEND, None, None, ctypes.c_uint(0), ctypes.byref(self._handle)), "nvjpegCreateEx"
        )
        self._check(library.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state)), "nvjpegJpegStateCreate")
        self._count = 0

    def decode(self, files: np.ndarray, lengths: np.ndarray, targets: np.ndarray, stream: torch.cuda.Stream) -> None:
        """Decode a batch on `stream`; the caller keeps files and targets alive until it is done there.

        Args:
            files: uint64 [n] host addresses of the files.
            lengths: uint64 [n] bytes.
            targets: uint64 [n, 8] nvjpegImage_t: device address in column 0, bytes a row in column 4.

        Raises:
            EngineError: a file is damaged or of a kind the engines do not take.
        """
        n = len(files)
        if n != self._count:
            initialize = self.library.nvjpegDecodeBatchedInitialize
            self._check(initialize(self._handle, self._state, n, 1, self.RGB_INTERLEAVED), "nvjpegDecodeBatchedInitialize")
            self._count = n
        status = self.library.nvjpegDecodeBatched(
            self._handle, self._state, _pointer(files), _pointer(lengths), _pointer(targets), ctypes.c_void_p(stream.cuda_stream)
        )
        if status:
            self._count = 0
        self._check(status, "nvjpegDecodeBatched")

    @staticmethod
    def _check(status: int, call: str) -> None:
        if status:
            raise EngineError(f"{call} gave status {status}")


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def find_library() -> ctypes.CDLL | None:
    """nvJPEG as torchvision's CUDA wheel, NVIDIA's wheel or the CUDA toolkit bring it; None where there is none."""
    folders = [Path(p) for p in sys.path if p]
    vision = importlib.util.find_spec("torchvision")
    if vision is not None and vision.origin is not None:
        folders.insert(0, Path(vision.origin).parent.parent)
    found = [str(path) for folder in folders for pattern in ("torchvision.libs/libnvjpeg*.so*", "nvidia/*/lib/libnvjpeg.so*")
             for path in sorted(folder.glob(pattern))]  # fmt: skip
    for name in [*found, "libnvjpeg.so.13", "libnvjpeg.so.12", "/usr/local/cuda/lib64/libnvjpeg.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def crop_resize(geometry: Tensor, out: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Make a batch from decoded images of any sizes: crop, resize bilinear and antialiased, mirror, normalise.

    Agrees with `decode.resize` to one level of 255: both weigh with the same triangle; this one rounds once, that one after
    each direction.

    Args:
        geometry: float64 [B, COLUMNS] on the device, ADDRESS and PITCH filled in.
        out: float [B, 3, S, S], channels_last or contiguous.
        scale, shift: float32 [3] on the device: level * scale + shift.
    """
    import triton  # noqa: PLC0415 - comes with torch's CUDA builds only

    batch, _, size, _ = out.shape
    block = 16
    tiles = triton.cdiv(size, block)
    _kernel()[(batch, tiles, tiles)](
        geometry, out, scale, shift, size, *out.stride(), COLUMNS=COLUMNS, BLOCK=block, num_warps=4
    )  # fmt: skip


@cache
def _kernel() -> Any:
    """The Triton kernel; defined on first use, because Triton is absent beside a CPU torch."""
    import triton  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415

    @triton.jit
    def kernel(geometry, out, scale, shift, size, stride_b, stride_c, stride_y, stride_x, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        image = tl.program_id(0)
        row = geometry + image * COLUMNS
        clip_left, clip_top = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
        clip_right, clip_bottom = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
        left, top = tl.load(row + 8).to(tl.float32), tl.load(row + 9).to(tl.float32)
        scale_x, scale_y = tl.load(row + 10).to(tl.float32), tl.load(row + 11).to(tl.float32)
        mirrored = tl.load(row + 12) > 0.5
        source = tl.load(row + 13).to(tl.int64).to(tl.pointer_type(tl.uint8))
        pitch = tl.load(row + 14).to(tl.int64)

        y = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        from_x = tl.where(mirrored, size - 1 - x, x)
        # As torch weighs: a triangle of half-width max(scale, 1) around the source point, cut at the clip and made to sum to 1.
        width_x, width_y = tl.maximum(scale_x, 1.0), tl.maximum(scale_y, 1.0)
        centre_x = left + scale_x * (from_x.to(tl.float32) + 0.5)
        centre_y = top + scale_y * (y.to(tl.float32) + 0.5)
        first_x = tl.maximum((centre_x - width_x + 0.5).to(tl.int32), clip_left)
        first_y = tl.maximum((centre_y - width_y + 0.5).to(tl.int32), clip_top)
        last_x = tl.minimum((centre_x + width_x + 0.5).to(tl.int32), clip_right)
        last_y = tl.minimum((centre_y + width_y + 0.5).to(tl.int32), clip_bottom)
        taps_x = (2 * width_x).to(tl.int32) + 2
        taps_y = (2 * width_y).to(tl.int32) + 2

        red = tl.zeros([BLOCK, BLOCK], tl.float32)
        green = tl.zeros([BLOCK, BLOCK], tl.float32)
        blue = tl.zeros([BLOCK, BLOCK], tl.float32)
        total_y = tl.zeros([BLOCK], tl.float32)
        total_x = tl.zeros([BLOCK], tl.float32)
        for i in range(taps_x):
            place_x = first_x + i
            total_x += tl.where(place_x < last_x, tl.maximum(1.0 - tl.abs(place_x + 0.5 - centre_x) / width_x, 0.0), 0.0)
        for j in range(taps_y):
            place_y = first_y + j
            weight_y = tl.where(place_y < last_y, tl.maximum(1.0 - tl.abs(place_y + 0.5 - centre_y) / width_y, 0.0), 0.0)
            total_y += weight_y
            line = source + place_y.to(tl.int64) * pitch
            for i in range(taps_x):
                place_x = first_x + i
                weight_x = tl.where(place_x < last_x, tl.maximum(1.0 - tl.abs(place_x + 0.5 - centre_x) / width_x, 0.0), 0.0)
                weight = weight_y[:, None] * weight_x[None, :]
                pixel = line[:, None] + place_x[None, :] * 3
                good = weight > 0.0
                red += weight * tl.load(pixel, mask=good, other=0).to(tl.float32)
                green += weight * tl.load(pixel + 1, mask=good, other=0).to(tl.float32)
                blue += weight * tl.load(pixel + 2, mask=good, other=0).to(tl.float32)
        norm = 1.0 / (total_y[:, None] * total_x[None, :])
        target = out + image.to(tl.int64) * stride_b + y[:, None] * stride_y + x[None, :] * stride_x
        inside = (y < size)[:, None] & (x < size)[None, :]
        # Rounded to a level, as the CPU path's bytes are.
        red, green, blue = tl.floor(red * norm + 0.5), tl.floor(green * norm + 0.5), tl.floor(blue * norm + 0.5)
        tl.store(target, red * tl.load(scale) + tl.load(shift), mask=inside)
        tl.store(target + stride_c, green * tl.load(scale + 1) + tl.load(shift + 1), mask=inside)
        tl.store(target + 2 * stride_c, blue * tl.load(scale + 2) + tl.load(shift + 2), mask=inside)

    return kernel
