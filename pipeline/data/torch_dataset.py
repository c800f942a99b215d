"""Map-style PyTorch datasets as training and validation splits.

    python train.py data.source=mine:build data.root=/data

`data.source=module:function` names a function of the config section `data`. It returns (train, val)
or (train, val, classes), where a split is any object with `__len__` and `__getitem__`. With
data.val_fraction or data.val_fold, it returns (train, None).

A sample is (image, label), as in torchvision's datasets, or a dict. The first sample determines
the names, dtypes and shapes of the fields. A field is processed according to its name:

image...     a Pillow image, or uint8 or float in [0, 1]: an array [H, W, C] or a tensor [C, H, W].
             augment.train or augment.val is applied; all images in a sample get the same draws.
mask...      [H, W] or [H, W, C]; follows the crops, resizes and flips of `image`.
points...    float [N, 2] of (x, y) in pixels; follows them as well.
other names  a number or an array, which is added to the batch unchanged.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from random import Random
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
from pipeline.data.field import IMAGE, LABEL, TARGET, Field, Fields
from pipeline.data.shared import SharedObject
from pipeline.data.splits import held_out, hold_out

MASK, POINTS = "mask", "points"
# A bicubic resize overshoots [0, 1] slightly; Normalize exceeds it by more.
LOWEST, HIGHEST = -0.2, 1.2
MAX_CHANNELS = 4  # an axis of at most this length holds the channels of [3, H, W] or [H, W, 3]
Sample = dict[str, np.ndarray]


def torch_splits(
    found: Any, config: Config, train: Compose, val: Compose
) -> tuple[Dataset, Dataset, tuple[str, ...]]:
    """Wrap the map-style datasets that the function in data.source has returned.

    `found`: (train, val) or (train, val, classes), where val is None with data.val_fraction.
    Raises UserError if they are not such datasets, or if their classes are unknown.
    """
    data = config.data
    key = f"data.source={data.source}"
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        problem = f"returns an object of type {type(found).__name__}"
        raise UserError(key, problem, "return (train, val) or (train, val, classes)")
    first, second, given = [*found, None][:3]
    classes = class_names(classes_of(first) if given is None else given)
    if not classes:
        fix = "return (train, val, classes), or set the attribute `classes` of the dataset"
        raise UserError(key, "the classes are unknown", fix)
    if len(set(classes)) < len(classes):
        raise UserError(key, "several classes have the same name", "rename them")
    val_names = classes_of(second)  # a number if only its labels are known
    is_named = given is None and isinstance(val_names, list | tuple)
    if is_named and class_names(val_names) not in ((), classes):
        problem = "the classes of the validation dataset differ from those of the training dataset"
        raise UserError(key, problem, "use the same classes in the same order in both")
    splits = SharedObject(divided(first, second, data, classes))
    is_unit = ({*data.mean}, {*data.std}) != ({0}, {1})
    create = partial(TorchDataset, splits, seed=config.train.seed, is_unit=is_unit, key=key)
    return create(0, train), create(1, val), classes


def divided(first: Any, second: Any, data: DataConfig, classes: Sequence[str]) -> tuple[Any, Any]:
    """Return both splits; with data.val_fraction or data.val_fold, hold samples out of the first.

    Holds out the same fraction of each class if the labels are known without loading samples.
    """
    held = held_out(data)
    if held is None:
        return first, second
    if second is not None:
        fix = "return (train, None), or omit this key"
        raise UserError(held.origin, "the function returns a validation split", fix)
    check_map_style(first, f"data.source={data.source}")
    labels = labels_of(first)
    if labels is None or (labels // len(classes)).any():  # outside the classes
        labels = np.zeros(len(first), np.int64)
        classes = ("all",)
    names = np.array([os.fsencode(sample_name(first, index)) for index in range(len(first))])
    train_rows, val_rows = hold_out(labels, names, classes, held)
    return Subset(first, train_rows.tolist()), Subset(first, val_rows.tolist())


@dataclass(eq=False)
class TorchDataset(Dataset):
    """Apply a split's transforms to a map-style dataset.

    Random numbers that its `__getitem__` draws from the global generators of torch, NumPy and
    Python depend only on (seed, epoch, index). Raises UserError if it is not a map-style dataset,
    or if a field of the first sample is invalid.
    """

    splits: SharedObject  # datasets for all splits; the workers share their arrays
    position: int  # index of this split in `splits`
    transform: Compose
    _: KW_ONLY
    seed: int = 0
    is_unit: bool = True  # float images must be in [0, 1], the range of data.mean and data.std
    key: str = "data.source"  # config key=value that names the dataset, for messages

    def __post_init__(self) -> None:
        check_map_style(self.samples, self.key)
        try:
            first = self.read(0, sample_rng(self.seed, 0, 0))
            self.dtypes = dtypes_of(first)
            self.first_label = first.get("label")
            transformed = self.load(0, sample_rng(self.seed, 0, 0))
        except UnreadableError as error:
            raise UserError(self.key, str(error)) from error
        self._fields = {
            name: Field(first[name].dtype, value.shape, image=name.startswith(IMAGE))
            for name, value in transformed.items()
        }

    @property
    def samples(self) -> Any:
        """The PyTorch dataset."""
        return self.splits.value[self.position]

    @property
    def fields(self) -> Fields:
        return self._fields

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int, rng: Random) -> Mapping[str, Any]:
        """Return a transformed sample. Raises UserError if invalid, UnreadableError for OSError."""
        sample = self.read(index, rng)
        dtypes = dtypes_of(sample)
        if dtypes != self.dtypes:
            expected = f"the first sample has {self.dtypes}"
            raise UserError(self.name(index), f"has the fields {dtypes}", expected)
        seed = rng.getrandbits(64)  # all images get the same draws
        pictures = {}
        for name in sorted(sample):  # `image` precedes the masks and points that follow it
            if name.startswith(IMAGE):
                pictures[name] = self.transform(Picture(sample[name]), Random(seed))
                sample[name] = pictures[name].pixels()
                self._check_range(index, name, sample[name])
            elif name.startswith((MASK, POINTS)):
                try:
                    sample[name] = transform_target(sample[name], pictures[IMAGE])
                except ValueError as error:
                    raise UserError(self.name(index), f"{name}: {error}") from None
        return sample

    def read(self, index: int, rng: Random) -> Sample:
        """Return a raw sample, images as uint8 or float32 [H, W, C]. Raises the same as `load`."""
        try:
            with seeded(rng):
                sample = self.samples[index]
            return arrays_of(sample, self.name(index))  # loads a Pillow image
        except (OSError, StopIteration) as error:  # or an iterator has ended
            raise UnreadableError(f"{self.name(index)}: {describe(error)}") from error

    def _check_range(self, index: int, name: str, image: np.ndarray) -> None:
        if image.dtype == np.uint8 or not self.is_unit:
            return
        low, high = float(image.min()), float(image.max())
        if not LOWEST <= low <= high <= HIGHEST:  # also NaN
            problem = f"{name} has values from {low:.3g} to {high:.3g}, expected [0, 1]"
            fix = "divide by 255 or remove Normalize; or set data.mean=[0] data.std=[1]"
            raise UserError(self.name(index), problem, fix)

    def name(self, index: int) -> str:
        return sample_name(self.samples, index)

    @cached_property
    def labels(self) -> np.ndarray | None:
        labels = labels_of(self.samples)
        if labels is None or self.fields.get("label") != LABEL:
            return None
        return labels if labels[0] == self.first_label else None  # else a target_transform

    def fingerprint(self) -> str:
        """Hash the samples' labels, names and fields, but not their values, which may vary."""
        digest = hashlib.sha256(str(self.fields).encode())
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        for index in range(len(self)):
            digest.update(os.fsencode(self.name(index)))
        return f"{len(self):,} samples, SHA-256 {digest.hexdigest()[:16]}"


