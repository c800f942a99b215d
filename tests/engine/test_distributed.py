"""Ranks: a world of size 1 in this process, and two gloo ranks in processes."""

import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conf import cli
from conf.schema import UserError
from conf.signals import STOPS
from engine.distributed import (
    RankError,
    _lost_ranks_explained,
    _name_of_start,
    join_world,
    resolve_device,
)
from engine.heartbeat import Heartbeat, Peer
from engine.plan import make_plan
from engine.state import params_sha256
from engine.stop_signal import StopSignal
from pipeline.build import build_datasets
from pipeline.ring import LoaderError
from tests.engine.plans import ALONE
from tests.processes import run_python
from tests.ranks import Ranks
from tests.small_run import torchrun
from train import build_state

CLOSED = "[../gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"


def test_world_of_size_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with join_world("cpu") as world:
        assert world == ALONE and world.is_main
        assert world.broadcast(lambda: 5) == world.on_all_ranks(lambda: 5) == 5
        with pytest.raises(UserError, match=r"No such file .*: 'nowhere'; check the path"):
            world.on_all_ranks(lambda: os.stat("nowhere"))
        with pytest.raises(UserError, match="own"):
            world.broadcast(lambda: (_ for _ in ()).throw(UserError("own")))
        assert world.all_gather("own") == ["own"]
        assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
        model = nn.BatchNorm1d(2)
        assert world.wrap(model, torch.zeros(1, 4)) is model
        world.broadcast_buffers(model)
        assert not torch.distributed.is_initialized()


def test_two_ranks(ranks: Ranks) -> None:
    done = ranks.run([sys.executable, str(Path(__file__).with_name("two_ranks.py"))], 2)
    lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # of torch 2.10
    assert lines == ["rank 0 is done", "rank 1 is done"], done.stderr


@pytest.mark.parametrize(("rank", "reason"), [("0", "in use"), ("1", "Connection refused")])
def test_a_wrong_port(monkeypatch: pytest.MonkeyPatch, rank: str, reason: str) -> None:
    """Rank 0 cannot listen there, or torchrun, which listened for rank 1, has ended."""
    with socket.create_server(("", 0)) as server:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
        if rank == "1":
            server.close()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(rank == "1"))
        job = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (job | place).items():
            monkeypatch.setenv(name, value)
        where = "".join(f"{name}={value}[,:] " for name, value in place.items())
        with pytest.raises(RankError, match=rf"^{where}the ranks cannot meet: .*{reason}"):
            join_world("cpu").__enter__()


def test_ranks_that_cannot_meet(tmp_path: Path, ranks: Ranks) -> None:
    """Another program listens at MASTER_PORT."""
    script = tmp_path / "joins.py"
    script.write_text(
        "from engine.distributed import join_world\njoin_world('cpu', 0.2).__enter__()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": str(server.getsockname()[1])}
        with ranks.running([sys.executable, str(script)], 1, **place) as job:
            done = job.wait()
    assert done.returncode == 1
    message = (
        r"joins\.py: loader\.timeout_seconds=0\.2: no response for 1 s from the others at "
        r"MASTER_ADDR and MASTER_PORT, while rank 1 \(process \d+ on \S+\) waits for it in start; "
    )
    assert re.search(message, done.stderr)


def test_each_start_has_another_name() -> None:
    """The store still holds what the ranks wrote before they were restarted."""
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(3) as pool:
        starts = [
            set(pool.map(lambda rank: _name_of_start(store, rank, 3), range(3))) for _ in range(4)
        ]
    assert [len(names) for names in starts] == 4 * [1] and len(set.union(*starts)) == 4


ENDS = """
import atexit, pathlib
names = pathlib.Path("/proc/self/task").glob
atexit.register(lambda: print("left:", [1 for one in names("*/comm") if "gloo" in one.read_text()]))
import torch
from engine.distributed import join_world
with join_world("cpu") as world:
    weight = torch.nn.Parameter(torch.ones(1))
    world.sum(weight.detach())
    torch.optim.SGD([weight]).step()
"""


