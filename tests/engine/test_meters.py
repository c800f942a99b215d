"""Loss and hits as summed on the device, against plain counting; the meter's protocol and its rates."""

import math

import pytest
import torch
from torch import Tensor, nn

from engine import meters
from engine.distributed import World
from engine.meters import Meter, Metrics, metrics_of, sums
from tests.conftest import Clock

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
EMPTY = -1


def counted(logits: Tensor, labels: Tensor) -> tuple[int, int, int]:
    """Top-1 hits, top-5 hits and images by torch.topk, one row after the other."""
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
    logits = torch.stack([torch.randperm(classes, generator=generator) for _ in range(500)]).to(dtype) - classes / 2  # no ties
    labels = torch.randint(0, classes, (500,), generator=generator)
    labels[torch.rand(500, generator=generator) < 0.1] = EMPTY
    found = sums(logits, labels, torch.tensor(2.5))
    assert found.dtype == torch.float32
    assert found.tolist() == [2.5, *counted(logits, labels)]
    assert 0 < found[1] < found[3] < 500


def test_rows_that_fill_up_do_not_count() -> None:
    logits = torch.eye(6)[[0, 1, 2, 3]]
    assert sums(logits, torch.tensor([0, 1, EMPTY, EMPTY]), torch.tensor(0.0)).tolist() == [0, 2, 2, 2]
    assert sums(logits, torch.tensor([EMPTY] * 4), torch.tensor(0.0)).tolist() == [0, 0, 0, 0]
    assert sums(logits, torch.tensor([0, 1, 5, 4]), torch.tensor(0.0)).tolist() == [0, 2, 3, 4]


def test_not_a_number_is_no_hit() -> None:
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
    """A network that says the same for everything is right once in `classes`, not always."""
    logits = torch.zeros(10, 10)
    assert sums(logits, torch.arange(10), torch.tensor(0.0)).tolist() == [0, 1, 5, 10]


def test_objective() -> None:
    torch.manual_seed(0)
    network = nn.Linear(8, 5)
    images, labels = torch.randn(6, 8), torch.randint(0, 5, (6,))
    loss, values = meters.objective(network, images, labels, labels, 0.1)
    logs = network(images).log_softmax(1)
    expected = -(0.9 * logs[range(6), labels] + 0.1 * logs.mean(1)).mean()  # a tenth is spread over all classes
    torch.testing.assert_close(loss, expected)
    assert values.tolist() == pytest.approx([6 * expected.item(), *counted(network(images), labels)])
    assert not values.requires_grad
    loss.backward()
    assert network.weight.grad is not None and network.weight.grad.abs().sum() > 0


def test_objective_with_mixed_targets() -> None:
    network = nn.Linear(8, 5)
    images, labels = torch.randn(6, 8), torch.randint(0, 5, (6,))
    onehot = nn.functional.one_hot(labels, 5).float()
    targets = 0.7 * onehot + 0.3 * onehot.roll(1, 0)
    loss, values = meters.objective(network, images, targets, labels, 0.0)
    logs = network(images).log_softmax(1)
    torch.testing.assert_close(loss, -(targets * logs).sum(1).mean())
    assert values[1:].tolist() == [*counted(network(images), labels)]  # hits are of the image's own label


def test_loss_is_taken_in_float32() -> None:
    network = nn.Linear(8, 5).bfloat16()
    loss, values = meters.objective(network, torch.randn(6, 8).bfloat16(), torch.zeros(6).long(), torch.zeros(6).long(), 0.0)
    assert (loss.dtype, values.dtype) == (torch.float32, torch.float32)


