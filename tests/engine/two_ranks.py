"""One of the two ranks of test_distributed.py; writes its results as JSON to the given folder."""

import copy
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from conf.schema import UserError
from engine.distributed import StopSignal, World, average_gradients, join_world
from engine.log.meters import Meter
from engine.log.predictions import Predictions
from engine.state import TrainState, params_sha256
from engine.validation import evaluate
from pipeline.prefetcher import Batch
from train import train_step, training_loss, validation_values


def agreement(world: World) -> dict[str, Any]:
    decided = []

    def decide(answer: Any) -> Callable[[], Any]:
        def inner() -> Any:
            decided.append(answer)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return inner

    found: dict[str, Any] = {
        "values": [str(world.broadcast(decide(v))) for v in (Path("runs/a"), None, {"x": 1})],
        "errors": [],
    }
    for error in (UserError("run.dir=x: is a file"), OSError(28, "No space left on device")):
        try:
            world.broadcast(decide(error))
        except Exception as caught:
            found["errors"].append([type(caught).__name__, str(caught)])
    found["decided"] = len(decided)
    return found


def all_or_none(world: World) -> list[Any]:
    def attempt(limit: int) -> int:
        if world.rank >= limit:
            raise UserError(f"rank {world.rank} has no memory")
        return 10 * world.rank

    found: list[Any] = [world.on_all_ranks(lambda: attempt(2))]  # of this rank
    try:
        world.on_all_ranks(lambda: attempt(1))
    except UserError as error:
        found.append(str(error))
    return found


def gathering(world: World) -> dict[str, Any]:
    own = {"rank": world.rank, "path": Path(f"runs/{world.rank}"), "none": None}
    values = world.all_gather(own)
    return {
        "ranks": [value["rank"] for value in values],
        "paths": [str(value["path"]) for value in values],
        "of_node": [value["rank"] for value in world.local_values(values)],
    }


def sums(world: World) -> list[float]:
    values = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    assert world.sum(values) is values
    return values.tolist()


def buffers(world: World) -> dict[str, Any]:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(world.rank + 1)
    model.num_batches_tracked.fill_(world.rank + 5)
    with torch.no_grad():
        model.weight.fill_(world.rank + 7)
    world.broadcast_buffers(model)
    return {
        "mean": model.running_mean.tolist(),
        "count": int(model.num_batches_tracked),
        "weight_is_own": model.weight[0].item() == world.rank + 7,
    }


def several_nodes(world: World) -> World:
    """The same ranks, as if each ran on a node of its own."""
    return replace(world, local_size=1)


def gradients(world: World) -> dict[str, Any]:
    """Each rank trains on its half of a batch."""
    torch.manual_seed(0)
    model = small_convnet()
    if world.rank == 1:  # as if each rank had drawn its own weights
        nn.init.zeros_(model[0].weight)
    images = torch.randn(8, 3, 6, 6)
    share = images[4 * world.rank : 4 * world.rank + 4]
    network = world.wrap(model, torch.zeros(1, 3, 6, 6))
    apart = copy.deepcopy(model)
    for _ in range(2):
        network.zero_grad()
        network(share).square().mean().backward()
        average_gradients(network)
        apart(share)
    return {
        "is_model": network is model,
        "gradients": [model[i].weight.grad.tolist() for i in (0, 1, 4)],
        "frozen": model[5].weight.grad is None,
        "statistics_are_own": torch.equal(model[2].running_mean, apart[2].running_mean),
        "keys": list(model.state_dict())[:2],
    }


def small_convnet() -> nn.Sequential:
    """Return a network with a BatchNorm, weights in channels_last order and a frozen layer."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 2),
        nn.Linear(2, 2),
    )
    model[5].requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def layers_left_out(world: World) -> list[float | None]:
    """Each rank uses another layer."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    model[world.rank](torch.ones(1, 1)).sum().backward()
    average_gradients(model)
    return [layer.weight.grad.item() for layer in model]


def accumulation(world: World) -> dict[str, Any]:
    """Each rank trains on its half of a batch, in two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 3))
    images, labels = torch.randn(8, 3, 2, 2), torch.randint(0, 3, (8,))
    rows = slice(4 * world.rank, 4 * world.rank + 4)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    network = world.wrap(model, images[:1])
    exchanged = []

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    def counted(tensor: Tensor, **options: Any) -> Any:
        exchanged.append(len(tensor))
        return all_reduce(tensor, **options)

    all_reduce = dist.all_reduce
    if network is model:
        dist.all_reduce = counted
    else:
        network.register_comm_hook(None, average)
    for step in range(3):
        samples = torch.zeros(len(labels[rows]), 2, dtype=torch.int64)
        batch = Batch(images[rows], labels[rows], labels[rows], step, samples)
        train_step(state, network, training_loss, batch, lr=0.5, accumulate=2)
    dist.all_reduce = all_reduce
    return {"weight": model[3].weight.tolist(), "exchanged": len(exchanged)}


def divergence(world: World) -> dict[str, Any]:
    """Rank 1 has a NaN in an image of the second of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.5))
    network = world.wrap(model, torch.zeros(1, 3, 2, 2))
    weights, labels = [], torch.arange(3)
    for step in range(3):
        images = torch.randn(3, 3, 2, 2)
        if (step, world.rank) == (1, 1):
            images[0, 0, 0, 0] = math.nan
        batch = Batch(images, labels, labels, step, torch.zeros(3, 2, dtype=torch.int64))
        train_step(state, network, training_loss, batch, lr=0.5)
        weights.append(params_sha256(model))
    state.divergence.send(3)
    return {"weights": weights, "read": state.divergence.read()}


