"""The grid of loader settings of scripts/bench.py sweep=true and the table of its results.

loader.workers=auto measures the demand of the step and tries a few numbers; a sweep measures all.
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
from conf.overrides import FIELDS
from conf.schema import Loader, UserError, did_you_mean, show

AXES: dict[str, tuple[type, str]] = {
    "workers": (int, "a list of integers from 0 to 4096, for example [4,8]"),
    "pin_memory": (bool, "a list of true and false"),
    "prefetch_factor": (int, "a list of integers from 1 to 64, for example [2,3]"),
    "decoder": (str, "a list of decoders, for example [simplejpeg,hybrid]"),
}
KEYS = ["sweep", *(f"sweep.{axis}" for axis in AXES)]
PREFETCH_FACTORS = (1, 2, 3, 4)  # 1, and the candidates of loader.workers=auto
KNEE = 0.98  # of the best rate: a gain from more workers is noise
# Over the grid, forwards and backwards equally often: a steady drift of the machine then changes
# the median of every cell by the same amount.
ROUNDS = 4
MEASURES = {"loader": "loader alone", "train": "with the training step"}


@dataclass(frozen=True)
class Setting:
    """A point of the grid: values of the config group `loader`."""

    workers: int
    pin_memory: bool
    prefetch_factor: int
    decoder: str = "auto"

    def __str__(self) -> str:
        return " ".join(f"loader.{axis}={show(getattr(self, axis))}" for axis in AXES)


@dataclass(frozen=True)
class Cell:
    """The measurements of a setting.

    Attributes:
        loader, train: images/s in each round, of the loader alone and with the training step.
        waited: Fraction of the time in which the device waited for a batch, in each round.
        failed: Error message if the setting cannot run.
    """

    setting: Setting
    loader: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    failed: str = ""

    def rate(self, measure: str) -> float:
        """Return the median over the rounds; 0 for a failed cell."""
        return median(getattr(self, measure) or [0.0])

    def with_rounds(self, later: "Cell") -> "Cell":
        """Append the rounds of a later visit; a failed visit discards all rounds."""
        if later.failed:
            return later
        return replace(
            self,
            loader=self.loader + later.loader,
            train=self.train + later.train,
            waited=self.waited + later.waited,
        )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the sweep's overrides, even misspelt (`swep.workers=[4]`), from other arguments."""
    sections = {key.split(".")[0] for key in cli.KEYS} | set(cli.GROUPS)

    def own(argument: str) -> bool:
        head = argument.partition("=")[0].split(".")[0].lstrip("+~")
        return did_you_mean(head, [*sections, "sweep"], cutoff=0.8) == "; did you mean sweep?"

    return [a for a in arguments if own(a)], [a for a in arguments if not own(a)]


def read(overrides: Sequence[str]) -> dict[str, list[Any]] | None:
    """Return the requested values by axis; None without sweep=true.

    Raises:
        UserError: A key does not exist or a value is not allowed.
    """
    on = False
    asked = {}
    for text in overrides:
        key, _, typed = text.partition("=")
        if key not in KEYS:
            hint = did_you_mean(key.lower(), KEYS) or f"; the keys are {', '.join(KEYS)}"
            raise UserError(f"{text}: there is no key {key}{hint}")
        value = _value(typed)
        if key == "sweep":
            if type(value) is not bool:
                raise UserError(f"{text}: not allowed; give true or false")
            on = value
            continue
        axis = key.removeprefix("sweep.")
        kind, allowed = AXES[axis]
        check = FIELDS[f"loader.{axis}"].metadata["check"]
        values = value if isinstance(value, list) else [value]
        if not values or any(type(v) is not kind or check(v) for v in values):
            raise UserError(f"{text}: not allowed; give {allowed}")
        asked[axis] = sorted(set(values))
    if asked and not on:
        raise UserError(f"sweep.{next(iter(asked))}: requires sweep=true; add it")
    return asked if on else None


