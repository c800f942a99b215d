"""Memory that grows over epochs is named; a warm-up, noise and a single jump are not."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from engine.log.leaks import GPU, LEAST_SHARE, MIB, TRAINER, WORKERS, Leaks, growth, memory_now
from pipeline.augment import HorizontalFlip, Picture
from tests.processes import needs_linux
from tests.small_run import compose, run

CPU = torch.device("cpu")


def of(*mebibytes: float, share: float = LEAST_SHARE) -> float | None:
    """Growth in MiB per epoch."""
    found = growth([round(size * MIB) for size in mebibytes], least_share=share)
    return None if found is None else found / MIB


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ((0, 0, 300, 310, 320, 330), 10),
        ((0, 0, 300, 310, 320), None),  # 3 epochs after the warm-up
        ((900, 0, 300, 310, 320, 330), 10),  # the first two epochs do not count
        ((0, 0, 300, 310, 320, 330, 340, 350, 360), 10),
        ((0, 0, *range(300, 1200, 10)), 10),
        ((0, 0, 300, 309, 322, 329, 341), 10),
        ((0, 0, 300, 303, 306, 309), None),  # too slow to matter
        ((0, 0, 30_000, 30_010, 30_020, 30_030), None),  # relative to what is in use
        ((0, 0, 300, 320, 310, 330), None),
        ((0, 0, 300, 380, 395, 400), None),  # levels off
        ((0, 0, 300, 310, 320, 320), None),
        ((0, 0, 300, 300, 300, 400), None),  # a single jump
        ((0, 0, 340, 330, 320, 310), None),
        ((), None),
    ],
)
def test_growth(sizes: Sequence[float], rate: float | None) -> None:
    assert of(*sizes) == (rate if rate is None else pytest.approx(rate, rel=0.15))


def test_growth_relative_to_the_memory_in_use() -> None:
    assert of(0, 0, 30_000, 30_010, 30_020, 30_030, share=0.0) == pytest.approx(10)


@pytest.mark.parametrize("epochs", [8, 30])
def test_no_false_alarm(epochs: int) -> None:
    """Fluctuations of 1 %, and pools that fill up, at the end of every epoch of 40 runs."""
    rng, alarms = np.random.default_rng(epochs), 0
    for _ in range(40):
        noise = rng.uniform(-1, 1, epochs)
        filling = 1 - 0.2 * np.exp(-np.arange(epochs) / rng.uniform(0.3, 1))
        for sizes in (3000 * (1 + 0.01 * noise), 3000 * (filling + 0.003 * noise)):
            alarms += sum(of(*sizes[:end]) is not None for end in range(epochs + 1))
    assert alarms == 0


@pytest.mark.parametrize("epochs", [8, 20, 90])
def test_leaks_are_found_in_noise(epochs: int) -> None:
    rng = np.random.default_rng(epochs)
    found = []
    for _ in range(40):
        sizes = 1000 + 40 * np.arange(epochs) + rng.uniform(-10, 10, epochs)
        found.append(of(*sizes))
    assert all(rate == pytest.approx(40, rel=0.1) for rate in found)


def test_epochs_of_one_setting_are_compared() -> None:
    """Larger images need more memory."""
    leaks = Leaks()
    for epoch in range(9):
        leaks.note({GPU: (100 + 50 * epoch) * MIB}, setting=64 + 32 * epoch)
        assert leaks.sentences() == []
    for epoch in range(5):
        leaks.note({GPU: (500 + 50 * epoch) * MIB, TRAINER: MIB}, setting="fixed")
    assert leaks.sentences() == []
    leaks.note({GPU: 750 * MIB, TRAINER: MIB}, setting="fixed")
    (line,) = leaks.sentences()
    assert line.startswith(
        f"memory leak: the memory of {GPU} grows by 50 MB per epoch, from 600 to 750"
    )


def test_memory_of_this_process() -> None:
    needs_linux()
    gc.collect()
    before = memory_now([], CPU)
    held = np.ones(64 * MIB, np.uint8)
    assert memory_now([], CPU)[TRAINER] - before[TRAINER] == pytest.approx(held.nbytes, rel=0.1)
    assert before[WORKERS] == 0 and GPU not in before


def test_a_system_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert memory_now([1], CPU) == {}


@pytest.mark.gpu
def test_tensors_that_are_kept() -> None:
    leaks, device = Leaks(), torch.device("cuda")
    kept = []
    for _ in range(7):
        kept.append(torch.ones(8 * MIB, dtype=torch.uint8, device=device))
        leaks.note(memory_now([], device), setting=None)
    assert any(f"the memory of {GPU} grows by 8 MB per epoch" in s for s in leaks.sentences())


# 36 images in batches of 8, whose loader runs ahead by less than an epoch
OPTIONS = ["train.validate_every_epochs=99", "log.every_steps=1000", "loader.start_method=fork"]
OPTIONS += ["loader.prefetch_factor=1", "loader.prefetch_batches=1"]


@pytest.mark.usefixtures("whole_runs", "own_logging")
def test_leaks_of_a_fork_are_named(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A transform and a training step that extend a list."""
    needs_linux()
    kept: list[Any] = []
    flip, step = HorizontalFlip.__call__, train.train_step

    def flip_and_keep(transform: HorizontalFlip, picture: Picture, rng: Any) -> Picture:
        kept.append(np.ones(MIB, np.uint8))
        return flip(transform, picture, rng)

    def step_and_keep(*arguments: Any, **options: Any) -> Any:
        kept.append(np.ones(4 * MIB, np.uint8))
        return step(*arguments, **options)

    monkeypatch.setattr(HorizontalFlip, "__call__", flip_and_keep)
    monkeypatch.setattr(train, "train_step", step_and_keep)
    summary = run(image_root, tmp_path / "run", *OPTIONS, "train.epochs=9")
    of_trainer, of_workers = (
        [line for line in summary["verdict"] if line.startswith(f"memory leak: the memory of {o}")]
        for o in (TRAINER, WORKERS)
    )
    assert len(of_trainer) == len(of_workers) == 1
    rate = float(of_trainer[0].split(" by ")[1].split()[0])
    assert 12 <= rate <= 24  # 4.5 steps an epoch
    assert 24 <= float(of_workers[0].split(" by ")[1].split()[0]) <= 48  # 36 images
    assert "verdict  memory leak: " in capsys.readouterr().out  # at the end of an epoch, too


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_healthy_run_has_no_leak(method: str, image_root: Path, tmp_path: Path) -> None:
    options = [f"loader.start_method={method}", "loader.workers=2", "train.epochs=20"]
    options += ["log.trackers=[tensorboard]", "train.validate_every_epochs=1"]
    assert train.main(compose(image_root, tmp_path / "run", *options)) == 0
    assert "memory leak" not in (tmp_path / "run" / "summary.json").read_text()
    verdict = tmp_path / "run" / "verdict.json"
    assert not verdict.exists() or "memory leak" not in verdict.read_text()
