"""The stages of a model, for freezing and for layer-wise learning rates."""

from collections import Counter
from itertools import groupby
from typing import Any

from torch import nn

from conf.schema import UserError, show

Stage = list[str]
"""The names of the parameters of neighbouring layers."""


def stages(model: nn.Module, *, fine: bool = False) -> list[Stage]:
    """Return the stages in the order of the forward pass; the last one is the head.

    timm's models state their stages (`group_matcher`). For other models, they follow from the names
    of the modules: up to the first part that ends in a digit, such as `layer2`, `features.3` or
    `encoder.layers.encoder_layer_5`. Names without weights of linear or convolution layers, such as
    norms and position embeddings, belong to the stage before them. Stages of a ResNet are the stem,
    layer1 to layer4 and the head; those of a ViT the patch embedding, each block and the head.
    `fine`: divide stages into blocks, such as `layer2.0`, as timm does for layer-wise decay.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        return list(group_parameters(model, matcher(coarse=not fine)).values())
    parameters = dict(model.named_parameters())
    found: list[Stage] = []
    has_weight = False  # whether a stage has begun with the weight of a layer
    for _, group in groupby(parameters, lambda name: _module_of(name, fine)):
        names = list(group)
        begins = any(name.endswith("weight") and parameters[name].ndim >= 2 for name in names)
        if not found or (begins and has_weight):
            found.append(names)
        else:
            found[-1] += names
        has_weight |= begins
    return found


def stage_name(model: nn.Module, stage: Stage) -> str:
    """Return the name of the module that has most of the parameters of a stage."""
    sizes: Counter[str] = Counter()
    for name in stage:
        sizes[_module_of(name, fine=False)] += model.get_parameter(name).numel()
    return sizes.most_common(1)[0][0]


def freeze(model: nn.Module, last: int | str | None) -> None:
    """Freeze the first stages: no gradients, and `train_mode` leaves their modules in eval mode.

    `last`: number of stages to freeze, or the name of the last one; None freezes nothing. Raises
    UserError if there is no such stage, or only the head would be left out.
    """
    if last is None:
        return
    found = stages(model)
    names = [stage_name(model, stage) for stage in found]
    count = names.index(last) + 1 if last in names else last
    if not isinstance(count, int) or count >= len(found):
        raise UserError(
            f"model.freeze={show(last)}: the stages are {', '.join(names)}; give the last one to "
            f"freeze, or a number from 1 to {len(found) - 1} (the last stage is always trained)"
        )
    for name in (name for stage in found[:count] for name in stage):
        model.get_parameter(name).requires_grad_(False)
    train_mode(model)


def train_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    """Call `model.train(mode)`, but leave modules in eval mode whose parameters are all frozen.

    BatchNorm then normalises with the stored statistics and does not change them, and there is no
    dropout.
    """
    model.train(mode)
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
    return model


def _module_of(parameter: str, fine: bool) -> str:
    """Return the module of a stage or block to which a parameter may belong, by its name."""
    parts = parameter.split(".")[:-1] or [parameter]
    numbered = next((i for i, part in enumerate(parts) if part[-1].isdigit()), 0)
    # Not the last part: `blocks.0.norm1` is a layer of a block.
    if fine and numbered + 2 < len(parts) and parts[numbered + 1][-1].isdigit():
        numbered += 1
    return ".".join(parts[: numbered + 1])
