"""Compute, display and compare the named values of training and validation.

To add a value, return it from `training_loss` or `validation_values` in train.py. It appears on the
console, in metrics.jsonl, in TensorBoard and in the report; train.best_by can name a validation
value. An entry in METRICS changes how a value is displayed, or computes it from all rows of the
split; log.values names tables of more entries.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from conf.errors import UserError, did_you_mean
from conf.named import import_object
from conf.schema import Config

Values = dict[str, Tensor]  # name -> tensor on the device; a step's values, float [], are logged
Computation = Callable[[], float | Tensor]


@dataclass(frozen=True)
class Metric:
    """Display format of a named value and, if it is not a mean over the images, its computation."""

    form: str = ".4g"  # Python format specification
    unit: str = ""  # printed after the number
    lower_is_better: bool = False
    console: bool = True  # whether the console shows it; without an entry, see `__getitem__`
    # Computes a value that is not a mean over the images. Called once per validation with `inputs`,
    # [N, ...] over the whole split in its order, on the CPU.
    compute: Callable[..., float] | None = None
    # Names of the values of `validation_values` that `compute` takes. If one is missing, this value
    # is not computed. An input without an entry in METRICS is not averaged.
    inputs: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "loss": Metric(".4f", lower_is_better=True),
    "top1": Metric(".2f", " %"),
    "top5": Metric(".2f", " %"),
}
# Values per image that only observers and entries of log.values read
NOT_AVERAGED = ("confidence", "score")


@dataclass(frozen=True)
class Metrics:
    """The named values of a run, and the value that selects its best checkpoint."""

    entries: dict[str, Metric]  # METRICS and the tables in log.values
    best_by: str  # train.best_by without its sign
    lower_is_better: bool  # whether train.best_by has the sign -

    @classmethod
    def of(cls, config: Config) -> "Metrics":
        """Return a config's metrics. Raises UserError for a bad table or train.best_by sign."""
        entries = dict(METRICS)
        for table in config.log.values:
            entries |= import_object(table, "log.values")
        text = config.train.best_by
        metrics = cls(entries, text.removeprefix("-"), text.startswith("-"))
        known = entries.get(metrics.best_by)
        if known is not None and known.lower_is_better != metrics.lower_is_better:
            fix = "add or remove the leading -, which means that lower is better"
            raise UserError(f"train.best_by={text}", "has the wrong sign", fix)
        return metrics

    def check_best_by(self, names: Collection[str]) -> None:
        """Raise UserError if train.best_by is not among the validation values `names`."""
        if self.best_by not in names:
            near = did_you_mean(self.best_by, names)
            fix = f"choose from {', '.join(names)}, with a leading - if lower is better{near}"
            raise UserError(f"train.best_by={self.best_by}", "unknown validation value", fix)

    def prefers(self, row: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Return whether a validation is better than the best so far, which may be empty or NaN."""
        new = row[self.best_by]
        old = best.get(self.best_by, math.nan)
        if math.isnan(old):
            return True
        if self.lower_is_better:
            return new < old
        return new > old

    def __getitem__(self, name: str) -> Metric:
        """Return an entry. Without one, the console shows a value unless its name contains /."""
        return self.entries.get(name, Metric(console="/" not in name))

    def title(self) -> str:
        """Return the title of the console column for `best_by`."""
        return f"{self.best_by}{self[self.best_by].unit}".rjust(7)

    def text(self, name: str, number: float) -> str:
        """Format a value, such as `top1 76.13 %`."""
        metric = self[name]
        return f"{name} {number:{metric.form}}{metric.unit}"

    def computations(self, rows: Mapping[str, Tensor]) -> dict[str, Computation]:
        """Return a function per validation value, by name. It is `Metric.compute` or a mean.

        `compute` needs all of its inputs. Inputs are averaged only if they have an entry.
        """
        not_averaged = set(NOT_AVERAGED)
        computed: dict[str, Computation] = {}
        for name, metric in self.entries.items():
            not_averaged.update(metric.inputs)
            has_inputs = set(metric.inputs) <= rows.keys()
            if metric.compute and has_inputs:
                arguments = [rows[source] for source in metric.inputs]
                computed[name] = partial(metric.compute, *arguments)
        not_averaged -= self.entries.keys()
        values: dict[str, Computation] = {}
        for name, row in rows.items():
            is_number = row.ndim == 1 and row.is_floating_point()
            if is_number and name not in not_averaged:
                values[name] = partial(torch.mean, row, dtype=torch.float64)
        return values | computed


def check_predicted(values: Mapping[str, Tensor], classes: Sequence[str]) -> None:
    """Raise UserError unless `probability`, [B, ...], has one value per class."""
    if "probability" not in values:  # not a classifier
        return
    outputs = values["probability"].shape[1:].numel()
    if outputs != len(classes):
        problem = f"the model has {outputs:,} outputs for {len(classes):,} classes"
        raise UserError(problem, fix="change the model, or predictions() in train.py")
