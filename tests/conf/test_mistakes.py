"""Invalid input to the whole program: one line that says what to change, status 2, no files.

test_cli.py tests mistakes in the config. These are mistakes in the data, the model or the run
directory.
"""

import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import train
from conf import cli
from pipeline import machine
from tests.processes import descendants

ROOT = Path(__file__).parents[2]
SMALL = [
    "model=resnet_tiny",
    "augment=demo",
    "data.image_size=32",
    "loader.batch_size=8",
    "loader.workers=0",
    "train.max_steps=1",
]

Refusal = Callable[..., str]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with the content of its files."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "workplace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Restore the root logger, which train.main configures."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def refusal(workplace: Path, capsys: pytest.CaptureFixture[str], logging_restored: None) -> Refusal:
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


def test_good_input_is_not_refused(
    image_root: Path, workplace: Path, logging_restored: None
) -> None:
    """The base of the tests below, which each change one thing."""
    assert train.main(cli.load([*SMALL, f"data.root={image_root}", "train.max_steps=1"])) == 0
    assert [p.name for p in workplace.iterdir()] == ["runs"]


def test_missing_root(refusal: Refusal) -> None:
    assert refusal("data.root=/no/such/place").startswith(
        "data.root=/no/such/place: no such folder; it must hold train/"
    )
    assert refusal("data.root=nowhere").startswith("data.root=nowhere: no such folder")


def test_root_is_a_file(refusal: Refusal, images: Path) -> None:
    file = next(images.rglob("*.jpg"))
    assert f"data.root={file}: " in refusal(f"data.root={file}")


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_train_or_no_val(refusal: Refusal, images: Path, split: str) -> None:
    shutil.rmtree(images / split)
    assert f"data.{split}={images / split}: no such folder" in refusal(f"data.root={images}")


def test_split_of_another_name(refusal: Refusal, images: Path) -> None:
    (images / "val").rename(images / "validation")
    said = refusal(f"data.root={images}")
    assert said.startswith(f"data.val={images / 'val'}: no such folder; {images} holds validation")
    assert "write data.val=FOLDER if it has another name" in said


@pytest.mark.parametrize("split", ["train", "val"])
def test_root_is_a_split(refusal: Refusal, images: Path, split: str) -> None:
    for root in (images / split, f"{images / split}/"):
        says = f"data.root={root}: holds no train; write data.root={images}\n"
        assert refusal(f"data.root={root}") == says


def test_root_holds_the_classes(refusal: Refusal, images: Path) -> None:
    shutil.rmtree(images / "val")
    said = refusal(f"data.root={images / 'train'}")
    assert (
        f"data.train={images / 'train/train'}: no such folder; {images / 'train'} holds ch" in said
    )
    assert said.endswith("or data.val_fraction=0.1 to hold out a tenth of the images\n")


