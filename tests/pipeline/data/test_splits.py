"""Images of each split with data.val_fraction and data.val_fold."""

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import DataConfig
from pipeline.data.build import Splits, build_datasets, folder
from pipeline.data.index import Index, load_index
from pipeline.data.splits import HeldOut, hold_out, load_splits
from scripts.lib.trained import build_val
from tests.helpers.small_run import SMALL
from tests.helpers.stored import as_list, as_tar, samples


def splits(root: object, **keys: object) -> tuple[Index, Index]:
    return load_splits(DataConfig(root=str(root), **keys))


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.99])
def test_val_fraction_per_class(train_copy, fraction):
    train, val = splits(train_copy, val_fraction=fraction)
    count = min(max(round(12 * fraction), 1), 11)
    assert Counter(val.labels.array.tolist()) == dict.fromkeys(range(3), count)
    assert sorted(samples(train) + samples(val)) == samples(load_index(train_copy, key="data.root"))
    assert (samples(train), samples(val)) == (sorted(samples(train)), sorted(samples(val)))
    names = sorted(f"cat/{i}é.jpg".encode() for i in range(500))  # resumed runs need the same
    _, rows = hold_out(np.zeros(500, int), np.array(names), ["cat"], HeldOut("", 0, 0.01, 2))
    assert {names[i] for i in rows} == {f"cat/{i}é.jpg".encode() for i in (279, 167, 416, 29, 148)}
    repeated = np.array(9 * names[:1] + names)  # like a list
    for rows in hold_out(np.zeros(len(repeated), int), repeated, ["cat"], HeldOut("", 0.5, 1, 2)):
        assert len(set(repeated[rows])) == 250


@pytest.mark.parametrize("folds", [2, 5, 12])
def test_val_fold_partitions_images(train_copy, folds):
    held_out = []
    for fold in range(1, folds + 1):
        train, val = splits(train_copy, val_fold=f"{fold}/{folds}")
        counts = Counter(val.labels.array.tolist())
        assert set(counts) == {0, 1, 2}
        assert max(counts.values()) - 12 / folds < 1
        assert len(train) + len(val) == 36
        assert not set(samples(train)) & set(samples(val))
        held_out += samples(val)
    assert sorted(held_out) == samples(load_index(train_copy, key="data.root"))
    first = splits(train_copy, val_fraction=1 / folds)[1]
    assert first.digest == splits(train_copy, val_fold=f"1/{folds}")[1].digest


def test_val_fraction_equal_in_every_storage(train_copy, image_root, tmp_path):
    found = [splits(train_copy, val_fraction=0.25)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "train").symlink_to(image_root / "train")
    as_tar(image_root / "train", tmp_path / "b" / "Training.tar")
    shutil.copy(tmp_path / "b" / "Training.tar", tmp_path / "images.tar")
    as_tar(image_root / "train", tmp_path / "train.tar")  # next to the folder
    for root in ("a", "b", "images.tar", "train"):
        found.append(splits(tmp_path / root, val_fraction=0.25))
    assert len({(train.digest, val.digest) for train, val in found}) == 1
    words = [*SMALL, f"data.root={train_copy}", "data.val_fraction=0.25"]
    one = build_datasets(from_overrides([*words, "train.seed=1"]))
    other = build_val(from_overrides([*words, "train.seed=2"]))
    assert one.val.fingerprint() == other.val.fingerprint() != one.train.fingerprint()


def test_fake_dataset_validation_size():
    datasets = build_datasets(from_overrides(["data=fake", "data.fake_images=60"]))
    assert (len(datasets.train), len(datasets.val)) == (60, 6)


def other_order(data: DataConfig, train: Any, val: Any, options: Any) -> Splits:
    """A fork's source with different labels in the second split."""
    train, val, classes = folder(data, train, val, options)
    val.index = replace(val.index, classes=classes[::-1])
    return train, val, classes


def test_build_datasets_rejects_unequal_classes(image_root):
    source = f"data.source={__name__}:other_order"
    with pytest.raises(UserError, match=r"^data\.val=.*: its classes differ from those of "):
        build_datasets(from_overrides([f"data.root={image_root}", source]))


def test_build_datasets_names_classes_of_val_alone(train_copy, tmp_path):
    """The message is about the classes, although label 3 is also outside the training classes."""
    val = shutil.copytree(train_copy, tmp_path / "val")
    shutil.copytree(train_copy / "dots", val / "zebra")
    (val / "dots").rename(val / "Dots ")
    alike = r"look alike: 'Dots ' \(44 6F 74 73 20\) and 'dots' "
    with pytest.raises(UserError, match=rf"classes .* here: \['Dots ', 'zebra'\]; .*{alike}"):
        build_datasets(from_overrides([f"data.root={tmp_path}"]))


@pytest.mark.parametrize("val", ["train", "list", "one.tar", "link", "copy"])
def test_build_datasets_warns_of_identical_splits(val, train_copy, tmp_path, caplog):
    as_list(train_copy, tmp_path / "list.csv")
    as_tar(train_copy, tmp_path / "one.tar")
    (tmp_path / "link").symlink_to("train")
    shutil.copytree(train_copy, tmp_path / "copy")
    train = val if val == "list" else "train"
    words = [*SMALL, f"data.root={tmp_path}", f"data.train={train}", f"data.val={val}"]
    built = build_datasets(from_overrides(words))
    shared = f"36 of 36 validation images are also training images (first: {built.train.name(0)})"
    assert caplog.messages == [f"data.val={val}: {shared}"]
    build_datasets(from_overrides([*SMALL, f"data.root={train_copy}", "data.val_fraction=0.5"]))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("train", ["../train", "train", "../TRAIN.CSV"])
def test_load_splits_rejects_shared_images(train_copy, tmp_path, train):
    image = next(train_copy.glob("*/*"))
    (tmp_path / "link").symlink_to(image.parent)
    (tmp_path.parent / "train.csv").write_text(f"{tmp_path}/link/{image.name},a\n")
    shutil.copy(tmp_path.parent / "train.csv", tmp_path.parent / "TRAIN.CSV")
    (tmp_path / "3.jpg").touch()
    (tmp_path / "val.csv").write_text(f"3.jpg,a\n./{image.relative_to(tmp_path)},b\n")
    shared = rf"val.csv: 1 of 2 validation images are also training images .first: {image}.; rem"
    with pytest.raises(UserError, match=shared):
        splits(tmp_path, train=train)
    assert len(splits(tmp_path, train="val")[0]) == 2  # evaluate.py does this
