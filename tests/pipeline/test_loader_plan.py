"""The plan of the loader: decoder, workers that the machine allows, memory of the buffers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf import cli
from conf.optional import has_part
from conf.schema import Config, UserError
from pipeline import loader_plan as plan
from pipeline import machine
from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.build import build_datasets
from pipeline.containers import Folder
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.decode import resolve
from pipeline.feed import open_feed
from pipeline.index import Index
from pipeline.loader_plan import (
    FILES_KEPT,
    FILES_PER_WORKER,
    PROBE_WORKERS,
    READERS,
    WORKER_BYTES,
    LoaderPlan,
    plan_loader,
)
from tests.loader_plans import loader_plan, world_of
from tests.pipeline.test_dataset import Grey

FOR_15 = FILES_KEPT + 15 * FILES_PER_WORKER  # open files that 15 workers need
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # naming a GPU needs none
Machine = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend to be a host, by default with 16 cores, much memory and JPEG engines."""

    def pretend(**found: float) -> None:
        monkeypatch.setattr(plan, "has_part", lambda name: name == "engine.tune" or has_part(name))
        monkeypatch.setattr(plan, "why_no_engines", lambda device: None)
        if has_part("pipeline.gpu"):
            monkeypatch.setattr("pipeline.gpu.has_kernels", lambda device: device == CUDA)
        usual = dict(cores=16, threads_per_core=1, cpu_quota=math.inf, spare_files=100_000)
        for name, value in (usual | {"free_memory": 1 << 40} | found).items():
            monkeypatch.setattr(machine, name, lambda value=value: value)

    return pretend


def small(*overrides: str) -> Config:
    """Images of 24 px for training, of 32 px for validation."""
    sizes = ["data.image_size=24", "data.val_size=32", "loader.batch_size=8"]
    return cli.load(["data=fake", *sizes, *overrides])


class Files(FolderDataset):
    """A training list without its files, which are as large as those of ImageNet."""

    def __init__(self, count: int, kilobytes: float = 110, config: Config | None = None) -> None:
        names = config.augment.train if config else []
        transforms = Compose(build(names, TRANSFORMS, key="augment.train"), 224)
        super().__init__(Index.of_files(Folder("/none"), {"a": [b"a/1.jpg"] * count}), transforms)
        self.kilobytes = kilobytes

    def mean_bytes(self) -> float:
        return 1e3 * self.kilobytes

    def read(self, index: int) -> bytes:
        raise AssertionError("planning reads nothing")


MANY = Files(100_000)


def planned(
    *overrides: str,
    device: torch.device = CUDA,
    stored_pixels: str | None = None,
    files: Dataset = MANY,
    ranks: int = 1,
) -> LoaderPlan:
    if {"loader.decoder=gpu", "loader.decoder=hybrid"} & set(overrides):
        pytest.importorskip("pipeline.gpu")
    config = small(*overrides)
    return plan_loader(
        config,
        replace(build_datasets(config), train=files),
        world_of(device, ranks, ranks),
        dtype=torch.float32,
        channels_last=False,
        stored_pixels=stored_pixels,
    )


