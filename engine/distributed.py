"""Ranks, their devices and their communication. A single process is a world of size 1."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it stores the group in default arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
from conf.errors import RunError, UserError, with_advice
from conf.schema import show
from engine.optim import trainable_parameters
from pipeline.feed.feed import RankInfo

T = TypeVar("T")
# Timeout of a collective in multiples of loader.timeout_seconds, because a rank may be compiling.
TIMEOUT_FACTOR = 10


class World(RankInfo):
    """The ranks of a run. All ranks must call Collective methods, in the same order."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints the run's lines and writes the run directory."""
        return self.rank == 0

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; all ranks return its result or raise its error. Collective."""
        result = None
        with self.shared_errors():
            if self.is_main:
                result = function()
        return cast("T", self.all_gather(result)[0])

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise a rank's error in the `with` block on all ranks when the block ends. Collective.

        Applies to UserError, RunError, and OSError, which becomes a UserError.
        """
        error: Exception | None = None
        try:
            yield
        except (UserError, RunError) as raised:
            error = raised
        except OSError as raised:
            error = UserError(with_advice(raised))
        for first in self.all_gather(error):
            if first is not None:
                raise first

    def all_gather(self, value: T) -> list[T]:
        """Return the values from all ranks, in rank order. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def check_same(self, values: dict[str, Any]) -> None:
        """Raise UserError for the first value that differs between ranks. Collective."""
        first, *others = self.all_gather(values)
        for rank, other in enumerate(others, start=1):
            for name in first | other:
                here, there = first.get(name), other.get(name)
                if here != there:
                    problem = f"is {show(there)} on rank {rank} and {show(here)} on rank 0"
                    raise UserError(name, problem, "start all ranks with the same command and data")

    def has_equal_weights(self, model: nn.Module) -> bool:
        """Return whether parameters have equal checksums on all ranks. Collective; synchronizes."""
        if self.size == 1:
            return True
        sums = []
        for weight in model.parameters():
            bits = weight.detach().view(getattr(torch, f"int{8 * weight.itemsize}"))
            sums.append(bits.sum(dtype=torch.int64))
        local = torch.stack(sums).tolist()
        return self.all_gather(local).count(local) == self.size

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values, op)
        return values

    def max(self, number: int) -> int:
        """Return the maximum over all ranks. Collective; does not synchronize the GPU."""
        return int(self.all_reduce(torch.tensor(number), dist.ReduceOp.MAX))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's tensors, such as BatchNorm statistics, to all ranks. Collective."""
        if self.size == 1:
            return
        for tensor in tensors:
            values = tensor.detach().contiguous()  # shares memory unless it is channels_last
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)

    def wrap(self, model: nn.Module, call: Callable[[nn.Module], Tensor]) -> nn.Module:
        """Return the module to call in training, `model` or DDP around it. Collective.

        On several nodes, DDP averages gradients during the backward pass, which hides the time that
        the network between nodes takes. On one node, `average_gradients` is faster, because DDP
        splits the compiled step into several graphs and copies each gradient. `call`: calls a
        network on an example batch.
        """
        if self.size == self.local_size:
            # A model may draw its initial weights without torch's generator.
            self.broadcast([*model.parameters(), *model.buffers()])
            return model
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # `World.broadcast` copies buffers before validation. torch 2.13 deprecates the argument.
        network.broadcast_buffers = False
        # DDP rebuilds its gradient buckets in the forward pass after the first backward pass. With
        # three or more ranks, sums round differently from then on. Run both here on an example, so
        # that the first step after a restart rounds like any other, and a step without averaging
        # waits for no rank. In eval mode, they change no buffer and draw no random number.
        network.eval()
        parameters = trainable_parameters(model)
        gradients = torch.autograd.grad(call(model).sum(), parameters, allow_unused=True)
        # DDP waits for gradients of all parameters, including a head used only in training.
        unused = [p.sum() for p, grad in zip(parameters, gradients, strict=True) if grad is None]
        (call(network).sum() + sum(unused)).backward()
        network.zero_grad(set_to_none=True)
        with network.no_sync():
            call(network)
        return models.train_mode(network)


