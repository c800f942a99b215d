"""loader.workers=auto does not change the result. Benchmarked on a CPU, unlike in train.py."""

import sys

import pytest

from engine import tune
from tests.engine.tune.tuning import measure_on_cpu
from tests.helpers import small_run
from tests.helpers.results import column, rows, same, stored, summary_of

pytestmark = pytest.mark.usefixtures("toy_runs", "restored_logging")
FAKE = ["data=fake", "data.image_size=16", "data.fake_images=192", "data.fake_classes=3"]
FAKE += ["loader.batch_size=16", "log.every_steps=4", "train.epochs=3", "optim=adamw"]
AUTO = "loader.workers=auto"


@pytest.fixture(autouse=True)
def _measure_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmark as on a GPU."""
    measure_on_cpu(monkeypatch.setattr)


def autotune_lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines about autotuning."""
    lines = capfd.readouterr().out.splitlines()
    return [line.removeprefix("autotune  ") for line in lines if line.startswith("autotune")]


def test_auto_workers_do_not_change_result(image_root, tmp_path, monkeypatch, capfd):
    """Benchmarking leaves no trace, even after stopping and resuming."""
    monkeypatch.setattr(tune, "workers_for", lambda *_: 2)
    small_run.run(image_root, tmp_path / "1", *FAKE)
    assert not autotune_lines(capfd)
    small_run.run(image_root, tmp_path / "auto", *FAKE, AUTO, "train.max_steps=24")
    assert len(autotune_lines(capfd)) == 3  # step, workers, choice
    small_run.run(image_root, tmp_path / "auto", *FAKE, AUTO)
    assert autotune_lines(capfd)
    assert {*column(tmp_path / "auto", "train", "workers")} == {2}
    assert same(stored(tmp_path / "auto"), stored(tmp_path / "1"))
    assert rows(tmp_path / "auto", "val") == rows(tmp_path / "1", "val")


def test_auto_workers_not_measured_for_few_steps(image_root, tmp_path, capfd):
    small_run.run(image_root, tmp_path / "run", AUTO, "train.max_steps=1")
    assert not autotune_lines(capfd)
    assert column(tmp_path / "run", "train", "workers") == [1]


SCRIPT = """
import sys
import train
from conf.compose import from_overrides
from engine import tune
from tests.engine.tune.tuning import measure_on_cpu
from tests.helpers.toy import TASK

measure_on_cpu(setattr)
vars(train).update(TASK)
sys.exit(train.main(from_overrides(sys.argv[1:])))
"""


@pytest.mark.slow
def test_auto_workers_with_two_ranks(image_root, tmp_path, ranks):
    """Rank 0 prints the result; weights are the same as without benchmarking."""
    script, hashes = tmp_path / "measures.py", []
    script.write_text(SCRIPT)
    for workers in ("auto", "1"):
        options = [*FAKE, f"loader.workers={workers}", "train.ema_decay=0.9"]
        words = small_run.overrides_of(image_root, tmp_path / workers, *options)
        done = ranks.run([sys.executable, str(script), *words], 2)
        assert done.stdout.count("the step processes ") == (workers == "auto")
        hashes.append(summary_of(tmp_path / workers)["params_sha256"])
    assert hashes[0] == hashes[1]
