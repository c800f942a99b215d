"""Predictions for files, folders and lists, from the command line, on small JPEG files."""

import csv
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE
from threading import Event

import numpy as np
import pytest
import torch

import models
import train
from conf.errors import UserError
from pipeline.data import build
from pipeline.data.dataset import FolderDataset
from pipeline.data.decode import Picture
from pipeline.data.field import Field
from scripts import predict
from scripts.lib.progress import in_threads
from scripts.lib.trained import build_val, open_trained, run_main
from scripts.predict import Predictor, Result, find_files
from tests.conftest import CLASSES, VAL_IMAGES
from tests.helpers import small_run
from tests.helpers.processes import Started
from tests.helpers.second_input import with_age

CPU = torch.device("cpu")
HERE = ["train.device=cpu", "loader.workers=2"]


@pytest.fixture
def predictor(folder: Path) -> Predictor:
    return Predictor(open_trained(folder, [*HERE, "loader.batch_size=4"]), CPU)


@pytest.fixture
def damaged(image_root: Path, tmp_path: Path) -> Path:
    """Create a folder with two oddly named images, a hidden one, and files that are no images."""
    image = (image_root / "val" / "dots" / "00.jpg").read_bytes()
    folder = tmp_path / "images"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    (folder / "line\nbreak.jpg").write_bytes(image)
    (folder / "sub" / os.fsdecode(b"\xff.jpg")).write_bytes(image)
    (folder / "sub" / ".hidden" / "hidden.jpg").write_bytes(image)
    (folder / "sub.jpg").write_bytes(image[: len(image) // 2])
    (folder / "text.png").write_text("no image")
    (folder / "notes.heic").write_text("not listed")
    (folder / "link.jpg").symlink_to("nowhere")
    return folder


def results(predictor: Predictor, *paths: Path) -> list[Result]:
    return [
        result for batch in predictor.predict_files(find_files(map(str, paths))) for result in batch
    ]


class FiveChannels(FolderDataset):
    @property
    def fields(self) -> Mapping[str, Field]:
        size = self.transform.image_size
        return {**super().fields, "image": Field(np.float32, (size, size, 5), image=True)}

    def open(self, index: int) -> Picture:
        levels = super().open(index).pixels()[:, :, [0, 1, 2, 1, 0]]
        return Picture(levels.astype(np.float32) / 255)


five_channels = partial(build.folder, dataset=FiveChannels)


def test_predictor_five_channels(image_root, tmp_path):
    """The run's dataset opens them, like the one in docs/tasks.md."""
    words = "data.source=tests.scripts.test_predict:five_channels", "data.mean=[0.5]"
    small_run.run(image_root, tmp_path / "run", *words, "data.std=[0.5]", "train.max_steps=2")
    trained = open_trained(tmp_path / "run", HERE)
    found = results(Predictor(trained, CPU), image_root / "val")
    assert [result.reason for result in found] == [""] * len(found)
    files = build_val(trained.config).val
    pixels = np.stack([files[row]["image"] for row in range(len(files))])
    images = torch.from_numpy(pixels).movedim(-1, 1)
    with torch.no_grad():
        expected = trained.build(CPU)(images * 2 - 1).softmax(1).topk(1).values[:, 0]
    ours = [result.values["predictions"][0]["probability"] for result in found]
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("transforms", "upright"),
    [
        ("[{resize: {size: 36, interpolation: bicubic}}, {center_crop: {size: 32}}]", "true"),
        ("[{v2.RandomInvert: {p: 1}}, {resize: {size: [32, 32]}}]", "false"),
    ],
)
def test_predictor_equals_pipeline(folder, photos, transforms, upright):
    overrides = [*HERE, f"data.root={photos}", f"data.exif_orientation={upright}"]
    overrides += [f"augment.val={transforms}", "loader.batch_size=4"]
    trained = open_trained(folder, overrides)
    found = results(Predictor(trained, CPU, top=3), photos / "val")
    files = build_val(trained.config).val
    assert [result.path for result in found] == [files.name(i) for i in range(len(files))]
    assert len(found) == VAL_IMAGES * len(CLASSES)
    pixels = torch.from_numpy(np.stack([files[i]["image"] for i in range(len(files))]))
    mean, std = (torch.tensor(v) for v in (trained.config.data.mean, trained.config.data.std))
    with torch.no_grad():
        expected = trained.build(CPU)(((pixels / 255 - mean) / std).permute(0, 3, 1, 2)).softmax(1)
    for result, probabilities in zip(found, expected, strict=True):
        ours = [entry["probability"] for entry in result.values["predictions"]]
        assert ours == sorted(ours, reverse=True) and sum(ours) > 0.999
        classes = [entry["index"] for entry in result.values["predictions"]]
        assert ours == pytest.approx(probabilities[classes].tolist(), rel=1e-3)


def test_predictor_rejects_unequal_number_of_classes(folder, image_root):
    predictor = Predictor(open_trained(folder, HERE), CPU)
    predictor.names = ("cat", "dog")
    with pytest.raises(UserError, match=r"^the model has 3 outputs for 2 classes"):
        results(predictor, image_root / "val")


def test_predict_features_are_head_input(folder, image_root, capsys):
    words = [str(folder), str(image_root / "val"), "--features", *HERE]
    assert predict.predict_all(predict.arguments(words)) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with torch.no_grad():
        features = torch.tensor([row["features"] for row in printed])
        probabilities = open_trained(folder, HERE).build(CPU).fc(features).softmax(1).tolist()
    for row, expected in zip(printed, probabilities, strict=True):
        found = {entry["index"]: entry["probability"] for entry in row["predictions"]}
        assert found == pytest.approx(dict(enumerate(expected)), abs=1e-5)


@pytest.mark.parametrize("name", ["squeezenet1_1", "vit_b_16", "densenet121"])
def test_watch_head_of_other_models(name):
    """The last layer may be a convolution, or get the first of several tokens, or their mean."""
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=224).eval()
        features = predict.watch_head(model)
        model(torch.zeros(2, 3, 224, 224))
    (shape,) = {p.shape[1] for p in model.parameters() if p.ndim > 1 and p.shape[0] == 7}
    assert [one.shape for one in features] == [(2, shape)]
    model, tokens = torch.nn.Sequential(torch.nn.Linear(6, 5)), torch.rand(2, 7, 6)
    features = predict.watch_head(model)
    model(tokens)
    torch.testing.assert_close(features, [tokens.mean(1)])


