"""Foreign, hostile and damaged checkpoints: refused in one line, and no code in them runs."""

import copy
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import train
from conf.schema import UserError
from engine import checkpoint
from engine.checkpoint import CheckpointError
from engine.run import Run, run_identity
from scripts.lib.trained import open_trained
from tests import small_run
from tests.engine.plans import ALONE
from tests.figures import Record
from tests.results import same

NAME = "step-00000005.pt"
OPTIONS = ("train.epochs=1", "train.ema_decay=0.9", "loader.workers=0")
Content = dict[str, Any]
Make = Callable[[Content, Path], object]
Open = Callable[[Path, Path], None]


def pickled(program: bytes) -> Make:
    """A file as of torch.save, whose data.pkl is this program of the pickle machine."""

    def make(_: Content, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            records = {"data.pkl": program, "byteorder": b"little", "version": b"3\n"}
            for name, record in records.items():
                file.writestr(f"archive/{name}", record)

    return make


def written(data: bytes) -> Make:
    return lambda _, path: path.write_bytes(data)


def call(function: bytes, argument: str) -> bytes:
    """Return a pickle that calls a function of a module, `module\\nname`, with a text."""
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    return b"\x80\x02c" + function + b"\n" + text + b"\x85R."


def touching(content: Content, path: Path) -> None:
    """Create a file beside it when it is unpickled."""
    pickled(call(b"os\nsystem", f"touch {path}.executed"))(content, path)


def cut_off(content: Content, path: Path) -> None:
    torch.save(content, path)
    os.truncate(path, 5000)


# Nothing here is a checkpoint or a file with weights.
FILES: dict[str, Make] = {
    "directory": lambda _, path: path.mkdir(),
    "dangling link": lambda _, path: path.symlink_to("gone"),
    "empty": written(b""),
    "text": written(b"step: 5\n" * 1000),
    "zip without a pickle": pickled(b""),
    "zip cut off": cut_off,
    "os.system": touching,
    "__builtin__.eval": pickled(call(b"__builtin__\neval", "1")),
    "unknown opcode": pickled(b"\x80\x02\xff."),
}


def put(*path: Any) -> Make:
    """Set an item of the content: the names that lead to it, then its value; `drop` removes it."""
    *names, last, value = path

    def change(content: Content, to: Path) -> None:
        content = target = copy.deepcopy(content)
        for name in names:
            target = target[name]
        if value == "drop":
            del target[last]
        else:
            target[last] = value(target[last]) if callable(value) else value
        torch.save(content, to)

    return change


GROUPS = ("state", "optimizer", "param_groups")
# A real checkpoint with one change. The model is resnet_tiny with a moving average and SGD.
CONTENTS: dict[str, Make] = {
    **{f"no {name}": put(name, "drop") for name in ("format", "step", "state", "identity")},
    "step as text": put("step", "5"),
    "identity with a tensor": put("identity", "model.name", torch.zeros(3)),
    "state is a list": put("state", [1]),
    **{
        f"no {name} in the state": put("state", name, "drop")
        for name in ("model", "ema", "ema_steps", "optimizer", "best", "last", "origin", "history")
    },
    "no weights": put("state", "model", {}),
    "no averaged weights": put("state", "ema", {}),
    "no first layer": put("state", "model", "conv1.weight", "drop"),
    "weights as a list": put("state", "model", [1]),
    "layer unknown": put("state", "model", "conv9.weight", torch.zeros(1)),
    "layer of another shape": put("state", "model", "conv1.weight", torch.zeros(3)),
    "updates of the average": put("state", "ema_steps", torch.zeros(3)),
    "optimizer without groups": put(*GROUPS, []),
    **{f"{name} as a number": put("state", name, 3) for name in ("history", "best", "last")},
    "optimizer with a short group": put(*GROUPS, 0, "params", lambda numbers: numbers[1:]),
}


@pytest.fixture(scope="module")
def run(toy_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with a moving average."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run.run(image_root, folder, *OPTIONS)
    return folder


@pytest.fixture(scope="module")
def content(run: Path) -> Content:
    return checkpoint.load(run / "checkpoints" / NAME)


@pytest.fixture(scope="module")
def resume(run: Path, image_root: Path) -> Open:
    """Return a function that opens a run directory to resume from a path, as train() does."""
    config = small_run.compose(image_root, run, *OPTIONS)
    datasets, schedule, compute, state = train.prepare(config, Run(config, ALONE), ALONE)
    identity = run_identity(datasets, schedule, compute)

    def open_run(folder: Path, path: Path) -> None:
        given = replace(config.checkpoint, resume=str(path))
        started = replace(config, run=replace(config.run, dir=str(folder)), checkpoint=given)
        with Run(started, ALONE) as opened:
            opened.find()
            opened.resume(state, identity, {}, schedule.stop_step)

    return open_run


def load_weights(_: Path, path: Path) -> None:
    models.load_weights(models.build("resnet_tiny", num_classes=3, image_size=32), path)


def open_model(_: Path, path: Path) -> None:
    open_trained(path).build(torch.device("cpu"))


def planted(_: Path, path: Path) -> None:
    """Resume from a file that is the newest checkpoint of a run."""
    found = checkpoint.newest_intact(path.parent)
    assert found is not None
    checkpoint.load(found)


def refused(open_file: Open, path: Path, folder: Path) -> str:
    """Check that a file is refused in one line that names it, and that nothing is created."""
    before = {p.name for p in path.parent.iterdir()}
    with pytest.raises((UserError, CheckpointError)) as error:
        open_file(folder, path)
    message = str(error.value)
    assert str(path) in message and len(" ".join(message.splitlines())) < 1000
    assert {p.name for p in path.parent.iterdir()} == before and not folder.exists()
    return message


@pytest.mark.parametrize("case", FILES)
def test_file_that_is_no_checkpoint(
    case: str, content: Content, resume: Open, tmp_path: Path, figure: Record
) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / NAME
    FILES[case](content, path)
    for entry_point in (resume, load_weights, open_model, planted):
        refused(entry_point, path, tmp_path / "run")
        figure("hostile checkpoints refused in one line", 1, 1)


@pytest.mark.parametrize("case", CONTENTS)
def test_checkpoint_of_something_else(
    case: str, content: Content, resume: Open, tmp_path: Path, figure: Record
) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / NAME
    CONTENTS[case](content, path)
    refused(resume, path, tmp_path / "run")
    figure("hostile checkpoints refused in one line", 1, 1)


def test_the_checkpoint_itself_is_taken(run: Path, resume: Open, tmp_path: Path) -> None:
    """Otherwise the tests above would pass with anything that refuses everything."""
    path = run / "checkpoints" / NAME
    resume(tmp_path / "run", path)
    load_weights(tmp_path, path)
    open_model(tmp_path, path)
    assert (tmp_path / "run").exists()


def flip_a_bit(data: bytearray, start: int, rng: random.Random) -> None:
    data[start] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, start: int, _: random.Random) -> None:
    del data[start:]


def overwrite(data: bytearray, start: int, rng: random.Random) -> None:
    end = min(len(data), start + rng.randrange(1, 4096))
    data[start:end] = rng.randbytes(end - start)


DAMAGE = (flip_a_bit, truncate, overwrite)


def undetected(path: Path, numbers: range) -> tuple[int, list[str]]:
    """Damage a checkpoint in many ways.

    Returns:
        The number of damages, and those with which `load` returned another content.
    """
    whole, before, damages, missed = path.read_bytes(), checkpoint.load(path), 0, []
    for number in numbers:
        rng = random.Random(number)
        damage, data = DAMAGE[number % len(DAMAGE)], bytearray(whole)
        damage(data, rng.randrange(len(data)), rng)
        if data == whole:
            continue  # the same bytes
        damages += 1
        path.write_bytes(data)
        try:
            if not same(before, checkpoint.load(path)):
                missed.append(f"{damage.__name__}, seed {number}")
        except CheckpointError as error:
            assert str(path) in str(error)
    path.write_bytes(whole)
    return damages, missed


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copy(run / "checkpoints" / NAME, tmp_path))


def test_damage_is_detected(copied: Path) -> None:
    damages, missed = undetected(copied, range(40))
    assert damages > 35 and not missed


@pytest.mark.slow
def test_1000_damages_are_detected(copied: Path, figure: Record) -> None:
    first, damages, missed = 0, 0, []
    while damages < 1000:
        more, found = undetected(copied, range(first, first + 1000 - damages))
        first, damages, missed = first + 1000 - damages, damages + more, missed + found
    figure("damaged checkpoints detected", damages - len(missed), damages)
    assert not missed
