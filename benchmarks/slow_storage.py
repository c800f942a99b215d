#!/usr/bin/env python3
"""Compare loader.workers=auto with fixed numbers of workers on slow storage.

Hardware: one GPU with 2, 4 and 16 cores. Time: 2 minutes per delay with 2 or 4 cores, 5 with 16.
Needs: an active .venv, and class folders with real JPEGs. Delays each read by --delays ms.

    taskset -c 0-3 python3 benchmarks/slow_storage.py data.root=/imagenet loader.decoder=region

Loads batches without a model, so `auto` expects a step that is faster than the workers. Each round
measures all numbers in turn. A row has the median images/s over the rounds, and its ratio to the
best fixed number. Accepts train.py's key=value overrides.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.data.index import Index, Storage, find_split

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # workers, up to twice the cores
SETTLE_SECONDS = 1.0  # wait after changing the number of workers
START_SECONDS = 5.0  # wait until workers added by `auto` have started and prefetch


@dataclass(frozen=True)
class SlowStorage(Storage):
    path: str
    storage: Storage
    seconds: float  # delay of each read

    def read(self, name: str, start: int, length: int) -> bytes:
        time.sleep(self.seconds)
        return self.storage.read(name, start, length)


def slow(place: str, seconds: float) -> Callable[[str], Index] | None:
    """Find a split like data.storage does, and delay its reads."""
    load = find_split(place)
    return load and partial(load_slow, load, seconds)


def load_slow(load: Callable[[str], Index], seconds: float, key: str) -> Index:
    index = load(key)
    sources = [SlowStorage(source.path, source, seconds) for source in index.sources]
    return replace(index, sources=sources)


class NoStep:
    """A training step that is faster than the workers."""

    steps_before_capture = 0

    def __call__(self, batch: Any) -> None:
        batch.fields["image"].sum()


@contextmanager
def opened(words: list[str], workers: str | int) -> Iterator[tuple[Any, Iterator[int]]]:
    """Yield a feed and the number of images in each of its batches."""
    from conf.compose import from_overrides
    from engine.distributed import join_world
    from engine.tune import Tuner
    from pipeline.data.build import build_datasets
    from pipeline.feed import feed

    feed.is_measured = lambda config, _: config.loader.workers == "auto"  # including CPUs
    config = from_overrides([*words, f"loader.workers={workers}"])
    with join_world(config.train.device) as world:
        datasets = build_datasets(config, world.device)
        with feed.open_feed(config, datasets, world) as opened_feed:
            if workers == "auto":
                Tuner(opened_feed, world).start(NoStep(), 0)
            source = opened_feed.train
            if world.device.type == "cpu":  # would normalize the images in this process
                source = source.loader
            yield opened_feed, (len(batch.samples) for batch in source.batches(0, sys.maxsize))


def measure(sizes: Iterator[int], seconds: float, settle: float = SETTLE_SECONDS) -> float:
    """Return images/s between the ends of two batches."""
    began = time.perf_counter()
    while time.perf_counter() - began < settle:
        next(sizes)
    images = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        images += next(sizes)
    return images / (time.perf_counter() - began)


def compare(words: list[str], options: argparse.Namespace, cores: int) -> None:
    """Print the rates of `auto` and fixed numbers of workers for one delay."""
    numbers = [number for number in NUMBERS if number <= 2 * cores]
    rates: dict[Any, list[float]] = {name: [] for name in ("auto", *numbers)}
    for turn in range(1, options.rounds + 1):
        with opened(words, "auto") as (feed, sizes):
            chosen = f"{feed.pool.active} {feed.decoder_name}"
            rates["auto"].append(measure(sizes, options.seconds, START_SECONDS))
        with opened(words, numbers[-1]) as (feed, sizes):
            measure(sizes, 0.0, START_SECONDS)
            for number in numbers:
                feed.pool.activate(number)
                rates[number].append(measure(sizes, options.seconds))
        newest = "  ".join(f"{name}: {found[-1]:,.0f}" for name, found in rates.items())
        print(f"round {turn}  auto={chosen}  {newest}", flush=True)
    medians = {name: median(found) for name, found in rates.items()}
    best = max(medians[number] for number in numbers)
    for name, rate in medians.items():
        print(f"{name!s:>8} workers {rate:>8,.0f} images/s {rate / best:>6.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("overrides", nargs="+", help="data.root=FOLDER and other key=value")
    parser.add_argument("--device", default="cuda", help="cpu loads into host memory (cuda)")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 5, 20, 50], help="ms")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per number (2)")
    options = parser.parse_args()
    from pipeline.feed import machine

    cores = machine.cores()
    for delay in options.delays:
        print(f"\n{cores} cores, {delay:g} ms per file", flush=True)
        storage = f"data.storage={{benchmarks.slow_storage:slow: {{seconds: {delay / 1000}}}}}"
        words = [*options.overrides, f"train.device={options.device}", "optim.lr=0.1", storage]
        compare(words, options, cores)


if __name__ == "__main__":
    main()