@pytest.mark.parametrize(
    ("found", "ranks", "decoder", "workers", "reason"),
    [
        ({}, 1, "pillow", 15, "16 cores, 1 left to the training process"),
        ({"cores": 1}, 1, "pillow", 1, "1 core, shared with the training process"),
        ({"cpu_quota": 4.9}, 1, "pillow", 3, "4.9 cores, 1 left to the training process"),
        ({"cpu_quota": 0.5}, 1, "pillow", 1, "0.5 cores, shared with the training process"),
        ({"cores": 128}, 8, "pillow", 15, "128 cores, 8 ranks here, 1 left to the training proc"),
        ({"cores": 4}, 8, "pillow", 1, "4 cores, 8 ranks here, shared with the training process"),
        # a whole core, both of its threads; a host thread waits for the engines
        ({"threads_per_core": 2}, 1, "pillow", 14, "16 cores, 2 left to the training process"),
        ({}, 1, "hybrid", 14, "16 cores, 1 left to the training process"),
        ({"cores": 2, "threads_per_core": 2}, 1, "hybrid", 1, "2 cores, shared with the training"),
        # few readers for the engines, at least two
        ({"cores": READERS + 2}, 1, "gpu", READERS, "enough to read files for the GPU's JPEG"),
        ({"cores": READERS + 1}, 1, "gpu", READERS, "7 cores, 1 left to the training process"),
        ({"cores": 1}, 1, "gpu", 2, "shared with"),
        # open files
        ({"spare_files": FOR_15}, 1, "pillow", 15, "16 cores, 1 left"),
        ({"spare_files": FOR_15 - 1}, 1, "pillow", 14, "open files allow no more"),
        ({"spare_files": 3}, 1, "pillow", 0, "open files allow no more, see ulimit -n"),
    ],
)
def test_budget(
    host: Machine, found: dict[str, float], ranks: int, decoder: str, workers: int, reason: str
) -> None:
    host(**found)
    made = planned("loader.workers=auto", f"loader.decoder={decoder}", ranks=ranks)
    assert made.workers == workers and reason in made.reason


def test_a_configured_number_is_used_up_to_the_limit_of_open_files(host: Machine) -> None:
    """Even more workers than cores."""
    host(cores=4, spare_files=FILES_KEPT + 20 * FILES_PER_WORKER)
    for number in (0, 1, 20):
        made = planned(f"loader.workers={number}", "loader.decoder=gpu")
        assert (made.workers, made.reason) == (number, "as configured")
    too_many = r"^loader\.workers=21: open files allow 20; give at most that, or raise ulimit -n$"
    with pytest.raises(UserError, match=too_many):
        planned("loader.workers=21")


@pytest.mark.parametrize(
    ("cores", "workers", "decoder", "device", "expected"),
    [
        # workers, ceiling, processes, cores, measured, start_workers
        (16, "auto", "pillow", CUDA, (15, 30, 15, 15, True, PROBE_WORKERS)),
        (2, "auto", "pillow", CUDA, (1, 2, 1, 1, True, 1)),
        (16, "auto", "pillow", CPU, (15, 15, 15, 15, False, 15)),
        (16, "auto", "hybrid", CUDA, (14, 28, 15, 14, True, PROBE_WORKERS)),
        # all cores validate
        (16, "auto", "gpu", CUDA, (READERS, 15, 15, READERS, True, PROBE_WORKERS)),
        (16, "3", "pillow", CUDA, (3, 3, 3, 15, False, 3)),
        (16, "40", "pillow", CUDA, (40, 40, 40, 15, False, 40)),
        (16, "0", "gpu", CUDA, (0, 0, 0, READERS, False, 0)),
    ],
)
def test_workers(
    host: Machine,
    cores: int,
    workers: str,
    decoder: str,
    device: torch.device,
    expected: tuple[int, ...],
) -> None:
    host(cores=cores)
    found = planned(f"loader.workers={workers}", f"loader.decoder={decoder}", device=device)
    counts = found.workers, found.ceiling, found.processes, found.cores
    assert (*counts, found.measured, found.start_workers) == expected
    assert bool(found.not_measured) == (workers == "auto" and not found.measured)
    assert found.uses_engines == (decoder != "pillow") == bool(found.file_bytes)


@pytest.mark.parametrize(
    ("files", "options", "found", "reason"),
    [
        (MANY, {"device": CPU}, {}, "training runs on the CPU and shares it with the workers"),
        (FakeDataset(num_samples=9, num_classes=2, size=24), {}, {}, "cost nearly nothing"),
        (Grey(1000, 24), {}, {}, ""),
        (Files(127), {}, {}, "an epoch of 15.9 batches is over"),
        (Files(128), {}, {}, ""),
        (Files(999, 0.9), {}, {}, "small files (0.9 kB on"),
        (Files(999, 0.9), {}, {"cores": 4}, ""),
        (MANY, {}, {"spare_files": 0}, "none can be started"),
    ],
)
def test_when_it_is_not_measured(
    host: Machine, files: Dataset, options: dict, found: dict[str, float], reason: str
) -> None:
    host(**found)
    made = planned("loader.workers=auto", "loader.decoder=pillow", files=files, **options)
    assert made.measured == (reason == "") and reason in made.not_measured


