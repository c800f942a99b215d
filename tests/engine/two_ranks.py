"""Checks that test_distributed.py runs on both of two ranks; each checks its own results."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from conf.errors import UserError
from engine import memory
from engine.distributed import World, average_gradients, join_world
from engine.metrics import Values
from engine.state import TrainState, params_sha256
from engine.stop_signal import StopSignal
from engine.validation import evaluate, validation_batches
from pipeline.feed.batch import Batch
from pipeline.feed.loader import Pool
from tests.engine.plans import FunctionStep, schedule
from tests.helpers.batches import batch_of, toy_loss
from train import train_step


def raise_on(world: World, rank: int) -> Path:
    if world.rank == rank:
        raise UserError("no memory")
    return Path()


def check_objects(world: World) -> None:
    """Check results from one rank, and that its error is raised on both."""
    own = Path(f"runs/{world.rank}")
    assert world.on_rank_0(lambda: own) == Path("runs/0")
    assert world.all_gather({"path": own}) == [{"path": Path(f"runs/{rank}")} for rank in (0, 1)]
    with pytest.raises(UserError, match="no memory"):
        world.on_rank_0(lambda: raise_on(world, 0))
    with pytest.raises(UserError, match="no memory"), world.shared_errors():
        raise_on(world, 1)


def check_tensors(world: World) -> None:
    values = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    assert world.all_reduce(values) is values
    assert values.tolist() == [3, 30]
    assert (world.max(world.rank), world.max(-world.rank)) == (1, 0)
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(world.rank + 1)
    model.num_batches_tracked.fill_(world.rank + 5)
    nn.init.constant_(model.weight, world.rank + 7)
    world.broadcast(model.buffers())
    assert (model.running_mean.tolist(), model.num_batches_tracked) == ([1, 1, 1], 5)
    assert model.weight[0] == world.rank + 7


class ScaledNorm(nn.BatchNorm1d):  # scales only in training
    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight if self.training else 1
        return scale * nn.functional.batch_norm(
            input, self.running_mean, self.running_var, bias=self.bias, training=self.training
        )


def called_with(*shape: int) -> Callable[[nn.Module], Tensor]:
    """Return a function that calls a network with an example of this shape."""
    return lambda network: cast("Tensor", network(torch.zeros(1, *shape)))


def check_running_statistics(world: World) -> None:
    """Check that each rank keeps its own statistics."""
    norm = ScaledNorm(3)
    network = world.wrap(norm, called_with(3))
    for _ in range(2):
        network(torch.full((2, 3), float(world.rank))).sum().backward()
    assert norm.running_mean.tolist() == pytest.approx([0.19 * world.rank] * 3)


def check_unused_layers(world: World) -> None:
    """Use a different layer on each rank."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    model[world.rank](torch.ones(1, 1)).sum().backward()
    average_gradients(model)
    assert [layer.weight.grad.item() for layer in model] == [0.5, 0.5]


