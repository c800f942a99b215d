"""The results of a run in summary.json: values of its newest and best validation."""

from typing import Any

from engine.checkpoint import file_name
from engine.metrics import Metrics
from engine.state import TrainState


def newest_values(state: TrainState, metrics: Metrics) -> dict[str, Any]:
    """Return the values of the last validation, their units, and the names without `_raw`."""
    values = dict(state.last_validation)
    step = values.pop("step", None)
    values.pop("epoch", None)
    names = [name for name in values if not name.endswith("_raw")]
    units = {name: metrics[name.removesuffix("_raw")].unit for name in values}
    return {**values, "values": names, "units": units, "validated_step": step}


def best_values(state: TrainState, metrics: Metrics) -> dict[str, Any]:
    """Return the value of the best validation so far, its epoch and checkpoint, or None each."""
    name = f"best_{metrics.best_by}"
    best = state.best_validation
    if not best:
        return {name: None, "best_epoch": None, "best_checkpoint": None}
    return {
        name: best.get(metrics.best_by),
        "best_epoch": round(best["epoch"], 4),
        "best_checkpoint": file_name(int(best["step"])),
    }
