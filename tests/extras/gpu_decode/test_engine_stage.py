"""Device stage for the GPU's JPEG engines; without a GPU, Pillow replaces them."""

import math
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from conf.compose import from_overrides
from conf.errors import UserError
from engine import checkpoint
from extras import gpu_decode
from extras.gpu_decode import GEOMETRY, MIN_ROOM, ROOM, JpegEngineStage, engines
from extras.gpu_decode import geometry as g
from extras.gpu_decode.decoder import JpegEngineError
from extras.gpu_decode.geometry import engines_support
from pipeline.data import decode
from pipeline.data.augment import TRANSFORMS, Compose, build_by_name, sample_rng
from pipeline.data.dataset import FakeDataset, FolderDataset
from tests.engine.tune.tuning import measure_on_cpu
from tests.helpers import small_run
from tests.pipeline.loaders import (
    CPU,
    Files,
    assert_equal,
    crops,
    loaded,
    open_loader,
    opened,
    training,
    validation,
)
from tests.reliability.odd_images import encoded, exif

CUDA = torch.device("cuda", 0)
ENGINES = "data.on_device=[extras.gpu_decode:engines]", "loader.decoder=auto"


class PillowEngines:
    """Decode like GpuDecoder, and like the CPU for random_resized_crop and horizontal_flip."""

    error: Exception | None = None  # raised for every batch with files

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self.seconds_per_image = 0.0
        self.files: list[int] = []  # number of files per batch

    def make_batch(self, *given: Tensor) -> None:
        files, geometry, pixels, out, (scale, shift) = given
        images, encoded = pixels.numpy().copy(), np.flatnonzero(geometry[:, g.LENGTH] > 0)
        if self.error is not None and len(encoded):
            raise self.error
        for row in encoded:
            images[row] = _crop(files.flatten().numpy(), geometry[row].numpy(), images.shape[1])
        out.copy_((torch.from_numpy(images).float() * scale + shift).permute(0, 3, 1, 2))
        self.files.append(len(encoded))
        if len(encoded):
            self.seconds_per_image = 1e-3


def _crop(files: np.ndarray, row: np.ndarray, size: int) -> np.ndarray:
    first, length = int(row[g.OFFSET]), int(row[g.LENGTH])
    picture = decode.open_picture(files[first : first + length].tobytes(), "pillow")
    box: Any = tuple(map(int, row[g.CLIP_LEFT : g.CLIP_BOTTOM + 1]))
    interpolation = decode.INTERPOLATIONS[int(row[g.BICUBIC])]
    cropped = picture.resized((size, size), box, interpolation=interpolation, quick=True)
    return (cropped.mirrored() if row[g.MIRRORED] else cropped).pixels()


def with_engines(split: Path, mode: str, fraction: float) -> FolderDataset:
    """Return a dataset whose stage sends the given fraction of images to the engines."""
    dataset = crops(split)
    stage = dataset.stage = JpegEngineStage(dataset)
    stage.set_decode_mode(mode)
    stage.shared.array[gpu_decode.FRACTION] = fraction
    return dataset


@pytest.fixture
def pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "engines_error", lambda device: None)
    monkeypatch.setattr(gpu_decode, "GpuDecoder", PillowEngines)


def test_engine_stage_workers_decode_unsupported(train_copy, monkeypatch):
    """Workers decode other formats, large files and rotated images; engines get the rest."""
    plain = crops(train_copy)
    plain.exif_orientation = True
    paths = [Path(plain.name(index)) for index in range(8)]
    image = Image.open(paths[0]).convert("RGB")
    contents = encoded(image, progressive=True), encoded(image, "PNG"), encoded(image.convert("L"))
    large = encoded(Image.effect_noise((600, 600), 100).convert("RGB"), quality=95)
    for path, data in zip(paths, [*contents, encoded(image, exif=exif(6)), large], strict=False):
        path.write_bytes(data)
    assert JpegEngineStage(plain).room == max(MIN_ROOM, int(ROOM * plain.mean_bytes()))
    monkeypatch.setattr(gpu_decode, "MIN_ROOM", 1 << 14)  # too small for all rows
    monkeypatch.setattr(gpu_decode, "ROOM", 0)
    dataset = with_engines(train_copy, "hybrid", 0.5)
    dataset.exif_orientation = True
    samples = np.array([(0, index) for index in range(8)])
    with open_loader(dataset, workers=1) as loader:
        loader.samples = lambda step: samples
        batch = next(loader.batches(0, 1))
        assert np.flatnonzero(batch.fields[GEOMETRY][:, g.LENGTH] == 0).tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(batch.fields["image"][:5], loaded(plain, samples)["image"][:5])