def test_without_the_room_that_measures(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host()
    pytest.importorskip("pipeline.gpu")  # `host` pretends that there are engines
    monkeypatch.setattr(plan, "has_part", lambda name: name != "engine.tune")
    found = planned("loader.workers=auto")
    assert (found.workers, found.measured) == (15, False)
    assert found.not_measured == "this copy has no engine/tune"
    assert found.decoders == (resolve("auto"),)


def test_auto_compares_decoders_where_there_are_engines(
    host: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pipeline.gpu")
    host()
    cpu = resolve("auto")
    found = planned("loader.workers=auto")
    assert found.decoders == (cpu, "gpu", "hybrid") and found.decoder == cpu
    assert found.uses_engines and found.file_bytes
    assert found.lines()[0].endswith(f", decoder {cpu} or gpu or hybrid")
    for stored in ("cpu", "gpu", "hybrid"):  # a resumed run keeps its pixels
        kept = planned("loader.workers=auto", stored_pixels=stored)
        assert kept.decoders == (cpu if stored == "cpu" else stored,)
        assert not kept.engines_unused
    for override, reason in (
        ("loader.workers=4", "are only compared if loader.workers=auto is measured"),
        ("train.deterministic=true", "not used: train.deterministic=true excludes them"),
    ):
        alone = planned("loader.workers=auto", override)
        assert alone.decoders == (cpu,) and not alone.file_bytes
        assert reason in alone.lines()[0]
    monkeypatch.setattr(plan, "why_no_engines", lambda device: "nvJPEG is not installed")
    alone = planned("loader.workers=auto")
    assert alone.decoders == (cpu,)
    unused = "the GPU's JPEG engines are not used: nvJPEG is not installed"
    assert alone.lines()[0].endswith(f", decoder {cpu} ({unused})")
    on_cpu = planned("loader.workers=auto", device=CPU)
    assert on_cpu.decoders == (cpu,) and not on_cpu.engines_unused
    with pytest.raises(UserError, match=r"^loader.decoder=gpu: needs .* nvJPEG is not installed"):
        planned("loader.decoder=gpu")


CROP = "{random_resized_crop: {size: 24, interpolation: bicubic}}"


@pytest.mark.parametrize(
    ("transforms", "culprit", "operations"),
    [
        (f"[{CROP}, horizontal_flip, rand_augment]", None, 2),
        ("[{resize: {size: [24, 24]}}, horizontal_flip]", None, 0),
        ("[{random_crop: {size: 24, padding: 2}}]", None, 0),  # only some images need pixels
        (f"[{{v2.RandomRotation: {{degrees: 5}}}}, {CROP}]", "v2.RandomRotation", 0),
        (f"[{CROP}, rand_augment, horizontal_flip]", "rand_augment", 0),
        (f"[{CROP}, {{v2.ColorJitter: {{hue: 0.1}}}}]", "v2.ColorJitter", 0),
    ],
)
def test_augmentation_that_leaves_nothing_to_the_engines(
    host: Machine, transforms: str, culprit: str | None, operations: int
) -> None:
    host()
    reason = f"{culprit} in augment.train needs decoded pixels"
    for decoder in ("gpu", "hybrid", "auto"):
        augment = f"augment.train={transforms}"
        overrides = [augment, f"loader.decoder={decoder}", "loader.workers=auto"]
        files = Files(1000, config=small(*overrides))
        found = planned(*overrides, files=files)
        assert found.operations == operations
        assert planned(augment, files=files, device=CPU).operations == 0
        assert found.uses_engines == bool(found.file_bytes) == (culprit is None)
        if culprit is None:
            assert decoder in (found.decoder, "auto")
            continue
        assert found.decoder == resolve("auto") and found.workers == 15
        start = "the GPU's JPEG engines are not used"
        start = start if decoder == "auto" else f"loader.decoder={decoder} has no effect"
        assert found.lines()[0].endswith(f", decoder {found.decoder} ({start}: {reason})")


# Memory.


@pytest.mark.parametrize("decoder", ["pillow", "gpu"])
@pytest.mark.parametrize(
    ("batch_size", "workers", "ranks", "overrides"),
    [
        (8, 0, 1, ["loader.prefetch_batches=1"]),
        (36, 1, 2, ["loader.prefetch_factor=7"]),
        (33, 2, 1, ["loader.prefetch_batches=9"]),  # more than a task
    ],
)
def test_planned_bytes_are_those_that_open_feed_allocates(
    monkeypatch: pytest.MonkeyPatch,
    image_root: Path,
    decoder: str,
    batch_size: int,
    workers: int,
    ranks: int,
    overrides: list[str],
) -> None:
    if decoder != "pillow":
        module = pytest.importorskip("tests.engines")
        monkeypatch.setattr("pipeline.gpu.GpuDecoder", module.PillowEngines)
    overrides = [
        *overrides,
        "augment=demo",
        "data.image_size=24",
        f"loader.batch_size={batch_size}",
    ]
    config = cli.load([f"data.root={image_root}", "loader.start_method=fork", *overrides])
    datasets, world = build_datasets(config), world_of(CPU, ranks)
    made = loader_plan(config, datasets, world, workers=workers, decoder=decoder)
    with open_feed(config, datasets, made, world) as feed:
        sources = feed.train.loader.pool.sources
        assert [source.encoded is not None for source in sources] == [decoder != "pillow", False]
        buffers = [shared for source in sources for shared in source.buffers]
        assert made.buffer_bytes == sum(shared.array.nbytes for shared in buffers)
        assert made.slots == feed.train.loader.slots == feed.val.loader.slots


def test_memory_of_a_known_case(host: Machine) -> None:
    """Two rings of 256 images of 224 px: 4 batches ready, one in the step, two in progress."""
    host(free_memory=8 << 30)
    sizes = ["data.image_size=224", "data.val_size=224", "loader.batch_size=256"]
    sizes += ["loader.decoder=pillow"]
    found = planned(*sizes, "loader.workers=0", "loader.prefetch_batches=4")
    assert found.slots == 4 + 1 + 2
    assert found.buffer_bytes == 2 * 7 * 256 * (224 * 224 * 3 + 24)
    assert found.lines()[1] == (
        "memory   0.50 GiB of batch buffers (7 slots for each split), workers about 0.00 GiB; "
        "8.0 GiB are free, /dev/shm is not used"
    )
    shared = planned(*sizes, "loader.workers=0", "loader.prefetch_batches=4", ranks=4)
    assert (shared.free_bytes, 4 * shared.buffer_bytes) == (2 << 30, found.buffer_bytes)


@pytest.mark.parametrize("method", WORKER_BYTES)
def test_workers_that_fit_into_memory(host: Machine, method: str) -> None:
    """loader.workers=auto takes fewer; a configured number is kept or refused."""
    host()
    auto = ["loader.workers=auto", "loader.decoder=pillow", f"loader.start_method={method}"]
    fixed = [*auto, "loader.workers=7"]
    seven = planned(*fixed)
    needed = seven.buffer_bytes + seven.worker_bytes
    assert seven.worker_bytes == 7 * WORKER_BYTES[method]
    host(free_memory=needed)
    found = planned(*auto)
    assert (found.workers, found.ceiling, found.processes, found.cores) == (7, 7, 7, 15)
    assert found.reason == "free memory allows no more"
    assert planned(*fixed).workers == 7
    host(free_memory=needed - 1)
    assert planned(*auto).workers == 6
    with pytest.raises(UserError, match=r"^loader.batch_size=8: the loader needs at least .*; low"):
        planned(*fixed)
    host(free_memory=WORKER_BYTES[method])
    with pytest.raises(UserError, match="the loader needs at least"):
        planned(*auto)
