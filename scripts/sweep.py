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
from PIL import Image, ImageDraw, ImageFont
from yaml import YAMLError

from conf import cli
from conf.overrides import FIELDS, nearest
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

WIDE, HIGH, LEFT = 84, 52, 144  # of the heat map: a cell, and the room left of it, pixels
PALE, DARK, BEST, BEND, GREY = (237, 243, 250), (16, 62, 122), "#e8590c", "#2f9e44", "#555555"
FONT, SMALL = ImageFont.load_default(18), ImageFont.load_default(14)


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
            self, loader=self.loader + later.loader, train=self.train + later.train, waited=self.waited + later.waited
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
            raise UserError(f"{text}: there is no key {key}{nearest(key, KEYS) or '; there are ' + ', '.join(KEYS)}")
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
        raise UserError(f"sweep.{next(iter(asked))}: nothing is swept without sweep=true; add it")
    return asked if on else None


def _value(typed: str) -> Any:
    """What YAML makes of it; None when that is nothing."""
    try:
        return dict(OmegaConf.to_object(OmegaConf.from_dotlist([f"value={typed}"])))["value"]  # type: ignore[arg-type]
    except (YAMLError, OmegaConfBaseException):
        return None


def grid(asked: dict[str, list[Any]], loader: Loader, *, budget: int, on_gpu: bool) -> list[Setting]:
    """Every combination of what was asked for; by default a ladder of workers up to the budget, both ways to pin on a GPU,
    the prefetch factors that matter, and the config's own values besides.
    """
    usual: dict[str, list[Any]] = {
        "workers": _with(ladder(budget), loader.workers),
        "pin_memory": [False, True] if on_gpu else [False],  # nothing is pinned for a CPU
        "prefetch_factor": _with(PREFETCH_FACTORS, loader.prefetch_factor),
    }
    axes = usual | asked
    return [Setting(w, p, f) for p, f, w in product(axes["pin_memory"], axes["prefetch_factor"], axes["workers"])]


def visits(settings: Sequence[Setting]) -> list[Setting]:
    """Every setting ROUNDS times, every second time in the reverse order."""
    return [setting for number in range(ROUNDS) for setting in settings[:: -1 if number % 2 else 1]]


def ladder(budget: int) -> list[int]:
    """All numbers up to a budget of 8, else every second and from 16 on steps of a half; always the budget, and one fewer."""
    if budget <= 8:
        return list(range(1, budget + 1))
    steps = [1, *range(2, 16, 2), *(n * 2**k for k in range(3, 12) for n in (2, 3))]  # ..., 14, 16, 24, 32, 48, 64, ...
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
        lines.append(f"best  {top.setting}: {rate:,.0f} images/s, {rate / alone:.2f} of the step alone ({alone:,.0f})")
        lines.append(f"knee  {bend.setting}: {enough:,.0f} images/s, {enough / rate:.2f} of it with the fewest workers")
    return "\n".join(lines)


def heat_map(cells: Sequence[Cell], title: str) -> Image.Image:
    """A panel for each measure and pin_memory: workers to the right, prefetch_factor downwards, the darker the faster."""
    workers, pins, factors = ([*dict.fromkeys(getattr(cell.setting, axis) for cell in cells)] for axis in AXES)
    panels = list(product(MEASURES, pins))
    panel_high = HIGH * len(factors) + 80
    width = max(LEFT + WIDE * len(workers) + 24, int(FONT.getlength(title)) + 40)
    image = Image.new("RGB", (width, 76 + panel_high * len(panels)), "white")
    draw = ImageDraw.Draw(image)
    draw.text((16, 14), title, "black", FONT)
    draw.text((16, 42), "images/s and the share of the measure's best", GREY, SMALL)
    for x, colour, word in ((LEFT + 196, BEST, "best"), (LEFT + 276, BEND, "knee")):
        draw.rectangle((x, 44, x + 20, 58), outline=colour, width=3)
        draw.text((x + 28, 42), word, GREY, SMALL)
    for number, (measure, pin) in enumerate(panels):
        top = 76 + panel_high * number
        draw.text((LEFT, top), f"{MEASURES[measure]}, pin_memory={show(pin)}", "black", FONT)
        shown = [cell for cell in cells if cell.setting.pin_memory is pin]
        peak, bend = best(cells, measure), knee(cells) if measure == "train" else None
        for cell in shown:
            x = LEFT + WIDE * workers.index(cell.setting.workers)
            y = top + 28 + HIGH * factors.index(cell.setting.prefetch_factor)
            _draw_cell(draw, x, y, cell.rate(measure), peak.rate(measure) if peak else 0.0)
            for inset, colour in ((0, BEST),) * (cell is peak) + ((3, BEND),) * (cell is bend):
                draw.rectangle((x + inset, y + inset, x + WIDE - 3 - inset, y + HIGH - 3 - inset), outline=colour, width=3)
        below = top + 28 + HIGH * len(factors)
        for j, factor in enumerate(factors):
            draw.text((LEFT - 10, top + 28 + HIGH * (j + 0.5)), f"prefetch_factor {factor}", GREY, SMALL, anchor="rm")
        draw.text((LEFT - 10, below + 4), "workers", GREY, SMALL, anchor="rt")
        for i, count in enumerate(workers):
            draw.text((LEFT + WIDE * (i + 0.5), below + 4), str(count), "black", SMALL, anchor="mt")
    return image


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, rate: float, peak: float) -> None:
    share = rate / peak if peak else 0.0
    # Squared: the eye must tell apart what is near the best.
    shade = tuple(round(a + (b - a) * share**2) for a, b in zip(PALE, DARK, strict=True))
    draw.rectangle((x, y, x + WIDE - 3, y + HIGH - 3), fill=shade if rate else "#dddddd")
    middle, ink = x + WIDE / 2, "white" if share > 0.72 else "black"
    if rate:
        draw.text((middle, y + 17), f"{rate:,.0f}", ink, FONT, anchor="mm")
        draw.text((middle, y + 36), f"{share:.2f}", ink, SMALL, anchor="mm")
    else:
        draw.text((middle, y + HIGH / 2), "failed", GREY, SMALL, anchor="mm")
