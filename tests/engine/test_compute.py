"""Computing a model on a device: precision, FLOPs, torch.compile."""

import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from conf.compose import from_overrides
from conf.errors import UserError
from engine.compute import (
    Compute,
    choose_precision,
    compile_blocks,
    count_flops,
    has_identical_blocks,
    is_search_worthwhile,
    resolve_compile,
)
from pipeline.data.field import Field, image_field
from pipeline.feed.batch import Batch
from tests.helpers.processes import run_python
from tests.models.test_vit import short_vit
from train import forward

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def test_keep_compiled_kernels_uses_cache_dir(cache, monkeypatch):
    """By default, torch selects a temporary directory when imported, which a container loses."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # set by this process
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    program = "from conf.start import keep_compiled_kernels as keep; keep(); from torch._inductor"
    program += ".runtime import cache_dir_utils as d; print(d.cache_dir(), d.triton_cache_dir(0))"
    result = run_python("-c", program, XDG_CACHE_HOME=str(cache.parent))
    assert result.stdout.split() == [str(cache / "inductor"), str(cache / "inductor" / "triton")]


def test_has_identical_blocks():
    """With drop path, each block has a different rate, so blocks would be compiled one by one."""
    assert not has_identical_blocks(nn.Module())
    for rate, are_equal in ((0.1, True), (0.2, False)):
        blocks = nn.Sequential(nn.Dropout(0.1), nn.Dropout(rate))
        assert has_identical_blocks(nn.ModuleDict({"blocks": blocks})) == are_equal


def test_for_validation_does_not_compile_blocks():
    compiler = Mock(side_effect=lambda graph, examples: graph)
    block = models.vit.mlp(3, 4)
    block.compile(backend=compiler)
    with Compute(CPU, "fp32", False, "blocks", None, {}, 0, 0).for_validation():
        block(torch.zeros(2, 3))
    compiler.assert_not_called()
    block(torch.zeros(2, 3))
    compiler.assert_called_once()


@pytest.mark.slow
@NEEDS_COMPILER
def test_compile_blocks_compiles_equal_blocks_once():
    torch._dynamo.reset()
    model, images = short_vit(7, 32), torch.randn(4, 3, 32, 32)
    nn.init.normal_(model.head.weight)
    expected = torch.autograd.grad(model(images).square().mean(), list(model.parameters()))
    assert has_identical_blocks(model)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    found = torch.autograd.grad(model(images).square().mean(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    # The first of three has its own graph; its input, the positions, needs no gradient.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("level", "auto"), [((9, 0), "bf16"), ((7, 5), "fp16"), ((6, 0), "fp32")])
def test_choose_precision(monkeypatch, level, auto):
    """Older GPUs emulate bf16, which torch reports as supported by default."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or auto == "bf16",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: level)
    choices = ("auto", "bf16", "fp16", "tf32", "fp32")
    assert [choose_precision(choice, CPU) for choice in choices] == ["fp32", *choices[1:]]
    assert [choose_precision(choice, CUDA) for choice in choices] == [auto, *choices[1:]]


@pytest.mark.parametrize(
    ("word", "device", "epochs", "found", "searches"),  # epochs have 5,004.5 steps
    [
        ("model.compile=auto", CPU, 90, "off", True),
        ("model.compile=default", CPU, 1, "default", False),
        ("model.compile=auto", CUDA, 0.3, "off", False),
        ("model.compile=auto", CUDA, 60, "default", True),
        ("model.compile=auto", CUDA, 90, "tuned", True),
        ("train.deterministic=true", CUDA, 90, "default", False),
    ],
)
def test_resolve_compile_for_resnet50(word, device, epochs, found, searches):
    config = from_overrides(["data=fake", f"train.epochs={epochs}", word])
    steps = round(5_004.5 * epochs)
    assert resolve_compile(config, device, steps, 6.28e12 * steps) == found
    assert is_search_worthwhile(config, steps) == searches


class Query(nn.MultiheadAttention):  # passes a parameter to a layer, like SigLIP's pooling
    def forward(self, image):
        return self.out_proj(self.in_proj_weight.expand(1, -1, -1))


def test_count_flops_equals_published():
    """torchvision publishes 4.089 G multiply-adds for ResNet-50 at 224 px; each counts as two."""
    with torch.device("meta"):
        model = models.build("resnet50", num_classes=1000, image_size=224)
        assert count_flops(Query(4, 1), {"image": image_field(8)}, forward) == 2 * 12 * 4 * 4
    assert count_flops(model, {"image": image_field(224)}, forward) == pytest.approx(
        2 * 4.089e9, rel=0.001
    )


class TwoInputs(nn.Module):
    """A network with two inputs. If `inner`, it calls its layer with wrong arguments."""

    def __init__(self, *, inner: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.inner = inner

    def forward(self, image, age):
        features = torch.cat([image.mean((2, 3)), age[:, None]], 1)
        return self.layer(features, age) if self.inner else self.layer(features)


def forward_both(network: nn.Module, batch: Batch) -> Tensor:
    return network(batch["image"], batch["age"])


def count_two(network: nn.Module, forward, **fields: Field) -> int:
    with torch.device("meta"):
        return count_flops(network.to("meta"), {"image": image_field(8), **fields}, forward)


def test_count_flops_with_second_field():
    assert count_two(TwoInputs(), forward_both, age=Field(np.float32)) == 2 * 4 * 3


def test_count_flops_reports_wrong_call_in_one_line():
    fix = r"; change it to call the network with \("
    missing = r"^forward\(\) in train\.py: TwoInputs\.forward\(\) missing 1 .*: 'age'"
    with pytest.raises(UserError, match=rf"{missing}{fix}image, age\)$"):
        count_two(TwoInputs(), forward)
    many = r"^forward\(\) in train\.py: Linear\.forward\(\) takes 2 .* 3 were given"
    with pytest.raises(UserError, match=rf"{many}{fix}input\)$"):
        count_two(nn.Linear(8, 3), forward_both, age=Field(np.float32))
    with pytest.raises(TypeError, match=r"^Linear\.forward\(\) takes 2 "):  # within the network
        count_two(TwoInputs(inner=True), forward_both, age=Field(np.float32))
