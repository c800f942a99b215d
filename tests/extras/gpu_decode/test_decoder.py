"""GPU decoding uses the same crops as the CPU; pixels differ within a given bound."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from extras.gpu_decode import JpegEngineStage, geometry
from extras.gpu_decode.decoder import GpuDecoder
from extras.gpu_decode.geometry import engines_support, write_geometry
from pipeline.data import augment, decode
from pipeline.data.augment import Compose, sample_rng
from pipeline.data.dataset import FolderDataset
from pipeline.data.index import load_index
from pipeline.feed.batch import ImageFormat
from pipeline.feed.prefetcher import Prefetcher
from tests.helpers.drawings import draw_image
from tests.pipeline.loaders import open_loader
from tests.reliability.odd_images import encoded

TRAIN: list[Any] = [{"random_resized_crop": {"size": 48}}, "horizontal_flip"]
VAL: list[Any] = [{"resize": {"size": 56}}, {"center_crop": {"size": 48}}]
CROP: Any = {"random_resized_crop": {"size": 48, "interpolation": "random"}}
SQUASH: list[Any] = [{"resize": {"size": [48, 48], "interpolation": "bicubic"}}]
LISTS = {"train": TRAIN, "val": VAL, "random": [CROP, "horizontal_flip"], "squash": SQUASH}


def transform(entries: list[Any]) -> Compose:
    return Compose(augment.build_by_name(entries, augment.TRANSFORMS, key="augment.train"), 48)


def apply(row: np.ndarray, pixels: np.ndarray, side: int) -> np.ndarray:
    """Apply a row of the geometry to decoded pixels; return uint8 [side, side, 3]."""
    g = geometry
    left, top, right, bottom = row[g.CLIP_LEFT : g.CLIP_BOTTOM + 1].astype(int)
    x, y, scale_x, scale_y = row[g.SOURCE_LEFT : g.SCALE_Y + 1]
    size = round((right - left) / scale_x), round((bottom - top) / scale_y)
    interpolation = decode.INTERPOLATIONS[int(row[g.BICUBIC])]
    whole = decode.resize(pixels[top:bottom, left:right], size, interpolation)
    x0, y0 = round((x - left) / scale_x), round((y - top) / scale_y)
    made = whole[y0 : y0 + side, x0 : x0 + side]
    return made[:, ::-1] if row[g.MIRRORED] else made


def file_of(size: tuple[int, int]) -> decode.Picture:
    """Return the picture of an empty JPEG file."""
    return decode.Picture(decode.JpegFile(b"", size, decode.decode_pillow))


def row_of(picture: decode.Picture) -> np.ndarray:
    row = np.zeros(geometry.COLUMNS)
    assert write_geometry(picture, row)
    return row


@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("seed", range(6))
def test_geometry_equals_cpu_path(entries, seed):
    image = np.asarray(draw_image("waves", np.random.default_rng(seed)))
    chain = transform(entries)
    drawn = chain(file_of((image.shape[1], image.shape[0])), sample_rng(1, 2, seed))
    expected = chain(decode.Picture(image), sample_rng(1, 2, seed)).pixels()
    np.testing.assert_array_equal(apply(row_of(drawn), image, 48), expected)


def test_write_geometry_rejects_unsupported():
    picture, row = file_of((100, 80)), np.zeros(geometry.COLUMNS)
    assert not write_geometry(picture.cropped((-1, 0, 40, 20)), row)
    assert not write_geometry(picture.resized((50, 50)).resized((20, 20)), row)
    assert not write_geometry(picture.mirrored().resized((20, 20)), row)
    assert not write_geometry(decode.Picture(np.zeros((80, 100, 3), np.uint8)), row)


def with_segment(marker: int, content: bytes, *, length: int | None = None) -> bytes:
    """Insert a segment before the first scan of a plain file."""
    length = len(content) + 2 if length is None else length
    at = PLAIN.index(b"\xff\xda")
    return PLAIN[:at] + bytes((0xFF, marker)) + length.to_bytes(2, "big") + content + PLAIN[at:]


IMAGE = draw_image("plaid", np.random.default_rng(1))
PLAIN = encoded(IMAGE)
ADOBE = b"Adobe\0\x64\0\0\0\0"
USUAL: dict[str, bytes] = {
    **{f"sampling {number}": encoded(IMAGE, subsampling=number) for number in range(3)},
    "tail": PLAIN + b"tail",
    "table": with_segment(0xDB, bytes((3, *range(64)))),
    "Adobe, YCbCr": with_segment(0xEE, ADOBE + b"\1"),
}
UNUSUAL: dict[str, bytes] = {
    "progressive": encoded(IMAGE, progressive=True),
    "truncated": PLAIN[:-200],
    "4:1:1": PLAIN.replace(b"\1\x22\0", b"\1\x41\0"),
    "component IDs R, G, B": PLAIN.replace(b"\1\x22\0\2\x11\1\3", b"R\x22\0G\x11\1B"),
    "Adobe, RGB": with_segment(0xEE, ADOBE + b"\0"),
    "segment of length 0": with_segment(0xFE, b"", length=0),
    "short table": with_segment(0xDB, bytes(64)),
    "table 4": with_segment(0xDB, bytes((4, *range(64)))),
    "two frames": with_segment(0xC0, PLAIN[PLAIN.index(b"\xff\xc0") + 4 :][:15]),
    "one component in the scan": PLAIN.replace(b"\xff\xda\0\x0c\3", b"\xff\xda\0\x0c\1"),
    "12 bits": PLAIN.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
}


@pytest.mark.parametrize("kind", [*USUAL, *UNUSUAL])
def test_engines_support_only_usual_files(kind):
    data = (USUAL | UNUSUAL)[kind]
    assert bool(decode.color_size(data) and engines_support(data)) == (kind in USUAL)


LATE_CYCLES = 200_000_000  # GPU clock cycles, about 0.1 s


def gray_batch(level: int, side: int = 512) -> tuple[Any, ...]:
    """Return `GpuDecoder.make_batch` arguments for two files of one size; `out` is the fourth."""
    data, zeros = encoded(Image.new("RGB", (side, side), (level, level, level))), torch.zeros
    rows = zeros(2, geometry.COLUMNS, dtype=torch.float64).pin_memory()
    for number, row in enumerate(rows.numpy()):
        row[:] = row_of(transform(SQUASH)(file_of((side, side)), sample_rng(0, 0, number)))
        row[[geometry.LENGTH, geometry.WIDTH, geometry.HEIGHT]] = len(data), side, side
        row[geometry.OFFSET] = number * len(data)
    files, pixels = zeros(2, len(data), dtype=torch.uint8), zeros(2, 48, 48, 3, dtype=torch.uint8)
    files[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    out = zeros(2, 3, 48, 48, dtype=torch.uint8, device="cuda")
    return files, rows, pixels.pin_memory(), out, zeros(2, 3, device="cuda")


@pytest.mark.gpu
def test_gpu_decoder_waits_for_kernels_before_write(monkeypatch):
    """The engines write when called, not when the stream reaches the call."""
    from extras.gpu_decode import crop_kernel

    gpu_decoder, crop = GpuDecoder(torch.device("cuda", 0), 2), crop_kernel.crop_resize

    def late(*args, **options):
        torch.cuda._sleep(LATE_CYCLES)
        crop(*args, **options)

    levels = [10, 90, 170, 250]
    batches = [gray_batch(level) for level in levels]
    with torch.cuda.stream(torch.cuda.Stream()):
        freed = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
        address = freed.data_ptr()
        assert freed.sum() == 0
        gpu_decoder.make_batch(*gray_batch(250, 32))  # loads the kernels
        torch.cuda._sleep(LATE_CYCLES)
        total = freed.sum()
        del freed
        gpu_decoder.make_batch(*batches[0])
        assert any(memory.data_ptr() == address for memory in gpu_decoder._decoded)
        torch.cuda.synchronize()
        monkeypatch.setattr(crop_kernel, "crop_resize", late)
        for batch in batches:
            gpu_decoder.make_batch(*batch)
    torch.cuda.synchronize()
    assert total.item() == 0
    for level, batch in zip(levels, batches, strict=True):
        assert (batch[3].int() - level).abs().max() <= 2


def cropped(rows: np.ndarray, images: list[np.ndarray], device: torch.device) -> np.ndarray:
    """Return the kernel's output, uint8 [B, 48, 48, 3]."""
    from extras.gpu_decode.crop_kernel import crop_resize

    on_device = [torch.from_numpy(image.copy()).to(device) for image in images]
    rows[:, geometry.ADDRESS] = [image.data_ptr() for image in on_device]
    rows[:, geometry.PITCH] = [image.stride(0) for image in on_device]
    out = torch.empty(len(rows), 3, 48, 48, dtype=torch.uint8, device=device)
    unused = torch.zeros(2, 3, device=device)
    for bicubic in (False, True):
        crop_resize(torch.from_numpy(rows).to(device), out, unused, bicubic=bicubic)
    return out.permute(0, 2, 3, 1).cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
