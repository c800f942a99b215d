"""The checks of scripts/doctor.py on the GPUs, the cores, the memory and the disks."""

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import train
from engine.compute import choose_compute
from engine.distributed import World, resolve_device
from engine.log.introduction import setup_notes
from engine.losses import build_criterion, class_weights
from engine.schedule import make_schedule
from pipeline import decode, machine
from pipeline.build import build_datasets
from pipeline.decode import DECODERS
from scripts.lib.checks import Case, NotChecked, Row, fail, few, ok, warn

GIB = 1 << 30
NCCL_BYTES = 256 << 20  # of /dev/shm, for several ranks


def gpu(case: Case) -> Iterator[Row]:
    """Compare driver and PyTorch, and say how many GPUs will be used."""
    choice = case.config.train.device
    if choice not in ("auto", "cpu", "cuda"):
        raise NotChecked(f"train.device={choice} was not tested")
    if not torch.cuda.is_available():
        why = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        text = f"training will run on the CPU: torch {torch.__version__} {why}"
        if os.path.exists("/proc/driver/nvidia/version"):
            text += " although there is an NVIDIA driver"
        cure = "sufficient for a small run; otherwise install a driver and PyTorch with CUDA"
        yield fail(text, cure) if choice == "cuda" else warn(text, cure)
        return
    count, used = torch.cuda.device_count(), 0 if choice == "cpu" else case.ranks
    names = Counter(torch.cuda.get_device_properties(i).name for i in range(count))
    text = f"{few(f'{n} {name}' for name, n in names.items())}, {used} used"
    text += f"; torch {torch.__version__}"
    cure = f"torchrun --nproc-per-node {count} train.py uses all: check with --ranks {count}"
    yield warn(text, cure if used else "remove train.device") if used < count else ok(text)


def plan(case: Case) -> Iterator[Row]:
    """Build the parts of the training, as far as they need no ranks."""
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


def cores(case: Case) -> Iterator[Row]:
    usable, online, quota = machine.cores(), os.cpu_count() or 1, machine.cpu_quota()
    text = f"{usable} of {online} hardware threads by affinity, "
    text += "no CPU quota" if quota == math.inf else f"a CPU quota of {quota:g}"
    if min(usable, quota) < 2 * case.ranks:
        cure = "the training process and its workers would share cores: give more cores"
        yield warn(f"{text}: under two for each rank", cure)
    elif usable < online or quota < usable:
        cure = "if unintended, check taskset, the container's --cpus, Slurm's --cpus-per-task"
        yield warn(text, cure)
    else:
        yield ok(text)
    have, chosen = decode.installed(), case.config.loader.decoder
    best = decode.resolve(chosen) if chosen in DECODERS else have[0]
    text = f"loader.decoder={chosen}: on the CPU {best}; installed: {', '.join(have)}"
    cure = "install a C compiler (loader.decoder=region says what is missing): it is faster"
    yield ok(text) if best == next(iter(decode.DECODERS)) else warn(text, cure)


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
