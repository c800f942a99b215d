"""Ranks, their devices and their communication. A single process is a world of size 1."""

import hashlib
import json
import logging
import os
import platform
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast
from uuid import uuid4

import numpy as np
import PIL
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from conf import strict_json
from conf.launch import Launch, read_launch
from conf.schema import RunError, UserError, show
from conf.signals import STOPS, handle_stops
from engine.heartbeat import CONNECTION, Heartbeat

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A rank that answers may take this long for its part of a collective: it compiles, or saves.
LONGEST_SECONDS = 1800.0
# The store of torchrun exists before the ranks start: a refusal lasting longer means it has ended.
STORE_SECONDS = 5.0
ANSWER_SECONDS = 7.0  # from a signal to the end of a process that has nothing to lose
SLOWEST_DISK = 20e6  # bytes/s with which a checkpoint is given its time
EXCHANGE_SECONDS = 0.5  # between two looks at whether another rank has a signal
# How its errors begin: "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection ..."
GLOO = re.compile(r"Gloo |\[[^]]*\bgloo/")
NOTHING_LOST = "nothing is lost: no step has been completed since the last checkpoint"
ECHO_SECONDS = 2.0  # several ranks get one Ctrl-C twice: the terminal and torchrun send it


class RankError(RunError):
    """Another rank has ended or does not answer."""


@dataclass(frozen=True)
class World:
    """This process's rank among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    def set_section(self, section: str | None) -> None:
        """Note what this rank begins to do, for messages about ranks that wait for each other.

        Args:
            section: such as "step 12"; None if this rank waits for no other from now on.
        """
        if self.heartbeat is not None:
            self.heartbeat.set_section(section)

    def broadcast(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; all ranks return its result or raise its error. Collective."""
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = function()
            except Exception as error:
                box[1] = error
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        return cast("T", box[0])

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; return the result of this one. Collective.

        Raises:
            UserError: on every rank, if one rank raised it.
        """
        result, own = None, None
        try:
            result = function()
        except UserError as error:
            own = error
        for mistake in self.all_gather(own):
            if mistake is not None:
                raise mistake
        return cast("T", result)

    def local_values(self, values: list[T]) -> list[T]:
        """Select the values of this node's ranks from one value per rank."""
        first = self.rank - self.local_rank
        return values[first : first + self.local_size]

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
        """Return the module to call in training: the model, or DDP around it.

        DDP exchanges gradients during the backward pass, which hides the time that the network
        between nodes takes. It also splits the compiled step into several graphs and copies each
        gradient separately. On one node, this costs more than it saves, so `average_gradients`
        exchanges all gradients at once after the backward pass.

        DDP rebuilds its gradient buckets after the first backward pass; with three or more ranks,
        the sums then round differently. A first pass over `example`, a batch, makes the first step
        after a restart round like any other. It runs in evaluation mode: it changes no buffer and
        uses no random number.
        """
        if self.size == self.local_size:
            if self.size > 1:
                # As DDP does: a model may draw its initial weights from another source than torch.
                _copy_from_rank_0([*model.parameters(), *model.buffers()])
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        network = nn.parallel.DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True
        )
        # They are broadcast before a validation, not at every step. Set here because torch 2.13
        # deprecates the argument, and 2.10 has no other.
        network.broadcast_buffers = False
        network.eval()
        network(example.to(self.device)).sum().backward()
        network.zero_grad(set_to_none=True)
        return models.train_mode(network)


def _copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to all ranks. Collective."""
    for tensor in tensors:
        values = tensor.detach().contiguous()  # itself, unless it is channels_last
        dist.broadcast(values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


def without_sync(network: nn.Module, *, unless: bool) -> AbstractContextManager[None]:
    """Keep DDP from averaging gradients in the backward passes of the `with` block.

    Args:
        network: what `World.wrap` returned.
        unless: average as usual.
    """
    if unless or not isinstance(network, nn.parallel.DistributedDataParallel):
        return nullcontext()
    return network.no_sync()


def average_gradients(network: nn.Module) -> None:
    """Average the gradients over all ranks, unless DDP has done it. Collective.

    Does not wait for a GPU. The gradients are copied into one tensor, averaged by a single
    all-reduce, and then replaced by views of this tensor. Four H200s on NVLink exchange ResNet-50's
    102 MB in 0.5 ms of a step of 35.5 ms, and the copy takes 0.1 ms. With DDP, a step took 0.4 ms
    longer.

    Args:
        network: what `World.wrap` returned.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or isinstance(network, nn.parallel.DistributedDataParallel):
        return
    parameters = [each for each in network.parameters() if each.requires_grad]
    # A model may leave out a layer on one rank only.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = gradients[0].new_empty(sum(each.numel() for each in gradients))
    views, first = [], 0
    for each in gradients:
        views.append(flat.as_strided(each.size(), each.stride(), first))
        first += each.numel()
    torch._foreach_copy_(views, gradients)
    if flat.is_cuda:
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    else:  # gloo has no average
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view


