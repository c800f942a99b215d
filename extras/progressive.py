"""Progressive resizing: the first epochs train on smaller images, as in FFCV's recipes.

    python train.py recipe=imagenet_rn50_fast data.root=/imagenet

A process has images of one size. After the last step of its size, it replaces itself by the same
command, which resumes the run with the next size. So a signal, the exit status and the ranks of
torchrun are those of one process.
"""

import atexit
import math
import os
import sys
from bisect import bisect
from dataclasses import replace
from pathlib import Path

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import Config, RunConfig, show
from engine.checkpoint import file_name
from engine.distributed import World
from engine.run import Run
from pipeline.build import build_datasets


def choose_size(config: Config, world: World, sizes: dict[int, int]) -> Config:
    """Return the config for the size that is next in this run. Collective.

    `sizes`: epoch -> side of the training images in pixels from then on. Raises UserError if they
    do not fit the config.
    """
    _check_sizes(config, sizes)
    with world.shared_errors():
        images = len(build_datasets(config).train)
    step = Run(config, world).read_checkpoint().get("step", 0)
    # First step of each size, ascending: the number of steps before its epoch, rounded up -> px
    starts = {-(-epoch * images // config.loader.batch_size): side for epoch, side in sizes.items()}
    stop = config.train.max_steps or math.inf
    reached = [first for first in starts if first < stop]
    position = bisect(reached, step)
    start, later = reached[position - 1], reached[position:]
    overrides = [*config.overrides, f"data.image_size={starts[start]}"]
    overrides.append(f"data.val_size={config.data.val_size}")
    if later:
        overrides.append(f"train.max_steps={later[0]}")
    sized = from_overrides(overrides)
    if later:
        text = f"{starts[start]} px until step {later[0]:,}, then the program starts again"
        sized.notes.append(text)
        if getattr(sys.modules["__main__"], "CONFIG", None) is config:  # not called by a script
            _start_again_after(later[0], config.run)
    accept = config.checkpoint.accept_changes or 0 < step == start
    checkpoint = replace(sized.checkpoint, accept_changes=accept)
    return replace(sized, run=config.run, overrides=config.overrides, checkpoint=checkpoint)


def _check_sizes(config: Config, sizes: dict[int, int]) -> None:
    side, length, epochs = config.data.image_size, config.train.epochs, list(sizes)
    if epochs != sorted({0, *epochs}) or epochs[-1] >= length or sizes[epochs[-1]] != side:
        ends = f"the last with data.image_size={side} and before train.epochs={show(length)}"
        raise UserError(f"train.prepare: sizes={show(sizes)}: give `epoch: px` from 0 on, {ends}")


def _start_again_after(step: int, run: RunConfig) -> None:
    path = Path(run.dir, "checkpoints", file_name(step))
    resume = [f"run.dir={run.dir}", f"run.name={run.name}", "checkpoint.resume=auto"]
    atexit.register(_start_again, path, _written(path), resume)


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _start_again(path: Path, before: float, overrides: list[str]) -> None:
    """Replace this process by its command with more overrides, if it wrote the checkpoint."""
    if _written(path) not in (0.0, before):
        sys.stdout.flush()
        os.environ["TRAINER_STORE_PREFIX"] = path.stem  # the same on all ranks
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *overrides])
