"""Sweeps: -m expands and checks the jobs, runs them, stops, resumes and shows them."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from conf import cli, multirun
from conf.schema import UserError, group_names
from tests.processes import is_running, wait_until
from tests.small_run import SMALL_RUN

ROOT = Path(__file__).parents[1]
DEMO = "recipe=demo"


def values(*words: str) -> list[str]:
    return [str(job) for job in multirun.expand([DEMO, *words])]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("optim.lr=0.1,0.2", ["0.1", "0.2"]),
        ("optim.lr=choice(0.1,0.2)", ["0.1", "0.2"]),
        ("optim.lr=choice(0.1)", ["0.1"]),
        ("optim.lr=range(0.1,0.5,0.1)", ["0.1", "0.2", "0.3", "0.4"]),
        ("optim.lr=sort(3,1,2,reverse=true)", ["3", "2", "1"]),
        ("++optim.lr=1,2", ["1", "2"]),
        ("train.seed=range(3)", ["0", "1", "2"]),
        ("train.seed=range(4,0,-2)", ["4", "2"]),
        ("train.max_steps=range(1234567890123,1234567890124)", ["1234567890123"]),
        ("schedule=glob([c*,s*],exclude=st*)", ["constant", "cosine"]),
        ("schedule=glob(*)", group_names("schedule")),
        ("augment.batch=[],[mixup]", ["[]", "[mixup]"]),
        ('data.root="~/a","~/b"', ['"~/a"', '"~/b"']),
        (
            "augment.batch=choice([],[{mixup: {alpha: 0.2}}])",
            ["[]", "[{mixup:{alpha:0.2}}]"],
        ),
        ("data.root=/a,/b c", ["/a", "/b\\ c"]),
        ("model.weights=null,'/a,b.pth'", ["null", "'/a,b.pth'"]),
    ],
)
def test_syntax_of_sweeps(typed: str, expected: list[str]) -> None:
    key = typed.partition("=")[0].lstrip("+")
    assert values(typed) == [f"{key}={value}" for value in expected]


def test_shuffle_gives_the_same_sweep() -> None:
    jobs = [multirun.expand([DEMO, "train.seed=shuffle(range(3))"]) for _ in range(3)]
    assert {frozenset(map(str, sweep)) for sweep in jobs} == {frozenset(map(str, jobs[0]))}
    assert len({multirun.folder_of(sweep) for sweep in jobs}) == 1


def test_combinations_have_the_order_of_hydra() -> None:
    sweep = ["optim.lr=0.1,0.3", "train.epochs=6", "optim.weight_decay=0,1e-4"]
    jobs = multirun.expand([DEMO, *sweep])
    assert [str(job) for job in jobs] == [
        "optim.lr=0.1 optim.weight_decay=0",
        "optim.lr=0.1 optim.weight_decay=0.0001",
        "optim.lr=0.3 optim.weight_decay=0",
        "optim.lr=0.3 optim.weight_decay=0.0001",
    ]
    assert jobs[2].overrides == [DEMO, "optim.lr=0.3", "train.epochs=6", "optim.weight_decay=0"]
    assert jobs[2].config == cli.load(jobs[2].overrides)
    assert jobs[2].config.run.name == "demo,optim.lr=0.3,optim.weight_decay=0,train.epochs=6"


def test_the_last_override_of_a_key_counts() -> None:
    assert values("optim.lr=1,2", "optim.lr=3,4") == ["optim.lr=3", "optim.lr=4"]
    (job,) = multirun.expand([DEMO, "optim.lr=1,2", "++optim.lr=3"])
    assert (job.values, job.config.optim.lr) == ({}, 3)


def test_groups_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "cold.yaml").write_text("name: linear\n")
    jobs = multirun.expand([DEMO, f"--config-dir={tmp_path}", "schedule=glob(co*)"])
    assert [job.values["schedule"] for job in jobs] == ["cold", "constant", "cosine"]
    assert all(job.overrides[0] == f"--config-dir={tmp_path}" for job in jobs)


def test_folder_of_a_sweep() -> None:
    def folder(*words: str) -> Path:
        return multirun.folder_of(multirun.expand([DEMO, *words]))

    one = folder("optim.lr=1,2", "schedule=cosine,constant")
    assert str(one).startswith("runs/sweep,optim.lr,schedule,")
    assert one == folder("optim.lr=1,2", "schedule=cosine,constant", "log.every_steps=3")
    assert one != folder("optim.lr=1,3", "schedule=cosine,constant")
    assert folder("optim.lr=1,2", "run.dir=/scratch/${run.name}").parent == Path("/scratch")


MISTAKES = {
    "optim.lr=0.1,-2": "optim.lr=-2: not allowed; give a number > 0",
    "optim.lr=0.1,abc": "optim.lr=abc: not allowed; give a number > 0",
    "optm.lr=0.1,0.2": "optm.lr=0.1,0.2: there is no key optm.lr; did you mean optim.lr?",
    "lr=0.1,0.2": "lr=0.1,0.2: there is no key lr; did you mean optim.lr?",
    "arch=resnet18,resnet50": "write model.name=resnet18,resnet50",
    "hydra.sweeper.params.optim.lr=1,2": "hydra.sweeper.params.optim.lr=1,2: Hydra's own settings",
    "optim.lr=1,2 'run.dir=x/${now:%H-%M}/${run.name}'": "run.dir=x/${now:%H-%M}/${run.name}: the "
    "same command resumes a run by its folder; leave the time out",
    "optim.lr=1,2 'run.name=${now:%H}-${optim.lr}'": "leave the time out",
    "optim.lr=range(nan)": "optim.lr=range(nan): the values are not numbers; give a list, range()",
    "optim.lr=range(inf)": "-m: more than 1,000 jobs",
    "data.root=~/a,~/b": "data.root=~/a,~/b: cannot be split at its commas; put each value in "
    """quotes, as in 'data.root="~/a","~/b"', or a single value that contains commas""",
    "data.root=/x=1,/y=2": "data.root=/x=1,/y=2: cannot be split at its commas",
    "schedule=cosine,cosin": "schedule=cosin: no such schedule",
    "optim.betas=0.9,0.95": "optim.betas=0.9: not allowed; give a list of 2 values",
    "optim=sgd,adamw optim.nesterov=true": "optim.nesterov=true: has no effect with "
    "optim.name=adamw",
    "optim.lr=interval(0,1)": "an interval has no list of values; give a list or range()",
    "optim.lr=glob(*)": "optim.lr=glob(*): glob() chooses from a group (augment, data, ",
    "model=glob(zzz*)": "model=glob(zzz*): has no value; give at least one",
    "train.seed=range(3,1)": "train.seed=range(3,1): has no value; give at least one",
    "train.seed=range(1,2,0)": "range() arg 3 must not be zero; give a list, range()",
    "optim.lr=range(0.1,2,0)": "optim.lr=range(0.1,2,0): ",
    "optim.lr=rnge(1,2)": "Unknown function 'rnge'; give a list, range(), choice() or glob()",
    "train.seed=range(1000000000)": "-m: more than 1,000 jobs; give fewer values",
    "train.seed=range(40) optim.lr=range(1,40)": "-m: more than 1,000 jobs",
    "optim.lr=1,1.0": "optim.lr=1: give each value once",
    "optim.lr=1,1": "-m: optim.lr=1 occurs twice; give each value once",
    "loader.workers=1,2": "-m: loader.workers=1 and loader.workers=2 have the same run directory, "
    "runs/demo: give each job its own, for example 'run.dir=runs/${run.name}-${loader.workers}'",
    "optim.lr=1,2 run.name=x": "have the same run directory, runs/x: leave run.name out",
    "optim.lr=1, 2": "2: is not key=value; a list has no spaces: optim.lr=1,2",
    "--lr 1": "--lr: not an option; write optim.lr=1",
    "hydra.sweep.dir=/x optim.lr=1,2": "write 'run.dir=/x/${run.name}'",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_in_any_job_is_found_before_the_first(
    typed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.parse(["-m", DEMO, *shlex.split(typed)], script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train.py: ") and MISTAKES[typed] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("loader.workers=1,2", "'run.dir=runs/${run.name}-${loader.workers}'"),
        (
            "optim.lr=1,2 loader.workers=1,2 log.every_steps=1,2",
            "'run.dir=runs/${run.name}-${loader.workers}-${log.every_steps}'",
        ),
        ("loader=debug,default", "'run.dir=runs/${run.name}-${loader.workers}'"),
        ("loader.workers=1,2 run.dir=x", "'run.dir=x/${run.name}-${loader.workers}'"),
        ("loader.decoder=region,pillow", "'run.dir=runs/${run.name}-${loader.decoder}'"),
        ("data.root=/a/b,/c/d data=folder run.name=x", "run.name out"),
        ("optim=sgd,adamw run.name=x", "run.name out"),
        ("optim=sgd,adamw run.dir=x/y", "'run.dir=x/y/${run.name}'"),
        ("optim=sgd,adamw run.dir=x run.name=y", "run.name out and write 'run.dir=x/${run.name}'"),
        ("run.name=y,z run.dir=x", "'run.dir=x/${run.name}'"),
    ],
)
def test_the_advice_for_equal_run_directories_works(typed: str, advice: str) -> None:
    words = [DEMO, *typed.split()]
    with pytest.raises(UserError, match="have the same run directory") as error:
        multirun.expand(words)
    assert str(error.value).endswith(advice)
    if "run.name out" in advice:
        words = [word for word in words if not word.startswith("run.name=")]
    if "run.dir=" in advice:
        words += shlex.split(advice)[-1:]
    assert len(multirun.expand(words)) >= 2


def test_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["-m", "optim.lr=1,2", DEMO], script="lr_find.py", purpose="")
    assert "-m: only train.py has sweeps; start this" in capsys.readouterr().err
    with pytest.raises(UserError, match="not an option; only train"):
        cli.split_paths(["-m"], what="a file")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        cli.parse(["--multirun", "optim.lr=1,2", DEMO], script="train.py", purpose="")
    assert (
        "-m: a sweep does not run under torchrun or srun; run `torchrun" in capsys.readouterr().err
    )


def test_cfg_job_prints_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--cfg", "job", "-m", "optim.lr=1,2"], script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert [config["optim"]["lr"] for config in yaml.safe_load_all(out)] == [1, 2]
    assert "# job 2 of 2: optim.lr=2\n" in out


@pytest.mark.parametrize(
    "summary", ['{"total_seconds": NaN}', '{"total_seconds": 1e400}', '{"top1": "x"}', "[" * 10**5]
)
def test_a_damaged_summary_leaves_the_result_empty(summary: str, tmp_path: Path) -> None:
    job = multirun.expand([DEMO, "train.seed=1,2", f"run.dir={tmp_path}/${{train.seed}}"])[0]
    job.folder.mkdir()
    (job.folder / "summary.json").write_text(summary)
    job.end(0)
    assert multirun._lines(tmp_path, [job])[1].split() == ["1", "finished"]


# Jobs whose outcome is given by their place in the sweep. They import nothing slow.
SCRIPT = """\
import json, os, signal, sys
from pathlib import Path
if "-m" in sys.argv:
    sys.path.insert(0, {root!r})
    from conf import cli
    cli.parse(sys.argv[1:], script="train.py", purpose="")
