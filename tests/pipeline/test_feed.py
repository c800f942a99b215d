"""open_feed: the pixels of each split, and the number of workers that make them."""

from pathlib import Path

import pytest
import torch

from conf.compose import from_overrides
from conf.schema import Config
from pipeline import feed, machine
from pipeline.build import choose_decode_modes
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.feed import is_measured
from tests.pipeline.loaders import Files, opened
from tests.pipeline.test_fields import Noise, only


class Moded(FolderDataset):
    """Its samples can also be made with two workers, or with a core less."""

    modes = ("cpu", "gpu", "hybrid")

    def workers_in(self, mode: str, cores: int) -> int:
        return {"cpu": cores, "gpu": 2, "hybrid": cores - 1}[mode]


def small(*overrides: str) -> Config:
    return from_overrides(["data=fake", "data.image_size=24", "loader.batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("workers", "modes", "measured", "counts", "decoder"),
    [
        # active workers, processes, the most workers, slots
        ("auto", ["cpu"], True, (3, 3, 6, 24), "pillow"),
        ("auto", ["cpu", "gpu"], True, (3, 3, 6, 24), "pillow or gpu"),
        ("auto", ["cpu", "gpu"], False, (3, 3, 3, 15), "pillow"),
        ("auto", ["hybrid"], True, (2, 3, 4, 18), "hybrid"),
        ("auto", ["gpu"], False, (2, 3, 3, 15), "gpu"),  # all cores validate
        ("1", ["cpu", "gpu"], False, (1, 1, 1, 9), "pillow"),
        ("0", ["cpu"], False, (0, 0, 0, 4 + 1 + 2), "pillow"),
    ],
)
def test_workers(
    image_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
    modes: list[str],
    measured: bool,
    counts: tuple[int, ...],
    decoder: str,
) -> None:
    monkeypatch.setattr(machine, "cores_for_workers", lambda local_size: 3)
    monkeypatch.setattr(feed, "is_measured", lambda *_: measured)
    with opened(image_root, f"loader.workers={workers}", kind=Moded, modes=modes) as found:
        pool, slots = found.pool, found.train.loader.ring.slots
        assert (pool.active, len(pool.workers), found.max_workers, slots) == counts
        workers = "1 worker" if counts[0] == 1 else f"{counts[0]} workers"
        workers += " (to be measured)" if measured else ""
        assert found.console_line() == f"loader    {workers}, decoder {decoder}"


@pytest.mark.parametrize(
    ("workers", "files", "device", "cores", "measured"),
    [
        ("auto", Files(128), "cuda", 15, True),
        ("auto", Files(128), "cpu", 15, False),
        ("15", Files(128), "cuda", 15, False),
        ("auto", FakeDataset(128, 2, 24), "cuda", 15, False),
        ("auto", Noise(128, only("image", "mask")(24)), "cuda", 15, True),
        ("auto", Files(127), "cuda", 15, False),  # a short epoch
        ("auto", Files(128, 0.9), "cuda", 4, False),  # small files
        ("auto", Files(128, 0.9), "cuda", 3, True),
    ],
)
def test_when_it_is_measured(
    workers: str, files: Dataset, device: str, cores: int, measured: bool
) -> None:
    config = small(f"loader.workers={workers}")
    assert is_measured(config, files, torch.device(device), cores) == measured


def test_decoder_and_modes() -> None:
    plain, moded = Files(9), Files(9)
    moded.modes = ("cpu", "gpu", "hybrid")
    assert choose_decode_modes(small(), moded) == moded.modes
    for stored in moded.modes:  # a resumed run keeps its pixels
        assert choose_decode_modes(small(), moded, stored) == (stored,)
    assert choose_decode_modes(small("loader.decoder=pillow"), moded, "gpu") == ("cpu",)
    assert choose_decode_modes(small("loader.decoder=gpu"), moded, "cpu") == ("gpu",)
    assert choose_decode_modes(small(), plain, "gpu") == ("cpu",)


def test_validation_uses_all_workers(image_root: Path) -> None:
    """No process is started or ended for it. The modes of a dataset: tests/extras/gpu_decode."""
    with opened(image_root, workers=2) as feed:
        pool = feed.pool
        pool.activate(1)
        pids = pool.pids
        with feed.for_validation():
            assert pool.active == 2 and len(pids) == 2
        assert pool.active == 1 and pool.pids == pids
