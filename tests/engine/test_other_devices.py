"""train.device=mps and xpu: the plain path, on a stand-in device that computes on the CPU."""

from pathlib import Path

import pytest
import torch

from conf.schema import UserError
from engine.compute import choose_precision, longest_float
from engine.distributed import resolve_device
from tests.processes import run_python

SMALL = "recipe=demo data=fake data.fake_images=64 data.fake_classes=10 model=resnet_tiny"
SMALL += " data.image_size=32 loader.batch_size=16 loader.workers=0 log.every_steps=2"
PARTS = "train.max_steps=3 optim=adamw augment=torchvision train.ema_decay=0.9 train.micro_batch=4"


def test_a_device_without_float64_and_page_locked_memory_trains(tmp_path: Path) -> None:
    words = f"{SMALL} {PARTS} train.class_weights=balanced log.trackers=[] run.dir={tmp_path}/run"
    done = run_python("tests/other_device.py", *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3"
    assert "device   other, fp32, compile off" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000003.pt").exists()


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_choices_for_other_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(kind)
    with pytest.raises(UserError, match=f"^train.device={kind}: torch sees 0 GPUs on "):
        resolve_device(kind)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    device = resolve_device(kind)
    assert device == torch.device(kind, 0) and longest_float(device) == torch.float32
    with pytest.raises(UserError, match=f"^train.device={kind}: torch sees 1 GPUs on "):
        resolve_device(kind, 1, 2)
    assert choose_precision("auto", device) == "fp32"
