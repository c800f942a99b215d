"""PyTorch datasets as data.source: training, resuming with equal weights, and all scripts."""

import json
import os
import pickle
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
import pytest
import torch

import train
from conf.errors import LoaderError, UserError
from scripts.lib.trained import open_trained
from scripts.predict import Predictor
from tests.helpers import own_data, small_run
from tests.helpers.processes import Started, run_python, wait_for
from tests.helpers.results import logged_steps


def write_cifar(root: Path, images: Path) -> Path:
    """Write the files of torchvision's CIFAR10 with 36 and 15 images."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": own_data.CLASSES}))
    rng = np.random.default_rng(0)
    counts = {"data_batch_1": 16, **{f"data_batch_{i}": 5 for i in range(2, 6)}, "test_batch": 15}
    for name, count in counts.items():
        labels = rng.integers(0, 3, count).tolist()
        batch = {"data": rng.integers(0, 256, (count, 3072), np.uint8), "labels": labels}
        (folder / name).write_bytes(pickle.dumps(batch))
    return root


def write_hugging_face(root: Path, images: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    splits = {}
    for split in ("train", "val"):
        files = sorted((images / split).glob("*/*.jpg"))
        labels = [own_data.CLASSES.index(file.parent.name) for file in files]
        rows = {"image": list(map(str, files)), "label": labels}
        label = datasets.ClassLabel(names=own_data.CLASSES)
        features = datasets.Features({"image": datasets.Image(), "label": label})
        splits[split] = datasets.Dataset.from_dict(rows, features)
    datasets.DatasetDict(splits).save_to_disk(root)
    return root


WRITERS = {"cifar": write_cifar, "hugging_face": write_hugging_face}


def words_of(kind: str) -> list[str]:
    return f"data.source=tests.helpers.own_data:{kind}".split()


@pytest.fixture
def root_of(image_root: Path, tmp_path: Path) -> Any:
    def root_of(kind: str) -> Path:
        folder = tmp_path / "data"
        folder.mkdir()
        return WRITERS[kind](folder, image_root) if kind in WRITERS else image_root

    return root_of


KINDS = ("undivided data.val_fraction=0.3", "noisy", "masks", "folders", "cifar", "hugging_face")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("fake", "flowers")]


@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_torch_datasets_train_and_resume(kind, root_of, tmp_path, toy_runs):
    """A run stops after 4 steps and continues with a different number of workers."""
    root = root_of(kind)
    words = words_of(kind)
    whole = small_run.run(root, tmp_path / "whole", *words)
    parts = tmp_path / "parts"
    small_run.run(root, parts, *words, "train.max_steps=4", "loader.workers=0")
    resumed = small_run.run(root, parts, *words, "loader.workers=2")
    assert whole["status"] == resumed["status"] == "finished"
    assert whole["params_sha256"] == resumed["params_sha256"]


def test_torch_dataset_resumes_after_kill(image_root, tmp_path, frozen_gc):
    """The resuming process hashes strings differently."""
    folder = tmp_path / "run"
    words = [*words_of("noisy"), "loader.workers=2", "checkpoint.every_steps=2", "train.epochs=50"]
    start = small_run.overrides_of(image_root, folder, *words)
    with Started([sys.executable, "train.py", *start], stdout=DEVNULL) as process:
        wait_for("three steps", lambda: logged_steps(folder) >= 3, process)
        os.kill(process.pid, signal.SIGKILL)
    words.append(f"train.max_steps={logged_steps(folder) + 4}")
    resumed = small_run.run(image_root, folder, *words)
    whole = small_run.run(image_root, tmp_path / "whole", *words)
    assert resumed["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["squares", "noisy"])
def test_scripts_with_torch_dataset_runs(kind, image_root, tmp_path, frozen_gc):
    folder = tmp_path / "run"
    summary = small_run.run(image_root, folder, *words_of(kind))
    photo = image_root / "val" / "dots" / "00.jpg"
    done = run_python("scripts/predict.py", folder, photo, "--format", "jsonl")
    assert len(json.loads(done.stdout)["predictions"]) == 3, done.stderr
    assert "augment.val is applied, but not the transforms inside" in done.stderr
    done = run_python("scripts/evaluate.py", folder)
    (evaluation,) = folder.glob("evaluation/**/evaluation.json")
    top1 = json.loads(evaluation.read_text())["top1"]
    assert top1 == pytest.approx(summary["best_top1"]), done.stderr
    for script, *options in (["report.py"], ["export.py", "--to", "pt2"]):
        done = run_python(f"scripts/{script}", folder, *options)
        assert done.returncode == 0, done.stderr


def test_predictor_rejects_one_channel_run(image_root, tmp_path, frozen_gc):
    words = [*words_of("gray"), "data.mean=[0.5]", "data.std=[0.25]"]
    small_run.run(image_root, tmp_path / "run", *words, "train.max_steps=1")
    with pytest.raises(UserError, match="expects images with 1 channels, but image files have 3; "):
        Predictor(open_trained(tmp_path / "run"), torch.device("cpu"))


@pytest.mark.usefixtures("toy_runs", "restored_logging")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.source=tests.helpers.own_data:exit_at_start"], "sys.exit(3) was called in "),
        (["data.source=tests.helpers.own_data:exit_later"], "Exit[20]: SystemExit: 3: a transform"),
        (["train.prepare=tests.helpers.own_data:exit_in_prepare"], "sys.exit(3) was called in "),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_exit_in_user_code_is_reported(words, named, workers, image_root, tmp_path, capsys):
    words = [*words, f"loader.workers={workers}"]
    assert train.main(small_run.compose(image_root, tmp_path / "run", *words)) == 1
    assert capsys.readouterr().err.count(named) == 1


@pytest.mark.parametrize("label", [0.5, [1.0, 0.0, 0.0], [1, 0, 0]])
def test_label_other_than_index_is_named(label, image_root, tmp_path, toy_runs, monkeypatch):
    monkeypatch.setattr(own_data.Squares, "__getitem__", lambda rows, i: (rows.images[i], label))
    with pytest.raises(UserError, match=r'^batch\["label"\]: is torch\.\w+ \[3?\]; expected class'):
        small_run.run(image_root, tmp_path / "run", *words_of("squares"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("label", [999, -1, -100])
@pytest.mark.parametrize(("kind", "error"), [("known", UserError), ("late", LoaderError)])
def test_label_outside_classes(kind, error, label, image_root, tmp_path, toy_runs, monkeypatch):
    """Known labels are checked at the start, others when a worker loads the sample."""
    monkeypatch.setattr(own_data, "WRONG_LABEL", label)
    named = rf"^Wrong\[20\]: label {label} is not in \[0, 3\); use class indices from 0, or return"
    with pytest.raises(error, match=named):
        small_run.run(image_root, tmp_path / "run", *words_of(f"wrong_{kind}"), "loader.workers=0")
    assert (tmp_path / "run").exists() == (kind == "late")


def test_label_outside_classes_of_own_dataset(image_root, tmp_path, toy_runs):
    """A subclass of Dataset that does not know its labels."""
    with pytest.raises(LoaderError, match=r"^fake sample \d+: label [34] is not in \[0, 3\)"):
        small_run.run(image_root, tmp_path / "run", *words_of("direct_labels"), "loader.workers=2")
