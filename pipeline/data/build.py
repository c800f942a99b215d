"""Build the datasets and the transforms of both splits from a config."""

import inspect
import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch

from conf.errors import UserError, describe, did_you_mean
from conf.named import create_object, import_object, object_names_in, split_entry, with_parameter
from conf.schema import Config, DataConfig
from pipeline.data.augment import TRANSFORMS, Compose, build_by_name
from pipeline.data.dataset import Dataset, FakeDataset, FolderDataset, check_label
from pipeline.data.decode import DECODERS, Picture
from pipeline.data.device_stage import DeviceStage
from pipeline.data.field import IMAGE, LABEL
from pipeline.data.splits import held_out, load_splits, other_classes, shared_images
from pipeline.data.torch_dataset import torch_splits

logger = logging.getLogger(__name__)

# Shapes of the images to which each list of transforms is applied before training starts
TRIALS = ((400, 300, 3), (300, 400, 3)) * 4


@dataclass(frozen=True)
class Datasets:
    train: Dataset
    val: Dataset
    classes: tuple[str, ...]  # class names; a label is an index into them
    # Modes of the training split to compare; training starts with the first one
    decode_modes: tuple[str, ...] = ("cpu",)


def build_datasets(
    config: Config, device: torch.device | None = None, stored_decode_mode: str | None = None
) -> Datasets:
    """Build the transforms and the sample tables of both splits; write only the index cache.

    Args:
        device: training device, for data.on_device; None leaves everything to the workers.
        stored_decode_mode: mode in the checkpoint to resume; None without a checkpoint.

    Raises UserError if a transform, a folder or its content is invalid.
    """
    limit = "timeout_seconds", config.loader.timeout_seconds
    data = replace(config.data, storage=with_parameter(config.data.storage, "data.storage", *limit))
    train_transform = build_image_transforms(config.augment.train, "augment.train")
    val_transform = build_image_transforms(config.augment.val, "augment.val")
    train, val, classes = build_splits(config, data, train_transform, val_transform)
    if len(classes) < 2 and train.fields.get("label") == LABEL:
        fix = f"add a class, or set data.root={data.root}/{classes[0]} if its folders are classes"
        raise UserError(f"data.root={data.root}", f"all images have the class {classes[0]}", fix)
    if isinstance(train, FolderDataset) and train.fingerprint() == val.fingerprint():  # or copies
        logger.warning("data.val=%s: %s", data.val, shared_images(train.index, train.index))
    every = [*train.fields.values(), *val.fields.values()]
    formats = {(field.highest, field.shape[-1]) for field in every if field.image}
    if len(formats) > 1:
        problem = "the image fields of the splits differ in dtype or number of channels"
        raise UserError("data.mean", problem, "convert all images to the same type")
    check_channels(data, val.fields[IMAGE].shape[-1])
    modes: tuple[str, ...] = ("cpu",)
    if device is not None:
        train = copy(train)  # `val` may be the same object, and keeps its stage
        for entry in data.on_device:
            name, parameters = split_entry(entry, "data.on_device")
            train.stage = create_object(
                name, "data.on_device", DeviceStage, train, config, device, **parameters
            )
        modes = choose_decode_modes(config, train.stage, stored_decode_mode)
    return Datasets(train, val, classes, decode_modes=modes)


def choose_decode_modes(config: Config, stage: DeviceStage, stored: str | None) -> tuple[str, ...]:
    """Resolve loader.decoder to modes of a stage; training starts with the first one.

    `stored`: mode in the checkpoint to resume, which loader.decoder=auto keeps; None without a
    checkpoint. Raises UserError for an unknown decoder.
    """
    name = config.loader.decoder
    modes = tuple(stage.decode_modes)
    choices = ("auto", *DECODERS, *modes)
    if name not in choices:
        fix = f"choose from {', '.join(choices)}{did_you_mean(name, choices)}"
        raise UserError(f"loader.decoder={name}", "no such decoder on this device", fix)
    chosen = stored if name == "auto" else name
    if chosen is None:
        return modes
    # If the stored mode no longer exists, the identity check raises. DECODERS apply to the mode cpu
    return (chosen,) if chosen in modes else modes[:1]


def check_channels(data: DataConfig, channels: int) -> None:
    """Raise UserError unless data.mean and data.std have one value, or one per channel."""
    for key, values in {"mean": data.mean, "std": data.std}.items():
        if len(values) not in (1, channels):
            problem = f"has {len(values)} values for {channels} channel(s)"
            raise UserError(f"data.{key}", problem, "set one value per channel")


