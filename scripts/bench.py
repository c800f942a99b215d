"""Measure where the time goes, rung by rung: read, decode, loader, copy, step, end to end.

    python scripts/bench.py data.root=/imagenet
    python scripts/bench.py data.root=/imagenet model=resnet18 --only loader step train --compare earlier.json

Takes train.py's key=value overrides. Every rung is warmed up first and then measured in windows; the table gives the median
window and the range. Writes bench.json and bench.png to --out.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf import cli

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as train.py does, before torch is imported

RUNGS = ("read", "decode", "loader", "copy", "step", "train")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNGS, default=RUNGS, metavar="RUNG", help=f"some of: {', '.join(RUNGS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="time to measure each rung for")
    parser.add_argument("--compare", type=Path, help="an earlier bench.json: shows the ratio of every rung")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for bench.json and bench.png")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="bench.py", purpose="Measure where the time goes.")
    if not OPTIONS.seconds > 0:
        cli.fail(f"--seconds {OPTIONS.seconds}: give a number > 0", "bench.py")
    if OPTIONS.compare and not OPTIONS.compare.is_file():
        cli.fail(f"--compare {OPTIONS.compare}: no such file", "bench.py")

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

import train
from conf.schema import Config, UserError
from engine import checkpoint, meters
from engine.distributed import World, join_world
from engine.plan import Plan
from pipeline.build import Datasets, Feed, build_datasets, open_feed
from pipeline.dataset import FolderDataset
from pipeline.loader import LoaderError
from pipeline.memory import plan_memory

WINDOWS = 5


@dataclass(frozen=True)
class Rung:
    """One measurement.

    Attributes:
        rates: one per window, in `unit`.
        note: what else a reader wants to know.
    """

    name: str
    unit: str
    rates: list[float]
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return median(self.rates)


def run(config: Config, *, only: tuple[str, ...] = RUNGS, seconds: float = 10.0) -> list[Rung]:
    """Measure the rungs asked for, lowest first.

    Raises:
        UserError: the config or the data is not as it must be.
    """
    with join_world(config.train.device) as world:
        datasets = build_datasets(config)
        plan = train.make_plan(config, datasets, world)
        plan_memory(config, datasets, workers=plan.workers, decoder=plan.decoder, device=world.device, dtype=plan.input_dtype)
        train.set_up_torch(config, plan)
        found: list[Rung] = []
        if isinstance(datasets.train, FolderDataset):
            if "read" in only:
                found.append(measure_read(datasets.train, seconds))
            if "decode" in only:
                found.append(measure_decode(datasets.train, seconds, plan))
        if "loader" in only:
            with feed_of(config, datasets, plan, world) as feed:
                found.append(measure_loader(feed, plan, seconds))
        if "copy" in only and world.device.type == "cuda":
            found.append(measure_copy(plan, world.device))
        if "step" in only or "train" in only:
            found += [r for r in measure_steps(config, datasets, plan, world, seconds) if r.name in only]
    return found


def feed_of(config: Config, datasets: Datasets, plan: Plan, world: World) -> AbstractContextManager[Feed]:
    return open_feed(config, datasets, workers=plan.workers, decoder=plan.decoder, device=world.device, dtype=plan.input_dtype,
                     channels_last=plan.channels_last)  # fmt: skip


def windows(step: Callable[[], int], seconds: float, finish: Callable[[], None] = lambda: None) -> list[float]:
    """Units per second in each of WINDOWS windows; `step` does some and returns how many, `finish` waits for them."""
    rates = []
    for _ in range(WINDOWS):
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / WINDOWS:
            done += step()
        finish()
        rates.append(done / (time.perf_counter() - began))
    return rates


def measure_read(dataset: FolderDataset, seconds: float) -> Rung:
    """Whole files, one after the other, spread over the dataset: as the page cache and the disk give them."""
    sizes: list[int] = []
    places = scattered(len(dataset))

    def read() -> int:
        with open(dataset.name(next(places)), "rb") as file:
            sizes.append(len(file.read()))
        return 1

    rates = windows(read, seconds / 2)
    mean = sum(sizes) / len(sizes)
    return Rung("read", "images/s", rates, f"one process, {mean / 1e3:.0f} kB a file, {mean * median(rates) / 1e6:,.0f} MB/s")


def measure_decode(dataset: FolderDataset, seconds: float, plan: Plan) -> Rung:
    """Decode, crop, resize and flip in one process: what one worker can give."""
    places = scattered(len(dataset))

    def decode() -> int:
        dataset.load(0, next(places))
        return 1

    torch.set_num_threads(1)
    for _ in range(50):
        decode()
    rates = windows(decode, seconds)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return Rung("decode", "images/s", rates, f"one core, decoder {plan.decoder}, to {plan.image_size} px")


def measure_loader(feed: Feed, plan: Plan, seconds: float) -> Rung:
    """Complete batches in host memory, taken as fast as they come."""
    batches = feed.train.loader.batches(0, 1 << 40)

    def take() -> int:
        batch = next(batches)
        batch.release(None)
        return len(batch.labels)

    for _ in range(2 * feed.train.loader.slots):  # until what was decoded while the workers started is gone
        take()
    return Rung("loader", "images/s", windows(take, seconds), f"{plan.workers} workers, batch {plan.batch_size}")


def measure_copy(plan: Plan, device: torch.device) -> Rung:
    """One batch to the GPU, eight ways: why pinning and non_blocking matter."""
    shape = (plan.batch_size, 3, plan.image_size, plan.image_size)
    details = {}
    for dtype in (torch.uint8, torch.float32):
        for pinned in (False, True):
            source = torch.randint(0, 255, shape, dtype=torch.uint8).to(dtype)
            source = source.pin_memory() if pinned else source
            target = torch.empty(shape, dtype=dtype, device=device)
            for non_blocking in (False, True):
                name = f"{str(dtype)[6:]} {'pinned' if pinned else 'pageable'} {'non_blocking' if non_blocking else 'blocking'}"
                details[name] = time_copy(source, target, non_blocking)
    best = details["uint8 pinned non_blocking"]
    rates = [plan.batch_size / (ms / 1e3) for ms in best["all_ms"]]
    return Rung("copy", "images/s", rates, f"uint8, pinned: {best['gb_per_s']:.1f} GB/s", details)


def time_copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> dict[str, Any]:
    """Milliseconds of a copy, GB/s, and the share of that time in which the host was free to do other work."""
    total, free = [], []
    for i in range(25):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=non_blocking)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        if i >= 5:
            total.append((ended - began) * 1e3)
            free.append((ended - returned) / (ended - began))
    ms = median(total)
    return {"ms": ms, "gb_per_s": source.nbytes / ms / 1e6, "host_free": median(free), "all_ms": total}


def measure_steps(config: Config, datasets: Datasets, plan: Plan, world: World, seconds: float) -> list[Rung]:
    """The optimiser step on batches that lie on the device, then the same step fed from the files."""
    state = train.build_state(config, plan, world)
    network = world.wrap(state.model)
    objective = train.compiled(meters.objective, plan)
    meter = meters.Meter(world, plan.batch_size, 0)

    def finish() -> None:
        meter.total.sum().item()

    with feed_of(config, datasets, plan, world) as feed:
        batches = feed.train.batches(0, 1 << 40)

        def step(batch: Any) -> int:
            meter.add(train.train_step(state, network, objective, batch, lr=1e-3, config=config, plan=plan))
            return len(batch.labels)

        resident = [
            type(b)(b.images.clone(), b.labels.clone(), b.targets.clone(), b.step)
            for b, _ in zip(batches, range(4), strict=False)
        ]
        turn = 0

        def resident_step() -> int:
            nonlocal turn
            turn += 1
            return step(resident[turn % len(resident)])

        for _ in range(20 if world.device.type == "cuda" else 2):
            resident_step()
        finish()
        name = f"{config.model.name}, batch {plan.batch_size}, {plan.precision}, compile {plan.compile}"
        alone = Rung("step", "images/s", windows(resident_step, seconds, finish), f"{name}, batch already on the device")
        for _ in range(2 * feed.train.loader.slots):
            step(next(batches))
        finish()
        feed.train.timing()
        fed = windows(lambda: step(next(batches)), seconds, finish)
        timing = feed.train.timing()
        waits = f"; the device waited {100 * timing.wait_fraction:.0f} % of the time" if timing else ""
        whole = Rung("train", "images/s", fed, f"{median(fed) / alone.rate:.2f} of the step alone{waits}")
    return [alone, whole]


def scattered(count: int) -> Iterator[int]:
    """Positions far from each other, each once before any comes again."""
    stride = next(s for s in range(int(count * 0.618) or 1, 2 * count + 2) if _coprime(s, count))
    place = 0
    while True:
        place = (place + stride) % count
        yield place


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def table(rungs: list[Rung], earlier: dict[str, float]) -> str:
    """Aligned lines: rung, median rate, range, ratio to an earlier run, note."""
    lines = []
    for rung in rungs:
        ratio = f"  x{rung.rate / earlier[rung.name]:.2f}" if rung.name in earlier else ""
        spread = f"{min(rung.rates):,.0f}-{max(rung.rates):,.0f}"
        lines.append(f"{rung.name:<7} {rung.rate:>10,.0f} {rung.unit}  ({spread}){ratio}  {rung.note}")
        lines += [
            f"          {name:<30} {d['ms']:7.3f} ms  {d['gb_per_s']:6.1f} GB/s  host free {100 * d['host_free']:3.0f} %"
            for name, d in rung.details.items()
        ]
    return "\n".join(lines)


def chart(rungs: list[Rung], title: str) -> Image.Image:
    """A bar per rung, the narrowest one marked: that is what limits training."""
    rungs = [r for r in rungs if r.name not in ("read", "decode")] or rungs
    width, bar, left = 900, 44, 90
    image = Image.new("RGB", (width, 60 + bar * len(rungs) + 20), "white")
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(18), ImageFont.load_default(14)
    draw.text((16, 14), title, "black", font)
    most = max(r.rate for r in rungs)
    inputs = [r.rate for r in rungs if r.name != "train"]
    for i, rung in enumerate(rungs):
        top = 56 + i * bar
        length = max(2, int((width - left - 180) * rung.rate / most))
        limits = rung.name != "train" and rung.rate == min(inputs)
        draw.rectangle((left, top, left + length, top + bar - 16), fill="#c44e52" if limits else "#4c72b0")
        draw.text((16, top + 4), rung.name, "black", font)
        draw.text((left + length + 8, top + 5), f"{rung.rate:,.0f} {rung.unit}", "black", small)
    return image


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        rungs = run(CONFIG, only=tuple(OPTIONS.only), seconds=OPTIONS.seconds)
    except UserError as error:
        cli.fail(str(error), "bench.py")
    except LoaderError as error:
        cli.complain(str(error), "bench.py")
        return 1
    earlier = {}
    if OPTIONS.compare:
        earlier = {r["name"]: median(r["rates"]) for r in json.loads(OPTIONS.compare.read_text())["rungs"]}
    print(table(rungs, earlier))
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"machine": machine, "cores": len(os.sched_getaffinity(0)), "made_by": checkpoint.provenance(),
              "config": cli.to_yaml(CONFIG), "rungs": [asdict(r) for r in rungs]}  # fmt: skip
    checkpoint.write_json(OPTIONS.out / "bench.json", record)
    chart(rungs, f"{CONFIG.model.name} on {machine}, images/s; the red bar limits").save(OPTIONS.out / "bench.png")
    print(f"written to {OPTIONS.out}/bench.json and bench.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
