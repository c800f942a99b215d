"""Evaluation of runs, of other projects' files, and on other data, with small JPEG files."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import models
import train
from conf.errors import UserError
from engine import checkpoint
from engine.compute import set_up_kernels
from engine.distributed import join_world
from pipeline.data.class_names import imagenet_names
from pipeline.data.dataset import FolderDataset
from pipeline.data.field import Field, image_field
from pipeline.feed.batch import DeviceSlot, ImageFormat
from scripts import evaluate
from scripts.evaluate import Evaluated, outputs_of, with_config
from scripts.lib.calibration import FILE, calibration_error
from scripts.lib.trained import Trained, build_val, open_trained
from tests.conftest import CLASSES, VAL_IMAGES
from tests.engine.plans import ALONE
from tests.helpers import small_run
from tests.helpers.processes import needs_extras
from tests.helpers.results import newest
from tests.helpers.stored import as_list, as_tar

HERE = ["train.device=cpu", "loader.workers=0"]
SCRIPT = [sys.executable, evaluate.__file__]
VALUES = ("loss", "top1", "macro_recall")
FOREIGN = ["model.name=resnet_tiny", *small_run.SMALL]


@pytest.fixture(scope="module")
def found(folder: Path) -> Evaluated:
    return measured(newest(folder))


def opened(path: Path, *overrides: str) -> Trained:
    overrides = (*HERE, *overrides)
    return with_config(open_trained(path, overrides), overrides, ALONE)


def measured(path: Path, *overrides: str, **options: Any) -> Evaluated:
    return evaluate.evaluate_checkpoint(opened(path, *overrides), ALONE, **options)


def outputs(found: Evaluated, images: int | None = None) -> torch.Tensor:
    """Return all model outputs for the first images of a split, float32 [N, outputs]."""
    model, data = found.trained.build(ALONE.device), found.datasets.val
    levels = np.stack([data[i]["image"] for i in range(len(data))[:images]])
    config = found.trained.config.data
    slot = DeviceSlot(ImageFormat(ALONE.device, config.mean, config.std))
    inputs = slot.normalize("image", torch.tensor(levels))
    with torch.no_grad():
        found_both = model(inputs), model(inputs.flip(-1))
    return sum(found_both) / 2 if found.summary["flip"] else found_both[0]


@needs_extras
def test_evaluate_equals_last_validation(found):
    last = checkpoint.load(found.trained.path)["state"]["last"]
    assert found.values == {name: last[name] for name in found.values} and "top1" in found.values
    assert found.summary["images"] == VAL_IMAGES * len(CLASSES)
    assert found.trained.averaged and last["loss"] != last["loss_raw"]
    error = calibration_error(found.rows["logits"], found.rows["label"])
    assert error == pytest.approx(found.values["ece"], abs=1e-4)


def test_evaluate_command_line(ranks, folder, found, image_root, tmp_path):
    """The run's name contains `=`. The run gets only a temperature, the images get no file."""
    folder = Path(shutil.copytree(folder, tmp_path / folder.name))
    before, last = {*folder.rglob("*")}, newest(folder)
    for path, name in ((folder, "best"), (last, last.stem)):
        done = ranks.run([*SCRIPT, str(path), *HERE], 1, cwd=tmp_path)
        lines = rf"^result    loss .*\nimages    15 images of 32 px.*\nfiles     (.*,{name})\n"
        weights, (out,) = done.stdout.splitlines()[0], re.findall(lines, done.stdout, re.MULTILINE)
        assert re.fullmatch(rf"weights   {name}.pt, step \d+", weights)
    stored = json.loads((tmp_path / out / "evaluation.json").read_text())
    same = found.summary | {"checkpoint": str(last), "name": f"{folder.name},{last.stem}"}
    assert stored.items() >= same.items() and stored["made_by"]["pillow"]
    assert {*folder.rglob("*")} - before == {folder / "checkpoints" / FILE}
    inside = image_root / "val" / "out"  # would become a class
    done = ranks.run([*SCRIPT, str(folder), *HERE, "--out", str(inside)], 1, cwd=tmp_path, status=2)
    assert not inside.exists()
    assert done.stderr.startswith(f"evaluate.py: --out {inside}: is inside {image_root / 'val'}")


