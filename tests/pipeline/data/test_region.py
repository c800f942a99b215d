"""The region decoder has Pillow's pixels, no access outside its memory, and a safe cache."""

import itertools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conf.errors import UnreadableError, UserError
from conf.start import code_cache_dir
from pipeline.data import decode, region
from tests.helpers.drawings import draw_image
from tests.helpers.processes import run_command, run_python
from tests.reliability.odd_images import DAMAGED, FILES, encoded

needs_compiler = pytest.mark.skipif(
    decode.resolve("auto") != "region", reason="no C compiler, or no libjpeg-turbo 3 in Pillow"
)


@needs_compiler
def test_region_decoder_every_region():
    """Chroma of the last columns is interpolated only if the region is wide enough."""
    for data in FILES:
        picture = decode.open_picture(data, "region")
        if picture.size[0] > 34:
            continue
        whole = decode.open_picture(data, "pillow").pixels()
        for left, right in itertools.combinations(range(picture.size[0] + 1), 2):
            box = left, 3, right, 8
            made = picture.resized((right - left, 5), box).pixels()
            np.testing.assert_array_equal(made, whole[3:8, left:right], f"{box}")


IMAGE = draw_image("plaid", np.random.default_rng(0)).resize((320, 240))
JPEG, GRAY = encoded(IMAGE), encoded(IMAGE.convert("L"))
MIDDLE = len(JPEG) // 2


@needs_compiler
@pytest.mark.parametrize(
    "data",
    [
        JPEG[:MIDDLE] + b"\xff\xd9",  # an interrupted download
        JPEG[:MIDDLE] + bytes(len(JPEG) - MIDDLE),
        JPEG[:MIDDLE] + bytes(len(JPEG) - MIDDLE - 2) + b"\xff\xd9",
        JPEG[:MIDDLE] + JPEG[MIDDLE + 200 :],
        GRAY[:-3000] + b"\xff\xd9",
    ],
)
def test_region_decoder_rejects_damaged_data(data):
    """Pillow would return gray or wrong pixels for most of them."""
    with pytest.raises(UnreadableError, match=DAMAGED):
        decode.open_picture(data, "region").pixels()


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(7500)
def test_region_decoder_memory_safety(tmp_path):
    """Decode 100,000 files, with code that checks all memory access if the compiler supports it."""
    compiler = next(filter(None, map(shutil.which, region.COMPILERS)), "")
    checks, libraries = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], []
    for name in ("libasan.so", "libubsan.so"):
        libraries.append(run_command([compiler, f"-print-file-name={name}"]).stdout.strip())
    if not all(map(os.path.isfile, libraries)):
        checks, libraries = [], []
    code = tmp_path / "region.so"
    command = [compiler, "-g", "-shared", "-fPIC", *checks, "-o", str(code), str(region.SOURCE)]
    run_command(command).check_returncode()
    program = (
        "import sys; from pathlib import Path; from pipeline.data import region; "
        "region.compile_library = lambda folder: Path(sys.argv[1]); "
        "from tests.reliability.odd_images import load_mutated; "
        "load_mutated(range(200_000, 300_000))"
    )
    checked = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    result = run_python("-c", program, code, seconds=7200, **checked)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_compiler
@pytest.mark.parametrize("box", [(0, 0, 132, 150), (0, 0, 131, 151), (5, 5, 5, 9), (9, 5, 8, 9)])
def test_region_decoder_rejects_outside_box(box):
    decoder, result = region.load(), np.zeros(132 * 151 * 3, np.uint8)
    assert not decoder(FILES[0], box, 1, result.ctypes.data)
    assert not result.any()


@pytest.fixture
def fresh(cache: Path) -> Iterator[Path]:
    """Use an empty cache directory, without a loaded decoder."""
    region.load.cache_clear()
    decode.resolve.cache_clear()
    yield cache / "native"
    region.load.cache_clear()
    decode.resolve.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [
        (None, r"install a C compiler \(cc, gcc, clang\)"),
        ("echo 'cannot find ld' >&2; exit 1", r"cc failed \(cannot find ld\)"),
    ],
)
def test_resolve_decoder_without_compiler(compiler, problem, fresh, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler is not None:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "cc").chmod(0o755)
    assert decode.resolve("auto") == decode.resolve("auto") == "pillow"
    assert caplog.text.count("decoding with pillow takes up to twice as long: ") == 1
    with pytest.raises(UserError, match=f"loader.decoder=region: not installed; .*{problem}"):
        decode.resolve("region")
    assert os.listdir(fresh) == []


@needs_compiler
def test_region_load_compiles_once_into_safe_folder(fresh):
    fresh.write_text("a file")
    with pytest.raises(UserError, match="File exists"):
        region.load()
    fresh.unlink()
    path = region.compile_library(code_cache_dir("native"))
    written = path.stat().st_mtime_ns
    assert (region.compile_library(fresh), path.stat().st_mtime_ns) == (path, written)
    assert os.listdir(fresh) == [path.name]
    fresh.chmod(0o777)
    with pytest.raises(UserError, match="other users can replace the code"):
        region.load()


@needs_compiler
def test_region_decoder_two_threads():
    """With a shared box, one of them once wrote past its array, which ends the process."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise).resize((1200, 1200)), quality=95)
    boxes = [(0, 0, 200, 200), (100, 100, 1100, 1100)] * 30
    whole = decode.decode_pillow(data, (0, 0, 1200, 1200), 1)
    decoder = region.load()

    def check(box):
        left, top, right, bottom = box
        pixels = np.empty((bottom - top, right - left, 3), np.uint8)
        assert decoder(data, box, 1, pixels.ctypes.data)
        np.testing.assert_array_equal(pixels, whole[top:bottom, left:right])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, boxes))
