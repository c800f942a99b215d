"""Predictions for files, folders and lists, from the command line, on small JPEG files."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from conf.schema import UserError
from engine.distributed import World
from scripts import evaluate, predict
from scripts.lib.trained import open_trained
from scripts.predict import Predicted, Predictor, Result, Unreadable, find_files, read_list
from tests import small_run
from tests.conftest import CLASSES, VAL_IMAGES

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
HERE = ["train.device=cpu", "loader.workers=2"]


@pytest.fixture(scope="module")
def folder(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with a moving average, whose name contains `=`."""
    folder = tmp_path_factory.mktemp("runs") / "small,optim.lr=0.2"
    options = ["train.ema_decay=0.9", "optim.lr=0.2", "train.epochs=1"]
    small_run.run(image_root, folder, *options)
    return folder


@pytest.fixture
def predictor(folder: Path) -> Predictor:
    return Predictor(open_trained(folder, [*HERE, "loader.batch_size=4"]), CPU, top=3)


@pytest.fixture
def damaged(image_root: Path, tmp_path: Path) -> Path:
    """A folder with two images that have odd names, a hidden one, and files that are no images."""
    image = (image_root / "val" / "dots" / "00.jpg").read_bytes()
    folder = tmp_path / "images"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    (folder / "line\nbreak.jpg").write_bytes(image)
    (folder / "sub" / os.fsdecode(b"\xff.jpg")).write_bytes(image)
    (folder / "sub" / ".hidden" / "hidden.jpg").write_bytes(image)
    (folder / "sub.jpg").write_bytes(image[: len(image) // 2])
    (folder / "text.png").write_text("no image")
    (folder / "notes.txt").write_text("not listed")
    os.mkfifo(folder / "fifo.jpg")
    (folder / "link.jpg").symlink_to("nowhere")
    (folder / "sub" / "loop").symlink_to("..")
    return folder


def results(predictor: Predictor, *paths: Path) -> list[Result]:
    batches = predictor.run(find_files(map(str, paths), iter(())))
    return [result for batch in batches for result in batch]


@pytest.mark.parametrize(
    "transforms",
    [
        "[{resize: {size: 36}}, {center_crop: {size: 32}}]",
        "[{resize: {size: [32, 32]}}]",
        "[{resize: {size: 36, interpolation: bicubic}}, {center_crop: {size: 32}}]",
        "[{rotation: {degrees: 45}}, {resize: {size: [32, 32], interpolation: bicubic}}]",
    ],
)
def test_same_predictions_as_evaluate(folder: Path, image_root: Path, transforms: str) -> None:
    here = [*HERE, f"augment.val={transforms}"]
    predictor = Predictor(open_trained(folder, [*here, "loader.batch_size=4"]), CPU, top=3)
    trained = evaluate.with_config(open_trained(folder, here), here, ALONE)
    trained.config.loader.workers = 0
    evaluated = evaluate.run(trained, ALONE, flip=False, self_check=False)
    split = evaluated.datasets.val
    found = results(predictor, image_root / "val")
    assert [result.path for result in found] == [split.name(i) for i in range(len(split))]
    assert len(found) == VAL_IMAGES * len(CLASSES)
    for i, result in enumerate(found):
        assert isinstance(result, Predicted)
        assert result.classes[0] == evaluated.predictions.predictions[i]
        assert result.probabilities[0] == pytest.approx(
            evaluated.predictions.confidences[i], rel=1e-5
        )
        assert sorted(result.classes) == [0, 1, 2]
        assert result.probabilities == sorted(result.probabilities, reverse=True)
        assert sum(result.probabilities) == pytest.approx(1)


def test_files_that_cannot_be_read_stay_in_order(damaged: Path, predictor: Predictor) -> None:
    found = results(predictor, damaged, damaged / "sub" / ".hidden")
    names = [os.path.relpath(result.path, damaged) for result in found]
    files = ["fifo.jpg", "line\nbreak.jpg", "link.jpg", "sub.jpg", "sub/\udcff.jpg", "text.png"]
    assert names == [*files, "sub/.hidden/hidden.jpg"]
    reasons = [result.reason if isinstance(result, Unreadable) else "" for result in found]
    assert reasons[0] == "is not a regular file"
    assert reasons[2] == "No such file or directory"
    assert "truncated" in reasons[3] and "cannot identify image file" in reasons[5]
    assert reasons[1] == reasons[4] == reasons[6] == ""


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_other_formats(predictor: Predictor, tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (50, 40)) if mode != "P" else Image.new("RGB", (50, 40)).convert("P")
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    image.save(path)
    assert [type(result) for result in results(predictor, path)] == [Predicted]


def test_output_that_is_not_a_number(predictor: Predictor, image_root: Path) -> None:
    with torch.no_grad():
        predictor.model.fc.bias.fill_(torch.nan)  # type: ignore[union-attr, operator]
    (result,) = results(predictor, image_root / "val" / "dots" / "00.jpg")
    assert isinstance(result, Unreadable) and result.reason.endswith("is not a number")


def test_few_images_are_in_memory(
    predictor: Predictor, image_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are taken from the list as the results are."""
    taken = 0

    def paths() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield str(image_root / "val" / "dots" / "00.jpg")

    batches = predictor.run(paths())
    for number in range(1, 4):
        assert len(next(batches)) == 4
        assert taken <= 4 * number + 4 * predict.BATCHES_AHEAD + 1
    batches.close()  # type: ignore[attr-defined]


def test_list() -> None:
    reader, writer = os.pipe()
    found = read_list(reader)
    os.write(writer, b"a\n\nb\xff")
    assert [next(found) for _ in range(2)] == ["a", None]  # the second path is not complete
    os.write(writer, b".jpg\nc d")
    os.close(writer)
    assert list(found) == ["b\udcff.jpg", "c d"]
    os.close(reader)


def test_image_in_place_of_a_list(image_root: Path) -> None:
    with open(image_root / "val" / "dots" / "00.jpg") as file:
        with pytest.raises(UserError, match=r"^-: standard input is binary; give paths"):
            list(read_list(file.fileno()))


def test_answer_to_each_path(folder: Path, image_root: Path, tmp_path: Path) -> None:
    """A program may wait for the answer before it writes the next path; Ctrl-C ends the script."""
    python = [sys.executable, "-X", "importtime"]
    command = [*python, predict.__file__, str(folder), "-", *HERE]
    pipe = subprocess.PIPE
    with (
        open(tmp_path / "stderr", "w+") as messages,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=messages, text=True) as process,
    ):
        assert process.stdin and process.stdout
        for name in ("00.jpg", "01.jpg"):
            path = str(image_root / "val" / "dots" / name)
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            row = json.loads(process.stdout.readline())
            assert row["path"] == path
        assert {entry["class"] for entry in row["predictions"]} == set(CLASSES)
        for entry in row["predictions"]:
            assert CLASSES[entry["index"]] == entry["class"] == entry["name"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stdout.read() == ""
        messages.seek(0)
        lines = messages.read().splitlines()
    assert all(line.startswith("import time:") for line in lines)
    # The compiler takes as long to import as the rest of torch.
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "torch" in imported and not imported & {"torch._dynamo", "torch._inductor"}


def test_command_line(
    folder: Path,
    damaged: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    listed = damaged / "list"
    listed.write_text("\0".join(map(str, sorted(damaged.glob("*.jpg")))))
    options = predict.arguments([str(folder), "-", "--format=csv", "--top=1", "-0", *HERE])
    with listed.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert predict.main(options) == 0
    out, err = capfd.readouterr()
    head, *rows = csv.reader(io.StringIO(out))
    assert head == ["path", "class_1", "probability_1", "name_1"]
    assert [row[0] for row in rows] == [f"{damaged}/line\nbreak.jpg"]
    assert rows[0][1] in CLASSES and 1 / 3 <= float(rows[0][2]) <= 1
    lines = err.splitlines()
    assert lines[0] == f"predict.py: {damaged}/fifo.jpg: is not a regular file"
    assert lines[-1] == "predict.py: 3 of 4 files could not be read" and len(lines) == 4


def test_readable_names() -> None:
    """The folder's name stays the key."""
    names = ["dog", "n01443537"]
    result = Predicted("a.jpg", [1, 0], [0.75, 0.25])
    written = {}
    for form, writer in predict.WRITERS.items():
        file = io.StringIO()
        writer(file, names, 2)([result])
        written[form] = file.getvalue()
    assert "goldfish" in written["table"] and "n01443537" not in written["table"]
    assert json.loads(written["jsonl"])["predictions"] == [
        {"class": "n01443537", "index": 1, "probability": 0.75, "name": "goldfish"},
        {"class": "dog", "index": 0, "probability": 0.25, "name": "dog"},
    ]
    assert list(csv.DictReader(io.StringIO(written["csv"]))) == [
        {
            "path": "a.jpg",
            "class_1": "n01443537",
            "probability_1": "0.750000",
            "class_2": "dog",
            "probability_2": "0.250000",
            "name_1": "goldfish",
            "name_2": "dog",
        }
    ]


def test_link_to_nowhere_is_not_a_mistake(damaged: Path) -> None:
    link = str(damaged / "link.jpg")
    assert predict.arguments([".", link, "optim.lr=1"]).paths == [link]


def test_table() -> None:
    file = io.StringIO()
    write = predict.table_writer(file, ["cat", "dog"], 2)
    write([Predicted("a.jpg", [1, 0], [0.75, 0.25])])
    write([])
    write([Predicted("long\x1b.jpg", [0, 1], [0.5, 0.5])])
    assert file.getvalue() == (
        "image  top 1     %  top 2     %\n"
        "a.jpg  dog    75.0  cat    25.0\n"
        "long\\x1b.jpg  cat    50.0  dog    50.0\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "CHECKPOINT is missing: give a checkpoint"),
        ("- .", "CHECKPOINT is missing: give a checkpoint"),
        (".", ".: is the checkpoint; the images are missing"),
        ("gone .", "gone: no such file or folder; give a checkpoint"),
        (". gone.jpg", "gone.jpg: no such file or folder; give a checkpoint"),
        (". . --top 0", "--top 0: give 1 or more"),
        (". . --top x", "--top: invalid int value: 'x'"),
        (". . --format xml", "--format: invalid choice: 'xml' (choose from"),
        (". . data.val_siz=32", "data.val_siz=32: there is no key"),
    ],
)
def test_mistakes(words: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        predict.arguments(words.split())
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (". - <&-", "-: standard input is closed"),
        (". . >&-", "standard output is closed"),
    ],
)
def test_closed_streams(words: str, message: str) -> None:
    command = f"exec '{sys.executable}' '{predict.__file__}' {words}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"predict.py: {message}")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--top 4 .", 2, "--top 4: the model has 3 classes; give 3 or less"),
        (".", 1, ".: holds no images (.jpg, .jpeg, .png, ...)"),
        ("-", 1, "-: the list on standard input is empty"),
    ],
)
def test_nothing_to_predict(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", (tmp_path / "empty.txt").open("x+"))
    options = predict.arguments([str(folder), *words.split(), *HERE])
    try:
        assert predict.main(options) == status
    except SystemExit as ended:
        assert ended.code == status
    assert capfd.readouterr() == ("", f"predict.py: {message}\n")


def test_output_that_nobody_reads(folder: Path, image_root: Path) -> None:
    command = f"'{sys.executable}' '{predict.__file__}' '{folder}' '{image_root}' '{image_root}'"
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("bash reports the status of each program")
    status = "status=${PIPESTATUS[0]}; exit $status"
    line = f"{command} {HERE[0]} loader.batch_size=1 | head -c 1 > /dev/null; {status}"
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.gpu
def test_same_predictions_as_evaluate_on_a_gpu(folder: Path, image_root: Path) -> None:
    overrides = ["train.device=cuda", "train.precision=fp32"]
    device = torch.device("cuda", 0)
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=device)
    trained = evaluate.with_config(open_trained(folder, overrides), overrides, world)
    evaluated = evaluate.run(trained, world, flip=False, self_check=False)
    found = results(Predictor(open_trained(folder, overrides), device, top=1), image_root / "val")
    classes = [result.classes[0] for result in found if isinstance(result, Predicted)]
    assert classes == evaluated.predictions.predictions.tolist()