@pytest.mark.slow
def test_threads_of_gloo_end_before_the_interpreter(tmp_path: Path) -> None:
    """Later, it would abort them."""
    (tmp_path / "ends.py").write_text(ENDS)
    done = run_python(*torchrun([sys.executable, str(tmp_path / "ends.py")], 2)[1:], PYTHONPATH=".")
    assert done.stdout == 2 * "left: []\n", done.stderr


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (RuntimeError(CLOSED), "rank 0 .* in step 12: another rank ended; see its message above"),
        (RuntimeError("Gloo connectFullMesh failed with [../gloo/pair.cc:1] no error"), "ended"),
        (RuntimeError(LATE), "in step 12: timed out, .*; last known: rank 1 in validation$"),
        (torch.distributed.DistBackendError("NCCL error"), "another rank ended"),
        (LoaderError("[gloo/1.jpg]: truncated"), None),
        (RuntimeError("/images/igloo/1.jpg: truncated"), None),
    ],
)
def test_only_errors_about_other_ranks_are_explained(error: Exception, explained: str) -> None:
    heartbeat = Heartbeat(0, 120)
    heartbeat.introduction("localhost")
    heartbeat.set_section("step 12")
    heartbeat.meet([("rank 1", Peer(("", 0), section="validation"))])
    with pytest.raises(RankError if explained else type(error), match=explained) as caught:
        with _lost_ranks_explained(heartbeat):
            raise error
    assert isinstance(caught.value, RankError) == bool(explained)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    gpus(0)
    assert resolve_device("cpu") == resolve_device("auto") == torch.device("cpu")
    message = r"^train\.device={}: torch sees {} GPUs on .+, which has {} rank\(s\); "
    with pytest.raises(UserError, match=message.format("cuda", 0, 1) + "give train.device=auto"):
        resolve_device("cuda")
    gpus(2)
    assert resolve_device("auto", 1) == resolve_device("cuda", 1) == torch.device("cuda", 1)
    assert resolve_device("cpu", 1) == torch.device("cpu")
    for choice in ("auto", "cuda"):
        with pytest.raises(UserError, match=message.format(choice, 2, 3)):
            resolve_device(choice, 2)
        with pytest.raises(UserError):  # also on ranks that have a GPU
            resolve_device(choice, 0, 3)


def test_sync_bn_keeps_weights_and_keys() -> None:
    """Only its conversion: torch has SyncBatchNorm for GPUs only."""
    config = cli.load(
        ["data=fake", "model=resnet_tiny", "data.image_size=32", "model.sync_bn=true"]
    )
    plan = make_plan(config, build_datasets(config), ALONE)
    one, two = (build_state(plan, replace(ALONE, size=size)).model for size in (1, 2))
    kinds = (nn.BatchNorm2d, nn.SyncBatchNorm)
    for model, kind in ((one, nn.BatchNorm2d), (two, nn.SyncBatchNorm)):
        assert {type(module) for module in model.modules() if isinstance(module, kinds)} == {kind}
    assert params_sha256(one) == params_sha256(two)
    assert one.state_dict().keys() == two.state_dict().keys()


@pytest.mark.parametrize("number", STOPS)
def test_signal_is_received_and_the_handlers_restored(number: signal.Signals) -> None:
    numbers = (*STOPS, signal.SIGALRM)
    before = [signal.getsignal(n) for n in numbers]
    with StopSignal(ALONE) as stop:
        assert not stop.poll() and stop.number == stop.received == 0
        os.kill(os.getpid(), number)
        for _ in range(2):
            assert stop.poll() and stop.number == stop.received == number
    assert [signal.getsignal(n) for n in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_repeated_and_ignored_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may send SIGTERM twice; a second Ctrl-C interrupts anything."""
    monkeypatch.setattr("engine.stop_signal.ECHO_SECONDS", math.inf)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(ALONE) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.poll()  # as under nohup
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            assert stop.poll() and stop.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
    with StopSignal(replace(ALONE, size=2)):  # torchrun and the terminal send it
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_ends_a_wait_for_input_and_nothing_else() -> None:
    with StopSignal(ALONE) as stop:
        assert stop.wait_for(lambda: 5) == 5
        assert list(stop.interruptible(iter(range(3)))) == [0, 1, 2]
        hangs = (signal.raise_signal(signal.SIGTERM) or time.sleep(600) for _ in range(2))
        assert list(stop.interruptible(hangs)) == []
        assert stop.wait_for(lambda: 5) is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_that_a_destructor_has_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.stop_signal.ANSWER_SECONDS", 0.1)

    class Closes:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with StopSignal(ALONE) as stop:
        assert stop.wait_for(lambda: (Closes() and None) or time.sleep(600)) is None
        assert stop.poll() and stop.number == signal.SIGINT


DISK = "run/checkpoints has not been written: the disk does not respond; "


@pytest.mark.parametrize(
    ("unsaved", "saving", "message"),
    [
        (False, False, "nothing is lost: no step has been completed since the last checkpoint"),
        (True, True, DISK),
        (False, True, DISK),
        (True, False, None),
    ],
)
def test_a_process_that_does_not_answer_a_signal_ends(
    unsaved: bool,
    saving: bool,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    jump: Callable[[], None],
) -> None:
    """It compiles, or waits for a disk; unless it still has steps to save."""
    monkeypatch.setattr("engine.stop_signal.ANSWER_SECONDS", 900)
    statuses = list[int]()
    monkeypatch.setattr(os, "_exit", statuses.append)
    with StopSignal(ALONE, unsaved=lambda: unsaved) as stop:
        with stop.saving("run/checkpoints", 0) if saving else nullcontext():
            signal.raise_signal(signal.SIGTERM)
            assert 800 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900
            jump()
            signal.raise_signal(signal.SIGALRM)
    assert statuses == ([] if message is None else [128 + signal.SIGTERM])
    assert message is None or f"SIGTERM: {message}" in caplog.text
