"""Measure the throughput of each stage: loader, step, end to end.

    python scripts/bench.py data.root=/imagenet
    python scripts/bench.py data.root=/imagenet --only step

Accepts train.py's key=value overrides. Each stage is warmed up and then measured in windows; the
table shows the median window and the range, and then the verdict on the stage `train`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

STAGES = ("loader", "step", "train")

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement (10)")
    OPTIONS, CONFIG = parser.read_config()

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import median

import torch

import train
from conf import schema
from conf.schema import Config
from engine.distributed import World, join_world
from engine.log.verdict import judge
from engine.memory import fit_memory
from engine.meter import Meter
from pipeline.batch import Batch
from pipeline.feed import Feed, open_feed
from scripts.lib.trained import exit_status

WINDOWS = 5
FOREVER = 1 << 40  # steps
Stage = tuple[str, list[float], str]
"""Name, images/s in each window, and a remark for the table, perhaps with lines below it."""


def measure_stages(config: Config, *, only: Sequence[str], seconds: float) -> Iterator[Stage]:
    """Measure some of STAGES, in their order. Raises UserError if config or data are wrong."""
    with join_world(config.train.device) as world:
        config = train.resolve_config(config, world)
        # With a small learning rate, no number of steps diverges.
        slow, constant = replace(config.optim, lr=1e-3), schema.ScheduleConfig("constant")
        config = replace(config, optim=slow, schedule=constant)
        if config.model.compile == "auto" and world.device.type == "cuda":  # also for a short run
            config = replace(config, model=replace(config.model, compile="default"))
        parts = train.build_parts(config, world, {})
        datasets, compute = parts.datasets, parts.compute
        if "loader" in only:
            with open_feed(config, datasets, world, compute.dtype, compute.channels_last) as feed:
                # Complete batches in host memory, as fast as the loader delivers them.
                sizes = (len(batch.samples) for batch in feed.train.loader.batches(0, FOREVER))
                warm_up(sizes, feed)
                note = f"{feed.pool.active} workers, batch {config.loader.batch_size}"
                yield "loader", windows(sizes, seconds), note
        if "step" in only or "train" in only:
            yield from (stage for stage in measure_steps(parts, world, seconds) if stage[0] in only)


def windows(
    sizes: Iterator[int], seconds: float, finish: Callable[[], None] = lambda: None
) -> list[float]:
    """Measure images per second in each of WINDOWS windows, which take `seconds` together.

    `sizes` processes a batch, and yields its images; `finish` waits until they are complete.
    """
    rates = []
    for _ in range(WINDOWS):
        began, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - began < seconds / WINDOWS:
            done += next(sizes)
        finish()
        rates.append(done / (time.perf_counter() - began))
    return rates


def warm_up(sizes: Iterator[int], feed: Feed) -> None:
    """Take the batches that were decoded before the measurement."""
    for _ in range(feed.train.loader.ring.slots + feed.train.depth):
        next(sizes)


def measure_steps(parts: train.Parts, world: World, seconds: float) -> list[Stage]:
    """Measure train.py's optimiser step, on four batches that stay on the device and then fed."""
    datasets, compute, state = parts.datasets, parts.compute, parts.state
    config = parts.schedule.config
    train_on_batch = train.build_step(parts.schedule, compute, parts.loss_fn, state, world)
    meter = Meter(world)

    def trained(batches: Iterable[Batch]) -> Iterator[int]:
        for batch in batches:
            meter.add(train_on_batch(batch))
            yield len(batch.samples)

    finish = torch.get_device_module(world.device).synchronize
    with open_feed(config, datasets, world, compute.dtype, compute.channels_last) as feed:
        kept = [batch.clone() for batch in feed.train.batches(0, 4)]
        fit_memory(parts.schedule, train_on_batch, state, world, kept[:1])
        sizes = trained(cycle(kept))
        for _ in range(20 if world.device.type == "cuda" else 2):
            next(sizes)
        finish()
        alone = windows(sizes, seconds, finish)
        sizes = trained(feed.train.batches(0, FOREVER))
        warm_up(sizes, feed)
        finish()
        feed.step_times()
        fed = windows(sizes, seconds, finish)
        feed.step_rate = median(alone) if world.device.type != "cpu" else 0.0  # for the verdict
        verdict = judge([feed.step_times()], 0.0, world, feed)
    note = f"{config.model.name}, batch {parts.schedule.batch_size}, {compute.precision}, "
    note += f"compile {compute.compile_mode}, batch already on the device"
    lines = ["the step, fed by the loader", *(f"verdict   {line}" for line in verdict.sentences)]
    return [("step", alone, note), ("train", fed, "\n".join(lines))]


def main() -> int:
    for name, rates, note in measure_stages(CONFIG, only=OPTIONS.only, seconds=OPTIONS.seconds):
        spread = f"({min(rates):,.0f}-{max(rates):,.0f})"
        print(f"{name:<12} {median(rates):>10,.0f} images/s  {spread}  {note}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
