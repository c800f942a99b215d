"""Sweeps: `python train.py -m optim.lr=0.1,0.2` trains once for each value, with Hydra's multirun.

A sweeper and a launcher of Hydra decide which jobs run, and where: the basic ones, or installed
plugins (hydra/sweeper=optuna, hydra/launcher=submitit_slurm). Each job is a child process with
train.py. Hydra gets the overrides with several values and its own settings, and reads no YAML file
of this program or of the user: no `_target_` in one can run.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from subprocess import DEVNULL, Popen
from typing import Any

from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.cli import require_root
from conf.compose import from_overrides, to_yaml
from conf.errors import UserError
from conf.named import ROOT
from conf.overrides import read_overrides
from conf.schema import FIELDS, NAMES, Config, group_names
from conf.start import handle_stops, stop_with_parent
from conf.terminal import duration

MOST = 20  # jobs that are composed before the first one starts; each takes 0.1 s
MAX_JOBS = 10_000
REPEATS = ("data.val_fold", "train.seed")  # the table ends with the mean over their values
WORST = -1e9  # the score of a job that failed; a sweeper may not take an infinite one
MAXIMISE = {"hydra/sweeper=optuna": ["hydra.sweeper.direction=maximize"]}  # else it minimises


def main(words: Sequence[str], script: str, options: argparse.Namespace) -> int:
    """Run the jobs of a command line, or print them for --cfg job; return the exit status."""
    if (ROOT / "scripts" / script).exists():
        raise UserError("-m", "only train.py has sweeps", "start this script once per value")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m: a sweep does not run under torchrun or srun; run it once per value")
    sweep = Sweep(words)
    if options.cfg is None:
        require_root(next(iter(sweep.jobs.values())))
        return sweep.run_jobs()
    print(*(f"---\n{to_yaml(job, options.package)}" for job in sweep.jobs.values()), sep="", end="")
    if more := math.prod(map(len, sweep.columns)) - len(sweep.jobs):
        print(f"# and {more} more jobs")
    return 0


class Sweep:
    """The jobs of a command line. Raises UserError for a mistake in a value or a composed job.

    `columns`: the overrides of each of the `keys` that vary. `jobs`: those of a job -> its config,
    for the first MOST jobs; for the first job only if a plugin is the sweeper.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.settings = [word for word in words if re.match(r"[+~]*hydra[./]", word)]
        self.sweeper = next((w for w in self.settings if w.startswith("hydra/sweeper=")), "")
        self.fixed, self.keys, self.columns = list[str](), list[str](), list[list[str]]()
        for word in (word for word in words if word not in self.settings):
            key, values = _key(word), _values(word)
            if not values:
                self.fixed.append(word)
                continue
            self.keys.append(key)
            self.columns.append([f"{key}={value}" for value in values])
            # To Hydra, which has no config here, the key is new. Only its basic sweeper knows glob.
            swept = f"{key}={','.join(values)}" if "=glob(" in word else word.lstrip("+")
            self.settings.append(f"++{swept}")
        if math.prod(map(len, self.columns)) > MAX_JOBS:
            raise UserError(f"-m: more than {MAX_JOBS:,} jobs; give fewer values")
        read_overrides(itertools.chain(*self.columns))
        jobs = itertools.islice(itertools.product(*self.columns), 1 if self.sweeper else MOST)
        self.jobs = {job: _named(self.fixed, job)[1] for job in jobs}
        if len({config.run.dir for config in self.jobs.values()}) < len(self.jobs):
            keys = [k for key in self.keys for k in (key, f"{key}.name") if k in FIELDS]
            own = "-".join(f"${{{key}}}" for key in keys)
            cure = f"leave out run.dir and run.name, or give only 'run.name=NAME-{own}'"
            raise UserError(f"-m: jobs have the same run directory; {cure}")
        name = ",".join(["sweep", *self.keys])[:90]
        digest = hashlib.sha256(" ".join([*self.fixed, *self.settings]).encode()).hexdigest()[:8]
        self.folder = Path(next(iter(self.jobs.values())).run.dir).parent / f"{name},{digest}"

    def run_jobs(self) -> int:
        """Run the jobs, and print a table with the best first; return 0 if all have finished.

        A job that fails does not stop the sweep: a learning rate that diverges is a result.
        """
        count = 0 if self.sweeper else math.prod(map(len, self.columns))
        script = os.path.abspath(sys.argv[0])
        run_job = partial(_run_job, script, self.fixed, count, took=[])
        quiet = [{f"override hydra/{each}_logging": "disabled"} for each in ("job", "hydra")]
        own = {"sweep": {"dir": str(self.folder), "subdir": "."}, "output_subdir": None}
        ConfigStore.instance().store("sweep", {"defaults": [*quiet, "_self_"], "hydra": own})
        # A launcher may run `run_job` in another process, which imports this package.
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        settings = ["hydra.mode=MULTIRUN", *MAXIMISE.get(self.sweeper, []), *self.settings]
        try:
            with initialize_config_module("hydra.conf", version_base="1.3"):
                hydra: Any = GlobalHydra.instance().hydra
                hydra.multirun("sweep", run_job, settings)
        except (HydraException, RuntimeError) as error:  # of Hydra, or of a plugin
            what = str(error).splitlines()[0]
            if what.startswith("In 'hydra/config': Could not find"):
                what += "; install this plugin of Hydra, docs/config.md names some"
            raise UserError(f"-m: {what}") from None
        return 0 if self.sweeper else self._print_table()

    def _print_table(self) -> int:
        """Print the best value of each job, and means over REPEATS; return 0 if all finished."""
        from engine.metrics import Metrics  # imports torch

        config = next(iter(self.jobs.values()))
        metrics = Metrics.of(config)
        by, lower = metrics.best_by.name, metrics.best_by.lower_is_better
        form, unit = metrics[by].form, metrics[by].unit.replace(" ", ", ")
        rows, repeats = [], defaultdict(list)
        widths = [max(map(len, column)) for column in self.columns]
        for job in itertools.product(*self.columns):
            config = self.jobs.get(job) or _named(self.fixed, job)[1]
            score, value, status = _result(config)
            text = "no result" if value is None else f"{value:9{form}}"
            text += "  " + " ".join(map(str.ljust, job, widths))
            rows.append((-score, status, text.rstrip(), config.run.dir))
            if value is not None:
                repeats["".join(f"  {w}" for w in job if _key(w) not in REPEATS)].append(value)
        rows.sort(key=lambda row: row[0])
        print(f"best {by}{unit}, the best job first:")
        print(*(text for *_, text, _ in rows), sep="\n")
        for fixed, found in sorted(repeats.items(), key=lambda r: mean(r[1]), reverse=not lower):
            if len(found) > 1:
                spread = f"standard deviation {stdev(found):{form}}"
                print(f"{mean(found):9{form}}  mean of {len(found)} best values, {spread}{fixed}")
        self.folder.mkdir(parents=True, exist_ok=True)  # with another hydra.sweep.dir
        folders = (f"{os.path.relpath(folder, self.folder)}\n" for *_, folder in rows)
        (self.folder / "runs.txt").write_text("".join(folders), "utf-8")  # for report.py
        print(f"report    python scripts/report.py {shlex.quote(str(self.folder))}")
        if repeats and not {*self.keys} & {*REPEATS}:
            for name, more in (("evaluate", ""), ("predict", " NEW_IMAGE.jpg")):  # of the best
                print(f"{name:<9} python scripts/{name}.py {shlex.quote(rows[0][-1])}{more}")
        return int(any(status != "finished" for _, status, *_ in rows))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _named(fixed: Sequence[str], job: Sequence[str]) -> tuple[list[str], Config]:
    """Return the overrides and the config of a job; its run's default name has all varied keys."""
    config = from_overrides(words := [*fixed, *job], varied=[_key(word) for word in job])
    return [*words, f"run.name={config.run.name}"], config


