"""Optional objects that observe a run; `log.observers` names them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from conf.errors import UserError
from conf.named import check_signature, import_object, split_entry
from conf.schema import Config
from engine.compute import Compute
from engine.distributed import World
from engine.log.tracker import Tracker
from engine.metrics import Metrics
from engine.schedule import Schedule
from engine.state import TrainState
from engine.validation import Rows
from pipeline.data.build import Datasets
from pipeline.data.dataset import Dataset
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed


class ObservedRun(Protocol):
    """What an observer may use of a run: attributes of engine.log.runlog.RunLog."""

    config: Config
    path: Path  # the run directory
    world: World
    datasets: Datasets
    feed: Feed  # the batches; `feed.train.clock` measures the steps
    schedule: Schedule
    compute: Compute
    state: TrainState  # the model, and the newest and the best validation
    metrics: Metrics
    tracker: Tracker  # prints lines and writes files
    row: dict[str, Any]  # the newest row of training steps


class Observer:
    """Does nothing; a subclass overrides what it is interested in. Only rank 0 has observers.

    A subclass is made with an ObservedRun and the parameters of its entry in `log.observers`. A
    UserError of its constructor ends the run, before the first step. After any other exception, and
    a UserError of a method, there is one warning, and the run continues without the observer.
    """

    def __init__(self, log: ObservedRun) -> None:
        self.log = log

    def begin_step(self, batch: Batch) -> None:
        """Observe the beginning of an optimiser step: `batch.step` were done before."""

    def end_step(self, step: int) -> None:
        """Observe the end of a step, whose kernels may still run. `step`: how many are done."""

    def logged(self, row: Mapping[str, Any]) -> None:
        """Observe a row of metrics.jsonl, of training steps or of a validation."""

    def validated(self, row: Mapping[str, Any], rows: Rows) -> Mapping[str, Any] | None:
        """Observe a validation; what is returned is added to its row.

        `rows`: what `validation_values` gave for every sample.
        """

    def finish(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Observe the end of a run without an error; what is returned is added to summary.json.

        The console shows the `line` of an added mapping that has one.
        """

    def close(self) -> None:
        """Free what the observer holds; also called after an error of the run.

        Not called after one of the observer's own methods has failed.
        """

    @staticmethod
    def evaluated(
        folder: Path, rows: Rows, classes: Sequence[str], dataset: Dataset
    ) -> Mapping[str, Any] | None:
        """Write files about what scripts/evaluate.py found; return additions to evaluation.json.

        `rows`: see `validated`; a label is a position in `classes`.
        """


class Observers:
    """The observers of a run. After an error of one of them, there is one warning."""

    def __init__(self, tracker: Tracker) -> None:
        self._guard = tracker.guard
        self._started: list[tuple[str, Observer]] = []
        tracker.callback(self._started.clear)  # otherwise they keep the run alive

    def start(self, log: ObservedRun) -> None:
        """Create the observers of log.observers. Raises UserError of a constructor."""
        for name, observer, parameters in named_observers(log.config):
            create = partial(observer, log, **parameters)
            self._guard(name, self._start, name, create, log.tracker, reraise=UserError)

    def _start(self, name: str, create: Callable[[], Observer], tracker: Tracker) -> None:
        started = create()
        self._started.append((name, started))
        tracker.callback(self._guard, name, started.close)

    def notify(self, event: Callable[[Observer], Any]) -> dict[str, Any]:
        """Call a method of each observer; return all values that they add."""
        added: dict[str, Any] = {}
        for name, observer in self._started:
            added |= self._guard(name, event, observer) or {}
        return added


def named_observers(config: Config) -> list[tuple[str, type[Observer], dict[str, Any]]]:
    """Return name, class and parameters of each entry of log.observers.

    Raises UserError for a name that does not exist, or a parameter that it does not take.
    """
    observers = []
    for entry in config.log.observers:
        name, parameters = split_entry(entry, "log.observers")
        observer = import_object(name, "log.observers")
        if not hasattr(observer, "evaluated"):
            wrong = "is not a subclass of engine.log.observer.Observer"
            raise UserError(f"log.observers={name}", wrong)
        check_signature(observer, f"log.observers={name}", None, **parameters)
        observers.append((name, observer, parameters))
    return observers
