"""Sweeps on Slurm: jobs become the tasks of an array, with stand-ins for Slurm's commands."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf import cli, launcher, multirun
from conf.schema import UserError
from tests.processes import family, needs_linux, wait_until
from tests.ranks import free_port
from tests.results import rows
from tests.small_run import SMALL_RUN

ROOT = Path(__file__).parents[1]
SLURM = "hydra/launcher=submitit_slurm"
SWEEP = ["recipe=demo", "optim.lr=0.1,0.2"]

STAND_INS = {
    "sbatch": """
[[ -e $SLURM/refuses ]] && { echo 'sbatch: error: invalid partition' >&2; exit 1; }
number=$(( $(ls "$SLURM/scripts" | wc -l) + 1 ))
cp "$1" "$SLURM/scripts/$number"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
for task in $(seq 0 "${last:-0}"); do
    id=$number${last:+_$task}
    echo RUNNING >"$SLURM/queue/$id"
    setsid "$SLURM/bin/batch" "$number" "${last:+$task}" "$id" </dev/null >/dev/null 2>&1 &
done
echo "Submitted batch job $number"
""",
    # What Slurm does on the node of a task: run the script, and again if it was requeued.
    "batch": """
export SLURM_JOB_ID=$1 ID=$3 MASTER_PORT=$((PORT + ${2:-0}))
[[ -n $2 ]] && export SLURM_ARRAY_JOB_ID=$1 SLURM_ARRAY_TASK_ID=$2 SLURM_JOB_ID=10$1$2
export TASKS=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$SLURM/scripts/$1")
while bash "$SLURM/scripts/$1"; [[ -e $SLURM/requeued/$3 ]]; do
    mv "$SLURM/requeued/$3" "$SLURM/restarted/$3"
done
rm "$SLURM/queue/$3"
""",
    # Starts the tasks with the variables that the real srun sets.
    "srun": """
echo "$@" >>"$SLURM/srun"
while [[ $1 == --* ]]; do
    case $1 in --output) out=$2; shift ;; --error) error=$2; shift ;; esac
    shift
done
rm -f "$SLURM/tasks/$ID"
for task in $(seq 0 $((TASKS - 1))); do
    fill="s/%A/$SLURM_ARRAY_JOB_ID/; s/%a/$SLURM_ARRAY_TASK_ID/; s/%j/$SLURM_JOB_ID/; s/%t/$task/"
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS \\
        SLURM_STEP_NODELIST=localhost SLURM_NODEID=0 SLURM_PROCID=$task SLURM_LOCALID=$task \\
        SLURM_NTASKS=$TASKS OMP_NUM_THREADS=1 \\
        "$@" >>"$(sed "$fill" <<<"$out")" 2>>"$(sed "$fill" <<<"$error")" &
    echo $! >>"$SLURM/tasks/$ID"
done
wait
""",
    "squeue": 'cd "$SLURM/queue"; for id in *; do [[ -e $id ]] && echo "$id $(<"$id")"; done; true',
    "scontrol": 'touch "$SLURM/requeued/$2"',
}
# A job: "wait" waits for SIGTERM, as a run that saves; "kill" kills its task, as a node without
# memory does; another outcome is its exit status.
JOB = """\
import json, os, signal, sys
from pathlib import Path
if "-m" in sys.argv:
    sys.path.insert(0, {root!r})
    from conf import cli
    cli.parse(sys.argv[1:], script="train.py", purpose="")
seed = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("train.seed="))
folder, config, outcomes = json.loads(Path("outcomes").read_text())[seed]
folder = Path(folder)
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    print(os.environ["SLURM_JOB_ID"], file=file)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
outcome = outcomes[len((folder / "starts").read_text().split()) - 1]
if outcome == "wait":
    (folder / "waits").touch()
    outcome = 128 + signal.sigwait([signal.SIGTERM])
if outcome == "kill":
    os.kill(os.getppid(), signal.SIGKILL)
if outcome == 0:
    (folder / "config.yaml").write_text(config)
    summary = dict(status="finished", top1=50.0, best_top1=60.0, total_seconds=1.0)
    (folder / "summary.json").write_text(json.dumps(summary))
