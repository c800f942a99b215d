"""Import of a package that may not fit the installed torch."""

import re
import sys
from types import ModuleType


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled detection operators do not fit the installed torch.

    A torchvision built for CUDA cannot load them with a CPU-only torch, and then fails to import
    because it describes their shapes. Classifiers and transforms use none of them, so a declaration
    without an implementation is enough.
    """
    import torch  # not at the top: conf must be quick to import

    for _ in range(4):
        try:
            import torchvision

            return torchvision
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            schema = f"torchvision::{missing[1]}"
            torch.library.define(
                schema, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    raise RuntimeError("torchvision cannot be imported: it does not fit the installed torch")
