"""Suggest a learning rate: train for some steps while it rises, and see when the loss falls.

    python scripts/lr_find.py data.root=/imagenet
    python scripts/lr_find.py recipe=cifar10 data.root=/cifar10 optim=adamw --steps 200

Accepts train.py's key=value overrides and takes the steps that train.py would take, with the same
model, optimiser, batch size, augmentation and precision, except for the learning rate: it rises
exponentially from --lowest to --highest. The test ends early if the loss diverges. It prints a
suggestion for optim.lr and the smoothed loss, and writes lr_find.json to --out. The run directory
is not used. The method is the range test of arXiv 1506.01186.
"""

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps (100)")
    parser.add_argument("--lowest", type=float, help="first learning rate (0.03 x optim.lr)")
    parser.add_argument("--highest", type=float, help="last learning rate (3000 x optim.lr)")
    parser.add_argument("--out", type=Path, default=Path(), help="output folder (the current one)")
    OPTIONS, CONFIG = parser.read_config()
    # The loss rises again at about 10 times the best learning rate with SGD, at 100 with AdamW.
    OPTIONS.lowest = OPTIONS.lowest or CONFIG.optim.lr * 0.03
    OPTIONS.highest = OPTIONS.highest or CONFIG.optim.lr * 3000
    if OPTIONS.steps < 20 or not 0 < OPTIONS.lowest < OPTIONS.highest < math.inf:
        parser.error("give --steps of at least 20, and 0 < --lowest < --highest")

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

import train
from conf import cli
from conf.schema import Config
from engine.checkpoint import write_json
from engine.distributed import join_world
from engine.run import Run
from engine.schedule import Schedule
from engine.state import TrainingError
from pipeline.feed import open_feed
from scripts.lib.trained import exit_status

DIVERGED = 4.0  # multiple of the lowest loss at which the test ends, as in fastai
LEAST_LOSSES = 10  # fewer do not make a curve
SMOOTHING = 0.03  # standard deviation of the smoothing, as a fraction of the steps
FALL, FRACTION = 0.25, 0.07  # see `suggest`
LINES, WIDTH = 20, 60  # of the curve that is printed


@dataclass(frozen=True)
class Rise(Schedule):
    """A learning rate that rises exponentially from `lowest` to `highest` in `length` steps."""

    length: int = 0
    lowest: float = 0.0
    highest: float = 0.0

    def lr(self, step: int) -> float:
        return self.lowest * (self.highest / self.lowest) ** (step / (self.length - 1))


