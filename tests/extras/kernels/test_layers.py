"""Rewritten layers compute the same as plain ones and replace only matching layers."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from engine.optim import linear_weights
from extras.kernels import (
    BlockConv,
    OnePassAddNorm,
    OnePassBatchNorm,
    PlacedMaxPool,
    _PlacedMaxPool,
    rewrite,
)
from models.vit import AddNorm
from tests.models.test_vit import short_vit


def pair(dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """Return ResNet-18 with random weights and statistics, plain and rewritten."""
    torch.manual_seed(0)
    plain = models.build("resnet18", num_classes=10, image_size=64).to(dtype)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.get_buffer("running_mean").uniform_(-0.1, 0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    rewritten = copy.deepcopy(plain)
    rewrite(rewritten, channels_last=True)
    if device == "cuda":
        plain, rewritten = (
            m.cuda().to(memory_format=torch.channels_last) for m in (plain, rewritten)
        )
    return plain, rewritten


def gradient(tensor: Tensor) -> Tensor:
    return tensor.grad.clone()


def test_rewrite_replaces_resnet_layers_once():
    """The parameters remain the same objects, so an existing optimizer stays valid."""
    model = models.build("resnet18", num_classes=10, image_size=64)
    before, decayed = [*model.parameters(), *model.buffers()], linear_weights(model)
    for _ in range(2):
        rewrite(model, channels_last=True)
        kinds = Counter(type(module) for module in model.modules())
        assert (kinds[BlockConv], kinds[PlacedMaxPool], kinds[OnePassBatchNorm]) == (1, 1, 20)
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    assert linear_weights(model) == decayed


@pytest.mark.parametrize("size", [64, pytest.param(65, marks=pytest.mark.slow)])
def test_rewrite_resnet_equals_plain(size):
    """In float64 except for the statistics' float32 sums, whose error is 2**-24 per layer."""
    plain, rewritten = pair(torch.float64)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)
    for _ in range(2):
        for model in (plain, rewritten):
            model.zero_grad()
            F.cross_entropy(model(images), torch.arange(4)).backward()
        torch.testing.assert_close(rewritten(images), plain(images), rtol=0, atol=1e-5)
        for a, b in zip(rewritten.parameters(), plain.parameters(), strict=True):
            assert (gradient(a) - gradient(b)).norm() < 1e-5 * gradient(b).norm()
    assert list(rewritten.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(rewritten.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)
    assert int(rewritten.get_buffer("bn1.num_batches_tracked")) == 4
    torch.testing.assert_close(rewritten.eval()(images), plain.eval()(images), rtol=0, atol=1e-5)


def stem(**changes: Any) -> nn.Conv2d:
    usual = dict(in_channels=3, out_channels=6, kernel_size=7, stride=2, padding=3, bias=False)
    return nn.Conv2d(**(usual | changes))


def pooling(**changes: Any) -> nn.MaxPool2d:
    return nn.MaxPool2d(**(dict(kernel_size=3, stride=2, padding=1) | changes))


def subclass(layer: nn.Module) -> nn.Module:
    """Change a layer's class to one that may have a custom forward pass."""
    layer.__class__ = type(f"Other{type(layer).__name__}", (type(layer),), {})
    return layer


STEMS: dict[str, Any] = dict(kernel_size=3, stride=(2, 1), padding=0, dilation=2)
STEMS |= dict(bias=True, groups=3, in_channels=4, padding_mode="reflect")
POOLINGS: dict[str, Any] = dict(kernel_size=2, stride=3, padding=0, dilation=2)
POOLINGS |= dict(return_indices=True, ceil_mode=True)
NORMS: dict[str, Any] = dict(track_running_stats=False, affine=False, momentum=None)
WITHOUT_BIAS = nn.BatchNorm2d(6)
WITHOUT_BIAS.bias = None  # like the option `bias`, which torch 2.11 lacks
UNSUPPORTED = [
    *(stem(**{name: value}) for name, value in STEMS.items()),
    *(pooling(**{name: value}) for name, value in POOLINGS.items()),
    *(nn.BatchNorm2d(6, **{name: value}) for name, value in NORMS.items()),
    *map(subclass, (stem(), pooling(), nn.BatchNorm2d(6))),
    nn.SyncBatchNorm(6),
    WITHOUT_BIAS,
]


@pytest.mark.parametrize("layer", UNSUPPORTED, ids=str)
def test_rewrite_keeps_other_layers(layer):
    assert type(exchanged(layer)) is type(layer)


def exchanged(module: nn.Module) -> nn.Module:
    """Return the faster version of a layer, with the same weights."""
    model = nn.Sequential(copy.deepcopy(module))
    rewrite(model, channels_last=True)
    return model[0]


def gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return outputs and all gradients, for fixed gradients of the outputs."""
    module.zero_grad()
    leaves = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    found = module(*(leaf.requires_grad_() for leaf in leaves))
    outputs = [found] if isinstance(found, Tensor) else [*found]
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    torch.autograd.backward(outputs, given)
    return [*(out.detach() for out in outputs), *map(gradient, [*leaves, *module.parameters()])]


def check(layer: nn.Module, *inputs: Tensor, bound: float = 0) -> None:
    """Compare outputs and gradients of a layer with those of its faster version."""
    ours, theirs = gradients(exchanged(layer), *inputs), gradients(layer, *inputs)
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 32, 32), (1, 3, 2, 2), (2, 3, 18, 46), (1, 3, 31, 32), (1, 3, 32, 31), (1, 3, 7, 7)],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_block_conv_is_exact(shape, memory_format):
    """Odd sizes use the plain layer."""
    torch.manual_seed(0)
    images = torch.randn(shape, dtype=torch.float64).to(memory_format=memory_format)
    check(stem().double(), images, bound=1e-12)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use deterministic cuDNN kernels, no TF32, and an empty compiler cache."""
    for name, value in dict(deterministic=True, benchmark=False, allow_tf32=False).items():
        monkeypatch.setattr(torch.backends.cudnn, name, value)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batch_norm_variance_far_from_zero(device, dtype):
    """With mean 100 and deviation 1; the float32 sums are shifted by one of the values."""
    generator = torch.Generator(device).manual_seed(3)
    images = 100 + torch.randn(32, 64, 14, 14, generator=generator, device=device)
    images = images.to(dtype).to(memory_format=torch.channels_last)
    plain = nn.BatchNorm2d(64, eps=0.1, momentum=1.0).to(device)
    ours, exact = exchanged(plain), copy.deepcopy(plain).double()
    if device == "cuda":
        ours.compile(dynamic=False)
    found, expected = ours(images), exact(images.double())
    assert found.dtype == dtype
    # bf16 rounding
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=1e-3)
    for name in ("running_mean", "running_var"):
        buffers = ours.get_buffer(name).double(), exact.get_buffer(name)
        torch.testing.assert_close(*buffers, rtol=1e-4, atol=0)


