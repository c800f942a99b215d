"""train() and its command line, end to end on small JPEG files, with external faults."""

import gc
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest

import train
from conf.errors import UserError
from engine import checkpoint, compute
from engine.losses import LOSSES
from engine.run import Run
from engine.state import params_sha256
from models import build
from tests.engine.plans import ALONE
from tests.helpers.limits import file_size_limit
from tests.helpers.results import check_not_trained, column, rows, same, stored, summary_of, tree
from tests.helpers.small_run import command, compose, run

pytestmark = pytest.mark.usefixtures("toy_runs", "restored_logging")
BOARD = "log.trackers=[tensorboard]"
ACCEPT = "checkpoint.accept_changes=true"
OWN_DATA = ["augment=demo", "data.image_size=32", "train.max_steps=1"]
WORSE = ["optim.lr=3", "schedule.name=constant", ACCEPT]


@pytest.fixture(scope="module")
def nine_steps(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Train 9 steps; return the run directory and the summary."""
    folder = tmp_path_factory.mktemp("nine_steps") / "run"
    return folder, run(image_root, folder, BOARD)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the run directory of `train_run`."""
    return tmp_path / "run"


@pytest.fixture
def train_run(image_root: Path, folder: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that trains in `folder` with some overrides, and returns the summary."""
    return lambda *overrides: run(image_root, folder, *overrides)


@pytest.fixture
def call_main(
    image_root: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs train.py's main; it returns exit status, stdout and stderr."""

    def main(*overrides: str, root: Path = image_root) -> tuple[int, str, str]:
        capfd.readouterr()
        return train.main(compose(root, folder, *overrides)), *capfd.readouterr()

    return main


def test_train_writes_run_directory(nine_steps):
    folder, summary = nine_steps
    written = {"config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json", "checkpoints"}
    assert written <= {*os.listdir(folder)}
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert summary_of(folder) == summary

    assert (summary["status"], summary["step"]) == ("finished", 9)
    assert summary["top1"] == pytest.approx(column(folder, "val", "top1")[-1])
    rates = column(folder, "train", "images_per_second")[1:]  # without the first step
    assert summary["images_per_second"] == pytest.approx(harmonic_mean(rates), rel=1e-4)
    model = build("resnet_tiny", num_classes=3, image_size=32)
    model.load_state_dict(stored(folder)["model"])
    assert summary["params_sha256"] == params_sha256(model)
    assert column(folder, "train", "step") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert column(folder, "val", "step") == [5, 9]
    assert column(folder, "val", "images") == [15, 15]
    last = rows(folder, "train")[-1]
    assert last.keys() >= {"loss", "top1", "lr", "images_per_second", "data_wait_fraction"}
    assert last["epoch"] == 2
    saved = {"step-00000005.pt", "step-00000009.pt", "best.pt"}
    assert {*os.listdir(folder / "checkpoints")} == saved


def square_loss(network, batch, criterion=None):
    """A loss for a different task, without the criterion."""
    return network(batch["image"]).square().mean(), {}


def test_train_failing_loss_leaves_no_run(call_main, folder, monkeypatch):
    def failing(network, batch, criterion):
        assert criterion(network(batch["image"]), batch["target"]).ndim == 1

    monkeypatch.setattr(train, "training_loss", failing)
    with pytest.raises(AssertionError):
        call_main("augment.batch=[mixup]")
    assert not folder.exists()


def test_train_rejects_loss_signature(call_main, folder, monkeypatch):
    monkeypatch.setitem(LOSSES, "mine", lambda logits, targets, *, missing: logits.mean())
    status, _, error = call_main("train.loss=mine", "train.label_smoothing=0")
    assert (status, error.count("\n")) == (2, 1)
    assert "train.loss=mine: cannot be called: missing a required" in error
    assert not folder.exists()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda logits: (logits.mean(1), {}), "returns the loss with the shape [2]; return the me"),
        (lambda logits: (logits.mean(), {"top1": 0.5}), "returns top1 as float; return a tensor"),
        (lambda logits: (logits.mean(), {"norm": logits}), "returns norm with the shape [2, 3]"),
        (lambda logits: (logits.mean(), {"loss": logits.mean()}), "logs a value named loss; "),
    ],
)
def test_training_loss_rejects_invalid_values(returned, message, call_main, folder, monkeypatch):
    def loss(network, batch, criterion):
        return returned(network(batch["image"]))

    monkeypatch.setattr(train, "training_loss", loss)
    status, _, error = call_main()
    assert (status, error.count("\n")) == (2, 1)
    assert f"training_loss: {message}" in error
    assert not folder.exists()