@contextmanager
def on_this_rank_alone(network: nn.Module) -> Iterator[None]:
    """Disable gradient averaging within the block, because a step may fail on one rank."""
    network.trains_alone = True  # type: ignore[assignment]
    try:
        yield
    finally:
        del network.trains_alone


def set_ddp_sync(network: nn.Module, *, enabled: bool) -> None:
    """Set whether DDP averages gradients over all ranks in the next backward pass."""
    enabled = enabled and not hasattr(network, "trains_alone")
    network.require_backward_grad_sync = enabled  # type: ignore[assignment]


def average_gradients(network: nn.Module) -> None:
    """Average the gradients of `World.wrap`'s network over all ranks, unless DDP did. Collective.

    Does not synchronize the GPU. Gradients become views of one tensor, which a single all-reduce
    averages. Four H200s on NVLink exchange ResNet-50's 102 MB in 0.5 ms of a 35.5 ms step, and
    the copy takes 0.1 ms. In `on_this_rank_alone`, a rank uses the same memory without averaging.
    """
    if not dist.is_initialized() or isinstance(network, DistributedDataParallel):
        return
    parameters = trainable_parameters(network)
    # A parameter without a gradient here may have one on a different rank, and checking would
    # synchronize. It gets zeros, so weight decay and momentum change it, unlike with one rank.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    sizes = [gradient.numel() for gradient in gradients]
    flat = gradients[0].new_empty(sum(sizes))
    views = []
    for parameter, gradient, part in zip(parameters, gradients, flat.split(sizes), strict=True):
        parameter.grad = part.as_strided(gradient.size(), gradient.stride())
        views.append(parameter.grad)
    torch._foreach_copy_(views, gradients)
    if not hasattr(network, "trains_alone"):
        if flat.is_cuda:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        else:  # gloo does not support AVG
            dist.all_reduce(flat)
            flat /= dist.get_world_size()


def resolve_device(choice: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return train.device's device. Raises UserError if this node has fewer GPUs than ranks."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    num_devices = torch.get_device_module(choice).device_count()
    num_needed = 1
    device = torch.device(choice)
    if choice == "cuda":
        num_needed = max(local_size, local_rank + 1)
        device = torch.device("cuda", local_rank)
    if num_devices < num_needed:
        problem = f"torch sees {num_devices} of {num_needed} devices on {socket.gethostname()}"
        fix = "start at most one rank per device, make all GPUs visible to each rank, or set "
        fix += "train.device=cpu"
        raise UserError(f"train.device={choice}", problem, fix)
    return device


@contextmanager
def join_world(device_choice: str, timeout_seconds: float = 120.0) -> Iterator[World]:
    """Join the process group described by torchrun's environment variables until exit.

    Raises UserError if a variable is invalid or missing, or this rank has no usable device. torch
    raises an error on a rank that waits for a different rank longer than TIMEOUT_FACTOR times
    `timeout_seconds` (loader.timeout_seconds).
    """
    rank, local_rank, local_size = 0, 0, 1
    try:
        size = max(1, int(os.environ.get("WORLD_SIZE", "1")))
        if size > 1:
            rank = int(os.environ["RANK"])
            local_rank = int(os.environ["LOCAL_RANK"])
            local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        names = "WORLD_SIZE, RANK, LOCAL_RANK or LOCAL_WORLD_SIZE"
        fix = "start with torchrun, or unset WORLD_SIZE"
        raise UserError(names, f"missing or invalid ({error})", fix) from None
    device = resolve_device(device_choice, local_rank, local_size)
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # A CUDA graph cannot capture work on the default stream, and DDP keeps using the
            # stream on which it is created.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        if size > 1:
            # gloo sends objects and the stop signal, because NCCL would need the GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            limit = timedelta(seconds=TIMEOUT_FACTOR * timeout_seconds)
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))
            if local_size == size:  # docs/cluster.md has a setting for several nodes
                # torchrun's store keeps addresses from before a restart. The prefix hides them.
                restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(restarts, store)
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
            stack.callback(dist.destroy_process_group)
        yield World(rank, size, local_size, device)
