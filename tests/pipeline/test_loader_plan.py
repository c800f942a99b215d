"""The plan of the loader: decoder, workers that the machine allows, memory of the buffers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conf import cli
from conf.schema import Config, UserError
from pipeline import machine
from pipeline.augment import Compose
from pipeline.build import build_datasets
from pipeline.containers import Folder
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.index import Index
from pipeline.loader_plan import (
    PROBE_WORKERS,
    LoaderPlan,
    plan_loader,
)
from tests.loader_plans import world_of
from tests.pipeline.test_dataset import Grey

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # naming a GPU needs none
Machine = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend to be a host, by default with 16 cores."""

    def pretend(**found: float) -> None:
        usual = dict(cores=16, threads_per_core=1, cpu_quota=math.inf)
        for name, value in (usual | found).items():
            monkeypatch.setattr(machine, name, lambda value=value: value)

    return pretend


def small(*overrides: str) -> Config:
    """Images of 24 px for training, of 32 px for validation."""
    sizes = ["data.image_size=24", "data.val_size=32", "loader.batch_size=8"]
    return cli.load(["data=fake", *sizes, *overrides])


class Files(FolderDataset):
    """A training list without its files, which are as large as those of ImageNet."""

    def __init__(self, count: int, kilobytes: float = 110) -> None:
        index = Index.of_files(Folder("/none"), {"a": [b"a/1.jpg"] * count})
        super().__init__(index, Compose([], 224))
        self.kilobytes = kilobytes

    def mean_bytes(self) -> float:
        return 1e3 * self.kilobytes

    def read(self, index: int) -> bytes:
        raise AssertionError("planning reads nothing")


class Moded(Files):
    """Its samples can also be made with two workers, or with a core less."""

    modes = ("cpu", "gpu", "hybrid")

    def workers_in(self, mode: str, cores: int) -> int:
        return {"cpu": cores, "gpu": 2, "hybrid": cores - 1}[mode]


MANY = Files(100_000)
MODED = Moded(100_000)


def planned(
    *overrides: str,
    device: torch.device = CUDA,
    stored_mode: str | None = None,
    files: Dataset = MANY,
    ranks: int = 1,
) -> LoaderPlan:
    config = small(*overrides)
    return plan_loader(
        config,
        replace(build_datasets(config), train=files),
        world_of(device, ranks, ranks),
        dtype=torch.float32,
        channels_last=False,
        stored_mode=stored_mode,
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
        # a whole core, both of its threads
        ({"threads_per_core": 2}, 1, "pillow", 14, "16 cores, 2 left to the training process"),
        ({}, 1, "gpu", 2, "enough for loader.decoder=gpu"),
    ],
)
def test_budget(
    host: Machine, found: dict[str, float], ranks: int, decoder: str, workers: int, reason: str
) -> None:
    host(**found)
    made = planned("loader.workers=auto", f"loader.decoder={decoder}", ranks=ranks, files=MODED)
    assert made.workers == workers and reason in made.reason


def test_a_configured_number_is_used(host: Machine) -> None:
    """Even more workers than cores."""
    host(cores=4)
    for number in (0, 1, 20):
        made = planned(f"loader.workers={number}", "loader.decoder=gpu", files=MODED)
        assert (made.workers, made.reason) == (number, "as configured")


@pytest.mark.parametrize(
    ("cores", "workers", "decoder", "device", "expected"),
    [
        # workers, ceiling, processes, cores, measured, start_workers
        (16, "auto", "pillow", CUDA, (15, 30, 15, 15, True, PROBE_WORKERS)),
        (2, "auto", "pillow", CUDA, (1, 2, 1, 1, True, 1)),
        (16, "auto", "pillow", CPU, (15, 15, 15, 15, False, 15)),
        (16, "auto", "hybrid", CUDA, (14, 28, 15, 14, True, PROBE_WORKERS)),
        # all cores validate
        (16, "auto", "gpu", CUDA, (2, 15, 15, 2, True, PROBE_WORKERS)),
        (16, "3", "pillow", CUDA, (3, 3, 3, 15, False, 3)),
        (16, "40", "pillow", CUDA, (40, 40, 40, 15, False, 40)),
        (16, "0", "gpu", CUDA, (0, 0, 0, 2, False, 0)),
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
    options = f"loader.workers={workers}", f"loader.decoder={decoder}"
    found = planned(*options, device=device, files=MODED)
    counts = found.workers, found.ceiling, found.processes, found.cores
    assert (*counts, found.measured, found.start_workers) == expected
    assert bool(found.not_measured) == (workers == "auto" and not found.measured)
    assert found.modes == ("cpu" if decoder == "pillow" else decoder,)


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
    ],
)
def test_when_it_is_not_measured(
    host: Machine, files: Dataset, options: dict, found: dict[str, float], reason: str
) -> None:
    host(**found)
    made = planned("loader.workers=auto", "loader.decoder=pillow", files=files, **options)
    assert made.measured == (reason == "") and reason in made.not_measured


def test_auto_compares_the_modes_of_a_dataset(host: Machine) -> None:
    host()
    cpu = MODED.decoder
    found = planned("loader.workers=auto", files=MODED)
    assert (found.modes, found.unused) == (MODED.modes, "")
    assert found.lines()[0].endswith(f", decoder {cpu} or gpu or hybrid")
    for stored in ("cpu", "gpu", "hybrid"):  # a resumed run keeps its pixels
        kept = planned("loader.workers=auto", files=MODED, stored_mode=stored)
        assert (kept.modes, kept.unused) == ((stored,), "")
    alone = planned("loader.workers=4", files=MODED)
    reason = "gpu and hybrid are only compared if loader.workers=auto is measured"
    assert alone.modes == ("cpu",) and alone.lines()[0].endswith(f", decoder {cpu} ({reason})")
    plain = Files(100_000)
    plain.no_modes = "the files are odd"
    assert planned("loader.workers=auto", files=plain).lines()[0].endswith(" (the files are odd)")
    assert planned("loader.workers=auto", files=plain, stored_mode="gpu").modes == ("cpu",)
    for mode, files in (("gpu", MANY), ("hybrid", Grey(1000, 24))):
        with pytest.raises(UserError, match=rf"^loader.decoder={mode}: there is none here; give "):
            planned(f"loader.decoder={mode}", files=files)


def test_slots_of_a_known_case(host: Machine) -> None:
    """4 batches ready, one in the step, two in progress."""
    host()
    found = planned("loader.workers=0", "loader.prefetch_batches=4", "loader.batch_size=256")
    assert found.slots == 4 + 1 + 2