def check_map_style(samples: Any, key: str) -> None:
    """Raise UserError with `key` unless a dataset has a length, of at least 1."""
    kind = type(samples).__name__
    if not hasattr(samples, "__len__"):
        fix = "return a map-style dataset for each split, or set data.val_fraction=0.2"
        raise UserError(key, f"a split has no __len__ ({kind})", fix)
    if not len(samples):
        problem = f"a split has no samples ({kind})"
        raise UserError(key, problem, "return at least one for each split")


def dtypes_of(sample: Sample) -> dict[str, str]:
    return {name: value.dtype.name for name, value in sample.items()}


def arrays_of(sample: Any, origin: str) -> Sample:
    """Convert a sample's fields to arrays. Raises UserError with `origin` if one is invalid."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        sample = dict(zip((IMAGE, "label"), sample, strict=True))
    if not isinstance(sample, Mapping):
        problem = f"a sample has type {type(sample).__name__}"
        raise UserError(origin, problem, "return (image, label) or a dict")
    if IMAGE not in sample or TARGET in sample:
        problem = f"a sample has the fields {', '.join(map(str, sample))}"
        fix = "rename the image to image, and the class index to label; target is reserved"
        raise UserError(origin, problem, fix)
    return {str(name): field_array(str(name), value, origin) for name, value in sample.items()}


def field_array(name: str, value: Any, origin: str) -> np.ndarray:
    """Convert a field to an array, floats to float32 and integer scalars to int64."""
    if isinstance(value, Tensor):
        value = value.detach()
    if name.startswith(IMAGE):
        return image_array(name, value, origin)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        problem = f"{name} is {type(value).__name__}; expected a 64-bit number, array or tensor"
        raise UserError(origin, problem, "remove or encode it")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if name == "label":  # may be an array of one element
        array = array.squeeze()
    return array.astype(np.int64) if array.ndim == 0 else array


def image_array(name: str, value: Any, origin: str) -> np.ndarray:
    """Convert an image to uint8 or float32 [H, W, C]. Raises UserError for any other value."""
    if isinstance(value, Image.Image):
        return rgb_pixels(value)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or not array.size or array.dtype not in (np.uint8, np.float32):
        problem = f"{name} is {array.dtype} {list(array.shape)}"
        raise UserError(origin, problem, "expected uint8 or float, [H, W, C] or a tensor [C, H, W]")
    # Channels come first in a tensor, unless only the last axis is short enough for them.
    first = array.shape[0] <= MAX_CHANNELS
    last = array.shape[2] <= MAX_CHANNELS
    channels_first = isinstance(value, Tensor) if first == last else first
    if channels_first:
        array = array.transpose(1, 2, 0)
    return np.ascontiguousarray(array)  # torch does not support negative strides


def sample_name(samples: Any, index: int) -> str:
    """Return a sample's path if `samples.samples` has it, else `Class[index]`."""
    samples, index = unwrap(samples, index)
    pairs = getattr(samples, "samples", None)
    with suppress(IndexError):  # a dataset may repeat its samples
        if isinstance(pairs, list) and isinstance(pairs[index], tuple):
            return str(pairs[index][0])
    return f"{type(samples).__name__}[{index}]"


