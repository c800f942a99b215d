"""train.device=mps and xpu, which are not run here: what is chosen for them."""

import pytest
import torch

from conf.schema import UserError
from engine.compute import choose_precision, longest_float
from engine.distributed import resolve_device


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
