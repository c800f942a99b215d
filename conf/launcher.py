"""Sweeps on Slurm: `python train.py -m hydra/launcher=submitit_slurm optim.lr=0.1,0.2`.

The jobs of a sweep become one array, with a task for each job. submitit submits it and puts a task
back into the queue before its time limit (https://github.com/facebookincubator/submitit). The
parameters are written as for Hydra's plugin: hydra.launcher.partition=gpu.
"""

import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.multirun import Job, Stop, conclude, folder_of, store
from conf.schema import UserError, show
from conf.signals import STOPS, handle_stops

SLURM = "hydra/launcher=submitit_slurm"
PARAMETER = re.compile(r"\+{0,2}hydra\.launcher\.(\w+)=")
# Names that only Slurm uses -> those of submitit for any scheduler
NAMES = {"job_name": "name", "ntasks_per_node": "tasks_per_node", "time": "timeout_min"}
# The parameters that submitit has for any scheduler; the others begin with slurm_
COMMON = {"cpus_per_task", "gpus_per_node", "mem_gb", "nodes", "stderr_to_stdout", *NAMES.values()}
MOST_TIMEOUTS = 100  # a run resumes, so submitit's limit of 3 would only end it too early
# How long Slurm may need to kill a task after SIGTERM; its default (KillWait) is 30 s.
KILL_SECONDS = 60.0
LOOK_SECONDS = 30.0  # longest pause between two calls of squeue; the first pause is 1 s
WAITING = ("queued", "running")


