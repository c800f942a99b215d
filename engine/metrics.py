"""The named values of training and validation: how they are computed, shown and compared.

To add a value, return one more from `training_loss` or `validation_values` in train.py. It appears
on the console, in metrics.jsonl, in TensorBoard and in the report; train.best_by can name a value
of a validation. An entry in METRICS changes how it is shown, or computes it from all rows of the
split; log.values names more such entries.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError, did_you_mean
from conf.named import import_object

Values = dict[str, Tensor]  # name -> tensor on the device; those of a step, float [], are logged
Compute = Callable[[], float | Tensor]


@dataclass(frozen=True)
class Metric:
    """How a named value is shown and, if it is not a mean over the images, computed."""

    form: str = ".4g"  # how Python formats it
    unit: str = ""  # what follows the number
    lower_is_better: bool = False
    console: bool = True  # whether the console shows it; without an entry here, see `metric_of`
    # For a value that is not a mean over the images: called once per validation with its
    # `inputs`, [N, ...] over the whole split in its order, on the CPU
    compute: Callable[..., float] | None = None
    # Names of values of `validation_values` that `compute` takes; if one is missing, so is this
    # value. One that is not in METRICS itself is not averaged.
    inputs: tuple[str, ...] = ()


def macro_recall(label: Tensor, prediction: Tensor) -> float:
    """Return the mean over classes of their top-1 in percent, also called balanced accuracy.

    Only classes with images count, as in scikit-learn's `balanced_accuracy_score`. Both are
    int64 [N] on the CPU; a prediction below 0 is wrong.
    """
    labels = label.numpy()
    hit = labels == prediction.numpy()
    images = np.bincount(labels)  # [classes]
    hits = np.bincount(labels[hit], minlength=len(images))
    present = images > 0
    recalls = hits[present] / images[present]
    return float(100 * recalls.mean())


METRICS: dict[str, Metric] = {
    "loss": Metric(".4f", lower_is_better=True),
    "top1": Metric(".2f", " %"),
    "top5": Metric(".2f", " %"),
    "macro_recall": Metric(
        ".2f", " %", console=False, compute=macro_recall, inputs=("label", "prediction")
    ),
}


def add_values(tables: Iterable[str]) -> None:
    """Add the tables that log.values names to METRICS."""
    for name in tables:
        METRICS.update(import_object(name, "log.values"))


def value_functions(rows: Mapping[str, Tensor]) -> dict[str, Compute]:
    """Return what computes each value of a validation, by name: its `compute`, or a mean.

    A `compute` needs all of its inputs. An input is not averaged, unless METRICS has it.
    """
    inputs = {"confidence", "score"}
    computed: dict[str, Compute] = {}
    for name, metric in METRICS.items():
        inputs.update(metric.inputs)
        if metric.compute and rows.keys() >= set(metric.inputs):
            arguments = map(rows.__getitem__, metric.inputs)
            computed[name] = partial(metric.compute, *arguments)
    averaged = METRICS.keys() | (rows.keys() - inputs)
    values: dict[str, Compute] = {}
    for name, row in rows.items():
        is_number = row.ndim == 1 and row.is_floating_point()
        if name in averaged and is_number:
            values[name] = partial(torch.mean, row, dtype=torch.float64)
    return values | computed


def metric_of(name: str) -> Metric:
    """Return the entry of a value. By default, a name with a slash is not shown on the console."""
    return METRICS.get(name, Metric(console="/" not in name))


def format_value(name: str, number: float) -> str:
    """Return a value as text, such as `top1 76.13 %`."""
    metric = metric_of(name)
    return f"{name} {number:{metric.form}}{metric.unit}"


@dataclass(frozen=True)
class BestBy:
    """The value by which the best checkpoint is chosen: train.best_by."""

    name: str
    lower_is_better: bool

    @classmethod
    def of(cls, text: str) -> "BestBy":
        """Read train.best_by: `top1`, or `-loss` if lower is better. Raises UserError."""
        best_by = cls(text.removeprefix("-"), text.startswith("-"))
        known = METRICS.get(best_by.name, best_by)
        if known.lower_is_better and not best_by.lower_is_better:
            raise UserError(f"train.best_by={text}: lower is better; give -{text}")
        if best_by.lower_is_better and not known.lower_is_better:
            raise UserError(f"train.best_by={text}: higher is better; give {best_by.name}")
        return best_by

    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Refuse a value that is not among those of a validation with these rows."""
        names = value_functions(rows)
        if self.name not in names:
            cure = f"give one of {', '.join(names)}, with - in front if lower is better"
            wrong = "a validation has no such value"
            hint = did_you_mean(self.name, names)
            raise UserError(f"train.best_by: {self.name}: {wrong}; {cure}{hint}")

    def prefers(self, row: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether a validation is better than the best one so far. A NaN is worse than any."""
        new, old = row[self.name], best.get(self.name, math.nan)
        if math.isnan(old):
            return True
        if self.lower_is_better:
            return new < old
        return new > old
