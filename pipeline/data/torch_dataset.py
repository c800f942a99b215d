"""Map-style datasets of PyTorch, such as those of torchvision, as a split of the training.

`data.source=module:function` names a function of the config node `data`. It returns (train, val) or
(train, val, classes); a split needs only `__len__` and `__getitem__`. A sample is (image, label) or
a dict of arrays, tensors and numbers, among them `image`: one of Pillow, an array [H, W, C] or a
tensor [C, H, W]; uint8, or floats between 0 and 1. The first sample states the fields of all.

augment.train or augment.val is applied to the image. A field `mask` [H, W] follows the crops,
resizes and flips of its image, and nothing else does.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from conf.errors import UnreadableError, UserError, describe
from pipeline.data.augment import Compose, sample_rng, seeded, transform_target
from pipeline.data.dataset import Dataset
from pipeline.data.decode import Picture, rgb_pixels
from pipeline.data.field import IMAGE, LABEL, Field

MASK = "mask"
HASHED = 16  # samples of a split that are part of its fingerprint
Sample = dict[str, np.ndarray]


class MapDataset(Dataset):
    """A map-style dataset and the transforms of its images. Raises UserError if it does not fit.

    Random numbers in its `__getitem__` depend on seed, epoch and index, if they are those of the
    global generators of torch, NumPy or Python. `key`: where the config names it, for messages.
    """

    def __init__(
        self, samples: Any, transform: Compose, *, num_classes: int, seed: int = 0, key: str = ""
    ) -> None:
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            wrong = f"{type(samples).__name__} has no __getitem__ or no __len__"
            raise UserError(key, wrong, "return a map-style dataset of PyTorch for each split")
        if not len(samples):
            raise UserError(key, f"{type(samples).__name__} has no samples")
        self.samples = samples
        self.transform = transform
        self.seed = seed
        self.num_classes = num_classes
        try:
            self.first = self.read(0, sample_rng(seed, 0, 0))
        except (TypeError, ValueError, UnreadableError) as error:
            raise UserError(key, f"{self.name(0)}: {error}", "see docs/fork.md") from error
        size = transform.image_size
        self._fields = {name: Field(value.dtype, value.shape) for name, value in self.first.items()}
        image = self.first[IMAGE]
        self._fields[IMAGE] = Field(image.dtype, (size, size, image.shape[2]), image=True)
        if MASK in self.first:
            self._fields[MASK] = Field(self.first[MASK].dtype, (size, size))

    @property
    def fields(self) -> Mapping[str, Field]:
        return self._fields

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int, rng: random.Random) -> Mapping[str, Any]:
        """Return a sample. Raises ValueError if it is not like the first one."""
        sample = self.read(index, rng)
        self._check(sample)
        picture = self.transform(Picture(sample[IMAGE]), rng)
        if MASK in sample:
            sample[MASK] = transform_target(sample[MASK], picture)
        sample[IMAGE] = picture.pixels()
        return sample

    def read(self, index: int, rng: random.Random) -> Sample:
        """Return a sample without the transforms. Raises UnreadableError for any OSError."""
        try:
            with seeded(rng):
                return arrays_of(self.samples[index])
        except OSError as error:
            raise UnreadableError(f"{self.name(index)}: {describe(error)}") from error

    def _check(self, sample: Sample) -> None:
        """Raise ValueError if a sample differs from the first one, or its label is no class."""
        if sample.keys() != self.first.keys():
            raise ValueError(f"has the fields {[*sample]}, the first sample has {[*self.first]}")
        for name, first in self.first.items():
            value = sample[name]
            given, stated = value.shape, first.shape
            fits = np.can_cast(value.dtype, first.dtype, "same_kind")
            if name in (IMAGE, MASK):
                given, stated = given[2:], stated[2:]  # their sizes may differ
                fits = value.dtype == first.dtype
            if given != stated or not fits:
                text = f"{name} is {value.dtype} {list(value.shape)}"
                raise ValueError(f"{text}, in the first sample {first.dtype} {list(first.shape)}")
        if self.fields.get("label") == LABEL and not 0 <= sample["label"] < self.num_classes:
            raise ValueError(f"label is {sample['label']}, there are {self.num_classes} classes")

    def name(self, index: int) -> str:
        return f"{type(self.samples).__name__}[{index}]"

    @property
    def labels(self) -> np.ndarray | None:
        return targets_of(self.samples) if self.fields.get("label") == LABEL else None

    def notes(self) -> list[str]:
        image = self.first[IMAGE]
        if image.dtype.kind == "f" and not 0 <= image.min() <= image.max() <= 1:
            found = f"{image.min():.3g} to {image.max():.3g}"
            return [f"the first image is in {found}, and data.mean and data.std are for 0 to 1"]
        return []

    def fingerprint(self) -> str:
        """Hash the labels, if the dataset has `targets`, and some samples."""
        digest = hashlib.sha256()
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        last = len(self) - 1
        for index in np.linspace(0, last, min(len(self), HASHED)).astype(int).tolist():
            for name, value in self.read(index, sample_rng(0, 0, index)).items():
                digest.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
        return f"{len(self):,} samples, SHA-256 {digest.hexdigest()[:16]}"


def arrays_of(sample: Any) -> Sample:
    """Return the fields of a map-style dataset's sample. Raises TypeError or ValueError."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        sample = dict(zip((IMAGE, "label"), sample, strict=True))
    if not isinstance(sample, Mapping) or IMAGE not in sample:
        raise TypeError("a sample must be (image, label), or a dict with `image`")
    arrays = {name: _array_of(name, value) for name, value in sample.items()}
    arrays[IMAGE] = _image_of(sample[IMAGE])
    return arrays


def _array_of(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {type(value).__name__}: give an array, a tensor or a number")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _image_of(value: Any) -> np.ndarray:
    """Return an image as uint8 or float32 [H, W, C]; those of Pillow in RGB."""
    if isinstance(value, Image.Image):
        return rgb_pixels(value)
    image = _array_of(IMAGE, value)
    if image.ndim == 3 and image.dtype in (np.uint8, np.float32):
        return image.transpose(1, 2, 0) if isinstance(value, Tensor) else image
    wrong = f"image is {image.dtype} {list(image.shape)}"
    raise ValueError(f"{wrong}: give uint8 or float, [H, W, C] in an array, [C, H, W] in a tensor")


def targets_of(samples: Any) -> np.ndarray | None:
    """Return the class numbers in `targets`, as torchvision's datasets have, or None; int64 [n]."""
    if isinstance(samples, Subset):
        targets = targets_of(samples.dataset)
        return None if targets is None else targets[np.asarray(samples.indices)]
    targets = np.asarray(getattr(samples, "targets", 0))
    if targets.shape != (len(samples),) or targets.dtype.kind not in "iu":
        return None
    return targets.astype(np.int64)


def classes_of(samples: Any) -> tuple[str, ...]:
    """Return the names of the classes, from `classes` or `targets`; none if they are not known."""
    targets = targets_of(samples)
    while isinstance(samples, Subset):
        samples = samples.dataset
    names = getattr(samples, "classes", None)
    if names is not None:
        return tuple(map(str, names))
    return () if targets is None else tuple(map(str, range(targets.max() + 1)))
