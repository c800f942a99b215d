"""One sample: number in, pixels and label out.

Journey of a batch, 2: (epoch, index) -> file bytes -> uint8 [S, S, 3] and a label, in a worker.

To add a dataset, write a subclass of `Dataset`, a function that builds both splits for the table in
pipeline/build.py, and conf/data/NAME.yaml.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from conf.schema import MAX_PIXELS, UserError
from pipeline import decode
from pipeline.augment import Compose, Operation, apply_operations, sample_rng
from pipeline.decode import Picture, UnreadableError, describe
from pipeline.index import THREADS, Index
from pipeline.shared import SharedArray

SAMPLED, END_BYTES = 256, 4096  # files of a split whose ends are part of its fingerprint


class BadImageError(RuntimeError):
    """A file that cannot be read or decoded: names the path and the reason."""


class Dataset(ABC):
    """One split; also a map-style dataset for torch's own DataLoader.

    A subclass calls `super().__init__()` and defines `__len__`, `load`, `name` and `fingerprint`;
    the other methods and attributes are for what it can do beyond that.
    """

    def __init__(self) -> None:
        # Shared: the persistent workers of a DataLoader have copies of this object.
        self._epoch = SharedArray((1,), np.int64)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        """Return the pixels, uint8 [S, S, 3], and the label of a sample in epoch `epoch`."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample for messages, such as its path."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Identify the samples, wherever they are stored; a run resumes only if it is the same."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Return `load` for the epoch given to `set_epoch`."""
        return self.load(int(self._epoch.array[0]), index)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of `dataset[index]`, 0 at first.

        Call it before each epoch of torch's DataLoader, as with DistributedSampler. Running workers
        see the change.
        """
        self._epoch.array[0] = epoch

    @property
    def operations(self) -> int:
        """Number of random operations of each sample that `load_for_gpu` leaves to the GPU."""
        return 0

    @property
    def labels(self) -> np.ndarray | None:
        """Labels of all samples, int64 [len]; None if they are not known without loading."""
        return None

    def label(self, index: int) -> int:
        """Return the label of a sample."""
        return self.load(0, index)[1] if self.labels is None else int(self.labels[index])

    def replacements(self, index: int) -> Iterator[int]:
        """Yield the samples to try in place of an unreadable one (data.on_error=skip), in order.

        The others of its class: those behind it, then those from the first. They do not depend on
        what other workers have tried, so the result does not depend on the number of workers.
        """
        labels = np.zeros(len(self)) if self.labels is None else self.labels
        same = np.flatnonzero(labels == labels[index])
        place = int(np.searchsorted(same, index))
        yield from [*same[place + 1 :].tolist(), *same[:place].tolist()]

    def class_counts(self, num_classes: int) -> list[int]:
        """Return the number of samples of each class."""
        if self.labels is None:
            raise UserError(
                "train.class_weights: this dataset knows labels only after loading; leave it out, "
                "or define `labels` in its class"
            )
        return np.bincount(self.labels, minlength=num_classes).tolist()

    def load_for_gpu(self, epoch: int, index: int) -> tuple[np.ndarray, int, list[Operation]]:
        """Return the pixels before the random operations, the label, and these operations."""
        raise NotImplementedError

    def with_transform(self, transform: Compose) -> "Dataset":
        """Return a dataset of the same samples with other transforms, for data.sizes."""
        raise UserError(
            "data.sizes: this dataset makes images of one size only; leave it out, or define "
            "`with_transform` in its class"
        )

    def mean_bytes(self) -> float:
        """Return the mean file size in bytes; 0 if there are no files."""
        return 0.0

    def prepare(self) -> None:  # noqa: B027 - most datasets have nothing to create
        """Create the files if they are missing; called once the rest of the config is checked."""


class FolderDataset(Dataset):
    """JPEG and other image files in class folders, containers or lists.

    Args:
        index: the sample table.
        transform: from `augment.build`.
        decoder: a name in `decode.DECODERS`, or auto.
        seed: seed of the augmentation.
        max_pixels: larger images are unreadable.

    Raises:
        UserError: the decoder is not installed.
    """

    def __init__(
        self,
        index: Index,
        transform: Compose,
        *,
        decoder: str = "pillow",
        seed: int = 0,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        super().__init__()
        self.index = index
        self.transform = transform
        self.decoder = decode.resolve(decoder)
        self.seed = seed
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.index)

    @property
    def operations(self) -> int:
        return self.transform.operations

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        """Read, decode and augment a sample.

        Raises:
            BadImageError: the file cannot be read or decoded; not for an error of a transform.
        """
        pixels, label, operations = self.load_for_gpu(epoch, index)
        return apply_operations(Picture(pixels), operations).pixels(), label

    def load_for_gpu(self, epoch: int, index: int) -> tuple[np.ndarray, int, list[Operation]]:
        data = self.read(index)
        try:
            picture = decode.open_picture(data, self.decoder, self.max_pixels)
            rng = sample_rng(self.seed, epoch, index)
            picture, operations = self.transform.sample(picture, rng)
            return picture.pixels(), self.label(index), operations
        except UnreadableError as error:
            raise BadImageError(f"{self.name(index)}: {error}") from error

    def read(self, index: int) -> bytes:
        """Return the content of a file.

        Raises:
            BadImageError: it cannot be read.
        """
        try:
            return self.index.read(index)
        except OSError as error:
            raise BadImageError(f"{self.name(index)}: {describe(error)}") from error

    def name(self, index: int) -> str:
        return self.index.path(index)

    @property
    def labels(self) -> np.ndarray:
        return self.index.labels.array

    def with_transform(self, transform: Compose) -> Dataset:
        other = copy.copy(self)  # shares the sample table
        other.transform = transform
        return other

    def mean_bytes(self) -> float:
        """Estimate the mean file size in bytes from a sample of the files."""
        sizes = [size for size, _ in self._sampled if size]
        return float(np.mean(sizes)) if sizes else 0.0

    def fingerprint(self) -> str:
        """Hash the names and labels of all files, and sizes and content of a sample of them.

        The sizes distinguish copies with the same names, such as smaller ones; the content, files
        that were replaced in place.
        """
        sizes, digests = [size for size, _ in self._sampled], [each for _, each in self._sampled]
        names = hashlib.sha256(f"{self._table} {sizes}".encode()).hexdigest()[:16]
        content = hashlib.sha256(b"".join(digests)).hexdigest()[:12]
        return f"{len(self):,} images, SHA-256 {names}, content {content}"

    @cached_property  # a start asks several times; ImageNet's table has tens of megabytes
    def _table(self) -> str:
        return self.index.fingerprint()

    @cached_property
    def _sampled(self) -> list[tuple[int, bytes]]:
        """Size in bytes, and a hash of the first and last bytes, of up to SAMPLED files."""
        rows = np.linspace(0, len(self) - 1, min(len(self), SAMPLED)).astype(int).tolist()
        with ThreadPoolExecutor(THREADS) as pool:  # network storage takes milliseconds for each
            return list(pool.map(self._size_and_digest, rows))

    def _size_and_digest(self, row: int) -> tuple[int, bytes]:
        try:
            data = self.index.read(row)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            data = b""
        except OSError as error:  # may be over at the next start, which must get the same hash
            raise UserError(
                f"{self.name(row)}: cannot be read ({error.strerror or error}), so the images "
                "cannot be identified; repair the storage, then start again"
            ) from error
        is_whole = len(data) <= 2 * END_BYTES
        ends = data if is_whole else data[:END_BYTES] + data[-END_BYTES:]
        return len(data), hashlib.sha256(ends).digest()


class FakeDataset(Dataset):
    """Synthetic samples that cost nearly nothing, to measure everything but reading and decoding.

    Args:
        num_samples: length of the dataset.
        num_classes: the label of a sample is its index modulo this.
        size: side of the image in pixels.
    """

    def __init__(self, num_samples: int, num_classes: int, size: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.num_classes = num_classes
        self._labels = SharedArray.copy_of(np.arange(num_samples) % num_classes)
        # A few different images, so that a matrix product is not timed on constants.
        rng = np.random.default_rng(0)
        self._pixels = rng.integers(0, 256, (8, size, size, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        return self._pixels[index % len(self._pixels)], index % self.num_classes

    def name(self, index: int) -> str:
        return f"fake sample {index}"

    @property
    def labels(self) -> np.ndarray:
        return self._labels.array

    def fingerprint(self) -> str:
        return f"{len(self)} fake images"

    def with_transform(self, transform: Compose) -> Dataset:
        return FakeDataset(self.num_samples, self.num_classes, transform.image_size)
