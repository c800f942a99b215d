"""Suggest a learning rate: train for some steps while it rises, and see when the loss falls.

    python scripts/lr_find.py data.root=/imagenet
    python scripts/lr_find.py recipe=cifar10 data.root=/cifar10 optim=adamw --steps 200

Accepts train.py's key=value overrides and takes the steps that train.py would take, with the same
model, optimiser, batch size, augmentation and precision, except for the learning rate: it rises
exponentially from --lowest to --highest. The test ends early if the loss diverges. It prints a
suggestion for optim.lr, and writes lr_find.json and lr_find.png to --out. The run directory is not
used. The method is the range test of arXiv 1506.01186.
"""

import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli
from conf.schema import Config, UserError

LEAST_STEPS = 20
# The default range, as multiples of optim.lr. The loss rises again at about 10 times the best
# learning rate with SGD, and at 100 times with AdamW.
BELOW, ABOVE = 0.03, 3000.0

if __name__ == "__main__":
    parser = cli.option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps (100)")
    parser.add_argument("--lowest", type=float, help=f"first learning rate ({BELOW:g} x optim.lr)")
    parser.add_argument("--highest", type=float, help=f"last one ({ABOVE:g} x optim.lr)")
    parser.add_argument("--out", type=Path, default=Path(), help="output folder (the current one)")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="lr_find.py", purpose=__doc__.split("\n")[0])
    LOWEST = CONFIG.optim.lr * BELOW if OPTIONS.lowest is None else OPTIONS.lowest
    HIGHEST = CONFIG.optim.lr * ABOVE if OPTIONS.highest is None else OPTIONS.highest
    if OPTIONS.steps < LEAST_STEPS:
        cli.fail(f"--steps {OPTIONS.steps}: give at least {LEAST_STEPS}", "lr_find.py")
    if not (0 < LOWEST < HIGHEST < math.inf):
        cli.fail(
            f"--lowest {LOWEST:g} --highest {HIGHEST:g}: give 0 < lowest < highest", "lr_find.py"
        )
    if OPTIONS.out.exists() and not OPTIONS.out.is_dir():
        cli.fail(f"--out {OPTIONS.out}: is a file; give a folder", "lr_find.py")

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

import train
from conf.launch import exit_with
from engine import checkpoint
from engine.checkpoint import CheckpointError
from engine.distributed import RankError, join_world
from engine.log.pictures import BLUE, GREY, RED, SMALL, font, sheet
from engine.optim import Curve
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainingError
from pipeline.feed import open_feed
from pipeline.loader import LoaderError

# The test ends if the loss exceeds this multiple of the lowest loss, as in fastai.
DIVERGED = 4.0
LEAST_LOSSES = 10  # fewer do not make a curve
# The mean over the neighbouring steps is weighted with a Gaussian. It is not an average over the
# steps before, as in fastai, which lags behind the learning rate.
SMOOTHING = 0.03  # standard deviation, as a fraction of the steps
FALL, FRACTION = 0.25, 0.07  # see `suggest`


