"""The plan of the loader: which workers are started, measured and have room."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conf import cli
from conf.schema import START_METHOD, Config, UserError
from pipeline import loader_plan as plan
from pipeline import machine
from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.build import build_datasets
from pipeline.dataset import FakeDataset, FileDataset, FolderDataset
from pipeline.decode import resolve
from pipeline.index import Index
from pipeline.loader_plan import (
    FEWEST_SLOTS,
    PROBE_WORKERS,
    READERS,
    WORKER_BYTES,
    LoaderPlan,
    plan_loader,
    why_not_measured,
)
from tests.loader_plans import loader_plan, world_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # naming a GPU needs none
Machine = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend to be a host with 16 cores and JPEG engines."""

    def pretend(*, cores: int = 16, free: int = 1 << 40) -> None:
        monkeypatch.setattr(plan, "why_no_engines", lambda device: None)
        monkeypatch.setattr(machine, "cores", lambda: cores)
        monkeypatch.setattr(machine, "threads_per_core", lambda: 1)
        monkeypatch.setattr(machine, "cpu_quota", lambda: float("inf"))
        monkeypatch.setattr(machine, "spare_files", lambda: 100_000)
        monkeypatch.setattr(machine, "free_memory", lambda: free)

    return pretend


def small(*overrides: str) -> Config:
    """Images of 24 px."""
    return cli.load(
        [
            "data=fake",
            "data.image_size=24",
            "data.val_size=24",
            "loader.batch_size=8",
            *overrides,
        ]
    )


class Files(FakeDataset, FileDataset):
    """Stands in for a dataset of files as large as those of ImageNet."""

    def mean_bytes(self) -> float:
        return 110e3

    def read(self, index: int) -> bytes:
        raise AssertionError("planning reads nothing")

    def time_decoding(self, index: int, data: bytes, decoder: str, *, draw_only: bool) -> float:
        raise AssertionError("planning decodes nothing")


def planned(
    config: Config,
    *,
    device: torch.device = CUDA,
    stored_pixels: str | None = None,
    files: FileDataset | None = None,
) -> LoaderPlan:
    files = files or Files(num_samples=100_000, num_classes=2, size=24)
    datasets = replace(build_datasets(config), train=files)
    world = world_of(device)
    return plan_loader(
        config,
        datasets,
        world,
        dtype=torch.float32,
        channels_last=False,
        state_bytes=0,
        stored_pixels=stored_pixels,
    )


@pytest.mark.parametrize(
    ("workers", "decoder", "device", "expected"),
    [
        # workers, ceiling, cores, measured, start_workers
        ("auto", "pillow", CUDA, (15, 30, 15, True, PROBE_WORKERS)),
        ("auto", "pillow", CPU, (15, 15, 15, False, 15)),
        ("auto", "hybrid", CUDA, (14, 28, 14, True, PROBE_WORKERS)),
        ("auto", "gpu", CUDA, (READERS, 15, READERS, True, PROBE_WORKERS)),  # all cores validate
        ("3", "pillow", CUDA, (3, 3, 15, False, 3)),
        ("40", "pillow", CUDA, (40, 40, 15, False, 40)),
        ("0", "gpu", CUDA, (0, 0, READERS, False, 0)),
    ],
)
def test_workers(
    host: Machine, workers: str, decoder: str, device: torch.device, expected: tuple[int, ...]
) -> None:
    host()
    found = planned(small(f"loader.workers={workers}", f"loader.decoder={decoder}"), device=device)
    counts = found.workers, found.ceiling, found.cores, found.measured, found.start_workers
    assert counts == expected
    assert (found.not_measured is not None) == (workers == "auto" and not found.measured)
    assert found.uses_engines == (decoder != "pillow")


