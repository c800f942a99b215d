"""Ranks, their devices and their communication. A single process is a world of size 1."""

import atexit
import hashlib
import logging
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import numpy as np
import PIL
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # a later import would keep the group in default arguments
from torch import Tensor, nn

import models
from conf.files import described
from conf.launch import Launch, read_launch
from conf.schema import CHOOSE_SAMPLES, Config, RunError, UserError, config_values, show
from engine.heartbeat import Heartbeat

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Nodes may differ in these keys; all other keys must be equal on every rank.
MAY_DIFFER = {
    *CHOOSE_SAMPLES,
    *(f"loader.{key}" for key in ("workers", "prefetch_factor", "pin_memory", "start_method")),
}
# A rank that responds may take this long for its part of a collective: it compiles, or saves.
LONGEST_SECONDS = 1800.0
CODE = {".py", ".c"}
# Errors of gloo begin like "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection".
GLOO_ERROR = re.compile(r"Gloo |\[[^]]*\bgloo/")


class RankError(RunError):
    """Another rank has ended or does not answer."""


@dataclass
class World:
    """The ranks of a run, as this one sees them."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    def set_section(self, section: str | None) -> None:
        """Note what this rank begins to do; see `Heartbeat.set_section`."""
        if self.heartbeat is not None:
            self.heartbeat.set_section(section)

    def broadcast(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; all ranks return its result or raise its error. Collective."""
        if self.size == 1:
            return function()
        result_and_error: list[Any] = [None, None]
        if self.is_main:
            try:
                result_and_error[0] = function()
            except Exception as error:
                result_and_error[1] = error
        dist.broadcast_object_list(result_and_error, src=0)
        result, raised = result_and_error
        if raised is not None:
            raise raised
        return cast("T", result)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order; nothing on ranks but 0. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.is_main else None, dst=0)
        return values if self.is_main else []

    def on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; return the result of this one. Collective.

        If one rank raises a UserError or cannot use a file, every rank raises that UserError.
        """
        result = mistake = None
        try:
            result = function()
        except UserError as error:
            mistake = error
        except OSError as error:
            mistake = UserError(described(error))
        self.raise_on_all_ranks(mistake)
        return cast("T", result)

    def raise_on_all_ranks(self, mistake: UserError | None) -> None:
        """Raise the first mistake that a rank passes, on every rank. Collective."""
        for each in self.all_gather(mistake):
            if each is not None:
                raise each

    def require_same(
        self, values: dict[str, Any], *, remedy: str = "give every rank the same command and data"
    ) -> None:
        """Refuse the first value that differs between the ranks. Collective."""
        gathered = self.all_gather(values)
        for rank, own in enumerate(gathered):
            for name in {**gathered[0], **own}:
                value, first = own.get(name), gathered[0].get(name)
                if value != first:
                    raise UserError(
                        f"{name}: is {show(value)} on rank {rank} and {show(first)} on rank 0; "
                        f"{remedy}"
                    )

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the maximum of each element over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks: they validate with the same BatchNorm statistics."""
        if self.size > 1:
            _copy_from_rank_0(model.buffers())

    def wrap(self, model: nn.Module, example: Tensor) -> nn.Module:
        """Return the module to call in training: the model; with several nodes, DDP around it.

        DDP exchanges gradients during the backward pass, which hides the time that the network
        between nodes takes. On one node, it costs more than it saves: it splits the compiled step
        into several graphs and copies each gradient. There, `average_gradients` exchanges them.

        DDP rebuilds its gradient buckets after the first backward pass, at the next forward pass;
        with three or more ranks, the sums then round differently. So that the first step after a
        restart rounds like any other, and `without_exchange` waits for no rank, DDP passes over
        `example` first, a batch. In evaluation mode, this changes no buffer and uses no random
        number.
        """
        if self.size == self.local_size:
            if self.size > 1:  # a model may draw initial weights from another source than torch
                _copy_from_rank_0([*model.parameters(), *model.buffers()])
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        network = nn.parallel.DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True
        )
        # Before a validation, `broadcast_buffers` does it. torch 2.13 deprecates the argument.
        network.broadcast_buffers = False
        network.eval()
        network(example.to(self.device)).sum().backward()
        network.zero_grad(set_to_none=True)
        with network.no_sync():
            network(example.to(self.device))
        return models.train_mode(network)