@pytest.mark.parametrize(
    ("sent", "demand", "fraction"),
    [
        (0, math.inf, 0.75),
        (0, 2000.0, 0.5),
        (0, 500.0, 0.0),
        (2e-4, 2000.0, 5 / 9),
        (2e-4, math.inf, 30 / 37),
        (3e-3, math.inf, gpu_decode.MAX_FRACTION),
    ],
)
def test_engine_stage_takes_smallest_fraction(image_root, sent, demand, fraction):
    """Two workers decode 1,000 images/s, the engines 3,000; a worker takes `sent` per file."""
    stage = JpegEngineStage(crops(image_root / "train"))
    shared = stage.shared.array
    stage.set_decode_mode("hybrid", workers=2, demand=demand)
    assert shared[gpu_decode.FRACTION] == gpu_decode.INITIAL_FRACTION  # rates are unknown
    stage.engine_seconds = 1 / 3000
    stage.seconds.array[:] = sent, 2e-3
    for mode, expected in (("hybrid", fraction), ("gpu", 1), ("cpu", 0), ("hybrid", fraction)):
        stage.set_decode_mode(mode, workers=2, demand=demand)
        assert shared[gpu_decode.FRACTION] == pytest.approx(expected)


def test_engine_stage_fraction_between_task_sizes(image_root):
    """31 of 32 files are 7.75 of eight, so the engines get all files in three of four tasks."""
    dataset = with_engines(image_root / "train", "hybrid", 31 / 32)
    with open_loader(dataset, workers=1) as loader:
        loader.samples = lambda step: np.array([(0, index) for index in range(8)])
        files = [(batch.fields[GEOMETRY][:, g.LENGTH] > 0).sum() for batch in loader.batches(0, 4)]
        assert files == [7, 8, 8, 8]
    assert isinstance(dataset.stage, JpegEngineStage)
    assert (dataset.stage.seconds.array > 0).all()  # both kinds


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("batch", ["[]", "[mixup]"])
@pytest.mark.parametrize("workers", [0, 2])
def test_engine_stage_modes_equal_cpu_batches(image_root, workers, batch, monkeypatch):
    """Bitwise identical with every batch transform; the CPU decodes all validation images."""
    # Rates measured on a busy machine would otherwise change the engines' fraction.
    monkeypatch.setattr(JpegEngineStage, "_balance", lambda stage: None)
    options = {"workers": workers, "dtype": torch.bfloat16}
    overrides = f"augment.batch={batch}", "data.image_size=48"
    with opened(image_root, *overrides, **options) as plain:
        expected, validated = training(plain), validation(plain)
    with opened(image_root, *overrides, *ENGINES, modes=("gpu",), **options) as feed:
        dataset: Any = feed.datasets.train
        taken = [pair for step in range(9) for pair in feed.train.loader.samples(step).tolist()]
        most = sum(engines_support(dataset.read(index)) for _, index in taken)
        for mode in ("gpu", "cpu", "hybrid", "gpu"):
            feed.set_decode_mode(mode)
            next(feed.train.batches(0, 9))
            before = sum(dataset.stage.engine.files)
            assert_equal(training(feed), expected)
            files = sum(dataset.stage.engine.files) - before
            assert {"gpu": files == most, "hybrid": 0 < files < most, "cpu": not files}[mode]
            assert_equal(validation(feed), validated)
            assert sum(dataset.stage.engine.files) == before + files


CROP: Any = {"random_resized_crop": {"size": 24, "interpolation": "bicubic"}}
GRAY: Any = {"v2.RandomGrayscale": {"p": 0.5}}


def listed(*entries: Any, kind: Any = Files) -> Any:
    """Return a list of missing files with the given transforms."""
    found = kind(9)
    found.transform = Compose(build_by_name(entries, TRANSFORMS, key="augment.train"), 24)
    return found


class Edges(Files):
    """Creates the images itself."""

    def load(self, index: int, rng: Any) -> dict[str, Any]:
        sample = super().load(index, rng)
        return {**sample, "image": 255 - sample["image"]}


def extended(dataset: Any, *overrides: str, device: torch.device = CUDA) -> Any:
    return engines(dataset, from_overrides(["data=fake", *overrides]), device)


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (listed(CROP, "horizontal_flip"), ""),
        (listed({"resize": {"size": [24, 24]}}), ""),
        (listed({"random_crop": {"size": 24, "padding": 2}}), ""),  # only some images need pixels
        (listed(CROP, GRAY), "TorchvisionTransform in augment.train needs decoded pixels"),
        (listed({"random_crop": {"size": 500, "padding": 200}}), "RandomCrop in augment.train n"),
        (FakeDataset(9, 2, 24), "the dataset creates the images itself"),
        (listed(CROP, kind=Edges), "the dataset creates the images itself"),
    ],
)
def test_engines_not_used_for_unsupported_datasets(caplog, dataset, reason):
    caplog.set_level("INFO")
    assert isinstance(extended(dataset), JpegEngineStage) == (not reason)
    if isinstance(dataset, FolderDataset):
        assert reason in caplog.text and bool(reason) == bool(caplog.text)
    for mode in ("gpu", "hybrid") if reason else ():
        with pytest.raises(UserError, match=rf"^loader.decoder={mode}: cannot use .*: {reason}"):
            extended(dataset, f"loader.decoder={mode}")


