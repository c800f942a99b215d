"""Decode only a region of a JPEG: pipeline/region.c, compiled at its first use.

The C code calls the libjpeg-turbo that Pillow is linked with. So all it needs beyond the Python
packages is a C compiler, which torch.compile needs as well. The machine code is kept in the user's
cache; it is compiled again when the source changes.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from PIL import Image

from conf.files import default_cache_dir

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
# Fields of `struct functions` in region.c.
FUNCTIONS = (
    "jpeg_std_error",
    "jpeg_CreateDecompress",
    "jpeg_mem_src",
    "jpeg_read_header",
    "jpeg_start_decompress",
    "jpeg_crop_scanline",
    "jpeg_skip_scanlines",
    "jpeg_read_scanlines",
    "jpeg_destroy_decompress",
)
# Older versions decode some regions incorrectly. The library cannot be asked for its version.
NEW_IN_3 = "jpeg12_crop_scanline"


class _Library(ctypes.Structure):
    """`struct library` of region.c."""

    _fields_ = [
        ("functions", ctypes.c_void_p * len(FUNCTIONS)),
        ("version", ctypes.c_int),
        ("size", ctypes.c_size_t),
    ]


# (file, left, top, right, bottom, scale, address of the result) -> whether it was decoded. The
# result is uint8 [bottom - top, right - left, 3]: a region of the image at 1 / scale.
Decode = Callable[[bytes, tuple[int, int, int, int], int, int], bool]


@cache
def load() -> Decode | str:
    """Return the decoder, or what to do to get it."""
    try:
        # A library also gives access to the functions of the libraries that it is linked with.
        pillow = ctypes.CDLL(Image.core.__file__)
        addresses = [
            ctypes.cast(getattr(pillow, name), ctypes.c_void_p).value
            for name in (*FUNCTIONS, NEW_IN_3)
        ]
        code = ctypes.CDLL(str(compiled(default_cache_dir() / "native")))
    except AttributeError:
        return "install Pillow from pip or conda: this one is not linked with libjpeg-turbo 3"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"install a C compiler that works: {error.cmd[0]} failed ({lines[0]})"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    library = _Library((ctypes.c_void_p * len(FUNCTIONS))(*addresses[:-1]))
    if code.region_open(ctypes.byref(library)):
        return "install Pillow from pip or conda: its libjpeg-turbo has an unknown interface"
    call, void = code.region_decode, ctypes.c_void_p
    call.argtypes = [void, ctypes.c_char_p, ctypes.c_ulong, void, void]

    def decode(data: bytes, box: tuple[int, int, int, int], scale: int, result: int) -> bool:
        region = (ctypes.c_uint * 5)(*box, scale)  # not shared: threads may decode
        return call(ctypes.byref(library), data, len(data), region, result) == 0

    return decode


def compiled(folder: Path) -> Path:
    """Return the path of the machine code in `folder`; compile it if it is missing or damaged.

    Raises:
        OSError: there is no compiler, or `folder` cannot be used.
        subprocess.SubprocessError: the compiler fails.
    """
    source = SOURCE.read_bytes()
    # Different machines can share a home directory.
    key = repr((source, platform.system(), platform.machine(), platform.libc_ver()))
    name = f"region-{_digest(key.encode())}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"remove {folder}: other users can replace the code in it")
    for path in folder.glob(f"{name}-*.so"):
        # Loading half a file, as of a home directory that was copied in part, kills the process.
        if path.is_file() and path.stem == f"{name}-{_digest(path.read_bytes())}":
            return path
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"install a C compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        output = Path(made) / "region.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(output), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        path = folder / f"{name}-{_digest(output.read_bytes())}.so"
        os.replace(output, path)  # several processes may do this at the same time
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
