"""Config in, datasets out: the transforms and sample tables of both splits."""

import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from conf.schema import Config, Data, UserError
from pipeline import augment, decode
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.decode import ON_GPU
from pipeline.index import check_splits, load_index
from pipeline.synthetic.demo import CLASSES, MARKER, TRAIN_IMAGES, ensure_demo_dataset


@dataclass(frozen=True)
class Datasets:
    """Both splits and what follows from them.

    Attributes:
        train_size, val_size: side of the images after the transforms, pixels.
        train_fingerprint, val_fingerprint: which samples these are, wherever their folders are.
    """

    train: Dataset
    val: Dataset
    classes: tuple[str, ...]
    train_size: int
    val_size: int
    train_fingerprint: str
    val_fingerprint: str


def build_datasets(config: Config) -> Datasets:
    """Build both splits' transforms and sample tables. Writes nothing but the index cache and, for data=demo, the images.

    Raises:
        UserError: a transform, a folder or its content is not as it must be.
    """
    train_transform = augment.Compose(augment.build(config.augment.train, augment.TRANSFORMS, key="augment.train"))
    val_transform = augment.Compose(augment.build(config.augment.val, augment.TRANSFORMS, key="augment.val"))
    augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    train_size, val_size = _image_size(train_transform, "augment.train"), _image_size(val_transform, "augment.val")
    data, seed = config.data, config.train.seed
    if data.source == "fake":
        train = FakeDataset(num_samples=data.fake_images, num_classes=data.fake_classes, size=train_size)
        val = FakeDataset(num_samples=data.fake_images // 10, num_classes=data.fake_classes, size=val_size)
        classes = tuple(f"fake{i:04d}" for i in range(data.fake_classes))
        return Datasets(train, val, classes, train_size, val_size, f"{len(train)} fake images", f"{len(val)} fake images")
    root = _root(config)
    if data.source == "demo":
        try:
            ensure_demo_dataset(root)
        except ValueError as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"data.root={root}: {error}") from None
    elif not root.is_dir():
        raise UserError(f"data.root={data.root}: no such folder; it must hold train/<class>/* and val/<class>/*")
    else:
        _check_layout(root, data)
    train_index = load_index(root / data.train, key="data.train")
    val_index = load_index(root / data.val, key="data.val")
    check_splits(train_index, val_index)
    # With gpu and hybrid, the best of these decodes the validation images and what the engines do not take.
    decoder = decode.resolve("auto" if config.loader.decoder in ON_GPU else config.loader.decoder)
    train_files = FolderDataset(train_index, train_transform, decoder=decoder, seed=seed)
    val_files = FolderDataset(val_index, val_transform, decoder=decoder, seed=seed)
    return Datasets(train_files, val_files, train_index.classes, train_size, val_size, train_files.fingerprint(),
                    val_files.fingerprint())  # fmt: skip


def stand_in(config: Config) -> Datasets | None:
    """Fake datasets of the demo's size while it is not drawn: they show what is wrong with a config before 2,500 images are
    drawn for it. Else None.
    """
    if config.data.source != "demo" or os.path.exists(_root(config) / MARKER):
        return None
    data = replace(config.data, source="fake", fake_images=TRAIN_IMAGES, fake_classes=len(CLASSES))
    return build_datasets(replace(config, data=data))


def _root(config: Config) -> Path:
    return Path(config.data.root or "").expanduser()


def _check_layout(root: Path, data: Data) -> None:
    """Refuse a folder that does not hold both splits, and name the one that does when it is near.

    Raises:
        UserError: names what the folder holds instead.
    """
    splits = (data.train, data.val)
    here, parent = f"data.root={data.root}", Path(os.path.abspath(root)).parent

    def holds_splits(folder: Path) -> bool:
        return all(os.path.isdir(folder / split) for split in splits)

    if holds_splits(root):
        return
    if holds_splits(parent) and any((parent / split).samefile(root) for split in splits):
        raise UserError(f"{here}: is one split; write data.root={parent}, the folder that holds {data.train} and {data.val}")
    try:
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{here}: cannot be read ({error}); check its permissions and the file system") from None
    if any(os.path.isdir(root / split) for split in splits):
        others = [name for name in folders if name not in splits]
        key, split = ("data.val", data.val) if os.path.isdir(root / data.train) else ("data.train", data.train)
        hint = f"did you mean {key}={others[0]}?" if len(others) == 1 else f"give {key}=FOLDER with one folder per class"
        raise UserError(f"{key}={root / split}: no such folder; {hint}")
    if not folders:
        raise UserError(f"{here}: holds no folders; it must hold train/<class>/* and val/<class>/*")
    for pattern in ("*", "*/*", "*/*/*"):  # Kaggle's archive has them in ILSVRC/Data/CLS-LOC
        if inner := next(filter(holds_splits, islice(root.glob(pattern), 1000)), None):
            raise UserError(f"{here}: holds no {data.train} and no {data.val}; write data.root={inner}")
    raise UserError(f"{here}: holds no {data.train} and no {data.val}, but folders such as {folders[0]}; "
                    f"put the class folders into {data.train} and {data.val} inside it")  # fmt: skip


def _image_size(transform: augment.Compose, key: str) -> int:
    if transform.image_size is None:
        raise UserError(
            f"{key}: the list does not end in images of one size; add random_resized_crop or center_crop: {{size: 224}}"
        )
    return transform.image_size
