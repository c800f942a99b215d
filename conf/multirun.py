"""Sweeps: `python train.py -m optim.lr=0.1,0.2` trains once for each combination of values.

The syntax and the order of the jobs are those of Hydra's basic sweeper. All combinations are
checked before the first job starts. Each job has its own process and its own run directory, as
if its overrides had been typed without -m. The directory of the sweep holds only the table of its
jobs: sweep.json and sweep.csv.
"""

import csv
import ctypes
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from conf import strict_json
from conf.compose import load, to_yaml
from conf.overrides import FIELDS, GROUPS, KEYS, NAMES, WORDS, read_override, split_config_dir
from conf.schema import RESULT, Config, UserError, config_values, group_names
from conf.signals import STOPS, handle_stops

MOST_JOBS = 1000
NAME_LENGTH = 100  # maximum length of `sweep,` and the keys in the name of a sweep
RESULTS = ("top1", "best_top1", "total_seconds")  # of summary.json
PLACES = ("run.dir", "run.name")
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass
class Job:
    """One combination of values.

    Attributes:
        values: key that the sweep varies -> value, as on a command line.
        overrides: the command line of the job.
        status: "not started", "queued" (on Slurm), "running", "finished", "failed" or
            "interrupted".
        result: see RESULTS, as far as the run has them.
        slurm: Slurm's id of the job, such as "4711_3"; empty if it was not submitted to Slurm.
    """

    values: dict[str, str]
    overrides: list[str]
    config: Config
    status: str = "not started"
    result: dict[str, Any] = field(default_factory=dict)
    slurm: str = ""

    def __str__(self) -> str:
        varied = " ".join(f"{key}={value}" for key, value in self.values.items())
        return varied or "no key varies"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def command(self) -> list[str]:
        return [sys.executable, sys.argv[0], *self.overrides]

    def recall(self) -> None:
        """Read the status of an earlier run of the same config; "not started" without one.

        A config that is completed from the weights (recipe=finetune) never equals the stored one:
        train.py itself finds out that such a run has finished.
        """
        try:
            same = (self.folder / "config.yaml").read_text("utf-8") == to_yaml(self.config)
        except (OSError, ValueError):
            same = False
        if same and self.config.checkpoint.resume != "never":
            self.status = str(self._read_summary().get("status", self.status))

    def end(self, status: int) -> None:
        """Set status and results, after the process of the job has exited with `status`."""
        stopped = "interrupted" if status - 128 in STOPS else "failed"
        self.status = "finished" if status == 0 else stopped
        self.result = {}
        if self.status != "failed":  # else the summary, if there is one, is of an earlier start
            self._read_summary()

    def _read_summary(self) -> dict[str, Any]:
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}  # a run that is killed or fails has none
        if not isinstance(summary, dict):
            return {}
        numbers = {key: summary.get(key) for key in RESULTS}
        self.result = {
            key: value if isinstance(value, (int, float)) and abs(value) < 1e12 else None
            for key, value in numbers.items()
        }
        return summary


def expand(words: Sequence[str], *, runnable: bool = True) -> list[Job]:
    """Return the jobs of a sweep; the last key varies fastest.

    Args:
        words: overrides with several values, such as `optim.lr=0.1,0.2`, and others.
        runnable: refuse a config without data.root.

    Raises:
        UserError: a combination is not allowed, or two of them have the same run directory.
    """
    config_dir, overrides = split_config_dir(words)
    folder = [word for word in words if word not in overrides]
    choices: dict[str, list[str]] = {}  # the last override of a key counts
    swept: dict[str, bool] = {}
    for text in overrides:
        name = _key(text)
        if name not in NAMES:
            read_override(text, config_dir)  # names the whole list in its message
        if name in PLACES and "${now:" in text:
            raise UserError(
                f"{text}: the same command resumes a run by its folder; leave the time out"
            )
        values = _values(text, config_dir)
        choices[name] = [text] if values is None else [f"{name}={value}" for value in values]
        swept[name] = values is not None
    if math.prod(map(len, choices.values())) > MOST_JOBS:
        raise UserError(f"-m: more than {MOST_JOBS:,} jobs; give fewer values")
    jobs: list[Job] = []
    for combination in itertools.product(*choices.values()):
        pairs = zip(choices, combination, strict=True)
        varied = {name: text.partition("=")[2] for name, text in pairs if swept[name]}
        line = [*folder, *combination]
        jobs.append(Job(varied, line, load(line, runnable=runnable)))
    _refuse_same_folder(jobs)
    return jobs