def _copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to all ranks. Collective."""
    for tensor in tensors:
        values = tensor.detach().contiguous()  # itself, unless it is channels_last
        dist.broadcast(values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


def without_sync(network: nn.Module, *, unless: bool) -> AbstractContextManager[None]:
    """Keep DDP from averaging gradients in the backward passes of the `with` block."""
    if unless or not isinstance(network, nn.parallel.DistributedDataParallel):
        return nullcontext()
    return network.no_sync()


_exchanges = True  # whether `average_gradients` does; see `without_exchange`


@contextmanager
def without_exchange(network: nn.Module) -> Iterator[None]:
    """Keep the gradients of this rank in the `with` block: another rank may not take the step."""
    global _exchanges
    _exchanges = False
    try:
        with without_sync(network, unless=False):
            yield
    finally:
        _exchanges = True


def average_gradients(network: nn.Module) -> None:
    """Average the gradients of `World.wrap`'s network over all ranks, unless DDP has. Collective.

    Does not wait for a GPU. The gradients are copied into one tensor, averaged by a single
    all-reduce, and then replaced by views of this tensor. Four H200s on NVLink exchange ResNet-50's
    102 MB in 0.5 ms of a step of 35.5 ms, and the copy takes 0.1 ms.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or isinstance(network, nn.parallel.DistributedDataParallel):
        return
    parameters = [each for each in network.parameters() if each.requires_grad]
    # A parameter without a gradient may have one on another rank: to know would take a wait for the
    # device. So if no rank has one, weight decay and momentum change it here, not on a single rank.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = gradients[0].new_empty(sum(each.numel() for each in gradients))
    views, offset = [], 0
    for each in gradients:
        views.append(flat.as_strided(each.size(), each.stride(), offset))
        offset += each.numel()
    torch._foreach_copy_(views, gradients)
    if not _exchanges:
        pass  # a step that is tried needs the same memory
    elif flat.is_cuda:
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    else:  # gloo has no average
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view