def classifier() -> TrainState:
    """Return a state with channels_last weights and a frozen layer."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 4, 2), nn.Conv2d(4, 4, 1)
    layers = *convolutions, nn.Flatten(), nn.GELU(), nn.Linear(4, 3), nn.Linear(3, 3)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    model[5].requires_grad_(False)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def check_accumulation(world: World) -> None:
    """Train each rank on half a batch in micro-batches; `wrap` gives both the same weights."""
    state, whole = classifier(), classifier()
    if world.rank == 1:
        nn.init.zeros_(state.model[0].weight)
    images, labels = torch.randn(8, 3, 2, 2), torch.randint(0, 3, (8,))
    rows = slice(4 * world.rank, 4 * world.rank + 4)
    exchanged = []

    def in_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    network = world.wrap(state.model, called_with(3, 2, 2))
    assert (network is state.model) == (world.local_size == 2)
    if isinstance(network, nn.parallel.DistributedDataParallel):
        network.register_comm_hook(None, in_bucket)
    for step in range(3):
        batch = batch_of(step, image=images[rows], label=labels[rows])
        train_step(state, network, toy_loss, batch, num_micro_batches=3)
    assert len(exchanged) == (0 if network is state.model else 3)
    alone = replace(world, size=1, local_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        for step in range(3):
            network = alone.wrap(whole.model, called_with(3, 2, 2))
            train_step(whole, network, toy_loss, batch_of(step, image=images, label=labels))
    for layer in (0, 1, 4):
        found, expected = (one.model[layer].weight.detach() for one in (state, whole))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert state.model[5].weight.grad is None
    assert next(iter(state.model.state_dict())) == "0.weight", "expected no prefix `module.`"


def check_memory(world: World) -> None:
    """Rank 1 has memory for 3 of the 8 images per rank. Rank 0 has more, but follows."""
    batch = batch_of(image=torch.randn(8, 3, 2, 2), label=torch.randint(0, 3, (8,)))
    state = classifier()
    network = world.wrap(state.model, called_with(3, 2, 2))

    def loss(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
        if world.rank == 1 and len(batch.samples) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return toy_loss(network, batch)

    plan = schedule(batch=16, ranks=2)

    def launch(batch: Batch) -> Values:
        number = plan.num_micro_batches
        return train_step(state, network, loss, batch, num_micro_batches=number)

    step = FunctionStep(network, state, launch)
    before = params_sha256(state.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "TRIED_ON", ("cpu",))
        memory.fit_memory(step, plan, world, [batch])
    assert (plan.num_micro_batches, plan.fitted_micro_batch) == (4, 2)
    assert params_sha256(state.model) == before
    assert not state.optimizer.state
    step(batch)
    after = params_sha256(state.model)
    assert {*world.all_gather(after)} == {after} != {before}


def check_stops(world: World) -> None:
    """Stop both ranks before the same step by a signal to one of them."""
    term, usr1, interrupt = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    for signals, number, last in (
        ({1: (5, usr1)}, usr1, 5),
        ({0: (3, interrupt), 1: (3, term)}, term, 3),  # the higher number wins
        ({0: (0, term)}, term, 0),
    ):
        with StopSignal(world, Pool([])) as stop:
            for step in range(1000):
                if world.rank in signals and signals[world.rank][0] == step:
                    os.kill(os.getpid(), signals[world.rank][1])
                if world.rank == 1:
                    time.sleep(0.001)  # ranks run at different speeds
                if stop.poll():
                    break
            assert (step, stop.number, stop.poll()) == (last, number, True)


def check_validation_stops(world: World) -> None:
    """A signal to one rank, before its second batch, ends both ranks' validation."""
    batches = [batch_of(step, label=torch.zeros(2)) for step in range(3)]
    for stopped_after, found in ((None, 3), (2, 1)):
        with StopSignal(world, Pool([])) as stop:

            def val(first: int, last: int, after: int | None = stopped_after) -> Iterator[Batch]:
                for number, batch in enumerate(batches[first:last], 1):
                    if number == after and world.rank == 1:
                        signal.raise_signal(signal.SIGTERM)
                    yield batch

            feed: Any = SimpleNamespace(val=SimpleNamespace(batches=val), num_val_batches=3)
            assert len([*validation_batches(feed, stop, num_micro_batches=2)]) == 2 * found
    (nothing,) = evaluate([nn.Identity()], lambda *_: {}, [], world)  # before the first batch
    assert nothing.images == 0


def check_equal_weights(world: World) -> None:
    """Include a 2-byte dtype and the channels_last layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(3, 4, 3), nn.Linear(2, 1).bfloat16())
    model.to(memory_format=torch.channels_last)
    assert world.has_equal_weights(model)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter[0] += 0.01 * world.rank
        assert not world.has_equal_weights(model)
        nn.init.constant_(parameter, 0.5)


def main() -> None:
    with join_world("cpu") as world:
        assert (world.size, world.local_size, world.device.type) == (2, 2, "cpu")
        check_objects(world)
        check_tensors(world)
        for each in (world, replace(world, local_size=1)):  # a separate node for each
            check_running_statistics(each)
            check_accumulation(each)
            check_memory(each)
        check_unused_layers(world)
        check_stops(world)
        check_validation_stops(world)
        check_equal_weights(world)
        print(f"rank {world.rank} is done")


if __name__ == "__main__":
    main()
