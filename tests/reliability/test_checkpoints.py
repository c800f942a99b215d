"""Foreign, hostile and damaged checkpoints are rejected in one line, without running their code."""

import copy
import math
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import train
from conf.errors import RunError, UserError
from engine import checkpoint
from engine.run import Run, checkpoint_metadata
from scripts.lib.trained import open_trained
from tests.engine.plans import ALONE
from tests.helpers import small_run
from tests.helpers.results import same

OPTIONS = ("train.ema_decay=0.9", "loader.workers=0")
Content = dict[str, Any]
Reader = Callable[[Path], object]


class Touch:
    """Its pickle creates a file."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


# Neither checkpoints nor weights, so every reader rejects them.
FILES: dict[str, Callable[[Content, Path], object]] = {
    "directory": lambda _, path: path.mkdir(),
    "pipe": lambda _, path: os.mkfifo(path),
    "empty": lambda _, path: path.touch(),
    "text": lambda _, path: path.write_text("step: 5\n" * 1000),
    "zip without a pickle": lambda _, path: zipfile.ZipFile(path, "w").writestr("a/data.pkl", b""),
    "truncated zip": lambda content, path: [torch.save(content, path), os.truncate(path, 5000)],
    "bit flip": lambda content, path: flip(content["state"]["model"]["fc.weight"], content, path),
    "os.system": lambda _, path: torch.save(Touch(), path),
}


def flip(weight: torch.Tensor, content: Content, path: Path) -> None:
    """Write a file with one flipped bit in a weight."""
    torch.save(content, path)
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(toy_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint after 5 of 9 steps of a run with an EMA."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run.run(image_root, folder, *OPTIONS, "train.max_steps=5")
    return folder / "checkpoints" / "step-00000005.pt"


@pytest.fixture(scope="module")
def content(saved: Path) -> Content:
    return checkpoint.load(saved)


@pytest.fixture(scope="module")
def readers(saved: Path, image_root: Path) -> list[Reader]:
    """Return functions that open a path to resume from it, as newest checkpoint or as weights."""
    config = small_run.compose(image_root, saved.parents[1], *OPTIONS)
    parts = train.build_parts(config, ALONE, checkpoint.load(saved))
    metadata = checkpoint_metadata(parts)

    def resume(path: Path) -> None:
        words = [*OPTIONS, f"checkpoint.resume={path}"]
        with Run(small_run.compose(image_root, path.parents[1] / "run", *words), ALONE) as opened:
            opened.read_checkpoint()
            opened.resume(parts.state, metadata, parts.schedule.stop_step)

    model = models.build("resnet_tiny", num_classes=3, image_size=32)
    return [
        resume,
        lambda path: checkpoint.load_newest([path]),
        lambda path: models.load_weights(model, path),
        lambda path: open_trained(path).build(torch.device("cpu")),
    ]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    return tmp_path / "files" / "step-00000005.pt"


def check_rejected(reader: Reader, path: Path) -> None:
    """Check that a file is rejected in one line with its path, and that nothing is created."""
    with pytest.raises((UserError, RunError)) as error:
        reader(path)
    message = str(error.value)
    assert str(path) in message
    assert len(" ".join(message.splitlines())) < 1000
    assert (os.listdir(), os.listdir("files")) == (["files"], [path.name])


@pytest.mark.parametrize("kind", FILES)
def test_readers_reject_other_files(kind, content, readers, path):
    FILES[kind](content, path)
    for reader in readers:
        check_rejected(reader, path)


FOREIGN = [{"format": 1}, {"format": torch.ones(2)}, {"identity": None}, {"state": {"model": {}}}]


@pytest.mark.parametrize("changed", FOREIGN)
def test_resume_rejects_foreign_checkpoint(changed, content, readers, path):
    torch.save(content | changed, path)
    check_rejected(readers[0], path)


DAMAGED = [None, "x", {"momentum_buffer": torch.zeros(3)}]
DAMAGED_STATES = [("optimizer", "state", {0: value}) for value in DAMAGED]
DAMAGED_STATES += [("model", "bn1.running_var", torch.full((32,), math.nan))]


@pytest.mark.parametrize(("part", "name", "value"), DAMAGED_STATES)
def test_resume_rejects_damaged_state(part, name, value, content, readers, path):
    """An optimizer state that no step accepts, and weights that are not finite."""
    state = copy.deepcopy(content["state"])
    state[part][name] = value
    torch.save(content | {"state": state}, path)
    check_rejected(readers[0], path)


def test_readers_accept_earlier_key_names(content, readers, image_root, path):
    """Readers accept a checkpoint from an earlier version, so they do not reject everything."""
    identity = dict(content["identity"])
    identity["pixels"] = identity.pop("decode_mode")
    identity["fitted_batch"] = identity.pop("fitted_micro_batch")
    old = {**content, "identity": identity}
    old["plan"] = old.pop("model_input")
    torch.save(old, path)
    for reader in readers:
        reader(path)
    assert (path.parents[1] / "run").exists()
    resume = f"checkpoint.resume={path}"
    resumed = small_run.run(image_root, path.parents[1] / "resumed", *OPTIONS, resume)
    straight = small_run.run(image_root, path.parents[1] / "straight", *OPTIONS)
    assert resumed["params_sha256"] == straight["params_sha256"]


def is_detected(whole: bytes, path: Path, seed: int, content: Content) -> bool:
    """Damage a file; return whether loading rejects it, or still returns the same content."""
    data, rng = bytearray(whole), random.Random(seed)
    start, way = rng.randrange(len(data)), rng.randrange(3)
    if way == 0:
        data[start] ^= 1 << rng.randrange(8)
    elif way == 1:
        end = min(len(data), start + rng.randrange(1, 4096))
        data[start:end] = rng.randbytes(end - start)
    else:
        del data[start:]
    path.write_bytes(data)
    try:
        return same(content, checkpoint.load(path))
    except (RunError, UserError) as error:
        return str(path) in str(error)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_checkpoint_load_detects_damage(count, saved, content, path):
    whole = saved.read_bytes()
    assert not [seed for seed in range(count) if not is_detected(whole, path, seed, content)]