def _values(text: str, config_dir: Path | None) -> list[str] | None:
    """Return the values of a sweep, or None for another override.

    Raises:
        UserError: the values cannot be listed, or there are none.
    """
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return None
        found = list(itertools.islice(_listed(override, config_dir), MOST_JOBS + 1))
    except UserError:
        raise
    except (HydraException, ValueError, ArithmeticError) as error:
        if not re.search(r"=\w+\(", text):
            _refuse_paths(text)
            return None  # `load` says what is wrong
        reason = str(error).splitlines()[0].rpartition(": ")[2]
        if isinstance(error, ArithmeticError):  # range(nan); the error holds no words
            reason = "the values are not numbers"
        raise UserError(f"{text}: {reason}; give a list, range(), choice() or glob()") from None
    if not found:
        raise UserError(f"{text}: has no value; give at least one")
    return found


def _refuse_paths(text: str) -> None:
    """Refuse paths with commas that are not in Hydra's grammar, such as ~/a,~/b.

    Without a sweep, they are one path.

    Raises:
        UserError: says how to write several paths, and one.
    """
    name, value = _key(text), text.partition("=")[2]
    if name in WORDS and "," in value and value[0] not in "[\"'":
        several = ",".join(f'"{path}"' for path in value.split(","))
        raise UserError(
            f"{text}: cannot be split at its commas; put each value in quotes, as in "
            f"{shlex.quote(f'{name}={several}')}, or a single value that contains commas"
        )


def _listed(override: Override, config_dir: Path | None) -> Iterator[str]:
    """Yield the values of a sweep as they are written on a command line.

    Raises:
        UserError: the values cannot be listed.
    """
    name, values = override.key_or_group, cast(Any, override.value())
    if override.is_interval_sweep():
        raise UserError(
            f"{override.input_line}: an interval has no list of values; give a list or range()"
        )
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        if name not in GROUPS:
            raise UserError(
                f"{override.input_line}: glob() chooses from a group ({', '.join(GROUPS)}); "
                "give a list"
            )
        yield from values.filter(group_names(name, config_dir))
    elif override.is_range_sweep():  # 0.3, where Hydra has 0.30000000000000004
        for value in override.sweep_iterator():
            yield f"{value:.12g}" if isinstance(value, float) else str(value)
    else:
        yield from override.sweep_string_iterator()


def _refuse_same_folder(jobs: Sequence[Job]) -> None:
    """Refuse two jobs with one run directory: the second would resume the first.

    Raises:
        UserError: names them.
    """
    found: dict[Path, Job] = {}
    for job in jobs:
        other = found.setdefault(job.folder.absolute(), job)
        if other is not job:
            raise UserError(
                f"-m: {other} and {job} have the same run directory, {job.folder}: "
                f"{_remedy(jobs, other, job)}"
                if other.values != job.values
                else f"-m: {job} occurs twice; give each value once"
            )


def _remedy(jobs: Sequence[Job], one: Job, two: Job) -> str:
    """What gives two jobs with the same run directory their own."""
    typed = {key: text for text in two.overrides if (key := _key(text)) in PLACES}
    place = typed.get("run.dir", "run.dir=runs/${run.name}")
    if "${run.name}" not in place:
        place += "/${run.name}"
    first, second = config_values(one.config), config_values(two.config)
    names_differ = first["run.name"] != second["run.name"]
    if names_differ or _default_folder(one) != _default_folder(two):
        advice = [] if names_differ else ["leave run.name out"]
        if place != typed.get("run.dir", place):
            advice.append(f"write {shlex.quote(place)}")
        return " and ".join(advice)
    differs = [key for key in KEYS if key not in PLACES and first[key] != second[key]]
    if not differs:
        return "give each value once"
    # With the other keys that vary, because another pair may differ in them only.
    keys = [key for key in jobs[0].values if key in differs or _is_unnamed(key)] or differs[:1]
    place += "".join(f"-${{{key}}}" for key in keys)
    return f"give each job its own, for example {shlex.quote(place)}"


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+")


def _is_unnamed(key: str) -> bool:
    """Whether the default name of a run does not contain a key."""
    return key in KEYS and key not in PLACES and not FIELDS[key].metadata["affects"] & RESULT


def _default_folder(job: Job) -> str:
    rest = [text for text in job.overrides if _key(text) not in PLACES]
    return load(rest, runnable=False).run.dir


def folder_of(jobs: Sequence[Job]) -> Path:
    """Return the directory of a sweep: beside its runs, named after its keys and its jobs."""
    runs = "\n".join(sorted(job.config.run.dir for job in jobs))
    keys = ",".join(["sweep", *jobs[0].values])[:NAME_LENGTH]
    return jobs[0].folder.parent / f"{keys},{hashlib.sha256(runs.encode()).hexdigest()[:8]}"


