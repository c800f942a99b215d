"""What a run prints about itself before its first step."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from conf.schema import Config, override_keys
from conf.terminal import duration
from engine.compute import Compute
from engine.distributed import World
from engine.log.console import results, say
from engine.metrics import BestBy, format_value
from engine.run import Run
from engine.schedule import Schedule, suited_batch, with_batch_size
from engine.state import TrainState
from pipeline.build import Datasets
from pipeline.machine import cores

DRIVER = Path("/proc/driver/nvidia/version")  # on a machine with NVIDIA's driver for Linux
CORE_FLOPS = 3e10  # operations per second of a CPU core in training, measured for ResNet-18 and -50
FEW_STEPS = 10  # with fewer steps per epoch, a smaller batch size is advised


def print_plan(
    datasets: Datasets, schedule: Schedule, compute: Compute, state: TrainState, run: Run
) -> None:
    """Print what the run will do, or the results of an earlier start that finished it."""
    if not run.world.is_main:
        return
    notes = (*run.config.notes, *setup_notes(run.config, datasets, run.world))
    lines = [
        f"run       {run.path}",
        *planned(datasets, schedule, compute, schedule.stop_step - state.step),
        *(f"note      {note}" for note in notes),
    ]
    if run.resumed is not None:
        at = f"step {state.step:,}, epoch {round(schedule.epoch(state.step), 2):g}"
        by = BestBy.of(run.config.train.best_by).name
        best = f"; best {format_value(by, state.best[by])} so far" if by in state.best else ""
        lines.append(f"state     resumed at {at}, from {run.resumed}{best}")
    if run.finished_summary is not None:
        more = "a larger train.max_steps to continue, " if state.step < schedule.steps else ""
        lines = [  # not the plan, and nothing of the earlier start that looks like a new one
            f"status    this run is finished after step {state.step:,}: give {more}another "
            "run.name to train again, or checkpoint.resume=never to start over in this directory",
            *results(run.path, run.finished_summary),
        ]
    say(*lines, *(f"history   {line}" for line in state.history))


def planned(datasets: Datasets, schedule: Schedule, compute: Compute, left: int) -> Iterable[str]:
    """Yield lines about the images, the steps, of which some are left, the model and the device."""
    config, kind = schedule.config, "classes" if "label" in datasets.train.fields else "outputs"
    images = f"{schedule.images:,} training and {len(datasets.val):,} validation images"
    yield f"data      {images}, {len(datasets.classes)} {kind}"
    steps = f"{schedule.stop_step:,} of {schedule.batch_size} images"
    if schedule.ranks > 1:
        steps += f" ({schedule.local_batch_size} on each of {schedule.ranks} ranks)"
    if (count := schedule.micro_batches) > 1:
        steps += f" in {count} micro-batches of {schedule.local_batch_size // count}"
    epochs = f"{config.train.epochs:g} epoch{'' if config.train.epochs == 1 else 's'}"
    steps += f", {schedule.steps_per_epoch:,.1f} per epoch, {epochs}"
    if (every := config.train.validate_every_epochs) != 1:
        steps += f", validated every {every:g} epochs"
    if schedule.stop_step < schedule.steps:
        steps += f"; {schedule.steps:,} without train.max_steps"
    yield f"steps     {steps}"
    size, val_size = datasets.train_size, datasets.val_size
    yield (
        f"model     {config.model.name}, {compute.parameters / 1e6:.2f} M parameters, "
        f"{compute.flops / 1e9:.2f} GFLOP forward per {size} px image"
        f"{'' if val_size == size else f'; validated at {val_size} px'}"
    )
    warmup = f", warm-up until step {schedule.warmup_steps:,}" if schedule.warmup_steps else ""
    yield f"optim     {config.optim.name}, lr {config.optim.lr:g}, {config.schedule.name}{warmup}"
    layout, mode = ", channels_last" if compute.channels_last else "", compute.compile_mode
    compiled = "" if mode == "off" else f", compile {mode} (takes minutes at the first start)"
    yield f"device    {compute.name}, {compute.precision}{layout}{compiled}"
    if compute.device.type == "cpu":
        time = 3 * compute.flops * left * schedule.batch_size / CORE_FLOPS / cores()  # seconds
        memory = compute.flops * schedule.local_batch_size / schedule.micro_batches / 1e11  # GB
        less = "; less with a train.micro_batch" if memory > 4 else ""
        if time > 600 or less:
            yield f"estimate  about {duration(time)} for the steps, {memory:.1f} GB of memory{less}"


def setup_notes(config: Config, datasets: Datasets, world: World) -> list[str]:
    """Return notes on values that are allowed, but probably not what the user wants."""
    size, stated, images = config.loader.batch_size, config.lr_batch_size, len(datasets.train)
    notes, smaller = list[str](), suited_batch(images)
    if images / size < FEW_STEPS and smaller < size:
        text = f"{images / size:.1f} optimiser steps per epoch are too few to train well; for "
        notes.append(f"{text}{images:,} images, try {with_batch_size(config, smaller)}")
    elif stated not in (None, size):
        lr = f"optim.lr={config.optim.lr:g} is for loader.batch_size={stated}"
        notes.append(f"{lr}; try {with_batch_size(config, size)}")
    if "optim.name" in config.changed and "optim.lr" not in config.changed:
        lr, name = f"optim.lr={config.optim.lr:g}", config.optim.name
        notes.append(f"{lr} was chosen for another optimiser than {name}; give optim.lr=0.001, too")
    warmup, epochs = config.schedule.warmup_epochs, config.train.epochs
    if warmup > epochs / 3 and "schedule.warmup_epochs" not in override_keys(config.overrides):
        shorter = f"schedule.warmup_epochs={epochs / 10:g}"
        clipped = " optim.clip_norm=1" * (config.optim.clip_norm is None)  # as in conf/compose.py
        notes.append(f"warm-up takes {warmup / epochs:.0%} of the training; try {shorter}{clipped}")
    count = torch.cuda.device_count() if world.device.type == "cuda" and world.size == 1 else 0
    if count > 1:
        notes.append(f"`torchrun --nproc-per-node {count} train.py ...` uses all {count} GPUs")
    on_cpu = config.train.device == "auto" and world.device.type == "cpu"
    if on_cpu and DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        remedy = "run `make env` again on this machine"
        if cuda := torch.version.cuda:
            remedy = f"`nvidia-smi` must list it; docs/install.md has the driver for CUDA {cuda}"
        unused = f"torch {torch.__version__} cannot use the NVIDIA GPU"
        notes.append(f"training on the CPU: {unused}; {remedy}")
    if datasets.train.fingerprint() == datasets.val.fingerprint():
        notes.append("data.val holds the training images: its accuracy says little; give others")
    return notes + datasets.train.notes()