def test_engines_not_used_for_machines_and_keys(monkeypatch, caplog):
    caplog.set_level("INFO")
    dataset = listed(CROP)
    plain = dataset.stage
    assert extended(dataset, device=CPU) is plain and not caplog.text
    monkeypatch.setattr(gpu_decode, "engines_error", lambda device: None)
    assert extended(dataset, "loader.decoder=pillow") is plain
    assert extended(dataset, "train.deterministic=true") is plain
    assert caplog.text.endswith("not used: train.deterministic=true excludes them\n")
    with pytest.raises(UserError, match=r"^loader.decoder=hybrid: splits each batch by measured"):
        extended(dataset, "train.deterministic=true", "loader.decoder=hybrid")
    monkeypatch.setattr(gpu_decode, "engines_error", lambda device: "nvJPEG is not installed")
    assert extended(dataset) is plain
    assert caplog.text.endswith("engines are not used: nvJPEG is not installed\n")
    with pytest.raises(UserError, match=r"^loader.decoder=gpu: .* nvJPEG is not installed; set au"):
        extended(dataset, "loader.decoder=gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_engine_stage_with_drawn_operations(image_root, mode):
    """The operations are applied to the levels of the same images without operations."""
    drawn = pytest.importorskip("extras.rand_augment.on_gpu")
    crop = "{random_resized_crop: {size: 48}}, horizontal_flip"
    rand = rf"[{crop}, {{extras.rand_augment\:RandAugment: {{magnitude: 17}}}}]"
    levels = ("data.mean=[0,0,0]", f"data.std=[{1 / 255},{1 / 255},{1 / 255}]")
    both = "data.on_device=[extras.rand_augment.on_gpu:on_gpu,extras.gpu_decode:engines]"
    options = {"device": CUDA, "modes": (mode,)}
    with opened(image_root, f"augment.train=[{crop}]", *levels, *ENGINES, **options) as feed:
        plain = training(feed)
    with opened(image_root, f"augment.train={rand}", *levels, *ENGINES, both, **options) as feed:
        dataset = feed.datasets.train
        assert isinstance(dataset.stage, JpegEngineStage)
        assert isinstance(dataset.stage.following, drawn.SampledOperations)
        dataset = copy(dataset)
        dataset.stage = dataset.stage.following
        for batch, before in zip(training(feed), plain, strict=True):
            samples = batch.samples.tolist()
            seeded = [(i, sample_rng(dataset.seed, epoch, i)) for epoch, i in samples]
            rows = [dataset.load(*each)["operations"] for each in seeded]
            levels = before["image"].to(CUDA).round().to(torch.uint8)
            made, unused = torch.empty_like(levels), torch.empty(2, 3, device=CUDA)
            drawn.apply_operations(levels, torch.tensor(rows).double(), made, unused)
            found, expected = batch["image"].cpu(), made.float().cpu()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("error", [JpegEngineError("status 6"), torch.OutOfMemoryError("large")])
def test_engine_stage_falls_back_to_cpu(error, image_root, monkeypatch):
    """Images are bitwise identical and decoded in the training process."""
    with opened(image_root, "data.image_size=48") as plain:
        expected = training(plain)
    monkeypatch.setattr(PillowEngines, "error", error)
    with opened(image_root, "data.image_size=48", *ENGINES, modes=("gpu",)) as feed:
        assert_equal(training(feed), expected)


@pytest.mark.usefixtures("pillow", "toy_runs")
def test_auto_workers_hybrid_uses_two_workers(image_root, tmp_path, monkeypatch, capfd):
    """One would supply 5,700 images/s on an H200 host where two supply 6,200."""
    measure_on_cpu(monkeypatch.setattr)
    monkeypatch.setattr("engine.tune.Tuner.choose_mode", lambda *_: "hybrid")
    small_run.run(image_root, tmp_path / "run", "loader.workers=auto", "augment=imagenet")
    assert "decoder=hybrid, workers=2" in capfd.readouterr().out


@pytest.mark.usefixtures("pillow", "toy_runs", "restored_logging")
def test_auto_workers_skips_failing_engines(image_root, tmp_path, monkeypatch, caplog):
    """The weights equal those of the CPU mode, which loader.workers=auto selects."""
    auto = "loader.workers=auto", "augment=imagenet"
    measure_on_cpu(monkeypatch.setattr)
    monkeypatch.setattr("engine.tune.ENOUGH_ON_CPU", math.inf)  # also benchmarks the second mode
    monkeypatch.setattr(PillowEngines, "error", RuntimeError("there is no C compiler"))
    summary = small_run.run(image_root, tmp_path / "run", *auto)
    stored = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000009.pt")
    assert stored["identity"]["decode_mode"] == "cpu"
    assert "loader.decoder=auto: hybrid is not used: RuntimeError: there is" in caplog.text
    plain = small_run.run(image_root, tmp_path / "plain", *auto, "data.on_device=[]")
    assert summary["params_sha256"] == plain["params_sha256"]
