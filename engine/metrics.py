"""The named values of training and validation: how they are computed, shown and compared.

To add a value, return one more from `training_loss` or `validation_values` in train.py. It appears
on the console, in metrics.jsonl, in TensorBoard and in the report; train.best_by can name a value
of a validation. An entry in METRICS changes how it is shown, or computes it from all rows of the
split; log.values names more such entries.
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

Values = dict[str, Tensor]  # name -> tensor on the device; those of a step, float [], are logged
Computation = Callable[[], float | Tensor]


@dataclass(frozen=True)
class Metric:
    """How a named value is shown and, if it is not a mean over the images, computed."""

    form: str = ".4g"  # how Python formats it
    unit: str = ""  # what follows the number
    lower_is_better: bool = False
    console: bool = True  # whether the console shows it; without an entry, see `Metrics`
    # For a value that is not a mean over the images: called once per validation with its
    # `inputs`, [N, ...] over the whole split in its order, on the CPU
    compute: Callable[..., float] | None = None
    # Names of values of `validation_values` that `compute` takes; if one is missing, so is this
    # value. One that is not in METRICS itself is not averaged.
    inputs: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "loss": Metric(".4f", lower_is_better=True),
    "top1": Metric(".2f", " %"),
    "top5": Metric(".2f", " %"),
}
# Of each image; read by observers or by entries of log.values.
NOT_AVERAGED = ("confidence", "score")


@dataclass(frozen=True)
class Metrics:
    """The named values of a run, and the one that chooses its best checkpoint."""

    entries: dict[str, Metric]  # METRICS, and the tables that log.values names
    best_by: str  # train.best_by without its sign
    lower_is_better: bool  # its sign

    @classmethod
    def of(cls, config: Config) -> "Metrics":
        """Return the metrics of a config. Raises UserError for a wrong table or train.best_by."""
        entries = dict(METRICS)
        for table in config.log.values:
            entries |= import_object(table, "log.values")
        text = config.train.best_by
        metrics = cls(entries, text.removeprefix("-"), text.startswith("-"))
        known = entries.get(metrics.best_by)
        if known is not None and known.lower_is_better != metrics.lower_is_better:
            sign = "- in front means that lower is better: add or remove it"
            raise UserError(f"train.best_by={text}", "has the wrong sign", sign)
        return metrics

    def check_best_by(self, names: Collection[str]) -> None:
        """Refuse a train.best_by that is not among the values of a validation."""
        if self.best_by not in names:
            near = did_you_mean(self.best_by, names)
            cure = f"give one of {', '.join(names)}, with - in front if lower is better{near}"
            wrong = "a validation has no such value"
            raise UserError(f"train.best_by={self.best_by}", wrong, cure)

    def prefers(self, row: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether a validation replaces the best one so far, which may be empty or NaN."""
        new = row[self.best_by]
        old = best.get(self.best_by, math.nan)
        if math.isnan(old):
            return True
        if self.lower_is_better:
            return new < old
        return new > old

    def __getitem__(self, name: str) -> Metric:
        """Return an entry. By default, a name with a slash is not shown on the console."""
        return self.entries.get(name, Metric(console="/" not in name))

    def title(self) -> str:
        """Return the title of the console's column for the value of `best_by`."""
        return f"{self.best_by}{self[self.best_by].unit}".rjust(7)

    def text(self, name: str, number: float) -> str:
        """Return a value as text, such as `top1 76.13 %`."""
        metric = self[name]
        return f"{name} {number:{metric.form}}{metric.unit}"

    def computations(self, rows: Mapping[str, Tensor]) -> dict[str, Computation]:
        """Return what computes each value of a validation, by name: its `compute`, or a mean.

        A `compute` needs all of its inputs. An input is not averaged, unless it has an entry.
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
    """Refuse a `probability`, [B, ...], that is not one for each class, with a UserError."""
    if "probability" not in values:  # another task
        return
    outputs = values["probability"].shape[1:].numel()
    if outputs != len(classes):
        wrong = f"the model has {outputs:,} outputs for {len(classes):,} classes"
        raise UserError(wrong, fix="change the model, or predictions() in train.py")
