"""The brute force of scripts/bench.py sweep=true: which settings of the loader are measured, and how the outcome is shown.

loader.workers=auto measures what the step needs and tries a few numbers; this goes over a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf import cli
from conf.schema import Loader, UserError, did_you_mean, show

AXES: dict[str, tuple[type, str]] = {
    "workers": (int, "a list of whole numbers from 0 to 4096, such as [4,8]"),
    "pin_memory": (bool, "a list of true and false"),
    "prefetch_factor": (int, "a list of whole numbers from 1 to 64, such as [2,3]"),
}
KEYS = ["sweep", *(f"sweep.{axis}" for axis in AXES)]
PREFETCH_FACTORS = (1, 2, 3, 4)  # those that loader.workers=auto chooses from, and 1
KNEE = 0.98  # of the best rate: what more workers add is noise
# Over the grid, there and back. As many of each: what drifts steadily meanwhile then changes every cell's median alike.
ROUNDS = 4
MEASURES = {"loader": "loader alone", "train": "with the training step"}


@dataclass(frozen=True)
class Setting:
    """One point of the grid, as the config's `loader` takes it."""

    workers: int
    pin_memory: bool
    prefetch_factor: int

    def __str__(self) -> str:
        return " ".join(f"loader.{axis}={show(getattr(self, axis))}" for axis in AXES)


