"""Chained resumes, each with another loader and storage, are bit-equal to an uninterrupted run.

The short forms are test_same_result and test_resume_after_max_steps of tests/test_train.py; for
the storage, tests/pipeline/test_containers.py.
"""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import checkpoint
from tests.figures import Record
from tests.results import rows, same, stored
from tests.small_run import run
from tests.stored import as_tar, as_tars

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("toy_runs", "own_logging")]
# 36 images in batches of 8: 27 steps, validated after steps 9, 18 and 27.
STEPS = 27
RUN = [
    "train.epochs=6",
    "train.validate_every_epochs=2",
    "train.ema_decay=0.9",
    "augment.batch=[mixup]",
    "loader.timeout_seconds=1000",  # workers start slowly on a busy machine
]
PACKS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "tar": (as_tar, ".tar"),
    "tars": (as_tars, ""),
}
DECODERS = ("pillow", "region")
LOADERS = (
    ["loader.workers=0"],
    ["loader.workers=1", "loader.prefetch_factor=3"],
    ["loader.workers=2", "loader.start_method=fork", "loader.prefetch_batches=1"],
    ["loader.workers=3", "loader.start_method=spawn"],
    ["loader.workers=1", "loader.start_method=fork"],
    ["loader.workers=3", "loader.prefetch_batches=2"],
)
STARTS = list(itertools.product(("folder", *PACKS), DECODERS, LOADERS))
PARTS, RESUMES = 4, 5  # three trainings in each part, with five resumes each


@pytest.fixture(scope="module")
def roots(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images in each storage."""
    found = {"folder": image_root}
    for storage, (pack, suffix) in PACKS.items():
        found[storage] = tmp_path_factory.mktemp(storage)
        for split in ("train", "val"):
            pack(image_root / split, found[storage] / f"{split}{suffix}")
    return found


@pytest.fixture(scope="module")
def whole(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run that keeps a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    every = ["checkpoint.every_steps=1", f"checkpoint.keep={STEPS}", "loader.decoder=pillow"]
    run(image_root, folder, *RUN, *every, "loader.workers=0")
    return folder


def learned(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without validations: a stopped run does one more."""
    return {k: v for k, v in state.items() if k not in ("best", "last")}


@pytest.mark.parametrize("part", range(PARTS))
def test_chained_resumes(
    part: int, roots: dict[str, Path], whole: Path, tmp_path: Path, figure: Record
) -> None:
    """Each storage with each decoder and number of workers, in random order."""
    chosen = random.Random(0)
    starts = chosen.sample(STARTS, len(STARTS))[part::PARTS]
    left, equal, differ = starts[:], 0, []
    while left:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        stops = [*sorted(chosen.sample(range(1, STEPS), RESUMES)), STEPS]
        run(roots["folder"], folder, *RUN, f"train.max_steps={stops[0]}", "loader.workers=0")
        for stop in stops[1:]:
            storage, decoder, loader = start = left.pop()
            changes = [f"loader.decoder={decoder}", *loader, f"train.max_steps={stop}"]
            run(roots[storage], folder, *RUN, *changes)
            expected = checkpoint.load(whole / "checkpoints" / checkpoint.file_name(stop))
            if same(learned(stored(folder)), learned(expected["state"])):
                equal += 1
            else:
                differ.append((stop, start))
        if [row["loss"] for row in rows(folder, "train")] != [
            row["loss"] for row in rows(whole, "train")
        ]:
            differ.append((stops, "rows"))
    figure(
        "chained resumes with other workers, decoders and storage, bit-equal", equal, len(starts)
    )
    assert not differ
