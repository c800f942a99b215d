"""Evaluation of a run, of files of other projects and of other data, on small JPEG files."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import train
from conf.schema import UserError
from engine import checkpoint
from engine.checkpoint import CheckpointError
from engine.distributed import World, join_world
from scripts import evaluate
from scripts.evaluate import Evaluated, with_config, with_labels_of
from scripts.lib.trained import Trained, open_trained
from tests import small_run
from tests.conftest import CLASSES, VAL_IMAGES
from tests.processes import needs_linux
from tests.stored import as_tar

ROOT = Path(__file__).parents[2]
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
HERE = ["train.device=cpu", "loader.workers=0"]


@pytest.fixture(scope="module")
def folder(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps with a moving average, whose name contains `=`."""
    folder = tmp_path_factory.mktemp("runs") / "small,optim.lr=0.2"
    small_run.run(image_root, folder, "train.ema_decay=0.9", "optim.lr=0.2")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Evaluated:
    """The evaluation of the last checkpoint."""
    return measured(folder / "checkpoints" / "last.json", self_check=True)


def opened(path: Path, *overrides: str, **options: Any) -> Trained:
    overrides = (*HERE, *overrides)
    return with_config(open_trained(path, overrides, **options), overrides, ALONE)


def measured(
    path: Path, *overrides: str, flip: bool = False, self_check: bool = False
) -> Evaluated:
    return evaluate.run(opened(path, *overrides), ALONE, flip=flip, self_check=self_check)


def script(
    *arguments: str | Path, folder: Path, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )


def table_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# The same run.


def test_result_equals_the_last_validation_to_the_last_digit(
    found: Evaluated, folder: Path
) -> None:
    content = checkpoint.load(found.trained.path)
    last = content["state"]["last"]
    metrics = found.metrics
    assert (metrics.top1, metrics.top5, metrics.loss) == (last["top1"], last["top5"], last["loss"])
    assert metrics.images == VAL_IMAGES * len(CLASSES)
    assert not found.differs and [line.split(": ")[1] for line in found.check] == ["equal"] * 3
    # The average is validated, and it is not the raw model.
    assert found.trained.averaged and last["loss"] != last["loss_raw"]