def test_auto_compares_decoders_where_there_are_engines(
    host: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    host()
    auto = small("loader.workers=auto")
    (cpu,) = planned(auto, device=CPU).decoders
    found = planned(auto)
    assert found.decoders == (cpu, "gpu", "hybrid") and found.decoder == cpu
    assert found.uses_engines and found.memory.file_bytes
    assert found.lines()[0].endswith(f", decoder {cpu} or gpu or hybrid")
    for stored in ("cpu", "gpu", "hybrid"):  # a resumed run keeps its pixels
        kept = planned(auto, stored_pixels=stored)
        assert kept.decoders == (cpu if stored == "cpu" else stored,)
        assert not kept.engines_unused
    for overrides, reason in (
        (["loader.workers=4"], "are only compared if loader.workers=auto is measured"),
        (["train.deterministic=true"], "train.deterministic=true excludes the GPU's JPEG engines"),
    ):
        alone = planned(small("loader.workers=auto", *overrides))
        assert alone.decoders == (cpu,) and not alone.memory.file_bytes
        assert reason in alone.lines()[0]
    monkeypatch.setattr(plan, "why_no_engines", lambda device: "nvJPEG is not installed")
    alone = planned(auto)
    assert alone.decoders == (cpu,)
    assert alone.lines()[0].endswith(f", decoder {cpu} (no JPEG engines: nvJPEG is not installed)")
    assert not planned(auto, device=CPU).engines_unused


class NoFiles(FolderDataset):
    """A training list without its files."""

    def __init__(self, config: Config) -> None:
        transforms = build(config.augment.train, TRANSFORMS, key="augment.train")
        super().__init__(Index.of_files("/none", {"a": [b"a/1.jpg"] * 1000}), Compose(transforms))

    def mean_bytes(self) -> float:
        return 1e5


CROP = "{random_resized_crop: {size: 24, interpolation: bicubic}}"


@pytest.mark.parametrize(
    ("transforms", "culprit"),
    [
        (f"[{CROP}, horizontal_flip, rand_augment]", None),
        ("[{resize: {size: [24, 24]}}, horizontal_flip]", None),
        ("[{random_crop: {size: 24, padding: 2}}]", None),  # only some of the images need pixels
        (f"[{{rotation: {{degrees: 5}}}}, {CROP}]", "rotation"),
        (f"[{CROP}, rand_augment, horizontal_flip]", "rand_augment"),
        (f"[{CROP}, {{v2.ColorJitter: {{hue: 0.1}}}}]", "v2.ColorJitter"),
    ],
)
def test_augmentation_that_leaves_nothing_to_the_engines(
    host: Machine, transforms: str, culprit: str | None
) -> None:
    host()
    reason = f"{culprit} in augment.train needs decoded pixels"
    for decoder in ("gpu", "hybrid", "auto"):
        config = small(
            f"augment.train={transforms}", f"loader.decoder={decoder}", "loader.workers=auto"
        )
        found = planned(config, files=NoFiles(config))
        assert found.uses_engines == bool(found.memory.file_bytes) == (culprit is None)
        if culprit is None:
            assert decoder in (found.decoder, "auto")
            continue
        assert found.decoder == resolve("auto") and found.workers == 15
        start = "the GPU's JPEG engines are not used"
        start = start if decoder == "auto" else f"loader.decoder={decoder} has no effect"
        assert found.lines()[0].endswith(f", decoder {found.decoder} ({start}: {reason})")
        # A run of an earlier version, whose workers decoded all of its images.
        earlier = planned(config, files=NoFiles(config), stored_pixels="gpu")
        assert earlier.decoder == ("gpu" if decoder == "auto" else decoder)


def test_one_core_is_probed_with_one_worker(host: Machine) -> None:
    host(cores=2)
    found = planned(small("loader.workers=auto", "loader.decoder=pillow"))
    assert (found.measured, found.workers, found.start_workers) == (True, 1, 1)


def test_auto_takes_as_many_workers_as_memory_allows(host: Machine) -> None:
    config = small("loader.workers=auto", "loader.decoder=pillow")
    host()
    need = loader_plan(config, build_datasets(config), world_of(CUDA), workers=7).memory.host
    host(free=need)
    found = planned(config)
    assert (found.workers, found.ceiling, found.cores) == (7, 7, 15)
    assert found.reason == "free memory allows no more"


def test_fixed_workers_give_up_slots_first(host: Machine) -> None:
    """Then workers; with too little memory for one of them, nothing starts."""
    config = small("loader.workers=8", "loader.decoder=pillow")
    host()
    full = planned(config).memory
    host(free=full.host - 1)
    found = planned(config)
    assert (found.workers, found.memory.slots) == (8, full.slots - 1)
    assert found.reason == "as configured"
    assert f"{full.slots - 1} slots for each split instead of {full.slots}: free memory" in (
        found.memory.line()
    )
    host(free=full.host // 2)
    found = planned(config)
    assert found.workers < 8 and found.memory.slots == FEWEST_SLOTS
    assert found.reason == "free memory allows no more"
    assert found.memory.host <= full.host // 2
    host(free=WORKER_BYTES[START_METHOD])
    with pytest.raises(UserError, match=r"^loader.batch_size=8: the loader needs at least"):
        planned(config)


def test_the_ranks_of_a_node_take_the_smallest_memory(host: Machine) -> None:
    host()
    config = small("loader.workers=auto", "loader.decoder=pillow")
    found, datasets = planned(config), build_datasets(config)
    for workers in (20, 4):
        memory = loader_plan(config, datasets, world_of(CUDA), workers=workers).memory
        limited = found.limited_to(memory)
        assert (limited.workers, limited.ceiling) == (min(15, workers), workers)
        assert limited.memory == memory


def test_the_plan_says_if_the_largest_image_does_not_fit(host: Machine) -> None:
    host()
    config = small("loader.workers=1", "loader.decoder=pillow", "data.max_pixels=100_000_000")
    memory = planned(config).memory
    assert memory.largest_image == 1_700_000_000
    host(free=memory.host + memory.largest_image)
    assert "data.max_pixels" not in planned(config).memory.line()
    host(free=memory.host + memory.largest_image - 1)
    assert (
        "an image of data.max_pixels would take 1.6 GiB: lower it" in planned(config).memory.line()
    )


def test_lines(host: Machine) -> None:
    host()
    config = small("loader.workers=auto", "loader.decoder=pillow")
    loader, memory = planned(config).lines()
    reason = "16 cores, 1 left to the training process"
    assert loader == f"loader   up to 15 workers per rank ({reason}), decoder pillow"
    assert memory.startswith("memory   0.00 GiB of batch buffers (")
    (loader, _) = planned(small("loader.workers=1", "loader.decoder=pillow")).lines()
    assert loader == "loader   1 worker per rank (as configured), decoder pillow"


@pytest.mark.parametrize(
    ("device", "decoder", "batches", "reason"),
    [
        (CPU, "pillow", 5000, "CPU"),
        (CUDA, "none", 5000, "no files"),
        (CUDA, "hybrid", 5000, None),
        (CUDA, "pillow", 3.5, "3.5 batches"),
        (CUDA, "pillow", 5000, None),
        (CUDA, "gpu", 5000, None),
    ],
)
def test_when_it_is_not_measured(
    device: torch.device, decoder: str, batches: float, reason: str | None
) -> None:
    found = why_not_measured(device, decoder, batches, 4, 110e3)
    assert found is None if reason is None else reason in str(found)
    assert "none can be started" in str(why_not_measured(device, decoder, batches, 0, 110e3))


@pytest.mark.parametrize(("workers", "file_bytes"), [(4, 5000), (3, 900), (4, 900)])
def test_small_files_are_not_measured_if_there_are_some_workers(
    workers: int, file_bytes: int
) -> None:
    found = why_not_measured(CUDA, "region", 5000, workers, file_bytes)
    expected = "small files (0.9 kB on average) decode faster than the GPU trains"
    assert found == (expected if (workers, file_bytes) == (4, 900) else None)
