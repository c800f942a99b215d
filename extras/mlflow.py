"""Send the rows of a run to MLflow, https://mlflow.org/docs.

    pip install mlflow
    python train.py data.root=/imagenet log.observers=[extras.mlflow:MLflow]

mlflow reads its own environment variables, such as MLFLOW_TRACKING_URI. Without this one, it writes
mlflow.db into the working directory, which `mlflow ui` shows.
"""

import os
from collections.abc import Mapping
from typing import Any

from conf.schema import result_keys
from engine.files import replace_file
from engine.log.observer import ObservedRun, Observer
from engine.log.tracker import curves


class MLflow(Observer):
    """Starts a run of MLflow, or continues the one whose ID is in the run directory."""

    def __init__(self, log: ObservedRun) -> None:
        # Otherwise it waits 4 minutes for a server.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow  # without it, there is a warning

        self.mlflow = mlflow
        path = log.path / "mlflow"
        known = path.read_text("utf-8") if path.exists() else None
        run = mlflow.start_run(known, run_name=log.path.resolve().name).info
        if known is None:  # a parameter never changes in MLflow
            mlflow.log_params({"recipe": log.config.recipe, **result_keys(log.config)})
            replace_file(path, run.run_id)
        mlflow.set_tag("history", "; ".join(log.state.history))  # changes that were accepted later
        log.tracker.print(f"mlflow    run {run.run_id} in {mlflow.get_tracking_uri()}")

    def logged(self, row: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(curves(row), step=row["step"], synchronous=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.mlflow.end_run("FINISHED" if summary["status"] == "finished" else "KILLED")

    def close(self) -> None:
        self.mlflow.end_run("FAILED")  # unless it has ended
