"""train.device=mps and xpu, which are not run here: what is chosen for them."""

import pytest
import torch

from engine.compute import choose_precision, longest_float


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_choices_for_other_devices(kind: str) -> None:
    device = torch.device(kind)
    assert longest_float(device) == torch.float32
    assert choose_precision("auto", device) == "fp32"