class Stop:
    """Passes the signals that stop a run on to the job, which saves and exits; no other job starts.

    Attributes:
        number: of the signal, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self.process: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        self.number = number
        if self.process is not None:
            self.process.send_signal(number)

    def start(self, command: Sequence[str], meanwhile: Callable[[], bool]) -> int:
        """Run a process to its end; return its exit status, 128 + signal if a signal ended it.

        `meanwhile` is called every second until it returns True.

        The process gets Ctrl-C from this process only: the terminal would send a second one, which
        interrupts a run before it has saved.
        """
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_begin_job
        )
        if self.number:  # received while the process was started
            self.process.send_signal(self.number)
        status = None
        while status is None:
            try:
                status = self.process.wait(None if meanwhile() else 1)
            except subprocess.TimeoutExpired:
                continue
        self.process = None
        return status if status >= 0 else 128 - status


def _begin_job() -> None:
    """Let the kernel send SIGTERM to this process when its parent is killed (Linux only).

    SIGUSR2 is for the parent: Slurm may send it to all processes of a task, and it would end a run.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(jobs: Sequence[Job], typed: Sequence[str]) -> int:
    """Run the jobs one after the other with this script, except those that have finished.

    A job that fails does not stop the sweep, since a learning rate that diverges is a result. A
    mistake that the first job finds stops it, since most jobs would share it: nothing is created.

    Args:
        jobs: see `expand`.
        typed: the overrides of the sweep, for sweep.json.

    Returns:
        0 if all jobs have finished, 1 if one has failed, 2 after a mistake, 128 + signal.
    """
    folder, stop = folder_of(jobs), Stop()
    print(f"sweep of {len(jobs)} jobs: {folder}", flush=True)
    for job in jobs:
        job.recall()
    with handle_stops(stop.receive):
        for number, job in enumerate(jobs, 1):
            if stop.number:
                break
            title = f"job {number} of {len(jobs)}: {job}"
            if job.status == "finished":
                print(f"{title}: has finished before, see {job.folder}", flush=True)
                continue
            print(f"{title}: {job.folder}", flush=True)
            job.status = "running"
            # A directory from an earlier start does not show that the first job has no mistake.
            waits_for = None if number == 1 and job.folder.exists() else job.folder
            status = stop.start(
                job.command,
                partial(_store_if_exists, waits_for, folder, jobs, typed),
            )
            if status == 2 and number == 1:
                return 2
            job.end(status)
            store(folder, jobs, typed)
            if job.status == "interrupted":
                stop.number = status - 128
    return conclude(folder, jobs, typed, stop.number)


def conclude(folder: Path, jobs: Sequence[Job], typed: Sequence[str], number: int) -> int:
    """Store and print the table; return the exit status of the sweep.

    Args:
        number: of the signal that has stopped the sweep, 0 for none.
    """
    store(folder, jobs, typed)
    print("\n".join(_lines(folder, jobs)), flush=True)
    if all(job.status == "finished" for job in jobs):
        return 0
    return 128 + number if number else 1


def _store_if_exists(
    path: Path | None, folder: Path, jobs: Sequence[Job], typed: Sequence[str]
) -> bool:
    """Store the table once `path` exists; return whether there is nothing more to wait for."""
    if path is not None:
        if not path.exists():
            return False
        store(folder, jobs, typed)
    return True


def store(folder: Path, jobs: Sequence[Job], typed: Sequence[str]) -> None:
    """Write sweep.json and sweep.csv. A full disk is one line: it does not stop the sweep."""
    rows = [
        {
            **job.values,
            "status": job.status,
            **{key: job.result.get(key) for key in RESULTS},
            "run": os.path.relpath(job.folder, folder),
        }
        for job in jobs
    ]
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    content = {
        "overrides": list(typed),
        "jobs": [
            {"values": job.values, "overrides": job.overrides}
            | {key: row[key] for key in ("status", *RESULTS, "run")}
            | ({"slurm": job.slurm} if job.slurm else {})
            for job, row in zip(jobs, rows, strict=True)
        ],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "sweep.json", strict_json.dumps(content, indent=2) + "\n")
        _replace(folder / "sweep.csv", table.getvalue())
    except OSError as error:
        print(f"{folder}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _lines(folder: Path, jobs: Sequence[Job]) -> list[str]:
    """The table of a sweep, and what to do next."""
    rows = [[*jobs[0].values, "status", "top1", "best", "time"]]
    for job in jobs:
        top1, best, seconds = (job.result.get(key) for key in RESULTS)
        figures = [
            f"{value:.2f}" if isinstance(value, (int, float)) else "" for value in (top1, best)
        ]
        time = str(timedelta(seconds=round(seconds))) if isinstance(seconds, (int, float)) else ""
        rows.append([*job.values.values(), job.status, *figures, time])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    left = sum(job.status != "finished" for job in jobs)
    if left:
        lines.append(
            f"{left} of {len(jobs)} jobs have not finished; run the same command to continue"
        )
    return [*lines, f"written to {folder / 'sweep.json'} and sweep.csv"]