sys.exit(outcome)
"""


class Slurm:
    """A queue whose tasks start at once, on this machine."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        for name in ("bin", "queue", "requeued", "restarted", "scripts", "tasks"):
            (folder / name).mkdir(parents=True)
        for name, text in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "bin" / name).chmod(0o755)
        (work / "job.py").write_text(JOB.format(root=str(ROOT)))

    def start(self, words: list[str], program: str = "job.py") -> subprocess.Popen[str]:
        """Start a sweep."""
        return subprocess.Popen(
            [sys.executable, program, "-m", SLURM, *words],
            cwd=self.work,
            env={
                **os.environ,
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "SLURM": str(self.folder),
                "PORT": str(free_port()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def warn(self, job: str) -> None:
        """Announce the time limit to the tasks of a job."""
        for pid in (self.folder / "tasks" / job).read_text().split():
            for process in family(int(pid)):  # Slurm may send it to all of them
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR2)

    def end(self) -> None:
        for path in (self.folder / "tasks").iterdir():
            for pid in path.read_text().split():
                for process in family(int(pid)):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    def waits(self) -> bool:
        """Whether a job waits for a signal."""
        return any(self.work.glob("runs/*/waits"))

    def statuses(self) -> list[str]:
        (path,) = self.work.glob("runs/sweep,*/sweep.json")
        return [job["status"] for job in json.loads(path.read_text())["jobs"]]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    needs_linux()
    pytest.importorskip("submitit")
    work = tmp_path / "work"
    work.mkdir()
    slurm = Slurm(tmp_path / "slurm", work)
    yield slurm
    slurm.end()


def outcomes(slurm: Slurm, *of_jobs: list[Any]) -> list[str]:
    """Prepare the jobs of a sweep over train.seed; return its words."""
    words = ["recipe=demo", f"train.seed=range({len(of_jobs)})"]
    rows = [
        (str(job.folder), cli.to_yaml(job.config), outcomes)
        for job, outcomes in zip(multirun.expand(words), of_jobs, strict=True)
    ]
    (slurm.work / "outcomes").write_text(json.dumps(rows))
    return [*words, "hydra.launcher.gpus_per_node=0"]


def test_a_sweep_is_an_array(slurm: Slurm) -> None:
    """A task that is preempted resumes; the same command submits only what has not finished."""
    words = outcomes(slurm, [0], ["wait", 0], [3, 0], ["kill", 0])
    with slurm.start([*words, "hydra.launcher.partition=gpu"]) as sweep:
        wait_until(slurm.waits, sweep)
        slurm.warn("1_1")
        out, err = sweep.communicate()
    assert (sweep.returncode, err) == (1, "")
    assert slurm.statuses() == ["finished", "finished", "failed", "failed"]
    assert [path.name for path in (slurm.folder / "restarted").iterdir()] == ["1_1"]
    (folder,) = (slurm.work / "runs").glob("sweep,*")
    assert f"job 3 of 4 (1_2): train.seed=2: failed, see runs/{folder.name}/slurm/1_2_0" in out
    assert "`scancel 1` ends the jobs" in out
    script = (slurm.folder / "scripts" / "1").read_text()
    for option in ("array=0-3%4", "partition=gpu", "time=1440", "signal=USR2@120", "requeue"):
        assert f"#SBATCH --{option}\n" in script
    with slurm.start(words) as sweep:
        out, err = sweep.communicate()
    assert (sweep.returncode, err) == (0, "")
    assert slurm.statuses() == ["finished"] * 4
    assert "--array=0-1%2" in (slurm.folder / "scripts" / "2").read_text()


@pytest.mark.slow
def test_ctrl_c_leaves_the_jobs_in_the_queue(slurm: Slurm) -> None:
    """The same command then waits for them, and submits none twice."""
    words = outcomes(slurm, [0], ["wait", 0])
    with slurm.start(words) as sweep:
        wait_until(slurm.waits, sweep)
        wait_until(lambda: "finished" in slurm.statuses(), sweep)
        sweep.send_signal(signal.SIGINT)
        out, err = sweep.communicate()
    assert (sweep.returncode, err) == (130, "")
    assert slurm.statuses() == ["finished", "running"]
    assert "1 of 2 jobs have not finished; run the same command" in out
    with slurm.start(words) as sweep:
        wait_until(lambda: slurm.statuses() == ["finished", "running"], sweep)
        slurm.warn("1_1")
        out, err = sweep.communicate()
    assert (sweep.returncode, err, slurm.statuses()) == (0, "", ["finished", "finished"])
    assert len(list((slurm.folder / "scripts").iterdir())) == 1


def test_what_slurm_refuses_leaves_nothing(slurm: Slurm) -> None:
    (slurm.folder / "refuses").touch()
    with slurm.start(outcomes(slurm, [0], [0])) as sweep:
        _, err = sweep.communicate()
    assert (sweep.returncode, err) == (2, f"train.py: {SLURM}: sbatch: error: invalid partition\n")
    assert not (slurm.work / "runs").exists()


@pytest.mark.slow
def test_ranks_of_a_preempted_task_resume(slurm: Slurm, image_root: Path) -> None:
    """A real run of two ranks, the only job of its sweep."""
    words = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.epochs=6"]
    words += ["run.dir=runs/first", "hydra.launcher.gpus_per_node=0"]
    words += ["hydra.launcher.tasks_per_node=2", "hydra.launcher.cpus_per_task=1"]
    run = slurm.work / "runs" / "first"
    with slurm.start(words, str(ROOT / "train.py")) as sweep:
        wait_until((run / "metrics.jsonl").exists, sweep)
        wait_until(lambda: len(rows(run, "train")) > 3, sweep)
        slurm.warn("1")
        out, err = sweep.communicate()
    assert (sweep.returncode, err) == (0, ""), out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["starts"], summary["step"]) == (2, 27)
    started = (slurm.folder / "srun").read_text()
    assert " --gpu-bind=none --kill-on-bad-exit=0 --cpus-per-task=1 " in started
    (console,) = slurm.work.glob("runs/sweep,*/slurm/1_0_log.out")
    assert "4 on each of 2 ranks" in console.read_text()


@pytest.mark.parametrize(
    ("number", "waited"), [(signal.SIGUSR2, []), (signal.SIGTERM, [launcher.KILL_SECONDS])]
)
def test_a_task_is_requeued_after_it_has_saved(
    number: int, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM only if Slurm has not ended it: scancel sends it, too."""
    pytest.importorskip("submitit")
    slept, requeued = list[float](), list[int]()
    monkeypatch.setattr("time.sleep", slept.append)
    before = signal.signal(signal.SIGUSR2, lambda number, _: requeued.append(number))
    run = f"""
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGUSR2)  # Slurm may send it to all processes of a task
os.kill(os.getppid(), {number:d})
sys.exit(128 + signal.sigwait([signal.SIGTERM]))
"""
    task = launcher.Task([sys.executable, "-c", run])
    try:
        assert task() == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (slept, requeued) == (waited, [signal.SIGUSR2])
    assert task.checkpoint().function is task


# Without submitit


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hydra.launcher.partition=gpu", {"partition": "gpu"}),
        ("++hydra.launcher.gpus_per_node=8", {"gpus_per_node": 8}),
        ("hydra.launcher.time=60", {"timeout_min": 60}),
        ("hydra.launcher.exclude=gpu1,gpu2", {"exclude": "gpu1,gpu2"}),
        ("'hydra.launcher.setup=[\"module load cuda\"]'", {"setup": ["module load cuda"]}),
        ("'hydra.launcher.srun_args=\"--mpi=none\"'", {"srun_args": ["--mpi=none"]}),
        (
            "'hydra.launcher.additional_parameters={reservation: r1}'",
            {"additional_parameters": {"reservation": "r1"}},
        ),
    ],
)
def test_parameters(typed: str, expected: dict[str, Any]) -> None:
    words = [*SWEEP, SLURM, *shlex.split(typed)]
    assert launcher.take_parameters(words) == (expected, SWEEP)


@pytest.mark.parametrize(
    ("typed", "gpus", "ranks", "cpus"),
    [
        ({}, 1, 1, 16),
        ({"gpus_per_node": 4}, 4, 4, 16),
        ({"gpus_per_node": 0, "cpus_per_task": 2}, None, 1, 2),
        ({"gpus_per_node": 0, "tasks_per_node": 2}, None, 2, 16),
        ({"gres": "gpu:2", "tasks_per_node": 2, "cpus_per_gpu": 4}, None, 2, None),
    ],
)
def test_each_gpu_gets_a_rank(
    typed: dict[str, Any], gpus: int | None, ranks: int, cpus: int | None
) -> None:
    found = launcher.complete(typed)
    assert (found.get("gpus_per_node"), found["tasks_per_node"]) == (gpus, ranks)
    assert found.get("cpus_per_task") == cpus


def test_cfg_job_submits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["-m", SLURM, *SWEEP, "--cfg", "job"], script="train.py", purpose="")
    assert stop.value.code == 0
    assert len(list(yaml.safe_load_all(capsys.readouterr().out))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SLURM], f"{SLURM}: submitit is not installed for "),
        ([SLURM, "checkpoint.resume=never"], "checkpoint.resume=never: a job would start over"),
        ([SLURM, "hydra.launcher.comment=a b]"], "hydra.launcher.comment=a b]: cannot be read"),
        (
            [SLURM, "hydra.launcher.gpus_per_node=4", "hydra.launcher.tasks_per_node=2"],
            "hydra.launcher.tasks_per_node=2: a rank uses one GPU, and gpus_per_node is 4",
        ),
        ([SLURM, "hydra.launcher.gpus_per_task=2"], "hydra.launcher.gpus_per_task=2: a rank uses"),
        (
            [SLURM, "hydra.launcher.additional_parameters=3"],
            "hydra.launcher.additional_parameters=3: not allowed; give a mapping, such as {res",
        ),
        (["hydra.launcher.partition=gpu"], "with hydra/launcher=submitit_slurm, it submits"),
        (["hydra/launcher=submitit_local"], "-m starts one job after the other on this machine"),
    ],
)
def test_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SystemExit) as stop:
        cli.parse(["-m", *SWEEP, *words], script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"partitoin": "gpu"}, "hydra.launcher.partitoin=gpu: Unknown argument 'partitoin'"),
        ({"timeout_min": "1:00"}, "hydra.launcher.timeout_min=1:00: Parameter "),
    ],
)
def test_parameters_that_submitit_refuses(
    slurm: Slurm, typed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{slurm.folder / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="^" + message.replace(".", r"\.")):
        launcher._executor(slurm.work / "sweep", typed)