@dataclass(frozen=True)
class Cell:
    """What a setting gave.

    Attributes:
        loader, train: images/s in each round, of the loader alone and with the training step.
        waited: share of the time in which the device had no batch to work on, in each round.
        failed: why there are no rates.
    """

    setting: Setting
    loader: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    failed: str = ""

    def rate(self, measure: str) -> float:
        """Of the median round; 0 for a cell that has failed."""
        return median(getattr(self, measure) or [0.0])

    def and_again(self, later: "Cell") -> "Cell":
        """With the rounds of a later visit; one that has failed leaves no rates."""
        if later.failed:
            return later
        return replace(
            self,
            loader=self.loader + later.loader,
            train=self.train + later.train,
            waited=self.waited + later.waited,
        )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's own overrides and all other arguments; `swep.workers=[4]` is one of the sweep's, misspelt."""
    sections = {key.split(".")[0] for key in cli.KEYS} | set(cli.GROUPS)

    def own(argument: str) -> bool:
        head = argument.partition("=")[0].split(".")[0].lstrip("+~")
        return did_you_mean(head, [*sections, "sweep"], cutoff=0.8) == "did you mean sweep?"

    return [a for a in arguments if own(a)], [a for a in arguments if not own(a)]


def read(overrides: Sequence[str]) -> dict[str, list[Any]] | None:
    """The values asked for, by axis; None when there is no sweep=true.

    Raises:
        UserError: a key that does not exist, or a value that is not allowed.
    """
    on, asked = False, {}
    for text in overrides:
        key, _, typed = text.partition("=")
        if key not in KEYS:
            raise UserError(
                f"{text}: there is no key {key}{cli.nearest(key, KEYS) or '; there are ' + ', '.join(KEYS)}"
            )
        value = _value(typed)
        if key == "sweep":
            if type(value) is not bool:
                raise UserError(f"{text}: not allowed; give true or false")
            on = value
            continue
        axis = key.removeprefix("sweep.")
        kind, allowed = AXES[axis]
        check = cli.FIELDS[f"loader.{axis}"].metadata["check"]
        values = value if isinstance(value, list) else [value]
        if not values or any(type(v) is not kind or check(v) for v in values):
            raise UserError(f"{text}: not allowed; give {allowed}")
        asked[axis] = sorted(set(values))
    if asked and not on:
        raise UserError(f"sweep.{next(iter(asked))}: nothing is swept without sweep=true; add it")
    return asked if on else None


def _value(typed: str) -> Any:
    """What YAML makes of it; None when that is nothing."""
    try:
        return dict(OmegaConf.to_object(OmegaConf.from_dotlist([f"value={typed}"])))["value"]  # type: ignore[arg-type]
    except (YAMLError, OmegaConfBaseException):
        return None


def grid(
    asked: dict[str, list[Any]], loader: Loader, *, budget: int, on_gpu: bool
) -> list[Setting]:
    """Every combination of what was asked for; by default a ladder of workers up to the budget, both ways to pin on a GPU,
    the prefetch factors that matter, and the config's own values besides.
    """
    usual: dict[str, list[Any]] = {
        "workers": _with(ladder(budget), loader.workers),
        "pin_memory": [False, True] if on_gpu else [False],  # nothing is pinned for a CPU
        "prefetch_factor": _with(PREFETCH_FACTORS, loader.prefetch_factor),
    }
    axes = usual | asked
    return [
        Setting(w, p, f)
        for p, f, w in product(axes["pin_memory"], axes["prefetch_factor"], axes["workers"])
    ]


def visits(settings: Sequence[Setting]) -> list[Setting]:
    """Every setting ROUNDS times, every second time in the reverse order."""
    return [setting for number in range(ROUNDS) for setting in settings[:: -1 if number % 2 else 1]]


def ladder(budget: int) -> list[int]:
    """All numbers up to a budget of 8, else every second and from 16 on steps of a half; always the budget, and one fewer."""
    if budget <= 8:
        return list(range(1, budget + 1))
    steps = [
        1,
        *range(2, 16, 2),
        *(n * 2**k for k in range(3, 12) for n in (2, 3)),
    ]  # ..., 14, 16, 24, 32, 48, 64, ...
    return sorted({n for n in steps if n < budget} | {budget - 1, budget})


def _with(values: Sequence[int], configured: Any) -> list[int]:
    return sorted({*values} if configured == "auto" else {*values, configured})


def best(cells: Sequence[Cell], measure: str = "train") -> Cell | None:
    """The highest rate; None when no cell has one."""
    top = max(cells, key=lambda cell: cell.rate(measure))
    return None if top.failed else top


def knee(cells: Sequence[Cell]) -> Cell | None:
    """The fewest workers that train at KNEE of the best rate, with the settings that are the fastest for so many."""
    top = best(cells)
    if top is None:
        return None
    near = [c for c in cells if c.rate("train") >= KNEE * top.rate("train")]
    return min(near, key=lambda cell: (cell.setting.workers, -cell.rate("train")))


def table(cells: Sequence[Cell], alone: float, earlier: dict[Setting, float]) -> str:
    """A line for each cell; below, the best and the knee as overrides.

    Args:
        cells: measured.
        alone: images/s of the step on a batch that lies on the device.
        earlier: the training rates of another run, to show the ratio.
    """
    top, bend = best(cells), knee(cells)
    lines = ["workers  pin_memory  prefetch_factor      loader   with step  of best  waited"]
    for cell in cells:
        s = cell.setting
        line = f"{s.workers:>7}  {show(s.pin_memory):>10}  {s.prefetch_factor:>15}"
        if cell.failed or top is None:
            lines.append(f"{line}  failed: {cell.failed}")
            continue
        rate = cell.rate("train")
        waited = f"{100 * median(cell.waited):.0f} %" if cell.waited else ""
        line += f"  {cell.rate('loader'):>10,.0f}  {rate:>10,.0f}  {rate / top.rate('train'):>7.2f}  {waited:>6}"
        line += f"  x{rate / earlier[s]:.2f}" if s in earlier else ""
        lines.append(line + "  best" * (cell is top) + "  knee" * (cell is bend))
    if top is not None and bend is not None:
        rate, enough = top.rate("train"), bend.rate("train")
        lines.append(
            f"best  {top.setting}: {rate:,.0f} images/s, {rate / alone:.2f} of the step alone ({alone:,.0f})"
        )
        lines.append(
            f"knee  {bend.setting}: {enough:,.0f} images/s, {enough / rate:.2f} of it with the fewest workers"
        )
    return "\n".join(lines)