def build_image_transforms(entries: Sequence[Any], key: str) -> Compose:
    """Build a config key's transforms; try them on images, because some errors appear only then.

    Returns the transforms with the resulting image size. Raises UserError if a transform is
    invalid, or if the resulting images are not square or differ in size.
    """
    transforms = build_by_name(entries, TRANSFORMS, key=key)
    rng = np.random.default_rng(0)
    sizes = set()
    for seed, shape in enumerate(TRIALS):
        picture = Picture(rng.integers(0, 256, shape, np.uint8))
        try:
            width, height = Compose(transforms)(picture, Random(seed)).size
        except Exception as error:  # torchvision raises many types
            if object_names_in(list(entries)):  # the traceback of custom code helps
                error.add_note(f"{key}: a transform gets (image, rng) and returns an image")
                raise
            raise UserError(key, f"fails on an image: {describe(error)}") from None
        sizes.add((width, height))
    if sizes != {(width, width)}:
        problem = f"produces images of different sizes, such as {width}x{height} px"
        fix = "end it with random_resized_crop or center_crop, and set its `size`"
        raise UserError(key, problem, fix)
    return Compose(transforms, width)


Splits = tuple[Dataset, Dataset, tuple[str, ...]]  # training, validation, class names
Options = dict[str, Any]  # arguments of FolderDataset


def build_splits(config: Config, data: DataConfig, train: Compose, val: Compose) -> Splits:
    """Build both splits. Raises UserError for empty splits, different classes or wrong labels."""
    key = f"data.source={data.source}"
    match call_source(config, data, train, val):
        case [Dataset() as train_split, Dataset() as val_split, [_, *_] as classes]:
            splits = {"training": train_split, "validation": val_split}
        case _:
            fix = "return (train, val, classes), two instances of Dataset and all class names"
            raise UserError(key, "returns no two datasets with classes", fix)
    if isinstance(train_split, FolderDataset) and isinstance(val_split, FolderDataset):
        if train_split.index.classes != val_split.index.classes:
            raise other_classes(train_split.index, val_split.index)
    for name, split in splits.items():
        if not len(split):
            raise UserError(key, f"the {name} dataset has no samples", "return at least one")
        labels = split.labels
        if labels is not None:
            for index in (int(labels.argmin()), int(labels.argmax())):
                check_label(split, index, labels[index], len(classes))
    return train_split, val_split, tuple(classes)


def call_source(config: Config, data: DataConfig, train: Compose, val: Compose) -> Any:
    """Call the function that data.source names, in DATASETS or as module:function."""
    source = data.source
    options: Options = {
        "decoder": config.loader.decoder,
        "seed": config.train.seed,
        "exif_orientation": data.exif_orientation,
    }
    if source in DATASETS:
        return DATASETS[source](data, train, val, options)
    if returns_torch_datasets(source):
        found = create_object(source, "data.source", object, data)
        return torch_splits(found, config, train, val)
    held = held_out(data)
    if held and not hasattr(import_object(source, "data.source"), "holds_out"):
        problem = f"data.source={source} does not support it"
        raise UserError(held.origin, problem, "for images in class folders set data=folder")
    return create_object(source, "data.source", tuple, data, train, val, options)


def returns_torch_datasets(source: str) -> bool:
    """Return whether data.source names a function of `data` alone, unlike those in DATASETS.

    Raises UserError if there is no such function.
    """
    if source in DATASETS:
        return False
    try:
        inspect.signature(import_object(source, "data.source")).bind("data")
    except TypeError:
        return False
    return True


def folder(
    data: DataConfig, train: Compose, val: Compose, options: Options, dataset: Any = FolderDataset
) -> Splits:
    train_index, val_index = load_splits(data)
    train_split = dataset(train_index, train, **options)
    return train_split, dataset(val_index, val, **options), train_index.classes


def fake(data: DataConfig, train: Compose, val: Compose, options: Options) -> Splits:
    images, classes = data.fake_images, data.fake_classes
    names = tuple(f"fake{i:04d}" for i in range(classes))
    train_split = FakeDataset(images, classes, train.image_size)
    return train_split, FakeDataset(images // 10, classes, val.image_size), names


# data.source -> function of (data, training and validation transform, options). The key may also
# name one as module:name, with an attribute `holds_out` if it reads data.val_fraction; or a
# function of `data` alone, which returns map-style PyTorch datasets.
DATASETS = {"folder": folder, "fake": fake}