def resolve_device(choice: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device that `train.device` selects.

    Raises:
        UserError: this node has fewer GPUs than ranks.
    """
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and have == 0):
        return torch.device("cpu")
    need = max(local_size, local_rank + 1)
    if need > have:
        raise UserError(
            f"train.device={choice}: torch sees {have} GPUs on {socket.gethostname()}, which has "
            f"{need} rank(s); start fewer ranks, let each rank see all GPUs of its node (srun "
            "--gpu-bind=none), or use train.device=cpu"
        )
    return torch.device("cuda", local_rank)


def same_on_all_ranks(
    values: list[dict[str, Any]],
    *,
    remedy: str = "give every rank the same command and the same data",
) -> None:
    """Check that all ranks have the same values.

    Args:
        values: one dictionary per rank, in rank order: name -> value.
        remedy: what the user should do if they differ.

    Raises:
        UserError: names the first difference; every rank raises it.
    """
    for rank, own in enumerate(values):
        for name in {**values[0], **own}:
            value, first = own.get(name), values[0].get(name)
            if value != first:
                raise UserError(
                    f"{name}: is {show(value)} on rank {rank} and {show(first)} on rank 0; {remedy}"
                )


def _versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks: communication and pixels depend on them.

    The patch release of Python is left out: it affects neither.
    """
    return {
        "Python version": ".".join(platform.python_version_tuple()[:2]),
        "torch version": str(torch.__version__),
        "numpy version": np.__version__,
        "Pillow version": PIL.__version__,
    }


def _source_hashes() -> dict[str, str]:
    """Return the first digits of the SHA-256 of each source file of the packages in use.

    Also of train.py; not of other files beside it.
    """
    root = Path(__file__).parents[1]
    packages = [path for path in root.iterdir() if path.name in sys.modules and path.is_dir()]
    files = [root / "train.py", *(path for package in packages for path in package.rglob("*"))]
    return {
        f"SHA-256 of {path.relative_to(root)}": hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(files)
        if path.suffix in (".py", ".c") and path.is_file()
    }


# Keeps process groups until the interpreter ends. DDP outlives `join_world`; if it had the last
# reference, it would wait for the group's threads while it holds the GIL. A thread that needs the
# GIL to free a tensor then never ends, and the rank hangs after the last step.
_joined: list[Any] = []


@contextmanager
def join_world(device_choice: str, timeout_seconds: float = 120.0) -> Iterator[World]:
    """Join the process group that torchrun describes in its environment variables, until exit.

    Args:
        device_choice: train.device.
        timeout_seconds: loader.timeout_seconds: how long another rank may give no sign of life.

    Raises:
        UserError: an environment variable is wrong; or a rank has no usable device, or versions or
            source files differ between the ranks. The last two are raised on every rank.
        RankError: another rank has not started, or has ended; also raised in place of the errors
            of torch in the block.
    """
    launch = read_launch()
    find_device = partial(resolve_device, device_choice, launch.local_rank, launch.local_size)
    with ExitStack() as stack:
        heartbeat = store = None
        if launch.size > 1:
            heartbeat = stack.enter_context(Heartbeat(launch.rank, timeout_seconds))
            stack.enter_context(_lost_ranks_explained(heartbeat))
            store = _meet(launch, heartbeat, find_device)
        device = find_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # A CUDA graph cannot capture work on the default stream, and DDP keeps using the
            # stream on which it is created.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        if store is not None:
            dist.init_process_group(
                # gloo, in addition to NCCL, transfers objects and the stop signal without the GPU
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=max(LONGEST_SECONDS, 2 * timeout_seconds)),
            )
            _joined.append(dist.group.WORLD)
            stack.callback(dist.destroy_process_group)
        world = World(
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            local_size=launch.local_size,
            device=device,
            heartbeat=heartbeat,
        )
        if world.size > 1:
            same_on_all_ranks(
                world.all_gather(_source_hashes()), remedy="copy the same program to every node"
            )
        yield world