def test_train_rejects_keys_of_unused_loss(call_main, train_run, folder, monkeypatch):
    """Keys set by a recipe are ignored."""
    monkeypatch.setattr(train, "training_loss", square_loss)
    for typed in ("train.label_smoothing=0.2", "train.class_weights=balanced"):
        status, _, error = call_main("train.max_steps=1", typed)
        key = typed.partition("=")[0]
        assert status == 2
        assert error.endswith(f": {key}: not used by training_loss in train.py; remove the key\n")
        assert not folder.exists()
    assert train_run("recipe=imagenet_rn50_modern", "model=resnet_tiny", *OWN_DATA)["step"] == 1


def test_build_parts_keeps_buffers(image_root, folder):
    parts = train.build_parts(compose(image_root, folder), ALONE, {})
    assert parts.state.model.bn1.num_batches_tracked == 0
    assert parts.state.model.training


def test_train_time_excludes_validation(train_run, folder, monkeypatch, jump):
    """A validation missed by an earlier start adds no training time either."""
    batches = train.validation_batches

    def slow(*given):
        jump()
        return batches(*given)

    monkeypatch.setattr(train, "validation_batches", slow)
    train_run("train.validate_every_epochs=9", "checkpoint.every_steps=5")
    (folder / "checkpoints" / "step-00000009.pt").unlink()
    (folder / "summary.json").unlink()
    train_run()
    assert column(folder, "val", "step") == [5, 9]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    validated = [json.loads(line)["seconds"] for line in lines if '"val"' in line]
    assert 1000 < min(validated) <= max(validated) < 1900
    check_not_trained(folder)


def test_train_best_checkpoint_follows_top1(train_run, folder):
    """The checkpoint with the highest top1 is the best; a worse resumed run keeps it."""
    first = train_run("train.epochs=8", "checkpoint.keep=1")
    best = max(rows(folder, "val"), key=lambda row: row["top1"])  # the first of equals
    path = checkpoint.find_checkpoint(folder)
    assert first["best_checkpoint"] == checkpoint.file_name(best["step"])
    assert path.samefile(folder / "checkpoints" / first["best_checkpoint"])
    assert first["best_top1"] == pytest.approx(best["top1"])
    assert best["top1"] > 100 / 3 + 1, "the model did not learn, so the test proves nothing"
    weights = checkpoint.load(path)
    second = train_run("train.epochs=10", "checkpoint.keep=1", *WORSE)
    assert column(folder, "val", "top1")[-1] < best["top1"]
    assert second["best_top1"] == first["best_top1"]
    assert second["best_checkpoint"] == first["best_checkpoint"]
    assert checkpoint.find_checkpoint(folder) == path
    assert same(checkpoint.load(path), weights)
    left = {"best.pt", first["best_checkpoint"], checkpoint.file_name(second["step"])}
    assert {*os.listdir(path.parent)} == left


SAMPLED = ["optim.name=nadam", "train.class_weights=sampled"]
FP16 = ["train.precision=fp16", "model.name=resnet_tiny", "data.image_size=16"]
MIXED = ["model=vit_s16", "model.name=mobilenet_v3_small", "data.image_size=64", "optim=adamw"]
MIXED += ["augment.batch=[{mixup: {alpha: 0.4}}, {cutmix: {p: 0.5}}, random_erasing]"]
MIXED += ["train.ema_decay=0.9"]
PARTS = ["data.repeats=3", "train.micro_batch=4", "train.loss=bce", "train.bce_threshold=0.2"]
PARTS += ["augment.batch=[{mixup_or_cutmix: {group: 1}}]", "optim=adamw"]
PARTS += ["model.freeze=[conv1,bn1,layer1]", "train.ema_decay=0.9"]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(SAMPLED, id="NAdam, balanced sampling"),
        pytest.param(FP16, id="fp16", marks=pytest.mark.slow),
        pytest.param(MIXED, id="dropout, AdamW, EMA, mixup, cutmix", marks=pytest.mark.slow),
        pytest.param(PARTS, id="repeated augmentation, micro-batches, AdamW, frozen layers"),
    ],
)
def test_train_resumes_after_max_steps(overrides, train_run, folder, image_root, tmp_path):
    overrides = [*overrides, "schedule.warmup_epochs=0.25"]  # ends within these 9 steps
    whole = run(image_root, tmp_path / "whole", *overrides)
    part = train_run(*overrides, "train.max_steps=3")
    assert (part["status"], part["step"], stored(folder)["step"]) == ("finished", 3, 3)
    assert column(folder, "val", "step") == [3]
    assert train_run(*overrides, "loader.workers=2")["params_sha256"] == whole["params_sha256"]
    assert same({**stored(folder), "best": 0}, {**stored(tmp_path / "whole"), "best": 0})
    assert rows(folder, "val")[1:] == rows(tmp_path / "whole", "val")
    assert column(folder, "train", "loss") == column(tmp_path / "whole", "train", "loss")