@dataclass(frozen=True)
class Rise(Curve):
    """A learning rate that rises exponentially from `lowest` to `peak` in `total_steps` steps."""

    lowest: float = 0.0

    def at(self, step: int) -> float:
        return self.lowest * (self.peak / self.lowest) ** (step / (self.total_steps - 1))


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        steps: number of steps to take.
        lrs: the learning rate of each step that was taken.
        losses: the loss of each of these steps; the last one may be infinite.
    """

    steps: int
    lrs: list[float]
    losses: list[float]

    @property
    def diverged(self) -> bool:
        """Whether the test ended early."""
        return len(self.losses) < self.steps


def range_test(
    config: Config, *, steps: int, lowest: float, highest: float, out: Path
) -> RangeTest:
    """Train with a rising learning rate. Collective.

    Args:
        out: folder for a snapshot of the allocator if the GPU's memory is full.

    Raises:
        UserError, LoaderError, TrainingError: as for train.train.
    """
    # Compiling takes longer than the steps. `never`: a checkpoint in the run directory is ignored.
    mode = "off" if config.model.compile == "auto" else config.model.compile
    config = replace(
        config,
        model=replace(config.model, compile=mode),
        checkpoint=replace(config.checkpoint, resume="never"),
    )
    with ExitStack() as stack:
        use = stack.enter_context
        world = use(join_world(config.train.device, config.loader.timeout_seconds))
        config = train.resolve_config(config, world)
        datasets, plan, state = train.prepare(config, RunDirectory(config, world), world)
        curve = Rise(config.schedule, highest, 0, steps, plan.steps_per_epoch, lowest)
        feed = use(open_feed(config, datasets, plan.loader, world))
        if plan.loader.workers:
            feed.train.loader.pool.activate(plan.loader.workers)  # they are not measured here
        step = use(train.build_step(replace(plan, curve=curve), state, world))
        use(train.out_of_memory_explained(plan, state, world))
        say_start(plan, curve, leads=world.is_main)
        losses: list[float] = []
        for batch in feed.train.batches(0, steps):
            world.set_section(f"step {batch.step + 1}")
            loss = step(batch)["loss"].double()  # a copy: the next step overwrites the value
            losses.append(float(world.sum(loss)) / world.size)
            if has_diverged(losses) or state.divergence.found:  # then the weights stay the same
                break
    if len(losses) < LEAST_LOSSES:
        raise TrainingError(
            f"the loss is {losses[-1]:g} at step {len(losses)}, with learning rates from "
            f"{lowest:g}: give a lower --lowest"
        )
    lrs = [curve.at(number) for number in range(len(losses))]
    return RangeTest(steps, lrs, losses)


def say_start(plan: Plan, curve: Rise, *, leads: bool) -> None:
    if leads:
        config = plan.config
        print(
            f"lr_find  {config.model.name}, {config.optim.name}, batch {plan.batch_size}, "
            f"{plan.precision} on {plan.device}: {curve.total_steps} steps from "
            f"{curve.lowest:.2g} to {curve.peak:.2g}",
            flush=True,
        )


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the loss is not finite, or DIVERGED times the lowest one.

    Both are means of five steps, so that a single bad batch does not end the test.
    """
    if not math.isfinite(losses[-1]):
        return True
    if len(losses) < LEAST_LOSSES:
        return False
    means = np.convolve(losses, np.ones(5) / 5, "valid")
    return bool(means[-1] > DIVERGED * means.min())


def smoothed(test: RangeTest) -> np.ndarray:
    """Return the mean of each loss and its neighbours, weighted with a Gaussian.

    An infinite last loss is left out.
    """
    losses = np.asarray(test.losses)
    losses = losses[np.isfinite(losses)]
    place = np.arange(len(losses))
    distance = (place[:, None] - place) / (SMOOTHING * test.steps)
    weights = np.exp(-(distance**2) / 2)
    return (weights @ losses) / weights.sum(1)


def suggest(test: RangeTest, smooth: np.ndarray) -> float | str:
    """Return a learning rate, or why the test does not tell one.

    The loss falls from its first value to its minimum, and rises when the learning rate becomes too
    high. The suggestion is FRACTION of the highest learning rate at which FALL of this fall is
    left. Rules that start from the minimum or the steepest descent do not work here: without
    warm-up, a model often stops learning for a while and recovers at a higher learning rate, so
    both moved by a factor of up to 40 between seeds, and this one by 2 (resnet_tiny on the demo and
    on 5,000 images of CIFAR-10, with SGD and AdamW).

    Args:
        smooth: smoothed losses.
    """
    first, lowest = smooth[0], smooth.min()
    # The median: the losses at the end are far from a smooth curve.
    noise = np.median(np.abs(np.asarray(test.losses[: len(smooth)]) - smooth))
    if first - lowest < 2 * noise:
        return "the loss did not fall; give more --steps or a higher --highest"
    low = np.flatnonzero(smooth < first - FALL * (first - lowest))
    if low[-1] == len(smooth) - 1 and not test.diverged:
        return "the loss did not rise again; give a higher --highest"
    return FRACTION * test.lrs[low[-1]]