seed = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("train.seed="))
with open("started", "a") as file:
    print(seed, file=file)
status, folder, config = json.loads(Path("outcomes").read_text())[seed]
if status == 0:
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "config.yaml").write_text(config)
    summary = dict(status="finished", top1=50.0 + seed, best_top1=60.0, total_seconds=3723.4)
    Path(folder, "summary.json").write_text(json.dumps(summary))
if status == "wait":
    Path(folder).mkdir(parents=True)
    expected = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        expected.append(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, expected)
    Path("job").write_text(str(os.getpid()))
    status = 128 + signal.sigwait(expected)
    Path("stopped").touch()
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Sweep:
    """Runs a sweep over train.seed whose jobs exit with given statuses."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        (folder / "job.py").write_text(SCRIPT.format(root=str(ROOT)))

    def prepare(self, outcomes: list[Any], *more: str) -> tuple[list[multirun.Job], list[str]]:
        """Return the jobs and the overrides of a sweep."""
        words = [DEMO, f"train.seed=range({len(outcomes)})", *more]
        jobs = multirun.expand(words)
        rows = [
            (outcome, str(job.folder), cli.to_yaml(job.config))
            for outcome, job in zip(outcomes, jobs, strict=True)
        ]
        (self.folder / "outcomes").write_text(json.dumps(rows))
        return jobs, words

    def run(self, outcomes: list[Any], *more: str) -> tuple[int, list[int], str]:
        """Return the exit status of the sweep, the seeds that were started, and the output."""
        started = self.folder / "started"
        started.write_text("")
        status = multirun.run(*self.prepare(outcomes, *more))
        return (
            status,
            [int(line) for line in started.read_text().split()],
            self.capsys.readouterr().out,
        )

    def statuses(self) -> list[str]:
        (path,) = self.folder.glob("runs/sweep,*/sweep.json")
        return [job["status"] for job in json.loads(path.read_text())["jobs"]]


@pytest.fixture
def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "job.py")])
    return Sweep(tmp_path, capsys)


def test_a_job_that_fails_does_not_stop_the_sweep(sweep: Sweep) -> None:
    status, started, out = sweep.run([0, 1, -9, 2, 0])
    assert (status, started) == (1, [0, 1, 2, 3, 4])
    assert sweep.statuses() == ["finished", "failed", "failed", "failed", "finished"]
    lines = out.splitlines()
    (folder,) = Path("runs").glob("sweep,*")
    assert lines[0] == f"sweep of 5 jobs: {folder}"
    assert lines[-8:-2] == [
        "train.seed  status    top1   best   time",
        "0           finished  50.00  60.00  1:02:03",
        "1           failed",
        "2           failed",
        "3           failed",
        "4           finished  54.00  60.00  1:02:03",
    ]
    assert lines[-2].startswith("3 of 5 jobs have not finished; run the same command")
    status, started, _ = sweep.run([0, 0, 0, 0, 0])
    assert (status, started) == (0, [1, 2, 3])
    assert sweep.statuses() == ["finished"] * 5


def test_a_mistake_that_the_first_job_finds_stops_the_sweep(sweep: Sweep) -> None:
    status, started, _ = sweep.run([2, 0])
    assert (status, started) == (2, [0])
    assert not (sweep.folder / "runs").exists()
    (run,) = (job.folder for job in multirun.expand([DEMO, "train.seed=range(1)"]))
    run.mkdir(parents=True)  # of an earlier start
    assert sweep.run([2, 0])[0] == 2
    assert list((sweep.folder / "runs").iterdir()) == [run.absolute()]


@pytest.mark.parametrize("outcome", [130, 143, 129, -signal.SIGTERM, -signal.SIGUSR1])
def test_a_job_that_is_stopped_stops_the_sweep(sweep: Sweep, outcome: int) -> None:
    """Also before the run can handle the signal, which then ends its process."""
    status, started, _ = sweep.run([outcome, 0])
    assert (status, started) == (outcome if outcome > 0 else 128 - outcome, [0])
    assert sweep.statuses() == ["interrupted", "not started"]


@pytest.mark.usefixtures("handled_sighup")
@pytest.mark.parametrize("prefix", [[], ["nohup"]], ids=["terminal", "nohup"])
def test_a_lost_terminal(sweep: Sweep, prefix: list[str]) -> None:
    """SIGHUP is passed on to the job, which saves; under nohup, it stays ignored."""
    _, words = sweep.prepare(["wait", 0])
    command = [*prefix, sys.executable, str(sweep.folder / "job.py"), "-m", *words]
    with subprocess.Popen(
        command, cwd=sweep.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as parent:
        wait_until((sweep.folder / "job").exists, parent)
        parent.send_signal(signal.SIGHUP)
        if prefix:
            parent.send_signal(signal.SIGTERM)
    assert parent.returncode == 128 + (signal.SIGTERM if prefix else signal.SIGHUP)
    assert sweep.statuses() == ["interrupted", "not started"]


def test_no_key_varies(sweep: Sweep) -> None:
    status, started, out = sweep.run([0])
    jobs = multirun.expand([DEMO])
    assert (status, started, str(jobs[0])) == (0, [0], "no key varies")
    assert multirun.folder_of(jobs).name.startswith("sweep,")
    assert "job 1 of 1: train.seed=0: runs/demo" in out


def test_a_job_that_fails_has_no_result_of_an_earlier_start(sweep: Sweep) -> None:
    sweep.run([0, 0])
    _, _, out = sweep.run([0, 1], "log.every_steps=3")
    assert "1           failed\n" in out


def test_another_config_is_not_skipped(sweep: Sweep) -> None:
    """train.py itself knows whether more steps are due."""
    assert sweep.run([0, 0])[:2] == (0, [0, 1])
    assert sweep.run([0, 0], "train.max_steps=9")[:2] == (0, [0, 1])
    assert sweep.run([0, 0], "checkpoint.resume=never")[:2] == (0, [0, 1])
    assert sweep.run([0, 0], "checkpoint.resume=never")[:2] == (0, [0, 1])


def test_a_sweep_that_cannot_store_its_table(sweep: Sweep) -> None:
    sweep.run([0, 0])
    (folder,) = sweep.folder.glob("runs/sweep,*")
    shutil.rmtree(folder)
    folder.touch()
    status, _, out = sweep.run([0, 0], "log.every_steps=3")
    assert status == 0 and "1           finished" in out


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_no_job_outlives_a_sweep_that_is_killed(sweep: Sweep) -> None:
    """The table of the sweep is there as soon as the first job has its run directory."""
    _, words = sweep.prepare(["wait", 0])
    command = [sys.executable, str(sweep.folder / "job.py"), "-m", *words]
    parent = subprocess.Popen(command, cwd=sweep.folder, stdout=subprocess.DEVNULL)
    wait_until(lambda: (sweep.folder / "job").exists(), parent)
    wait_until(lambda: any(sweep.folder.glob("runs/sweep,*/sweep.csv")), parent)
    assert sweep.statuses() == ["running", "not started"]
    parent.kill()
    parent.wait()
    wait_until(lambda: (sweep.folder / "stopped").exists())
    job = int((sweep.folder / "job").read_text() or 0)
    wait_until(lambda: not is_running(job))


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_interrupt_a_sweep_and_type_it_again(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Real runs: one has finished before, as its own command; the other saves, and resumes."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.epochs=1"]
    words += ["optim.lr=0.2,0.1"]
    jobs = multirun.expand(words)
    first, second = (job.folder for job in jobs)
    train.train(jobs[0].config)
    before = (first / "summary.json").stat().st_mtime_ns

    Path("hold").touch()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "held_job.py"), "-m", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        wait_until(Path("held").exists, parent)
        os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        out = parent.communicate()[0]
    assert parent.returncode == 130
    assert "0.1       interrupted" in out
    assert json.loads((second / "summary.json").read_text())["step"] == 4

    monkeypatch.setattr(sys, "argv", [train.__file__])
    assert multirun.run(multirun.expand(words), words) == 0
    out = capsys.readouterr().out
    assert f"job 1 of 2: optim.lr=0.2: has finished before, see {first}" in out
    assert (first / "summary.json").stat().st_mtime_ns == before
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (first, second)]
    assert [summary["step"] for summary in summaries] == [5, 5]
    assert summaries[1]["starts"] == 2

    (folder,) = Path("runs").glob("sweep,optim.lr,*")
    stored = json.loads((folder / "sweep.json").read_text())
    assert stored["overrides"] == words
    assert [job["top1"] for job in stored["jobs"]] == [summary["top1"] for summary in summaries]
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optim.lr"], row["status"]) for row in rows] == [
        ("0.2", "finished"),
        ("0.1", "finished"),
    ]
    assert [(folder / row["run"]).resolve() for row in rows] == [
        tmp_path / first,
        tmp_path / second,
    ]
