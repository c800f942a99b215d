"""Train once per value with Hydra's multirun: `python train.py -m optim.lr=0.1,0.2`.

Hydra's sweeper and launcher decide which jobs run, and where: the basic ones, or installed plugins
(hydra/sweeper=optuna, hydra/launcher=submitit_slurm). Each job is a child process that runs
train.py. Hydra receives only the overrides with several values and its own settings. It reads no
YAML file of this program or the user, so that no `_target_` in one can run.
"""

import argparse
import hashlib
import itertools
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NamedTuple

from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.cli import check_root
from conf.compose import from_overrides, to_yaml
from conf.errors import UserError
from conf.named import ROOT
from conf.overrides import TEXT_KEYS, read_overrides
from conf.schema import Config
from conf.start import handle_stops, stop_with_parent

WORST = -1e9  # score of a failed job; sweepers may reject an infinite one

Overrides = tuple[str, ...]


def main(words: Sequence[str], script: str, options: argparse.Namespace) -> int:
    """Run a command line's jobs, or print them for --cfg job; return the exit status."""
    if (ROOT / "scripts" / script).exists():
        raise UserError("-m", "only train.py supports sweeps", "run this script once per value")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m: not supported under torchrun or srun; run train.py once per value")
    sweep = Sweep(words)
    if options.cfg is None:
        check_root(sweep.config(sweep.jobs[0]))
        return sweep.run_jobs()
    for job in sweep.jobs:
        print(f"---\n{to_yaml(sweep.config(job))}", end="")
    return 0


class Result(NamedTuple):
    """The result of a job."""

    value: float | None  # best value of train.best_by; None if there is none
    score: float  # higher is better
    status: str


class Sweep:
    """The jobs of a command line. Raises UserError for an invalid value or composed job.

    `columns`: varying key -> its overrides. `jobs`: the overrides of each job, or only of the first
    one if the sweeper is a plugin.
    """

    def __init__(self, words: Sequence[str]) -> None:
        fixed: list[str] = []
        settings: list[str] = []
        swept: dict[str, str] = {}
        self.columns: dict[str, list[str]] = {}
        for key, word in {_key(word): word for word in words}.items():  # last of equal keys
            values = _values(word)
            if key.startswith(("hydra.", "hydra/")):
                settings.append(word)
            elif values:
                self.columns[key] = [_unescaped(f"{key}={value}") for value in values]
                swept[key] = f"++{word.lstrip('+')}"  # Hydra does not know the keys
            else:
                fixed.append(word)
        if "train.best_by" in self.columns:
            raise UserError("-m: cannot compare jobs with different train.best_by; set one value")
        self.fixed = tuple(fixed)
        self.settings = [*settings, *swept.values()]  # arguments for Hydra
        self.has_plugin = any(word.startswith("hydra/sweeper=") for word in settings)
        jobs = itertools.product(*self.columns.values())
        most = 1 if self.has_plugin else None
        self.jobs: list[Overrides] = [*itertools.islice(jobs, most)]
        read_overrides(itertools.chain(*self.columns.values()))
        folders = {self.config(job).run.dir for job in self.jobs}
        if len(folders) < len(self.jobs):
            fix = "remove run.dir and run.name, or include every varying key in run.name, "
            fix += f"such as 'run.name=NAME-${{{next(iter(self.columns))}}}'"
            raise UserError("-m", "jobs have the same run directory", fix)
        name = ",".join(["sweep", *self.columns])[:90]
        digest = hashlib.sha256(" ".join([*self.fixed, *self.settings]).encode()).hexdigest()[:8]
        self.folder = Path(self.config(self.jobs[0]).run.dir).parent / f"{name},{digest}"

    def config(self, job: Overrides) -> Config:
        return _config(self.fixed, job)

    def run_jobs(self) -> int:
        """Run the jobs and print a table, best first; return 0 if all have finished.

        A failed job does not stop the sweep, because a diverging learning rate is a result.
        """
        total = "" if self.has_plugin else f" of {len(self.jobs):,}"
        run_job = partial(_run_job, os.path.abspath(sys.argv[0]), self.fixed, total)
        quiet = [{"override hydra/job_logging": "disabled"}]
        quiet += [{"override hydra/hydra_logging": "disabled"}]
        output = {"sweep": {"dir": str(self.folder), "subdir": "."}, "output_subdir": None}
        ConfigStore.instance().store("sweep", {"defaults": [*quiet, "_self_"], "hydra": output})
        # A launcher may run `run_job` in a different process, which imports this package.
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        settings = ["hydra.mode=MULTIRUN", *self.settings]
        if "hydra/sweeper=optuna" in settings:  # Optuna minimizes by default
            settings.insert(0, "hydra.sweeper.direction=maximize")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.has_plugin:  # a plugin's jobs are not known in advance
            runs = [os.path.relpath(self.config(job).run.dir, self.folder) for job in self.jobs]
            (self.folder / "runs.txt").write_text("\n".join([*runs, ""]), "utf-8")  # for report.py
        try:
            with initialize_config_module("hydra.conf", version_base="1.3"):
                hydra: Any = GlobalHydra.instance().hydra
                hydra.multirun("sweep", run_job, settings)
        except (HydraException, RuntimeError) as error:  # raised by Hydra or a plugin
            fix = "see docs/config.md for Hydra's plugins, which pip installs"
            raise UserError("-m", str(error).splitlines()[0], fix) from None
        return 0 if self.has_plugin else self._print_table()

    def _print_table(self) -> int:
        """Print each job's best value; return 0 if all have finished."""
        from engine.metrics import Metrics  # imports torch

        metrics = Metrics.of(self.config(self.jobs[0]))
        by = metrics.best_by
        metric = metrics[by]
        results = {job: _result(self.config(job)) for job in self.jobs}
        best_first = sorted(results, key=lambda job: results[job].score, reverse=True)
        widths = [max(map(len, column)) for column in self.columns.values()]
        print(f"best {by}{metric.unit.replace(' ', ', ')}, best job first:")
        for job in best_first:
            value = results[job].value
            text = "no result" if value is None else f"{value:9{metric.form}}"
            print(f"{text}  {' '.join(map(str.ljust, job, widths))}".rstrip())
        print(f"report    python scripts/report.py {shlex.quote(str(self.folder))}")
        return int(any(result.status != "finished" for result in results.values()))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _unescaped(override: str) -> str:
    """Undo Hydra's escapes in unquoted text, which this program takes literally."""
    if _key(override) in TEXT_KEYS and not override.endswith(("'", '"')):
        return override.replace("\\", "")
    return override


