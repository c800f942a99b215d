"""Progressive resizing: the first epochs train on smaller images, as in FFCV's recipes.

    python train.py recipe=imagenet_rn50_fast data.root=/imagenet

A process has images of one size. After the last step of its size, it replaces itself by the same
command, which resumes the run with the next size. So a signal, the exit status and the ranks of
torchrun are those of one process.
"""

import atexit
import os
import sys
from dataclasses import replace
from pathlib import Path

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import Config, show
from engine.checkpoint import file_name
from engine.distributed import World
from engine.run import Run
from pipeline.build import build_datasets


def choose_size(config: Config, world: World, sizes: dict[int, int]) -> Config:
    """Return the config for the size that is next in this run. Collective.

    `sizes`: epoch -> side of the training images in pixels from then on. Raises UserError if they
    do not fit the config.
    """
    epochs, side, length = list(sizes), config.data.image_size, config.train.epochs
    if epochs != sorted({0, *epochs}) or epochs[-1] >= length or sizes[epochs[-1]] != side:
        ends = f"the last with data.image_size={side} and before train.epochs={show(length)}"
        raise UserError(f"train.prepare: sizes={show(sizes)}: give `epoch: px` from 0 on, {ends}")
    with world.shared_errors():
        images = len(build_datasets(config).train)
    starts = {-(-epoch * images // config.loader.batch_size): side for epoch, side in sizes.items()}
    step, own = Run(config, world).read_checkpoint().get("step", 0), config.run
    last = config.train.max_steps or max(step, *starts) + 1
    start = max(first for first in starts if first <= min(step, last - 1))
    end = min((first for first in starts if start < first < last), default=None)
    overrides = [f"data.image_size={starts[start]}", f"data.val_size={config.data.val_size}"]
    overrides += [] if end is None else [f"train.max_steps={end}"]
    found = from_overrides([*config.overrides, *overrides])
    if end is not None:
        found.notes.append(f"{starts[start]} px until step {end:,}, then the program starts again")
        path = Path(own.dir, "checkpoints", file_name(end))
        if getattr(sys.modules["__main__"], "CONFIG", None) is config:  # not called by a script
            resume = [f"run.dir={own.dir}", f"run.name={own.name}", "checkpoint.resume=auto"]
            atexit.register(_start_again, path, _written(path), resume)
    accept = config.checkpoint.accept_changes or 0 < step == start
    checkpoint = replace(found.checkpoint, accept_changes=accept)
    return replace(found, run=own, overrides=config.overrides, checkpoint=checkpoint)


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _start_again(path: Path, before: float, overrides: list[str]) -> None:
    """Replace this process by its command with more overrides, if it wrote the checkpoint."""
    if _written(path) not in (0.0, before):
        sys.stdout.flush()
        os.environ["TRAINER_STORE_PREFIX"] = path.stem  # the same on all ranks
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *overrides])
