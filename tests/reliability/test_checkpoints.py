"""Hostile, foreign and damaged checkpoints: refused in one line, with bounded memory and time."""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from engine.distributed import World
from engine.rundir import RunDirectory, run_identity
from engine.state_check import check_state
from scripts.lib.trained import open_trained
from tests import small_run
from tests.processes import HANGS_SECONDS
from tests.reliability.hostile_checkpoints import CONTENTS, FILES, LONG, SAFETENSORS
from tests.results import same

ROOT = Path(__file__).parents[2]
NAME = "step-00000005.pt"
OPTIONS = ("train.epochs=1", "train.ema_decay=0.9", "loader.workers=0")
KEYS = ("checkpoint.resume", "model.weights")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
# Time for a file on a busy machine, and memory: a pickle may take 500 MB.
SECONDS, MOST_MIB = 300, 700


def peak_mib() -> float:
    """Return the largest memory of this process so far; 0 where the system does not show it."""
    if sys.platform != "linux":
        return 0.0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes longer than SECONDS, or more than MOST_MIB of memory."""

    def stop(*_: object) -> None:
        raise AssertionError(f"takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = peak_mib()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert peak_mib() - start < MOST_MIB


@pytest.fixture(scope="module")
def run(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with a moving average."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run.run(image_root, folder, *OPTIONS)
    return folder


@pytest.fixture(scope="module")
def content(run: Path) -> dict[str, Any]:
    return checkpoint.load(run / "checkpoints" / NAME)


Open = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def resume(run: Path, image_root: Path) -> Open:
    """Return a function that opens a run directory to resume from a path, as train() does."""
    config = small_run.compose(image_root, run, *OPTIONS)
    datasets, plan, state = train.prepare(config, RunDirectory(config, ALONE), ALONE)
    identity = run_identity(config, datasets, plan)

    def open_run(folder: Path, path: Path) -> None:
        given = replace(config.checkpoint, resume=str(path))
        started = replace(config, run=replace(config.run, dir=str(folder)), checkpoint=given)
        with RunDirectory(started, ALONE) as opened:
            opened.stored()
            opened.open(
                identity,
                check=lambda stored: check_state(state, stored, most_steps=plan.schedule_steps),
                stop_step=plan.stop_step,
            )

    return open_run


def load_weights(_: Path, path: Path) -> None:
    models.load_weights(models.build("resnet_tiny", num_classes=3, image_size=32), path)


def open_model(_: Path, path: Path) -> None:
    open_trained(path).build(torch.device("cpu"))


def refused(open_file: Open, path: Path, folder: Path) -> str:
    """Check that a file is refused in one line, within bounds, and that nothing is created."""
    before = {p.name for p in path.parent.iterdir()}
    with pytest.raises((UserError, CheckpointError)) as error, bounded():
        open_file(folder, path)
    message = str(error.value)
    assert len(" ".join(message.splitlines())) < 1000
    assert {p.name for p in path.parent.iterdir()} == before
    return message


def planted(_: Path, path: Path) -> None:
    """Resume from a file that is the newest checkpoint of a run, with a manifest that fits."""
    manifest = {"file": path.name, "step": 5, "sha256": ""}
    if path.is_file():
        manifest["bytes"] = path.stat().st_size
        if path.stat().st_size < 10**9:
            manifest["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(manifest))
    try:
        checkpoint.load_newest(path.parent)
    finally:
        path.with_suffix(".json").unlink()


@pytest.mark.parametrize("case", [case for case in FILES if case not in LONG])
def test_file_that_is_no_checkpoint(
    case: str, content: dict[str, Any], resume: Open, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / NAME
    FILES[case](content, path)
    for entry_point in (resume, load_weights, open_model, planted):
        message = refused(entry_point, path, tmp_path / "run")
        assert str(path) in message, entry_point
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", SAFETENSORS)
def test_safetensors_that_is_none(case: str, content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "model.safetensors"
    SAFETENSORS[case](content, path)
    for entry_point in (load_weights, open_model):
        assert str(path) in refused(entry_point, path, tmp_path / "run")


@pytest.mark.parametrize("case", CONTENTS)
def test_checkpoint_of_something_else(
    case: str, content: dict[str, Any], resume: Open, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / NAME
    CONTENTS[case](content, path)
    assert str(path) in refused(resume, path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTENTS)
def test_evaluation_of_something_else(case: str, content: dict[str, Any], tmp_path: Path) -> None:
    """It is refused in one line, or what is wrong with it does not matter without training."""
    path = tmp_path / NAME
    CONTENTS[case](content, path)
    with bounded():
        try:
            open_model(tmp_path, path)
        except (UserError, CheckpointError) as error:
            assert str(path) in str(error)


def test_the_checkpoint_itself_is_taken(run: Path, resume: Open, tmp_path: Path) -> None:
    """Otherwise the tests above would pass with anything that refuses everything."""
    path = run / "checkpoints" / NAME
    resume(tmp_path / "run", path)
    load_weights(tmp_path, path)
    open_model(tmp_path, path)
    assert (tmp_path / "run").exists()


# Every case, with the key that gives its path to train.py.
CASES = {
    **{f"{case} as a file": (make, KEYS[n % 2]) for n, (case, make) in enumerate(FILES.items())},
    **{f"{case} as safetensors": (make, KEYS[1]) for case, make in SAFETENSORS.items()},
    **{f"{case} in a checkpoint": (make, KEYS[0]) for case, make in CONTENTS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_train_refuses_a_hostile_checkpoint(
    case: str,
    content: dict[str, Any],
    image_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own_logging: None,
    figure: Callable[[str, int, int], None],
) -> None:
    """Its exit status and output, and that it creates nothing."""
    make, key = CASES[case]
    path = tmp_path / ("model.safetensors" if case.endswith("safetensors") else NAME)
    make(content, path)
    config = small_run.compose(image_root, tmp_path / "run", *OPTIONS, f"{key}={path}")
    with bounded():
        status = train.main(config)
    lines = capsys.readouterr().err.splitlines()
    created = {p.name for p in tmp_path.iterdir()} - {path.name}
    good = status == 2 and len(lines) == 1 and not created
    figure("hostile checkpoints refused in one line", int(good), 1)
    assert good, (status, lines, created)


COMMANDS = {
    "train.py": ["recipe=demo", "run.dir=new", "model.weights={}"],
    "scripts/evaluate.py": ["{}", "data.root=."],
    "scripts/predict.py": ["{}", "."],
    "scripts/export.py": ["{}", "--to", "safetensors"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("case", ["fifo", "zip bomb", "deep key", "bytearray of 4 GB"])
def test_every_program_refuses_a_hostile_file(
    script: str, case: str, content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").mkdir()
    path = tmp_path / "file" / NAME
    FILES[case](content, path)
    words = [word.format(path) for word in COMMANDS[script]]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and NAME in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"file"}


# Damage.

PAGE = 4096


def flip_a_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def append(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, PAGE))


def zero_a_page(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(0, len(data), PAGE)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))


def overwrite(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.randrange(1, PAGE))
    data[start:end] = rng.randbytes(end - start)


def swap_blocks(data: bytearray, rng: random.Random) -> None:
    size = min(512, len(data) // 4)
    first, second = sorted(rng.sample(range(len(data) // size), 2))
    one, two = (slice(n * size, (n + 1) * size) for n in (first, second))
    data[one], data[two] = data[two], data[one]


def drop_a_block(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, PAGE)]


DAMAGE = (flip_a_bit, truncate, append, zero_a_page, overwrite, swap_blocks, drop_a_block)


def undetected(path: Path, numbers: range) -> tuple[int, list[str]]:
    """Damage a checkpoint or its manifest in many ways.

    A damaged manifest may leave the checkpoint readable; its content must be the same then.

    Returns:
        The number of damages, and those with which `load` returned another content.
    """
    whole = {name: path.with_suffix(name).read_bytes() for name in (".pt", ".json")}
    before, damages, missed = checkpoint.load(path), 0, []
    for number in numbers:
        rng = random.Random(number)
        damage = DAMAGE[number % len(DAMAGE)]
        name = ".json" if rng.random() < 0.2 else ".pt"
        data = bytearray(whole[name])
        damage(data, rng)
        if data == whole[name]:
            continue  # two blocks of zeros
        damages += 1
        path.with_suffix(name).write_bytes(data)
        try:
            if not same(before, checkpoint.load(path)):
                missed.append(f"{damage.__name__} of {name}, seed {number}")
        except CheckpointError as error:
            assert str(path) in str(error)
        path.with_suffix(name).write_bytes(whole[name])
    return damages, missed


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint and its manifest."""
    for name in (NAME, Path(NAME).with_suffix(".json")):
        shutil.copy(run / "checkpoints" / name, tmp_path)
    return tmp_path / NAME


def test_damage_is_detected(copied: Path) -> None:
    damages, missed = undetected(copied, range(40))
    assert damages > 35 and not missed


def test_damage_is_missed_without_the_check(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damages are real: some of them change the content."""
    monkeypatch.setattr(checkpoint, "verify", lambda path: None)
    assert undetected(copied, range(40))[1]


@pytest.mark.slow
def test_1000_damages_are_detected(copied: Path, figure: Callable[[str, int, int], None]) -> None:
    first, damages, missed = 0, 0, []
    while damages < 1000:
        more, found = undetected(copied, range(first, first + 1000 - damages))
        first, damages, missed = first + 1000 - damages, damages + more, missed + found
    figure("damaged checkpoints detected", damages - len(missed), damages)
    assert not missed
