"""The GPU path: the crops of the CPU path, and its pixels within a stated bound."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline.gpu import geometry
from pipeline.gpu.decoder import (
    EngineError,
    Engines,
    EngineUpload,
    GpuDecoder,
    why_no_engines,
)
from pipeline.gpu.encoded import first_on_pixels
from pipeline.gpu.geometry import engines_support, write_geometry

from pipeline import augment, decode
from pipeline.augment import Compose, sample_rng
from pipeline.batch import ImageFormat
from pipeline.dataset import Dataset, FolderDataset
from pipeline.index import load_index
from pipeline.loader import Loader, WorkerPool, start_source
from pipeline.prefetcher import Prefetcher
from pipeline.shared import Pinned
from tests.drawings import draw_image
from tests.engines import PillowEngines
from tests.reliability.odd_images import encoded, exif

TRAIN: list[Any] = [{"random_resized_crop": {"size": 48}}, "horizontal_flip"]
VAL: list[Any] = [{"resize": {"size": 56}}, {"center_crop": {"size": 48}}]
RANDOM: list[Any] = [
    {"random_resized_crop": {"size": 48, "interpolation": "random"}},
    "horizontal_flip",
]
SQUASH: list[Any] = [{"resize": {"size": [48, 48], "interpolation": "bicubic"}}]
LISTS = {"train": TRAIN, "val": VAL, "random": RANDOM, "squash": SQUASH}


def transform(entries: list[Any]) -> Compose:
    return Compose(augment.build(entries, augment.TRANSFORMS, key="augment.train"), 48)


def apply(row: np.ndarray, pixels: np.ndarray, side: int) -> np.ndarray:
    """What a row of the geometry stands for, uint8 [side, side, 3]."""
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
    """A picture of a JPEG without content."""
    return decode.Picture(decode.JpegFile(b"", size, decode.decode_pillow))


def row_of(picture: decode.Picture) -> np.ndarray:
    row = np.zeros(geometry.COLUMNS)
    assert write_geometry(picture, row)
    return row


@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_geometry_is_that_of_the_cpu_path(entries: list[Any], seed: int) -> None:
    image = np.asarray(draw_image("waves", np.random.default_rng(seed)))
    chain = transform(entries)
    drawn = chain(file_of((image.shape[1], image.shape[0])), sample_rng(1, 2, seed))
    expected = chain(decode.Picture(image), sample_rng(1, 2, seed)).pixels()
    np.testing.assert_array_equal(apply(row_of(drawn), image, 48), expected)


def test_crop_before_a_resize_limits_what_is_read() -> None:
    image = black_and_white(0)
    drawn = file_of((130, 90)).cropped((11, 5, 101, 75)).resized((48, 48), (9, 2, 70, 63))
    expected = decode.Picture(image[5:75, 11:101]).resized((48, 48), (9, 2, 70, 63)).pixels()
    np.testing.assert_array_equal(apply(row_of(drawn), image, 48), expected)


def black_and_white(seed: int) -> np.ndarray:
    """Pixels of 0 and 255 only, where a bicubic filter overshoots most: uint8 [90, 130, 3]."""
    return np.random.default_rng(seed).choice(np.array([0, 255], np.uint8), (90, 130, 3))


def test_order_of_crop_and_mirror_is_kept() -> None:
    cropped = file_of((100, 80)).mirrored().cropped((10, 0, 40, 20))
    row = row_of(cropped)
    assert (row[geometry.SOURCE_LEFT], cropped.size, row[geometry.MIRRORED]) == (60, (30, 20), 1)
    assert row_of(cropped.mirrored())[geometry.MIRRORED] == 0


def test_geometry_that_the_kernel_cannot_make() -> None:
    picture, row = file_of((100, 80)), np.zeros(geometry.COLUMNS)
    assert not write_geometry(picture.cropped((-1, 0, 40, 20)), row)
    assert not write_geometry(picture.resized((50, 50)).resized((20, 20)), row)
    assert not write_geometry(picture.mirrored().resized((20, 20)), row)
    assert not write_geometry(decode.Picture(np.zeros((80, 100, 3), np.uint8)), row)


def test_lists_that_need_pixels_of_every_image() -> None:
    grey: Any = {"v2.RandomGrayscale": {"p": 0.5}}
    assert first_on_pixels(transform([*TRAIN, "rand_augment"])) is None  # the GPU applies it
    assert first_on_pixels(transform([*TRAIN, "rand_augment", grey])) == 2
    assert first_on_pixels(transform([{"random_crop": {"size": 500, "padding": 200}}])) == 0


def with_segment(data: bytes, marker: int, content: bytes, *, length: int | None = None) -> bytes:
    """Insert a segment before the first scan."""
    length = len(content) + 2 if length is None else length
    segment = bytes((0xFF, marker)) + length.to_bytes(2, "big") + content
    at = data.index(b"\xff\xda")
    return data[:at] + segment + data[at:]


IMAGE = draw_image("plaid", np.random.default_rng(1))
ADOBE = b"Adobe\0\x64\0\0\0\0"
USUAL: dict[str, bytes] = {
    **{f"sampling {number}": encoded(IMAGE, subsampling=number) for number in range(3)},
    "tail": encoded(IMAGE) + b"tail",
    "table": with_segment(encoded(IMAGE), 0xDB, bytes((3, *range(64)))),
    "Adobe, YCbCr": with_segment(encoded(IMAGE), 0xEE, ADOBE + b"\1"),
}
UNUSUAL: dict[str, bytes] = {
    "progressive": encoded(IMAGE, progressive=True),
    "grey": encoded(IMAGE.convert("L")),
    "PNG": encoded(IMAGE, "PNG"),
    "truncated": encoded(IMAGE)[:-200],
    "4:1:1": encoded(IMAGE).replace(b"\1\x22\0", b"\1\x41\0"),
    "Adobe, RGB": with_segment(encoded(IMAGE), 0xEE, ADOBE + b"\0"),
    "segment of length 0": with_segment(encoded(IMAGE), 0xFE, b"", length=0),
    "short table": with_segment(encoded(IMAGE), 0xDB, bytes(64)),
    "table 4": with_segment(encoded(IMAGE), 0xDB, bytes((4, *range(64)))),
    "two frames": with_segment(
        encoded(IMAGE), 0xC0, encoded(IMAGE)[encoded(IMAGE).index(b"\xff\xc0") + 4 :][:15]
    ),
    "one component in the scan": encoded(IMAGE).replace(b"\xff\xda\0\x0c\3", b"\xff\xda\0\x0c\1"),
    "12 bits": encoded(IMAGE).replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
}


@pytest.mark.parametrize("kind", [*USUAL, *UNUSUAL])
def test_engines_get_only_usual_files(kind: str) -> None:
    data = (USUAL | UNUSUAL)[kind]
    assert bool(decode.colour_size(data) and engines_support(data)) == (kind in USUAL)


# Through workers, without a GPU: files and geometry arrive in the slot; other rows are decoded.


def loader_of(
    dataset: Dataset, *, share: float, file_bytes: int, batch: int = 8
) -> Iterator[Loader]:
    source = start_source(dataset, batch_size=batch, slots=4, file_bytes=file_bytes)
    with WorkerPool([source], workers=1) as pool:
        loader = Loader(
            pool,
            0,
            lambda step: np.stack([np.zeros(batch, int), np.arange(batch) + batch * step], 1),
            in_use=1,
        )
        loader.encoded_share = share
        yield loader


@pytest.mark.parametrize(
    ("share", "file_bytes", "files"),
    [(1.0, 1 << 17, 8), (0.5, 1 << 17, 4), (1.0, 64, 0)],
)
def test_slot_holds_files_and_geometry(
    image_root: Path, share: float, file_bytes: int, files: int
) -> None:
    dataset = FolderDataset(
        load_index(image_root / "train", key="data.train"), transform(TRAIN), seed=3
    )
    for loader in loader_of(dataset, share=share, file_bytes=file_bytes):
        for batch in loader.batches(0, 3):
            encoded = loader.pool.sources[0].encoded
            assert encoded is not None
            table = encoded.geometry.array[batch.slot]
            assert (table[:, geometry.LENGTH] > 0).sum() == files
            for row in range(8):
                index = 8 * batch.step + row
                length, offset, *size = table[row, : geometry.HEIGHT + 1].astype(int)
                sample = dataset[index]
                if length:
                    file = encoded.files.array[batch.slot][offset : offset + length].tobytes()
                    assert file == Path(dataset.name(index)).read_bytes()
                    assert tuple(size) == Image.open(dataset.name(index)).size
                else:
                    np.testing.assert_array_equal(batch.fields["image"][row], sample["image"])
                assert batch.fields["label"][row] == sample["label"]
            loader.load_in_process(batch)
            assert not table[:, geometry.LENGTH].any()
            expected = dataset[8 * batch.step]["image"]
            np.testing.assert_array_equal(batch.fields["image"][0], expected)
            batch.release(None)


@pytest.mark.parametrize("turn", [False, True])
def test_a_worker_decodes_what_is_to_be_turned(
    image_root: Path, tmp_path: Path, turn: bool
) -> None:
    split = Path(shutil.copytree(image_root / "train", tmp_path / "train"))
    for path in (split / "checks").glob("*[05].jpg"):
        with Image.open(path) as image:
            image.save(path, exif=exif(6))
    index = load_index(split, key="data.train")
    dataset = FolderDataset(index, transform(TRAIN), seed=3, exif_orientation=turn)
    for loader in loader_of(dataset, share=1.0, file_bytes=1 << 17):
        for batch in loader.batches(0, 1):
            table = loader.pool.sources[0].encoded.geometry.array[batch.slot]
            turned = [0, 5] if turn else []
            assert np.flatnonzero(table[:, geometry.LENGTH] == 0).tolist() == turned
            for row in turned:
                image = dataset[row]["image"]
                np.testing.assert_array_equal(batch.fields["image"][row], image)
            batch.release(None)


def test_a_batch_that_the_engines_refuse_is_decoded_in_the_training_process(
    image_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = FolderDataset(load_index(image_root / "train", key="data.train"), transform(TRAIN))
    for loader in loader_of(dataset, share=1.0, file_bytes=1 << 17):
        engines: Any = PillowEngines(torch.device("cpu"), 8)
        engines.broken = True
        upload = EngineUpload(loader, engines)
        image = ImageFormat(torch.device("cpu"), mean=[0, 0, 0], std=[1 / 255] * 3)
        prefetcher = Prefetcher(loader, image, depth=1)
        prefetcher.set_upload(upload)
        for batch in prefetcher.batches(0, 2):
            for row in range(8):
                expected = dataset[8 * batch.step + row]["image"]
                found = batch["image"][row].permute(1, 2, 0).numpy()
                np.testing.assert_array_equal(found, expected)
        prefetcher.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "the CPU decoder decodes this batch instead" in caplog.text


class Library:
    """Stands in for nvJPEG: its calls return a status; it notes their names."""

    def __init__(self, version: int = 12, **statuses: int) -> None:
        self.version, self.statuses = version, statuses
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.statuses.get(name, 0)

        return call

    def nvjpegGetProperty(self, kind: int, value: Any) -> int:  # noqa: N802
        value._obj.value = self.version
        return self.statuses.get("nvjpegGetProperty", 0)


def test_errors_of_nvjpeg_name_the_call_and_the_status() -> None:
    for library, message in (
        (Library(nvjpegCreateEx=7), r"nvjpegCreateEx of .* status 7: this GPU has no JPEG"),
        (Library(11), r"^nvJPEG 11 is too old; install version 12$"),
        (Library(nvjpegGetProperty=1), "nvjpegGetProperty of nvJPEG returned status 1"),
    ):
        with pytest.raises(EngineError, match=message):
            Engines(library)  # type: ignore[arg-type]


def test_engines_are_prepared_anew_after_another_number_of_files_or_an_error() -> None:
    library: Any = Library()
    engines, counts = Engines(library), []
    stream: Any = SimpleNamespace(cuda_stream=0)
    for count, status in ((2, 0), (2, 0), (3, 6), (3, 0)):
        library.statuses["nvjpegDecodeBatched"] = status
        array = np.zeros(count, np.uint64)
        with pytest.raises(EngineError) if status else nullcontext():
            engines.decode(array, array, array, stream)
        counts.append(library.calls.count("nvjpegDecodeBatchedInitialize"))
    assert counts == [1, 1, 2, 3]
    engines.close()
    assert library.calls[:2] == ["nvjpegCreateEx", "nvjpegJpegStateCreate"]
    assert library.calls[-2:] == ["nvjpegJpegStateDestroy", "nvjpegDestroy"]


# On a GPU.


@pytest.mark.gpu
def test_engines_are_found_or_their_absence_is_explained() -> None:
    device = torch.device("cuda", 0)
    reason = why_no_engines(device)
    assert reason is None or "nvJPEG" in reason
    assert why_no_engines(torch.device("cpu")) == "training does not run on CUDA"


LATE_CYCLES = 200_000_000  # of the GPU's clock: about 0.1 s


def grey_batch(level: int, side: int = 512) -> tuple[Any, ...]:
    """Arguments of `GpuDecoder.make_batch` for two files of a size; `out` is the fourth."""
    data, zeros = encoded(Image.new("RGB", (side, side), (level, level, level))), torch.zeros
    rows = zeros(2, geometry.COLUMNS, dtype=torch.float64).pin_memory()
    for number, row in enumerate(rows.numpy()):
        row[:] = row_of(transform(SQUASH)(file_of((side, side)), sample_rng(0, 0, number)))
        row[geometry.LENGTH : geometry.HEIGHT + 1] = len(data), number * len(data), side, side
    files, pixels = np.frombuffer(data + data, np.uint8), zeros(2, 48, 48, 3, dtype=torch.uint8)
    out = zeros(2, 3, 48, 48, dtype=torch.uint8, device="cuda")
    levels = torch.ones(3, device="cuda"), zeros(3, device="cuda")
    return files, rows, pixels.pin_memory(), out, *levels


@pytest.mark.gpu
def test_engines_wait_for_kernels_that_use_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write when they are called, not when the stream gets there."""
    from pipeline.gpu import crop_kernel

    gpu_decoder, crop = GpuDecoder(torch.device("cuda", 0), 2), crop_kernel.crop_resize

    def late(*args: Any, **options: Any) -> None:
        torch.cuda._sleep(LATE_CYCLES)
        crop(*args, **options)

    levels = [10, 90, 170, 250]
    batches = [grey_batch(level) for level in levels]
    with torch.cuda.stream(torch.cuda.Stream()):
        freed = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
        address = freed.data_ptr()
        assert freed.sum() == 0
        gpu_decoder.make_batch(*grey_batch(250, 32))  # the kernels are loaded now
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
    """The result of the kernel itself, uint8 [B, 48, 48, 3]."""
    from pipeline.gpu.crop_kernel import crop_resize

    on_device = [torch.from_numpy(image.copy()).to(device) for image in images]
    rows[:, geometry.ADDRESS] = [image.data_ptr() for image in on_device]
    rows[:, geometry.PITCH] = [image.stride(0) for image in on_device]
    out = torch.empty(len(rows), 3, 48, 48, dtype=torch.uint8, device=device)
    levels = torch.ones(3, device=device), torch.zeros(3, device=device)
    for bicubic in (False, True):
        crop_resize(torch.from_numpy(rows).to(device), out, *levels, bicubic=bicubic)
    return out.permute(0, 2, 3, 1).cpu().numpy()


