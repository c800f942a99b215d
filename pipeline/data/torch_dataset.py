"""Any map-style dataset of PyTorch as a split of the training.

    python train.py data.source=mine:build data.root=/data

`data.source=module:function` names a function of the config section `data`. It returns (train, val)
or (train, val, classes), where a split is anything with `__len__` and `__getitem__`. With
data.val_fraction or data.val_fold, it returns (train, None).

A sample is (image, label), as torchvision's datasets return it, or a dict. The first sample sets
the names, dtypes and shapes of the fields. A field is processed by its name:

image...     a Pillow image, or uint8 or float in [0, 1]: an array [H, W, C] or a tensor [C, H, W].
             augment.train or augment.val is applied; all images of a sample get the same draws.
mask...      [H, W] or [H, W, C]; follows the crops, resizes and flips of `image`.
points...    float [N, 2] of (x, y) in pixels; follows them as well.
other names  a number or an array, which arrives in the batch unchanged.
"""

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from conf.errors import UnreadableError, UserError, describe
from conf.schema import Config, DataConfig
from pipeline.data.augment import Compose, sample_rng, seeded, transform_target
from pipeline.data.dataset import Dataset
from pipeline.data.decode import Picture, rgb_pixels
from pipeline.data.field import IMAGE, LABEL, Field
from pipeline.data.shared import SharedObject
from pipeline.data.splits import held_out, hold_out

MASK, POINTS = "mask", "points"
# A resize with a bicubic filter leaves [0, 1] a little; Normalize leaves it by more.
LOWEST, HIGHEST = -0.1, 1.1
NUM_PROBES = 16  # samples of a split that are part of its fingerprint
MAX_CHANNELS = 4  # [3, H, W] and [H, W, 3] are told apart by an axis of at most this length
Sample = dict[str, np.ndarray]


def torch_splits(
    found: Sequence[Any], config: Config, train: Compose, val: Compose
) -> tuple[Dataset, Dataset, tuple[str, ...]]:
    """Wrap the map-style datasets that the function in data.source has returned.

    `found`: (train, val) or (train, val, classes), where val is None with data.val_fraction.
    Raises UserError if they are not such datasets, or their classes are unknown.
    """
    data = config.data
    key = f"data.source={data.source}"
    if len(found) not in (2, 3):
        wrong = f"returns {len(found)} objects"
        raise UserError(key, wrong, "return (train, val) or (train, val, classes)")
    first, second, *names = found
    classes = classes_of(first)
    if names:
        classes = tuple(map(str, names[0]))
    if not classes:
        cure = "return (train, val, classes), or give the dataset an attribute `classes`"
        raise UserError(key, "the classes are unknown", cure)
    splits = SharedObject(divided(first, second, data, classes))
    options: dict[str, Any] = {
        "num_classes": len(classes),
        "seed": config.train.seed,
        "is_unit": (*data.mean, *data.std) != (0.0, 1.0),
        "key": key,
    }
    train_split = TorchDataset(splits, 0, train, **options)
    return train_split, TorchDataset(splits, 1, val, **options), classes


def divided(first: Any, second: Any, data: DataConfig, classes: Sequence[str]) -> tuple[Any, Any]:
    """Return both splits; with data.val_fraction or data.val_fold, hold samples out of the first.

    The same part of each class is held out, if the labels are known without loading the samples.
    """
    held = held_out(data)
    if held is None:
        if second is None:
            cure = "return two datasets, or set data.val_fraction=0.2"
            raise UserError(f"data.source={data.source}", "returns no validation split", cure)
        return first, second
    if second is not None:
        cure = "return (train, None), or omit this key"
        raise UserError(held.origin, "the function returns a validation split", cure)
    labels = labels_of(first)
    if labels is None:
        labels = np.zeros(len(first), np.int64)
        classes = ("all",)
    names = np.array([os.fsencode(sample_name(first, index)) for index in range(len(first))])
    train_rows, val_rows = hold_out(labels, names, classes, held)
    return Subset(first, train_rows.tolist()), Subset(first, val_rows.tolist())


