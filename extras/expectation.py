"""Compare a run's result with the expectation in its recipe.

conf/config.yaml enables it by default: log.observers=[extras.expectation:Expectation]. The node
`expect` in a recipe file has the expectation; a missing entry raises UserError:

    recipe: the recipe's name, so that modified copies of the file are not compared.
    top1, or the value in train.best_by: after the last epoch, for the EMA if there is one.
    std, runs: standard deviation (n - 1) over this number of runs; null if unknown.
    status, source: "published" or "reproduced here", and the figure's source.
    classes, train_images, val_images: size of the dataset.
    format: "JPEG" or "lossless" files. JPEG costs 3 points on CIFAR-10 (docs/accuracy.md).
    hardware, time: requirements of a run.
"""

import math
from collections.abc import Mapping
from typing import Any

from conf.errors import UserError
from conf.schema import DATA_FOLDERS
from engine.log.observer import ObservedRun, Observer

DATA = ("classes", "train_images", "val_images", "format")
FACTS = ("recipe", "std", "runs", "status", "source", *DATA)
LOSSLESS = (".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
# Keys that the user or the machine sets; a run with any of their values counts as the recipe's.
IGNORED_KEYS = {"data.source", *DATA_FOLDERS, "loader.decoder", "train.precision", "train.seed"}


class Expectation(Observer):
    """Add the recipe's expected result to the summary if the run is comparable."""

    def __init__(self, log: ObservedRun) -> None:
        super().__init__(log)
        self.expect: dict[str, Any] = log.config.expect or dict.fromkeys(FACTS)
        for name in FACTS:
            if name not in self.expect:
                raise UserError("expect", f"no {name}", "add it to this node in the recipe file")

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the expectation for summary.json; None if the run differs from the recipe."""
        row = self.log.state.last_validation
        if row.get("step") == self.log.schedule.steps and self._is_comparable():
            return {"expectation": self._compared(row)}
        return {"expectation": None}

    def _is_comparable(self) -> bool:
        """Whether recipe and data match `expect`, and the run does not continue a different one."""
        log, datasets = self.log, self.log.datasets
        is_changed = bool(log.config.changed.keys() - IGNORED_KEYS)
        # In a fitted micro-batch, BatchNorm computes its statistics from fewer images.
        if is_changed or log.state.history or log.schedule.fitted_micro_batch is not None:
            return False
        is_lossless = datasets.train.name(0).lower().endswith(LOSSLESS)
        facts = {
            "recipe": log.config.recipe,
            "classes": len(datasets.classes),
            "train_images": len(datasets.train),
            "val_images": len(datasets.val),
            "format": "lossless" if is_lossless else "JPEG",
        }
        return facts.items() <= self.expect.items()

    def _compared(self, row: Mapping[str, float]) -> dict[str, Any]:
        """Return the entries of `expect`, the comparison, and the line for the console."""
        expect = self.expect
        # Use the recipe's value, which may differ from an overridden train.best_by.
        (name,) = expect.keys() & row.keys()
        difference = round(row[name] - expect[name], 4)
        expected = f"{expect[name]:g}"
        lower, remark = None, ""
        if expect["std"]:
            expected += f" ± {expect['std']:.2g}"
            if expect["runs"]:
                lower = fraction_lower(difference / expect["std"], expect["runs"])
                remark = f"; {100 * lower:.1f} % of runs are lower"
        source = f"{expect['status']}, {expect['source']}"
        reached = self.log.metrics.text(name, row[name])
        line = f"recipe    {reached}: {expected} is expected ({source}){remark}"
        added = {"value": name, "difference": difference, "fraction_lower": lower, "line": line}
        return {**expect, **added}


def fraction_lower(deviations: float, runs: int) -> float:
    """Return the probability that a new run is below the mean of `runs` plus `deviations`.

    `deviations`: in standard deviations (n - 1) of these runs, whose results are assumed to be
    normally distributed. Because their mean and deviation are estimates, deviations divided by
    sqrt(1 + 1 / runs) has Student's t distribution with runs - 1 degrees of freedom.
    """
    angle = math.atan2(deviations, math.sqrt((1 + 1 / runs) * (runs - 1)))
    return cosine_integral(runs - 2, angle) / cosine_integral(runs - 2, math.pi / 2)


def cosine_integral(power: int, angle: float) -> float:
    """Integrate cos(x)^power from -pi/2 to `angle` by parts; Student's density has this form."""
    if power < 2:
        return (angle + math.pi / 2, math.sin(angle) + 1)[power]
    first = math.cos(angle) ** (power - 1) * math.sin(angle)
    return (first + (power - 1) * cosine_integral(power - 2, angle)) / power