def range_test(config: Config, *, steps: int, lowest: float, highest: float) -> list[float]:
    """Train with a rising learning rate; return the loss of each step that was taken. Collective.

    Raises TrainingError: the loss diverges at once.
    """
    # Compiling takes longer than the steps. `never`: a checkpoint in the run directory is ignored.
    if config.model.compile == "auto":
        config = replace(config, model=replace(config.model, compile="off"))
    config = replace(config, checkpoint=replace(config.checkpoint, resume="never"))
    losses: list[float] = []
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.train.device, config.loader.timeout_seconds))
        config = train.resolve_config(config, world)
        run = Run(config, world)
        datasets, usual, compute, loss, state = train.build_parts(config, run, world)
        schedule = Rise(config, usual.images, usual.ranks, None, steps, lowest, highest)
        feed = stack.enter_context(open_feed(config, datasets, world, **compute.images))
        step = stack.enter_context(train.build_step(schedule, compute, loss, state, world))
        train.fit_memory(schedule, state, world, step, feed.train.batches(0, 1))
        for batch in feed.train.batches(0, steps):
            mean = step(batch)["loss"].clone()  # the next step overwrites the value
            losses.append(float(world.sum(mean)) / world.size)
            if has_diverged(losses):
                break
    if len(losses) < LEAST_LOSSES:
        found = f"the loss is {losses[-1]:g} at step {len(losses)}"
        raise TrainingError(f"{found}, with learning rates from {lowest:g}: give a lower --lowest")
    return losses


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the loss is not finite, or the mean of five steps DIVERGED times the lowest one."""
    means = np.convolve(losses, np.ones(5) / 5, "valid")
    rose = len(losses) >= LEAST_LOSSES and means[-1] > DIVERGED * means.min()
    return bool(rose) or not math.isfinite(losses[-1])


def smoothed(losses: Sequence[float], steps: int) -> np.ndarray:
    """Return the mean of each finite loss and its neighbours, weighted with a Gaussian.

    An average over the steps before, as in fastai, lags behind the learning rate.
    """
    finite = np.asarray([loss for loss in losses if math.isfinite(loss)])
    position = np.arange(len(finite))
    weights = np.exp(-(((position[:, None] - position) / (SMOOTHING * steps)) ** 2) / 2)
    return (weights @ finite) / weights.sum(1)


def suggest(losses: Sequence[float], lrs: Sequence[float], steps: int) -> float | str:
    """Return a learning rate, or why the test does not tell one.

    It is FRACTION of the highest learning rate at which FALL of the loss's fall is left. Between
    seeds it moves by a factor of 2, the minimum or the steepest descent by up to 40, because
    without warm-up a model often stops learning for a while (resnet_tiny on the demo and on 5,000
    images of CIFAR-10, with SGD and AdamW).
    """
    smooth = smoothed(losses, steps)
    first, lowest = smooth[0], smooth.min()
    # The median: the losses at the end are far from a smooth curve.
    noise = np.median(np.abs(np.asarray(losses[: len(smooth)]) - smooth))
    if first - lowest < 2 * noise:
        if len(losses) < steps:
            at = f"the loss diverged at step {len(losses)} before it fell"
            return f"{at}; give more --steps or a lower --lowest"
        return "the loss did not fall; give more --steps or a higher --highest"
    low = np.flatnonzero(smooth < first - FALL * (first - lowest))
    if low[-1] == len(smooth) - 1 and len(losses) == steps:
        return "the loss did not rise again; give a higher --highest"
    return float(FRACTION * lrs[low[-1]])


def chart(losses: Sequence[float], lrs: Sequence[float], steps: int) -> str:
    """Draw the smoothed loss as bars, in LINES lines over the learning rate."""
    smooth = smoothed(losses, steps)
    # A diverged loss would leave the rest of the curve flat.
    least, most = smooth.min(), 1.5 * smooth[0] - 0.5 * smooth.min() + 1e-6
    lines = []
    for i in np.linspace(0, len(smooth) - 1, LINES).round().astype(int):
        bar = "#" * int(WIDTH * (min(smooth[i], most) - least) / (most - least))
        lines.append(f"{lrs[i]:>9.2g}  loss {smooth[i]:<8.4g} {bar}".rstrip())
    return "\n".join(lines)


def find(config: Config, options: argparse.Namespace) -> int:
    steps, low, high = options.steps, options.lowest, options.highest
    losses = range_test(config, steps=steps, lowest=low, highest=high)
    if os.environ.get("RANK", "0") != "0":
        return 0
    lrs = np.geomspace(low, high, steps)[: len(losses)].tolist()
    found = suggest(losses, lrs, steps)
    title = f"{config.model.name}, {config.optim.name}, batch {config.loader.batch_size}: "
    title += found if isinstance(found, str) else f"try optim.lr={found:.2g}"
    print(chart(losses, lrs, steps), title, sep="\n", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "suggestion": None if isinstance(found, str) else found,
        "lrs": lrs,
        "losses": losses,
        "smoothed": smoothed(losses, steps).tolist(),
        "diverged": len(losses) < steps,
        "config": cli.to_yaml(config),
    }
    write_json(options.out / "lr_find.json", content)
    print(f"written to {options.out / 'lr_find.json'}")
    return int(isinstance(found, str))


if __name__ == "__main__":
    sys.exit(exit_status(partial(find, CONFIG, OPTIONS), "lr_find.py"))
