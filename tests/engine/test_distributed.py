"""Ranks: a world of size 1 in this process, and two gloo ranks in processes."""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf import cli
from conf.schema import UserError
from conf.signals import STOPS
from engine import distributed
from engine.distributed import (
    RankError,
    StopSignal,
    World,
    _lost_ranks_explained,
    join_world,
    resolve_device,
)
from engine.heartbeat import Heartbeat
from engine.log.predictions import Predictions
from engine.plan import make_plan
from engine.state import TrainState, params_sha256
from engine.validation import evaluate
from pipeline.build import build_datasets
from pipeline.loader import LoaderError
from pipeline.prefetcher import Batch
from tests.engine.two_ranks import small_convnet
from tests.processes import HANGS_SECONDS
from tests.ranks import free_port
from train import build_state, train_step, training_loss
from train import validation_values as measure

ROOT = Path(__file__).parents[2]
Found = dict[str, Any]


def alone() -> World:
    return World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))


@pytest.fixture
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_torchrun")
def test_world_of_size_1() -> None:
    with join_world("cpu") as world:
        assert world == alone()
        assert world.is_main
        assert world.broadcast(lambda: 5) == 5
        with pytest.raises(UserError, match="own"):
            world.broadcast(lambda: (_ for _ in ()).throw(UserError("own")))
        assert world.all_gather("own") == world.local_values(["own"]) == ["own"]
        assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
        model = nn.BatchNorm1d(2)
        assert world.wrap(model, torch.zeros(1, 4)) is model
        world.broadcast_buffers(model)
        assert not torch.distributed.is_initialized()


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in (
            *(("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=rf"^MASTER_PORT={port}: Address already in use; "):
            join_world("cpu").__enter__()


def test_a_port_of_another_program() -> None:
    """The other ranks do not wait for it as long as for a rank that starts late."""
    code = (
        "from engine import distributed, heartbeat; heartbeat.START_FACTOR = 1e6; "
        "distributed.join_world('cpu', 1.0).__enter__()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": str(server.getsockname()[1]), "PYTHONPATH": str(ROOT)}
        rank = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=HANGS_SECONDS,
        )
    assert rank.returncode == 1
    assert "MASTER_ADDR, MASTER_PORT: the process that listens there does not" in rank.stderr


@pytest.mark.usefixtures("_no_torchrun")
def test_an_unknown_host_and_a_port_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", str(free_port()))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(UserError, match=r"^MASTER_ADDR=nowhere.invalid: "):
        join_world("cpu", 0.1).__enter__()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RankError, match=r"^MASTER_ADDR=localhost, MASTER_PORT=\d+: Connection "):
        join_world("cpu", 0.1).__enter__()


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (RuntimeError("[../gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Gloo connectFullMesh failed with [../gloo/pair.cc:1] no error"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (LoaderError("/images/igloo/1.jpg: truncated"), False),
        (LoaderError("[gloo/1.jpg]: truncated"), False),
        (RuntimeError("/images/igloo/1.jpg: truncated"), False),
    ],
)
def test_only_errors_about_other_ranks_are_explained(error: Exception, explained: bool) -> None:
    with pytest.raises(RankError if explained else type(error)) as caught:
        with _lost_ranks_explained(Heartbeat(0, 120)):
            raise error
    assert isinstance(caught.value, RankError) == explained


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(
        UserError, match=r"^train\.device=cuda: torch sees 0 GPUs on .+, which has 1 rank\(s\); "
    ):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(choice, 1) for choice in ("auto", "cuda", "cpu")] == [
        torch.device("cuda", 1),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]
    for choice in ("auto", "cuda"):
        with pytest.raises(
            UserError,
            match=rf"^train\.device={choice}: torch sees 2 GPUs on .+, which has 3 rank\(s\); ",
        ):
            resolve_device(choice, 2)
        # Ranks that have a GPU raise it as well.
        with pytest.raises(UserError):
            resolve_device(choice, 0, 3)


@pytest.mark.parametrize("number", STOPS)
def test_signal_is_received_and_the_handler_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in STOPS]
    with StopSignal(alone()) as stop:
        stop.poll()
        assert stop.number == stop.received == 0 and not stop
        os.kill(os.getpid(), number)
        for _ in range(2):
            stop.poll()
            assert stop.number == stop.received == number and stop
    assert [signal.getsignal(n) for n in STOPS] == before