def test_crop_kernel_equals_cpu_path(entries):
    """Results differ by at most one level if both get the same pixels."""
    chain, count = transform(entries), 12
    # Use only the levels 0 and 255, where a bicubic filter overshoots most.
    images = [*np.random.default_rng(0).choice(np.uint8([0, 255]), (count // 2, 90, 130, 3))]
    images += [np.asarray(draw_image("waves", np.random.default_rng(i))) for i in range(count // 2)]
    rows = np.zeros((count, geometry.COLUMNS))
    for index, (row, image) in enumerate(zip(rows, images, strict=True)):
        row[:] = row_of(chain(file_of(image.shape[1::-1]), sample_rng(1, 2, index)))
    made = cropped(rows, images, torch.device("cuda", 0))
    for index, (ours, image) in enumerate(zip(made, images, strict=True)):
        expected = chain(decode.Picture(image), sample_rng(1, 2, index)).pixels().astype(int)
        assert abs(ours.astype(int) - expected).max() <= 1, index


@pytest.mark.gpu
@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("mode", ["gpu", "hybrid"])
def test_gpu_decode_batches_close_to_cpu_path(tmp_path, entries, mode):
    """Engines and libjpeg differ in inverse DCT and chroma upsampling, most in synthetic images."""
    names = ["waves", "dots", "rings", "plaid"] * 6
    images = [draw_image(name, np.random.default_rng(i)) for i, name in enumerate(names)]
    kinds = [{"quality": 95}, {"subsampling": 0}, {"progressive": True}, {"quality": 80}]
    files = [encoded(image, **kinds[i % 4]) for i, image in enumerate(images)]
    files += [encoded(images[0].convert("CMYK")), encoded(images[0], "PNG")]
    (tmp_path / "train" / "a").mkdir(parents=True)
    for i, data in enumerate(files):
        (tmp_path / "train" / "a" / f"{i:02d}.jpg").write_bytes(data)
    index = load_index(tmp_path / "train", key="data.train")
    plain = FolderDataset(index, transform(entries), seed=3)
    dataset = FolderDataset(index, transform(entries), seed=3)
    dataset.stage = JpegEngineStage(dataset)
    dataset.stage.set_decode_mode(mode)
    format = ImageFormat(torch.device("cuda", 0), mean=[0, 0, 0], std=[1 / 255] * 3)
    by_workers = 0
    options = {"start_method": "forkserver", "pinned": True, "in_use": 2}
    with open_loader(dataset, workers=1, local_batch_size=13, **options) as loader:
        loader.samples = lambda step: np.array([(0, 13 * step + row) for row in range(13)])
        prefetcher = Prefetcher(loader, format)
        for batch in prefetcher.batches(0, 2):
            ours = batch["image"].permute(0, 2, 3, 1).cpu().numpy()
            for image, (_, place) in zip(ours, batch.samples.tolist(), strict=True):
                if abs(image - plain[place]["image"]).max() < 0.01:
                    by_workers += 1
                    continue
                # Decode the whole image, because the CPU path may scale while decoding.
                whole = decode.Picture(decode.open_picture(plain.read(place), "pillow").pixels())
                expected = plain.transform(whole, sample_rng(3, 0, place)).pixels().astype(float)
                difference = abs(image - expected)
                assert difference.mean() < 2, place
                assert np.percentile(difference, 99) < 25, place
        prefetcher.close()
    # The engines do not support the progressive files, the CMYK file and the PNG.
    assert by_workers == 8 if mode == "gpu" else 8 < by_workers < 20