def test_evaluate_other_classes(folder, image_root, tmp_path):
    """Outputs are assigned to classes by name; no training split is needed."""
    for name in ("dots", "stripes"):
        shutil.copytree(image_root / "val" / name, tmp_path / "val" / name)
    every = measured(folder, f"data.root={tmp_path}", all_outputs=True)
    assert every.classes == ("dots", "stripes", "checks") and every.summary["outputs"] == 3
    assert every.rows["loss"] == pytest.approx(measured(folder).rows["loss"][VAL_IMAGES:])
    part = measured(folder, f"data.root={tmp_path}", flip=True)
    logits, labels = outputs(part)[:, 1:], part.rows["label"]  # without the checks
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert part.classes == ("dots", "stripes") and part.summary["outputs"] == 2
    assert part.rows["loss"] == pytest.approx(losses.tolist(), rel=1e-3)
    assert part.rows["prediction"].tolist() == logits.argmax(1).tolist()
    alone = measured(folder, f"data.val={tmp_path / 'val'}", flip=True)
    assert alone.values == part.values != measured(folder, f"data.root={tmp_path}").values
    shutil.rmtree(tmp_path / "val" / "dots")
    assert measured(folder, f"data.root={tmp_path}").classes == ("stripes", "checks", "dots")
    (tmp_path / "val" / "stripes").rename(tmp_path / "val" / "cats")
    with pytest.raises(UserError, match=r"^data\.val=val: .* has no class cats; use "):
        measured(folder, f"data.root={tmp_path}")


def test_select_outputs_rejects_non_classes():
    """For example, a box's corners after the logits."""
    places = torch.tensor([2, 0])
    pick = partial(evaluate.select_outputs, torch.nn.Flatten(), indices=places, count=3, flip=False)
    assert pick(torch.tensor([[1, 2, 3]])).tolist() == [[3, 1]]
    with pytest.raises(UserError, match=r"^data\.val: .* \[1, 5\] are not one per class; use "):
        pick(torch.zeros(1, 5))


def test_select_outputs_flips_images_only():
    def network(image: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return torch.cat([image.flatten(1), age], 1)

    inputs = torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[2.0, 4.0]])
    outputs = evaluate.select_outputs(network, *inputs, indices=None, count=3, flip=True)
    assert outputs.tolist() == [[0.5, 0.5, 2, 4]]


IMAGENET = [*imagenet_names()]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save weights from a different project with 1,000 outputs and no class names."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("published") / "weights.pth"
    torch.save(models.build("resnet_tiny", num_classes=1000, image_size=32).state_dict(), path)
    return path


def published_on(path: Path, root: Path, **options: Any) -> Evaluated:
    return measured(path, *FOREIGN, f"data.root={root}", **options)


