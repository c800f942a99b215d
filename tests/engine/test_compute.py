"""model.compile=recompute: activations are computed twice, and the gradients are the same."""

import shutil

import pytest
import torch
from torch import Tensor, nn

from engine.compute import compiled


@pytest.mark.slow
def test_recompute_keeps_fewer_activations() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    network = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    weights = {parameter.data_ptr() for parameter in network.parameters()}
    images = torch.randn(256, 64)

    def gradients(mode: str) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        network.zero_grad()
        kept: dict[int, int] = {}  # address of what the backward pass needs -> bytes

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = compiled(lambda: network(images).square().mean(), mode)()
        result.backward()
        found = sum(count for address, count in kept.items() if address not in weights)
        return found, [p.grad for p in network.parameters() if p.grad is not None]

    kept, expected = gradients("default")
    fewer, found = gradients("recompute")
    assert fewer < kept / 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