def test_self_check_finds_other_weights(folder: Path) -> None:
    trained = opened(folder / "checkpoints" / "last.json")
    weights = {name: value.clone() for name, value in trained.weights.items()}
    weights["fc.bias"] += torch.tensor([1.0, 0.0, 0.0])
    found = evaluate.run(replace(trained, weights=weights), ALONE, flip=False, self_check=True)
    assert found.differs and any(line.endswith("DIFFERS") for line in found.check)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.val_size=40", "data.val_size was 32 in the run's validation, is 40"),
        ("loader.batch_size=5", "loader.batch_size was 8 in the run's validation, is 5"),
        ("data.val=train", "data.val was "),
        ("train.precision=bf16", "train.precision was "),
    ],
)
def test_self_check_of_something_else(folder: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^--self-check: {message}"):
        measured(folder, override, self_check=True)


def test_self_check_with_another_number_of_ranks(folder: Path) -> None:
    trained = opened(folder)
    trained.stored["config"]["ranks"] = 4
    with pytest.raises(UserError, match=r"ranks was 4 .* `torchrun --nproc-per-node 4 "):
        evaluate.run(trained, ALONE, flip=False, self_check=True)


def test_files(found: Evaluated, tmp_path: Path) -> None:
    evaluate.write(found, tmp_path / "out", worst=4)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {"worst.jpg", "confusion.png", "per_class.png", "reliability.png"}
    assert written == pictures | {
        "evaluation.json",
        "per_class.csv",
        "confusion.csv",
        "worst.csv",
    }
    for name in pictures:
        Image.open(tmp_path / "out" / name).load()
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert content["top1"] == found.metrics.top1 and content["step"] == 9
    assert sum(content["calibration"]["images"]) == content["images"] == 15
    classes = table_of(tmp_path / "out" / "per_class.csv")
    assert [row["class"] for row in classes] == list(CLASSES)
    assert sum(float(row["top1"]) * VAL_IMAGES for row in classes) / 15 == pytest.approx(
        content["top1"]
    )
    pairs = table_of(tmp_path / "out" / "confusion.csv")
    right = sum(int(row["images"]) for row in pairs if row["class"] == row["prediction"])
    assert 100 * right / 15 == pytest.approx(content["top1"])
    worst = table_of(tmp_path / "out" / "worst.csv")
    assert len(worst) == 4 and all(Path(row["path"]).is_file() for row in worst)
    assert all(Path(row["path"]).parent.name == row["class"] for row in worst)
    assert float(worst[0]["loss"]) == found.predictions.losses.max()


def test_readable_names(found: Evaluated, tmp_path: Path) -> None:
    """The folder's name stays the key."""
    evaluate.write(replace(found, classes=("n01443537", "dots", "stripes")), tmp_path, worst=15)
    names = {"n01443537": "goldfish", "dots": "dots", "stripes": "stripes"}
    for file, key, name in (
        ("per_class.csv", "class", "name"),
        ("confusion.csv", "class", "name"),
        ("confusion.csv", "prediction", "prediction_name"),
        ("worst.csv", "class", "name"),
        ("worst.csv", "prediction", "prediction_name"),
    ):
        rows = table_of(tmp_path / file)
        assert rows and all(row[name] == names[row[key]] for row in rows), file
    assert {row["name"] for row in table_of(tmp_path / "worst.csv")} == set(names.values())


def test_command_line(folder: Path, tmp_path: Path) -> None:
    """Several checkpoints; the name of the run contains `=`; nothing is written into the run."""
    before = sorted(folder.rglob("*"))
    done = script(folder, folder / "checkpoints" / "last.json", *HERE, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["images"] for row in rows] == [15, 15]
    for row in rows:
        assert row == {
            key: value
            for key, value in json.loads(
                (tmp_path / row["out"] / "evaluation.json").read_text()
            ).items()
            if key in row
        } | {"out": row["out"]}
    assert sorted(folder.rglob("*")) == before
    assert len(list((tmp_path / "evaluation").iterdir())) == 2


@pytest.mark.slow
def test_json_that_is_lost_is_a_failure(folder: Path, tmp_path: Path) -> None:
    needs_linux()
    with open("/dev/full", "w") as full:
        done = script(folder, *HERE, "--json", folder=tmp_path, stdout=full)
    assert done.returncode == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "CHECKPOINT is missing: give a checkpoint"),
        ("gone.pth", "gone.pth: no such file or folder; give a checkpoint"),
        (". optim.lrr=1", "optim.lrr=1: there is no key optim.lrr; did you mean optim.lr?"),
        (". data.root", "data.root: has no value; write data.root=VALUE"),
        (". --arch resnet18", "--arch: not an option; write model.name="),
        (". --self-check --flip", "--self-check: a run validates without --flip"),
        (". --worst -1", "--worst -1: give 0 or more"),
    ],
)
def test_mistakes_in_the_command_line(tmp_path: Path, arguments: str, message: str) -> None:
    done = script(*arguments.split(), folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"evaluate.py: {message}")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_output_folders(tmp_path: Path) -> None:
    names = ["a", "b", "a", "a"]
    assert evaluate.output_folders(names, tmp_path / "out") == [
        tmp_path / "out" / name for name in ("a", "b", "a-2", "a-3")
    ]
    assert evaluate.output_folders(["a"], tmp_path) == [tmp_path]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--out .*: {tmp_path}/file is not a writable folder"):
        evaluate.output_folders(["a"], tmp_path / "file" / "out")


@pytest.mark.slow
def test_output_folder_inside_a_split(folder: Path, image_root: Path, tmp_path: Path) -> None:
    """Found before the first checkpoint is evaluated."""
    copy = shutil.copytree(folder, tmp_path / "copy") / "checkpoints" / "last.json"
    name, images = opened(copy).name, tmp_path / "images"
    val = shutil.copytree(image_root / "val", images / name)
    data = f"data.root={images}", f"data.val='{name}'"
    done = script(folder, copy, *data, "--out", images, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"evaluate.py: --out {images} ({val}): is inside {val}, where")
    assert not list(images.glob("*/*.json"))
    assert evaluate.as_given(Path("evaluation/a"), None) == "--out (evaluation/a by default)"
    assert evaluate.as_given(images, images) == f"--out {images}"


