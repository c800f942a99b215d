"""Sweeps: -m checks every job, and Hydra runs jobs as train.py processes."""

import json
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import yaml

from conf import cli
from extras.sweep import WORST, Sweep
from scripts import report
from tests.conf.errors import error_message
from tests.helpers.processes import ROOT, Started, needs_linux, wait_for

FAKE = "data=fake"
NAME = "resnet50,data=fake"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("++optim.lr=1,2", ["1", "2"]),
        ("train.seed=range(4,0,-2)", ["4", "2"]),
        ("augment.batch=choice([],[{mixup: {alpha: 0.2}}])", ["[]", "[{mixup:{alpha:0.2}}]"]),
        ("data.root=/a,/b c", ["/a", "/b c"]),
        ("data.root='/it\\'s','/c'", ["'/it\\'s'", "'/c'"]),
        ("optim.name=extras.sweep:main,sgd", ["extras.sweep:main", "sgd"]),
        ("model.weights=null,'/a,b.pth'", ["null", "'/a,b.pth'"]),
        ("model.weights=a/best.pt,b/best.pt", ["a/best.pt", "b/best.pt"]),
    ],
)
def test_sweep_syntax(typed, expected):
    key = typed.partition("=")[0].lstrip("+")
    assert list(Sweep([FAKE, typed]).jobs) == [(f"{key}={value}",) for value in expected]


def test_sweep_cfg_job_prints_all_jobs(capsys):
    words = [FAKE, "-m", "train.seed=range(3)", "--cfg", "job"]
    with pytest.raises(SystemExit) as stop:
        cli.parse(words, script="train.py", purpose="")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert [config["train"]["seed"] for config in yaml.safe_load_all(printed)] == [0, 1, 2]


def test_sweep_search_checks_first_job_only():
    """A plugin draws jobs from any number of combinations; only the first is checked."""
    keys = ("lr", "momentum", "weight_decay", "clip_norm")
    words = [f"optim.{key}=range(0.01,1,0.01)" for key in keys]
    assert len(Sweep([FAKE, "hydra/sweeper=optuna", *words]).jobs) == 1


CASES = {
    "optim.lr=0.1,-2": "optim.lr=-2: invalid value; expected a number > 0",
    "model=glob(res*)": "model=glob(res*): no such model; choose ",
    "optim.lr=1,2 run.dir=x": "such as 'run.name=NAME-${optim.lr}'",
    "train.best_by=top1,-loss": "-m: cannot compare jobs with different train.best_by; set one",
    "optim.lr=1,2 data.root=gone": "data.root=gone: /",
}


@pytest.mark.parametrize(("words", "message"), CASES.items())
def test_sweep_errors_before_first_job(words, message, capsys):
    """Errors are found before the first job starts."""
    assert message in error_message(["-m", "data.root=.", *words.split()], capsys)


def test_sweep_rejected_for_scripts_and_torchrun(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["-m", "optim.lr=1,2", FAKE], script="bench.py", purpose="")
    assert "-m: only train.py supports sweeps; run this" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "under torchrun or srun" in error_message(["--multirun", "optim.lr=1,2", FAKE], capsys)


# Replacement for train.py. The file `outcomes` has each job's exit status by seed, or `wait` to
# wait for SIGTERM or SIGINT and then exit like a run that has saved a checkpoint.
SCRIPT = """\
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from conf import cli
config = cli.parse(sys.argv[1:], script="train.py", purpose="")
with open("started", "a") as file:
    print(config.train.seed, file=file)
seed = config.train.seed
print("run       " + config.run.dir, "steps %d" % (seed // 2), sep="\\n", flush=1)
print("end", file=sys.stderr)  # as a warning
status = json.loads(Path("outcomes").read_text())[seed]
if status == 0:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(cli.to_yaml(config))
    (folder / "metrics.jsonl").touch()
    summary = dict(status="finished", best_top1=50.0 + config.train.seed)
    (folder / "summary.json").write_text(json.dumps(summary))
if status == "wait":
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    Path("job").touch()
    status = 128 + signal.sigwait(signals)
    Path("saved").touch()
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
# An installed Hydra plugin. It runs the second seed first and stores the jobs' return values.
PLUGIN = """\
from pathlib import Path
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
class Backwards(Sweeper):
    def setup(self, **given):
        self.launcher = Plugins.instance().instantiate_launcher(**given)
    def sweep(self, arguments):
        Path("arguments").write_text(" ".join(arguments))
        found = self.launcher.launch([["++train.seed=1"], ["++train.seed=0"]], initial_job_idx=0)
        Path("values").write_text(" ".join(str(each.return_value) for each in found))