def validation(world: World) -> dict[str, Any]:
    """Rank 0 has three batches, rank 1 has two; the rest of the rows is padding."""
    torch.manual_seed(1)
    model, images, labels = nn.Linear(6, 8), torch.randn(25, 6), torch.randint(0, 8, (25,))
    own = torch.arange(world.rank, 25, world.size)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for part in own.split(5 if world.is_main else 7):
            fill = 7 - len(part)
            yield (
                torch.cat([images[part], torch.zeros(fill, 6)]),
                torch.cat([labels[part], torch.full((fill,), -1)]),
            )

    each: list[dict[str, Tensor]] = []
    (found,) = evaluate([model], validation_values, batches(), world, each)
    rows = Predictions.gather(each, world)
    return {
        "metrics": [found.loss, found.top1, found.top5, found.images],
        "labels": rows.labels.tolist(),
        "losses": rows.losses.tolist(),
    }


def metering(world: World) -> list[float]:
    meter = Meter(world)
    meter.add({"loss": torch.tensor(4.0) * (world.rank + 1), "top1": torch.tensor(25.0)})
    meter.send(1, lr=0.1)
    interval = meter.read()
    assert interval is not None
    return [*interval.values.values()]


def stopping(world: World, signals: dict[int, tuple[int, signal.Signals]]) -> list[int]:
    """Run until both ranks stop.

    Args:
        signals: rank -> (step at which the rank receives a signal, the signal).
    """
    with StopSignal(world) as stop:
        for step in range(1000):
            if world.rank in signals and signals[world.rank][0] == step:
                os.kill(os.getpid(), signals[world.rank][1])
            if world.rank == 1:
                time.sleep(0.001)  # ranks run at different speeds
            stop.poll()
            if stop:
                number = stop.number
                stop.poll()
                return [step, number, stop.number]
    return []


def after_a_failed_checkpoint(world: World) -> list[int]:
    """Run until both ranks stop: at step 4, rank 0 notices that its checkpoint failed."""
    step = 0
    with StopSignal(world, lambda: world.is_main and step >= 4) as stop:
        while not stop:
            step += 1
            stop.poll()
        return [step, stop.number]


def stalled(world: World, signalled: int) -> list[int]:
    """Rank 1 waits for input that never comes: for its third batch, then in a validation.

    Args:
        signalled: the rank that receives a signal while rank 0 waits for rank 1.
    """

    def batches() -> Iterator[int]:
        for step in range(1000):
            if step == 2 and world.rank == signalled:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            if step == 2 and world.rank == 1:
                time.sleep(100)  # hangs
            yield step

    with StopSignal(world) as stop:
        steps = list(stop.interruptible(batches()))
        world.sum(torch.zeros(1))  # rank 0 is as far as rank 1
    with StopSignal(world) as validating:
        images = validating.wait_for(lambda: next(islice(batches(), 2, None)))
        world.sum(torch.zeros(1))
        validating.poll()
    return [*steps, stop.number, validating.number, images or 0]


def from_outside(world: World, ready: Path) -> list[int]:
    """Run until the test sends a signal to one of the ranks."""
    with StopSignal(world) as stop:
        ready.write_text(str(os.getpid()))
        for step in range(100_000):
            time.sleep(0.001)
            stop.poll()
            if stop:
                return [step, stop.number]
    return []


@contextmanager
def time_limit(limit: int) -> Iterator[None]:
    """Kill this process after `limit` seconds, in case the test that started it is gone."""
    signal.alarm(limit)
    yield
    signal.alarm(0)


def main(folder: Path) -> None:
    with time_limit(120), join_world("cpu") as world:
        found = {
            "world": [
                world.rank,
                world.size,
                world.local_rank,
                world.local_size,
                str(world.device),
                world.is_main,
            ],
            "agreement": agreement(world),
            "gathering": gathering(world),
            "sums": sums(world),
            "buffers": buffers(world),
            "all_or_none": all_or_none(world),
            "gradients": [gradients(world), gradients(several_nodes(world))],
            "layers_left_out": layers_left_out(world),
            "accumulation": [accumulation(world), accumulation(several_nodes(world))],
            "divergence": divergence(world),
            "validation": validation(world),
            "metering": metering(world),
            "one_signalled": stopping(world, {1: (5, signal.SIGUSR1)}),
            "both_signalled": stopping(world, {0: (3, signal.SIGINT), 1: (3, signal.SIGTERM)}),
            "first_step": stopping(world, {0: (0, signal.SIGTERM)}),
            "signalled_once": stopping(world, {0: (2, signal.SIGUSR1)}),
            "after_a_failed_checkpoint": after_a_failed_checkpoint(world),
            "stalled_0": stalled(world, 0),
            "stalled_1": stalled(world, 1),
            "from_outside": from_outside(world, folder / f"ready-{world.rank}"),
        }
        (folder / f"found-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