def test_predictor_unreadable_files_stay_in_order(damaged, predictor, capsys):
    os.mkfifo(damaged / "pipe")  # opening it would wait for a writer
    (damaged / "device").symlink_to("/dev/zero")  # has no end
    others = [damaged / name for name in ("sub/.hidden", "link.jpg", "pipe", "device")]
    found = results(predictor, damaged, *others)
    said = capsys.readouterr().err.partition(": ")[2]
    assert said.startswith(f"{damaged}: ignored files or folders: not a regular")
    reasons = {os.path.relpath(result.path, damaged): result.reason for result in found}
    files = ["line\nbreak.jpg", "sub.jpg", "text.png", "sub/\udcff.jpg", "sub/.hidden/hidden.jpg"]
    assert list(reasons) == [*files, "link.jpg", "pipe", "device"]
    assert reasons["pipe"] == reasons["device"] == "not a regular file"
    with pytest.raises(SystemExit, match="2"):
        predict.arguments([str(damaged / "pipe"), "image.jpg"])
    assert reasons["link.jpg"] == "No such file or directory"
    assert "truncated" in reasons["sub.jpg"]
    assert "cannot identify image file" in reasons["text.png"]
    assert [bool(result.values) for result in found] == [not result.reason for result in found]
    assert list(reasons.values()).count("") == 3
    good = damaged / "line\nbreak.jpg"
    _, behind = results(predictor, damaged / "text.png", good)
    assert [behind] == results(predictor, good)


