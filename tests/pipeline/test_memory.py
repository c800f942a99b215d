"""The loader's memory is computed before it is allocated; too little free memory is an error."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf import cli
from conf.schema import START_METHOD, Config, UserError
from engine.distributed import World
from pipeline import machine
from pipeline.build import Datasets, build_datasets
from pipeline.feed import Feed, open_feed
from pipeline.loader import Source
from pipeline.loader_plan import (
    FEWEST_SLOTS,
    GIB,
    WORKER_BYTES,
    MemoryPlan,
    batches_ready,
    plan_loader,
    plan_memory,
)
from tests.engines import PillowEngines
from tests.loader_plans import loader_plan, world_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # naming a GPU needs none

Planned = Callable[..., MemoryPlan]


def small(*overrides: str) -> Config:
    """Images of 24 px for training, of 32 px for validation."""
    return cli.load(
        [
            "augment=demo",
            "augment.val=[{resize: {size: 32}}, {center_crop: {size: 32}}]",
            "data.image_size=24",
            "loader.batch_size=8",
            *overrides,
        ]
    )


def plan(
    config: Config,
    *,
    datasets: Datasets | None = None,
    device: torch.device = CPU,
    ranks: int = 1,
    ranks_here: int = 1,
    workers: int = 2,
    **options: Any,
) -> MemoryPlan:
    standard: dict[str, Any] = dict(decoder="none", dtype=torch.float32, state_bytes=0)
    world = world_of(device, ranks, ranks_here)
    numbers = range(workers, workers + 1)
    return plan_memory(
        config, datasets or build_datasets(config), world, workers=numbers, **(standard | options)
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free memory of the machine, in bytes."""
    return lambda number: monkeypatch.setattr(machine, "free_memory", lambda: number)


