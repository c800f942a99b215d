"""The table of datasets, and what a dataset of somebody's own must define."""

from pathlib import Path

import numpy as np
import pytest
import torch

from conf import cli
from conf.schema import Config, Data, UserError
from pipeline import build
from pipeline.augment import Compose
from pipeline.build import DATASETS, Splits, build_datasets
from pipeline.dataset import Dataset
from pipeline.feed import open_feed
from pipeline.loader_plan import choose_decoders
from tests.loader_plans import loader_plan, world_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


class Grey(Dataset):
    """Four required methods and nothing else."""

    def __init__(self, count: int, size: int | None) -> None:
        super().__init__()
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        return np.full((self.size, self.size, 3), 100 * epoch + index, np.uint8), index % 2

    def name(self, index: int) -> str:
        return f"grey {index}"

    def fingerprint(self) -> str:
        return f"{self.count} grey images"


def grey(data: Data, train: Compose, val: Compose, decoder: str, seed: int) -> Splits:
    return Grey(8, train.image_size), Grey(4, val.image_size), ("even", "odd")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(DATASETS, "fake", grey)
    return cli.load(["data=fake", "data.image_size=16", "loader.batch_size=4"])


def test_every_dataset_of_the_table_has_a_group() -> None:
    assert set(DATASETS) <= {path.stem for path in (ROOT / "conf" / "data").glob("*.yaml")}


@pytest.mark.parametrize("workers", [0, 2])
def test_own_dataset_needs_only_the_required_methods(config: Config, workers: int) -> None:
    datasets = build_datasets(config)
    datasets.prepare()
    assert (datasets.train_size, datasets.val.fingerprint()) == (16, "4 grey images")
    (decoder,), _ = choose_decoders(config, datasets.train, CPU)
    world = world_of(CPU)
    plan = loader_plan(config, datasets, world, workers=workers, decoder=decoder)
    with open_feed(config, datasets, plan, world) as feed:
        labels = [batch.labels.tolist() for batch in feed.val.batches(0, feed.val_batches)]
        assert labels == [[0, 1, 0, 1]]
        assert len(list(feed.train.batches(0, 4))) == 4


def test_own_dataset_has_the_epoch_that_is_set(config: Config) -> None:
    dataset = build_datasets(config).train
    assert dataset[3][0].max() == 3
    dataset.set_epoch(2)
    assert dataset[3][0].max() == 203


def test_dataset_without_an_entry_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(build.DATASETS, "fake")
    with pytest.raises(
        UserError, match=r"^data.source=fake: there is no such dataset; choose from "
    ):
        build_datasets(config)
