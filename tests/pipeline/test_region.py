"""The region decoder on damaged files: Pillow's pixels, or no answer."""

import io
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conf.schema import UserError
from pipeline import decode, region
from tests.drawings import draw_image

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, region.COMPILERS)) or isinstance(region.load(), str),
    reason="no C compiler, or no libjpeg-turbo 3 in Pillow",
)


def files() -> list[bytes]:
    """Draw small files of every kind; odd sizes end in the middle of a block."""
    options = (
        dict(quality=90),
        dict(subsampling=0),
        dict(subsampling=1, optimize=True),
        dict(progressive=True),
        dict(progressive=True, subsampling=0, quality=30),
        dict(restart_marker_blocks=3),
        dict(restart_marker_rows=1, subsampling=0),
    )
    made = []
    for number, (width, height) in enumerate([(131, 150), (97, 64), (34, 70), (18, 9)]):
        image = draw_image("plaid", np.random.default_rng(number)).resize((width, height))
        variants = [(image, chosen) for chosen in options]
        variants += [(image.convert("L"), {}), (image.convert("CMYK"), {})]
        for variant, chosen in variants:
            buffer = io.BytesIO()
            variant.save(buffer, "JPEG", **chosen)
            made.append(buffer.getvalue())
    return made


FILES = files()


