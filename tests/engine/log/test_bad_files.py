"""data.on_error=skip: unreadable training images are replaced by a rule, listed and limited."""

import shutil
from pathlib import Path

import pytest

from engine.log.bad_files import BadFiles
from engine.rundir import RunDirectory
from engine.state import TrainingError
from tests.ranks import Ranks
from tests.results import rows
from tests.small_run import command, run

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
SKIP = ["data.on_error=skip", "data.max_bad_fraction=0.1"]


@pytest.fixture
def damaged(image_root: Path, tmp_path: Path) -> tuple[Path, list[Path]]:
    """A copy of the images, and three that cannot be read: 2 neighbours and the last of a class."""
    root = shutil.copytree(image_root, tmp_path / "images")
    broken = [root / "train" / name for name in ("dots/03.jpg", "dots/04.jpg", "stripes/11.jpg")]
    for path in broken:
        path.write_bytes(b"")
    return root, broken


def bad_files(folder: Path) -> list[str]:
    """Return the paths in bad_files.txt. Each line has a reason."""
    lines = [line.split("\t") for line in (folder / "bad_files.txt").read_text().splitlines()]
    assert all(reason.startswith("UnidentifiedImageError") for _, reason in lines)
    return sorted(path for path, _ in lines)


def test_the_list_of_bad_files_survives_a_resume(
    damaged: tuple[Path, list[Path]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As do the steps until the limit. A repaired file stays listed and counts no more."""
    root, broken = damaged
    folder = tmp_path / "run"
    options = ["data.on_error=skip", "data.max_bad_fraction=0.08", "loader.workers=0"]
    good = (root / "train" / "dots" / "00.jpg").read_bytes()
    message = (
        r"^data.max_bad_fraction=0.08: 3 of 36 training images cannot be read, for example "
        rf"{root}/train/\S+: UnidentifiedImageError: .*; replace them \({folder}/bad_files.txt "
        r"lists them\), or raise this limit$"
    )
    with pytest.raises(TrainingError, match=message):
        run(root, folder, *options, "checkpoint.every_steps=1")
    assert bad_files(folder) == sorted(map(str, broken))
    assert not (folder / "summary.json").exists()
    broken[0].write_bytes(good)
    options.append("checkpoint.accept_changes=true")
    assert run(root, folder, *options)["unreadable_images"] == 3
    assert bad_files(folder) == sorted(map(str, broken))
    out = capfd.readouterr().out
    assert "resumed from step-" in out
    assert f"\nskipped   3 unreadable images: {folder / 'bad_files.txt'}\n" in out
    counts = [row["data_unreadable_images"] for row in rows(folder, "train")]
    assert counts == sorted(counts) and counts[-1] == 3


def test_too_many_after_the_last_checkpoint(
    damaged: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error then, too, and not the number of a signal."""
    share, wait, listed = BadFiles.share, RunDirectory.wait, list[BadFiles]()

    def noted(self: BadFiles) -> None:
        listed[:] = [self]
        share(self)

    def found_late(self: RunDirectory) -> None:
        wait(self)
        listed[0].limit = 0.01

    monkeypatch.setattr(BadFiles, "share", noted)
    monkeypatch.setattr(RunDirectory, "wait", found_late)
    with pytest.raises(TrainingError, match=r"^data.max_bad_fraction=0.01: 3 of 36 "):
        run(damaged[0], tmp_path / "run", *SKIP, "loader.workers=0")


def test_bad_files_of_all_ranks(
    damaged: tuple[Path, list[Path]], tmp_path: Path, ranks: Ranks
) -> None:
    """Rank 0 lists those of both ranks, and the limit is on their sum."""
    root, broken = damaged
    options = ["data.on_error=skip", "data.max_bad_fraction=0.07", "loader.workers=0"]
    done = ranks.run(command(root, tmp_path / "run", *options), 2)
    assert bad_files(tmp_path / "run") == sorted(map(str, broken)) and done.returncode == 1
    lines = [x for x in done.stderr.splitlines() if not x.startswith("WARNING")]
    assert len(lines) == 2  # one for each rank
    assert all("data.max_bad_fraction=0.07: 3 of 36 training images" in x for x in lines)