def test_ulimit_f_applies_to_shared_memory(
    file_size_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    """A batch of 8 takes at most 8 * 3 * 32 * 32 bytes in the larger of the two rings."""
    config = small("data=fake", "loader.prefetch_batches=1")
    largest = plan(config).slots * 8 * 3 * 32 * 32
    with file_size_limit(largest):
        plan(config)
    with (
        file_size_limit(largest - 1),
        pytest.raises(UserError, match=r"a buffer of .*, ulimit -f allows .*; raise it"),
    ):
        plan(config)


def allocated(source: Source) -> int:
    return sum(shared.array.nbytes for shared in source.buffers)


@pytest.mark.parametrize("decoder", ["pillow", "gpu", "hybrid"])
@pytest.mark.parametrize(
    ("batch_size", "workers", "world_size", "overrides"),
    [
        (1, 0, 1, []),
        (8, 0, 1, ["loader.prefetch_batches=1"]),
        (8, 3, 1, []),  # three workers have nine tasks of 8 images in progress
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
    world_size: int,
    overrides: list[str],
) -> None:
    monkeypatch.setattr("pipeline.gpu.GpuDecoder", PillowEngines)
    config = small(
        f"data.root={image_root}",
        f"loader.batch_size={batch_size}",
        "loader.start_method=fork",
        *overrides,
    )
    datasets = build_datasets(config)
    world = world_of(CPU, world_size)
    loader = loader_plan(config, datasets, world, workers=workers, decoder=decoder)
    planned = loader.memory
    with open_feed(config, datasets, loader, world) as feed:
        sources = sources_of(feed)
        assert [source.encoded is not None for source in sources] == [decoder != "pillow", False]
        assert planned.buffers == sum(map(allocated, sources))
        assert planned.slots == feed.train.loader.slots == feed.val.loader.slots


def sources_of(feed: Feed) -> list[Source]:
    assert feed.train.loader.pool is feed.val.loader.pool
    return feed.train.loader.pool.sources


def test_planned_bytes_of_a_known_case() -> None:
    """Two rings of 256 images of 224 px: 4 batches ready, one in the step, two in progress."""
    planned = plan(cli.load(["data=fake", "loader.prefetch_batches=4"]), workers=0)
    assert planned.slots == 4 + 1 + 2
    assert planned.buffers == 2 * 7 * 256 * (224 * 224 * 3 + 24)
    assert planned.line().startswith(
        "0.50 GiB of batch buffers (7 slots for each split, not page-locked), "
        "workers about 0.00 GiB; "
    )


def test_spawned_workers_need_more_memory() -> None:
    costs = {
        method: plan(small("data=fake", f"loader.start_method={method}"), workers=3).worker_bytes
        for method in WORKER_BYTES
    }
    assert costs["spawn"] > 2 * costs["forkserver"] > 0
    assert costs["fork"] == costs["forkserver"] == 3 * WORKER_BYTES["forkserver"]
    assert plan(small("data=fake", "loader.start_method=spawn"), workers=0).worker_bytes == 0


@pytest.mark.parametrize(
    ("device", "pin_memory", "pinned"),
    [(CPU, True, False), (CUDA, False, False), (CUDA, True, True)],
)
def test_buffers_are_page_locked_for_a_gpu_only(
    device: torch.device, pin_memory: bool, pinned: bool
) -> None:
    planned = plan(small("data=fake", f"loader.pin_memory={pin_memory}"), device=device)
    assert planned.pinned == (planned.buffers if pinned else 0)
    assert ("not page-locked" in planned.line()) == (not pinned)


@pytest.mark.parametrize(
    ("last", "count"),
    [
        ("rand_augment", 2),
        ("{rand_augment: {count: 3}}", 3),
        ("trivial_augment", 1),
        ("rand_augment, horizontal_flip", 0),
        ("v2.RandAugment", 0),
    ],
)
def test_a_gpu_applies_operations_at_the_end_of_the_training_list(
    monkeypatch: pytest.MonkeyPatch, image_root: Path, last: str, count: int
) -> None:
    crop = "{random_resized_crop: {size: 24}}"
    config = small(f"data.root={image_root}", f"augment.train=[{crop}, {last}]")
    on_cpu = plan(config)
    monkeypatch.setattr("pipeline.loader_plan.has_kernels", lambda device: device == CUDA)
    on_gpu = plan(config, device=CUDA)
    assert (on_cpu.operations, on_gpu.operations) == (0, count)
    # Each drawn operation is two numbers of 8 bytes.
    assert on_gpu.buffers - on_cpu.buffers == on_gpu.slots * 8 * count * 16


def test_batches_ready_on_the_gpu() -> None:
    """A slot on the GPU holds the uint8 pixels and the images for the step."""
    config = small("data=fake", "loader.prefetch_batches=2")
    pixels = 3 * 8 * 3 * (24 * 24 + 32 * 32)
    assert plan(config, device=CUDA, dtype=torch.bfloat16).device == pixels * (1 + 2)
    assert plan(config, device=CUDA, dtype=torch.float32).device == pixels * (1 + 4)
    assert "on the GPU" in plan(config, device=CUDA).line()
    assert plan(config).device == 0 and "on the GPU" not in plan(config).line()


def test_ranks_share_free_memory_and_the_batch(free: Callable[[int], None]) -> None:
    """Two nodes of four ranks: 1/8 of the batch and 1/4 of the node's memory per rank."""
    free(8 * GIB)
    config = small("data=fake", "loader.batch_size=512")
    alone, shared = plan(config, workers=0), plan(config, workers=0, ranks=8, ranks_here=4)
    assert alone.buffers == 8 * shared.buffers
    assert (alone.free, shared.free) == (8 * GIB, 2 * GIB)


def test_the_node_of_rank_0_has_memory_for_checkpoints(
    free: Callable[[int], None],
) -> None:
    """Two nodes of two ranks: rank 0 copies the training state, and rank 1 shares its memory."""
    free(16 * GIB)
    config = small("data=fake")
    datasets = build_datasets(config)
    copied = []
    for rank in range(4):
        world = World(rank, size=4, local_rank=rank % 2, local_size=2, device=CUDA)
        planned = plan_memory(
            config,
            datasets,
            world,
            workers=range(1, 3),
            decoder="none",
            dtype=torch.float32,
            state_bytes=3 * GIB,
        )
        assert planned.host == planned.buffers + planned.worker_bytes + planned.checkpoint
        assert ("checkpoints 1.50 GiB; " in planned.line()) == (rank < 2)
        copied.append(planned.checkpoint)
    assert copied == [3 * GIB // 2, 3 * GIB // 2, 0, 0]
    full = plan(config, state_bytes=GIB)
    free(full.host - 1)
    assert plan(config, state_bytes=GIB).slots == full.slots - 1
    free(GIB)
    with pytest.raises(UserError, match=r"needs at least 1\.\d+ GiB \(.*checkpoints 1\.00 GiB; "):
        plan(config, state_bytes=GIB)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_plan_shrinks_until_it_fits(free: Callable[[int], None], ranks: int) -> None:
    """Slots first, then workers; less than a worker and three slots is an error."""
    config = small("data=fake")
    free(16 * GIB)
    full = plan(config, ranks_here=ranks)
    free(ranks * full.host)
    assert plan(config, ranks_here=ranks) == replace(full, free=full.host)
    free(ranks * full.host - 1)
    less = plan(config, ranks_here=ranks)
    assert (less.ceiling, less.slots, less.slots_wanted) == (2, full.slots - 1, full.slots)
    each_slot = full.buffers // full.slots
    least = FEWEST_SLOTS * each_slot + WORKER_BYTES[START_METHOD]
    free(ranks * least)
    smallest = plan(config, ranks_here=ranks)
    assert (smallest.ceiling, smallest.slots, smallest.host) == (1, FEWEST_SLOTS, least)
    free(ranks * least - 1)
    with pytest.raises(
        UserError, match=r"^loader.batch_size=8: the loader needs at least"
    ) as error:
        plan(config, ranks_here=ranks)
    line = str(error.value)
    assert "\n" not in line and line.endswith("; lower it")
    assert ("for each of 4 ranks" in line) == (ranks == 4)


def test_fewer_slots_keep_fewer_batches_on_the_gpu(free: Callable[[int], None]) -> None:
    config = small("data=fake", "loader.prefetch_batches=6")
    free(16 * GIB)
    full = plan(config, device=CUDA)
    free(full.host - (full.slots - 4) * (full.buffers // full.slots))
    less = plan(config, device=CUDA)
    assert less.slots == 4 and batches_ready(config, less.slots) == 2
    assert less.device == full.device * 3 // 7


def test_few_slots_change_no_batch(free: Callable[[int], None], image_root: Path) -> None:
    config = small(f"data.root={image_root}", "loader.start_method=fork")
    datasets, world = build_datasets(config), world_of(CPU)
    found = []
    for memory in (16 * GIB, WORKER_BYTES["fork"] + (1 << 20)):
        free(memory)
        loader = plan_loader(
            replace(config, loader=replace(config.loader, workers=2)),
            datasets,
            world,
            dtype=torch.float32,
            channels_last=False,
            state_bytes=0,
        )
        with open_feed(config, datasets, loader, world) as feed:
            images = [batch.images.clone() for batch in feed.train.batches(0, 9)]
            images += [batch.images.clone() for batch in feed.val.batches(0, feed.val_batches)]
        found.append((loader.workers, feed.train.loader.slots, feed.train.depth, images))
    (workers, _, depth, expected), (fewer, slots, shallow, images) = found
    assert (workers, depth) == (2, 4) and (fewer, slots, shallow) == (1, FEWEST_SLOTS, 1)
    assert all(map(torch.equal, expected, images)) and len(expected) == len(images)


def test_run_prints_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.train(
        small(
            "data=fake",
            "data.fake_images=40",
            "data.fake_classes=2",
            "model=resnet_tiny",
            "loader.workers=1",
            "loader.start_method=forkserver",
            "train.device=cpu",
            "train.max_steps=1",
            f"run.dir={tmp_path / 'run'}",
        )
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory ")]
    assert line.startswith("memory   0.00 GiB of batch buffers (")
    assert "not page-locked), workers about 0.05 GiB, checkpoints 0.00 GiB; " in line
    assert line.endswith("GiB are free, /dev/shm is not used")