def test_measure_leaves_out_rows_that_fill_up() -> None:
    torch.manual_seed(0)
    network = nn.Linear(8, 7)
    images, labels = torch.randn(9, 8), torch.randint(0, 7, (9,))
    padded = torch.cat([images, torch.full((3, 8), 1e9)])
    found, losses, predictions = meters.measure(network, padded, torch.cat([labels, torch.full((3,), EMPTY)]))
    torch.testing.assert_close(found, meters.measure(network, images, labels)[0])
    each = nn.functional.cross_entropy(network(images), labels, reduction="none")
    torch.testing.assert_close(losses, torch.cat([each, torch.zeros(3)]))
    assert found[0].item() == pytest.approx(each.sum().item())
    assert torch.equal(predictions[:9], network(images).argmax(1))
    assert found[1] == (predictions[:9] == labels).sum()
    assert meters.measure(network, images, torch.full((9,), EMPTY))[0].tolist() == [0, 0, 0, 0]


def test_metrics_of() -> None:
    assert metrics_of(torch.tensor([10.0, 1, 3, 4])) == Metrics(loss=2.5, top1=25, top5=75, images=4)
    assert metrics_of(torch.zeros(4)) == Metrics(0, 0, 0, 0)


def test_an_interval_is_read_a_step_late() -> None:
    """What is added between `send` and `read` belongs to the next interval."""
    meter = Meter(ALONE, batch_size=4, step=0)
    assert meter.read() is None
    meter.add(torch.tensor([4.0, 1, 2, 4]))
    assert meter.read() is None
    meter.add(torch.tensor([8.0, 2, 3, 4]))
    meter.send(2, lr=0.5)
    meter.add(torch.tensor([1000.0, 0, 0, 4]))
    interval = meter.read()
    assert interval is not None
    assert (interval.metrics, interval.step, interval.lr) == (Metrics(1.5, 37.5, 62.5, 8), 2, 0.5)
    assert meter.read() is None
    meter.send(3, lr=0.25)
    interval = meter.read()
    assert interval is not None
    assert (interval.metrics, interval.step, interval.lr) == (Metrics(250, 0, 0, 4), 3, 0.25)


def test_large_sums_stay_exact() -> None:
    """float32 stops counting at 16.8 million; the meter does not."""
    meter = Meter(ALONE, batch_size=1, step=0)
    for _ in range(3):
        meter.add(torch.tensor([0.0, 2**24 - 1, 2**24 - 1, 2**24]))
    meter.send(1, lr=1)
    interval = meter.read()
    assert interval is not None
    assert interval.metrics.images == 3 * 2**24
    assert interval.metrics.top1 == 100 * (2**24 - 1) / 2**24


def test_rates(clock: Clock) -> None:
    meter = Meter(ALONE, batch_size=10, step=5)
    rates = []
    for step, seconds in ((7, 4.0), (10, 1.0), (20, 2.0)):
        clock.now += seconds
        meter.send(step, lr=1)
        interval = meter.read()
        assert interval is not None
        rates.append(interval.images_per_second)
    assert rates == [2 * 10 / 4, 3 * 10 / 1, 10 * 10 / 2]


def test_an_interval_ends_where_it_is_sent(clock: Clock) -> None:
    """Not where it is read, a step later."""
    meter = Meter(ALONE, batch_size=10, step=0)
    rates = []
    for step, seconds, until_read in ((2, 1.0, 3.0), (4, 2.0, 0.0)):
        clock.now += seconds
        meter.send(step, lr=1)
        clock.now += until_read
        interval = meter.read()
        assert interval is not None
        rates.append(interval.images_per_second)
    assert rates == [20 / 1, 20 / (3 + 2)]


def test_pauses_are_left_out_of_the_rate(clock: Clock) -> None:
    meter = Meter(ALONE, batch_size=10, step=0)
    clock.now += 1
    meter.send(1, lr=1)
    meter.read()
    with meter.left_out():
        clock.now += 60  # a validation
    clock.now += 2
    meter.send(5, lr=1)
    interval = meter.read()
    assert interval is not None and interval.images_per_second == 4 * 10 / 2


def test_no_time_has_passed(clock: Clock) -> None:
    meter = Meter(ALONE, batch_size=10, step=0)
    meter.send(5, lr=1)
    interval = meter.read()
    assert interval is not None and math.isfinite(interval.images_per_second)
