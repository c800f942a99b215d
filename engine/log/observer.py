"""What `log.observers` names: objects that are told what a run does, and that it does not need."""

from collections.abc import Mapping
from typing import Any


class Observer:
    """Does nothing; a subclass overrides what it is interested in. Only rank 0 has observers.

    A subclass is made with the RunLog, then the parameters of its entry in `log.observers`.
    """

    def step(self, step: int, row: Mapping[str, Any] | None) -> None:
        """Observe the end of an optimiser step. `step`: how many are done.

        `row`: the log row that was written since the last call, in host numbers, or None.
        """

    def validated(self, row: Mapping[str, Any], rows: Any) -> Mapping[str, Any] | None:
        """Observe a validation; what is returned is added to its row, and to later observers'.

        `rows`: what `validation_values` gave for every sample, as of engine.validation.Rows.
        """

    def finish(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Observe the end of a run without an error; what is returned is added to summary.json."""

    def close(self) -> None:
        """Free what the observer holds; also called after an error."""
