"""A run depends on the images, not on how they are stored: folders, tar and zip files, lists."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from conf import cli
from conf.schema import UserError
from tests.small_run import SMALL_RUN, run
from tests.stored import as_list, as_shards, as_tar, as_zip

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
SKIP = ["data.on_error=skip", "data.max_bad_fraction=0.1"]
Pack = Callable[[Path, Path], None]
PACKS: dict[str, tuple[Pack, Pack]] = {
    "tar": (as_tar, as_tar),
    "shards": (as_shards, as_shards),
    "zip and tar": (as_zip, as_tar),
}


def pack(image_root: Path, root: Path, storage: str) -> Path:
    root.mkdir()
    for split, function in zip(("train", "val"), PACKS[storage], strict=True):
        function(image_root / split, root / f"{split}{'.zip' if function is as_zip else '.tar'}")
    return root


@pytest.fixture(scope="module")
def whole(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after a run on folders."""
    summary = run(image_root, tmp_path_factory.mktemp("run") / "whole", "loader.workers=0")
    return str(summary["params_sha256"])


@pytest.mark.parametrize("storage", ["shards", "zip and tar"])
def test_same_weights_and_same_resume_within_an_epoch(
    storage: str, image_root: Path, tmp_path: Path, whole: str
) -> None:
    packed = pack(image_root, tmp_path / "packed", storage)
    first, second = (image_root, packed) if storage != "zip and tar" else (packed, image_root)
    part = run(first, tmp_path / "run", "train.max_steps=3", "loader.workers=0")
    assert part["step"] == 3 and part["params_sha256"] != whole
    assert run(second, tmp_path / "run", "loader.workers=1")["params_sha256"] == whole


def test_a_list_trains_as_its_folder(image_root: Path, tmp_path: Path, whole: str) -> None:
    for split in ("train", "val"):
        as_list(image_root / split, tmp_path / f"{split}.csv")
    summary = run(
        tmp_path,
        tmp_path / "run",
        "data.train=train.csv",
        "data.val=val.csv",
        "loader.workers=0",
    )
    assert summary["params_sha256"] == whole


def test_a_run_is_identified_by_its_samples(image_root: Path, tmp_path: Path) -> None:
    some = ["data.classes=[dots,checks]", "loader.workers=0", "train.max_steps=1"]
    run(image_root, tmp_path / "run", *some)
    with pytest.raises(UserError, match=r"data\.train was 24 images.*data\.val was 10 "):
        run(image_root, tmp_path / "run", "loader.workers=0", "train.max_steps=2")
    (tmp_path / "some.txt").write_text("checks\ndots\n")
    same = [f"data.classes={tmp_path / 'some.txt'}", "loader.workers=0", "train.max_steps=2"]
    assert run(image_root, tmp_path / "run", *same)["step"] == 2
    for classes in ("[dots,checks]", "[checks,dots]"):
        config = cli.load([f"data.root={image_root}", f"data.classes={classes}"])
        assert ",data.classes=checks-dots," in config.run.name


def test_a_damaged_image_is_named(
    image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = Path(shutil.copytree(image_root, tmp_path / "images"))
    (images / "train" / "dots" / "03.jpg").write_bytes(b"no image")
    packed = pack(images, tmp_path / "packed", "tar")
    overrides = [*SMALL_RUN, f"data.root={packed}", f"run.dir={tmp_path / 'run'}"]
    assert train.main(cli.load([*overrides, "loader.workers=0"])) == 1
    assert f"{packed}/train.tar: dots/03.jpg: " in capsys.readouterr().err
    assert train.main(cli.load([*overrides, "loader.workers=0", *SKIP])) == 0
    assert (tmp_path / "run" / "bad_files.txt").read_text() == (
        f"{packed}/train.tar: dots/03.jpg\tUnidentifiedImageError: cannot identify image file\n"
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 9
