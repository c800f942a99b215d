r"""Layer-wise learning rate decay for fine-tuning, from BEiT (arXiv 2106.08254) and timm.

The n-th block before the head has the learning rate optim.lr * layer_decay ** n.

    python train.py recipe=finetune data.root=/photos model.weights=pretrained \
        optim.name=extras.layer_decay:sgd 'optim.args={layer_decay: 0.75}'
"""

from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn
from torch.optim import Optimizer

from conf.errors import UserError
from conf.schema import OptimConfig
from engine import optim


def with_layer_decay(
    name: str, model: nn.Module, config: OptimConfig, *, layer_decay: float = 0.75, **args: Any
) -> Optimizer:
    """Create the optimizer `name` with a learning rate of lr * `lr_scale` for each block.

    Raises UserError if `layer_decay` is not in (0, 1].
    """
    if not 0 < layer_decay <= 1:
        raise UserError(f"optim.args: layer_decay={layer_decay}", "expected a number > 0 and <= 1")
    optimizer = optim.build_optimizer(model, replace(config, name=name, args=args))
    groups = optimizer.param_groups
    optimizer.param_groups = []
    for distance, names in enumerate(reversed(blocks(model))):
        block = {model.get_parameter(name) for name in names}
        for group in groups:
            params = [p for p in group["params"] if p in block]
            if params:
                scale = layer_decay**distance
                optimizer.param_groups.append({**group, "params": params, "lr_scale": scale})
    return optimizer


sgd, adamw = partial(with_layer_decay, "sgd"), partial(with_layer_decay, "adamw")


def blocks(model: nn.Module) -> list[list[str]]:
    """Return the parameter names of each block, from the input to the head.

    Most timm models define them (`group_matcher`). Otherwise they follow from module names: up to
    the first part (after `blocks`) that ends in a digit, and the next part if it also does. Modules
    without weights of linear or convolution layers belong to the previous block.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        return list(group_parameters(model, matcher(coarse=False)).values())
    parameters = dict(model.named_parameters())
    found: list[list[str]] = []
    has_weight = False  # whether the first block already has a layer's weight
    for _, group in groupby(parameters, _module_of):
        names = list(group)
        begins = any(name.endswith("weight") and parameters[name].ndim >= 2 for name in names)
        if not found or (begins and has_weight):
            found.append(names)
        else:
            found[-1] += names
        has_weight |= begins
    return found


def _module_of(parameter: str) -> str:
    """Return the name of the block module to which a parameter may belong."""
    parts = parameter.split(".")[:-1] or [parameter]
    numbered = next((i for i, part in enumerate(parts) if part[-1].isdigit()), 0)
    if "blocks" in parts[numbered:]:
        numbered = parts.index("blocks") + 1
    # Exclude the last part, because `blocks.0.norm1` is a layer in a block.
    if numbered + 2 < len(parts) and parts[numbered + 1][-1].isdigit():
        numbered += 1
    return ".".join(parts[: numbered + 1])
