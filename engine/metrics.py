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
from torch import Tensor, nn

from conf.errors import UserError, did_you_mean
from conf.named import import_object
from engine.compute import longest_float
from engine.distributed import World

Values = dict[str, Tensor]  # name -> tensor on the device; those of a step, float [], are logged


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
    images = np.bincount(labels)
    hits = np.bincount(labels[labels == prediction.numpy()], minlength=len(images))
    present = images > 0
    return float(100 * (hits[present] / images[present]).mean())


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


def value_functions(rows: Mapping[str, Tensor]) -> dict[str, Callable[[], float | Tensor]]:
    """Return what computes each value of a validation, by name: its `compute`, or a mean.

    A `compute` needs all of its inputs. An input is not averaged, unless METRICS has it.
    """
    inputs = {"confidence", "score", *(name for m in METRICS.values() for name in m.inputs)}
    values: dict[str, Callable[[], float | Tensor]] = {
        name: partial(torch.mean, row, dtype=torch.float64)
        for name, row in rows.items()
        if row.ndim == 1 and row.is_floating_point() and (name in METRICS or name not in inputs)
    }
    for name, metric in METRICS.items():
        if metric.compute and rows.keys() >= set(metric.inputs):
            values[name] = partial(metric.compute, *(rows[each] for each in metric.inputs))
    return values


def metric_of(name: str) -> Metric:
    """Return the entry of a value. By default, a name with a slash is not shown on the console."""
    return METRICS.get(name, Metric(console="/" not in name))


def format_value(name: str, number: float) -> str:
    """Return a value as text, such as `top1 76.13 %`."""
    return f"{name} {number:{metric_of(name).form}}{metric_of(name).unit}"


@dataclass(frozen=True)
class BestBy:
    """The value by which the best checkpoint is chosen: train.best_by."""

    name: str
    lower_is_better: bool

    @classmethod
    def of(cls, text: str) -> "BestBy":
        """Read train.best_by: `top1`, or `-loss` if lower is better. Raises UserError."""
        best_by = cls(text.removeprefix("-"), text.startswith("-"))
        metric = METRICS.get(best_by.name)
        if metric is not None and metric.lower_is_better != best_by.lower_is_better:
            better, give = ("lower", "give -") if metric.lower_is_better else ("higher", "give ")
            raise UserError(f"train.best_by={text}: {better} is better; {give}{best_by.name}")
        return best_by

    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Refuse a value that is not among those of a validation with these rows."""
        if self.name not in (names := value_functions(rows)):
            given = f"train.best_by={'-' if self.lower_is_better else ''}{self.name}"
            cure = f"give one of {', '.join(names)}, with - in front if lower is better"
            cure += did_you_mean("top1" if "acc" in self.name else self.name, names)
            raise UserError(f"{given}: a validation has no such value; {cure}")

    def prefers(self, row: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether a validation is better than the best one so far. A NaN is worse than any."""
        new, old = row[self.name], best.get(self.name, math.nan)
        return math.isnan(old) or (new < old if self.lower_is_better else new > old)


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return top1, and from six classes on top5: 100 for a hit, else 0, float32 [B].

    Computed from the rank of the label's logit, which the compiler can fuse with the loss, unlike a
    top-k. Equal logits rank in the order of their classes. A label below 0 is never a hit, nor is a
    row whose highest logit is not finite: its softmax is NaN.

    `logits`: float [B, classes]; `labels`: int64 [B].
    """
    label_logits = logits.gather(1, labels.clamp(min=0)[:, None])  # [B, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > label_logits) | ((logits == label_logits) & earlier)).sum(1)
    valid = (labels >= 0) & logits.amax(1).isfinite()
    counted = {"top1": 1, "top5": 5} if logits.shape[1] > 5 else {"top1": 1}
    return {name: 100 * ((rank < k) & valid).float() for name, k in counted.items()}


def classifier_means(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what the training of a classifier logs: the means of `accuracy`, float32 []."""
    return {name: hit.mean() for name, hit in accuracy(logits, labels).items()}


def classifier_values(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the values of each image in the validation of a classifier, [B].

    `prediction` is the first of equal logits, -1 if the highest is not finite. Two classes have a
    `score` too, which is NaN then. `logits`: float32 [B, classes]; `labels`: int64 [B].
    """
    broken = ~logits.amax(1).isfinite()
    values = {
        "loss": nn.functional.cross_entropy(logits, labels, reduction="none"),
        **accuracy(logits, labels),
        "label": labels,
        "prediction": logits.argmax(1).masked_fill(broken, -1),
        "confidence": logits.softmax(1).amax(1).nan_to_num(),
    }
    if logits.shape[1] == 2:  # the difference of the logits: probabilities round to 1
        values["score"] = (logits[:, 1] - logits[:, 0]).masked_fill(broken, math.nan)
    return values


class Meter:
    """Averages what `train_step` returns over the steps and ranks of a log row, on the device."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0  # since the last `send`
        self._names: list[str] = []
        self._total = torch.empty(0)
        # Step, number of steps, sums on the host, and the event that marks the end of their copy.
        self._sent: tuple[int, int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the values of a step, float [] on the device; the same names each time."""
        step = torch.stack([value.detach() for value in values.values()])
        step = step.to(longest_float(step.device))
        self._total = self._total + step if self.steps else step
        self._names = list(values)
        self.steps += 1

    def send(self, step: int) -> None:
        """End an interval with step `step`: start the copy of its sums to the host."""
        on_gpu = self.world.device.type == "cuda"
        host = self.world.sum(self._total).to("cpu", non_blocking=on_gpu)  # page-locked
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._sent, self.steps = (step, self.steps, host, copied), 0

    def read(self) -> tuple[int, int, dict[str, float]] | None:
        """Return what was sent and not yet read, if anything: last step, number of steps, means.

        Called one step after `send`, it waits for that step only, while the GPU runs the next one.
        """
        if self._sent is None:
            return None
        (step, steps, host, copied), self._sent = self._sent, None
        if copied is not None:
            copied.synchronize()
        means = (host / (steps * self.world.size)).tolist()
        return step, steps, dict(zip(self._names, means, strict=True))
