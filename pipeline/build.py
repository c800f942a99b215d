"""Config in, datasets out: the table of datasets, and the transforms of both splits."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conf.rooms import require_room
from conf.schema import Config, Data, UserError, did_you_mean, show, with_size
from pipeline import augment
from pipeline.augment import Compose
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.decode import ON_GPU, Picture, describe
from pipeline.splits import load_splits

TRIALS = 8  # images to which each list of transforms is applied before the training starts


@dataclass(frozen=True)
class Datasets:
    """Both splits.

    Attributes:
        classes: names of the classes; a label is a position in it.
        train_size, val_size: side of the images after the transforms in pixels.
        smaller: side in pixels -> the training split as images of this size, for data.sizes.
    """

    train: Dataset
    val: Dataset
    classes: tuple[str, ...]
    train_size: int
    val_size: int
    smaller: Mapping[int, Dataset] = field(default_factory=dict)

    def prepare(self) -> None:
        """Create missing files, such as the images of data=demo."""
        self.train.prepare()
        self.val.prepare()


def build_datasets(config: Config) -> Datasets:
    """Build the transforms and the sample tables of both splits; write only the index cache.

    Raises:
        UserError: a transform, a folder or its content is wrong.
    """
    train, train_size = build_transform(config.augment.train, "augment.train")
    augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    smaller = {}
    for size in list(config.data.sizes.values())[:-1]:  # the last one is data.image_size
        entries = with_size(config.augment.train, config.data.image_size, size)
        smaller[size], made = build_transform(entries, "augment.train")
        if made != size:
            raise UserError(
                f"data.sizes: augment.train makes images of {made} px, not {size} px; write "
                "size: ${data.image_size} in it"
            )
    val, val_size = build_transform(config.augment.val, "augment.val")
    train_split, val_split, classes = _splits(config, config.data, train, val)
    if len(classes) < 2:
        key = "root" if config.data.classes is None else "classes"
        raise UserError(
            f"data.{key}={show(getattr(config.data, key))}: all images have the class "
            f"{classes[0]}; a classifier needs at least two classes, each in its own folder"
        )
    others = {size: train_split.with_transform(each) for size, each in smaller.items()}
    return Datasets(train_split, val_split, classes, train_size, val_size, others)


def build_val(config: Config) -> Datasets:
    """Build the validation split alone: synthetic images of 1 px stand for the training images.

    data.root need not hold a training split, unless data.val_fraction takes images from it.
    """
    transform, size = build_transform(config.augment.val, "augment.val")
    data = config.data
    if not data.val_fraction:
        data = replace(data, train=data.val)
    _, val, classes = _splits(config, data, transform, transform)
    nothing = FakeDataset(config.loader.batch_size, len(classes), 1)
    return Datasets(nothing, val, classes, 1, size)


def build_transform(entries: Sequence[Any], key: str) -> tuple[Compose, int]:
    """Build the list of a config key, and apply it to a few images: some fail, or change the size.

    Returns:
        The transforms, and the side of the images that they make in pixels.
    """
    transform = Compose(augment.build(entries, augment.TRANSFORMS, key=key))
    size = transform.image_size
    if size is None:
        raise UserError(
            f"{key}: the list does not end in images of one size; "
            "add random_resized_crop or center_crop: {size: 224}"
        )
    picture = Picture(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    for seed in range(TRIALS):
        try:
            width, height = transform(picture, random.Random(seed)).size
        except Exception as error:  # torchvision raises many kinds
            raise UserError(f"{key}: fails on an image: {describe(error)}") from None
        if (width, height) != (size, size):
            raise UserError(
                f"{key}: makes images of {width}x{height} px, not {size}x{size}; end the list with "
                f"center_crop: {{size: {size}}}"
            )
    return transform, size


# Training split, validation split, names of the classes.
Splits = tuple[Dataset, Dataset, tuple[str, ...]]


def _splits(config: Config, data: Data, train: Compose, val: Compose) -> Splits:
    """Call a function of DATASETS."""
    if data.source not in DATASETS:
        raise UserError(
            f"data.source={data.source}: there is no such dataset; choose from "
            f"{', '.join(DATASETS)}{did_you_mean(data.source, DATASETS)}"
        )
    # With gpu and hybrid, a CPU decoder takes the validation images and what the engines refuse.
    decoder = "auto" if config.loader.decoder in ON_GPU else config.loader.decoder
    return DATASETS[data.source](data, train, val, decoder, config.train.seed)


def folder(data: Data, train: Compose, val: Compose, decoder: str, seed: int) -> Splits:
    train_index, val_index = load_splits(data)
    options: Any = {"decoder": decoder, "seed": seed, "max_pixels": data.max_pixels}
    return (
        FolderDataset(train_index, train, **options),
        FolderDataset(val_index, val, **options),
        train_index.classes,
    )


def demo(data: Data, train: Compose, val: Compose, decoder: str, seed: int) -> Splits:
    require_room("pipeline.demo", "data.source=demo")
    from pipeline.demo.images import undrawn_splits

    options: Any = {"decoder": decoder, "seed": seed, "max_pixels": data.max_pixels}
    return undrawn_splits(data, train, val, **options) or folder(data, train, val, decoder, seed)


def fake(data: Data, train: Compose, val: Compose, decoder: str, seed: int) -> Splits:
    images, classes = data.fake_images, data.fake_classes
    assert train.image_size and val.image_size, "checked by build_transform"
    return (
        FakeDataset(images, classes, train.image_size),
        FakeDataset(images // 10, classes, val.image_size),
        tuple(f"fake{i:04d}" for i in range(classes)),
    )


# data.source -> function of (data, training and validation transform, CPU decoder, seed).
DATASETS: dict[str, Callable[[Data, Compose, Compose, str, int], Splits]] = {
    "folder": folder,
    "demo": demo,
    "fake": fake,
}
