"""Import of torchvision when its build does not match the installed torch, and of timm."""

import importlib.util
import re
import sys
from types import ModuleType

from conf.schema import UserError


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operators do not match the installed torch.

    With a CPU build of torch, a torchvision built for CUDA cannot load its detection operators. The
    import then fails when it registers their shapes. Classifiers and transforms do not use these
    operators, so a declaration without an implementation is enough.
    """
    import torch  # here, because conf imports no torch

    while True:
        try:
            import torchvision

            return torchvision
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(
                f"torchvision::{missing[1]}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]


def import_timm(given: str) -> ModuleType:
    """Import timm; raise UserError if it is missing. `given`: the key=value that asks for it."""
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"{given}: timm is not installed; pip install timm")
    import_torchvision()  # timm imports it too, without this handling of operators
    import timm.optim

    return timm
