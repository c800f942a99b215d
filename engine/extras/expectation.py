"""Compare a run with what its recipe is expected to reach, at its end and after each validation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from conf.schema import Config, Expect, Reference

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


@dataclass(frozen=True)
class Band:
    """Top-1 that a good run of the recipe has after an epoch, percent.

    Attributes:
        mean, std: of the reference runs.
        low, high: limits for one more run, see `band`.
    """

    mean: float
    std: float
    low: float
    high: float
    runs: int


class Expectation:
    """What the recipe of a run is expected to reach on the run's data.

    Args:
        config: of the run.
        classes, train_images, val_images: of its data.
        continues: the run continues another one, or had other values at first. It is not compared.
    """

    def __init__(
        self,
        config: Config,
        *,
        classes: int,
        train_images: int,
        val_images: int,
        continues: bool = False,
    ) -> None:
        found = config.expect
        if found is not None:
            other = (found.classes, found.train_images, found.val_images) != (
                classes,
                train_images,
                val_images,
            )
            found = None if other or continues else found
        # The run is the recipe.
        self.final: Expect | None = None if config.changed else found
        tuned = all(key.startswith(OPTIMISER) for key in config.changed)
        # The run may be compared with the recipe's curve.
        self.reference: Reference | None = found.reference if found and tuned else None
        self.changed = [f"{key}={value}" for key, value in config.changed.items()]
        self._warned = False

    def band(self, epoch: int | None, sigmas: float = SIGMAS) -> Band | None:
        """Return the band after an epoch (1, 2, ...), or None if it is not known."""
        reference = self.reference
        if reference is None or epoch is None or not 1 <= epoch <= len(reference.top1):
            return None
        mean, std = reference.top1[epoch - 1], reference.std[epoch - 1]
        return band(mean, std, reference.runs, sigmas)

    def columns(self, epoch: int | None) -> dict[str, float]:
        """Return the band as columns of a validation's row; none if it is not known."""
        found = self.band(epoch)
        if found is None:
            return {}
        return {
            "reference_top1": found.mean,
            "reference_top1_min": found.low,
            "reference_top1_max": found.high,
        }

    def warning(
        self, now: tuple[int | None, float], before: tuple[int | None, float]
    ) -> str | None:
        """Return a warning if a validation lies below the band, and the one before below 2 sigma.

        Return it only once.

        Args:
            now, before: epoch and top-1 (percent) of a validation and of the one before.
        """
        here, there = self.band(now[0]), self.band(before[0], CONFIRMING_SIGMAS)
        if self._warned or not here or not there or now[1] >= here.low or before[1] >= there.low:
            return None
        self._warned = True
        check = "the labels, the learning rate and your code changes"
        if self.changed:
            check = f"the labels and what differs from the recipe ({', '.join(self.changed)})"
        return (
            f"top1 {now[1]:.1f} % after epoch {now[0]} is below the {SIGMAS} sigma limit of this "
            f"recipe, {here.low:.1f} ({here.runs} runs reached {here.mean:.1f} +/- "
            f"{here.std:.1f}), and the previous validation, {before[1]:.1f} %, was also low: check "
            f"{check}; training continues, Ctrl-C stops it"
        )


def band(mean: float, std: float, runs: int, sigmas: float = SIGMAS) -> Band:
    """Return the limits within which one more run is expected.

    It is the prediction interval of a normal distribution: the mean and the standard deviation of a
    few runs are uncertain, so the limits are wider than 3 standard deviations (7.3 for 5 runs, 4.3
    for 10, 3.5 for 20). A good run is below with the probability that a value is 3 sigma below a
    known mean, 0.13 %.
    """
    width = quantile(NormalDist().cdf(sigmas), runs - 1) * math.sqrt(1 + 1 / runs)
    width *= max(std, LEAST_STD)
    return Band(mean, std, max(0.0, mean - width), min(100.0, mean + width), runs)


@cache
def quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above 0.5.

    With t = sqrt(freedom) * tan(a), the density is proportional to cos(a) ** (freedom - 1).
    """
    angles = (np.arange(100_000) + 0.5) * (math.pi / 2 / 100_000)
    shares = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp(probability - 0.5, 0.5 * shares / shares[-1], angles)
    return math.sqrt(freedom) * math.tan(float(angle))


def compare(expect: Expect, top1: float) -> dict[str, Any]:
    """Return what summary.json says about the expectation: its facts, and how the run compares."""
    facts = {key: value for key, value in asdict(expect).items() if key != "reference"}
    difference = round(top1 - expect.top1, 4)
    inside = abs(difference) <= (expect.spread or 0)
    verdict = "within" if inside else "below" if difference < 0 else "above"
    return {**facts, "difference": difference, "verdict": verdict}


def sentence(compared: Mapping[str, Any], top1: float) -> str:
    """Say how a run compares: `accuracy 76.20 %: within 76.13 +/- 0.24 (published, source)`."""
    expected = f"{compared['top1']:g}"
    about = f"{compared['status']}, {compared['source']}"
    if compared["spread"] is None:
        about += ", spread unknown"
    else:
        expected += f" +/- {compared['spread']:g}"
    verdict = compared["verdict"]
    if verdict != "within":
        verdict = f"{abs(compared['difference']):.2f} points {verdict}"
    return f"accuracy {top1:.2f} %: {verdict} {expected} ({about})"