def segments(data: bytes) -> list[tuple[int, int]]:
    """Return start and end of the marker segments before the pixels."""
    found, at = [], 2
    while data[at] == 0xFF and data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((at, end))
        at = end
    return [*found, (at, at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"))]


def damage_header(data: bytes, rng: random.Random) -> bytes:
    """Change the size or the sampling factors."""
    made = bytearray(data)
    at = next(at + 5 for at, _ in segments(data) if data[at + 1] in (0xC0, 0xC1, 0xC2))
    if rng.random() < 0.5:
        made[at : at + 4] = bytes((0, rng.randrange(160), 0, rng.randrange(160)))
    else:
        factors = (0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x13, 0x31, 0x42)
        made[at + 6 + 3 * rng.randrange(3)] = rng.choice(factors)
    return bytes(made)


def damage_segments(data: bytes, rng: random.Random) -> bytes:
    """Repeat, remove or change a segment before the pixels, such as a table."""
    start, end = rng.choice(segments(data))
    segment = bytearray(data[start:end])
    segment[rng.randrange(len(segment))] = rng.randrange(256)
    middle = rng.choice([data[start:end] * 2, b"", bytes(segment)])
    return data[:start] + middle + data[end:]


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 4, 16])):
        made[rng.randrange(2, len(data))] ^= 1 << rng.randrange(8)
    at = rng.randrange(2, len(data))
    if rng.random() < 0.3:
        made[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
    return bytes(made)


def splice(data: bytes, rng: random.Random) -> bytes:
    """Replace a part by a part of the same or another kind of file."""
    other = rng.choice(FILES)
    at, place = rng.randrange(len(other)), rng.randrange(2, len(data))
    end = place + rng.randrange(200)
    return data[:place] + other[at : at + rng.randrange(200)] + data[end:]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(2, len(data))] + rng.choice([b"", b"\xff\xd9"])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in one or two ways; the header, which must be intact for that, comes first."""
    ways = (damage_header, damage_segments, damage_bytes, splice, cut)
    for number in sorted(rng.sample(range(len(ways)), rng.choice([1, 1, 2]))):
        data = ways[number](data, rng)
    return data


def compare(data: bytes, rng: random.Random) -> str:
    """Decode a random region; return what the region decoder and Pillow say about the file."""
    try:
        image, size = decode.open_image(data), decode.colour_size(data)
    except Exception:
        return "no header"
    if size is not None and size != image.size:
        with pytest.raises(decode.UnreadableError):  # two headers, which the decoders refuse
            decode.open_picture(data, "region").pixels()
        return "two sizes"
    scale = rng.choice([s for s in (1, 1, 2, 4, 8) if s <= min(image.size)])
    width, height = -(-image.width // scale), -(-image.height // scale)
    left, top = rng.randrange(width), rng.randrange(height)
    box = left, top, rng.randint(left + 1, width), rng.randint(top + 1, height)
    # A wrong size in a header must neither fill the memory nor take minutes of Pillow's time.
    if image.width * image.height > 10**6 or image.mode != "RGB":
        return "another kind"
    pixels = decode.decode_region(data, box, scale)
    if pixels is None:
        return "left to Pillow"
    try:
        expected = decode.decode_pillow(data, box, scale)
    except OSError:
        return "damaged below the region"
    np.testing.assert_array_equal(pixels, expected, f"{box=} {scale=}")
    return "equal"


def fuzz(number: int, seed: int) -> dict[str, int]:
    """Count the outcomes of damaged files."""
    rng = random.Random(seed)
    return dict(Counter(compare(damaged(rng.choice(FILES), rng), rng) for _ in range(number)))


@needs_compiler
def test_every_region_of_a_small_file() -> None:
    """Chroma of the last columns is interpolated only in a region that is wide enough."""
    for data in FILES:
        picture = decode.open_picture(data, "region")
        if picture.size[0] > 34:
            continue
        whole = decode.open_picture(data, "pillow").pixels()
        for left, right in itertools.combinations(range(picture.size[0] + 1), 2):
            box = left, 3, right, 8
            made = picture.resized((right - left, 5), box).pixels()
            np.testing.assert_array_equal(made, whole[3:8, left:right], f"{box}")


@needs_compiler
def test_damaged_files() -> None:
    found = fuzz(2000, 0)
    assert found["equal"] > 300 and found["left to Pillow"] > 300


@needs_compiler
@pytest.mark.slow
def test_damaged_files_and_memory(tmp_path: Path) -> None:
    """100,000 files, with code that checks every access to memory if the compiler can add it."""
    compiler = next(filter(None, map(shutil.which, region.COMPILERS)), "")
    checks, libraries = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True
        )
        libraries.append(found.stdout.strip())
    if not all(map(os.path.isfile, libraries)):
        checks, libraries = [], []
    code = tmp_path / "region.so"
    command = [compiler, "-g", "-shared", "-fPIC", *checks, "-o", str(code), str(region.SOURCE)]
    subprocess.run(command, check=True)
    program = (
        "import sys; from pathlib import Path; from pipeline import region; "
        "region.compiled = lambda folder: Path(sys.argv[1]); "
        "from tests.pipeline.test_region import fuzz; print(fuzz(100_000, 1))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(code)],
        env=os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=region.SOURCE.parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@needs_compiler
def test_a_file_that_ends_below_the_region_is_an_error() -> None:
    picture = decode.open_picture(FILES[0][:-100], "region").resized((9, 9), (0, 0, 9, 9))
    with pytest.raises(decode.UnreadableError, match="truncated"):
        picture.pixels()


@needs_compiler
@pytest.mark.parametrize("box", [(0, 0, 132, 150), (0, 0, 131, 151), (5, 5, 5, 9), (9, 5, 8, 9)])
def test_a_box_outside_the_image_writes_nothing(box: decode.Box) -> None:
    decoder, result = region.load(), np.zeros(132 * 151 * 3, np.uint8)
    assert not isinstance(decoder, str)
    assert not decoder(FILES[0], box, 1, result.ctypes.data)
    assert not result.any()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no decoder in memory."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    region.load.cache_clear()
    yield cache / "imagenet-trainer" / "native"
    region.load.cache_clear()


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler_another_decoder_is_used(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    problems = {
        r"install a C compiler \(cc, gcc, clang\)": "kill $$",
        "no message": "echo 'cannot find ld' >&2; exit 1",
        r"cc failed \(cannot find ld\)": "",
    }
    for problem, following in problems.items():
        assert decode.resolve("auto") != "region"
        with pytest.raises(UserError, match=f"loader.decoder=region: not installed; .*{problem}"):
            decode.resolve("region")
        script(tmp_path / "bin", "cc", following)
        region.load.cache_clear()
    assert os.listdir(fresh) == []


@needs_compiler
def test_a_cache_that_cannot_be_used(fresh: Path) -> None:
    def problem() -> str:
        region.load.cache_clear()
        assert decode.resolve("auto") != "region"
        return str(region.load())

    fresh.parent.mkdir(parents=True)
    fresh.write_text("a file")
    assert "File exists" in problem()
    fresh.unlink()
    fresh.mkdir()
    fresh.chmod(0o777)
    assert "other users can replace the code" in problem()


@needs_compiler
def test_machine_code_is_compiled_once(fresh: Path) -> None:
    path = region.compiled(fresh)
    written = path.stat().st_mtime_ns
    assert region.compiled(fresh) == path and path.stat().st_mtime_ns == written
    assert os.listdir(fresh) == [path.name]


TWO_THREADS = """
import io, threading
import numpy as np
from PIL import Image
from pipeline.decode import decode_pillow, decode_region
noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
buffer = io.BytesIO()
Image.fromarray(noise).resize((1200, 1200)).save(buffer, "JPEG", quality=95)
boxes = [(0, 0, 200, 200), (100, 100, 1100, 1100)]
expected = [decode_pillow(buffer.getvalue(), box, 1) for box in boxes]
wrong = []

def work(number, times):
    for _ in range(times):
        found = decode_region(buffer.getvalue(), boxes[number], 1)
        wrong.extend([number] * (not np.array_equal(found, expected[number])))

threads = [threading.Thread(target=work, args=pair) for pair in ((0, 200), (1, 60))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""


@needs_compiler
def test_two_threads_decode_at_the_same_time() -> None:
    """In a process of its own: a shared box once made one of them write past its array."""
    subprocess.run([sys.executable, "-c", TWO_THREADS], check=True)
