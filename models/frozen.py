"""Freezing parameters: no gradients, and their modules stay in eval mode."""

from collections.abc import Sequence

from torch import nn

from conf.schema import UserError


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze parameters and modules by their names: `layer1` is everything in this module.

    Raises UserError if nothing has one of the names, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        found = [name for name in names if f"{name}.".startswith(f"{prefix}.")]
        for name in found:
            model.get_parameter(name).requires_grad_(False)
        if not found or not any(p.requires_grad for p in model.parameters()):
            wrong = f"leaves nothing to train with {prefix}" if found else f"there is no {prefix}"
            known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(
                f"model.freeze=[{', '.join(prefixes)}]: {wrong}; give some of {known}, or parts of "
                "them, such as layer1.0"
            )
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
