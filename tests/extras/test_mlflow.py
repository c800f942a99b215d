"""MLflow: what its store holds after two starts of a run."""

import pytest

import train
from tests.helpers.small_run import compose

mlflow = pytest.importorskip("mlflow")


@pytest.mark.usefixtures("toy_runs")
def test_the_rows_of_two_starts(image_root, tmp_path):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    for steps in (2, 3):
        options = ["log.observers=[extras.mlflow:MLflow]", f"train.max_steps={steps}"]
        train.train(compose(image_root, tmp_path / "run", "loader.workers=0", *options))
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["loader.batch_size"] == "8"
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [loss.step for loss in losses] == [1, 2, 3] and run.data.metrics["val/top1"] >= 0
