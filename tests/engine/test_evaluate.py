"""Validation counts every image once for any batch size; hits are counted as by torch.topk."""

import copy
import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine import evaluate as module
from engine.distributed import World
from engine.evaluate import Metrics, Mistakes, evaluate, metrics_of, sums
from models.resnet import resnet_tiny
from pipeline.worker import EMPTY_ROW
from train import validation_loss as measure

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
IMAGES = 37


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = resnet_tiny(7, 16)
    model(torch.randn(64, 3, 16, 16))  # changes the running statistics
    return model


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 3, 16, 16, generator=generator), torch.randint(
        0, 7, (IMAGES,), generator=generator
    )


def padded(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split into batches of one size; the last one is padded."""
    for start in range(0, len(images), size):
        batch, wanted = images[start : start + size], labels[start : start + size]
        missing = size - len(batch)
        yield (
            torch.cat([batch, torch.full((missing, *batch.shape[1:]), 9.0)]),
            torch.cat([wanted, torch.full((missing,), -1)]),
        )


@pytest.mark.parametrize("size", [1, 2, 5, 8, 36, 37, 38, 100])
def test_result_does_not_depend_on_the_batch_size(
    model: nn.Module, data: tuple[Tensor, Tensor], size: int
) -> None:
    images, labels = data
    (found,) = evaluate([model], measure, padded(images, labels, size), ALONE)
    logits = model.eval()(images)
    places = logits.argsort(1, descending=True).eq(labels[:, None]).int().argmax(1)
    assert found.images == IMAGES
    assert found.top1 == pytest.approx(100 * (places < 1).sum().item() / IMAGES, abs=1e-9)
    assert found.top5 == pytest.approx(100 * (places < 5).sum().item() / IMAGES, abs=1e-9)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert 0 < found.top1 < found.top5 < 100


def test_batches_of_differing_sizes(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    uneven = zip(data[0].split([1, 20, 3, 13]), data[1].split([1, 20, 3, 13]), strict=True)
    (found,) = evaluate([model], measure, uneven, ALONE)
    (expected,) = evaluate([model], measure, [data], ALONE)
    assert dataclasses.replace(found, loss=0) == dataclasses.replace(expected, loss=0)


def test_nothing_to_validate(model: nn.Module) -> None:
    assert [found.images for found in evaluate([model, model], measure, [], ALONE)] == [0, 0]


def test_several_networks_share_each_batch(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """The results are those of single evaluations; the mistakes are the first network's."""
    torch.manual_seed(3)
    other, read = resnet_tiny(7, 16).eval(), []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in padded(*data, 8):
            read.append(len(read))
            yield batch

    model.train()
    together, alone = Mistakes(7, ALONE.device), Mistakes(7, ALONE.device)
    found = evaluate([model, other], measure, batches(), ALONE, together)
    assert read == [0, 1, 2, 3, 4] and (model.training, other.training) == (True, False)
    assert found == [
        *evaluate([model], measure, batches(), ALONE, alone),
        *evaluate([other], measure, batches(), ALONE),
    ]
    assert found[0].loss != found[1].loss
    assert torch.equal(together.table, alone.table)


@pytest.mark.parametrize("mode", [True, False])
def test_model_is_unchanged(model: nn.Module, data: tuple[Tensor, Tensor], mode: bool) -> None:
    model.train(mode)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    evaluate([model], measure, padded(*data, 8), ALONE)
    assert model.training == mode and model.bn1.training == mode
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_no_gradients_are_kept(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    seen = []

    def watch(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((torch.is_grad_enabled(), model.training, model(images).requires_grad))
        return measure(model, images, labels)

    model.train()
    evaluate([model], watch, padded(*data, 20), ALONE)
    assert seen == [(False, False, False)] * 2
    assert torch.is_grad_enabled()


def classed(
    model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[Tensor, list[float], list[int]]:
    """Return counts by label and prediction, losses, and predictions."""
    logits = model.eval()(images)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
    predictions = logits.argmax(1).tolist()
    table = torch.zeros(7, 7, dtype=torch.int32)
    for label, prediction in zip(labels.tolist(), predictions, strict=True):
        table[label, prediction] += 1
    return table, losses, predictions


@pytest.mark.parametrize("size", [1, 5, 37, 100])
def test_mistakes(model: nn.Module, data: tuple[Tensor, Tensor], size: int) -> None:
    """For any batch size; padding is neither counted nor shown."""
    mistakes = Mistakes(7, ALONE.device, worst=4)
    (found,) = evaluate([model], measure, padded(*data, size), ALONE, mistakes)
    table, losses, predictions = classed(model, *data)
    assert mistakes.table.dtype == torch.int32 and torch.equal(mistakes.table, table)
    seen, hits = mistakes.per_class()
    assert torch.equal(seen, data[1].bincount(minlength=7))
    assert hits.sum().item() == pytest.approx(found.top1 * IMAGES / 100)

    images, rows = mistakes.worst_images()
    worst = sorted(range(IMAGES), key=lambda i: -losses[i])[:4]
    assert torch.equal(images, data[0][worst])
    assert [row[:2] for row in rows] == [(int(data[1][i]), predictions[i]) for i in worst]
    assert [row[2] for row in rows] == pytest.approx([losses[i] for i in worst])


def test_mistakes_of_fewer_images_than_are_kept(
    model: nn.Module, data: tuple[Tensor, Tensor]
) -> None:
    mistakes = Mistakes(7, ALONE.device, worst=16)
    evaluate([model], measure, padded(data[0][:5], data[1][:5], 3), ALONE, mistakes)
    images, rows = mistakes.worst_images()
    assert len(images) == len(rows) == 5
    assert {row[0] for row in rows} == set(data[1][:5].tolist())


def test_mistakes_without_images(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    for mistakes, batches in (
        (Mistakes(7, ALONE.device, worst=4), []),
        (Mistakes(7, ALONE.device), [data]),
    ):
        evaluate([model], measure, batches, ALONE, mistakes)
        images, rows = mistakes.worst_images()
        assert len(images) == 0 and rows == []
        assert mistakes.table.sum() == sum(len(labels) for _, labels in batches)


def test_mistakes_of_too_many_classes_for_pairs(
    model: nn.Module, data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Mistakes(7, ALONE.device)
    monkeypatch.setattr(module, "MOST_CLASSES", 6)
    single = Mistakes(7, ALONE.device)
    for mistakes in (pairs, single):
        evaluate([model], measure, padded(*data, 10), ALONE, mistakes)
    assert (pairs.pairs, single.pairs, single.table.shape) == (True, False, (7, 2))
    for one, other in zip(pairs.per_class(), single.per_class(), strict=True):
        assert one.dtype == other.dtype == torch.int64 and torch.equal(one, other)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """Also with deterministic kernels; in bf16, the table counts the same hits as top1."""
    network, device = copy.deepcopy(model).cuda(), torch.device("cuda")
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=device)
    batches = [(images.cuda(), labels.cuda()) for images, labels in padded(*data, 8)]
    compiled = torch.compile(measure, dynamic=False)
    expected = Mistakes(7, device, worst=4)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        metrics, same = evaluate(
            [network, copy.deepcopy(network)], compiled, batches, world, expected
        )
        assert metrics == same
        rows = [compiled(network.eval(), *batch)[1:] for batch in batches]
    assert expected.per_class()[1].sum().item() == pytest.approx(metrics.top1 * IMAGES / 100)
    for repeatable in (False, True):
        found = Mistakes(7, device, worst=4)
        torch.use_deterministic_algorithms(repeatable)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch, (losses, predictions) in zip(batches, rows, strict=True):
                found.add(*batch, losses, predictions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.use_deterministic_algorithms(False)
        assert torch.equal(found.table, expected.table) and found.table.sum() == IMAGES
        assert torch.equal(found.worst_images()[0], expected.worst_images()[0])


def counted(logits: Tensor, labels: Tensor) -> tuple[int, int, int]:
    """Count top-1 hits, top-5 hits and images with torch.topk, row by row."""
    hits1 = hits5 = images = 0
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label >= 0:
            best = row.topk(min(5, len(row))).indices.tolist()
            hits1, hits5, images = hits1 + (label == best[0]), hits5 + (label in best), images + 1
    return hits1, hits5, images


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hits_are_those_of_topk(classes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = (
        torch.stack([torch.randperm(classes, generator=generator) for _ in range(500)]).to(dtype)
        - classes / 2
    )  # no ties
    labels = torch.randint(0, classes, (500,), generator=generator)
    labels[torch.rand(500, generator=generator) < 0.1] = EMPTY_ROW
    found = sums(logits, labels, torch.tensor(2.5))
    assert found.dtype == torch.float32
    assert found.tolist() == [2.5, *counted(logits, labels)]
    assert 0 < found[1] < found[3] < 500


def test_padding_does_not_count() -> None:
    logits = torch.eye(6)[[0, 1, 2, 3]]
    assert sums(logits, torch.tensor([0, 1, EMPTY_ROW, EMPTY_ROW]), torch.tensor(0.0)).tolist() == [
        0,
        2,
        2,
        2,
    ]
    assert sums(logits, torch.tensor([EMPTY_ROW] * 4), torch.tensor(0.0)).tolist() == [0, 0, 0, 0]
    assert sums(logits, torch.tensor([0, 1, 5, 4]), torch.tensor(0.0)).tolist() == [0, 2, 3, 4]


def test_nan_is_no_hit() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1
    labels = torch.tensor([4, 4, 4])
    logits[1] = math.nan
    logits[2, 4] = math.nan
    assert sums(logits, labels, torch.tensor(0.0)).tolist() == [0, 1, 1, 3]


def test_infinite_logits() -> None:
    logits = torch.tensor([[-math.inf] * 10, [math.inf] * 10])
    assert sums(logits, torch.tensor([0, 5]), torch.tensor(0.0)).tolist() == [0, 1, 1, 2]


def test_equal_logits_rank_in_the_order_of_their_classes() -> None:
    """A constant network has a top-1 accuracy of 1 / classes, not 1."""
    logits = torch.zeros(10, 10)
    assert sums(logits, torch.arange(10), torch.tensor(0.0)).tolist() == [0, 1, 5, 10]


def test_metrics_of() -> None:
    assert metrics_of(torch.tensor([10.0, 1, 3, 4])) == Metrics(
        loss=2.5, top1=25, top5=75, images=4
    )
    assert metrics_of(torch.zeros(4)) == Metrics(0, 0, 0, 0)