def test_result_that_cannot_be_written(found: Evaluated, tmp_path: Path) -> None:
    (tmp_path / "worst.csv").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written: Is a directory"):
        evaluate.write(found, tmp_path, worst=4)


# Other sizes, other data, mirror images.


def test_flip_is_the_mean_of_both_logits(folder: Path, found: Evaluated) -> None:
    both = measured(folder / "checkpoints" / "last.json", flip=True)
    model = both.trained.build(ALONE.device)
    data = both.datasets.val
    mean = torch.tensor(both.trained.config.data.mean)[:, None, None]
    std = torch.tensor(both.trained.config.data.std)[:, None, None]
    losses = []
    with torch.no_grad():
        for i in range(len(data)):
            pixels, label = data.load(0, i)
            image = (torch.tensor(pixels).permute(2, 0, 1) / 255 - mean) / std
            logits = [model(x[None])[0] for x in (image, image.flip(2))]
            losses.append(-((logits[0] + logits[1]) / 2).log_softmax(0)[label].item())
    assert both.predictions.losses == pytest.approx(losses, rel=1e-3)
    assert both.metrics.loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert both.metrics.loss != found.metrics.loss


def test_other_size_keeps_the_crop_ratio(folder: Path) -> None:
    trained = opened(folder, "data.val_size=40")
    assert trained.config.augment.val == [
        {"resize": {"size": 40}},
        {"center_crop": {"size": 40}},
    ]
    assert measured(folder, "data.val_size=40").datasets.val_size == 40


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_squashed_images_are_pillows(folder: Path, interpolation: str) -> None:
    """Pillow rounds differently: by 2 levels at most."""
    squash = f"[{{resize: {{size: [40, 40], interpolation: {interpolation}}}}}]"
    found = measured(folder, f"augment.val={squash}", flip=True)
    assert found.metrics.images == VAL_IMAGES * len(CLASSES)
    val, filter = found.datasets.val, Image.Resampling[interpolation.upper()]
    for index in (0, 7, 14):
        pillows = Image.open(val.name(index)).resize((40, 40), filter)
        difference = abs(val.load(0, index)[0].astype(int) - np.asarray(pillows))
        assert difference.max() <= 2 and difference.mean() < 0.05


def test_some_of_the_classes_without_a_training_split(
    folder: Path, image_root: Path, tmp_path: Path
) -> None:
    """The images get their labels by the names of the classes."""
    for name in ("dots", "stripes"):
        shutil.copytree(image_root / "val" / name, tmp_path / "val" / name)
    whole, part = measured(folder), measured(folder, f"data.root={tmp_path}")
    alone = measured(folder, f"data.val={tmp_path / 'val'}")
    assert set(part.predictions.labels.tolist()) == {1, 2} and part.classes == CLASSES
    assert part.predictions.losses == pytest.approx(whole.predictions.losses[VAL_IMAGES:])
    assert alone.metrics == part.metrics
    rows = part.predictions.per_class(3)
    assert rows[0] == {"images": 0, "top1": None, "top5": None, "loss": None}


def test_run_on_a_part_of_the_images(whole_runs: None, image_root: Path, tmp_path: Path) -> None:
    """The run's own config finds the same validation images, also where its files are not."""
    flat = Path(shutil.copytree(image_root / "train", tmp_path / "flat"))
    (tmp_path / "some.txt").write_text("dots\nstripes\n")
    options = ["data.val_fraction=0.25", f"data.classes={tmp_path / 'some.txt'}"]
    folder = tmp_path / "run"
    summary = small_run.run(flat, folder, *options, "loader.workers=0", "train.epochs=1")
    (tmp_path / "some.txt").unlink()
    again = measured(folder)
    assert again.metrics.top1 == summary["top1"] and len(again.predictions.labels) == 6
    for split in ("train", "val"):
        as_tar(image_root / split, tmp_path / f"{split}.tar")
    with pytest.raises(UserError, match=r"there is a validation split, .*val\.tar; write data"):
        measured(folder, f"data.root={tmp_path}")
    other = measured(folder, f"data.root={tmp_path}", "data.val_fraction=0")
    assert len(other.predictions.labels) == 2 * VAL_IMAGES