def resolve_device(choice: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device that `train.device` selects; refuse more ranks than this node has GPUs."""
    kind = choice
    if choice == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    have = module.device_count() if module.is_available() else 0
    need = max(local_size, local_rank + 1)
    if need > have:
        remedy = "give train.device=auto, or install a driver and a PyTorch for this device"
        if have:
            remedy = "start fewer ranks, or let each rank see all GPUs (srun --gpu-bind=none)"
        raise UserError(
            f"train.device={choice}: torch sees {have} GPUs on {socket.gethostname()}, which has "
            f"{need} rank(s); {remedy}"
        )
    return torch.device(kind, local_rank)


def share_config(config: Config, world: World) -> Config:
    """Return the config with rank 0's `run` keys: ${now:} gives each rank a different time."""
    config = replace(config, run=world.broadcast(lambda: config.run))
    world.require_same({k: v for k, v in config_values(config).items() if k not in MAY_DIFFER})
    return config


def _installation() -> dict[str, str]:
    """Return the versions and source files that must be equal on all ranks, each by its name."""
    root = Path(__file__).parents[1]
    found = {
        "Python version": ".".join(platform.python_version_tuple()[:2]),
        "torch version": str(torch.__version__),
        "numpy version": np.__version__,
        "Pillow version": PIL.__version__,
    }
    packages = [path for path in root.iterdir() if path.name in sys.modules and path.is_dir()]
    files = [path for package in packages for path in package.rglob("*.*") if path.suffix in CODE]
    for path in [root / "train.py", *sorted(files)]:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found[f"SHA-256 of {path.relative_to(root)}"] = digest[:12]
    return found


# Keeps process groups until Python exits. DDP outlives `join_world`; if it had the last reference,
# it would wait, while it holds the GIL, for threads that need the GIL to free a tensor. After the
# exit functions, such a thread would abort the process (SIGABRT).
_process_groups: list[Any] = []
atexit.register(_process_groups.clear)


@contextmanager
def join_world(device_choice: str, timeout_seconds: float = 120.0) -> Iterator[World]:
    """Join the process group that torchrun describes in its environment variables, until exit.

    `timeout_seconds`: loader.timeout_seconds: how long another rank may give no sign of life.
    Raises UserError if an environment variable is wrong; on every rank if a rank has no usable
    device, or versions or source files differ between the ranks. Raises RankError if the ranks
    cannot meet, or, also from within the block, another rank has ended.
    """
    launch = read_launch()
    device, mistake = torch.device("cpu"), None
    try:
        device = resolve_device(device_choice, launch.local_rank, launch.local_size)
    except UserError as error:
        mistake = error  # raised on all ranks, once they have met
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # A CUDA graph cannot capture work on the default stream, and DDP keeps using the
            # stream on which it is created.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        heartbeat = Heartbeat(launch.rank, timeout_seconds) if launch.size > 1 else None
        place = launch.rank, launch.size, launch.local_rank, launch.local_size
        world = World(*place, device, heartbeat)
        if heartbeat is not None:
            stack.callback(heartbeat.set_section, None)
            stack.enter_context(_lost_ranks_explained(heartbeat))
            _init_process_group(device, launch, max(LONGEST_SECONDS, 2 * timeout_seconds))
            stack.callback(dist.destroy_process_group)
        world.raise_on_all_ranks(mistake)
        if heartbeat is not None:
            world.require_same(
                {"device": device.type, **_installation()},
                remedy="install the same program, versions and driver on every node",
            )
            heartbeat.meet(world.all_gather(heartbeat.introduction(launch.host)))
        yield world


def _name_of_start(store: dist.Store, rank: int, size: int) -> str:
    """Return a name for this start, the same on all its ranks. Rank 0 chooses it.

    torchrun keeps its store when it restarts the ranks. Without a name of their own, the new ranks
    would read the addresses of the ranks before them (pytorch#135712).
    """
    own, hellos = uuid4().hex, [f"hello {other}" for other in range(1, size)]
    if rank > 0:
        store.set(f"hello {rank}", own)
        name: str = store.get(f"answer to {own}").decode()
        store.set(f"{name} {own}", "")
        return name
    while True:  # the heartbeat ends a rank that waits too long
        if store.check(hellos):  # some may be of ranks before this start
            found = [hello.decode() for hello in store.multi_get(hellos)]
            for hello in found:
                store.set(f"answer to {hello}", own)
            if store.check([f"{own} {hello}" for hello in found]):
                return own
        time.sleep(0.02)


def _init_process_group(device: torch.device, launch: Launch, timeout_seconds: float) -> None:
    """Meet the other ranks at MASTER_ADDR and MASTER_PORT."""
    # Objects and the stop signal are sent with gloo: NCCL would need the GPU.
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device.type, "gloo")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if launch.torchrun_listens:  # if it refuses, it was killed while it started this rank
            socket.create_connection((launch.host, launch.port), timeout_seconds).close()
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(_name_of_start(store, rank, size), store)
        dist.init_process_group(backend, None, timeout, size, rank, store)
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"MASTER_ADDR={launch.host}, MASTER_PORT={launch.port}: the ranks cannot meet: "
            f"{str(error).splitlines()[0]}; check that all of them run, give another MASTER_PORT, "
            "or use `torchrun --standalone`"
        ) from error
    _process_groups.append(dist.group.WORLD)


@contextmanager
def _lost_ranks_explained(heartbeat: Heartbeat) -> Iterator[None]:
    """Turn torch's errors about other ranks, with a stack trace each, into a `RankError`."""
    try:
        yield
    except RuntimeError as error:
        # Not a subclass: a LoaderError may name a folder `gloo`.
        of_gloo = type(error) is RuntimeError and GLOO_ERROR.match(str(error))
        if not (of_gloo or isinstance(error, dist.DistError)):
            raise
        what = "another rank ended; see its message above, or torchrun's message below"
        if "imed out" in str(error):
            sections = [f"{name} in {peer.section}" for name, peer in heartbeat.peers.items()]
            what = f"timed out, as another rank takes too long; last known: {', '.join(sections)}"
        raise RankError(f"{heartbeat.name} in {heartbeat.section}: {what}") from error