@contextmanager
def _lost_ranks_explained(heartbeat: Heartbeat) -> Iterator[None]:
    """Turn torch's errors about other ranks, with a stack trace each, into a `RankError`."""
    try:
        yield
    except RuntimeError as error:
        if not _of_another_rank(error):
            raise
        raise RankError(heartbeat.explain(str(error))) from error


def _of_another_rank(error: object) -> bool:
    """Whether this is an error of torch about another rank."""
    # gloo raises plain RuntimeErrors; a LoaderError may name a folder `igloo`.
    of_gloo = type(error) is RuntimeError and GLOO.match(str(error)) is not None
    return of_gloo or isinstance(error, dist.DistError)


def _meet(
    launch: Launch, heartbeat: Heartbeat, find_device: Callable[[], torch.device]
) -> dist.Store:
    """Wait until all ranks have started; return the store through which they connect.

    Args:
        find_device: raises a UserError if this rank has no device.

    Raises:
        UserError: MASTER_ADDR or MASTER_PORT cannot be used; or, on every rank: a rank has no
            device, or the versions differ.
        RankError: a rank does not start.
    """
    seconds = heartbeat.start_seconds
    deadline = time.monotonic() + seconds
    listens = launch.rank == 0 and not launch.by_torchrun
    if listens:
        _check_port(launch.port)
    else:
        patience = min(seconds, STORE_SECONDS) if launch.by_torchrun else seconds
        _wait_for_port(launch.host, launch.port, patience)
    heartbeat.set_section(CONNECTION)
    shared = dist.TCPStore(
        launch.host,
        launch.port,
        is_master=listens,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    heartbeat.set_section("start")
    own = {"address": heartbeat.introduction(launch.host), "versions": _versions()}
    try:
        own["device"] = find_device().type
    except UserError as error:
        own["mistake"] = str(error)
    store, found = _introduce(launch, shared, strict_json.dumps(own), deadline)
    for one in found:
        if "mistake" in one:
            raise UserError(one["mistake"])
    same_on_all_ranks(
        [{"device": one["device"]} for one in found],
        remedy="check the driver of that node, or set train.device",
    )
    same_on_all_ranks(
        [one["versions"] for one in found], remedy="install the same version on every node"
    )
    heartbeat.meet([one["address"] for one in found])
    return store


def _introduce(
    launch: Launch, shared: dist.Store, own: str, deadline: float
) -> tuple[dist.Store, list[Any]]:
    """Exchange introductions with the other ranks of this start.

    torchrun's store keeps the introductions of earlier starts. The restart count cannot tell them
    apart, because torchrun counts restarts separately on each node. So rank 0 stores a new prefix
    for the keys at every start. A rank that has read an old prefix does not find its own
    introduction in the list, and reads the prefix again.

    Args:
        own: introduction of this rank: JSON text, unique because of its random token.
        deadline: when to give up, in seconds of time.monotonic().

    Returns:
        The store with the prefix, and the introductions of all ranks in rank order.

    Raises:
        RankError: a rank does not introduce itself in time.
    """
    began = time.monotonic()
    names = [f"rank {rank}" for rank in range(launch.size)]
    readers = [f"{name} has read" for name in names]
    if launch.rank == 0:
        shared.set("prefix", uuid4().hex)
    store = None
    while time.monotonic() < deadline:
        if shared.check(["prefix"]):
            store = dist.PrefixStore(shared.get("prefix").decode(), shared)
            store.set(names[launch.rank], own)
            if launch.rank == 0 and store.check(names):
                store.set("all", strict_json.dumps([store.get(name).decode() for name in names]))
            found = json.loads(store.get("all")) if store.check(["all"]) else []
            if own in found:
                store.set(readers[launch.rank], "")
                # The store ends with rank 0, unless torchrun provides it.
                if launch.rank != 0 or store.check(readers):
                    return store, [json.loads(one) for one in found]
        time.sleep(0.1)
    missing = names[:1]
    if store is not None:
        missing = [name for name in names if not store.check([name])] or [
            name for name, key in zip(names, readers, strict=True) if not store.check([key])
        ]
    told = "SLURM_STEP_NUM_TASKS" if launch.by_srun else "WORLD_SIZE"
    raise RankError(
        f"{', '.join(missing)}: did not start within {deadline - began:.0f} s; the process is "
        f"stopped, or was never started: {told}={launch.size}"
    )


def _check_port(port: int) -> None:
    """Check that rank 0 can listen on MASTER_PORT: torch prints a stack trace if it cannot.

    Raises:
        UserError: it cannot.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port}: {os.strerror(error.errno or 0)}; choose another number, or use "
            "`torchrun --standalone`"
        ) from None


def _wait_for_port(host: str, port: int, seconds: float) -> None:
    """Wait until rank 0, or torchrun, listens: torch prints a stack trace for each attempt.

    Raises:
        UserError: there is no such machine.
        RankError: nothing listens.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, seconds)).close()
            return
        except socket.gaierror as error:  # in Kubernetes, a host may get its name later
            final = error.errno not in (socket.EAI_AGAIN, socket.EAI_NONAME)
            if final or time.monotonic() > deadline:
                raise UserError(
                    f"MASTER_ADDR={host}: {error.strerror}; give rank 0's host"
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"MASTER_ADDR={host}, MASTER_PORT={port}: {error.strerror or error}; "
                    "check that rank 0, or torchrun, is running on that host"
                ) from None
        time.sleep(0.1)