def test_predict_list_from_stdin_and_ctrl_c(folder, image_root, tmp_path):
    """Results are written batch by batch, before the list ends; Ctrl-C ends the script."""
    python = [sys.executable, "-X", "importtime"]
    command = [*python, predict.__file__, str(folder), "-", *HERE, "loader.batch_size=1"]
    with (
        open(tmp_path / "stderr", "w") as messages,
        Started(command, stdin=PIPE, stdout=PIPE, stderr=messages) as process,
    ):
        path = str(image_root / "val" / "dots" / "00.jpg")
        process.stdin.write(3 * f"{path}\n")
        process.stdin.flush()
        row = json.loads(process.stdout.readline())
        assert row["path"] == path
        assert {entry["class"] for entry in row["predictions"]} == set(CLASSES)
        for entry in row["predictions"]:
            assert CLASSES[entry["index"]] == entry["class"] == entry["name"]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130 and process.stdout.read() == ""
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert all(line.startswith("import time:") for line in lines)
    # Importing the compiler takes as long as the rest of torch.
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "torch" in imported and not imported & {"torch._dynamo", "torch._inductor"}


def test_predict_command_line(folder, damaged, monkeypatch, capfd):
    def run(words, *listed):
        (damaged / "list").write_bytes(b"\n".join(os.fsencode(damaged) + n for n in listed))
        options = predict.arguments([str(folder), *words.split(), *HERE])
        with (damaged / "list").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert run_main(lambda: predict.predict_all(options)) == 1
        return capfd.readouterr()

    out, err = run("gone.jpg - --format=csv --top=1", b"/link.jpg", b"/sub.jpg", b"/sub/\xff.jpg")
    head, row = csv.reader(io.StringIO(out))
    assert head == ["path", "class_1", "probability_1", "name_1"]
    assert row[0] == f"{damaged}/sub/\udcff.jpg"
    assert row[1] in CLASSES and 1 / 3 <= float(row[2]) <= 1
    assert ": gone.jpg: No such file or directory" in err
    assert err.endswith(": 3 of 4 files could not be read\n")
    assert run("-")[1].endswith("no images found at these paths or in the list\n")


def written_as(form: str, found: list[Result], names: Sequence[str]) -> str:
    file = io.StringIO()
    output = predict.Output(form, file, names)
    for result in found:
        output.write([result])
    output.write([])
    return file.getvalue()


def test_output_table_of_classes():
    """The table shows readable names."""
    dog = {"class": "dog", "index": 0, "probability": 0.25, "name": "dog"}
    fish = {"class": "n01443537", "index": 1, "probability": 0.75, "name": "goldfish"}
    found = [Result("a.jpg", {"predictions": [fish, dog]})]
    table = written_as("table", found, ["dog", "n01443537"])
    assert table == "a.jpg  goldfish  75.0 %  dog       25.0 %\n"


def test_output_values_of_other_tasks(predictor, image_root, monkeypatch):
    """A number, a list, and a number per output."""
    values = {"mass": torch.tensor(1.2345678), "vector": torch.arange(7) / 2}
    values["trait"] = torch.ones(3)

    def predictions(outputs):
        return {name: torch.stack([value] * len(outputs)) for name, value in values.items()}

    monkeypatch.setattr(train, "predictions", predictions)
    image = image_root / "val" / "dots" / "00.jpg"
    found = results(predictor, image, image)
    table, lines, cells = (written_as(f, found, CLASSES) for f in predict.FORMATS)
    trait = dict.fromkeys(CLASSES, 1.0)
    text = "mass 1.234568  vector [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]  trait " + json.dumps(trait)
    assert table.splitlines() == 2 * [f"{image}  {text}"]
    row = {"mass": 1.234568, "vector": [0, 0.5, 1, 1.5, 2, 2.5, 3], "trait": trait}
    assert list(map(json.loads, lines.splitlines())) == 2 * [{"path": str(image), **row}]
    head, first, _ = csv.reader(io.StringIO(cells))
    assert head[:3] == ["path", "mass", "vector_1"] and head[-1] == "trait_stripes"
    assert first[1:4] == ["1.234568", "0.0", "0.5"]


