"""The checks of scripts/doctor.py on the plan of the training and the disks."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import train
from engine.compute import choose_compute
from engine.distributed import World, resolve_device
from engine.log.introduction import setup_notes
from engine.losses import build_criterion, class_weights
from engine.schedule import make_schedule
from pipeline import machine
from pipeline.build import build_datasets
from scripts.lib.checks import Case, NotChecked, Row, fail, ok, warn

GIB = 1 << 30
NCCL_BYTES = 256 << 20  # of /dev/shm, for several ranks


def plan(case: Case) -> Iterator[Row]:
    """Build the parts of the training, as far as they need no ranks, and pass its notes on.

    They tell of GPUs that are not used, and of a driver that does not fit.
    """
    device = resolve_device(case.config.train.device, 0, case.ranks)
    config = case.config = train.resolve_config(case.config, World(0, 1, 0, 1, device))
    if case.datasets is None:
        raise NotChecked("there is no plan without data, see data")
    # Again, with loader.decoder, which depends on the device, and what train.prepare has changed.
    datasets, world = build_datasets(config, device), World(0, case.ranks, 0, case.ranks, device)
    build_criterion(config.train, class_weights(config.train, datasets))
    schedule = make_schedule(config, len(datasets.train), world)
    case.compute = choose_compute(config, datasets, device, schedule.stop_step)
    yield from (warn(n, "training still starts") for n in setup_notes(config, datasets, world))
    yield ok(
        f"{config.model.name}, {case.compute.parameters / 1e6:.2f} M parameters, "
        f"{len(datasets.classes):,} classes; {schedule.stop_step:,} steps of {schedule.batch_size} "
        f"images of {datasets.train_size} px on {case.compute.name}"
    )
    if (quota := machine.cpu_quota()) < (threads := machine.cores()):
        cure = "if this is not intended, raise the container's --cpus or Slurm's --cpus-per-task"
        yield warn(f"a CPU quota of {quota:g} cores for {threads} hardware threads", cure)


def disk(case: Case) -> Iterator[Row]:
    """Compare the free space of run.dir with the checkpoints, and /dev/shm with what NCCL uses."""
    if case.compute is None:
        raise NotChecked("needs the plan, see plan")
    path = Path(case.config.run.dir).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    # At most, in float32: the weights, their moving average and two moments of the optimiser.
    free, size = shutil.disk_usage(folder).free, 4 * 4 * case.compute.parameters
    number = case.config.checkpoint.keep + 2  # the best, and the one being written
    text = f"{folder}: {free / 1e9:,.1f} GB free"
    text += f"; {number} checkpoints of at most {size / 1e9:.3f} GB"
    missing = number * size - free
    if not os.access(folder, os.W_OK):
        yield fail(f"{folder}: cannot be written", "give a run.dir with write permission")
    elif missing > 0:
        yield fail(text, f"free {missing / 1e9:,.1f} GB more, or lower checkpoint.keep")
    else:
        yield ok(text)
    if case.ranks > 1 and os.path.exists("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        text = f"/dev/shm: {free / GIB:.2f} GiB free, which NCCL uses"
        yield warn(text, "start the container with --ipc=host") if free < NCCL_BYTES else ok(text)