@pytest.mark.gpu
@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
def test_kernel_makes_the_pixels_of_the_cpu_path(entries: list[Any]) -> None:
    """To one level, if both get the same pixels."""
    chain, count = transform(entries), 12
    images = [black_and_white(seed) for seed in range(count // 2)]
    images += [np.asarray(draw_image("waves", np.random.default_rng(i))) for i in range(count // 2)]
    rows = np.zeros((count, geometry.COLUMNS))
    for index, (row, image) in enumerate(zip(rows, images, strict=True)):
        size = image.shape[1], image.shape[0]
        row[:] = row_of(chain(file_of(size), sample_rng(1, 2, index)))
    made = cropped(rows, images, torch.device("cuda", 0))
    for index, (ours, image) in enumerate(zip(made, images, strict=True)):
        expected = chain(decode.Picture(image), sample_rng(1, 2, index)).pixels().astype(int)
        assert abs(ours.astype(int) - expected).max() <= 1, index


@pytest.mark.gpu
@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_batches_agree_with_the_cpu_path(
    image_root: Path, tmp_path: Path, entries: list[Any], share: float
) -> None:
    """Engines and libjpeg differ in inverse DCT and chroma upsampling, most in synthetic images."""
    root = tmp_path / "train"
    (root / "a").mkdir(parents=True)
    images = [
        draw_image(name, np.random.default_rng(i))
        for i, name in enumerate(["waves", "dots", "rings", "plaid"] * 6)
    ]
    kinds: list[dict[str, Any]] = [
        {"quality": 95},
        {"subsampling": 0},
        {"progressive": True},
        {"quality": 80},
    ]
    for i, image in enumerate(images):
        (root / "a" / f"{i:02d}.jpg").write_bytes(encoded(image, **kinds[i % 4]))
    (root / "a" / "24.jpg").write_bytes(encoded(images[0].convert("CMYK")))
    (root / "a" / "25.jpg").write_bytes(encoded(images[0], "PNG"))
    dataset = FolderDataset(load_index(root, key="data.train"), transform(entries), seed=3)
    device = torch.device("cuda", 0)
    for loader in loader_of(dataset, share=share, file_bytes=1 << 17, batch=13):
        with Pinned(loader.pool.sources[0].buffers):
            upload = EngineUpload(loader, GpuDecoder(device, 13))
            image = ImageFormat(device, mean=[0, 0, 0], std=[1 / 255] * 3)
            prefetcher = Prefetcher(loader, image, depth=1)
            prefetcher.set_upload(upload)
            loader.encoded_share = share
            by_workers = 0
            for batch in prefetcher.batches(0, 2):
                ours = batch["image"].permute(0, 2, 3, 1).cpu().numpy()
                for row in range(13):
                    index = 13 * batch.step + row
                    if abs(ours[row] - dataset[index]["image"]).max() < 0.01:
                        by_workers += 1
                        continue
                    # From the whole image: the CPU path may scale while decoding.
                    whole = decode.Picture(
                        decode.open_picture(
                            Path(dataset.name(index)).read_bytes(), "pillow"
                        ).pixels()
                    )
                    expected = (
                        dataset.transform(whole, sample_rng(3, 0, index)).pixels().astype(float)
                    )
                    difference = abs(ours[row] - expected)
                    assert difference.mean() < 2, (batch.step, row)
                    assert np.percentile(difference, 99) < 25, (batch.step, row)
            # The engines do not support the progressive files, the CMYK file and the PNG.
            assert by_workers == 8 if share == 1.0 else 13 < by_workers < 20
