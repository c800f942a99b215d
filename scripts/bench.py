"""Measure the throughput of each stage: read, decode, loader, copy, step, end to end.

    python scripts/bench.py data.root=/imagenet
    python scripts/bench.py data.root=/imagenet --only loader step train --compare earlier.json
    python scripts/bench.py data.root=/imagenet --only telemetry
    python scripts/bench.py data.root=/imagenet sweep=true
    python scripts/bench.py data.root=/imagenet sweep=true sweep.workers=[8,12]

Accepts train.py's key=value overrides. Each stage ("rung") is warmed up and then measured in
windows; the table shows the median window and the range. Writes bench.json and bench.png to --out.
--only telemetry measures the cost of train.py's telemetry.

sweep=true measures the loader alone and with the training step, for all combinations of workers,
prefetch_factor and pin_memory, in several rounds; sweep.<key>=[values] sets the values, and
sweep.decoder=[simplejpeg,hybrid] compares decoders. It reports the best setting and the knee, the
fewest workers that reach 0.98 of the best rate, and writes sweep.json and sweep.png, a heat map.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli
from conf.schema import Config, Run, RunError, Schedule, UserError
from scripts.lib import sweep

RUNGS = ("read", "decode", "loader", "copy", "step", "train")
ON_REQUEST = ("telemetry",)


def stored(path: Path, kind: str) -> list[dict[str, Any]]:
    """Read the `rungs` or `cells` of an earlier file; exit if it has none."""
    if not path.is_file():
        cli.fail(f"--compare {path}: no such file", "bench.py")
    try:
        content: list[dict[str, Any]] = json.loads(path.read_text())[kind]
    except (OSError, ValueError, KeyError, TypeError):
        name = "sweep.json" if kind == "cells" else "bench.json"
        message = f"contains no {kind}; give the {name} of an earlier run"
        cli.fail(f"--compare {path}: {message}", "bench.py")
    return content


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=RUNGS + ON_REQUEST,
        metavar="RUNG",
        help=f"some of: {', '.join(RUNGS + ON_REQUEST)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="measurement time per rung (10), or for each cell and measure of a sweep (4)",
    )
    parser.add_argument(
        "--compare", type=Path, help="show the ratio to this bench.json or sweep.json"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="output folder")
    OPTIONS, ARGUMENTS = parser.parse_known_args()
    ABOUT_SWEEP, OVERRIDES = sweep.split(ARGUMENTS)
    CONFIG = cli.parse(
        OVERRIDES, script="bench.py", purpose="Measure the throughput of each stage."
    )
    try:
        AXES = sweep.read(ABOUT_SWEEP)
    except UserError as error:
        cli.fail(str(error), "bench.py")
    if OPTIONS.seconds is not None and not OPTIONS.seconds > 0:
        cli.fail(f"--seconds {OPTIONS.seconds}: give a number > 0", "bench.py")
    if OPTIONS.only and AXES is not None:
        cli.fail("--only: cannot be combined with sweep=true; remove one of them", "bench.py")
    EARLIER = (
        stored(OPTIONS.compare, "rungs" if AXES is None else "cells") if OPTIONS.compare else []
    )

import io
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from statistics import median, quantiles

import torch
from PIL import Image

import train
from engine import checkpoint
from engine.distributed import StopSignal, World, join_world
from engine.log.meters import Meter
from engine.log.pictures import bars
from engine.log.runlog import RunLog
from engine.optim import Curve
from engine.plan import Plan, make_plan
from engine.rundir import RunDirectory
from pipeline.build import Datasets, build_datasets
from pipeline.dataset import DrawingDataset, FileDataset
from pipeline.feed import Feed, open_feed
from pipeline.loader import LoaderError
from pipeline.loader_plan import choose_decoders, worker_budget
from pipeline.machine import cores
from pipeline.prefetcher import Batch
from pipeline.sampler import scattered
from scripts.lib import copies
from scripts.lib.heat_map import heat_map

WINDOWS = 5
# Per window with or without telemetry: at least one log row, shorter than the machine's drift.
TURN_SECONDS = 2.0
FOREVER = 1 << 40  # steps


@dataclass(frozen=True)
class Rung:
    """One measurement.

    Attributes:
        rates: One per window, in `unit`.
        note: A remark for the table.
        batches: Number of batches taken from the loader, including the warm-up.
        waited: Fraction of the time in which the device waited for a batch.
    """

    name: str
    unit: str
    rates: list[float]
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    batches: int = 0
    waited: float | None = None

    @property
    def rate(self) -> float:
        return median(self.rates)


def run(config: Config, *, only: tuple[str, ...] = RUNGS, seconds: float = 10.0) -> list[Rung]:
    """Measure the requested rungs in the order of RUNGS.

    Raises:
        UserError: The config or the data is invalid.
    """
    with join_world(config.train.device) as world:
        config = train.resolve_config(config, world)
        datasets = build_datasets(config)
        datasets.prepare()
        plan = plan_of(config, datasets, world)
        train.set_up_kernels(deterministic=config.train.deterministic, precision=plan.precision)
        found: list[Rung] = []
        if isinstance(datasets.train, FileDataset):
            if "read" in only:
                found.append(measure_read(datasets.train, seconds))
            if "decode" in only:
                found.append(measure_decode(datasets.train, seconds, plan))
        if "loader" in only:
            with open_feed(config, datasets, plan.loader, world) as feed:
                found.append(measure_loader(feed, plan, seconds))
        if "copy" in only and world.device.type == "cuda":
            found.append(measure_copy(plan, world.device))
        elif "copy" in only:
            print("copy      not measured: training runs on the CPU, no batch is copied to a GPU")
        if "step" in only or "train" in only:
            found += [
                r for r in measure_steps(config, datasets, plan, world, seconds) if r.name in only
            ]
        if "telemetry" in only:
            with open_feed(config, datasets, plan.loader, world) as feed:
                found.append(Stepper(plan, world).watched(feed, seconds))
    return found


def run_sweep(
    config: Config, asked: dict[str, list[Any]], *, seconds: float = 4.0
) -> tuple[Rung, list[sweep.Cell]]:
    """Measure every setting of the grid with one compiled step and print each result.

    Returns:
        The step alone, and the cells. A setting that cannot run is a failed cell.

    Raises:
        UserError: The config or the data is invalid.
    """
    with join_world(config.train.device) as world:
        config = train.resolve_config(config, world)
        datasets = build_datasets(config)
        datasets.prepare()
        decoders, _ = choose_decoders(config, datasets.train, world.device)
        budget, _ = worker_budget(world.local_size, decoder=decoders[0])
        settings = sweep.grid(
            asked, config.loader, budget=budget, on_gpu=world.device.type == "cuda"
        )
        small = with_setting(config, workers=1, pin_memory=False, prefetch_factor=1)
        plan = plan_of(small, datasets, world)
        train.set_up_kernels(deterministic=config.train.deterministic, precision=plan.precision)
        stepper = Stepper(plan, world)
        with open_feed(small, datasets, plan.loader, world) as feed:
            alone = stepper.alone(feed, seconds)
        print(
            f"{len(settings)} cells, {sweep.ROUNDS} visits of 2 x {seconds / sweep.ROUNDS:g} s",
            flush=True,
        )
        cells = {setting: sweep.Cell(setting) for setting in settings}
        visits, start = sweep.visits(settings), 0
        for number, setting in enumerate(visits, 1):
            if cells[setting].failed:
                continue
            visit, batches = measure_cell(setting, datasets, stepper, seconds / sweep.ROUNDS, start)
            start += batches  # other files if possible: another cell must not have cached them
            cells[setting] = cells[setting].with_rounds(visit)
            result = f"failed: {visit.failed}"
            if not visit.failed:
                alone_rate, rate = visit.rate("loader"), visit.rate("train")
                result = f"loader alone {alone_rate:,.0f}, with the step {rate:,.0f} images/s"
            print(f"{number:>3}/{len(visits)}  {setting}: {result}", flush=True)
    return alone, list(cells.values())


def with_setting(config: Config, **setting: Any) -> Config:
    return replace(config, loader=replace(config.loader, **setting))


def measure_cell(
    setting: sweep.Setting, datasets: Datasets, stepper: "Stepper", seconds: float, start: int
) -> tuple[sweep.Cell, int]:
    """Measure a setting once, from step `start` on, with its own buffers and workers.

    Returns:
        A cell with one round, and the number of batches taken.
    """
    config, world = with_setting(stepper.config, **asdict(setting)), stepper.world
    try:
        if setting.decoder != stepper.config.loader.decoder:
            datasets = build_datasets(config)
        plan = plan_of(config, datasets, world)
        with open_feed(config, datasets, plan.loader, world) as feed:
            loader = measure_loader(feed, plan, seconds, start, count=1)
            fed = stepper.fed(feed, seconds, start + loader.batches, count=1)
    except (
        UserError,
        LoaderError,
        OSError,
        EOFError,
        MemoryError,
        RuntimeError,
    ) as error:  # RuntimeError: of CUDA
        return sweep.Cell(setting, failed=" ".join(str(error).split()) or type(error).__name__), 0
    waited = [] if fed.waited is None else [fed.waited]
    return sweep.Cell(setting, loader.rates, fed.rates, waited), loader.batches + fed.batches


def plan_of(config: Config, datasets: Datasets, world: World) -> Plan:
    """Plan the training, with as many workers as the cores allow: nothing is measured here.

    On a GPU, model.compile=auto is `default`, whatever the length of the run: `tuned` takes minutes
    to compile.
    """
    if config.model.compile == "auto" and world.device.type == "cuda":
        config = replace(config, model=replace(config.model, compile="default"))
    plan = make_plan(config, datasets, world)
    return replace(plan, loader=replace(plan.loader, measured=False))


def windows(
    step: Callable[[], int],
    seconds: float,
    finish: Callable[[], None] = lambda: None,
    *,
    count: int = WINDOWS,
) -> list[float]:
    """Measure units per second in each of `count` windows.

    Args:
        step: Processes some units and returns their number.
        seconds: Total time.
        finish: Waits until the units are complete.
    """
    return [window(step, seconds / count, finish) for _ in range(count)]


def window(step: Callable[[], int], seconds: float, finish: Callable[[], None]) -> float:
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        done += step()
    finish()
    return done / (time.perf_counter() - began)


def measure_read(dataset: FileDataset, seconds: float) -> Rung:
    """Read whole files one after another, spread over the dataset, from page cache or disk."""
    sizes: list[int] = []
    places = scattered(len(dataset))

    def read() -> int:
        sizes.append(len(dataset.read(next(places))))
        return 1

    rates = windows(read, seconds / 2)
    mean = sum(sizes) / len(sizes)
    speed = f"{mean / 1e3:.0f} kB per file, {mean * median(rates) / 1e6:,.0f} MB/s"
    return Rung("read", "images/s", rates, f"one process, {speed}")


def measure_decode(dataset: FileDataset, seconds: float, plan: Plan) -> Rung:
    """Decode, crop, resize and flip in one process: the throughput of one worker."""
    places = scattered(len(dataset))
    load: Callable[[int, int], object] = dataset.load
    if plan.loader.operations and isinstance(dataset, DrawingDataset):
        load = dataset.load_and_draw  # the GPU applies the operations of RandAugment

    def decode() -> int:
        load(0, next(places))
        return 1

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(50):
        decode()
    rates = windows(decode, seconds)
    torch.set_num_threads(threads)
    return Rung(
        "decode",
        "images/s",
        rates,
        f"one core, decoder {plan.loader.decoder}, to {plan.image_size} px",
    )


def measure_loader(
    feed: Feed, plan: Plan, seconds: float, start: int = 0, *, count: int = WINDOWS
) -> Rung:
    """Take complete batches in host memory as fast as the loader delivers them."""
    batches = feed.train.loader.batches(start, FOREVER)
    taken = 0

    def take() -> int:
        nonlocal taken
        taken += 1
        batch = next(batches)
        batch.release(None)
        return len(batch.labels)

    warm_up(take, feed)
    rates = windows(take, seconds, count=count)
    return Rung(
        "loader",
        "images/s",
        rates,
        f"{plan.loader.workers} workers, batch {plan.batch_size}",
        batches=taken,
    )


def warm_up(take: Callable[[], int], feed: Feed) -> None:
    """Take the batches that were decoded before the measurement."""
    for _ in range(feed.train.loader.slots + feed.train.depth):
        take()


def measure_copy(plan: Plan, device: torch.device) -> Rung:
    """Copy a batch in every direction; the rate is that of the loader's copy to the GPU."""
    details = copies.measure((plan.batch_size, 3, plan.image_size, plan.image_size), device)
    feed = details[copies.FEED]
    rates = [plan.batch_size / (ms / 1e3) for ms in feed["all_ms"]]
    return Rung("copy", "images/s", rates, f"uint8, pinned: {feed['gb_per_s']:.1f} GB/s", details)