def _values(text: str) -> list[str]:
    """Return the values of a sweep override; an interval's start; [] for any other override."""
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return []
        if override.is_interval_sweep():
            interval: Any = override.value()
            return [str(interval.start)]
        return [*override.sweep_string_iterator()]
    except HydraException:
        return []  # composing the config raises the error


@cache
def _config(fixed: Overrides, job: Overrides) -> Config:
    """Return a job's config; its run's default name contains all varying keys."""
    return from_overrides([*fixed, *job], varied=[_key(word) for word in job])


def _run_job(script: str, fixed: Overrides, total: str, _: Any) -> float:
    """Run Hydra's current job; return its score. An invalid argument stops the sweep.

    train.py itself decides whether the run has finished, because its images may have changed.
    """
    name = f"job {HydraConfig.get().job.num + 1:,}{total}"
    job = tuple(_unescaped(word.lstrip("+")) for word in HydraConfig.get().overrides.task)
    GlobalHydra.instance().clear()  # composing a config also uses Hydra
    config = _config(fixed, job)
    print(f"{name}: {' '.join(job)}", flush=True)
    run = [f"run.name={config.run.name}", f"run.dir={config.run.dir}"]  # resolve ${now:} once
    status = _run_child([sys.executable, script, *fixed, *job, *run])
    if status == 2:
        print(f"sweep stopped in {name}")
        sys.exit(status)
    if status > 128:
        print(f"sweep stopped in {name}; run the same command again to continue")
        sys.exit(status)
    return WORST if status else _result(config).score


def _run_child(command: Sequence[str]) -> int:
    """Run a process and forward stop signals to it; return its status, or 128 + signal."""

    def begin() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit signals all processes
        stop_with_parent()

    # Use a separate process group; otherwise the terminal would send Ctrl-C a second time.
    child = Popen(command, stdin=DEVNULL, process_group=0, preexec_fn=begin)
    with child, handle_stops(lambda number, _: child.send_signal(number)):
        try:
            status = child.wait()
        finally:  # submitit ends this process before Slurm's time limit
            child.terminate()
    if status == -signal.SIGKILL:  # the kernel kills jobs that run out of memory; count as failed
        return 1
    return status if status >= 0 else 128 - status


def _result(config: Config) -> Result:
    try:
        summary = json.loads(Path(config.run.dir, "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return Result(None, WORST, "")
    by = config.train.best_by
    value = summary.get(f"best_{by.removeprefix('-')}")  # missing if train.best_by has changed
    if value is None:
        return Result(None, WORST, summary["status"])
    return Result(value, -value if by.startswith("-") else value, summary["status"])
