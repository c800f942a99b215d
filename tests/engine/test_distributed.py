"""Ranks: a world of size 1 in this process, and two gloo ranks in child processes."""

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conf.compose import from_overrides
from conf.errors import UserError
from engine.compute import choose_compute
from engine.distributed import World, join_world, resolve_device
from engine.schedule import Schedule
from engine.state import params_sha256
from engine.stop_signal import StopSignal
from pipeline.data.build import build_datasets
from pipeline.feed.loader import Pool
from tests.engine.plans import ALONE
from tests.helpers.processes import run_command
from tests.helpers.results import column
from tests.helpers.small_run import command
from train import build_state, forward


def test_join_world_reads_torchrun_variables(monkeypatch):
    """Rank 1 on the second of two nodes. Without WORLD_SIZE, the other variables are ignored."""
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.append(more))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 3, 4)]))
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with join_world("cpu") as world:
        assert world == ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    with join_world("cpu", timeout_seconds=60) as world:
        assert world == World(3, 4, 2, torch.device("cpu"))
    (group,) = given
    assert group.pop("store") is store
    assert group == {"timeout": timedelta(minutes=10), "rank": 3, "world_size": 4}


@pytest.mark.parametrize(("size", "reason"), [("2", "'RANK'"), ("two", "invalid literal")])
def test_join_world_reports_wrong_variables(size, reason, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match=f"^WORLD_SIZE, .*{reason}.*; start with torchrun, or"):
        join_world("cpu").__enter__()


def test_world_with_two_ranks(ranks):
    done = ranks.run([sys.executable, str(Path(__file__).with_name("two_ranks.py"))], 2)
    lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.10
    assert lines == ["rank 0 is done", "rank 1 is done"], done.stderr


def test_resolve_device(monkeypatch):
    def gpus(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    gpus(0)
    assert resolve_device("auto") == torch.device("cpu")
    gpus(2)
    assert resolve_device("auto", 1) == resolve_device("cuda", 1) == torch.device("cuda", 1)
    assert resolve_device("cpu", 1) == torch.device("cpu")
    message = r"^train\.device=cuda: torch sees 2 of 3 devices on .+; start at most"
    for rank in (0, 2):  # also on ranks that have a GPU
        with pytest.raises(UserError, match=message):
            resolve_device("auto", rank, 3)


def test_sync_bn_conversion_keeps_weights_and_keys():
    """Only the conversion, because SyncBatchNorm needs a GPU; the next test computes it."""
    config = from_overrides(
        ["data=fake", "model=resnet_tiny", "data.image_size=32", "model.sync_bn=true"]
    )
    datasets = build_datasets(config)
    compute = choose_compute(config, datasets, Schedule(config, 100), ALONE.device, forward)
    made = config, datasets, compute
    one, two = (build_state(*made, replace(ALONE, size=size)).model for size in (1, 2))
    assert {*map(type, two.modules())} - {*map(type, one.modules())} == {nn.SyncBatchNorm}
    assert {*map(type, one.modules())} - {*map(type, two.modules())} == {nn.BatchNorm2d}
    assert params_sha256(one) == params_sha256(two)
    assert one.state_dict().keys() == two.state_dict().keys()


# The low learning rate keeps rounding errors small. The last of 23 steps are CUDA graphs.
STEPS = 23
OPTIONS = [
    *("train.device=cuda", "train.precision=fp32", "train.deterministic=true", "train.epochs=5"),
    *("loader.decoder=pillow", "optim.lr=0.01", "model.compile=off"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMPILED = pytest.param(["model.compile=default"], marks=pytest.mark.slow)


def losses(arguments: list[str], folder: Path, gpus: str) -> torch.Tensor:
    """Train; return the training loss of every step, and the validation losses."""
    done = run_command(arguments, {"CUDA_VISIBLE_DEVICES": gpus}, seconds=240)
    assert done.returncode == 0, done.stderr
    assert "not captured" not in done.stderr
    train = column(folder, "train", "loss")
    assert len(train) == STEPS
    return torch.tensor(train + column(folder, "val", "loss"))


@pytest.mark.gpu
@pytest.mark.timeout(720)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", [[], COMPILED], ids=["eager", "compiled"])
def test_sync_bn_two_ranks_equal_one(image_root, tmp_path, more):
    found = {}
    # One GPU trains without torch.compile, whose BatchNorm rounds differently, because
    # SyncBatchNorm is not compiled. Two H200s gave equal bits in both modes, and two H100s without
    # compilation; there, compiled losses differ by up to 0.004, and those of `apart` by 0.13.
    one = tmp_path / "one"
    found["one"] = losses(command(image_root, one, *OPTIONS), one, "0")
    for name, overrides in (("synchronized", ["model.sync_bn=true", *more]), ("apart", more)):
        python, *words = command(image_root, tmp_path / name, *OPTIONS, *overrides)
        found[name] = losses([python, *TORCHRUN, *words], tmp_path / name, "0,1")
    torch.testing.assert_close(found["synchronized"], found["one"], rtol=1e-2, atol=1e-4)
    assert (found["apart"] - found["one"]).abs().max() > 0.02


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("number", STOPS)
def test_stop_signal_restores_handlers(number):
    before = [*map(signal.getsignal, STOPS)]
    with StopSignal(ALONE, Pool([])) as stop:
        assert not stop.poll()
        assert stop.number == stop.received == 0
        os.kill(os.getpid(), number)
        assert (stop.poll(), stop.poll()) == (True, True)
        assert stop.number == stop.received == number
    assert [*map(signal.getsignal, STOPS)] == before


def test_stop_signal_repeated_and_ignored(capfd):
    """A scheduler may send SIGTERM twice. A second Ctrl-C interrupts anything in one process."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(ALONE, Pool([])) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.poll()  # ignored, like under nohup
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert (stop.poll(), stop.number) == (True, signal.SIGINT)
            assert capfd.readouterr().err.endswith("Ctrl-C again stops without a checkpoint\n")
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
    with StopSignal(replace(ALONE, size=2), Pool([])):  # sent by torchrun and the terminal
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
