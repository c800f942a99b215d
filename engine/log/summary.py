"""The validation results in summary.json."""

from typing import Any

from engine.checkpoint import file_name
from engine.metrics import Metrics
from engine.state import TrainState


def validation_values(state: TrainState, metrics: Metrics) -> dict[str, Any]:
    """Return the newest validation's values, and the best one's value, epoch and checkpoint.

    `units` has the unit of each value, `values` the names without `_raw`. Results of a validation
    that does not exist are None.
    """
    values = dict(state.last_validation)
    step = values.pop("step", None)
    values.pop("epoch", None)
    results = {
        **values,
        "values": [name for name in values if not name.endswith("_raw")],
        "units": {name: metrics[name.removesuffix("_raw")].unit for name in values},
        "validated_step": step,
        f"best_{metrics.best_by}": None,
        "best_epoch": None,
        "best_checkpoint": None,
    }
    best = state.best_validation
    if best:
        results[f"best_{metrics.best_by}"] = best.get(metrics.best_by)
        results["best_epoch"] = round(best["epoch"], 4)
        results["best_checkpoint"] = file_name(int(best["step"]))
    return results
