"""suspects.csv: images with a wrong label come first, for any number of ranks and restarts."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from engine.classification.suspects import FEWEST, SampleLosses
from engine.distributed import World
from engine.losses import OWN_SHARE, UNIT, image_losses
from engine.state import TrainState, untouched
from pipeline.dataset import FakeDataset
from tests.engine.plans import ALONE
from tests.results import same, stored
from tests.small_run import run

pytestmark = pytest.mark.usefixtures("own_logging", "toy_runs")

COLOURS = {"blue": (60, 60, 180), "green": (60, 180, 60), "red": (180, 60, 60)}
PER_CLASS, WRONG = 50, 3  # 2 % of the labels are wrong
# 150 images in batches of 10: 60 steps, of which the last 30 count.
EPOCHS = 4
OPTIONS = ["loader.batch_size=10", "loader.workers=0", "optim.lr=0.05", f"train.epochs={EPOCHS}"]
OPTIONS += [f"train.validate_every_epochs={EPOCHS}"]
CPU = torch.device("cpu")


def table_of(images: int, classes: int = 3, first_epoch: int = 1) -> SampleLosses:
    return SampleLosses(images, classes, first_epoch=first_epoch, device=CPU)


def each(*images: tuple[float, int, int]) -> Tensor:
    """(loss, counts, predicted class) of each image, as `image_losses` returns them."""
    rows = [[round(UNIT * loss * counts), counts, guess] for loss, counts, guess in images]
    return torch.tensor(rows, dtype=torch.int32)


def read(folder: Path) -> list[dict[str, str]]:
    with open(folder / "suspects.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy images of three colours; the wrong ones are named after their colour."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    names = sorted(COLOURS)
    for split, count in (("train", PER_CLASS), ("val", 4)):
        for place, name in enumerate(names):
            for number in range(count):
                wrong = split == "train" and number < WRONG // len(names)
                label = names[(place + 1) % len(names)] if wrong else name
                pixels = np.clip(rng.normal(COLOURS[name], 40, (40, 40, 3)), 0, 255)
                path = root / split / label / f"{'wrong-' * wrong}{name}-{number:03d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
    return root


@pytest.fixture(scope="module")
def trained(root: Path, tmp_path_factory: pytest.TempPathFactory, toy_runs: None) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(root, folder, *OPTIONS)
    return folder


def test_wrong_labels_come_first(trained: Path, root: Path) -> None:
    """Only the second half of the epochs counts."""
    counts = stored(trained)["losses"]["sums"][:, 1]
    assert counts.tolist() == [EPOCHS // 2] * (len(COLOURS) * PER_CLASS)
    rows = read(trained)
    assert len(rows) == FEWEST
    means = [float(row["mean_loss"]) for row in rows]
    assert means == sorted(means, reverse=True)
    found = [row for row in rows[:WRONG] if "wrong" in row["path"]]
    assert len(found) >= 0.8 * WRONG
    for row in found:
        path = Path(row["path"])
        assert path.is_file() and path.is_relative_to(root)
        assert row["label"] == path.parent.name
        assert row["predicted"] == path.name.split("-")[1]


def test_image_losses_by_hand() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    logs = logits.detach().double().log_softmax(1).numpy()
    exact = -logs[range(4), labels]
    found = image_losses(logits, labels, labels)
    assert found.dtype == torch.int32 and not found.requires_grad
    np.testing.assert_allclose(found[:, 0] / UNIT, exact, atol=0.51 / UNIT)
    assert found[:, 1].tolist() == [1] * 4
    assert found[:, 2].tolist() == logs.argmax(1).tolist()

    onehot = torch.nn.functional.one_hot(labels, 3).float()
    weights = torch.tensor([1.0, OWN_SHARE, OWN_SHARE - 0.01, 0.0])[:, None]
    mixed = image_losses(logits, weights * onehot + (1 - weights) * onehot.roll(-1, 0), labels)
    # The next image of the last one has the same label.
    assert mixed[:, 1].tolist() == [1, 1, 0, 1]
    assert torch.equal(mixed[:, 0], found[:, 0] * mixed[:, 1])


def test_table_by_hand() -> None:
    """The list has 2 % of the images, but at least 100; equal losses stay in order."""
    losses = table_of(5)
    assert losses.csv(FakeDataset(5, 3, 8), "abc") == ""
    losses.add(torch.tensor([[0, 0], [0, 1]]), each((9, 1, 1), (9, 1, 1)))  # before first_epoch
    # The same image twice in a batch: the end of an epoch and the beginning of the next.
    losses.add(torch.tensor([[2, 1], [1, 1], [1, 2]]), each((3, 1, 0), (1, 1, 2), (0.5, 1, 2)))
    losses.add(torch.tensor([[2, 3]]), each((7, 0, 0)))  # mixed
    assert losses.sums.tolist() == [[0, 0], [4 * UNIT, 2], [UNIT // 2, 1], [0, 0], [0, 0]]
    assert losses.latest.tolist() == [-1, 6, 5, -1, -1]

    names = ["a", "n01443537", "c"]
    rows = list(csv.reader(losses.csv(FakeDataset(5, 3, 8), names).splitlines()))
    assert rows == [
        ["path", "label", "mean_loss", "predicted", "label_name", "predicted_name"],
        ["fake sample 1", "n01443537", "2.000", "a", "goldfish", "a"],
        ["fake sample 2", "c", "0.500", "c", "c", "c"],
    ]

    losses = table_of(10_000, first_epoch=0)
    samples = torch.stack([torch.zeros(10_000), torch.arange(10_000)], 1).long()
    losses.add(samples, each((16, 1, 0)).expand(10_000, 3))
    lines = losses.csv(FakeDataset(10_000, 3, 8), "abc").splitlines()
    assert len(lines) == 1 + 200 and lines[1].startswith("fake sample 0,")
    for _ in range(100):  # an image that is seen 100,000 times
        losses.add(torch.zeros(1000, 2).long(), each((16, 1, 0)).expand(1000, 3))
    assert losses.sums[0, 0] > 0


def test_measured_steps_leave_no_trace() -> None:
    """loader.workers=auto trains on one batch again and again."""
    model, losses = torch.nn.Linear(2, 3), table_of(5)
    losses.add(torch.tensor([[1, 1]]), each((3, 1, 0)))
    before = {name: tensor.clone() for name, tensor in losses.state_dict().items()}
    with untouched(TrainState(model, torch.optim.SGD(model.parameters()), sample_losses=losses)):
        losses.add(torch.tensor([[2, 1]]), each((3, 1, 2)))
        assert not same(dict(losses.state_dict()), before)
    assert same(dict(losses.state_dict()), before)


def test_collect_keeps_the_sums_on_rank_0() -> None:
    losses = table_of(2, first_epoch=0)
    losses.add(torch.tensor([[0, 1]]), each((1, 1, 0)))
    losses.collect(ALONE)
    assert losses.sums.tolist() == [[0, 0], [UNIT, 1]]
    losses.keep_on_rank_0(World(rank=1, size=2, local_rank=1, local_size=2, device=CPU))
    assert losses.sums.sum() == 0


@pytest.mark.gpu
def test_the_same_sums_on_a_gpu() -> None:
    """Integers: atomic additions in any order give the same sums, and nothing synchronises."""
    torch.manual_seed(0)
    tables = [
        SampleLosses(50, 10, first_epoch=1, device=torch.device(device))
        for device in ("cpu", "cuda", "cuda")
    ]
    for step in range(20):
        logits, labels = torch.randn(256, 10), torch.randint(0, 10, (256,))
        samples = torch.stack([torch.randint(0, 3, (256,)), torch.randint(0, 50, (256,))], 1)
        found = image_losses(logits, labels, labels)
        for place, table in enumerate(tables):
            own, rows = samples.to(table.sums.device), found.to(table.sums.device)
            torch.use_deterministic_algorithms(place == 2)
            try:
                if step and place:
                    torch.cuda.set_sync_debug_mode("error")
                table.add(own, rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.use_deterministic_algorithms(False)
    for table in tables[1:]:
        assert torch.equal(table.sums.cpu(), tables[0].sums)
        assert torch.equal(table.latest.cpu(), tables[0].latest)
