"""One sample: number in, pixels and label out.

Journey of a batch, 2: (epoch, index) -> file bytes -> uint8 [S, S, 3] and a label. Runs in a worker.
"""

import hashlib
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np

from pipeline import decode
from pipeline.augment import Compose, sample_rng
from pipeline.gpu_decode.encoded import Encoded
from pipeline.gpu_decode.geometry import NeedsPixelsError, NotedPicture, open_noted
from pipeline.index import Index
from pipeline.shared import SharedArray


class Dataset(Protocol):
    """What a loader needs; also a map-style dataset for torch's own DataLoader."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """`load` for the epoch given to `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose augmentation `dataset[index]` draws; 0 until then.

        For torch's DataLoader: call it before each epoch's iteration, as with DistributedSampler. Running workers see it too.
        """

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        """uint8 [S, S, 3] and the label of one sample as epoch `epoch` sees it."""

    def name(self, index: int) -> str:
        """What to call a sample in a message: its path."""

    def mean_bytes(self) -> float:
        """Mean size of a sample's file; 0 when there are none."""


SHRUNK_SIDE = 352  # pixels: the short side that scripts/shrink.py leaves, for training on 224
LARGE_FILE = 80e3  # bytes, on average; ImageNet's own files have 111,000, those that scripts/shrink.py makes 62,000


class BadImageError(RuntimeError):
    """A file that cannot become a sample: names the path and the reason."""


class FolderDataset:
    """JPEG and other image files in class folders.

    Args:
        index: the sample table.
        transform: from `augment.build`.
        decoder: a name in `decode.DECODERS`.
        seed: of the augmentation.
    """

    def __init__(self, index: Index, transform: Compose, *, decoder: str = "pillow", seed: int = 0) -> None:
        self.index, self.transform, self.decoder, self.seed = index, transform, decoder, seed
        self._epoch = SharedArray((1,), np.int64)  # a DataLoader's persistent workers have copies of this object

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.load(int(self._epoch.array[0]), index)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.array[0] = epoch

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        """uint8 [S, S, 3] and the label.

        Raises:
            BadImageError: the file cannot be read, decoded or cropped; names it.
        """
        with self._blamed(index):
            picture = decode.open_picture(self._read(index), self.decoder)
            pixels = self.transform(picture, sample_rng(self.seed, epoch, index)).pixels()
        return pixels, int(self.index.labels.array[index])

    def load_encoded(self, epoch: int, index: int) -> Encoded | None:
        """The file, and the transforms with the same random numbers as in `load`.

        Returns None if the JPEG engines do not support the file or a transform needs pixels.

        Raises:
            BadImageError: the file cannot be read.
        """
        with self._blamed(index):
            data = self._read(index)
            picture = open_noted(data)
            if picture is None:
                return None
            try:
                noted = self.transform(picture, sample_rng(self.seed, epoch, index))
            except NeedsPixelsError:
                return None
            assert isinstance(noted, NotedPicture)
        return Encoded(data, picture.size, noted, int(self.index.labels.array[index]))

    def time_decoding(self, index: int, data: bytes) -> float:
        """Seconds of this thread's computing to make sample `index` of epoch 0, were `data` its file."""
        began = time.thread_time()
        self.transform(decode.open_picture(data, self.decoder), sample_rng(self.seed, 0, index)).pixels()
        return time.thread_time() - began

    def mean_bytes(self) -> float:
        """Mean size of the files, from a sample of them."""
        sizes = [size for size in self._sizes if size]
        return float(np.mean(sizes)) if sizes else 0.0

    def fingerprint(self) -> str:
        """Which samples these are, wherever the folder is: names, labels and the sizes of a sample of the files.

        The sizes distinguish copies of a dataset with the same names, such as one that scripts/shrink.py has made.
        """
        digest = hashlib.sha256(f"{self.index.fingerprint()} {self._sizes}".encode())
        return f"{len(self):,} images, SHA-256 {digest.hexdigest()[:16]}"

    @cached_property
    def _sizes(self) -> list[int]:
        """Bytes of up to 256 files spread over the split; 0 of those that are gone."""

        def size(path: str) -> int:
            try:
                return os.stat(path).st_size
            except FileNotFoundError:
                return 0

        places = np.linspace(0, len(self) - 1, min(len(self), 256)).astype(int)
        return [size(self.index.path(place)) for place in places]

    def _read(self, index: int) -> bytes:
        with open(self.index.path(index), "rb") as file:
            return file.read()

    @contextmanager
    def _blamed(self, index: int) -> Iterator[None]:
        """Turn whatever goes wrong into an error that names the file."""
        try:
            yield
        # Pillow's plugins raise many kinds of error on broken files (struct.error, IndexError, SyntaxError, ...).
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]  # tells a broken file from a mistake in a transform
            where = f"{os.path.basename(last.filename)}:{last.lineno}"
            raise BadImageError(f"{self.index.path(index)}: {describe(error)} ({where})") from error

    def name(self, index: int) -> str:
        return self.index.path(index)


class FakeDataset:
    """Made-up samples that cost next to nothing: to measure everything but reading and decoding.

    Args:
        num_samples: how many to pretend.
        num_classes: labels are index modulo this.
        size: side of the image, pixels.
    """

    def __init__(self, *, num_samples: int, num_classes: int, size: int) -> None:
        self.num_samples, self.num_classes = num_samples, num_classes
        # A few different images, so that a matrix product is not timed on constants.
        self._pixels = np.random.default_rng(0).integers(0, 256, (8, size, size, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.load(0, index)

    def set_epoch(self, epoch: int) -> None:
        """Every epoch has the same images."""

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        return self._pixels[index % len(self._pixels)], index % self.num_classes

    def name(self, index: int) -> str:
        return f"fake sample {index}"

    def mean_bytes(self) -> float:
        return 0.0


def describe(error: BaseException) -> str:
    text = re.sub(r" <_io.BytesIO object at 0x[0-9a-f]+>", "", str(error))  # Pillow's name for what has a path of ours
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