def measure_steps(
    config: Config, datasets: Datasets, plan: Plan, world: World, seconds: float
) -> list[Rung]:
    """Measure the optimiser step on batches that stay on the device, then with the feed."""
    stepper = Stepper(plan, world)
    with open_feed(config, datasets, plan.loader, world) as feed:
        alone = stepper.alone(feed, seconds)
        fed = stepper.fed(feed, seconds)
    waits = (
        ""
        if fed.waited is None
        else f"; the device waited for data {100 * fed.waited:.0f} % of the time"
    )
    return [alone, replace(fed, note=f"{fed.rate / alone.rate:.2f} of the step alone{waits}")]


class Stepper:
    """train.py's optimiser step, compiled once for any number of feeds."""

    def __init__(self, plan: Plan, world: World) -> None:
        curve = Curve(Schedule("constant"), 1e-3, 0, plan.schedule_steps, plan.steps_per_epoch)
        self.plan, self.world = replace(plan, curve=curve), world
        self.config = plan.config
        self.state = train.build_state(plan, world)
        self._train_step = train.build_step(self.plan, self.state, world)
        self.meter = Meter(world)

    def step(self, batch: Batch) -> int:
        self.meter.add(self._train_step(batch))
        return len(batch.labels)

    def finish(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def alone(self, feed: Feed, seconds: float) -> Rung:
        """Measure with four batches that stay on the device."""
        resident = cycle([batch.clone() for batch in feed.train.batches(0, 4)])
        for _ in range(20 if self.world.device.type == "cuda" else 2):
            self.step(next(resident))
        self.finish()
        plan = self.plan
        name = f"{self.config.model.name}, batch {plan.batch_size}"
        name += f", {plan.precision}, compile {plan.compile}"
        rates = windows(lambda: self.step(next(resident)), seconds, self.finish)
        return Rung("step", "images/s", rates, f"{name}, batch already on the device")

    def fed(self, feed: Feed, seconds: float, start: int = 0, *, count: int = WINDOWS) -> Rung:
        """Measure with batches from the feed."""
        batches = feed.train.batches(start, FOREVER)
        taken = 0

        def take() -> int:
            nonlocal taken
            taken += 1
            return self.step(next(batches))

        warm_up(take, feed)
        self.finish()
        feed.train.clock.timing()
        rates = windows(take, seconds, self.finish, count=count)
        timing = feed.train.clock.timing()
        return Rung(
            "train",
            "images/s",
            rates,
            batches=taken,
            waited=timing.wait_fraction if timing else None,
        )

    def watched(self, feed: Feed, seconds: float) -> Rung:
        """Measure windows with and without everything that train.py reports, alternately.

        Both kinds of windows include the CUDA events around every batch.
        """
        batches = feed.train.batches(0, FOREVER)
        rows = 0
        log: RunLog | None = None

        def take() -> int:
            batch = next(batches)
            values = self._train_step(batch)
            self.state.step += 1
            if log is not None:
                log.end_step(values, send=self.plan.due(self.state.step).log)
            return len(batch.labels)

        warm_up(take, feed)
        self.finish()
        pairs: list[tuple[float, float]] = []
        count = max(WINDOWS, round(seconds / TURN_SECONDS))
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            run = RunDirectory(replace(self.config, run=Run(dir=folder)), self.world)
            for number in range(count):
                found = {}
                for watched in (number % 2 == 0, number % 2 == 1):
                    feed.train.clock.timing()
                    with ExitStack() as stack:
                        if watched:
                            log = RunLog(self.plan, self.world, run, self.state, started=0.0)
                            stack.enter_context(log.tracker)
                            stop = StopSignal(self.world)
                            stack.enter_context(log.watch(feed, self._train_step, stop, None))
                        found[watched] = window(take, seconds / count, self.finish)
                    log = None
                pairs.append((found[True], found[False]))
            rows = len((Path(folder) / "metrics.jsonl").read_text().splitlines())
        low, middle, high = quantiles((on / off for on, off in pairs), n=4)
        note = (
            f"{middle:.3f} of the rate without telemetry ({count} pairs, interquartile range "
            f"{low:.3f}-{high:.3f}, {self.state.step} steps, {rows} rows)"
        )
        return Rung("telemetry", "images/s", [on for on, _ in pairs], note, batches=self.state.step)


def table(rungs: list[Rung], earlier: dict[str, float]) -> str:
    """Format a line per rung: name, median rate, range, ratio to an earlier run, note."""
    lines = []
    for rung in rungs:
        ratio = f"  x{rung.rate / earlier[rung.name]:.2f}" if rung.name in earlier else ""
        spread = f"{min(rung.rates):,.0f}-{max(rung.rates):,.0f}"
        lines.append(
            f"{rung.name:<9} {rung.rate:>10,.0f} {rung.unit}  ({spread}){ratio}  {rung.note}"
        )
        for name, d in rung.details.items():
            speed = f"{d['ms']:7.3f} ms  {d['gb_per_s']:6.1f} GB/s"
            line = f"          {name:<41} {speed}  host free {100 * d['host_free']:3.0f} %"
            if "stale" in d:
                at_once, later = (100 * share for share in d["stale"])
                line += f"  read at once {at_once:.0f} % stale, after synchronize() {later:.0f} %"
            lines.append(line)
    return "\n".join(lines)


def chart(rungs: list[Rung], title: str) -> Image.Image:
    """Draw a bar per rung; the slowest one, which limits training, is red."""
    rungs = [r for r in rungs if r.name not in ("read", "decode")] or rungs
    stages = [r for r in rungs if r.name not in ("train", *ON_REQUEST)]
    slowest = min(stages, key=lambda r: r.rate, default=rungs[0])
    rows = [(r.name, r.rate, f"{r.rate:,.0f} {r.unit}") for r in rungs]
    return bars(title, rows, marked=[slowest.name])


def main() -> int:
    cli.log_to_stderr()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = f"{CONFIG.model.name} on {machine}, images/s"
    try:
        if AXES is None:
            name = "bench"
            content, lines, picture = measure_rungs(about)
        else:
            name = "sweep"
            content, lines, picture = measure_sweep(about, AXES)
    except UserError as error:
        cli.fail(str(error), "bench.py")
    except RunError as error:
        cli.complain(str(error), "bench.py")
        return 1
    except KeyboardInterrupt:
        cli.complain("interrupted", "bench.py")
        return 130
    print(lines)
    record = {
        "machine": machine,
        "cores": cores(),
        "made_by": checkpoint.provenance(),
        "config": cli.to_yaml(CONFIG),
    }
    try:
        OPTIONS.out.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(OPTIONS.out / f"{name}.json", record | content)
        picture.save(OPTIONS.out / f"{name}.png")
    except OSError as error:
        cli.complain(f"--out {OPTIONS.out}: cannot be written: {error.strerror}", "bench.py")
        return 1
    print(f"written to {OPTIONS.out}/{name}.json and {name}.png")
    return 0


def measure_rungs(about: str) -> tuple[dict[str, Any], str, Image.Image]:
    """Measure the rungs; return the contents of bench.json, the console and bench.png."""
    only = tuple(OPTIONS.only or RUNGS)
    rungs = run(CONFIG, only=only, seconds=OPTIONS.seconds or 10.0)
    if not rungs:
        raise UserError(f"--only {' '.join(only)}: nothing can be measured here; add another rung")
    earlier = {rung["name"]: median(rung["rates"]) for rung in EARLIER}
    picture = chart(rungs, f"{about}; red: the limit")
    return {"rungs": [asdict(r) for r in rungs]}, table(rungs, earlier), picture


def measure_sweep(
    about: str, asked: dict[str, list[Any]]
) -> tuple[dict[str, Any], str, Image.Image]:
    """Measure the cells; return the contents of sweep.json, the console and sweep.png.

    Raises:
        LoaderError: No setting can run.
    """
    alone, cells = run_sweep(CONFIG, asked, seconds=OPTIONS.seconds or 4.0)
    best, knee = sweep.best(cells), sweep.knee(cells)
    if best is None or knee is None:
        raise LoaderError(f"no setting can run: {cells[0].failed}")
    earlier = {
        sweep.Setting(**cell["setting"]): median(cell["train"]) for cell in EARLIER if cell["train"]
    }
    content = {
        "step": alone.rates,
        "best": asdict(best.setting),
        "knee": asdict(knee.setting),
        "cells": [asdict(c) for c in cells],
    }
    fewest = f"knee, {sweep.KNEE} of it: {knee.setting.workers}"
    title = f"{about}: best with {best.setting.workers} workers; {fewest}"
    return content, sweep.table(cells, alone.rate, earlier), heat_map(cells, title)


if __name__ == "__main__":
    sys.exit(main())
