"""Datasets as PyTorch users write them, for data.source=tests.helpers.own_data:NAME."""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, FakeData, ImageFolder
from torchvision.transforms import v2

from pipeline.data.dataset import FakeDataset

CLASSES = ["checks", "dots", "stripes"]


class Squares(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(count)
        self.targets = np.arange(count) % 3
        self.images = rng.integers(0, 64, (count, 40, 48, 3), np.uint8)
        self.images[np.arange(count), :, :, self.targets] += 99

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def undivided(data):
    return Squares(51), None


class Noisy(Squares):
    """Float tensors [C, H, W], with numbers from all global generators."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return torch.from_numpy(image).permute(2, 0, 1) / 255 * drawn / 3, label


class Masks(Squares):
    """Two images, a mask and points that follow the first image, and a number."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {
            "image": Image.fromarray(image),
            "image_left": image,
            "mask": Image.fromarray(image[..., 0]),
            "points": [[1.0, 2.0]],
            "age": 0.5,
            "label": label,
        }


class Gray(Squares):
    """Float tensors [1, H, W]."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return torch.from_numpy(image[..., 0])[None] / 255, label


def both(kind, *classes):
    return lambda data: (kind(36), kind(15), *classes)


squares, noisy, gray, masks = both(Squares), both(Noisy), both(Gray), both(Masks, CLASSES)


def fake(data):
    train = FakeData(36, (3, 40, 48), 3)
    return train, FakeData(15, (3, 40, 48), 3, random_offset=36), CLASSES


def folders(data):
    inside = v2.Compose([v2.RandomRotation(20), v2.ColorJitter(0.3)])
    return ImageFolder(f"{data.root}/train", inside), ImageFolder(f"{data.root}/val")


class Reencoded(CIFAR10):
    """CIFAR-10 with other MD5 sums."""

    meta = CIFAR10.meta | {"md5": None}

    def _check_integrity(self):
        return True


def cifar(data):
    return Reencoded(data.root, train=True), Reencoded(data.root, train=False)


class FlowersLike(Dataset):
    """The attributes of torchvision's Flowers102, which has neither targets nor classes."""

    def __init__(self, root):
        self._image_files = sorted(Path(root).glob("*/*.jpg"))
        self._labels = [CLASSES.index(file.parent.name) for file in self._image_files]

    def __len__(self):
        return len(self._image_files)

    def __getitem__(self, index):
        return Image.open(self._image_files[index]).convert("RGB"), self._labels[index]


def flowers(data):
    return FlowersLike(f"{data.root}/train"), FlowersLike(f"{data.root}/val")


def hugging_face(data):
    import datasets

    found = datasets.load_from_disk(data.root)
    found.set_format("numpy")
    return found["train"], found["val"]


def not_installed(data):
    import no_such_package  # noqa: F401


WRONG_LABEL = -1


class Wrong(Squares):
    """Sample 20 has the label WRONG_LABEL."""

    def __init__(self, count, labels):
        super().__init__(count)
        self.values = self.targets.tolist()
        self.values[20] = WRONG_LABEL
        self.targets = np.array(self.values) if labels else None

    def __getitem__(self, index):
        return self.images[index], self.values[index]


def wrong_known(data):
    return Wrong(36, labels=True), Squares(15), CLASSES


def wrong_late(data):
    return Wrong(36, labels=False), Squares(15), CLASSES


def empty_val(data):
    return Squares(36), Squares(0), CLASSES


def iterable(data):
    return iter([1]), None, CLASSES


class Unlabeled(FakeDataset):
    labels = None


def direct(train, val, classes, kind=FakeDataset):
    def build(data, train_transform, val_transform, options):
        return kind(train, classes, 32), kind(val, classes, 32), CLASSES

    return build


direct_val, direct_train = direct(36, 0, 3), direct(0, 15, 3)
direct_labels = direct(36, 15, 5, Unlabeled)


PAIR = FakeDataset(36, 3, 32), FakeDataset(15, 3, 32)


def direct_classes(data, train, val, options):
    return (*PAIR, ())


def direct_pair(data, train, val, options):
    return PAIR


class Exit(Squares):
    """Sample `last` ends the process."""

    def __init__(self, count, last):
        super().__init__(count)
        self.last = last

    def __getitem__(self, index):
        if index == self.last:
            sys.exit(3)
        return super().__getitem__(index)


def exit_at_start(data):
    return Exit(36, 0), Squares(15)


def exit_later(data):
    return Exit(36, 20), Squares(15)


def exit_in_prepare(config, world):
    sys.exit(3)
