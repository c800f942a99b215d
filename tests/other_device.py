"""Train on a device of torch that is neither cpu nor cuda, as those of Apple and Intel.

    python tests/other_device.py key=value ...

The device, "other", computes on the CPU. As Apple's, it has no float64, no page-locked memory, and
its tensors do not mix with those on the host. It refuses copies that do not wait, because nothing
here could wait for them later.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Module:
    """What torch.other offers."""

    def __getattr__(self, name: str) -> Any:
        answers = {"is_available": True, "device_count": 1, "is_initialized": True}
        answers |= {"get_amp_supported_dtype": [torch.bfloat16, torch.float16]}
        return lambda *_: answers.get(name)


class OnDevice(Tensor):
    """A tensor on the device; `host` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnDevice":
        if host.dtype == torch.float64:
            raise TypeError("this device has no float64")
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), dtype=host.dtype, device=torch.device(NAME, 0), **layout
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.host.tolist()


def compute(op: Any, *args: Any, **options: Any) -> Any:
    """Compute an operation on the CPU; the result is on the device if its tensors are."""
    given = [x for x in tree.tree_leaves((args, options)) if isinstance(x, Tensor)]
    ours = {id(x.host): x for x in given if isinstance(x, OnDevice)}
    if op in COPIES:
        assert not options.get("non_blocking") and True not in args[2:], "a copy does not wait"
        assert torch.float64 not in {x.dtype for x in given} or len(ours) != 1, "has no float64"
    else:
        assert all(isinstance(x, OnDevice) or x.ndim == 0 for x in given), f"{op}: mixes devices"
    assert not options.get("pin_memory")
    target = options.get("device")
    on_device = bool(ours) if target is None else torch.device(target).type == NAME
    if target is not None:
        options["device"] = torch.device("cpu")
    args, options = tree.tree_map_only(OnDevice, lambda x: x.host, (args, options))
    result = op(*args, **options)
    if not on_device or op == torch.ops.aten.copy_.default:
        return ours.get(id(result), result)
    # An operation in place returns its argument.
    return tree.tree_map_only(
        Tensor, lambda x: ours[id(x)] if id(x) in ours else OnDevice(x), result
    )


def main(overrides: list[str]) -> None:
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    make = torch.tensor  # of the data, which a device written in Python cannot do
    torch.tensor = lambda *args, device=None, **options: make(*args, **options).to(device or "cpu")

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conf import cli
    from train import train

    config = cli.load(overrides)
    print(train(replace(config, train=replace(config.train, device=NAME)))["step"])


if __name__ == "__main__":
    main(sys.argv[1:])