def test_second_ctrl_c_interrupts() -> None:
    with StopSignal(alone()) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        stop.poll()
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_ends_a_wait_for_input_and_nothing_else() -> None:
    with StopSignal(alone()) as stop:
        assert stop.wait_for(lambda: 5) == 5
        assert stop.wait_for(lambda: signal.raise_signal(signal.SIGTERM) or time.sleep(600)) is None
        assert stop.wait_for(lambda: 5) is None
        assert list(stop.interruptible(iter(range(3)))) == []
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """As with a thousand shards: the next file has a number that select() does not support."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + 1100
    if limits[1] != resource.RLIM_INFINITY and limits[1] < wanted + 100:
        pytest.skip("needs a higher ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], wanted + 100), limits[1]))
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_open_files")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_that_a_destructor_has_swallowed() -> None:
    """It ends the wait all the same, and Ctrl-C was pressed only once."""

    class Closes:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def wait() -> None:
        Closes()
        time.sleep(600)

    with StopSignal(alone()) as stop:
        assert stop.wait_for(wait) is None
        assert stop.poll()
        assert stop.number == signal.SIGINT


@pytest.mark.parametrize(("unsaved", "status"), [(False, 128 + signal.SIGTERM), (True, None)])
def test_signal_before_another_rank_has_ended(
    unsaved: bool, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks give up before the first step: the status is that of the signal."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    closed = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    stop = StopSignal(alone(), unsaved=lambda: unsaved).__enter__()
    signal.raise_signal(signal.SIGTERM)
    stop.__exit__(RuntimeError, closed, None)
    assert statuses == ([] if status is None else [status])


def test_a_name_that_is_not_yet_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod of Kubernetes."""
    connect, errors = socket.create_connection, [socket.EAI_AGAIN, socket.EAI_NONAME]

    def connect_later(*arguments: Any, **options: Any) -> socket.socket:
        if errors:
            raise socket.gaierror(errors.pop(), "unknown")
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", connect_later)
    with socket.create_server(("127.0.0.1", 0)) as server:
        distributed._wait_for_port("127.0.0.1", server.getsockname()[1], 60)
    errors.append(socket.EAI_FAIL)
    with pytest.raises(UserError, match=r"^MASTER_ADDR=127.0.0.1: unknown; "):
        distributed._wait_for_port("127.0.0.1", 1, 60)


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun's while torchrun is stopped. The end does not wait for it."""
    answer = threading.Event()
    monkeypatch.setattr(distributed, "_own_store", answer.wait)
    began = time.monotonic()
    with StopSignal(replace(alone(), size=2)):
        pass
    assert time.monotonic() - began < 30
    answer.set()


def test_ignored_hangup_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(alone()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.poll()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_repeated_sigterm_does_not_interrupt_the_save() -> None:
    with StopSignal(alone()) as stop:
        # A scheduler may send a signal twice.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        stop.poll()
        assert stop.number == signal.SIGINT


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """Results of two_ranks.py on each rank; the second rank receives SIGTERM while they run."""
    folder = tmp_path_factory.mktemp("ranks")
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("two_ranks.py"), folder],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ready = [folder / f"ready-{rank}" for rank in (0, 1)]
    # This ends: the processes stop after two minutes.
    while not all(path.exists() for path in ready) and all(
        process.poll() is None for process in processes
    ):
        time.sleep(0.01)
    if processes[1].poll() is None:
        processes[1].send_signal(signal.SIGTERM)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    first, second = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def test_world(ranks: tuple[Found, Found]) -> None:
    assert ranks[0]["world"] == [0, 2, 0, 2, "cpu", True]
    assert ranks[1]["world"] == [1, 2, 1, 2, "cpu", False]


def test_agree(ranks: tuple[Found, Found]) -> None:
    for found in ranks:
        assert found["agreement"]["values"] == ["runs/a", "None", "{'x': 1}"]
        assert found["agreement"]["errors"] == [
            ["UserError", "run.dir=x: is a file"],
            ["OSError", "[Errno 28] No space left on device"],
        ]
    assert [found["agreement"]["decided"] for found in ranks] == [5, 0]


def test_gather_and_all_or_none(ranks: tuple[Found, Found]) -> None:
    for rank, found in enumerate(ranks):
        assert found["all_or_none"] == [10 * rank, "rank 1 has no memory"]
        assert found["gathering"] == {
            "ranks": [0, 1],
            "paths": ["runs/0", "runs/1"],
            "of_node": [0, 1],
        }


def test_ranks_of_a_node() -> None:
    """Nodes may have different numbers of ranks."""
    for first, local_size in ((0, 4), (4, 2), (6, 2)):
        for local_rank in range(local_size):
            world = World(
                rank=first + local_rank,
                size=8,
                local_rank=local_rank,
                local_size=local_size,
                device=torch.device("cpu"),
            )
            assert world.local_values([*range(8)]) == [*range(first, first + local_size)]


def test_sum(ranks: tuple[Found, Found]) -> None:
    assert [found["sums"] for found in ranks] == [[3, 30], [3, 30]]


def test_share_buffers(ranks: tuple[Found, Found]) -> None:
    for found in ranks:
        assert found["buffers"] == {"mean": [1, 1, 1], "count": 5, "weight_is_own": True}


def test_gradients_are_averaged_and_buffers_are_not(
    ranks: tuple[Found, Found],
) -> None:
    torch.manual_seed(0)
    model, images = small_convnet(), torch.randn(8, 3, 6, 6)
    (model(images[:4]).square().mean() + model(images[4:]).square().mean()).div(2).backward()
    for found in ranks:
        assert [one["is_model"] for one in found["gradients"]] == [True, False]
        for one in found["gradients"]:
            for layer, gradient in zip((0, 1, 4), one["gradients"], strict=True):
                expected = model[layer].weight.grad
                torch.testing.assert_close(torch.tensor(gradient), expected)
            assert one["frozen"] and one["statistics_are_own"]
            assert one["keys"] == ["0.weight", "0.bias"]  # without the prefix `module.`


