"""Benchmark the loader, the training step, and both together.

    python scripts/bench.py data.root=/imagenet

Accepts train.py's key=value overrides. Warms up each stage, measures it in several windows, and
prints the median window and the range, followed by the verdict on the stage `train`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per measurement (10)")
    OPTIONS, CONFIG = parser.read_config()

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch

import train
from conf import schema
from conf.errors import UserError
from conf.schema import Config
from engine.distributed import World, join_world
from engine.log.verdict import verdict_of
from engine.memory import fit_memory
from engine.meter import Meter
from engine.run import Parts, resolve_config
from pipeline.feed.batch import Batch
from pipeline.feed.clock import StepClock
from pipeline.feed.feed import Feed, open_feed
from scripts.lib.trained import run_main

WINDOWS = 5
FOREVER = 1 << 40  # steps
KEPT_BATCHES = 4  # batches that stay on the device to measure the step alone
WARM_UP_STEPS = {"cuda": 20}  # device type -> steps; default 2


class Stage(NamedTuple):
    name: str
    rates: list[float]  # images/s in each window
    note: str  # text for the table; may have more lines, printed below the row


def measure_stages(config: Config, *, seconds: float) -> Iterator[Stage]:
    """Measure loader, step and train. Raises UserError if the config or the data are invalid."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # check first: joined ranks wait for each other
        raise UserError("torchrun", "this script measures one process", "run it without torchrun")
    with join_world(config.train.device) as world:
        config = for_measuring(resolve_config(config, world), world)
        parts = train.build_parts(config, world, {})
        yield measure_loader(parts, world, seconds)
        yield from measure_steps(parts, world, seconds)


def for_measuring(config: Config, world: World) -> Config:
    """Return a config that never diverges, however many steps, and compiles the model on CUDA."""
    optim = replace(config.optim, lr=1e-3)
    schedule = schema.ScheduleConfig("constant")
    config = replace(config, optim=optim, schedule=schedule)
    if config.model.compile == "auto" and world.device.type == "cuda":  # even if the run is short
        model = replace(config.model, compile="default")
        config = replace(config, model=model)
    return config


def measure_loader(parts: Parts, world: World, seconds: float) -> Stage:
    """Measure how fast the loader delivers complete batches in host memory."""
    with open_feed(parts.schedule.config, parts.datasets, world) as feed:
        batches = feed.train.loader.batches(0, FOREVER)
        sizes = (len(batch.samples) for batch in batches)
        warm_up(sizes, feed)
        note = f"{feed.pool.active} workers, batch {feed.config.loader.batch_size}"
        return Stage("loader", measure_windows(sizes, seconds), note)


def measure_windows(
    sizes: Iterator[int], seconds: float, finish: Callable[[], None] = lambda: None
) -> list[float]:
    """Return the images per second in each of WINDOWS windows, which take `seconds` in total.

    `sizes` processes a batch and yields its number of images; `finish` waits for completion.
    """
    rates = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        done = next(sizes)
        while time.perf_counter() - began < seconds / WINDOWS:
            done += next(sizes)
        finish()
        rates.append(done / (time.perf_counter() - began))
    return rates


def warm_up(sizes: Iterator[int], feed: Feed) -> None:
    """Consume the batches that were decoded before the measurement."""
    decoded = feed.train.loader.ring.slots + feed.train.depth
    take(sizes, decoded)


def take(sizes: Iterator[int], steps: int) -> None:
    for _ in range(steps):
        next(sizes)


def measure_steps(parts: Parts, world: World, seconds: float) -> Iterator[Stage]:
    """Measure train.py's training step with batches kept on the device, then with the loader."""
    compute, schedule = parts.compute, parts.schedule
    config = schedule.config
    device = world.device
    meter = Meter(world, StepClock(device.type == "cuda"))

    def trained(batches: Iterable[Batch]) -> Iterator[int]:
        for batch in batches:
            meter.add(step(batch))
            yield len(batch.samples)

    finish = torch.get_device_module(device).synchronize
    with open_feed(config, parts.datasets, world, compute.dtype, compute.channels_last) as feed:
        step = train.TrainStep(parts, feed.mix)
        kept = [batch.clone() for batch in feed.train.batches(0, KEPT_BATCHES)]
        fit_memory(step, schedule, world, kept[:1])
        sizes = trained(cycle(kept))
        take(sizes, WARM_UP_STEPS.get(device.type, 2))
        finish()
        alone = measure_windows(sizes, seconds, finish)
        note = f"{config.model.name}, batch {schedule.batch_size}, {compute.precision}"
        note = f"{note}, compile {compute.compile_mode}, batch already on the device"
        yield Stage("step", alone, note)
        sizes = trained(feed.train.batches(0, FOREVER))
        warm_up(sizes, feed)
        finish()
        feed.step_times()
        fed = measure_windows(sizes, seconds, finish)
        if device.type != "cpu":
            feed.step_rate = median(alone)  # used by the verdict
        ranks = world.all_gather(feed.step_times())
        verdict = verdict_of(ranks, 0.0, feed, step.disabled_reason)
    lines = ["the step, fed by the loader"]
    lines += [f"verdict   {sentence}" for sentence in verdict]
    yield Stage("train", fed, "\n".join(lines))


def main() -> int:
    for stage in measure_stages(CONFIG, seconds=OPTIONS.seconds):
        slowest = min(stage.rates)
        fastest = max(stage.rates)
        rate = f"{median(stage.rates):>10,.0f} images/s  ({slowest:,.0f}-{fastest:,.0f})"
        print(f"{stage.name:<12} {rate}  {stage.note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
