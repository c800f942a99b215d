"""loader.workers=auto compares the JPEG engines with the workers, and does without them."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine import checkpoint
from extras import gpu_decode
from tests import small_run
from tests.engine.tune.tuning import compare_always, measure_on_cpu
from tests.extras.gpu_decode.engines import PillowEngines

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging", "cache")
AUTO = ("loader.workers=auto", "augment=imagenet")


@pytest.fixture
def pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "why_no_engines", lambda device: None)
    monkeypatch.setattr(gpu_decode, "GpuDecoder", PillowEngines)


def chosen(folder: Path, step: int) -> str:
    """Return the mode that a run has chosen and stored."""
    answer = json.loads((folder / "autotune.json").read_text())
    stored = checkpoint.load(folder / "checkpoints" / f"step-{step:08d}.pt")
    assert stored["identity"]["pixels"] == answer["mode"]
    return str(answer["mode"])


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_engines_that_decode_nothing(
    changeable: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: bool,
) -> None:
    """They are broken, or the files are of another kind: the weights are those of the CPU."""
    measure_on_cpu(monkeypatch.setattr)
    compare_always(monkeypatch.setattr)
    monkeypatch.setattr(PillowEngines, "broken", broken)
    for path in changeable.rglob("*.jpg") if not broken else ():
        Image.open(path).save(path, progressive=True)
    options = (*AUTO, f"data.train={changeable}", f"data.val={changeable}")
    summary = small_run.run(tmp_path, tmp_path / "run", *options)
    assert chosen(tmp_path / "run", 9) == "cpu"
    assert "loader.decoder=auto: hybrid is not used: it has decoded no image" in caplog.text
    assert ("nvjpegDecodeBatched returned status 6" in caplog.text) == broken
    plain = small_run.run(tmp_path, tmp_path / "plain", *options, "data.on_device=[]")
    assert summary["params_sha256"] == plain["params_sha256"]


@pytest.mark.gpu
def test_the_engines_of_a_gpu(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start and its continuation use one mode."""
    if gpu_decode.why_no_engines(torch.device("cuda", 0)) is not None:
        pytest.skip("no JPEG engines")
    measure_on_cpu(monkeypatch.setattr)
    compare_always(monkeypatch.setattr)
    found = []
    for steps in (4, 9):
        options = (*AUTO, "train.device=cuda", f"train.max_steps={steps}")
        small_run.run(image_root, tmp_path / "run", *options)
        found.append(chosen(tmp_path / "run", steps))
    assert found[0] == found[1]
