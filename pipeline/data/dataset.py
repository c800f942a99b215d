"""Datasets, which map a sample index to named arrays.

Data flow, step 2: (epoch, index) -> file bytes -> {"image": uint8 [S, S, 3], "label": 7}, in a
worker. The buffers, the copy to the device and the training step's batch use the same names.

To add a dataset, write a function that returns a map-style PyTorch dataset for each split, and
name it in conf/data/NAME.yaml as `source: module:function` (pipeline/data/torch_dataset.py).
For image files with a number instead of a class, override `fields` and `targets` of
`FolderDataset`; a subclass of `Dataset` can do more (pipeline/data/build.py has examples).
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import chain
from random import Random
from typing import Any

import numpy as np

from conf.errors import UnreadableError, UserError, describe
from pipeline.data import decode
from pipeline.data.augment import Compose, sample_rng
from pipeline.data.decode import Picture
from pipeline.data.device_stage import DeviceStage
from pipeline.data.field import IMAGE, LABEL, Fields, image_field
from pipeline.data.index import Index
from pipeline.data.listing import THREADS

READ_AHEAD = 64  # maximum number of files that a worker reads concurrently
READERS = ThreadPoolExecutor(READ_AHEAD)  # starts threads on demand
NUM_FINGERPRINT_FILES = 256  # files per split whose sizes are part of its fingerprint
NUM_NOTES_FILES = 32  # files that `notes` inspects
Sample = Mapping[str, Any]  # field name -> array or number


class Dataset(ABC):
    """One split; also a map-style dataset for torch's own DataLoader.

    Subclasses must define `fields`, `__len__`, `load`, `name` and `fingerprint`. Overriding the
    other methods and attributes is optional.
    """

    @property
    @abstractmethod
    def fields(self) -> Fields:
        """A sample's arrays by name, including IMAGE, in the form the training step gets them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, index: int, rng: Random) -> Sample:
        """Return a sample: an array or a number for each of `fields`.

        `rng`: generator for this sample and epoch, the only source of randomness.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a sample's name for messages, such as its path."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Identify the samples, wherever they are stored; a run resumes only if it is the same."""

    seed: int = 0  # train.seed, for `sample_rng`
    epoch = 0  # epoch of `dataset[index]`: set it before each epoch of torch's DataLoader

    def __getitem__(self, index: int) -> Sample:
        return self.load(index, sample_rng(self.seed, self.epoch, index))

    decoder = "none"  # CPU decoder that the workers use
    stage: DeviceStage = DeviceStage()  # data.on_device selects a different one for training

    @property
    def labels(self) -> np.ndarray | None:
        """Class indices of all samples, int64 [len]; None if unknown without loading samples."""
        return None

    def replacements(self, index: int) -> Iterator[int]:
        """Yield the samples to try instead of an unreadable one (data.on_error=skip), in order.

        These are the rest of its class, from the next sample on, then from the first. They do not
        depend on what other workers have tried, so the number of workers does not matter.
        """
        labels = np.zeros(len(self)) if self.labels is None else self.labels
        same = np.flatnonzero(labels == labels[index])
        position = int(np.searchsorted(same, index))
        yield from map(int, chain(same[position + 1 :], same[:position]))  # lazy, as few are used

    def read_ahead(self, indices: Sequence[int]) -> None:  # noqa: B027 - few datasets have files
        """Start reading the files of these samples, because the worker waits for storage."""

    def mean_bytes(self) -> float:
        """Return the mean file size in bytes; 0 if there are no files."""
        return 0.0

    def notes(self) -> list[str]:
        """Return remarks about the files to show the user before training."""
        return []


def check_label(dataset: Dataset, index: int, label: Any, num_classes: int) -> None:
    """Raise UserError with the sample's name unless its label is a class index."""
    if not 0 <= label < num_classes:
        problem = f"label {label} is not in [0, {num_classes})"
        fix = "use class indices from 0, or return all class names"
        raise UserError(dataset.name(index), problem, fix)