def unwrap(samples: Any, rows: Any) -> tuple[Any, Any]:
    """Return the dataset inside any Subsets, and there the given rows, an index or slice."""
    while isinstance(samples, Subset):
        rows = np.asarray(samples.indices)[rows]
        samples = samples.dataset
    return samples, rows


def labels_of(samples: Any) -> np.ndarray | None:
    """Return the class indices of a dataset, int64 [len], from its attributes, or None."""
    samples, rows = unwrap(samples, slice(None))
    found = [getattr(samples, name, None) for name in ("targets", "labels", "_labels")]
    if hugging_face_names(samples):
        found.append(samples.with_format("numpy")["label"][:])
    for values in found:
        with suppress(ValueError, TypeError):  # not an array
            labels = np.asarray(values)
            if labels.size == len(samples) and labels.dtype.kind in "biu":
                return labels.reshape(-1)[rows].astype(np.int64)
    return None


def hugging_face_names(samples: Any) -> Any:
    """Return the class names of a Hugging Face dataset; None for other datasets."""
    features = getattr(samples, "features", None)
    return getattr(features.get("label"), "names", None) if isinstance(features, Mapping) else None


def classes_of(samples: Any) -> Any:
    """Return the class names of a dataset, or the number of classes in its labels, or ()."""
    samples, _ = unwrap(samples, slice(None))
    names = getattr(samples, "classes", hugging_face_names(samples))
    if names is not None:
        return names
    labels = labels_of(samples)
    if labels is None or len(np.unique(labels)) <= labels.max(initial=-1):  # a class has no samples
        return ()
    return len(np.unique(labels))


def class_names(classes: Any) -> tuple[str, ...]:
    """Return class names as strings. `classes`: an iterable of names, or the number of classes."""
    if isinstance(classes, int | np.integer):
        classes = range(classes)
    # Each class of torchvision's ImageNet is a tuple of synonyms.
    return tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in classes)