def test_train_signal_during_validation(train_run, folder, nine_steps, monkeypatch, capsys):
    """An interrupted validation is not recorded; the next start repeats it, even at the end."""
    batches = train.validation_batches

    def interrupted(*arguments):
        for batch in batches(*arguments):
            signal.raise_signal(signal.SIGTERM)
            yield batch

    def interrupted_at(step, *overrides):
        with monkeypatch.context() as patch:
            patch.setattr(train, "validation_batches", interrupted)
            ended = train_run(*overrides)
        assert ended == ended | {"status": "interrupted", "step": step, "signal": signal.SIGTERM}

    interrupted_at(5)
    assert "resume    step 5, epoch 1.11 is saved; run the same command" in capsys.readouterr().out
    second = train_run("train.max_steps=8")
    assert column(folder, "val", "step") == [5, 8]
    interrupted_at(9, "train.validate_every_epochs=5")
    interrupted_at(9, "train.validate_every_epochs=5")
    assert " at step 8; best top1 " in capsys.readouterr().out  # last validation
    last = train_run("train.validate_every_epochs=5")
    assert second["status"] == last["status"] == "finished"
    assert last["params_sha256"] == nine_steps[1]["params_sha256"]
    assert [rows(folder, "val")[0], *rows(folder, "val")[2:]] == rows(nine_steps[0], "val")


