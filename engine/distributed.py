"""Which rank this is, on which device, and how ranks agree. One process is a world of one."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import UserError, show

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among the ranks that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Rank 0 alone writes and speaks."""
        return self.rank == 0

    def agree(self, decide: Callable[[], T]) -> T:
        """Rank 0 decides, every rank gets its answer, or raises its error."""
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = decide()
            except Exception as error:
                box[1] = error
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        answer: T = box[0]
        return answer

    def gather(self, value: T) -> list[T]:
        """What every rank has, in the order of the ranks; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_or_none(self, attempt: Callable[[], T]) -> list[T]:
        """What `attempt` gives on every rank; the mistake that one finds is raised on all. Collective."""
        outcome: T | UserError
        try:
            outcome = attempt()
        except UserError as error:
            outcome = error
        found: list[T] = []
        for value in self.gather(outcome):
            if isinstance(value, UserError):
                raise value
            found.append(value)
        return found

    def of_node(self, values: list[T]) -> list[T]:
        """Of one value for each rank, those of this node's ranks."""
        first = self.rank - self.local_rank
        return values[first : first + self.local_size]

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers: BatchNorm statistics differ by rank, validation must not."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wrap(self, model: nn.Module, example: Tensor) -> nn.Module:
        """The module to call in training: averages gradients over the ranks.

        DDP puts gradients into its buckets anew after the first backward pass, and three or more ranks' sums then round
        differently. A pass over `example`, a batch, leaves that behind: the first step after a restart is like any other.
        In evaluation mode it changes no buffer and draws no random number.
        """
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        network = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        # Shared before validation instead of at every step. Not an argument: torch 2.13 warns of it, 2.10 has no other.
        network.broadcast_buffers = False
        network.eval()
        network(example.to(self.device)).sum().backward()
        network.zero_grad(set_to_none=True)
        return network.train()


def resolve_device(choice: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """The device `train.device` stands for.

    Raises:
        UserError: there are fewer GPUs than ranks on this node; every rank of the node says so, none waits for the others.
    """
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and have == 0):
        return torch.device("cpu")
    need = max(local_size, local_rank + 1)
    if need > have:
        raise UserError(f"train.device={choice}: torch sees {have} GPUs, this node has {need} rank(s); "
                        "start fewer ranks or use train.device=cpu")  # fmt: skip
    return torch.device("cuda", local_rank)


def same_on_all_ranks(values: list[dict[str, Any]]) -> None:
    """Refuse ranks that would train different things, or wait for each other.

    Args:
        values: the values that must be equal, by name: a dictionary of each rank, in rank order.

    Raises:
        UserError: names the first difference; every rank raises it.
    """
    for rank, own in enumerate(values):
        for name, value in own.items():
            first = values[0].get(name)
            if value != first:
                raise UserError(
                    f"{name}: is {show(value)} on rank {rank} and {show(first)} on rank 0; "
                    "give every rank the same command and the same data"
                )


@contextmanager
def join_world(device_choice: str) -> Iterator[World]:
    """Join the ranks torchrun started (its environment variables), or be a world of one; leave on exit."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = resolve_device(device_choice, local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(
        rank=int(os.environ.get("RANK", 0)),
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
    )
    if size == 1:
        yield world
        return
    # gloo beside NCCL carries objects and the stop flag without touching the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield world
    finally:
        dist.destroy_process_group()


class StopSignal:
    """Notes SIGINT, SIGTERM and SIGUSR1, so that the loop can save and leave.

    A second Ctrl-C interrupts at once. With several ranks, a signal to one of them stops all at the
    same step: while a step runs, the highest signal of all ranks is found, and the next call of
    `poll` reads it.

    Attributes:
        received: the signal that this process received; 0 for none.
        number: the signal that all ranks stop for, as of the last `poll`; 0 for none.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, world: World) -> None:
        self.world = world
        self.received = 0
        self.number = 0
        self._highest: Tensor | None = None
        self._work: Any = None

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        work, self._work = self._work, None
        if work is not None and kind is None:
            work.wait()  # gloo can abort if its group is destroyed during an exchange

    def __bool__(self) -> bool:
        """Return whether training stops now: the same answer on every rank."""
        return self.number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def poll(self) -> None:
        """Update `number`. Every rank calls this once per step."""
        if self.world.size == 1:
            self.number = self.received
            return
        if self._work is not None and self._highest is not None:
            self._work.wait()
            self.number = int(self._highest)
        if self.number == 0:
            self._highest = torch.tensor(self.received)
            self._work = dist.all_reduce(self._highest, op=dist.ReduceOp.MAX, async_op=True)
