"""Validation counts each image once for any batch size, and hits like torch.topk."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from conf.schema import Config, TrainConfig
from engine.classifier import accuracy
from engine.metrics import Metrics
from engine.validation import evaluate
from models.resnet import resnet_tiny
from pipeline.feed.batch import Batch
from pipeline.feed.loader import EMPTY_ROW
from tests.engine.plans import ALONE
from tests.helpers.batches import batch_of, forbid_sync, on_device
from tests.helpers.batches import toy_values as measure
from tests.helpers.results import same

IMAGES = 37
METRICS, NAN = Metrics.of(Config()), math.nan
PIXELS = torch.randn(IMAGES, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 7, (IMAGES,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = resnet_tiny(7, 16)
    model(torch.randn(64, 3, 16, 16))  # changes the running statistics
    return model


def padded(size: int) -> Iterator[Batch]:
    """Split PIXELS into batches of equal size, padded, which share their memory, as on a GPU."""
    reused = None
    for start in range(0, IMAGES, size):
        rows = torch.arange(start, start + size)
        places = rows.clamp(max=IMAGES - 1)
        samples = torch.stack([torch.zeros_like(rows), rows], 1)
        samples[rows >= IMAGES] = EMPTY_ROW
        batch = batch_of(samples=samples, image=PIXELS[places], label=LABELS[places])
        reused = reused or batch.clone()
        reused.copy_(batch)
        yield reused


@pytest.mark.parametrize("size", [8, 37, 38])
def test_evaluate_independent_of_batch_size(model, size):
    (found,) = evaluate([model], measure, padded(size), ALONE)
    logits = model.eval()(PIXELS)
    places = logits.argsort(1, descending=True).eq(LABELS[:, None]).int().argmax(1)
    assert found.images == IMAGES
    values = found.values(METRICS)
    assert values["top1"] == pytest.approx(100 * (places < 1).sum().item() / IMAGES, abs=1e-9)
    assert values["top5"] == pytest.approx(100 * (places < 5).sum().item() / IMAGES, abs=1e-9)
    loss = nn.functional.cross_entropy(logits, LABELS).item()
    assert values["loss"] == pytest.approx(loss, rel=1e-5)
    assert 0 < values["top1"] < values["top5"] < 100
    rows = found.rows
    assert torch.equal(rows["label"], LABELS)
    assert torch.equal(rows["prediction"], logits.argmax(1))


@pytest.mark.parametrize("mode", [True, False])
def test_evaluate_does_not_change_model(model, mode):
    def watch(model, batch):
        output = model(batch["image"])
        assert not any((torch.is_grad_enabled(), model.training, output.requires_grad))
        return measure(model, batch)

    model.train(mode)
    before = copy.deepcopy(model.state_dict())
    evaluate([model], watch, padded(20), ALONE)
    assert (torch.is_grad_enabled(), model.training, model.bn1.training) == (True, mode, mode)
    assert same(model.state_dict(), before)


@pytest.mark.gpu
def test_validation_values_do_not_synchronize(model):
    """The host does not wait until the sums are read, even with deterministic kernels."""
    network = copy.deepcopy(model).cuda().eval()
    batches = [on_device(batch, "cuda") for batch in padded(8)]
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        expected = [measure(network, batch) for batch in batches]
        for repeatable in (False, True):
            with forbid_sync(deterministic=repeatable):
                found = [measure(network, batch) for batch in batches]
            assert same(found, expected)


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        (torch.eye(6)[:4], [0, 1, EMPTY_ROW, EMPTY_ROW], (2, 2)),
        (torch.tensor([[1, math.nan, 0], [3, 2, -math.inf]]), [0, 0], (1,)),
        # A constant network has a top-1 accuracy of 1 / classes, not 1.
        (torch.zeros(10, 10), list(range(10)), (1, 5)),
        (torch.full((2, 6), math.nan), [4, 0], (0, 0)),
    ],
)
def test_accuracy_of_odd_rows(logits, labels, expected):
    """Padding, NaN and inf are no hits; equal logits rank in class order."""
    found = accuracy(logits, torch.tensor(labels))
    assert tuple(value.sum().item() / 100 for value in found.values()) == expected


def test_evaluate_separates_rows_from_values():
    """The images are the logits. Two-class metrics may need the row value `score`."""
    logits = torch.tensor([[[0.0, 30]], [[0, 40]], [[2, 1]], [[1, 3]], [[math.inf, 0]]])
    batch = batch_of(image=logits, label=torch.tensor([0, 1, 0, 1, 0]))
    (found,) = evaluate([nn.Flatten()], measure, [batch], ALONE)
    values, rows = found.values(METRICS), found.rows
    assert {"loss", "top1"} <= values.keys()
    assert {"confidence", "score", "prediction", "label"} <= rows.keys() - values.keys()
    confidence = logits[:4, 0].softmax(1).amax(1)
    assert torch.equal(rows["confidence"], torch.cat([confidence, torch.zeros(1)]))


def test_metrics_prefers():
    for text, better, worse in (("top1", 2.0, 1.0), ("-loss", 1.0, 2.0)):
        metrics = Metrics.of(Config(train=TrainConfig(best_by=text)))
        name = metrics.best_by
        assert metrics.prefers({name: better}, {name: worse})
        assert not metrics.prefers({name: worse}, {name: better})
        assert metrics.prefers({name: worse}, {})
        assert metrics.prefers({name: worse}, {name: NAN})
        assert not metrics.prefers({name: NAN}, {name: worse})