# Transforms of normally distributed values before pooling.
VALUES = {
    "different": torch.clone,
    "ties": torch.relu,  # half are zeros; many windows contain only zeros
    "few": lambda images: (images * 2).round(),
    "nan": lambda images: torch.where(images > 1.28, torch.nan, images),  # one in ten
}
SHAPES = [(3, 5, 14, 22), (1, 1, 2, 2), (2, 100, 18, 2)]
ODD_SHAPES = [(2, 8, 15, 16), (2, 8, 16, 15), (2, 8, 7, 7)]  # use the plain layer


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_max_pool_positions(values, shape):
    """The forward pass needs no GPU. It selects the first of equal values, never padding."""
    torch.manual_seed(0)
    images = VALUES[values](torch.randn(shape)).requires_grad_()
    pooled = _PlacedMaxPool.apply(images)
    (place,) = pooled.grad_fn.saved_tensors
    expected, index = F.max_pool2d(images, 3, 2, 1, return_indices=True)
    row, column = index // shape[3], index % shape[3]
    top, left = 2 * torch.arange(shape[2] // 2)[:, None] - 1, 2 * torch.arange(shape[3] // 2) - 1
    torch.testing.assert_close(pooled, expected, rtol=0, atol=0, equal_nan=True)
    assert place.dtype == torch.int8
    assert torch.equal(place, (3 * (row - top) + column - left).to(torch.int8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(8, 64, 112, 112), *SHAPES, *ODD_SHAPES])
@pytest.mark.parametrize("values", VALUES)
def test_max_pool_is_bitwise_identical(values, shape, memory_format, dtype):
    """Both sum up to four gradients per pixel in float32, in window order."""
    torch.manual_seed(0)
    images = VALUES[values](torch.randn(shape, device="cuda"))
    check(pooling(), images.to(dtype).to(memory_format=memory_format))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["expanded scalar", "transposed", "strided"])
