"""Folder samples for other training loops, their fingerprint, and storage errors."""

import errno
import hashlib
import itertools
import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from PIL import Image

from conf.errors import UnreadableError
from pipeline.data import index as module
from pipeline.data.augment import Compose
from pipeline.data.class_names import imagenet_names, readable
from pipeline.data.dataset import FolderDataset
from pipeline.data.index import ImageFolder, load_index
from tests.helpers.stored import as_tar
from tests.pipeline.loaders import crops, loaded
from tests.reliability.odd_images import DEEP, drawn, encoded


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_folder_dataset_in_torch_data_loader(image_root):
    """Load as rank 1 of 2, with workers that are restarted in each epoch."""
    from torch.utils.data import DataLoader, DistributedSampler

    dataset = crops(image_root / "train")
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, 5, sampler=sampler, **workers)
    seen = set()
    for epoch in (0, 1, 7):
        dataset.epoch = epoch
        sampler.set_epoch(epoch)
        batches = list(loader)
        expected = loaded(dataset, np.array([(epoch, index) for index in sampler]))
        for name in ("image", "label"):
            assert torch.equal(torch.cat([batch[name] for batch in batches]), expected[name])
        seen |= {image.numpy().tobytes() for image in expected["image"]}
    assert len(seen) == 3 * 18  # no two are the same


def test_fingerprint_depends_on_sizes(train_copy):
    """The fingerprint does not depend on mtimes or on the storage (test_listing.py)."""
    before = crops(train_copy).fingerprint()
    path = Path(crops(train_copy).name(7))
    good = path.read_bytes()
    for changed in (good + b"0", good[:-1], b""):
        path.write_bytes(changed)
        assert crops(train_copy).fingerprint() != before
    path.unlink()
    assert crops(train_copy).fingerprint() != before
    path.write_bytes(good)
    os.utime(path, (10**9, 10**9))
    assert crops(train_copy).fingerprint() == before


def test_fingerprint_equals_earlier_versions(tmp_path):
    """Otherwise, checkpoints could not be resumed. The test also uses a subset of the rows."""
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/é.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 2000)
    index = load_index(tmp_path, key="data").rows(np.arange(3))
    assert FolderDataset(index, Compose([])).fingerprint() == "3 images, SHA-256 1e74bae3ba096f6a"


def test_folder_dataset_notes(tmp_path):
    """Notes count each image by its own kind, because a folder may mix scanners."""
    gray = np.asarray(drawn("L")).astype(np.uint16)
    clear = drawn("RGBA").copy()
    clear.putalpha(254)
    several = {"save_all": True, "append_images": [drawn("L").convert("RGB")]}
    files = [
        encoded(Image.fromarray(gray * 16), "PNG"),  # 12 bits
        DEEP.read_bytes(),
        encoded(Image.fromarray(gray * 16), "TIFF", compression="tiff_deflate"),
        encoded(Image.fromarray(gray * 257), "PNG"),  # 8 bits
        encoded(clear, "PNG"),
        encoded(drawn("P"), "PNG", transparency=bytes(256)),
        encoded(drawn("RGBA"), "PNG"),  # opaque
        encoded(drawn(), "TIFF", **several),
        encoded(drawn(), "WEBP", **several),
        encoded(drawn(), "MPO", **several),  # a photo with a preview
        b"",
    ]
    (tmp_path / "a").mkdir()
    for number, content in enumerate(files):
        (tmp_path / "a" / f"{number}.png").write_bytes(content)
    dataset = FolderDataset(load_index(tmp_path, key="data"), Compose([]))
    pages, clear_pixels, deep = sorted(dataset.notes())
    assert pages.startswith("2 of 11 images checked have several pages or frames")
    assert clear_pixels.startswith("2 of 11 images checked have transparent pixels")
    assert deep.startswith("3 of 11 images checked have 16-bit levels")


def test_read_retries_transient_errors(image_root, monkeypatch):
    monkeypatch.setattr(module, "PAUSES", (0.001, 0.001, 0.001))
    dataset, read = crops(image_root / "train"), Mock()
    monkeypatch.setattr(ImageFolder, "read", read)
    for number in (errno.EIO, errno.ETIMEDOUT, errno.ESTALE):
        error = OSError(number, os.strerror(number))
        read.side_effect = [error, error, error, b"content"]
        assert dataset.read(0) == b"content"
    for number, tries in ((errno.EIO, 4), (errno.EACCES, 1)):
        error = OSError(number, os.strerror(number))
        read.side_effect = [*[error] * tries, b"content"]
        with pytest.raises(UnreadableError, match=error.strerror):
            dataset.read(0)


def test_read_reopens_stale_tar(image_root, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSES", (0.001,))
    as_tar(image_root / "train", tmp_path / "packed.tar")
    dataset = crops(tmp_path / "packed")
    good, stale = dataset.read(0), OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    effects = itertools.chain([stale], itertools.repeat(DEFAULT))  # DEFAULT calls os.pread
    monkeypatch.setattr(os, "pread", Mock(wraps=os.pread, side_effect=effects))
    tar = dataset.index.sources[0]
    first = module._opened(tar)
    assert dataset.read(0) == good
    assert module._opened(tar) is not first


def test_imagenet_names():
    """IDs are those of ImageNet-1k, in the label order of published weights."""
    names = imagenet_names()
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()
    assert digest == "791ce0333040dd249d13133f90d28ef0263ffc01e5de0afd85b3e32048d7d456"
    from torchvision.models import ResNet18_Weights

    assert list(names.values()) == ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    assert (readable("n02510455"), readable("n0144353")) == ("giant panda", "n0144353")