class TorchDataset(Dataset):
    """A map-style dataset of PyTorch, and the transforms of its images.

    Random numbers that its `__getitem__` draws from the global generators of torch, NumPy and
    Python depend on (seed, epoch, index) only.

    Args:
        splits: the datasets of all splits; their arrays are shared with the workers.
        position: which of them this is.
        num_classes: labels are in [0, num_classes).
        seed: train.seed.
        is_unit: float images must be in [0, 1], because data.mean and data.std are for this range.
        key: config key=value that names the dataset, for messages.

    Raises UserError if it is not a map-style dataset, or the first sample has an invalid field.
    """

    def __init__(
        self,
        splits: SharedObject,
        position: int,
        transform: Compose,
        *,
        num_classes: int,
        seed: int = 0,
        is_unit: bool = True,
        key: str = "data.source",
    ) -> None:
        self.splits = splits
        self.position = position
        self.transform = transform
        self.seed = seed
        self.num_classes = num_classes
        self.is_unit = is_unit
        kind = type(self.samples).__name__
        if not hasattr(self.samples, "__getitem__") or not hasattr(self.samples, "__len__"):
            wrong = f"{kind} has no __getitem__ or no __len__"
            raise UserError(key, wrong, "return a map-style dataset for each split")
        if not len(self.samples):
            raise UserError(key, f"{kind} has no samples")
        first = self.read(0, sample_rng(seed, 0, 0))
        self.first = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        self._check(0, first)
        self._fields = {name: self._stated_field(name) for name in first}
        self.images = [name for name in first if name.startswith(IMAGE)]

    def _stated_field(self, name: str) -> Field:
        """Return the field of the batches, after the transforms."""
        field = self.first[name]
        size = self.transform.image_size
        if name.startswith(IMAGE):
            return Field(field.dtype, (size, size, field.shape[2]), image=True)
        if name.startswith(MASK):
            return Field(field.dtype, (size, size, *field.shape[2:]))
        return field

    @property
    def samples(self) -> Any:
        """The dataset of PyTorch."""
        return self.splits.value[self.position]

    @property
    def fields(self) -> Mapping[str, Field]:
        return self._fields

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int, rng: random.Random) -> Mapping[str, Any]:
        """Return a sample after the transforms.

        Raises UserError if it differs from the first one; UnreadableError for an OSError.
        """
        sample = self.read(index, rng)
        self._check(index, sample)
        seed = rng.getrandbits(64)  # the same draws for each image
        pictures = {}
        for name in self.images:
            pictures[name] = self.transform(Picture(sample[name]), random.Random(seed))
        for name, value in sample.items():
            if name in pictures:
                sample[name] = pictures[name].pixels()
            elif name.startswith((MASK, POINTS)):
                sample[name] = transform_target(value, pictures[IMAGE])
        return sample

    def read(self, index: int, rng: random.Random) -> Sample:
        """Return a sample before the transforms: its images are [H, W, C], uint8 or float32.

        Raises UserError if it is invalid, UnreadableError for an OSError.
        """
        try:
            with seeded(rng):
                sample = self.samples[index]
        except OSError as error:
            raise UnreadableError(f"{self.name(index)}: {describe(error)}") from error
        try:
            return arrays_of(sample)
        except (TypeError, ValueError) as error:
            raise UserError(self.name(index), str(error)) from None

    def _check(self, index: int, sample: Sample) -> None:
        """Raise UserError if a sample does not have the fields of the first one, or is invalid."""
        if sample.keys() != self.first.keys():
            wrong = f"has the fields {', '.join(sample)}"
            raise UserError(self.name(index), wrong, f"expected {', '.join(self.first)}")
        for name, value in sample.items():
            first = self.first[name]
            shape, expected = value.shape, first.shape
            if name.startswith((IMAGE, MASK)):  # their height and width may differ
                shape, expected = shape[2:], expected[2:]
            if value.dtype != first.dtype or shape != expected:
                wrong = f"{name} is {value.dtype} {list(value.shape)}"
                cure = f"the first sample has {first.dtype} {list(first.shape)}"
                raise UserError(self.name(index), wrong, cure)
            if name.startswith(IMAGE):
                self._check_range(index, name, value)
        if self.first.get("label") == LABEL and not 0 <= sample["label"] < self.num_classes:
            wrong = f"label {sample['label']} is not in [0, {self.num_classes})"
            cure = "number the classes from 0, or return the names of all"
            raise UserError(self.name(index), wrong, cure)

    def _check_range(self, index: int, name: str, image: np.ndarray) -> None:
        if image.dtype == np.uint8 or not self.is_unit:
            return
        low, high = float(image.min()), float(image.max())
        if not LOWEST <= low <= high <= HIGHEST:  # also NaN
            wrong = f"{name} has values from {low:.3g} to {high:.3g}, expected [0, 1]"
            cure = "remove Normalize from the dataset, or set data.mean=[0] data.std=[1]"
            raise UserError(self.name(index), wrong, cure)

    def name(self, index: int) -> str:
        return sample_name(self.samples, index)

    @cached_property
    def labels(self) -> np.ndarray | None:
        """Class indices, int64 [len], without loading all samples; None if that is impossible."""
        labels = labels_of(self.samples)
        if labels is None or self.first.get("label") != LABEL:
            return None
        for index, sample in self._probes.items():
            if sample["label"] != labels[index]:  # changed by a target_transform
                return None
        return labels

    @cached_property
    def _probes(self) -> dict[int, Sample]:
        """Copies of a few samples of the split by their index."""
        probes = {}
        for index in np.linspace(0, len(self) - 1, min(len(self), NUM_PROBES)).astype(int).tolist():
            sample = self.read(index, random.Random(index))
            # A view would keep the whole array of the dataset in memory.
            probes[index] = {name: value.copy() for name, value in sample.items()}
        return probes

    @cached_property
    def _varying(self) -> set[str]:
        """Fields whose values differ in a second read with the same random seeds."""
        varying = set()
        for index, sample in self._probes.items():
            again = self.read(index, random.Random(index))
            varying |= {name for name in sample if not np.array_equal(sample[name], again[name])}
        return varying

    def notes(self) -> list[str]:
        if not self._varying:
            return []
        kind = type(self.samples).__name__
        generators = "the global generators of torch, NumPy or Python"
        return [
            f"{kind} draws {', '.join(sorted(self._varying))} from its own random generator, so a "
            f"resumed run is not bitwise identical; use {generators}"
        ]

    def fingerprint(self) -> str:
        """Hash the labels and a few samples, except fields that differ in each read."""
        digest = hashlib.sha256()
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        for sample in self._probes.values():
            for name, value in sample.items():
                if name not in self._varying:
                    digest.update(name.encode() + value.tobytes())
        return f"{len(self):,} samples, SHA-256 {digest.hexdigest()[:16]}"