from hydra.core.config_store import ConfigStore
node = {"_target_": "hydra_plugins.backwards.Backwards"}
ConfigStore.instance().store(group="hydra/sweeper", name="backwards", node=node)
"""


def start(folder: Path, outcomes: list[Any], *more: str) -> Started:
    """Start a sweep over train.seed in a directory; its jobs have the given outcomes."""
    (folder / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    (folder / "started").write_text("")
    (folder / "outcomes").write_text(json.dumps(outcomes))
    command = [sys.executable, "train.py", "-m", FAKE, f"train.seed=range({len(outcomes)})", *more]
    return Started(command, {"PYTHONPATH": str(folder)}, cwd=folder, stdout=PIPE, stderr=STDOUT)


def sweep(folder: Path, outcomes: list[Any], *more: str) -> tuple[int, list[str], str]:
    """Return the exit status of a sweep, the seeds that were started, and the output."""
    with start(folder, outcomes, *more) as process:
        out = process.communicate()[0]
    return process.returncode, (folder / "started").read_text().split(), out


def test_sweep_continues_after_failed_job(tmp_path):
    status, started, out = sweep(tmp_path, [0, 1, 0])
    assert (status, started) == (1, ["0", "1", "2"])
    first, _, third = (NAME.replace(",", f",train.seed={seed},") for seed in range(3))
    (own,) = (tmp_path / "runs").glob("sweep,train.seed,*")
    assert "\njob 2 of 3: train.seed=1\n" in out
    assert out.partition("job 3 of 3: train.seed=2\n")[2].splitlines() == [
        f"run       runs/{third}",
        *("steps 1", "end"),
        "best top1, %, best job first:",
        *("    52.00  train.seed=2", "    50.00  train.seed=0", "no result  train.seed=1"),
        f"report    python scripts/report.py runs/{own.name}",
    ]
    assert [path.name for path in report.run_folders(own)] == [first, third]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {first, third, own.name}
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "started", "outcomes", "runs"}
    # Each job starts again. A signal to a job or a rejected job ends the sweep.
    assert sweep(tmp_path, [0, -signal.SIGTERM], "recipe=demo,cifar10")[:2] == (143, [*"001"])
    assert sweep(tmp_path, [2, 0, 0])[:2] == (2, ["0"])
    assert sweep(tmp_path, [-signal.SIGKILL, 0])[:2] == (0, ["0", "1"])  # out of memory


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_sweep_signal_stops_job(tmp_path, number):
    """The job saves, and the sweep ends with its status, even if the sweep itself is killed."""
    if number == signal.SIGKILL:
        needs_linux()  # prctl
    with start(tmp_path, ["wait", 0]) as process:
        wait_for("the job can receive signals", (tmp_path / "job").exists, process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # Ctrl-C in a terminal
        else:
            process.send_signal(number)
        assert process.wait() == (128 + number if number != signal.SIGKILL else -number)
        stopped = "\nsweep stopped in job 1 of 2; run the same command again to continue\n"
        assert number == signal.SIGKILL or stopped in process.stdout.read()
        wait_for("the job ends", lambda: not process.members())
    assert (tmp_path / "saved").exists() and (tmp_path / "started").read_text() == "0\n"


def test_sweep_runs_installed_plugin(tmp_path):
    """A plugin gets the varied overrides, and each job's best score, or the worst if it failed."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "backwards.py").write_text(PLUGIN)
    status, started, _ = sweep(tmp_path, [1, 0], "optim.lr=0.3", "hydra/sweeper=backwards")
    assert (status, started) == (0, ["1", "0"])
    assert (tmp_path / "values").read_text() == f"51.0 {WORST}"
    assert (tmp_path / "arguments").read_text() == "++train.seed=range(2)"
