"""What a run prints about itself before its first step."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from conf.schema import Config
from engine.compute import Compute, has_batch_norm
from engine.distributed import World
from engine.log.console import results
from engine.run import Run
from engine.schedule import Schedule, suited_batch, with_batch_size
from engine.state import TrainState
from pipeline.build import Datasets

DRIVER = Path("/proc/driver/nvidia/version")  # on a machine with NVIDIA's driver for Linux
FEW_STEPS = 10  # with fewer steps per epoch, a smaller batch size is advised


def print_plan(
    datasets: Datasets, schedule: Schedule, compute: Compute, state: TrainState, run: Run
) -> None:
    """Print what the run will do, or the results of an earlier start that finished it."""
    if not run.world.is_main:
        return
    notes = (*run.config.notes, *setup_notes(run.config, datasets, run.world))
    lines = [
        f"run      {run.path}",
        *plan_lines(datasets, schedule, compute, state.model),
        *(f"note     {note}" for note in notes),
    ]
    if run.resumed is not None:
        name = run.resumed if run.is_first_start else run.resumed.name
        done = ", and no step is left to do" if state.step >= schedule.stop_step else ""
        lines.append(f"state    resumed from {name}{done}")
    if run.finished_summary is not None:
        more = "a larger train.max_steps to continue, " if state.step < schedule.steps else ""
        lines = [  # not the plan, and nothing of the earlier start that looks like a new one
            f"status    this run is finished after step {state.step:,}: give {more}another "
            "run.name to train again, or checkpoint.resume=never to start over in this directory",
            *results(run.path, run.finished_summary),
        ]
    print(*lines, *(f"history  {line}" for line in state.history), sep="\n", flush=True)


def plan_lines(
    datasets: Datasets, schedule: Schedule, compute: Compute, model: nn.Module
) -> Iterable[str]:
    """Yield lines about the images, the steps, the model and the device."""
    config, classes = schedule.config, len(datasets.classes)
    yield (
        f"data     {schedule.images:,} training and {len(datasets.val):,} validation images, "
        f"{classes} {'classes' if 'label' in datasets.train.fields else 'outputs'}"
    )
    micro_batch = schedule.local_batch_size // schedule.micro_batches
    steps = f"{schedule.stop_step:,} of {schedule.batch_size} images"
    if schedule.ranks > 1:
        steps += f" ({schedule.local_batch_size} on each of {schedule.ranks} ranks)"
    if schedule.micro_batches > 1:
        steps += f" in {schedule.micro_batches} micro-batches of {micro_batch}"
    epochs = f"{config.train.epochs:g} epoch{'' if config.train.epochs == 1 else 's'}"
    steps += f", {schedule.steps_per_epoch:,.1f} per epoch, {epochs}"
    if (every := config.train.validate_every_epochs) != 1:
        steps += f", validated after every {every:g}"
    if schedule.stop_step < schedule.steps:
        steps += f", in all {schedule.steps:,} steps: stops early"
    yield f"steps    {steps}"
    group = micro_batch * (schedule.ranks if config.model.sync_bn else 1)
    norm = f"; BatchNorm over {group} images" if has_batch_norm(model) else ""
    yield (
        f"model    {compute.parameters / 1e6:.2f} M parameters, {compute.flops / 1e9:.2f} GFLOP "
        f"forward per {datasets.train_size} px image; validated at {datasets.val_size} px{norm}"
    )
    layout = ", channels_last" if compute.channels_last else ""
    slow = "" if (mode := compute.compile_mode) == "off" else " (takes minutes at the first start)"
    yield f"device   {compute.name}, {compute.precision}{layout}, compile {mode}{slow}"


def too_few_steps(config: Config, images: int) -> str:
    """Return a note that advises a smaller batch size, if an epoch has few steps; else ""."""
    size, smaller = config.loader.batch_size, suited_batch(images)
    text = f"{images / size:.1f} optimiser steps per epoch are too few to train well; for "
    text += f"{images:,} images, try {with_batch_size(config, smaller)}"
    return text if images / size < FEW_STEPS and smaller < size else ""


def setup_notes(config: Config, datasets: Datasets, world: World) -> list[str]:
    """Return notes on values that are allowed, but probably not what the user wants."""
    notes = [few] if (few := too_few_steps(config, len(datasets.train))) else []
    size, stated = config.loader.batch_size, config.lr_batch_size
    if not few and stated not in (None, size):
        lr = f"the recipe's optim.lr={config.optim.lr:g} is for loader.batch_size={stated}"
        notes.append(f"{lr}; try {with_batch_size(config, size)}")
    if "optim.name" in config.changed and "optim.lr" not in config.changed:
        lr, name = f"optim.lr={config.optim.lr:g}", config.optim.name
        notes.append(f"{lr} was chosen for another optimiser than {name}; give optim.lr=0.001, too")
    count = torch.cuda.device_count() if world.device.type == "cuda" and world.size == 1 else 0
    if count > 1:
        command = f"torchrun --nproc-per-node {count} train.py ..."
        notes.append(f"this machine has {count} GPUs and the run uses one; `{command}` uses all")
    on_cpu = config.train.device == "auto" and world.device.type == "cpu"
    if on_cpu and DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        remedy = "run `make env` again on this machine"
        if cuda := torch.version.cuda:
            remedy = f"`nvidia-smi` must list it; docs/install.md has the driver for CUDA {cuda}"
        notes.append(
            f"training on the CPU: torch {torch.__version__} cannot use the NVIDIA GPU; {remedy}"
        )
    if datasets.train.fingerprint() == datasets.val.fingerprint():
        notes.append(
            "data.val holds the training images, so its accuracy says nothing about new images; "
            "give another split"
        )
    return notes + datasets.train.notes()