def test_evaluate_published_weights_on_some_classes(published, image_root, tmp_path, capsys):
    """As on ImageNet-A and -R, either the 7 folders' outputs compete, or all 1,000."""
    places = [5, 17, 300, 301, 640, 872, 999]
    for i, place in enumerate(places):
        folder = tmp_path / "val" / IMAGENET[place]
        folder.mkdir(parents=True)
        shutil.copy(sorted(image_root.glob("val/*/*"))[i], folder)
    some, every = (published_on(published, tmp_path, all_outputs=each) for each in (False, True))
    logits, labels = outputs(some), torch.tensor(places)
    for found, kept, own in ((some, logits[:, places], torch.arange(7)), (every, logits, labels)):
        hits = (kept.topk(5).indices == own[:, None]).double()
        loss = torch.nn.functional.cross_entropy(kept, own).item()
        top1, top5 = (100 * each.mean().item() for each in (hits[:, 0], hits.sum(1)))
        expected = {"loss": loss, "top1": top1, "top5": top5}
        assert {name: found.values[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert found.rows["confidence"] == pytest.approx(kept.softmax(1).amax(1).tolist(), rel=1e-3)
        assert found.summary["outputs"] == len(found.classes) == kept.shape[1]
    named = [IMAGENET[place] for place in logits.argmax(1)]
    assert [every.classes[i] for i in every.rows["prediction"]] == named
    evaluate.print_result(some, tmp_path)
    assert "only 7 classes with images" in capsys.readouterr().out
    evaluate.print_result(every, tmp_path)
    assert "only 7 classes" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["{}", "{:04d}"])
def test_evaluate_folders_named_by_number(published, folder, tmp_path, name):
    """As in ImageNet-V2, for weights without names and a model trained on WordNet IDs."""
    image = tmp_path / "a.jpg"
    Image.linear_gradient("L").resize((32, 32)).save(image)
    for i in range(1000):
        numbered = tmp_path / "val" / name.format(i)
        numbered.mkdir(parents=True)
        (numbered / "a.jpg").hardlink_to(image)
    found = published_on(published, tmp_path)
    assert found.values["top1"] == pytest.approx(0.1)  # one of the equal images is right
    hit, place = int(found.rows["top1"].argmax()), int(outputs(found, 1).argmax())
    assert found.classes[hit] == IMAGENET[place]
    assert Path(found.datasets.val.name(hit)).parent.name == name.format(place)
    for classes in (IMAGENET, [*imagenet_names().values()]):  # torchvision's class names
        named = replace(found.trained, classes=tuple(classes))
        assert outputs_of(named, found.datasets) == outputs_of(found.trained, found.datasets)
    with pytest.raises(UserError, match=r"has no class 0+, "):
        outputs_of(opened(folder), found.datasets)


def test_evaluate_real_labels(folder, found, tmp_path):
    """ImageNet's class indices in file name order; images without an index do not count."""
    classes = ("other", IMAGENET[7], IMAGENET[3])  # output order
    names = map("{:02d}.jpg".format, np.random.default_rng(0).permutation(15))
    for old, new in zip(map(found.datasets.val.name, range(15)), names, strict=True):
        path = tmp_path / "val" / classes[CLASSES.index(Path(old).parent.name)] / new
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(old, path)
    sets = [[], [7], [0, 3], [3, 5, 7], [0]] * 3
    real = tmp_path / "real.json"
    real.write_text(json.dumps(sets))
    trained = replace(opened(folder, f"data.root={tmp_path}"), classes=classes)
    own = evaluate.evaluate_checkpoint(trained, ALONE, real=real)
    hits = []
    for i, predicted in enumerate(own.rows["prediction"].tolist()):
        numbers = sets[int(Path(own.datasets.val.name(i)).stem)]
        hits.append(own.classes[predicted] in [IMAGENET[number] for number in numbers])
    assert own.values["top1_real"] == pytest.approx(100 * sum(hits) / 12)
    with pytest.raises(UserError, match="but the first classes are checks, dots, stripes"):
        measured(folder, real=real)
    shutil.copytree(path.parent, tmp_path / "val" / classes[0], dirs_exist_ok=True)
    for file, wrong in ((real, "15 lists for 20 images with 15 d"), (Path(__file__), "line 1 col")):
        with pytest.raises(UserError, match=rf"^--real .*{wrong}"):
            evaluate.evaluate_checkpoint(trained, ALONE, real=file)


def test_evaluate_regression_task(folder, tmp_path, monkeypatch, capsys):
    """With a number per image as target, output names need not be the folder names."""
    fields = {"image": image_field(32), "mass": Field(np.float32)}
    monkeypatch.setattr(FolderDataset, "fields", fields)
    monkeypatch.setattr(FolderDataset, "targets", lambda *_: {"mass": 2.0})

    def values(network, batch):
        return {"mae": (network(batch["image"])[:, 0] - batch["mass"]).abs()}

    monkeypatch.setattr(train, "validation_values", values)
    own = replace(opened(folder, "data.val=train"), classes=("mass", "a", "b"))
    found = evaluate.evaluate_checkpoint(own, ALONE, flip=True)
    assert found.classes == own.classes
    evaluate.print_result(found, tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"mae \d[.\d]*\nimages    36 images (.|\n)*\nnote      these may be tr", out)
    evaluate.write(found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    assert json.loads((tmp_path / "evaluation.json").read_text())["mae"] == found.values["mae"]


def test_evaluate_run_with_val_fraction(frozen_gc, image_root, tmp_path, capsys):
    """The run's own config finds the same validation images, even where files are missing."""
    flat = Path(shutil.copytree(image_root / "train", tmp_path / "flat"))
    folder, short = tmp_path / "run", ["loader.workers=0", "train.epochs=1"]
    summary = small_run.run(flat, folder, "data.val_fraction=0.25", *short)
    again = measured(folder)
    assert again.values["top1"] == summary["top1"] and len(again.rows["label"]) == 9
    os.unlink(again.datasets.val.name(0))  # changes the held-out images
    evaluate.print_result(measured(folder), tmp_path)
    assert "note      these may be training images" in capsys.readouterr().out
    as_list(flat, tmp_path / "every.csv")
    evaluate.print_result(measured(folder, f"data.val={tmp_path}/every.csv"), tmp_path)
    shared = f"26 of 35 validation images are also training images (first: {flat}"
    assert f"\nnote      {shared}" in capsys.readouterr().out
    # Another split, however it is stored, in place of the images that were held out.
    names = [path.stem for path in sorted(image_root.glob("val/*/*"))]
    for typed in (f"data.root={image_root}", f"data.val={image_root / 'val'}"):
        val = opened(folder, typed)
        assert len(build_val(val.config).val) == len(names)
    whole = opened(folder, f"data.val={flat}")  # including held-out images
    run = evaluate.data_of_run(whole)
    places = [whole.config.data, run, replace(run, val_fraction=0.5)]
    odd = {"data.root": 1, "data.train": 2, "data.val": 3.5}  # of a different program
    named = evaluate.data_of_run(replace(whole, stored={"config": odd}))
    assert (named.root, named.train, named.val) == ("1", "2", "3.5")
    assert [evaluate.are_trained_on(place, run) for place in places] == [True, False, True]
    for file in ("listed.csv", "packed.tar"):
        held = replace(run, root=str(flat / file))
        assert evaluate.are_trained_on(replace(held, val=".", val_fraction=0.0), held)
    shutil.copytree(image_root / "val", flat / "test")
    as_tar(image_root / "val", flat / "packed.tar")
    as_list(image_root / "val", flat / "listed.csv")
    for split in ("test", "packed.tar", "listed.csv"):
        test = opened(folder, f"data.val={Path(split).stem}")
        assert evaluate.name_of(test) == f"{test.name}{flat}/{split}".replace("/", ",")
        val = build_val(test.config).val
        assert [Path(val.name(i)).stem for i in range(len(val))] == names


def test_name_of_test_set(folder, image_root, tmp_path, monkeypatch):
    """Names do not depend on how a path is written; the run's images use the checkpoint's name."""
    data = Path(shutil.copytree(image_root, tmp_path / "data"))
    as_tar(data / "val", tmp_path / "data" / "packed.tar")
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(tmp_path)

    def name_of(word):
        return evaluate.name_of(opened(folder, word))

    start = f"{folder.name},best{tmp_path}/data/".replace("/", ",")
    absolute = f"data.val={data}/val/"
    forms = ["data.val=data/val", absolute, "data.root=./data", "data.root=link/"]
    assert set(map(name_of, forms)) == {f"{start}val"}
    packed = ["data.val=data/packed.tar", f"data.val={tmp_path}/link/packed"]
    assert set(map(name_of, packed)) == {f"{start}packed.tar"}
    own = opened(folder, f"data.val={os.path.relpath(image_root)}/./val/")
    assert evaluate.name_of(own) == own.name == f"{folder.name},best"


def test_evaluate_foreign_file(found, image_root, tmp_path):
    """The file contains no class names, so the folder order counts."""
    torch.save(found.trained.weights, tmp_path / "weights.pth")
    other = published_on(tmp_path / "weights.pth", image_root)
    assert other.values == found.values and other.classes == CLASSES
    name = f"{tmp_path.name},weights.pth{image_root}/val".replace("/", ",")  # per test set
    assert (other.trained.stored, evaluate.name_of(other.trained)) == ({}, name)
    with pytest.raises(UserError, match=r"has 3 classes, the model has 5; use .*--classes FILE"):
        outputs_of(replace(other.trained, num_classes=5), found.datasets)
    numbers = replace(found.datasets, classes=("01", "02", "10"))
    assert outputs_of(other.trained, numbers) == (numbers.classes, [0, 1, 2])
    with pytest.raises(UserError, match=r"classes 1, 10, 2, .*--clas"):
        outputs_of(other.trained, replace(found.datasets, classes=("1", "10", "2")))
    named = replace(other.trained, classes=CLASSES)  # as an exported file, or by --classes
    with pytest.raises(UserError, match=r"has no class Dots; "):
        outputs_of(named, replace(found.datasets, classes=("Dots", *CLASSES[1:])))
    with pytest.raises(UserError, match=r"^data\.root: is missing; pass "):
        opened(tmp_path / "weights.pth", *FOREIGN)


@pytest.mark.slow
def test_evaluate_with_two_ranks(ranks, image_root, tmp_path):
    overrides = small_run.overrides_of(image_root, tmp_path / "run")
    ranks.run([sys.executable, train.__file__, *overrides], 2)
    path = newest(tmp_path / "run")
    done = ranks.run([*SCRIPT, str(path), *HERE, "--out", str(tmp_path)], 2, cwd=tmp_path)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    last = checkpoint.load(path)["state"]["last"]  # all digits
    assert [found[name] for name in VALUES] == [last[name] for name in VALUES], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["off", "default"])
def test_evaluate_on_gpu(frozen_gc, image_root, tmp_path, compile):
    overrides = ["train.deterministic=true", "train.device=cuda", f"model.compile={compile}"]
    small_run.run(image_root, tmp_path / "run", *overrides)
    with join_world("cuda") as world:
        trained = with_config(open_trained(tmp_path / "run"), [], world)
        found = evaluate.evaluate_checkpoint(trained, world, flip=False)
    last = torch.load(newest(tmp_path / "run"), weights_only=True)["state"]["last"]  # all digits
    assert [found.values[name] for name in VALUES] == [last[name] for name in VALUES]
    set_up_kernels(deterministic=False, precision="bf16")
