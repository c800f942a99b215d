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
        """Return the entries of `expect`, the difference, and the line for the console."""
        expect = self.expect
        # Use the recipe's value, which may differ from an overridden train.best_by.
        (name,) = expect.keys() & row.keys()
        expected = f"{expect[name]:g}"
        if expect["std"] is not None:
            expected += f" ± {expect['std']:.2g}"
        source = f"{expect['status']}, {expect['source']}"
        reached = self.log.metrics.text(name, row[name])
        line = f"recipe    {reached}: {expected} is expected ({source})"
        difference = round(row[name] - expect[name], 4)
        return {**expect, "value": name, "difference": difference, "line": line}
