"""Compare a run with what its recipe is expected to reach, at its end and after each validation.

By default, conf/config.yaml names it: log.observers=[extras.expectation:Expectation]. The node
`expect` of a recipe's file states what is expected; UserError if an entry is missing:

    recipe: the name of the recipe, so that a changed copy of the file is not compared.
    top1, or the value that train.best_by names: after the last epoch; with train.ema_decay, of the
        moving average.
    std, runs: the standard deviation between runs (of a sample, n - 1), and of how many; null if
        the source does not state them: then there is no verdict.
    status, source: "published" or "reproduced here", and where the figure is from.
    classes, train_images, val_images: of the data that it is for.
    format: "JPEG" or "lossless", of its files. CIFAR-10 as JPEGs costs 3 points (docs/accuracy.md).
    hardware, time: what a run takes.
    reference: optional, of several runs here: `runs`, their number, and the means `top1` and the
        standard deviations `std` of the value after epoch 1, 2, ...
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DATA_FOLDERS
from engine.log.observer import ObservedRun, Observer
from engine.metrics import BestBy

GOOD_SIGMAS = 1.96  # at the end: 19 of 20 good runs are within
SIGMAS = 3  # of a validation that is far too low
# The limit for the validation before it, which must be too low as well: with a high learning rate,
# single validations of good runs are far below the others.
CONFIRMING_SIGMAS = 2
# Percentage points. A smaller standard deviation of a few runs may be chance, and the difference
# may come from another kind of device.
MIN_STD = 0.5
DATA = ("classes", "train_images", "val_images", "format")
FACTS = ("recipe", "std", "runs", "status", "source", *DATA)
LOSSLESS = (".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
# Keys that a recipe leaves to the user or the machine: any values are a run of the recipe.
LEFT_OUT = ("data.source", *DATA_FOLDERS, "loader.decoder", "train.precision", "train.seed")


class Expectation(Observer):
    """What the recipe of a run is expected to reach, if the run can be compared with it.

    A run that continues another one, or had other values at first, is not compared.
    """

    def __init__(self, log: ObservedRun) -> None:
        self.log = log
        datasets = log.datasets
        expect: dict[str, Any] = log.config.expect or dict.fromkeys(FACTS)
        for name in FACTS:
            if name not in expect:
                raise UserError("expect", f"no {name}", "add it to this node of the recipe's file")
        # A typed train.best_by, such as macro_f1, is still a run of the recipe.
        self._value = log.metrics.best_by
        if self._value.name not in expect:
            self._value = BestBy("top1", lower_is_better=False)
        self._schedule, changed = log.schedule, log.config.changed
        self._changed = {key: value for key, value in changed.items() if key not in LEFT_OUT}
        format = "lossless" if datasets.train.name(0).lower().endswith(LOSSLESS) else "JPEG"
        data = len(datasets.classes), len(datasets.train), len(datasets.val), format
        same_data = (log.config.recipe, *data) == tuple(expect[n] for n in ("recipe", *DATA))
        same_norm = log.schedule.fitted_micro_batch is None  # BatchNorm over all images of a step
        same_run = same_data and same_norm and not log.state.history and self._value.name in expect
        # With another optimiser, the curve still shows a mistake in the images or the model.
        tuned = all(key.startswith("optim.") for key in self._changed)
        self._curve = expect.get("reference", {}) if same_run and tuned else {}
        self._final = expect if same_run and not self._changed else None
        self._warned = False
        self._last: Mapping[str, Any] = (
            log.state.last_validation
        )  # validation, perhaps of an earlier start

    def validated(self, row: Mapping[str, Any], rows: Any) -> dict[str, float]:
        """Return the columns to add to a validation's row; perhaps print a warning.

        A start warns once, about a validation worse than the limit for 3 sigma after a previous
        one worse than that for 2 sigma.
        """
        previous, self._last = self._last, row
        name, side = self._value.name, 2 if self._value.lower_is_better else 1
        band = self._band(row["step"], SIGMAS)
        if band is None:
            return {}
        column, (mean, low, high) = f"reference_{name}", band
        columns = {column: mean, f"{column}_min": low, f"{column}_max": high}
        before = self._band(previous.get("step", 0), CONFIRMING_SIGMAS)
        pairs = ((band, row), (before, previous)) if before and name in previous else ()
        worse = [self._value.prefers({name: limits[side]}, r) for limits, r in pairs]
        if self._warned or not worse or not all(worse):
            return columns
        self._warned = True
        epoch = self._schedule.epochs_ended(row["step"])
        changed = ", ".join(f"{key}={value}" for key, value in self._changed.items())
        differs = f"what differs from the recipe ({changed})" if changed else "your code changes"
        text = self.log.metrics.text
        self.log.tracker.print(
            f"warning   {text(name, row[name])} after epoch {epoch} is worse than the "
            f"{SIGMAS} sigma limit of this recipe, {band[side]:.4g} ({self._curve['runs']} runs "
            f"reached {mean:.4g} +/- {self._curve['std'][epoch - 1]:.2g}), and so was the previous "
            f"validation, {text(name, previous[name])}: check the labels and {differs}; "
            "training continues, Ctrl-C stops it"
        )
        return columns

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return what summary.json says about the expectation; None if the run is not the recipe.

        A warning says if the loss of neither training nor validation is below that of a guess.
        """
        found: dict[str, Any] = {"expectation": None}
        row, guess = self._last, math.log(len(self.log.datasets.classes))
        loss = min(row.get("loss", 0.0), self.log.row.get("loss", 0.0))
        if "top1" in row and (row.get("epoch", 0) >= 1 or math.isnan(loss)) and not loss < guess:
            text = f"the loss is not below {guess:.2f}, that of a guess: check optim.lr and labels"
            found["warning"] = {"line": f"warning   {text} (docs/faq.md)"}
        if self._final is None or row.get("step") != self._schedule.steps:  # of an earlier epoch
            return found
        name, std, runs = self._value.name, self._final["std"], self._final["runs"] or 0
        expected, difference = self._final[name], round(row[name] - self._final[name], 4)
        source = f"{self._final['status']}, {self._final['source']}"
        spread = verdict = None
        text = f"{difference:+.4g} against {expected:g} ({source}, spread unknown)"
        if std is not None and runs > 1:
            spread = round(half_width(std, runs, GOOD_SIGMAS), 4)
            verdict = "below" if difference < 0 else "above"
            text = f"{abs(difference):.4g} {verdict} {expected:g} +/- {spread:.2g} ({source})"
            if abs(difference) <= spread:
                verdict, text = "within", f"within {expected:g} +/- {spread:.2g} ({source})"
        facts = {key: value for key, value in self._final.items() if key != "reference"}
        compared = {"spread": spread, "difference": difference, "verdict": verdict}
        line = f"recipe    {self.log.metrics.text(name, row[name])}: {text}"
        return found | {"expectation": {"value": name, **facts, **compared, "line": line}}

    def _band(self, step: int, sigmas: float) -> tuple[float, float, float] | None:
        """Return mean, lower and upper limit of good runs; None unless the step ends an epoch."""
        epoch, means = self._schedule.epochs_ended(step), self._curve.get(self._value.name, [])
        if not self._schedule.due(step).epoch or not 1 <= epoch <= len(means):
            return None
        mean, std = means[epoch - 1], self._curve["std"][epoch - 1]
        width = half_width(max(std, MIN_STD), self._curve["runs"], sigmas)
        highest = 100.0 if self.log.metrics[self._value.name].unit == " %" else math.inf
        return mean, max(0.0, mean - width), min(highest, mean + width)


def half_width(std: float, runs: int, sigmas: float) -> float:
    """Return how far from the mean of a few runs one more run is expected.

    It is the prediction interval of a normal distribution whose mean and standard deviation are
    uncertain: 3 sigma are 7.3 standard deviations of 5 runs, 4.3 of 10, 3.5 of 20.
    """
    freedom = runs - 1
    # Student's t distribution: with t = sqrt(freedom) * tan(a), the density is proportional to
    # cos(a) ** (freedom - 1).
    angles = (np.arange(100_000) + 0.5) * (math.pi / 2 / 100_000)
    shares = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp(NormalDist().cdf(sigmas) - 0.5, 0.5 * shares / shares[-1], angles)
    return std * math.sqrt(freedom) * math.tan(float(angle)) * math.sqrt(1 + 1 / runs)