@dataclass(eq=False)
class FolderDataset(Dataset):
    """Image files in folders, tar files or lists. Raises UserError if the decoder is missing."""

    index: Index
    transform: Compose
    _: KW_ONLY
    decoder: str = "pillow"  # loader.decoder; values that are not CPU decoders select one
    seed: int = 0
    exif_orientation: bool = False  # rotate the images upright

    def __post_init__(self) -> None:
        self.decoder = decode.resolve(self.decoder)
        self._pending: dict[int, Future[bytes]] = {}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def fields(self) -> Fields:
        return {IMAGE: image_field(self.transform.image_size), "label": LABEL}

    def load(self, index: int, rng: Random) -> Sample:
        """Read, decode and augment a sample.

        Raises UnreadableError with the sample's name if the file cannot be read or decoded. Errors
        in a transform propagate unchanged.
        """
        try:
            picture = self.transform(self.open(index), rng)
            picture, drawn = self.stage.draw(picture, rng)
            targets = self.targets(index, picture)
            return {**self.stage.image_fields(picture), **drawn, **targets}
        except UnreadableError as error:
            raise UnreadableError(f"{self.name(index)}: {error}") from error

    def open(self, index: int) -> Picture:
        """Read a file's header; subclasses may create the picture differently.

        Raises UnreadableError if the file cannot be read.
        """
        content = self.read(index)
        return decode.open_picture(content, self.decoder, exif_orientation=self.exif_orientation)

    def targets(self, index: int, picture: Picture) -> dict[str, Any]:
        """Return a sample's fields except its image, which may be decoded later.

        `picture`: the transformed image, so that a mask can follow it; see
        `augment.transform_target`. Raises UnreadableError if a file cannot be read.
        """
        return {"label": self.index.labels.array[index]}

    def read(self, index: int) -> bytes:
        """Return a file's content. Raises UnreadableError if it cannot be read."""
        pending = self._pending.pop(index, None)
        try:
            return self.index.read(index) if pending is None else pending.result()
        except OSError as error:
            raise UnreadableError(describe(error)) from error

    def read_ahead(self, indices: Sequence[int]) -> None:
        earlier = self._pending
        self._pending = {}
        for index in indices:
            self._pending[index] = earlier.get(index) or READERS.submit(self.index.read, index)

    def name(self, index: int) -> str:
        return self.index.path(index)

    @property
    def labels(self) -> np.ndarray | None:
        return self.index.labels.array if self.fields.get("label") == LABEL else None

    def mean_bytes(self) -> float:
        """Estimate the mean file size in bytes from a sample of the files."""
        return float(np.mean(self._sizes))

    def notes(self) -> list[str]:
        unsupported = self._sample_files(NUM_NOTES_FILES, decode.unsupported_features)
        counts = Counter(chain.from_iterable(unsupported))
        sampled = f"of {len(unsupported)} images checked"
        return [f"{count} {sampled} have {feature}" for feature, count in counts.items()]

    def fingerprint(self) -> str:
        """Hash all names and labels, and some sizes, because smaller copies may keep the names."""
        table = f"{self.index.digest} {self._sizes}"
        return f"{len(self):,} images, SHA-256 {hashlib.sha256(table.encode()).hexdigest()[:16]}"

    @cached_property
    def _sizes(self) -> list[int]:
        """Size in bytes of up to NUM_FINGERPRINT_FILES files; 0 if one cannot be read."""
        return self._sample_files(NUM_FINGERPRINT_FILES, len)

    def _sample_files(self, number: int, function: Callable[[bytes], Any]) -> list[Any]:
        """Call a function with the content of up to `number` files, or b"" for unreadable ones."""

        def call(row: int) -> Any:
            content = b""
            with suppress(OSError):
                content = self.index.read(row)
            return function(content)

        rows = np.linspace(0, len(self) - 1, min(len(self), number), dtype=int).tolist()
        with ThreadPoolExecutor(THREADS) as pool:  # network storage takes milliseconds per file
            return list(pool.map(call, rows))


def calls_stage(dataset: Any) -> bool:
    """Return whether `load` passes RGB images to `stage`, as FolderDataset.load does."""
    is_inherited = type(dataset).load is FolderDataset.load
    return is_inherited and dataset.fields[IMAGE] == image_field(dataset.transform.image_size)


class FakeDataset(Dataset):
    """Synthetic samples that cost nearly nothing, for benchmarks without reading and decoding.

    A sample's label is its index modulo `num_classes`. `size`: image height and width in pixels.
    """

    def __init__(self, num_samples: int, num_classes: int, size: int) -> None:
        self.num_samples = num_samples
        self.num_classes = num_classes
        # Use a few different images, so that benchmarks do not time a matrix product on constants.
        self._pixels = np.random.default_rng(0).integers(0, 256, (8, size, size, 3), np.uint8)

    @property
    def fields(self) -> Fields:
        return {IMAGE: image_field(self._pixels.shape[1]), "label": LABEL}

    def __len__(self) -> int:
        return self.num_samples

    def load(self, index: int, rng: Random) -> Sample:
        return {IMAGE: self._pixels[index % len(self._pixels)], "label": index % self.num_classes}

    def name(self, index: int) -> str:
        return f"fake sample {index}"

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.num_samples) % self.num_classes

    def fingerprint(self) -> str:
        return f"{len(self)} fake images"
