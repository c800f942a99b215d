"""Compare a run with what its recipe is expected to reach, at its end and after each validation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from conf.schema import Config, UserError
from engine.plan import Plan

SIGMAS = 3  # of a validation that is far too low
# Of the validation before it, which confirms that it is not a single dip: with a high learning
# rate, single validations of good runs are far below the others.
CONFIRMING_SIGMAS = 2
# Percentage points. A smaller standard deviation of a few runs may be chance, and the difference
# may come from another kind of device.
LEAST_STD = 0.5
# Keys of the optimiser may differ from the recipe in a run that is compared with the recipe's
# curve: it trains the same model on the same images, and the curve shows a mistake in them.
OPTIMISER = "optim."


STATUSES = ("published", "reproduced here")


@dataclass(frozen=True)
class Reference:
    """Top-1 of several runs of a recipe after each epoch, in percent.

    Attributes:
        runs: number of runs.
        top1: mean after epoch 1, 2, ...
        std: standard deviation (of a sample, n - 1) after epoch 1, 2, ...
    """

    runs: int
    top1: list[float]
    std: list[float]


@dataclass(frozen=True)
class Expect:
    """What a recipe is expected to reach: the node `expect` of its file.

    Attributes:
        top1: after the last epoch, percent; with train.ema_decay, of the moving average.
        spread: a run is expected within top1 +/- spread: two standard deviations between runs, or
            what the source states; null if it states nothing.
        status: one of STATUSES.
        source: where the figure is from.
        classes, train_images, val_images: of the data that it is for.
        hardware, time: what a run takes.
        reference: top-1 after each epoch, if several runs have been done here.
    """

    top1: float
    spread: float | None
    status: str
    source: str
    classes: int
    train_images: int
    val_images: int
    hardware: str
    time: str
    reference: Reference | None = None

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> "Expect":
        """Read the node of a recipe.

        Raises:
            UserError: an entry is missing or unknown.
        """
        try:
            curve = node.get("reference")
            return cls(**{**node, "reference": Reference(**curve) if curve else None})
        except TypeError as error:
            what = str(error).partition("() ")[2]
            raise UserError(f"expect: {what}; correct this node of the recipe's file") from None


class Expectation:
    """What the recipe of a run is expected to reach on the run's data.

    Args:
        config: of the run.
        data: numbers of classes, training and validation images.
        continues: the run continues another one, or had other values at first. It is not compared.
    """

    def __init__(self, config: Config, data: tuple[int, int, int], *, continues: bool) -> None:
        expect = None if config.expect is None else Expect.parse(config.expect)
        if expect is None or data != (expect.classes, expect.train_images, expect.val_images):
            continues = True
        tuned = all(key.startswith(OPTIMISER) for key in config.changed)
        self._final = None if config.changed or continues else expect  # the run is the recipe
        self._reference = expect.reference if expect and tuned and not continues else None
        self._changed = [f"{key}={value}" for key, value in config.changed.items()]
        self._warned = False

    def judge(
        self, row: Mapping[str, Any], previous: Mapping[str, Any], plan: Plan
    ) -> tuple[dict[str, float], str | None]:
        """Return the columns to add to a validation's row, and a warning if there is one.

        Args:
            previous: the row of the validation before; empty if there was none.
        """
        steps = (int(one.get("step", 0)) for one in (row, previous))
        epoch, before = (plan.epochs_ended(s) if plan.due(s).epoch else None for s in steps)
        now = epoch, row["top1"]
        return self.columns(epoch), self.warning(now, (before, previous.get("top1", 0.0)))

    def columns(self, epoch: int | None, sigmas: float = SIGMAS) -> dict[str, float]:
        """Return the columns of a validation's row: mean and limits of top-1 after this epoch.

        Args:
            epoch: 1, 2, ...; None if the validation is not at the end of an epoch.
            sigmas: distance of the limits from the mean.
        """
        reference = self._reference
        if reference is None or epoch is None or not 1 <= epoch <= len(reference.top1):
            return {}
        mean = reference.top1[epoch - 1]
        width = half_width(reference.std[epoch - 1], reference.runs, sigmas)
        return {
            "reference_top1": mean,
            "reference_top1_min": max(0.0, mean - width),
            "reference_top1_max": min(100.0, mean + width),
        }

    def warning(
        self, now: tuple[int | None, float], before: tuple[int | None, float]
    ) -> str | None:
        """Return, once, a warning about a validation below the limit after one below 2 sigma.

        Args:
            now, before: epoch and top-1 (percent) of a validation and of the one before.
        """
        here, there = self.columns(now[0]), self.columns(before[0], CONFIRMING_SIGMAS)
        if self._warned or not here or not there:
            return None
        assert now[0] and self._reference
        if now[1] >= here["reference_top1_min"] or before[1] >= there["reference_top1_min"]:
            return None
        self._warned = True
        check = "the labels, the learning rate and your code changes"
        if self._changed:
            check = f"the labels and what differs from the recipe ({', '.join(self._changed)})"
        return (
            f"top1 {now[1]:.1f} % after epoch {now[0]} is below the {SIGMAS} sigma limit of this "
            f"recipe, {here['reference_top1_min']:.1f} ({self._reference.runs} runs reached "
            f"{here['reference_top1']:.1f} +/- {self._reference.std[now[0] - 1]:.1f}), and the "
            f"previous validation, {before[1]:.1f} %, was also low: check {check}; training "
            "continues, Ctrl-C stops it"
        )

    def compare(self, top1: float) -> dict[str, Any] | None:
        """Return what summary.json says about the expectation; None if the run is not the recipe.

        It is the facts of the recipe, the difference and the verdict.
        """
        if self._final is None:
            return None
        facts = {key: value for key, value in asdict(self._final).items() if key != "reference"}
        difference = round(top1 - self._final.top1, 4)
        inside = abs(difference) <= (self._final.spread or 0)
        verdict = "within" if inside else "below" if difference < 0 else "above"
        return {**facts, "difference": difference, "verdict": verdict}


def half_width(std: float, runs: int, sigmas: float = SIGMAS) -> float:
    """Return how far from the mean of a few runs one more run is expected.

    It is the prediction interval of a normal distribution: the mean and the standard deviation of a
    few runs are uncertain, so the limits are wider than 3 standard deviations (7.3 for 5 runs, 4.3
    for 10, 3.5 for 20). A good run is below with the probability that a value is 3 sigma below a
    known mean, 0.13 %.
    """
    width = quantile(NormalDist().cdf(sigmas), runs - 1) * math.sqrt(1 + 1 / runs)
    return width * max(std, LEAST_STD)


def quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above 0.5.

    With t = sqrt(freedom) * tan(a), the density is proportional to cos(a) ** (freedom - 1).
    """
    angles = (np.arange(100_000) + 0.5) * (math.pi / 2 / 100_000)
    shares = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp(probability - 0.5, 0.5 * shares / shares[-1], angles)
    return math.sqrt(freedom) * math.tan(float(angle))