class StopSignal:
    """Receives SIGINT, SIGTERM, SIGUSR1 and SIGHUP, so that the loop can save and stop.

    A signal ends a wait for input at once. A step is always completed, and a second Ctrl-C
    interrupts anything.

    With several ranks, a signal to one of them stops all after the same step. No rank begins a step
    before all of them have a batch for it: otherwise, the others would wait for a rank without
    input in the middle of a step, where nothing can be saved. A rank that waits for others, in C++,
    runs no signal handler, and a rank that waits for input does not know about the signal. So a
    thread notices the signal and passes it on to all ranks through the store of the process group.

    The same thread ends the process if the main thread does not answer within ANSWER_SECONDS and
    nothing is lost by it: all steps are in a checkpoint, as before the first step, which compiles;
    or the disk hangs, and they will never be.

    SIGHUP stays ignored if it is, as under nohup.

    Args:
        world: its ranks stop together.
        failed: returns whether this rank cannot continue: a checkpoint could not be written, or too
            many images cannot be read. If so, all ranks stop as after a signal, and the next save
            raises the error.
        unsaved: returns whether there are steps that are not in a checkpoint on disk.

    Attributes:
        received: number of the signal that this process received; 0 for none.
        number: the signal that stops all ranks, as of the last `poll`; FAILED if one of them
            cannot continue; 0 if training continues.
    """

    FAILED = 1000  # above all signals
    _count = count()  # of objects, in the same order on every rank

    def __init__(
        self,
        world: World,
        failed: Callable[[], bool] = lambda: False,
        *,
        unsaved: Callable[[], bool] = lambda: True,
    ) -> None:
        self.world, self.failed, self.unsaved = world, failed, unsaved
        self.received = 0
        self.number = 0
        self._key = f"stop {next(self._count)}"  # in the store: the number of the signal
        self._waiting = False  # the main thread is in `wait_for`
        self._sent_again = False  # the next signal comes from `_watch`
        self._since = 0.0  # when it received the first signal
        self._saving: tuple[float, float, str] | None = None  # since when, for how long, what

    def __enter__(self) -> "StopSignal":
        self._main = threading.get_ident()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)  # required of a wakeup fd
        self._wakeup = theirs
        self._thread = threading.Thread(target=self._watch, args=(ours,), name="stop", daemon=True)
        self._thread.start()
        # The interpreter writes each signal's number to it, also if the main thread is in C++.
        self._wakeup_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._handling = ExitStack()
        self._handling.enter_context(handle_stops(self._receive))
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if self.received and _of_another_rank(error) and not self.unsaved():
            self._end(self.received, NOTHING_LOST)  # as the other rank has, a moment before
        self._handling.close()
        signal.set_wakeup_fd(self._wakeup_before)
        with suppress(OSError):  # full
            self._wakeup.send(b"\0")  # no signal: ends the thread. A forked worker may keep it open
        self._thread.join(timeout=EXCHANGE_SECONDS)  # the store may not answer
        self._wakeup.close()

    def __bool__(self) -> bool:
        """Whether training stops now: the same on every rank."""
        return self.number != 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        echo = self.world.size > 1 and time.monotonic() - self._since < ECHO_SECONDS
        again, self._sent_again = self._sent_again, False
        if number == signal.SIGINT == self.received and not (echo or again):
            raise KeyboardInterrupt
        self._since = self._since if self.received else time.monotonic()
        self.received = number
        if self._waiting:
            raise _WaitEnded

    def poll(self) -> bool:
        """Update `number`; return whether training stops. Collective.

        All ranks call this once per step, and before and after what takes long between two steps.
        """
        own = self.FAILED if self.failed() else self.received
        if self.world.size == 1:
            self.number = own
        elif self.number == 0:
            # Waits for the other ranks, but not for the GPU, which still has a step to compute.
            highest = torch.tensor(own)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            self.number = int(highest)
        return self.number != 0

    def wait_for(self, wait: Callable[[], T]) -> T | None:
        """Call `wait`, which waits for input, such as a read; return its result.

        A signal ends the call, wherever it is, and the result is None. What `wait` has used must
        only be closed then.
        """
        self._waiting = True
        try:
            return None if self.received else wait()
        except _WaitEnded:
            return None
        finally:
            self._waiting = False

    def interruptible(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches as long as all ranks have one and none has to stop. Collective.

        Every rank has the same number of batches.
        """
        while not self:
            batch = self.wait_for(partial(next, batches, None))
            if self.poll() or batch is None:
                return
            yield batch

    @contextmanager
    def saving(self, what: object, num_bytes: int) -> Iterator[None]:
        """Give up the `with` block after a signal if the disk takes far too long.

        Args:
            what: is written, for the message.
            num_bytes: to write, at most.
        """
        patience = ANSWER_SECONDS + num_bytes / SLOWEST_DISK
        self._saving = (time.monotonic(), patience, str(what))
        try:
            yield
        finally:
            self._saving = None

    def _watch(self, wakeup: socket.socket) -> None:
        """Pass signals on between the ranks, and end this process if it does not answer."""
        store, number, since = None, 0, 0.0
        with suppress(RuntimeError):
            store = _own_store() if self.world.size > 1 else None
        arrived = select.poll()  # not select(): there may be 1,024 open files and more, e.g. shards
        arrived.register(wakeup, select.POLLIN)
        while True:
            pause = 1000 * EXCHANGE_SECONDS if store is not None or number else None
            if arrived.poll(pause):
                numbers = wakeup.recv(64)
                if 0 in numbers:
                    wakeup.close()
                    return
                number = next((n for n in numbers if n in STOPS), number)
                since = since or (time.monotonic() if number else 0.0)
            elif number and self._waiting:  # Python ignores an exception raised in a destructor
                self._sent_again = True
                signal.pthread_kill(self._main, number)
            try:
                if store is not None:
                    store = self._exchange(store, number)
            except RuntimeError:  # the process with the store has ended, and all ranks will
                store = None
            if number:
                self._give_up(number, since)

    def _exchange(self, store: Any, number: int) -> Any:
        """Tell the other ranks about a signal, or get one from them; return None after that."""
        if number:
            store.set(self._key, str(number))
            return None
        if not store.check([self._key]):
            return store
        # To the main thread, whose system call it interrupts.
        signal.pthread_kill(self._main, int(store.get(self._key)))
        return None

    def _give_up(self, number: int, since: float) -> None:
        """End the process if nothing is lost, or if a save does not end."""
        now, saving = time.monotonic(), self._saving
        if saving is not None:
            began, patience, what = saving
            if now - max(began, since) < patience:
                return
            reason = (
                f"{what} has not been written after {now - began:.0f} s: the disk does not "
                "respond; run the same command again to resume from the newest checkpoint"
            )
        elif now - since < ANSWER_SECONDS or self.unsaved():
            return
        else:
            reason = NOTHING_LOST
        self._end(number, reason)

    def _end(self, number: int, reason: str) -> NoReturn:
        if self.world.is_main:
            logger.error("%s: %s", signal.Signals(number).name, reason)
        os._exit(128 + number)


class _WaitEnded(BaseException):
    """A signal has ended `StopSignal.wait_for`. Not an Exception: nothing else may handle it."""


def _own_store() -> Any:
    """Return a connection of its own to the store through which the ranks have met.

    A thread with a shared connection would wait for a call of another thread to return.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
