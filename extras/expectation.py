"""Compare the result of a run with what its recipe is expected to reach.

By default, conf/config.yaml names it: log.observers=[extras.expectation:Expectation]. The node
`expect` of a recipe's file states what is expected; UserError if an entry is missing:

    recipe: its name, so that a changed copy of the file is not compared.
    top1, or what train.best_by names: after the last epoch, of the moving average if there is one.
    std, runs: the standard deviation between runs (n - 1), and of how many; null if unknown.
    status, source: "published" or "reproduced here", and where the figure is from.
    classes, train_images, val_images: of the data that it is for.
    format: "JPEG" or "lossless", of its files. CIFAR-10 as JPEGs costs 3 points (docs/accuracy.md).
    hardware, time: what a run takes.
"""

from collections.abc import Mapping
from typing import Any

from conf.errors import UserError
from conf.schema import DATA_FOLDERS
from engine.log.observer import ObservedRun, Observer

DATA = ("classes", "train_images", "val_images", "format")
FACTS = ("recipe", "std", "runs", "status", "source", *DATA)
LOSSLESS = (".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
# Keys that a recipe leaves to the user or the machine: any values are a run of the recipe.
IGNORED_KEYS = {"data.source", *DATA_FOLDERS, "loader.decoder", "train.precision", "train.seed"}


class Expectation(Observer):
    """What the recipe of a run is expected to reach, if the run can be compared with it."""

    def __init__(self, log: ObservedRun) -> None:
        super().__init__(log)
        self.expect: dict[str, Any] = log.config.expect or dict.fromkeys(FACTS)
        for name in FACTS:
            if name not in self.expect:
                raise UserError("expect", f"no {name}", "add it to this node of the recipe's file")

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the expectation for summary.json; None if the run is not that of the recipe."""
        row = self.log.state.last_validation
        if row.get("step") == self.log.schedule.steps and self._is_comparable():
            return {"expectation": self._compared(row)}
        return {"expectation": None}

    def _is_comparable(self) -> bool:
        """Whether recipe and data are those of `expect`, and the run continues no other one."""
        log, datasets = self.log, self.log.datasets
        is_changed = bool(log.config.changed.keys() - IGNORED_KEYS)
        # A fitted micro-batch has BatchNorm statistics of fewer images.
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
        """Return the facts of `expect`, the difference, and the line that the console shows."""
        expect = self.expect
        # The value that the recipe states; a typed train.best_by may be another one.
        (name,) = expect.keys() & row.keys()
        expected = f"{expect[name]:g}"
        if expect["std"] is not None:
            expected += f" ± {expect['std']:.2g}"
        source = f"{expect['status']}, {expect['source']}"
        reached = self.log.metrics.text(name, row[name])
        line = f"recipe    {reached}: {expected} is expected ({source})"
        difference = round(row[name] - expect[name], 4)
        return {**expect, "value": name, "difference": difference, "line": line}
