"""The vision transformer from "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580).

Details that the paper omits (initialization, GELU, epsilon) follow google-research/big_vision,
its code.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def positions(rows: int, columns: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return fixed sine-cosine position embeddings like MoCo v3 (arXiv 2104.02057), row by row.

    Frequencies decrease geometrically from 1 to 1/10000. float32 [rows * columns, width].
    """
    exponents = torch.linspace(0, 1, width // 4, device=device)
    frequency = 10_000**-exponents
    row = torch.arange(rows, device=device)
    column = torch.arange(columns, device=device)
    y, x = torch.meshgrid(row, column, indexing="ij")
    y = y.reshape(-1, 1) * frequency
    x = x.reshape(-1, 1) * frequency
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        projections = self.qkv.weight.chunk(3)
        for weight in (*projections, self.proj.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, N, width] to the same shape."""
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, N, width / heads]
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).flatten(2)
        return self.proj(x)


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Return two linear layers with the tanh approximation of GELU, the default in JAX."""
    fc1 = nn.Linear(width, hidden)
    fc2 = nn.Linear(hidden, width)
    for layer in (fc1, fc2):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(layer.bias, std=1e-6)
    return nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU("tanh"), fc2=fc2))


class AddNorm(nn.LayerNorm):
    """Add a branch to the residual stream, and normalize the sum for the next branch.

    This is one module, so that `model.rewrite` can fuse both into one pass over memory.
    """

    def forward(self, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the sum of two tensors [B, N, width], and the normalized sum."""
        total = stream + branch
        return total, super().forward(total)


class Block(nn.Module):
    """Attention and MLP, each after a layer norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = AddNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = AddNorm(width, eps=1e-6)
        self.mlp = mlp(width, hidden)

    def forward(self, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Add `branch` to the residual stream; return the stream and the MLP's output.

        Unlike in the paper, the next block adds that output to the stream.
        """
        stream, x = self.norm1(stream, branch)
        x = self.attn(x)
        stream, x = self.norm2(stream, x)
        return stream, self.mlp(x)


class PatchEmbed(nn.Module):
    """Embed the patches of an image by a convolution, computed as a matrix product.

    cuDNN's convolution took 6 % more of a ViT-S/16 step on an H200.
    """

    def __init__(self, in_channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(in_channels, width, patch, patch)
        # JAX's lecun_normal: truncation at two standard deviations scales them by 0.8796.
        inputs = self.proj.weight[0].numel()
        deviation = math.sqrt(1 / inputs) / 0.87962566
        limit = 2 * deviation
        nn.init.trunc_normal_(self.proj.weight, std=deviation, a=-limit, b=limit)
        assert self.proj.bias is not None
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, C, H, W] to [B, H / patch, W / patch, width]."""
        patch = self.patch
        x = x.unflatten(3, (-1, patch))
        x = x.unflatten(2, (-1, patch))  # [B, C, rows, patch, columns, patch]
        x = x.permute(0, 2, 4, 1, 3, 5)
        x = x.flatten(3)  # [B, rows, columns, C * patch * patch]
        weight = self.proj.weight.flatten(1)
        return F.linear(x, weight, self.proj.bias)


class VisionTransformer(nn.Module):
    """Patch embedding, fixed positions, blocks, mean over all patches, linear head; no class token.

    The published run has one more layer before the head, which makes no difference in the paper.

    Args:
        image_size: image size in pixels, a multiple of the patch size. For other sizes, positions
            are computed at each call.
        patch_embed: sets the channels of the blocks, a multiple of 4 * heads.
    """

    positions: Tensor

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        patch_embed: PatchEmbed,
        depth: int,
        heads: int,
        hidden: int,  # channels inside the MLP
    ) -> None:
        super().__init__()
        width = patch_embed.proj.out_channels
        self.grid = image_size // patch_embed.patch
        self.patch_embed = patch_embed
        self.register_buffer("positions", positions(self.grid, self.grid, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, C, H, W] to [B, num_classes]; H and W are multiples of the patch size."""
        patches = self.patch_embed(x)
        _, rows, columns, width = patches.shape
        embeddings = self.positions
        if (rows, columns) != (self.grid, self.grid):
            embeddings = positions(rows, columns, width, x.device).to(embeddings.dtype)
        branch = patches.flatten(1, 2)
        # Under autocast, bf16 + float32 keeps the residual stream in float32.
        stream = embeddings.expand(branch.shape)
        for block in self.blocks:
            stream, branch = block(stream, branch)
        x = self.norm(stream + branch)
        return self.head(x.mean(1))


def vit_s16(num_classes: int, image_size: int, in_channels: int = 3) -> nn.Module:
    """ViT-S/16: 22 M parameters."""
    embed = PatchEmbed(in_channels, 16, 384)
    return VisionTransformer(num_classes, image_size, embed, depth=12, heads=6, hidden=1536)
