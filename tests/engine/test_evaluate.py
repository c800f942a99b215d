"""Validation counts every image once, however it is cut into batches."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.evaluate import evaluate
from engine.meters import measure
from models.resnet import resnet_tiny

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
IMAGES = 37


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = resnet_tiny(7, 16)
    model(torch.randn(64, 3, 16, 16))  # so that its running statistics are not those of a new one
    return model


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 3, 16, 16, generator=generator), torch.randint(0, 7, (IMAGES,), generator=generator)


def padded(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one size; what the last one lacks is filled up."""
    for start in range(0, len(images), size):
        batch, wanted = images[start : start + size], labels[start : start + size]
        lack = size - len(batch)
        yield torch.cat([batch, torch.full((lack, *batch.shape[1:]), 9.0)]), torch.cat([wanted, torch.full((lack,), -1)])


@pytest.mark.parametrize("size", [1, 2, 5, 8, 36, 37, 38, 100])
def test_any_batch_size_gives_the_same(model: nn.Module, data: tuple[Tensor, Tensor], size: int) -> None:
    images, labels = data
    found = evaluate(model, measure, padded(images, labels, size), ALONE)
    logits = model.eval()(images)
    places = logits.argsort(1, descending=True).eq(labels[:, None]).int().argmax(1)
    assert found.images == IMAGES
    assert found.top1 == pytest.approx(100 * (places < 1).sum().item() / IMAGES, abs=1e-9)
    assert found.top5 == pytest.approx(100 * (places < 5).sum().item() / IMAGES, abs=1e-9)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert 0 < found.top1 < found.top5 < 100


def test_batches_of_differing_sizes(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    uneven = zip(data[0].split([1, 20, 3, 13]), data[1].split([1, 20, 3, 13]), strict=True)
    found, whole = evaluate(model, measure, uneven, ALONE), evaluate(model, measure, [data], ALONE)
    assert (found.images, found.top1, found.top5) == (whole.images, whole.top1, whole.top5)


def test_nothing_to_validate(model: nn.Module) -> None:
    assert evaluate(model, measure, [], ALONE).images == 0


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was(model: nn.Module, data: tuple[Tensor, Tensor], mode: bool) -> None:
    model.train(mode)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    evaluate(model, measure, padded(*data, 8), ALONE)
    assert model.training == mode and model.bn1.training == mode
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_no_gradients_are_kept(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    seen = []

    def watch(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), model.training, model(images).requires_grad))
        return measure(model, images, labels)

    model.train()
    evaluate(model, watch, padded(*data, 20), ALONE)
    assert seen == [(False, False, False)] * 2
    assert torch.is_grad_enabled()
