"""Muon (https://kellerjordan.github.io/posts/muon/), which orthogonalizes updates of hidden layers.

    python train.py optim.name=extras.muon:muon 'optim.args={rate: 0.02}'

Muon trains the weights of linear and convolution layers, except the first layer, the last layer
and depthwise convolutions. SGD with the keys of `optim` trains all other parameters.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.schema import OptimConfig
from engine.optim import linear_weights, sgd, trainable_parameters

RMS = 0.2  # root mean square of an update at a learning rate of 1, like Adam's (arXiv 2502.16982)
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # for the Newton-Schulz iteration, from the source


def muon(
    model: nn.Module,
    config: OptimConfig,
    *,
    rate: float = 0.02,
    beta: float = 0.95,
    fixed_norm: bool = False,
) -> Optimizer:
    """Create the optimizer.

    Args:
        rate: peak learning rate for the hidden layers; `optim.lr` is SGD's. At 0.02, the first
            steps change 3x3 convolutions with 32 to 512 channels by 4 to 12 %. The source's 0.02
            changes them by 1.3 %, because its updates shrink with the number of channels.
        beta: decay of the gradients' moving average.
        fixed_norm: keep the root mean square of each hidden weight at 0.2, like airbench
            (github.com/KellerJordan/cifar10-airbench). `rate` is then the relative change per step.
            Requires a norm after each hidden layer, so that the weights' scale does not matter.
    """
    hidden = hidden_weights(model)
    optimizer = sgd(model, config)
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if weight not in hidden]
    added: dict[str, Any] = {"params": list(hidden), "lr_scale": rate / config.lr}
    added |= {"momentum": 0.0, "nesterov": False, "weight_decay": config.weight_decay}
    optimizer.add_param_group(added)
    for weight in hidden:
        optimizer.state[weight] = {"average": torch.zeros_like(weight)}

    @torch.no_grad()
    def before_step(*_: Any) -> None:
        by_shape = defaultdict(list)
        for weight in hidden:
            if weight.grad is not None:  # at least one output depends on it
                pair = (weight.grad, optimizer.state[weight]["average"])
                by_shape[weight.shape].append(pair)
        for pairs in by_shape.values():
            replace_gradients(pairs, beta)

    @torch.no_grad()
    def after_step(*_: Any) -> None:
        for weight in hidden:
            weight.mul_(RMS * weight.numel() ** 0.5 / weight.norm().clamp(min=1e-12))

    optimizer.register_step_pre_hook(before_step)
    if fixed_norm:
        optimizer.register_step_post_hook(after_step)
    # Make torch.amp.GradScaler skip the whole step if a gradient is not finite.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer


def hidden_weights(model: nn.Module) -> dict[Tensor, None]:
    """Return the trained weights between the first and the last layer, except depthwise ones."""
    layers = linear_weights(model)
    matrices = [weight for weight in model.parameters() if weight in layers]
    weights = set(trainable_parameters(model))
    return {w: None for w in matrices[1:-1] if w in weights and w.shape[1] > 1}


def replace_gradients(pairs: Sequence[tuple[Tensor, Tensor]], beta: float) -> None:
    """Update the averages, and replace gradients by weight updates for a learning rate of 1.

    The gradients and averages have the same shape [N, ...]. They are stacked, so that a GPU needs
    only as many kernels as for a single pair.
    """
    for gradient, average in pairs:
        average.lerp_(gradient, 1 - beta)
    with_momentum = torch.stack([gradient.lerp(average, beta) for gradient, average in pairs])
    matrices = with_momentum.flatten(2)
    scale = RMS * max(matrices.shape[1:]) ** 0.5
    updates = scale * orthogonal(matrices)
    for (gradient, _), update in zip(pairs, updates, strict=True):
        gradient.copy_(update.reshape(gradient.shape))


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices [B, N, M] approximately, in five iterations.

    Singular values of at least 0.0015 times a matrix's Frobenius norm become 0.68 to 1.21. Smaller
    ones, such as those of gradients with a low rank, only grow up to 485-fold.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices.float()
    if matrices.is_cuda:
        x = x.bfloat16()  # nearly 50 times slower than fp32 on a CPU
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b * gram + c * gram @ gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