@pytest.mark.gpu
def test_predictor_gpu_equals_cpu(folder, image_root):
    classes = []
    for device in ("cpu", "cuda"):
        trained = open_trained(folder, [f"train.device={device}", "train.precision=fp32"])
        found = results(Predictor(trained, torch.device(device, 0), top=1), image_root / "val")
        classes.append([result.values["predictions"][0]["index"] for result in found])
    assert classes[0] == classes[1]


def test_in_threads_close_does_not_wait():
    """The garbage collector may close it while it holds a lock that the end of a thread needs."""
    began, go, ended = Event(), Event(), []
    tasks = [int, lambda: began.set() or go.wait(9) or ended.append(1)]
    found = in_threads(1, lambda task: task(), tasks, ahead=1)
    assert next(found) == 0 and began.wait(9)
    assert found.close() is None and not ended
    go.set()


def test_predictor_reads_numbers_from_csv(predictor, folder, monkeypatch, image_root, tmp_path):
    """Paths are absolute or relative to its folder; other columns are ignored."""
    image = image_root / "val" / "dots" / "00.jpg"
    (tmp_path / "new.jpg").symlink_to(image)
    table = tmp_path / "new.csv"
    table.write_text(f"path,age,note\nnew.jpg,0,x\n{image},50,y\nnew.jpg,old,z\nnew.jpg\n")
    (plain,) = results(predictor, image)
    two_inputs = Predictor(with_age(open_trained(folder, HERE), monkeypatch), CPU)
    none, old, *unreadable = results(two_inputs, table)
    assert none.path == str(tmp_path / "new.jpg") and old.path == str(image)
    assert none.values["predictions"] == plain.values["predictions"]
    assert old.values["predictions"][0]["index"] == 0
    assert old.values["predictions"][0]["probability"] == 1
    texts = ["'old'", "''"]
    reasons = [f"could not convert string to float: {text}" for text in texts]
    assert [result.reason for result in unreadable] == reasons


def test_predictor_names_missing_field(folder, monkeypatch, image_root, tmp_path):
    two_inputs = Predictor(with_age(open_trained(folder, HERE), monkeypatch), CPU)
    table = tmp_path / "new.csv"
    table.write_text("path,label\nnew.jpg,0\n")
    message = "^the network also reads age, .*; pass a CSV file with the columns path,age$"
    for path in (image_root / "val", table):
        with pytest.raises(UserError, match=message):
            results(two_inputs, path)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match="not a regular file"):
        results(two_inputs, tmp_path / "pipe.csv")
    table.write_text("file,age\nnew.jpg,0\n")
    with pytest.raises(UserError, match=r"new\.csv: has no column `path`; "):
        results(two_inputs, table)


@pytest.mark.parametrize(
    ("text", "field", "number"),
    [
        ("1.5", Field(np.float32), 1.5),
        (" 3", Field(np.int64), 3),
        ("0", Field(np.bool_), False),
        ("1.5", Field(np.int64), None),
        ("2", Field(np.bool_), None),
        ("nan", Field(np.float32), None),
        ("1", Field(np.float32, (2,)), None),
    ],
)
def test_parse_number(text, field, number):
    if number is not None:
        found = predict.parse_number(text, field)
        assert (found, found.dtype) == (number, field.dtype)
    else:
        with pytest.raises(ValueError, match="^" + text.strip() + " is not a valid "):
            predict.parse_number(text, field)
