"""The stages of a model, for freezing and for layer-wise learning rates."""

from dataclasses import dataclass

from torch import nn

from conf.schema import UserError, show


@dataclass(frozen=True)
class Stage:
    """Neighbouring layers of a model.

    Attributes:
        name: of the module with most of the parameters.
        parameters: names of the parameters.
    """

    name: str
    parameters: tuple[str, ...]


def stages(model: nn.Module, *, fine: bool = False) -> list[Stage]:
    """Return the stages in the order of the forward pass; the last one is the head.

    timm's models state their stages (`group_matcher`). For other models, they follow from the names
    of the modules: up to the first part that ends in a digit, such as `layer2`, `features.3` or
    `encoder.layers.encoder_layer_5`. Names without weights of linear or convolution layers, such as
    norms and position embeddings, belong to the stage before them. Stages of a ResNet are the stem,
    layer1 to layer4 and the head; those of a ViT the patch embedding, each block and the head.

    Args:
        fine: divide stages into blocks, such as `layer2.0`, as timm does for layer-wise decay.
    """
    grouped = _of_timm(model, fine) if hasattr(model, "group_matcher") else _by_names(model, fine)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    found = []
    for group in grouped:
        modules: dict[str, int] = {}
        for name in group:
            module = _module_of(name, fine)
            modules[module] = modules.get(module, 0) + sizes[name]
        found.append(Stage(max(modules, key=lambda module: modules[module]), tuple(group)))
    return found


def freeze(model: nn.Module, last: int | str | None) -> None:
    """Freeze the first stages: no gradients, and `train_mode` leaves their modules in eval mode.

    Args:
        last: number of stages to freeze, or the name of the last one; None freezes nothing.

    Raises:
        UserError: there is no such stage, or only the head would be left out.
    """
    if last is None:
        return
    found = stages(model)
    names = [stage.name for stage in found]
    count = names.index(last) + 1 if last in names else last
    if not isinstance(count, int) or count >= len(found):
        raise UserError(
            f"model.freeze={show(last)}: the stages are {', '.join(names)}; give the last one to "
            f"freeze, or a number from 1 to {len(found) - 1} (the last stage is always trained)"
        )
    parameters = dict(model.named_parameters())
    for stage in found[:count]:
        for name in stage.parameters:
            parameters[name].requires_grad_(False)
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


def _by_names(model: nn.Module, fine: bool) -> list[list[str]]:
    """Group the names of the parameters; a weight of another module begins a group."""
    groups: list[list[str]] = [[]]
    current = None  # the module whose weight began the group
    for name, parameter in model.named_parameters():
        module = _module_of(name, fine)
        is_weight = parameter.ndim >= 2 and name.endswith("weight")
        if is_weight and current not in (None, module):
            # Also its parameters before the weight, such as a norm at the beginning of a block.
            begun = [other for other in groups[-1] if _module_of(other, fine) == module]
            groups[-1] = [other for other in groups[-1] if other not in begun]
            groups.append(begun)
        if is_weight:
            current = module
        groups[-1].append(name)
    return groups


def _of_timm(model: nn.Module, fine: bool) -> list[list[str]]:
    from timm.models import group_parameters

    matcher = model.group_matcher(coarse=not fine)  # type: ignore[operator]
    return list(group_parameters(model, matcher).values())


def _module_of(parameter: str, fine: bool) -> str:
    """Return the module of a stage or block to which a parameter may belong, by its name."""
    parts = parameter.split(".")[:-1] or [parameter]
    numbered = next((i for i, part in enumerate(parts) if part[-1].isdigit()), 0)
    # Not the last part: `blocks.0.norm1` is a layer of a block.
    if fine and numbered + 2 < len(parts) and parts[numbered + 1][-1].isdigit():
        numbered += 1
    return ".".join(parts[: numbered + 1])