def test_a_rank_may_leave_out_a_layer(ranks: tuple[Found, Found]) -> None:
    assert [found["layers_left_out"] for found in ranks] == [[0.5, 0.5]] * 2


def test_micro_batches_exchange_gradients_once_a_step(ranks: tuple[Found, Found]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 3))
    images, labels = torch.randn(8, 3, 2, 2), torch.randint(0, 3, (8,))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    for step in range(3):
        batch = Batch(images, labels, labels, step, torch.zeros(len(labels), 2, dtype=torch.int64))
        train_step(state, model, training_loss, batch, lr=0.5)
    for found in ranks:
        for one in found["accumulation"]:
            weight = torch.tensor(one["weight"])
            torch.testing.assert_close(weight, model[3].weight.detach(), rtol=1e-5, atol=1e-6)
        assert [one["exchanged"] for one in found["accumulation"]] == [3, 3]


def test_a_nan_on_one_rank_ends_the_updates_of_both(ranks: tuple[Found, Found]) -> None:
    one, two = (found["divergence"] for found in ranks)
    first, second, third = one["weights"]
    assert first == second == third and one["weights"] == two["weights"]
    assert one["read"][0] == two["read"][0] == 2
    assert math.isfinite(one["read"][1]) and math.isnan(two["read"][1])  # losses are their own


def test_sync_bn_keeps_weights_and_keys() -> None:
    """Only its conversion: torch has SyncBatchNorm for GPUs only."""
    config = cli.load(
        ["data=fake", "model=resnet_tiny", "data.image_size=32", "model.sync_bn=true"]
    )
    plan = make_plan(config, build_datasets(config), alone())
    one, two = (build_state(plan, replace(alone(), size=size)).model for size in (1, 2))
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in one.modules())
    kinds = (nn.BatchNorm2d, nn.SyncBatchNorm)
    converted = [type(module) for module in two.modules() if isinstance(module, kinds)]
    assert converted and set(converted) == {nn.SyncBatchNorm}
    assert params_sha256(one) == params_sha256(two)
    assert one.state_dict().keys() == two.state_dict().keys()


def test_validation_with_different_numbers_of_batches(ranks: tuple[Found, Found]) -> None:
    torch.manual_seed(1)
    model, images, labels = nn.Linear(6, 8), torch.randn(25, 6), torch.randint(0, 8, (25,))
    each: list[dict[str, torch.Tensor]] = []
    (expected,) = evaluate([model], measure, [(images, labels)], alone(), each)
    rows = Predictions.gather(each, alone())
    for found in ranks:
        assert found["validation"]["metrics"] == pytest.approx(
            [expected.loss, expected.top1, expected.top5, 25]
        )
        assert found["validation"]["labels"] == labels.tolist()
        assert found["validation"]["losses"] == pytest.approx(rows.losses.tolist())
    assert ranks[0]["validation"] == ranks[1]["validation"]
    assert 0 < expected.top1 < 100


def test_meter_averages_over_the_ranks(ranks: tuple[Found, Found]) -> None:
    assert [found["metering"] for found in ranks] == [[6, 25]] * 2


def test_signal_to_one_rank_stops_both_at_the_same_step(ranks: tuple[Found, Found]) -> None:
    cases = {
        "one_signalled": (signal.SIGUSR1, 5),
        "both_signalled": (signal.SIGTERM, 3),  # the higher number
        "first_step": (signal.SIGTERM, 0),
        "signalled_once": (signal.SIGUSR1, 2),
    }
    for case, (number, earliest) in cases.items():
        step, agreed, asked_again = ranks[0][case]
        assert ranks[1][case] == ranks[0][case]
        assert agreed == asked_again == number
        assert step == earliest  # no rank begins a step that another does not take


def test_a_failed_checkpoint_of_rank_0_stops_both_at_the_same_step(
    ranks: tuple[Found, Found],
) -> None:
    one, two = (rank["after_a_failed_checkpoint"] for rank in ranks)
    assert one == two and one[1] == StopSignal.FAILED


@pytest.mark.parametrize("signalled", [0, 1])
def test_signal_to_any_rank_ends_the_wait_for_input_of_one(
    signalled: int, ranks: tuple[Found, Found]
) -> None:
    """No rank takes a step for which the other has no batch."""
    waiting, stuck = (rank[f"stalled_{signalled}"] for rank in ranks)
    assert stuck == [0, 1, signal.SIGTERM, signal.SIGTERM, 0]
    assert waiting == [0, 1, signal.SIGTERM, signal.SIGTERM, 2]


def test_signal_from_outside_stops_both_at_the_same_step(ranks: tuple[Found, Found]) -> None:
    assert ranks[0]["from_outside"] == ranks[1]["from_outside"]
    assert ranks[0]["from_outside"][1] == signal.SIGTERM
    assert math.isfinite(ranks[0]["from_outside"][0])
