"""Vision transformer: number of parameters, initialization, and arithmetic from the paper."""

import math

import pytest
import torch
from torch import nn

from models.vit import PatchEmbed, VisionTransformer, positions, vit_s16


def short_vit(num_classes: int, image_size: int) -> nn.Module:
    """Build a ViT-S/16 with 3 of its 12 blocks, because compiling all of them takes a minute."""
    model = vit_s16(num_classes, image_size)
    del model.blocks[3:]
    return model


def small(image_size: int = 32) -> VisionTransformer:
    sizes = {"num_classes": 5, "depth": 2, "heads": 2, "hidden": 24}
    return VisionTransformer(image_size=image_size, patch_embed=PatchEmbed(3, 8, 16), **sizes)


def test_positions_by_hand():
    """Row 1, column 2, 8 channels: sin x, cos x, sin y, cos y for frequencies 1 and 1/10000."""
    found = positions(2, 3, 8)
    assert found.shape == (6, 8)
    angles = [(math.sin, 2), (math.cos, 2), (math.sin, 1), (math.cos, 1)]
    by_hand = [f(frequency * place) for f, place in angles for frequency in (1, 1e-4)]
    assert found[5].tolist() == pytest.approx(by_hand, abs=1e-6)
    assert found[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_blocks_equal_torch_encoder_layer():
    """Compare with nn.TransformerEncoderLayer with the same weights and the tanh form of GELU."""
    torch.manual_seed(0)
    model = small().eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    nn.init.normal_(model.head.weight)
    images = torch.randn(3, 3, 32, 32)
    x = model.patch_embed.proj(images).permute(0, 2, 3, 1).reshape(3, 16, 16) + positions(4, 4, 16)
    for block in model.blocks:
        theirs = nn.TransformerEncoderLayer(
            16, 2, 24, 0.0, nn.GELU("tanh"), layer_norm_eps=1e-6, batch_first=True, norm_first=True
        ).eval()
        names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj."}
        names |= {"linear1.": "mlp.fc1.", "linear2.": "mlp.fc2."}
        names |= {norm: norm for norm in ("norm1.", "norm2.")}
        ours = block.state_dict()
        theirs.load_state_dict(
            {a + part: ours[b + part] for a, b in names.items() for part in ("weight", "bias")}
        )
        x = theirs(x)
    expected = model.head(
        nn.functional.layer_norm(x, (16,), model.norm.weight, model.norm.bias, 1e-6).mean(1)
    )
    torch.testing.assert_close(model(images), expected)
    assert expected.abs().max() > 0.1


def test_vit_other_image_sizes():
    """Positions are computed from the grid, so a model built for a different size agrees."""
    torch.manual_seed(0)
    model, other = small(32).eval(), small(48).eval()
    nn.init.normal_(model.head.weight)
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 48, 48)
    assert torch.equal(model(images), other(images))
    assert model(torch.randn(1, 3, 16, 40)).shape == (1, 5)


def test_residual_stream_is_float32_under_autocast():
    """The last norm gets float32 in bf16 as well. tests/extras/kernels compiles it on a GPU."""
    model, seen = small(), []
    model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 32, 32))
    assert seen == [torch.float32]