def picture(
    test: RangeTest, smooth: np.ndarray, suggestion: float | str, title: str
) -> Image.Image:
    """Draw the losses over the learning rate, the smoothed curve and the suggestion.

    Args:
        smooth: smoothed losses, without the last one if it is infinite.
        suggestion: a learning rate, or why there is none.
    """
    width, height, left, top = 900, 480, 70, 60
    right, bottom = width - 30, height - 60
    image, draw = sheet(width, height, title)
    low, high = np.log10(test.lrs[0]), np.log10(test.lrs[-1])
    least = min(test.losses)
    # A diverged loss would leave the rest of the curve flat.
    most = smooth[0] + 0.5 * (smooth[0] - smooth.min()) + 1e-6

    def place(lr: float, loss: float) -> tuple[float, float]:
        x = left + (right - left) * (np.log10(lr) - low) / (high - low)
        return x, bottom - (bottom - top) * (min(loss, most) - least) / (most - least)

    for exponent in range(math.ceil(low), math.floor(high) + 1):
        x, _ = place(10.0**exponent, least)
        draw.line((x, top, x, bottom), "#d0d0d0")
        draw.text((x, bottom + 8), f"{10.0**exponent:g}", "black", font(SMALL), "ma")
    for loss in np.linspace(least, most, 5):
        _, y = place(test.lrs[0], loss)
        draw.line((left, y, right, y), "#d0d0d0")
        draw.text((left - 8, y), f"{loss:.2f}", "black", font(SMALL), "rm")
    points = [place(*pair) for pair in zip(test.lrs, test.losses, strict=True)]
    for x, y in points:
        draw.ellipse((x - 2, y - 2, x + 2, y + 2), GREY)
    draw.line([place(*pair) for pair in zip(test.lrs, smooth, strict=False)], BLUE, 3)
    if isinstance(suggestion, float):
        x, _ = place(suggestion, least)
        draw.line((x, top, x, bottom), RED, 2)
        draw.text((x + 6, top + 4), f"optim.lr={suggestion:.2g}", RED, font(SMALL))
    else:
        draw.text((left + 6, top + 4), suggestion, RED, font(SMALL))
    draw.text(((left + right) // 2, height - 24), "learning rate", "black", font(SMALL), "mm")
    return image


def report(test: RangeTest, config: Config, out: Path) -> float | str:
    """Write lr_find.json and lr_find.png, print the result and return it.

    Raises:
        UserError: the files cannot be written.
    """
    smooth = smoothed(test)
    found = suggest(test, smooth)
    best = int(smooth.argmin())
    end = f"{'diverged' if test.diverged else f'was {smooth[-1]:.3f}'} at {test.lrs[-1]:.2g}"
    print(f"loss     {smooth[0]:.3f} at first, {smooth[best]:.3f} at {test.lrs[best]:.2g}, {end}")
    if isinstance(found, float):
        print(f"try      optim.lr={found:.2g}", flush=True)
    title = f"{config.model.name}, {config.optim.name}, batch {config.loader.batch_size}"
    content = {
        "suggestion": found if isinstance(found, float) else None,
        "lrs": test.lrs,
        "losses": test.losses,
        "smoothed": smooth.tolist(),
        "diverged": test.diverged,
        "config": cli.to_yaml(config),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(out / "lr_find.json", content)
        picture(test, smooth, found, title).save(out / "lr_find.png")
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written: {error.strerror}; give a writable folder"
        ) from None
    print(f"written  {out / 'lr_find.json'} and lr_find.png")
    return found


def main() -> int:
    """Run the test; return the exit status: 0 done, 1 failed, 2 user error."""
    leads = os.environ.get("RANK", "0") == "0"
    level = logging.WARNING if leads else logging.ERROR
    cli.log_to_stderr(level, force=True)
    try:
        test = range_test(
            CONFIG, steps=OPTIONS.steps, lowest=LOWEST, highest=HIGHEST, out=OPTIONS.out
        )
        if leads:
            found = report(test, CONFIG, OPTIONS.out)
            if isinstance(found, str):
                cli.complain(found, "lr_find.py")
                return 1
    except UserError as error:
        cli.complain_of_mistake(str(error), "lr_find.py")
        return 2
    except (LoaderError, CheckpointError, RankError, TrainingError) as error:
        cli.complain(str(error), "lr_find.py")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    exit_with(main)