def test_unknown_class(folder: Path, image_root: Path, tmp_path: Path) -> None:
    shutil.copytree(image_root / "val" / "dots", tmp_path / "val" / "cats")
    with pytest.raises(UserError, match=r"^data\.val=val: .* does not know cats "):
        measured(folder, f"data.root={tmp_path}")


def test_checkpoint_of_an_earlier_version(folder: Path, found: Evaluated, image_root: Path) -> None:
    """It does not hold the names of the classes: the order of the folders counts."""
    trained = replace(opened(folder / "checkpoints" / "last.json"), classes=())
    assert evaluate.run(trained, ALONE, flip=False, self_check=True).metrics == found.metrics
    with pytest.raises(UserError, match="the model has 5 classes; give --classes FILE"):
        with_labels_of(replace(trained, num_classes=5), found.datasets)


# Files of other projects.


FOREIGN = [
    "model.name=resnet_tiny",
    "recipe=demo",
    "data=folder",
    "data.image_size=32",
    "loader.batch_size=8",
]


def test_file_of_another_project(
    folder: Path, found: Evaluated, image_root: Path, tmp_path: Path
) -> None:
    torch.save(found.trained.weights, tmp_path / "weights.pth")
    other = measured(tmp_path / "weights.pth", *FOREIGN, f"data.root={image_root}")
    assert other.metrics == found.metrics and other.classes == CLASSES
    assert (other.trained.step, other.trained.name) == (None, "weights.pth")


def test_missing_data_root(found: Evaluated, tmp_path: Path) -> None:
    torch.save(found.trained.weights, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"^data\.root is missing: pass data\.root="):
        opened(tmp_path / "weights.pth", *FOREIGN)


def test_torchvision_v1_resnet50_on_imagenet() -> None:
    """Set IMAGENET and RESNET50_V1 to the folder with val/ and to resnet50-0676ba61.pth."""
    images, weights = os.environ.get("IMAGENET"), os.environ.get("RESNET50_V1")
    if not (images and weights):
        pytest.skip("IMAGENET and RESNET50_V1 do not name the files")
    overrides = [
        "model.name=resnet50",
        f"data.root={images}",
        "train.precision=fp32",
        "loader.decoder=pillow",
    ]
    trained = open_trained(Path(weights), overrides)
    with join_world("auto") as world:
        trained = with_config(trained, overrides, world)
        found = evaluate.run(trained, world, flip=False, self_check=False)
    assert found.metrics.images == 50_000
    assert found.metrics.top1 == pytest.approx(76.13, abs=0.03)


@pytest.mark.slow
def test_self_check_of_a_run_with_two_ranks(image_root: Path, tmp_path: Path) -> None:
    def on_two_ranks(*command: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            small_run.torchrun([sys.executable, *command], 2),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder = tmp_path / "run"
    on_two_ranks(train.__file__, *small_run.overrides_of(image_root, folder))
    out = on_two_ranks(evaluate.__file__, str(folder), *HERE, "--self-check")
    assert out.count(": equal\n") == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("deterministic", "compile"), [("true", "off"), ("true", "default"), ("false", "off")]
)
def test_self_check_on_a_gpu(
    whole_runs: None, image_root: Path, tmp_path: Path, deterministic: str, compile: str
) -> None:
    overrides = [f"train.deterministic={deterministic}", "train.device=cuda"]
    small_run.run(image_root, tmp_path / "run", *overrides, f"model.compile={compile}")
    with join_world("cuda") as world:
        trained = with_config(open_trained(tmp_path / "run"), [], world)
        found = evaluate.run(trained, world, flip=False, self_check=True)
    assert not found.differs, found.check
    if deterministic == "true":
        assert [line.split(": ")[1] for line in found.check] == ["equal"] * 3
    assert math.isfinite(found.metrics.loss)
    train.set_up_kernels(deterministic=False, precision="bf16")
