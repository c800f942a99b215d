"""Progressive resizing: each start of the command trains one size, and starts the next one."""

import json
import signal
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch
import yaml

import train
from conf.errors import UserError
from engine.distributed import World
from extras.progressive import choose_size
from tests.helpers.processes import Started, run_command, wait_for
from tests.helpers.results import rows, stored
from tests.helpers.small_run import compose, overrides_of, run, torchrun

# 36 images in batches of 8: epoch 1 begins with step 5, and the run ends with step 9.
SIZES = "train.prepare={extras.progressive\\:choose_size: {sizes: {0: 16, 1: 32}}}"


def size(folder: Path) -> int:
    return int(yaml.safe_load((folder / "config.yaml").read_text())["data"]["image_size"])


@pytest.fixture(scope="module")
def whole(toy_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run whose sizes follow each other in this process: one call for each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    for step, side in ((5, 16), (9, 32)):
        summary = run(image_root, folder, SIZES)
        assert (summary["step"], summary["status"], size(folder)) == (step, "finished", side)
    assert run(image_root, folder, SIZES) == summary
    assert [row["step"] for row in rows(folder, "train")] == list(range(1, 10))
    assert stored(folder)["history"][0] == "accepted at step 5: data.image_size=16 (now 32)"
    return str(summary["params_sha256"])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_command_trains_all_sizes(
    ranks: int, whole: str, image_root: Path, tmp_path: Path
) -> None:
    """It replaces the earlier run, and is stopped in the second size, and started again."""
    folder = tmp_path / "run"
    run(image_root, folder, SIZES, "optim.lr=0.3")
    options = [SIZES, "checkpoint.every_steps=1", "loader.workers=0"]
    words = [sys.executable, train.__file__, *overrides_of(image_root, folder, *options)]
    words = words if ranks == 1 else torchrun(words, ranks)
    # Rank 1 starts again 3 s later than rank 0, which must not read its earlier address.
    late = f"os.getenv('RANK') == '1' and os.path.exists({str(folder / 'checkpoints')!r})"
    (tmp_path / "sitecustomize.py").write_text(f"import os, time\n{late} and time.sleep(3)\n")
    variables, merged = {"PYTHONPATH": str(tmp_path)}, {"stdout": PIPE, "stderr": STDOUT}
    with Started([*words, "checkpoint.resume=never"], variables, **merged) as process:
        saved = folder / "checkpoints" / "step-00000006.pt"
        wait_for("a step of the second size", saved.exists, process)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM or (ranks > 1 and process.returncode)
    assert "note      16 px until step 5, then the program starts again" in printed
    assert "data.image_size=16 (now 32)" in printed
    if ranks == 1:
        run(image_root, folder, *options)
    else:
        run_command(words, variables).check_returncode()
    found = json.loads((folder / "summary.json").read_text())
    assert (found["step"], size(folder)) == (9, 32)
    assert ranks > 1 or found["params_sha256"] == whole


def test_a_run_that_ends_earlier_is_resumed_with_its_size(
    whole: str, image_root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for steps, ends, side in ((3, 3, 16), (5, 5, 16), (7, 7, 32), (100, 9, 32)):
        for _ in range(2):  # the second time, it is finished
            found = run(image_root, folder, SIZES, f"train.max_steps={steps}")
            assert (found["step"], size(folder)) == (ends, side)
    assert found["params_sha256"] == whole


@pytest.mark.parametrize("sizes", [{}, {0: 16}, {1: 32}, {3: 16, 1: 32}, {0: 16, 2: 32}])
def test_wrong_sizes_are_refused(sizes: dict[int, int], image_root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"before train\.epochs=2$"):
        choose_size(compose(image_root, tmp_path), World(0, 1, 1, torch.device("cpu")), sizes)