def _values(text: str) -> list[str]:
    """The values of an override with several; of an interval its start; none for another one."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return []  # composing says what is wrong
    values: Any = override.value()
    if not override.is_sweep_override() or _key(text) not in NAMES:  # composing refuses such a key
        return []
    if override.is_interval_sweep():
        return [str(values.start)]
    names = group_names(_key(text))
    found = values.filter(names) if "=glob(" in text else override.sweep_string_iterator()
    found = [*itertools.islice(found, MAX_JOBS + 1)]
    if not found:
        raise UserError(f"{text}: has no value; give at least one")
    return found


def _run_job(script: str, fixed: list[str], count: int, _: Any, *, took: list[float]) -> float:
    """Run the job of Hydra, unless its run has finished; return its score. A mistake ends all."""
    number, job = HydraConfig.get().job.num + 1, HydraConfig.get().overrides.task
    job = [word.lstrip("+") for word in job]
    GlobalHydra.instance().clear()  # composing uses Hydra, too
    overrides, config = _named(fixed, job)
    done = _result(config)[2] == "finished" and config.checkpoint.resume != "never"
    done = done and Path(config.run.dir, "config.yaml").read_text("utf-8") == to_yaml(config)
    name, left = f"job {number:,}{f' of {count:,}' if count else ''}", ""
    if took and count:
        left = f", about {duration(mean(took) * (count + 1 - number))} left for the sweep"
    print(f"{name}{left}: {' '.join(job)}", flush=True)
    if done:
        print(f"finished  {config.run.dir}")
        return _result(config)[0]
    began = time.monotonic()
    status = _run_child([sys.executable, script, *overrides])
    took.append(time.monotonic() - began)
    if status == 2 or status > 128:
        cure = "run the same command again to continue" if status > 2 else "correct the command"
        print(f"sweep stopped in {name}; {cure}")
        sys.exit(status)
    return WORST if status else _result(config)[0]


def _run_child(command: Sequence[str]) -> int:
    """Run a process, and pass on stop signals to it; return its status, 128 + signal after one."""

    def begin() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit sends it to all processes
        stop_with_parent()

    # In a process group of its own, else the terminal would send it Ctrl-C a second time.
    child = Popen(command, stdin=DEVNULL, process_group=0, preexec_fn=begin)
    with child, handle_stops(lambda number, _: child.send_signal(number)):
        try:
            status = child.wait()
        finally:  # submitit ends this process before the time limit of Slurm
            child.terminate()
    return status if status >= 0 else 128 - status


def _result(config: Config) -> tuple[float, float | None, str]:
    """Return a run's score (higher is better), its best value of train.best_by, and its status."""
    try:
        summary = json.loads(Path(config.run.dir, "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return WORST, None, ""
    by = config.train.best_by
    value, sign = summary[f"best_{by.removeprefix('-')}"], -1 if by.startswith("-") else 1
    return WORST if value is None else sign * value, value, summary["status"]
