"""Optional objects that observe a run; `log.observers` names them."""

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.named import import_object, split_entry
from conf.schema import Config
from pipeline.dataset import Dataset


class Observer:
    """Does nothing; a subclass overrides what it is interested in. Only rank 0 has observers.

    A subclass is made with the engine.log.runlog.RunLog, whose parts it may use, and the parameters
    of its entry in `log.observers`. A UserError of its constructor ends the run, before the first
    step. After any other exception, and a UserError of a method, there is one warning, and the run
    continues without the observer.
    """

    def __init__(self, log: Any) -> None:
        self.log = log

    def begin_step(self, step: int) -> None:
        """Observe the beginning of an optimiser step. `step`: how many were done before."""

    def end_step(self, step: int) -> None:
        """Observe the end of a step, whose kernels may still run. `step`: how many are done."""

    def logged(self, row: Mapping[str, Any]) -> None:
        """Observe a row of metrics.jsonl, of training steps or of a validation."""

    def validated(self, row: Mapping[str, Any], rows: Any) -> Mapping[str, Any] | None:
        """Observe a validation; what is returned is added to its row.

        `rows`: what `validation_values` gave for every sample; see engine.validation.Rows.
        """

    def finish(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Observe the end of a run without an error; what is returned is added to summary.json.

        The console shows the `line` of an added mapping that has one.
        """

    def close(self) -> None:
        """Free what the observer holds; also called after an error of the run."""

    @staticmethod
    def evaluated(
        folder: Path, rows: Any, classes: Sequence[str], dataset: Dataset
    ) -> Mapping[str, Any] | None:
        """Write files about what scripts/evaluate.py found; return additions to evaluation.json.

        `rows`: see `validated`; a label is a position in `classes`.
        """


def named_observers(config: Config) -> list[tuple[str, type[Observer], dict[str, Any]]]:
    """Return name, class and parameters of each entry of log.observers.

    Raises UserError for a name that does not exist, or a parameter that it does not take.
    """
    key, observers = "log.observers", []
    for entry in config.log.observers:
        name, parameters = split_entry(entry, key)
        observer = import_object(name, key)
        try:
            signature(observer).bind(None, **parameters)
        except TypeError as error:
            raise UserError(f"{key}: {name}: {error}") from None
        observers.append((name, observer, parameters))
    return observers