def test_train_signal_during_save(call_main, folder, nine_steps, monkeypatch):
    """No further step, no second checkpoint, and no row with less than half its steps."""
    save, saved = Run.save, []

    def signalled(self, state, *arguments):
        saved.append(state.step)
        if state.step == 5:
            signal.raise_signal(signal.SIGTERM)
        save(self, state, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", signalled)
        status, said, _ = call_main("log.every_steps=4")
    assert (status, saved) == (128 + signal.SIGTERM, [5])
    assert "validating" not in said
    assert column(folder, "train", "step") == [4]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = call_main("log.every_steps=3")[1]
    assert "\33[1mresult\33[0m    loss " in said
    assert f"predict\33[0m   python scripts/predict.py {folder} NEW_IMAGE.jpg\n" in said
    assert column(folder, "train", "step") == [4, 9]
    assert summary_of(folder)["params_sha256"] == nine_steps[1]["params_sha256"]


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], 2 * [signal.SIGINT]])
def test_train_stop_before_first_step(numbers, call_main, train_run, nine_steps, monkeypatch):
    """There is no result; the same command then trains from the beginning."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "fit_to_machine", lambda *_: [*map(signal.raise_signal, numbers)])
        status, said, _ = call_main()
    assert status == 128 + numbers[0]
    assert "result" not in said
    assert train_run()["params_sha256"] == nine_steps[1]["params_sha256"]


def test_train_resume_from_path(train_run, call_main, folder, nine_steps, monkeypatch):
    """A run can start from the newest checkpoint of a different run, which does not change."""
    ignore = shutil.ignore_patterns("*9.pt", "best.pt")
    path = shutil.copytree(nine_steps[0], folder.parent / "other", ignore=ignore)
    before = tree(path)
    words = f"checkpoint.resume={path}", "run.name=another"
    with monkeypatch.context() as patch:
        patch.setattr(train, "check_loss", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert "\nresume    step 6, epoch 1.33 is saved" in call_main(*words)[1]
    summary = train_run(*words)
    assert summary["params_sha256"] == nine_steps[1]["params_sha256"]
    assert rows(folder, "val") == rows(nine_steps[0], "val")
    assert summary["history"] == [f"began at step 5 with {path}"]
    assert tree(path) == before


def test_train_reports_accepted_changes(call_main, folder):
    assert call_main("train.max_steps=5")[0] == 0
    history = "accepted at step 5: optim.lr=0.2 (now 0.4)"
    number, out, _ = call_main("optim.lr=0.4", ACCEPT, "train.max_steps=7")
    assert number == 0
    assert "resumed at step 5, epoch 1.11, from " in out
    assert ", with 2 steps left" in out
    assert f"history   {history}\n" in out
    # The run has the new values from then on, so only a command with them resumes.
    for steps in (8, 8):  # including a start of a finished run
        number, out, _ = call_main("optim.lr=0.4", f"train.max_steps={steps}")
        assert number == 0
        assert f"history   {history}\n" in out
    assert summary_of(folder)["history"] == [history]
    (folder / "summary.json").unlink()  # like after a kill; the run has more steps than requested
    assert ".pt, with 0 steps left" in call_main("optim.lr=0.4", "train.max_steps=1")[1]
    assert call_main()[0] == 2


def test_train_drops_best_of_other_images(train_run, folder):
    train_run("train.max_steps=5")
    path = folder / "checkpoints" / "step-00000005.pt"
    content = checkpoint.load(path)
    del content["format"]  # added by `save`
    content["state"]["best"]["top1"] = 100.0  # later values are lower
    checkpoint.save(path.parent, content, keep=2)
    train_run("optim.lr=0.1", ACCEPT, "train.max_steps=6")
    assert stored(folder)["best"]["step"] == 5, "expected the same best on the same images"
    train_run("optim.lr=0.1", ACCEPT, "data.val_size=64", "train.max_steps=7")
    assert checkpoint.load(folder / "checkpoints" / "best.pt")["step"] == 7
    assert stored(folder)["best"]["step"] == 7


def test_train_identifies_weights_by_content(call_main, nine_steps, tmp_path):
    five, nine = checkpoint.files(nine_steps[0] / "checkpoints")
    first, other = tmp_path / "first.pt", tmp_path / "other.pt"
    shutil.copy(five, first)
    shutil.copy(five, other)
    assert call_main(f"model.weights={first}", "train.max_steps=1")[0] == 0
    assert call_main(f"model.weights={other}", "train.max_steps=2")[0] == 0
    shutil.copy(nine, first)
    number, _, error = call_main(f"model.weights={first}", "train.max_steps=3")
    assert number == 2
    assert "model.weights=SHA-256 " in error


def test_train_corrupt_validation_image(call_main, image_root, folder, tmp_path):
    """data.on_error=skip applies only to training images."""
    broken = shutil.copytree(image_root, tmp_path / "images") / "val/checks/02.jpg"
    broken.write_bytes(broken.read_bytes()[:2000])
    number, _, error = call_main("data.on_error=skip", root=tmp_path / "images")
    assert number == error.count("\n") == error.count(f": {broken}: ") == 1
    assert not (folder / "summary.json").exists()


def test_train_unreadable_images_of_all_ranks(image_root, tmp_path, ranks):
    """With data.on_error=skip, each counts once, even if both ranks have read it."""
    root, folder = shutil.copytree(image_root, tmp_path / "images"), tmp_path / "run"
    for name in ("checks/00.jpg", "checks/03.jpg", "stripes/03.jpg"):
        (root / "train" / name).write_bytes(b"")
    options = ["data.on_error=skip", "loader.workers=0"]
    # Each rank reads two of them.
    done = ranks.run(command(root, folder, *options, "data.max_bad_fraction=0.06"), 2)
    assert done.stderr.count(" skipped ") == 2, done.stderr
    assert summary_of(folder)["unreadable_images"] == 3
    other = command(root, tmp_path / "other", *options, "data.max_bad_fraction=0.04")
    done = ranks.run(other, 2, status=1)
    assert "data.max_bad_fraction=0.04: 2 of 36 training images cannot be read" in done.stderr


def leave(config, world, folder):
    os.chdir((".", folder)[world.rank])
    return config


def test_train_node_without_run_directory(image_root, tmp_path, ranks):
    """All ranks end with a message that does not call the checkpoint damaged."""
    moves = f"train.prepare={{{__name__}:leave: {{folder: /}}}}"
    words = command(image_root, "run", "loader.workers=0", moves)
    ranks.run([*words, "train.max_steps=2"], 2, cwd=tmp_path)
    done = ranks.run(words, 2, cwd=tmp_path, status=1)
    assert done.stderr.count(f".pt and older ones cannot be read on {os.uname()[1]}; ") == 2
    assert "Traceback" not in done.stderr


def test_train_nan_loss_ends_run(train_run, call_main, folder, monkeypatch):
    """Step 7 of 18 diverges. Its log row ends the run before the save after step 8."""
    train_step, seen = train.train_step, set()

    def diverge(state, network, loss, batch, **options):
        seen.add((gc.isenabled(), round(sys.getswitchinterval(), 6)))
        if batch.step == 6:
            batch = replace(batch, fields={**batch.fields, "image": batch["image"] * math.nan})
        return train_step(state, network, loss, batch, **options)

    monkeypatch.setattr(train, "train_step", diverge)
    options = ["train.epochs=4", "train.validate_every_epochs=4", "checkpoint.every_steps=4"]
    options += ["log.every_steps=7", "loader.workers=0"]
    number, _, error = call_main(*options)
    assert (number, error.count("\n")) == (1, 1)
    assert ": the loss is nan at step 7 (lr " in error
    assert os.listdir(folder / "checkpoints") == ["step-00000004.pt"]
    assert column(folder, "train", "loss") == [None]
    # Neither garbage collection nor other threads delay a step.
    assert seen == {(False, compute.SWITCH_SECONDS)}
    assert gc.isenabled()
    monkeypatch.undo()
    assert train_run(*options)["status"] == "finished"


def test_train_divergence_advises_healthy_checkpoint(call_main, train_run, folder, tmp_path):
    """The newest checkpoints are finite, but have exploded; without a healthy one, start over."""
    options = ["train.epochs=4", "loader.workers=0", "checkpoint.keep=99"]
    options += ["checkpoint.every_steps=1"]
    train_run("optim.lr=0.01", "train.max_steps=6", *options)
    number, _, error = call_main("optim.lr=1000", ACCEPT, *options)
    assert (number, error.count("\n")) == (1, 1)
    losses = column(folder, "train", "loss")[:-1]
    advised = error.partition("checkpoint.resume=")[2].split()[0]
    assert Path(advised) == folder / "checkpoints/step-00000006.pt"
    newest = checkpoint.files(folder / "checkpoints")[-1]
    assert losses[int(newest.stem[-8:]) - 1] > 1e6 * losses[0]
    again = ["optim.lr=0.01", f"run.dir={tmp_path}/again", f"checkpoint.resume={advised}"]
    assert call_main(*options, *again, ACCEPT)[0] == 0
    assert column(tmp_path / "again", "train", "loss")[-1] < losses[0]
    number, _, error = call_main(*options, "optim.lr=1000", f"run.dir={tmp_path}/exploded")
    assert number == 1
    assert (tmp_path / "exploded/checkpoints/step-00000001.pt").exists()
    assert "optim.clip_norm, and start over with checkpoint.resume=never" in error


def test_train_with_full_disk(train_run, call_main, folder, nine_steps):
    """A failed checkpoint ends the run at the next one; the next start resumes before it."""
    train_run("train.max_steps=3")
    with file_size_limit(2**19):  # a checkpoint has 2.5 MB
        number, _, error = call_main("checkpoint.every_steps=6")
    assert (number, error.count("\n")) == (1, 1)
    assert f"{folder}/checkpoints/step-00000005.pt: cannot be written" in error
    assert column(folder, "train", "step")[-1] == 6
    assert not (folder / "summary.json").exists()
    (left,) = (folder / "checkpoints").glob("step*")
    assert left.name == "step-00000003.pt"
    assert train_run()["params_sha256"] == nine_steps[1]["params_sha256"]


def test_train_missing_field_leaves_no_run(train_run, folder, monkeypatch):
    """tests/engine/test_compute.py tests its call of the network."""
    monkeypatch.setattr(train, "forward", lambda network, batch: network(batch["age"]))
    with pytest.raises(UserError, match=r'^batch\["age"\]: samples .*, only image, label; add it'):
        train_run()
    assert not folder.exists()