def test_root_above_the_dataset(refusal: Refusal, images: Path, tmp_path: Path) -> None:
    """As in the Kaggle archive: ILSVRC/Data/CLS-LOC."""
    (tmp_path / "ILSVRC" / "Data").mkdir(parents=True)
    images.rename(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    assert refusal(f"data.root={tmp_path / 'ILSVRC'}") == (
        f"data.root={tmp_path / 'ILSVRC'}: holds no train; "
        f"write data.root={tmp_path / 'ILSVRC/Data/CLS-LOC'}\n"
    )


def test_empty_root(refusal: Refusal, images: Path) -> None:
    shutil.rmtree(images)
    images.mkdir()
    assert f"no such folder; {images} holds nothing: put the class" in refusal(
        f"data.root={images}"
    )


def test_own_images_with_the_recipe_of_the_demo(refusal: Refusal, image_root: Path) -> None:
    assert refusal("recipe=demo", f"data.root={image_root}") == (
        f"data.root={image_root}: holds files that the demo did not draw; to train on your own "
        "images write data=folder, or pass another data.root\n"
    )


def test_split_without_class_folders(refusal: Refusal, images: Path) -> None:
    shutil.rmtree(images / "val")
    (images / "val").mkdir()
    (images / "val" / "a.jpg").write_bytes(b"")
    assert f"data.val={images / 'val'}: no class folders" in refusal(f"data.root={images}")


@pytest.mark.parametrize(("split", "other"), [("train", "val"), ("val", "train")])
def test_class_in_one_split_only(refusal: Refusal, images: Path, split: str, other: str) -> None:
    shutil.rmtree(images / other / "dots")
    line = refusal(f"data.root={images}")
    assert f"data.{other}={images / other}: " in line
    assert f"no class dots, which {split} has" in line


def test_empty_class(refusal: Refusal, images: Path) -> None:
    for path in (images / "train" / "dots").iterdir():
        path.rename(path.with_suffix(".txt"))
    line = refusal(f"data.root={images}")
    assert f"data.train={images / 'train'}: class folder dots" in line and "holds no images" in line


def test_no_images_at_all(refusal: Refusal, images: Path) -> None:
    for path in images.rglob("*.jpg"):
        path.unlink()
    line = refusal(f"data.root={images}")
    assert (
        f"data.train={images / 'train'}: class folder checks and 2 more" in line
        and "holds no images" in line
    )


TRANSFORMS = {
    "augment.train=[randon_crop]": "there is no transform randon_crop; choose from random_resized",
    "augment.batch=[mixupp]": "did you mean mixup?",
    "augment.train=[{random_resized_crop: {size: 9, sise: 3}}]": "argument 'sise'; it",
    "augment.train=[{random_resized_crop: {size: 32.5}}]": "size=32.5: give",
    "augment.train=[{random_resized_crop: {size: 32, scale: [0.9, 0.1]}}]": "[0.9, 0.1]: give",
    "augment.train=[random_resized_crop]": "size",
    "augment.batch=[{mixup: {alpha: nan}}]": "alpha=nan: give a number > 0",
    "augment.train=[{v2.RandAugment: {count: 2}}]": "argument 'count'; it takes",
    "augment.train=[{v2.RandomErasing: {p: 3}}]": "v2.RandomErasing: ",
    "augment.train=[{a: 1, b: 2}]": "is not a transform",
    "augment.train=[null]": "is not a transform",
    "augment.train=[]": "does not end in images of one size",
    "augment.val=[{resize: {size: 64}}]": "does not end in images of one size",
}


@pytest.mark.parametrize("override", TRANSFORMS)
def test_invalid_transform(refusal: Refusal, image_root: Path, override: str) -> None:
    line = refusal(f"data.root={image_root}", override)
    assert line.startswith(override.split("=")[0])
    assert TRANSFORMS[override] in line


LINES = {
    "model.name=resnet51": "model.name=resnet51: no such model; did you mean resnet",
    "model.name=os.system": "model.name=os.system: no such model",
    "model.name=alexnet": "data.image_size: the model does not take images of 32 px",
    "model=vit_s16 data.image_size=40": "data.image_size=40: ",
    # Otherwise it would fail after the first epoch.
    "model=vit_s16 augment.val=[{center_crop: {size: 40}}]": "data.val_size, augment.val: ",
    "model=vit_s16 data.sizes={0: 24, 2: 32}": "data.sizes: the model does not take images of 24",
    "loader.batch_size=37": "loader.batch_size=37: larger than the training split (36 images)",
    "model.weights=gone.pt": "model.weights=gone.pt: no such file",
    "checkpoint.resume=gone.pt": "checkpoint.resume: gone.pt: cannot be read as a checkpoint",
    "run.dir=notes": "run.dir=notes: cannot be used",
    "run.dir=notes/run": "run.dir=notes/run: cannot be used",
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


SIZES = {
    "data.sizes={0: 32}": "not allowed; give {}, or 2 to 8 entries `epoch: size`",
    "data.sizes={1: 16, 2: 32}": "not allowed; ",
    "data.sizes={0: 16, 3: 24, 2: 32}": "not allowed; ",
    "data.sizes={0: 4, 2: 32}": "not allowed; ",
    "data.sizes=[16, 32]": "not allowed; ",
    "data.sizes={0: 16, 2: 24}": (
        "the last size must be data.image_size=32; give data.image_size=24, or data.sizes={}"
    ),
    "data.sizes={0: 16, 90: 32}": (
        "the run ends after train.epochs=90, before epoch 90; give an earlier epoch"
    ),
}


@pytest.mark.parametrize("override", SIZES)
def test_sizes_by_epoch(refusal: Refusal, image_root: Path, override: str) -> None:
    assert refusal(f"data.root={image_root}", override).startswith(f"{override}: {SIZES[override]}")


def test_sizes_that_the_transforms_ignore(refusal: Refusal, image_root: Path) -> None:
    ignores = "augment.train=[{random_resized_crop: {size: 40}}]"
    assert refusal(f"data.root={image_root}", "data.sizes={0: 16, 2: 32}", ignores) == (
        "data.sizes: augment.train makes images of 40 px, not 16 px; write "
        "size: ${data.image_size} in it\n"
    )


def test_mistakes_are_found_before_the_demo_is_drawn(refusal: Refusal, workplace: Path) -> None:
    (workplace / "photos").mkdir()
    (workplace / "photos" / "cat.jpg").write_bytes(b"mine")
    for override, line in {
        "model.name=nope": "model.name=nope: no such model",
        "model.weights=gone.pt": "model.weights=gone.pt: no such file",
        "checkpoint.resume=gone.pt": "checkpoint.resume: gone.pt: cannot be read as a checkpoint",
        "loader.batch_size=2001": (
            "loader.batch_size=2001: larger than the training split (2000 images)"
        ),
        "data.image_size=8": "data.image_size: the model does not take images of 8 px",
        "loader.decoder=gpu": "loader.decoder=gpu: needs an NVIDIA GPU",
        "run.dir=photos": "run.dir=photos: holds files that are not of a run",
        "data.root=photos": "data.root=",
    }.items():
        overrides = ["model.name=alexnet"] if override == "data.image_size=8" else []
        assert refusal("data=demo", "train.device=cpu", *overrides, override).startswith(line)


def test_too_little_memory_is_refused_before_the_demo_is_drawn(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 10)
    assert ": the loader needs " in refusal("data=demo", "train.device=cpu")


def test_path_that_is_not_utf_8(refusal: Refusal, images: Path, workplace: Path) -> None:
    """A link with a plain name leads to it."""
    place = workplace / os.fsdecode(b"im\xe9")
    place.symlink_to(images)
    for key in ("data.root", "run.dir", "model.weights", "checkpoint.resume"):
        line = refusal(f"{key}={place}")
        assert line.startswith(f"{key}={workplace}/im\\udce9: is not text; rename the file")
    assert refusal("\udce9=1").startswith("\\udce9=1: is not text")
    (workplace / "link").symlink_to(place)
    assert train.main(cli.load([*SMALL, "data.root=link", "train.max_steps=1"])) == 0


def test_escape_sequence_in_a_value(refusal: Refusal) -> None:
    assert refusal("run.name='\x1b[31m'").startswith("run.name='\\x1b[31m': is not text; ")


def test_spaces_of_other_scripts_in_a_path() -> None:
    """The names of macOS's screenshots hold U+202F."""
    path = "/Screenshot 9.41\u202fAM\xa0(1)"
    assert cli.load(["recipe=demo", f"data.root={path}"]).data.root == path


def test_line_break_in_the_name_of_a_file(
    images: Path, workplace: Path, logging_restored: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is one line."""
    (images / "train" / "dots" / "0\n0.jpg").write_bytes(b"")
    assert train.main(cli.load([*SMALL, f"data.root={images}", "loader.batch_size=37"])) == 1
    error = capsys.readouterr().err
    assert "dots/0 0.jpg: " in error and error.count("\n") == 1


def test_other_data_in_the_same_run_directory(
    refusal: Refusal, images: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train.main(cli.load([*SMALL, f"data.root={images}", "run.name=one", "train.max_steps=1"]))
        == 0
    )
    capsys.readouterr()
    next((images / "train" / "dots").iterdir()).unlink()
    os.utime(images / "train" / "dots")
    line = refusal(f"data.root={images}", "run.name=one", "train.max_steps=2", "optim=adamw")
    assert "cannot resume" in line and "optim.name was sgd, is adamw" in line
    assert re.search(
        r"data\.train was 36 images, SHA-256 (\w{16}), content \w+, is 35 images, "
        r"SHA-256 (?!\1)\w{16}, content \w+; ",
        line,
    )


# Runs train.py with several command lines; torch is imported once.
PROGRAM = """
import json, runpy, sys
program, *command_lines = json.loads(sys.argv[1])
for arguments in command_lines:
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        print(stop.code)
"""


@pytest.mark.slow
def test_missing_resources_of_the_machine(image_root: Path, workplace: Path) -> None:
    """In a subprocess, with a limit of 128 open files and no GPU."""
    fake = ["data=fake", "train.device=cpu"]
    mistakes = {
        "train.device=cuda: ": [f"data.root={image_root}", "train.device=cuda"],
        "loader.batch_size=1000000000: the loader needs ": [
            *fake,
            "loader.batch_size=1000000000",
            "data.fake_images=1000000000",
        ],
        "loader.workers=40: open files allow ": [*fake, "loader.workers=40"],
    }
    given = json.dumps(
        [str(ROOT / "train.py"), *([*SMALL, *overrides] for overrides in mistakes.values())]
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        cwd=workplace,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["2", "2", "2"], done.stderr
    for line, begins in zip(done.stderr.splitlines(), mistakes, strict=True):
        assert line.startswith(f"train.py: {begins}")
    assert list(workplace.iterdir()) == []


def test_no_thread_or_child_is_left(refusal: Refusal, image_root: Path) -> None:
    before = descendants(os.getpid())
    refusal(f"data.root={image_root}", "checkpoint.resume=gone.pt", "loader.workers=2")
    assert descendants(os.getpid()) == before
    assert not torch.distributed.is_initialized()