def arrays_of(sample: Any) -> Sample:
    """Return the fields of a sample as arrays. Raises TypeError or ValueError if one is invalid."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        image, label = sample
        sample = {IMAGE: image, "label": label}
    if not isinstance(sample, Mapping):
        found = type(sample).__name__
        raise TypeError(f"expected a sample (image, label) or a dict, got {found}")
    if IMAGE not in sample:
        raise TypeError(f"a sample has {', '.join(map(str, sample))}; rename one of them to image")
    return {str(name): _array_of(str(name), value) for name, value in sample.items()}


def _array_of(name: str, value: Any) -> np.ndarray:
    if name.startswith(IMAGE):
        return image_array(name, value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        expected = "expected a number, an array or a tensor; remove or encode it"
        raise TypeError(f"{name} is {type(value).__name__}; {expected}")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int64) if array.ndim == 0 else array


def image_array(name: str, value: Any) -> np.ndarray:
    """Return an image as uint8 or float32 [H, W, C]. Raises ValueError if it is not an image."""
    if isinstance(value, Image.Image):
        return rgb_pixels(value)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.dtype not in (np.uint8, np.float32):
        found = f"{name} is {array.dtype} {list(array.shape)}"
        raise ValueError(f"{found}; expected uint8 or float, [H, W, C] or a tensor [C, H, W]")
    # Planes come first in a tensor, unless only the last axis can be the channels.
    first = array.shape[0] <= MAX_CHANNELS
    last = array.shape[2] <= MAX_CHANNELS
    has_planes = first
    if first == last:
        has_planes = isinstance(value, Tensor)
    return array.transpose(1, 2, 0) if has_planes else array


def sample_name(samples: Any, index: int) -> str:
    """Return the path of a sample if its dataset has a list of them, else `Class[index]`."""
    while isinstance(samples, Subset):
        index = int(samples.indices[index])
        samples = samples.dataset
    pairs = pairs_of(samples)
    if pairs and isinstance(pairs[index][0], str | os.PathLike):
        return str(pairs[index][0])
    return f"{type(samples).__name__}[{index}]"


def pairs_of(samples: Any) -> Sequence[Any]:
    """Return the list of (path, label) of torchvision's datasets of files; () without one."""
    for name in ("samples", "_samples"):
        pairs = getattr(samples, name, ())
        if isinstance(pairs, list) and len(pairs) == len(samples) and len(pairs[0]) == 2:
            return pairs
    return ()


def hugging_face_label(samples: Any) -> Any:
    """Return the type of the label column of a Hugging Face dataset; None for other datasets."""
    features = getattr(samples, "features", None)
    return features.get("label") if isinstance(features, Mapping) else None


def labels_of(samples: Any) -> np.ndarray | None:
    """Return the class indices of a dataset, int64 [len], from its attributes; else None."""
    if isinstance(samples, Subset):
        labels = labels_of(samples.dataset)
        return None if labels is None else labels[np.asarray(samples.indices)]
    if hugging_face_label(samples):
        return np.asarray(samples.with_format("numpy")["label"][:], np.int64)
    found = [getattr(samples, name, None) for name in ("targets", "labels", "_labels")]
    found.append([pair[1] for pair in pairs_of(samples)])
    for values in found:
        with suppress(ValueError, TypeError):  # not an array
            labels = np.asarray(values)
            if labels.shape == (len(samples),) and labels.dtype.kind in "iu":
                return labels.astype(np.int64)
    return None


def classes_of(samples: Any) -> tuple[str, ...]:
    """Return the class names of a dataset, or the indices in its labels; () if both are unknown."""
    labels = labels_of(samples)
    while isinstance(samples, Subset):
        samples = samples.dataset
    names = getattr(samples, "classes", None)
    if names is None:
        names = getattr(hugging_face_label(samples), "names", None)
    if names is None and labels is not None:
        names = range(labels.max() + 1)
    # A class of torchvision's ImageNet is a tuple of synonyms.
    return tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names or ())
