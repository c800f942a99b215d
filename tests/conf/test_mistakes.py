"""Invalid input to the whole program: one line that says what to change, status 2, no files.

test_cli.py tests mistakes in the config. These are mistakes in the data, the model or the run
directory.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from conf import cli
from tests.processes import descendants
from tests.results import tree

SMALL = [
    "model=resnet_tiny",
    "augment=demo",
    "data.image_size=32",
    "loader.batch_size=8",
    "loader.workers=0",
    "train.max_steps=1",
]

Refusal = Callable[..., str]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "workplace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refusal(workplace: Path, capsys: pytest.CaptureFixture[str], own_logging: None) -> Refusal:
    """Run the program with overrides that it must refuse; return the error message."""

    def refusal(*overrides: str) -> str:
        before = tree(workplace)
        try:
            status = train.main(cli.parse([*SMALL, *overrides], script="train.py", purpose=""))
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert err.count("\n") == 1 and err.endswith("\n"), err
        assert err.startswith("train.py: ") and "Traceback" not in err
        assert tree(workplace) == before
        return err.removeprefix("train.py: ")

    return refusal


@pytest.fixture
def images(image_root: Path, tmp_path: Path) -> Path:
    """A copy of the shared images that a test may break."""
    return Path(shutil.copytree(image_root, tmp_path / "images"))


def rename_images(images: Path, pattern: str) -> None:
    for path in images.glob(pattern):
        path.rename(path.with_suffix(".txt"))


def only_a_file(split: Path) -> None:
    shutil.rmtree(split)
    split.mkdir()
    (split / "a.jpg").write_bytes(b"")


# What is done to the images, the folder that is given, and the message; {} stands for the images.
ROOTS: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda _: None, "/no/such/place", "data.root=/no/such/place: no such folder; it must hold "),
    (lambda i: shutil.rmtree(i / "train"), "{}", "data.train={}/train: no such folder"),
    (
        lambda i: (i / "val").rename(i / "validation"),
        "{}",
        "data.val={}/val: no such folder; {} holds train, validation: ",
    ),
    (lambda i: only_a_file(i / "val"), "{}", "data.val={}/val: no class folders"),
    (
        lambda i: shutil.rmtree(i / "val" / "dots"),
        "{}",
        "data.val={}/val: has no class dots, which train has",
    ),
    (
        lambda i: rename_images(i, "*/*/*"),
        "{}",
        "data.val={}/val: class folder checks holds no images",
    ),
]


@pytest.mark.parametrize(("change", "root", "says"), ROOTS)
def test_folders(
    change: Callable[[Path], object], root: str, says: str, refusal: Refusal, images: Path
) -> None:
    change(images)
    found = refusal(f"data.root={root.replace('{}', str(images))}")
    assert found.startswith(says.replace("{}", str(images)))


TRANSFORMS = {
    "augment.batch=[mixupp]": "did you mean mixup?",
    "augment.train=[]": "does not end in images of one size",
    "augment.val=[{resize: {size: 64}}]": "does not end in images of one size",
    "augment.train=[{random_resized_crop: {size: 32}}, {v2.RandAugment: {magnitude: 99}}]": (
        "fails on an image: "
    ),
}


@pytest.mark.parametrize("override", TRANSFORMS)
def test_invalid_transform(refusal: Refusal, image_root: Path, override: str) -> None:
    line = refusal(f"data.root={image_root}", override)
    assert line.startswith(override.split("=")[0])
    assert TRANSFORMS[override] in line


LINES = {
    "model.name=resnet51": "model.name=resnet51: no such model; did you mean resnet",
    "model.name=alexnet": "data.image_size: the model does not take images of 32 px",
    "model=vit_s16 data.image_size=40": "data.image_size: the model does not take images of 40 px",
    # Otherwise it would fail after the first epoch.
    "model=vit_s16 augment.val=[{center_crop: {size: 40}}]": "data.val_size, augment.val: ",
    "loader.batch_size=37": "loader.batch_size=37: larger than the training split (36 images)",
    "model.weights=gone.pt": "model.weights=gone.pt: cannot be read",
    "checkpoint.resume=gone.pt": "checkpoint.resume: gone.pt: cannot be read as a checkpoint",
    "run.dir=notes": "run.dir=notes: cannot be used",
    "run.dir=photos": "run.dir=photos: holds files that are not of a run",
    "run.dir=photos checkpoint.resume=never": "run.dir=photos: holds files that are not of a run",
    f"run.dir={'x' * 300}": f"run.dir={'x' * 300}: ",
}


@pytest.mark.parametrize("typed", LINES)
def test_mistakes_that_composing_does_not_find(
    refusal: Refusal, image_root: Path, workplace: Path, typed: str
) -> None:
    (workplace / "notes").write_text("mine")
    (workplace / "photos").mkdir()
    (workplace / "photos" / "cat.jpg").write_bytes(b"mine")
    words = re.split(r" (?=[\w.]+=)", typed)
    assert refusal(f"data.root={image_root}", *words).startswith(LINES[typed])


def test_path_that_is_not_utf_8(refusal: Refusal, images: Path, workplace: Path) -> None:
    """A link with a plain name leads to it."""
    place = workplace / os.fsdecode(b"im\xe9")
    place.symlink_to(images)
    for key in ("data.root", "run.dir"):
        line = refusal(f"{key}={place}")
        assert line.startswith(f"{key}={workplace}/im\\udce9: is not UTF-8; rename the file")
    (workplace / "link").symlink_to(place)
    assert train.main(cli.load([*SMALL, "data.root=link"])) == 0


def test_spaces_of_other_scripts_in_a_path() -> None:
    """The names of macOS's screenshots hold U+202F."""
    path = "/Screenshot 9.41\u202fAM\xa0(1)"
    assert cli.load([f"data.root={path}"]).data.root == path


def test_line_break_in_the_name_of_a_file(
    images: Path, workplace: Path, own_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is one line."""
    (images / "train" / "dots" / "0\n0.jpg").write_bytes(b"")
    assert train.main(cli.load([*SMALL, f"data.root={images}", "loader.batch_size=37"])) == 1
    error = capsys.readouterr().err
    assert "dots/0 0.jpg: " in error and error.count("\n") == 1


def test_other_data_in_the_same_run_directory(
    refusal: Refusal, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"data.root={images}", "run.name=one"]
    assert train.main(cli.load([*SMALL, *options])) == 0
    capsys.readouterr()
    next((images / "train" / "dots").iterdir()).unlink()
    os.utime(images / "train" / "dots")
    line = refusal(*options, "train.max_steps=2", "optim=adamw")
    assert "cannot resume" in line and "optim.name was sgd, is adamw" in line
    assert re.search(
        r"data\.train was 36 images, SHA-256 (\w{16}), is 35 images, SHA-256 (?!\1)\w{16}; ",
        line,
    )


def test_no_thread_or_child_is_left(refusal: Refusal, image_root: Path) -> None:
    before = descendants(os.getpid())
    refusal(f"data.root={image_root}", "checkpoint.resume=gone.pt", "loader.workers=2")
    assert descendants(os.getpid()) == before
    assert not torch.distributed.is_initialized()
