"""Sweeps (optional): `python train.py -m optim.lr=0.1,0.2` runs Hydra's multirun.

A sweeper and a launcher of Hydra decide which jobs run, and where: the basic ones, or installed
plugins (hydra/sweeper=optuna, hydra/launcher=submitit_slurm). Each job is a child process with
train.py. Hydra gets the overrides with several values and its own settings, and reads no YAML file
of this program or of the user: no `_target_` in one can run.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from conf.compose import load, to_yaml
from conf.files import read_text
from conf.launch import stop_with_parent
from conf.overrides import read_override, split_config_dir
from conf.schema import GROUPS, NAMES, Config, UserError, group_names
from conf.signals import handle_stops

MOST = 20  # jobs that are composed before the first one starts; each takes 0.1 s
REPEATS = ("data.val_fold", "train.seed")  # the table ends with the mean over their values
WORST = -1e9  # the score of a job that failed; a sweeper may not take an infinite one
MAXIMISE = {  # by default, these sweepers minimise the value of a job
    "hydra/sweeper=optuna": ["hydra.sweeper.direction=maximize"],
    "hydra/sweeper=ax": ["hydra.sweeper.ax_config.experiment.minimize=false"],
}


class Sweep:
    """The jobs of a command line. Each value is checked, and up to MOST jobs are composed.

    Raises UserError if a job is not allowed, or if two have the same run directory.

    Attributes:
        columns: for each key that varies, its overrides, such as optim.lr=0.1 and optim.lr=0.2.
        jobs: the overrides of a composed job that vary -> its config; of another sweeper than
            Hydra's basic one only the first one.
    """

    def __init__(self, words: Sequence[str], *, runnable: bool = True) -> None:
        self.settings = [word for word in words if re.match(r"[+~]*hydra[./]", word)]
        self.sweeper = next((w for w in self.settings if w.startswith("hydra/sweeper=")), "")
        self.config_dir = split_config_dir(words)[0]
        self.fixed: list[str] = []
        self.swept: list[str] = []
        self.columns: list[list[str]] = []
        for word in (word for word in words if word not in self.settings):
            key, values = _key(word), _values(word, self.config_dir)
            if values:
                # Of Hydra's sweepers, only the basic one knows glob().
                is_glob = "=glob(" in word
                self.swept.append(f"{key}={','.join(values)}" if is_glob else word.lstrip("+"))
                self.columns.append([f"{key}={value}" for value in values])
            else:
                self.fixed.append(word)
        for override in itertools.chain(*self.columns):
            read_override(override, self.config_dir)
        jobs = _some_jobs(self.columns)[: 1 if self.sweeper else None]
        self.jobs = {job: load([*self.fixed, *job], runnable=runnable) for job in jobs}
        for (job, config), (other, its) in itertools.combinations(self.jobs.items(), 2):
            if config.run.dir == its.run.dir:
                raise UserError(
                    f"-m: {' '.join(job)} and {' '.join(other)} have the same run directory; give "
                    "each its own, for example 'run.dir=runs/${run.name}-${loader.workers}'"
                )

    def run(self) -> int:
        """Run the jobs, and print a table with the best first; return 0 if all have finished.

        A job that fails does not stop the sweep: a learning rate that diverges is a result.
        """
        script, fixed = os.path.abspath(sys.argv[0]), self.fixed

        def run_job(_: Any) -> float:
            return _run_job(script, [*fixed, *HydraConfig.get().overrides.task])

        self._register()
        sys.argv[1:] = ["-m", *MAXIMISE.get(self.sweeper, []), *self.swept, *self.settings]
        # A launcher of Hydra may run `run_job` in another process, which imports this package.
        root = str(Path(__file__).absolute().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors instead of printing them
        if sys.version_info >= (3, 14):  # argparse refuses the help of an option of Hydra 1.3
            argparse.ArgumentParser._check_help = lambda *_: None  # type: ignore[attr-defined]
        # With config_path=None, Hydra would find the YAML files beside this module.
        start = hydra.main(version_base="1.3", config_path="pkg://hydra.conf", config_name="sweep")
        try:
            start(run_job)()
        except (HydraException, RuntimeError) as error:  # of Hydra, or of a plugin
            what = str(error).splitlines()[0]
            if what.startswith("In 'hydra/config': Could not find"):
                what += "; install this plugin of Hydra, docs/config.md names some"
            raise UserError(f"-m: {what}") from None
        if self.sweeper:
            return 0
        rows = []
        for job in itertools.product(*self.columns):
            config = self.jobs.get(job) or load([*fixed, *job])
            rows.append((*_result(config), job, config.run.dir))
        print(f"{config.train.best_by.removeprefix('-')}, the best job first:")
        for _, value, _, job, folder in sorted(rows, key=lambda row: -row[0]):
            result = "no result" if value is None else f"{value:7.3f}"
            print(f"{result}  {' '.join(job)}  {folder}")
        _print_means({job: value for _, value, _, job, _ in rows if value is not None})
        return 0 if all(status == "finished" for _, _, status, *_ in rows) else 1

    def _register(self) -> None:
        """Register the keys and the names of the choices with Hydra, but not their content."""
        store = ConfigStore.instance()
        store.store(name="schema", node=Config)
        for group in GROUPS:
            for choice in group_names(group, self.config_dir):
                store.store(group=group, name=choice, node={}, package="_global_")
        logging = [{f"override hydra/{name}_logging": "disabled"} for name in ("job", "hydra")]
        defaults = ["schema", *({group: None} for group in GROUPS), *logging, "_self_"]
        name = ",".join(["sweep", *map(_key, self.swept)])[:100]
        folder = Path(next(iter(self.jobs.values())).run.dir).parent / name
        own = {"sweep": {"dir": str(folder), "subdir": "."}, "output_subdir": None}
        store.store(name="sweep", node={"defaults": defaults, "hydra": own})


def _print_means(values: Mapping[tuple[str, ...], float]) -> None:
    """Print mean and standard deviation of the jobs that only the keys of REPEATS tell apart."""
    groups = defaultdict(list)
    for job, value in values.items():
        groups["".join(f"  {word}" for word in job if _key(word) not in REPEATS)].append(value)
    for fixed, found in groups.items():
        if len(found) > 1:
            mean, deviation = statistics.mean(found), statistics.stdev(found)
            print(f"{mean:7.3f}  mean of {len(found)}, standard deviation {deviation:.3f}{fixed}")


def _some_jobs(columns: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return all jobs, but above MOST the first, the last, and the first ones with other values."""
    if math.prod(map(len, columns)) <= MOST:
        return list(itertools.product(*columns))
    first, last = (tuple(values[i] for values in columns) for i in (0, -1))
    others = [
        (*first[:i], value, *first[i + 1 :])
        for i, values in enumerate(columns)
        for value in values[: MOST // len(columns)]
    ]
    return list(dict.fromkeys([first, *others, last]))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _values(text: str, config_dir: Path | None) -> list[str]:
    """The values of an override with several; of an interval its start; none for another one."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return []  # `load` says what is wrong
    values: Any = override.value()
    if not override.is_sweep_override() or _key(text) not in NAMES:  # `load` refuses such a key
        return []
    if override.is_interval_sweep():
        return [str(values.start)]
    names = group_names(_key(text), config_dir)
    is_glob = override.value_type == ValueType.GLOB_CHOICE_SWEEP
    found = values.filter(names) if is_glob else [*override.sweep_string_iterator()]
    if not found:
        raise UserError(f"{text}: has no value; give at least one")
    return found


def _run_job(script: str, overrides: Sequence[str]) -> float:
    """Run one job, unless its run has finished; return its score, see `_result`.

    A mistake or a signal ends the sweep: SystemExit with the status of the job.
    """
    GlobalHydra.instance().clear()  # `load` uses Hydra, too, with the content of the groups
    store = ConfigStore.instance()
    registered = store.repo
    store.repo = {name: node for name, node in registered.items() if name not in GROUPS}
    config = load(overrides)
    store.repo = registered
    print(f"job {' '.join(overrides)}: {config.run.dir}", flush=True)
    stored = Path(config.run.dir) / "config.yaml"
    same = stored.is_file() and read_text(stored) == to_yaml(config)
    finished = same and _result(config)[2] == "finished"
    if not finished or config.checkpoint.resume == "never":
        status = _run_child([sys.executable, script, *overrides])
        if status == 2 or status > 128:
            sys.exit(status)
        if status != 0:
            return WORST
    return _result(config)[0]


def _run_child(command: Sequence[str]) -> int:
    """Run a process, and pass on the signals that stop a run; return 128 + signal if one ended it.

    It has its own process group: the terminal would send it Ctrl-C a second time.
    """

    def begin() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit sends it to all processes
        stop_with_parent()

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=begin)
    with handle_stops(lambda number, _: child.send_signal(number)):
        try:
            status = child.wait()
        finally:  # submitit ends this process before the time limit of Slurm
            child.terminate()
            child.wait()
    return status if status >= 0 else 128 - status


def _result(config: Config) -> tuple[float, float | None, str]:
    """Return the score of a run, its best value of train.best_by, and its status.

    A higher score is better: the value with its sign, WORST without a value.
    """
    try:
        summary = json.loads(read_text(Path(config.run.dir) / "summary.json"))
    except (OSError, ValueError):
        return WORST, None, ""
    by = config.train.best_by
    value, sign = summary[f"best_{by.removeprefix('-')}"], -1 if by.startswith("-") else 1
    return WORST if value is None else sign * value, value, summary["status"]
