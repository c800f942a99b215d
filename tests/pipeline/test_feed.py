"""open_feed: the pixels of each split, and the number of workers that make them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf import cli
from pipeline import feed as feed_module
from pipeline.build import build_datasets
from pipeline.decode import installed
from pipeline.feed import Feed, open_feed
from pipeline.gpu_decode.decoder import EngineUpload
from tests.loader_plans import loader_plan, world_of

CPU = torch.device("cpu")


@contextmanager
def opened(
    image_root: Path,
    decoder: str,
    *,
    device: torch.device = CPU,
    workers: int = 1,
    ceiling: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Feed]:
    config = cli.load(
        [
            f"data.root={image_root}",
            "augment=demo",
            "loader.batch_size=6",
            "loader.start_method=fork",
            f"loader.decoder={decoder}",
        ]
    )
    datasets, world = build_datasets(config), world_of(device)
    plan = loader_plan(
        config, datasets, world, workers=workers, ceiling=ceiling, decoder=decoder, dtype=dtype
    )
    with open_feed(config, datasets, plan, world) as feed:
        yield feed


def validation(feed: Feed) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of every validation batch, on the host."""
    return [
        (batch.images.cpu(), batch.labels.cpu()) for batch in feed.val.batches(0, feed.val_batches)
    ]


def assert_equal(ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> None:
    assert len(ours) == len(theirs) == 3
    for pair, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(pair, other, strict=True))


class NoEngines:
    """Stands in for GpuDecoder where there is no GPU."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        pass

    def make_batch(self, *args: Any) -> None:
        raise AssertionError("the CPU decodes validation images")


@pytest.mark.parametrize("decoder", ["gpu", "hybrid"])
def test_validation_does_not_use_the_engines(
    monkeypatch: pytest.MonkeyPatch, image_root: Path, decoder: str
) -> None:
    monkeypatch.setattr(feed_module, "GpuDecoder", NoEngines)
    with opened(image_root, installed()[0]) as plain, opened(image_root, decoder) as engines:
        assert isinstance(engines.train.upload, EngineUpload)
        assert_equal(validation(engines), validation(plain))
        # hybrid balances by the rate of the workers on training images only
        train, val = engines.train.loader.pool.decode_seconds
        assert train.count == 0 and val.count > 0


@pytest.mark.parametrize(("decoder", "during"), [("gpu", 3), ("hybrid", 3), ("pillow", 1)])
def test_validation_with_engines_uses_all_workers(
    monkeypatch: pytest.MonkeyPatch, image_root: Path, decoder: str, during: int
) -> None:
    monkeypatch.setattr(feed_module, "GpuDecoder", NoEngines)
    with opened(image_root, decoder, workers=1, ceiling=3) as feed:
        pool = feed.train.loader.pool
        reader = pool.pids
        for _ in range(2):
            with feed.for_validation():
                assert len(pool.workers) == during
                validation(feed)
            assert pool.pids == reader


@pytest.mark.parametrize("ceiling", [0, 2])
def test_validation_never_has_fewer_workers(
    monkeypatch: pytest.MonkeyPatch, image_root: Path, ceiling: int
) -> None:
    monkeypatch.setattr(feed_module, "GpuDecoder", NoEngines)
    for workers in (0, 3):
        with (
            opened(image_root, "gpu", workers=workers, ceiling=workers and ceiling) as feed,
            feed.for_validation(),
        ):
            assert len(feed.train.loader.pool.workers) == workers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_decoders_validate_with_the_same_pixels(image_root: Path, dtype: torch.dtype) -> None:
    """Bit for bit, also while the engines decode training batches."""
    device = torch.device("cuda", 0)
    found = {}
    for decoder in [*installed(), "gpu", "hybrid"]:
        with opened(image_root, decoder, device=device, workers=2, ceiling=4, dtype=dtype) as feed:
            training = feed.train.batches(0, 20)
            next(training)
            with feed.train.pause(), feed.for_validation():
                found[decoder] = validation(feed)
            assert len(list(training)) == 19
    for batches in found.values():
        assert_equal(batches, found["pillow"])
