"""The row of a run in TensorBoard's tab HPARAMS, from the event files."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from tests.helpers.small_run import run


@pytest.mark.usefixtures("toy_runs")
def test_a_resumed_run_has_one_row(image_root: Path, tmp_path: Path) -> None:
    """It holds the keys that affect the result; the curve is the best value so far."""
    for steps in (5, 9):
        options = ["loader.workers=0", "log.trackers=[tensorboard]", f"train.max_steps={steps}"]
        summary = run(image_root, tmp_path, "optim.lr=0.05", *options)
    events = EventAccumulator(str(tmp_path)).Reload()
    (content,) = events.PluginTagToContent("hparams").values()
    keys = parse_session_start_info_plugin_data(content).hparams
    assert keys["optim.lr"].number_value == 0.05 and keys["recipe"].string_value == "demo"
    assert keys["model.sync_bn"].string_value == "false" and "log.trackers" not in keys
    best = {event.step: event.value for event in events.Scalars("best/top1")}
    assert [*best] == [5, 9] and best[9] == pytest.approx(summary["best_top1"])