def _value(typed: str) -> Any:
    """Parse a value as YAML; None if it is invalid."""
    try:
        return dict(OmegaConf.to_object(OmegaConf.from_dotlist([f"value={typed}"])))["value"]  # type: ignore[arg-type]
    except (YAMLError, OmegaConfBaseException):
        return None


def grid(
    asked: dict[str, list[Any]], loader: Loader, *, budget: int, on_gpu: bool
) -> list[Setting]:
    """Return all combinations of the requested values.

    By default: workers up to the budget, both values of pin_memory on a GPU, PREFETCH_FACTORS, and
    the values of the config.
    """
    usual: dict[str, list[Any]] = {
        "workers": _with(ladder(budget), loader.workers),
        "pin_memory": [False, True] if on_gpu else [False],  # nothing is pinned for a CPU
        "prefetch_factor": _with(PREFETCH_FACTORS, loader.prefetch_factor),
        "decoder": [loader.decoder],
    }
    axes = usual | asked
    return [
        Setting(w, p, f, d)
        for d, p, f, w in product(
            *(axes[axis] for axis in ("decoder", "pin_memory", "prefetch_factor", "workers"))
        )
    ]


def visits(settings: Sequence[Setting]) -> list[Setting]:
    """Return every setting ROUNDS times, every second round in reverse order."""
    return [setting for number in range(ROUNDS) for setting in settings[:: -1 if number % 2 else 1]]


def ladder(budget: int) -> list[int]:
    """Return the numbers of workers to measure.

    All numbers up to a budget of 8; otherwise even numbers up to 16, then steps of a half or a
    third, the budget, and one fewer.
    """
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
    """Return the cell with the highest rate; None if all failed."""
    top = max(cells, key=lambda cell: cell.rate(measure))
    return None if top.failed else top


def knee(cells: Sequence[Cell]) -> Cell | None:
    """Return the fastest cell with the fewest workers that reach KNEE of the best training rate."""
    top = best(cells)
    if top is None:
        return None
    near = [c for c in cells if c.rate("train") >= KNEE * top.rate("train")]
    return min(near, key=lambda cell: (cell.setting.workers, -cell.rate("train")))


def table(cells: Sequence[Cell], alone: float, earlier: dict[Setting, float]) -> str:
    """Format a line for each cell, and below them the best cell and the knee as overrides.

    Args:
        cells: The measured cells.
        alone: images/s of the step on a batch that stays on the device.
        earlier: Training rates of an earlier run, to show the ratio.
    """
    top, bend = best(cells), knee(cells)
    head = "workers  pin_memory  prefetch_factor     decoder      loader   with step"
    lines = [f"{head}  of best  waited"]
    for cell in cells:
        s = cell.setting
        line = f"{s.workers:>7}  {show(s.pin_memory):>10}  {s.prefetch_factor:>15}  {s.decoder:>10}"
        if cell.failed or top is None:
            lines.append(f"{line}  failed: {cell.failed}")
            continue
        rate = cell.rate("train")
        waited = f"{100 * median(cell.waited):.0f} %" if cell.waited else ""
        line += f"  {cell.rate('loader'):>10,.0f}  {rate:>10,.0f}"
        line += f"  {rate / top.rate('train'):>7.2f}  {waited:>6}"
        if s in earlier:
            line += f"  x{rate / earlier[s]:.2f}"
        if cell is top:
            line += "  best"
        if cell is bend:
            line += "  knee"
        lines.append(line)
    if top is not None and bend is not None:
        rate = top.rate("train")
        of_step = f"{rate / alone:.2f} of the step alone ({alone:,.0f})"
        lines.append(f"best  {top.setting}: {rate:,.0f} images/s, {of_step}")
        enough = bend.rate("train")
        of_best = f"{enough / rate:.2f} of the best with the fewest workers"
        lines.append(f"knee  {bend.setting}: {enough:,.0f} images/s, {of_best}")
    return "\n".join(lines)
