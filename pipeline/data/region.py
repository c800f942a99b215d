"""Decode only a region of a JPEG with pipeline/data/region.c, compiled on first use.

The C code calls the libjpeg-turbo that Pillow is linked with, so it needs only a C compiler beyond
the Python packages, as torch.compile does. The library is kept in the user's cache and compiled
again when the source changes.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from PIL import Image

from conf.errors import UnreadableError, UserError
from conf.start import code_cache_dir

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
OK, DAMAGED = 0, 2  # status codes of region.c
not_installed = partial(UserError, "loader.decoder=region", "not installed")
# Functions that region.c calls, in its order. Before version 3, libjpeg-turbo decodes some regions
# incorrectly; it does not report its version, but only version 3 has the last function.
FUNCTIONS = tuple(
    "jpeg_std_error jpeg_CreateDecompress jpeg_mem_src jpeg_read_header jpeg_start_decompress "
    "jpeg_crop_scanline jpeg_skip_scanlines jpeg_read_scanlines jpeg_finish_decompress "
    "jpeg_destroy_decompress jpeg12_crop_scanline".split()
)


@cache
def load() -> Callable[..., bool]:
    """Return the decoder. Raises UserError with advice if it does not work on this machine.

    Its arguments are (file, (left, top, right, bottom), scale, result address). It returns whether
    it decoded the image region at 1 / scale to uint8 [bottom - top, right - left, 3]. It raises
    UnreadableError for a truncated file, and for damage found up to the end of the region.
    """
    pillow_advice = "install Pillow from pip or conda: this one is not linked with libjpeg-turbo 3"
    try:
        # A loaded library also exports the functions in its linked libraries.
        pillow = ctypes.CDLL(Image.core.__file__)
        functions = [ctypes.cast(getattr(pillow, name), ctypes.c_void_p) for name in FUNCTIONS]
        code = ctypes.CDLL(str(compile_library(code_cache_dir("native"))))
    except AttributeError:
        raise not_installed(pillow_advice) from None
    except OSError as error:
        raise not_installed(str(error)) from None
    addresses = (ctypes.c_void_p * len(functions))(*functions)
    if code.region_open(addresses):
        raise not_installed(pillow_advice)
    call = code.region_decode
    call.argtypes = [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]

    def decode(data: bytes, box: tuple[int, int, int, int], scale: int, result: int) -> bool:
        region = (ctypes.c_uint * 5)(*box, scale)  # not shared: threads may decode
        status = call(data, len(data), region, result)
        if status == DAMAGED:
            raise UnreadableError("the JPEG data is damaged or truncated")
        return bool(status == OK)

    return decode


def compile_library(folder: Path) -> Path:
    """Return the library in `folder`, compiled if missing. Raises OSError if this fails."""
    # Different machines can share a home directory.
    key = SOURCE.read_bytes() + platform.platform().encode()
    path = folder / f"region-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if path.is_file():
        return path
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"install a C compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        output = Path(temporary) / "region.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(output), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            reason, _, _ = done.stderr.strip().partition("\n")
            raise OSError(f"{compiler} failed ({reason}); install a working C compiler")
        os.replace(output, path)  # atomic, because several processes may do this concurrently
    return path