def test_max_pool_gradient_layouts(layout):
    torch.manual_seed(0)
    images = torch.randn(2, 12, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    grad = {
        "expanded scalar": torch.ones((), device="cuda").expand(2, 12, 4, 4),
        "transposed": torch.randn(2, 12, 4, 4, device="cuda").transpose(2, 3),
        "strided": torch.randn(2, 24, 4, 8, device="cuda")[:, ::2, :, ::2],
    }[layout]
    found = []
    for module in (exchanged(pooling()), pooling()):
        leaf = images.clone().requires_grad_()
        module(leaf).backward(grad)
        found.append(gradient(leaf))
    assert torch.equal(*found)


def train_two_steps(
    model: nn.Module, images: Tensor, *, compiled: bool = True
) -> tuple[list[float], Tensor]:
    """Return losses before and after an SGD step, and first gradients; in bf16 unless float64."""

    def objective(images: Tensor) -> Tensor:
        return F.cross_entropy(model(images), torch.arange(len(images), device="cuda") % 10)

    function = torch.compile(objective, dynamic=False) if compiled else objective
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, grads = [], []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=images.dtype != torch.float64):
            loss = function(images)
        loss.backward()
        grads.append(torch.cat([gradient(parameter).flatten() for parameter in model.parameters()]))
        optimizer.step()
        losses.append(loss.item())
    return losses, grads[0]


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable")
def test_rewrite_compiled_resnet_float64():
    """Only rounding differs, so no low-precision tolerance hides an error."""
    plain, rewritten = (model.double() for model in pair(torch.float32, "cuda"))
    images = torch.randn(32, 3, 64, 64, device="cuda", dtype=torch.float64)
    images = images.to(memory_format=torch.channels_last)
    losses, grads = train_two_steps(plain, images, compiled=False)
    our_losses, our_grads = train_two_steps(rewritten, images)
    assert our_losses == pytest.approx(losses, rel=1e-9)
    assert (our_grads - grads).norm() < 1e-9 * grads.norm()
    torch.testing.assert_close(rewritten.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable")
def test_rewrite_compiled_vit_bf16():
    """Losses agree to 1 %; gradient errors are little above those of the plain model."""
    torch.manual_seed(0)
    plain = short_vit(10, 64).cuda()
    nn.init.normal_(plain.head.weight, std=0.05)
    rewritten, precise = copy.deepcopy(plain), copy.deepcopy(plain).double()
    rewrite(rewritten, channels_last=False)
    images = torch.randn(32, 3, 64, 64, device="cuda")
    _, exact = train_two_steps(precise, images.double(), compiled=False)
    losses, grads = train_two_steps(plain, images)
    our_losses, our_grads = train_two_steps(rewritten, images)
    assert our_losses == pytest.approx(losses, rel=0.01)
    error, plain_error = (our_grads - exact).norm(), (grads - exact).norm()
    assert error < 1.2 * plain_error < 0.1 * exact.norm()
    assert F.cosine_similarity(our_grads, grads, dim=0) > 0.9


def add_norm(width: int) -> AddNorm:
    torch.manual_seed(0)
    module = AddNorm(width, eps=1e-6)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module


def test_add_norm_on_cpu_equals_plain():
    module = add_norm(24)
    assert type(exchanged(module)) is OnePassAddNorm
    check(module, torch.randn(2, 5, 24), torch.randn(2, 5, 24).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [24, 384, 768, 1000, 4096])
@pytest.mark.parametrize("rows", [(1,), (3, 7), (64, 196)])
def test_add_norm_gradients_equal_float64(width, rows):
    """float32 results are exact to float32 rounding; bf16 results are the rounded exact ones."""
    module = add_norm(width).cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (*rows, width)
    stream = 3 + torch.randn(shape, generator=generator, device="cuda")
    branch = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    exact = gradients(copy.deepcopy(module).double(), stream.double(), branch.double())
    found = gradients(exchanged(module), stream, branch)
    assert [t.dtype for t in found[:4]] == [torch.float32, torch.bfloat16] * 2
    for ours, theirs in zip(found, exact, strict=True):
        # The norm's incoming gradient was rounded to bf16.
        bound = 1e-6 if ours is found[0] else 6e-3
        assert (ours.double() - theirs).norm() < bound * theirs.norm()
