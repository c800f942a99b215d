"""Optional observers of a run, whose methods the run calls; `log.observers` lists them."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import UserError, describe
from conf.named import check_signature, import_object, installed, split_entry
from conf.schema import Config
from engine.files import to_list
from engine.log.tracker import Tracker
from engine.run import Parts, Run
from engine.validation import Rows
from pipeline.data.dataset import Dataset
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed

logger = logging.getLogger(__name__)


class ObservedRun:
    """Attributes of a run that observers may use; base class of `engine.log.runlog.RunLog`."""

    def __init__(self, parts: Parts, feed: Feed, run: Run, tracker: Tracker) -> None:
        self.config = run.config
        self.path = run.path  # run directory
        self.world = run.world
        self.datasets = parts.datasets
        self.feed = feed  # loads batches; `feed.train.clock` times the steps
        self.schedule = parts.schedule
        self.compute = parts.compute
        self.state = parts.state  # model, latest and best validation
        self.metrics = parts.metrics
        self.tracker = tracker  # prints lines and writes files
        self.row: dict[str, Any] = {}  # latest row of training steps


class Observer:
    """Base class of observers, with callbacks that do nothing. Only rank 0 has observers.

    The constructor takes an ObservedRun and the parameters in `log.observers`. If it raises
    UserError or needs a missing package, the run ends before its first step. Any other exception,
    and UserError in a method, causes one warning, and the run continues without the observer.
    """

    def __init__(self, log: ObservedRun) -> None:
        self.log = log

    def begin_step(self, batch: Batch) -> None:
        """Called before an optimizer step; `batch.step` is the number of completed steps."""

    def end_step(self, step: int) -> None:
        """Called after a step, whose kernels may still run. `step`: number of completed steps."""

    def logged(self, row: Mapping[str, Any]) -> None:
        """Called with each row of metrics.jsonl, of training steps or of a validation."""

    def validated(self, row: Mapping[str, Any], rows: Rows) -> Mapping[str, Any] | None:
        """Called after a validation; the returned values are added to its row, under new keys.

        A value is anything that JSON can store, a tensor or an array.
        `rows`: results of `validation_values` for every sample.
        """

    def finish(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Called when a run ends without an error; the returned values are added to summary.json.

        If a value is a mapping with the key `line`, the console prints this line.
        """

    def close(self) -> None:
        """Free resources, even if the run failed. Not called after an error in this observer."""

    @staticmethod
    def evaluated(
        folder: Path, rows: Rows, classes: Sequence[str], dataset: Dataset
    ) -> Mapping[str, Any] | None:
        """Write files about an evaluation; return values to add to its evaluation.json.

        scripts/evaluate.py calls it. `rows`: see `validated`; a label is an index into `classes`.
        """


class Observers:
    """Calls a run's observers. An observer's first error causes a warning and disables it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._started: list[tuple[str, Observer]] = []
        self._ignored: set[Any] = set()  # keys of returned values that cannot be logged
        tracker.callback(self._started.clear)  # otherwise, observers keep the run alive

    def start(self, log: ObservedRun) -> None:
        """Create the observers. Raises UserError if a constructor does or misses a package."""
        for name, observer, parameters in named_observers(log.config):
            create = partial(observer, log, **parameters)
            self._tracker.guard(name, self._start, name, create, reraise=UserError)

    def _start(self, name: str, create: Callable[[], Observer]) -> None:
        with installed(f"log.observers={name}"):
            observer = create()
        self._started.append((name, observer))
        self._tracker.callback(self._tracker.guard, name, observer.close)

    def notify(self, event: Callable[[Observer], Any]) -> None:
        """Call a method of each observer."""
        for name, observer in self._started:
            self._tracker.guard(name, event, observer)

    def extend(self, row: dict[str, Any], event: Callable[[Observer], Any]) -> dict[str, Any]:
        """Return `row` and the values that a method of each observer returns, under new keys.

        Values that JSON cannot store cause one warning and are skipped.
        """
        for name, observer in self._started:
            returned = self._tracker.guard(name, lambda one: dict(event(one) or {}), observer) or {}
            for key in sorted(returned.keys() - self._ignored, key=str):
                try:
                    text = json.dumps({key: returned[key]}, default=to_list)
                    # Raises TypeError for an existing key.
                    row = dict(**row, **json.loads(text))
                except Exception as error:  # `tolist` raises many types
                    self._ignored.add(key)
                    problem = f"{name}: {key} cannot be logged ({describe(error)})"
                    fix = "return a number, string, list, tensor or array under a new key"
                    logger.warning("%s; %s", problem, fix)
        return row


def named_observers(config: Config) -> list[tuple[str, type[Observer], dict[str, Any]]]:
    """Return name, class and parameters of each entry in log.observers.

    Raises UserError if the name does not exist, or its class does not take a parameter.
    """
    observers = []
    for entry in config.log.observers:
        name, parameters = split_entry(entry, "log.observers")
        observer = import_object(name, "log.observers")
        if not hasattr(observer, "evaluated"):
            problem = "not a subclass of engine.log.observer.Observer"
            raise UserError(f"log.observers={name}", problem)
        check_signature(observer, f"log.observers={name}", None, **parameters)
        observers.append((name, observer, parameters))
    return observers