def take_parameters(words: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the parameters of submitit, None if the sweep is not for Slurm, and the other words.

    Raises:
        UserError: a value cannot be read.
    """
    if SLURM not in words:
        return None, list(words)  # without it, `expand` refuses the parameters
    typed = [word for word in words if PARAMETER.match(word)]
    rest = [word for word in words if word != SLURM and word not in typed]
    return dict(map(_read_parameter, typed)), rest


def _read_parameter(word: str) -> tuple[str, Any]:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        raise UserError(f"{word}: cannot be read as key=value; put the value in quotes") from None
    name = override.key_or_group.removeprefix("hydra.launcher.")
    # Slurm's lists of names have commas: exclude=gpu1,gpu2.
    value = word.partition("=")[2] if override.is_sweep_override() else override.value()
    if name in ("setup", "srun_args") and not isinstance(value, list):
        value = [] if value is None else [value]
    if name == "additional_parameters" and not isinstance(value, dict):
        raise UserError(f"{word}: not allowed; give a mapping, such as {{reservation: NAME}}")
    return NAMES.get(name, name), value


def complete(typed: dict[str, Any]) -> dict[str, Any]:
    """Add defaults to the parameters: 24 hours, one GPU, one rank per GPU, 16 CPUs per rank.

    Raises:
        UserError: a rank would have several GPUs, of which it uses one.
    """
    values = {"name": "train", "nodes": 1, "timeout_min": 1440, "signal_delay_s": 120, **typed}
    if not typed.keys() & {"gpus_per_node", "gpus_per_task", "gres"}:
        values["gpus_per_node"] = 1
    if "cpus_per_gpu" not in typed:
        values.setdefault("cpus_per_task", 16)
    gpus = values.get("gpus_per_node")
    if isinstance(gpus, int):
        values["gpus_per_node"] = gpus or None  # a cluster without GPUs refuses a request for 0
        ranks = values.setdefault("tasks_per_node", max(1, gpus))
        if isinstance(ranks, int) and ranks < gpus:
            raise UserError(
                f"hydra.launcher.tasks_per_node={ranks}: a rank uses one GPU, and gpus_per_node is "
                f"{gpus}; leave it out"
            )
    if values.get("gpus_per_task", 1) != 1:
        raise UserError(
            f"hydra.launcher.gpus_per_task={show(values['gpus_per_task'])}: a rank uses one GPU; "
            "write hydra.launcher.gpus_per_node"
        )
    # scripts/train.sbatch explains these options.
    srun = ["--gpu-bind=none", "--kill-on-bad-exit=0"]
    if values.get("cpus_per_task"):
        srun.append(f"--cpus-per-task={values['cpus_per_task']}")
    values["srun_args"] = [*srun, *typed.get("srun_args", [])]
    # Some clusters do not requeue jobs by default (JobRequeue=0 in slurm.conf).
    values["additional_parameters"] = {"requeue": True, **typed.get("additional_parameters", {})}
    path = shlex.quote(str(Path(__file__).absolute().parents[1]))  # contains the package `conf`
    values["setup"] = [
        f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}",
        *typed.get("setup", []),
    ]
    return values


class Task:
    """Runs one job of the sweep, as a task of the array.

    Slurm announces the time limit with SIGUSR2: the run saves, and submitit puts the task back into
    the queue. Before a preemption and after scancel, Slurm sends SIGTERM, and later kills the task;
    Slurm decides whether to requeue it. A task that is still alive after KILL_SECONDS requeues
    itself.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def __call__(self) -> int:
        """Run the job; return its exit status."""
        from submitit import JobEnvironment

        stop = Stop()
        announced: list[int] = []

        def save(number: int, frame: FrameType | None) -> None:
            announced.append(number)
            stop.receive(signal.SIGTERM)

        limit = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
        with handle_stops(stop.receive):
            requeue = signal.signal(limit, save)
            status = stop.start(self.command, lambda: True)
            signal.signal(limit, requeue)
        if status - 128 in STOPS:
            if not announced:
                time.sleep(KILL_SECONDS)
            signal.raise_signal(limit)  # submitit calls `checkpoint`, and scontrol requeue
        return status

    def checkpoint(self) -> Any:
        """Return what the task does after a restart: the same command, which resumes the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run(jobs: Sequence[Job], typed: Sequence[str], parameters: dict[str, Any]) -> int:
    """Submit the jobs that have not finished and are not in the queue; wait for all of them.

    Args:
        jobs: see `multirun.expand`.
        typed: the words of the sweep, for sweep.json.
        parameters: see `take_parameters`.

    Returns:
        0 if all jobs have finished, 1 if one has failed, 128 + signal number if a signal ended the
        wait.

    Raises:
        UserError: submitit or Slurm refuses the parameters, or is not installed.
    """
    folder, stop = folder_of(jobs), Stop()
    if any(job.config.checkpoint.resume == "never" for job in jobs):
        raise UserError(
            "checkpoint.resume=never: a job would start over after each preemption; leave it out, "
            "and remove the old run directories"
        )
    executor = _executor(folder, complete(parameters))
    queue = _queue()
    if queue is None:
        raise UserError(f"{SLURM}: squeue failed; run this command on a login node of the cluster")
    for job, known in zip(jobs, _stored_ids(folder, jobs), strict=True):
        job.recall()
        if known in queue and job.status != "finished":
            job.slurm, job.status = known, queue[known]
    print(f"sweep of {len(jobs)} jobs: {folder}", flush=True)
    with handle_stops(stop.receive):
        _submit(executor, folder, [job for job in jobs if job.status not in (*WAITING, "finished")])
        store(folder, jobs, typed)
        for job in jobs:
            _tell(jobs, job, f"{job.status}, {job.folder}")
        arrays = sorted({job.slurm.partition("_")[0] for job in jobs if job.status in WAITING})
        if arrays:
            print(
                "Ctrl-C ends only this program, and the same command waits for the jobs again; "
                f"`scancel {' '.join(arrays)}` ends the jobs",
                flush=True,
            )
        _wait(folder, jobs, typed, stop)
    return conclude(folder, jobs, typed, stop.number)


def _tell(jobs: Sequence[Job], job: Job, text: str) -> None:
    name = f" ({job.slurm})" if job.slurm else ""
    print(f"job {jobs.index(job) + 1} of {len(jobs)}{name}: {job}: {text}", flush=True)


def _logs(folder: Path) -> Path:
    """The folder with the scripts of the arrays and the output of their tasks."""
    return folder / "slurm"


def _executor(folder: Path, parameters: dict[str, Any]) -> Any:
    """Return the object that submits jobs, after a check of the parameters.

    Raises:
        UserError: names the parameter, or what is not installed.
    """
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise UserError(
            f"{SLURM}: submitit is not installed for {sys.executable}; pip install submitit"
        ) from None
    try:
        executor = AutoExecutor(
            _logs(folder),
            cluster="slurm",
            slurm_max_num_timeout=parameters.pop("max_num_timeout", MOST_TIMEOUTS),
        )
    except RuntimeError:
        raise UserError(
            f"{SLURM}: srun was not found; run this command on a login node of the cluster"
        ) from None
    for name, value in parameters.items():
        try:
            executor.update_parameters(**{name if name in COMMON else f"slurm_{name}": value})
        except (NameError, AssertionError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0].replace(f" in parameter 'slurm_{name}'", "")
            raise UserError(f"hydra.launcher.{name}={show(value)}: {reason}") from None
    return executor


def _submit(executor: Any, folder: Path, jobs: Sequence[Job]) -> None:
    """Submit the jobs as one array.

    Raises:
        UserError: Slurm refuses it; a folder that did not exist before is removed.
    """
    if not jobs:
        return
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    is_new = not folder.exists()
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what the error says, too
            submitted = executor.submit_array([Task(job.command) for job in jobs])
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # the parent folder contains other runs
                folder.parent.rmdir()
        raise UserError(f"{SLURM}: {error}") from None
    for job, one in zip(jobs, submitted, strict=True):
        job.slurm, job.status = one.job_id, "queued"


def _stored_ids(folder: Path, jobs: Sequence[Job]) -> list[str]:
    """Slurm's id of each job at the last start of the sweep; empty without one."""
    try:
        stored = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"]
        ids = {(folder / one["run"]).resolve(): str(one.get("slurm", "")) for one in stored}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ids = {}
    return [ids.get(job.folder.resolve(), "") for job in jobs]


def _queue() -> dict[str, str] | None:
    """Return the jobs of this user: Slurm's id -> queued or running; None if squeue fails."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%i %T"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = (line.split() for line in done.stdout.splitlines())
    return {row[0]: "running" if row[1] == "RUNNING" else "queued" for row in rows if len(row) == 2}


def _wait(folder: Path, jobs: Sequence[Job], typed: Sequence[str], stop: Stop) -> None:
    """Wait until no job is in the queue or a signal arrives; keep the table up to date."""
    pause, missing = 1.0, set[str]()
    while any(job.status in WAITING for job in jobs):
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not stop.number:
            time.sleep(0.2)  # a Python signal handler does not interrupt time.sleep
        if stop.number:
            return
        pause = min(1.5 * pause, LOOK_SECONDS)
        queue = _queue()
        if queue is None:  # Slurm's controller restarts, for example
            continue
        waiting = [job for job in jobs if job.status in WAITING]
        changed = [job for job in waiting if _update(folder, job, queue, missing)]
        for job in changed:
            log = _logs(folder) / f"{job.slurm}_0_log.err"
            _tell(jobs, job, f"{job.status}, see {log}" if job.status == "failed" else job.status)
        if changed:
            store(folder, jobs, typed)
            pause = 1.0


def _update(folder: Path, job: Job, queue: dict[str, str], missing: set[str]) -> bool:
    """Set the status of a job; return whether it has changed.

    Args:
        missing: Slurm's ids of the jobs that have left the queue; updated.
    """
    from submitit import SlurmJob
    from submitit.core.utils import UncompletedJobError

    before = job.status
    if job.slurm in queue:
        job.status = queue[job.slurm]
        return job.status != before
    task = SlurmJob[int](_logs(folder), job.slurm)
    try:
        if task.paths.result_pickle.exists():
            job.end(task.result())
        elif job.slurm in missing:
            job.end(1)  # killed, or cancelled
        else:
            missing.add(job.slurm)  # a shared file system may show the file later
    except UncompletedJobError:
        job.end(1)
    return job.status != before
