"""Map-style datasets of PyTorch as data.source."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from conf.errors import UserError
from pipeline.data.augment import CenterCrop, Compose, HorizontalFlip
from pipeline.data.build import name_splits
from pipeline.data.field import LABEL, Field
from pipeline.data.torch_dataset import MapDataset

RGB = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
CROP = Compose([CenterCrop(size=6)], 6)
CONFIG: Any = SimpleNamespace(
    data=SimpleNamespace(source="mine:rows"), train=SimpleNamespace(seed=0)
)


class Rows:
    def __init__(self, *rows: Any, **attributes: Any) -> None:
        self.rows = rows
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return row() if callable(row) else row


def dataset(*rows: Any, transform: Compose = CROP) -> MapDataset:
    return MapDataset(Rows(*rows), transform, num_classes=3)


@pytest.mark.parametrize(
    "image", [Image.fromarray(RGB), RGB, torch.from_numpy(RGB).permute(2, 0, 1)]
)
def test_an_image_may_be_pillows_an_array_or_a_tensor(image):
    split = dataset((image, 2), {"image": image, "label": np.int32(1)})
    assert split.fields == {"image": Field(np.dtype("u1"), (6, 6, 3), image=True), "label": LABEL}
    for index, label in enumerate((2, 1)):
        np.testing.assert_array_equal(split[index]["image"], RGB[1:7, 2:8])
        assert split[index]["label"] == label


def test_floats_are_float32_and_may_be_any_number_of_channels():
    split = dataset({"image": np.ones((8, 8, 5)), "number": 0.5, "point": np.zeros(2)})
    assert split.fields["image"] == Field(np.dtype("f4"), (6, 6, 5), image=True)
    assert split.fields["point"] == Field(np.dtype("f4"), (2,))
    assert split.notes() == [] and split.labels is None
    (note,) = dataset((np.full((8, 8, 3), -2.0), 0)).notes()
    assert note.startswith("the first image is in -2 to -2, and")


def test_a_mask_follows_its_image():
    transform = Compose([HorizontalFlip(p=0.5), CenterCrop(size=6)], 6)
    split = dataset({"image": RGB, "mask": RGB[..., 0]}, transform=transform)
    for split.epoch in range(8):
        np.testing.assert_array_equal(split[0]["mask"], split[0]["image"][..., 0])
    split.transform = Compose([CenterCrop(size=6), lambda image, rng: image[::-1]], 6)
    with pytest.raises(ValueError, match=r"^a mask follows crops, resizes and flips only"):
        split[0]


def test_global_generators_repeat_for_seed_epoch_and_index_and_stay_as_they_were():
    def row() -> Any:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"image": RGB, "drawn": np.array(drawn)}

    split, before = dataset(row, row), random.getstate()
    first, second = split[0]["drawn"], split[1]["drawn"]
    assert random.getstate() == before
    assert split[0]["drawn"].tolist() == first.tolist()
    split.epoch = 1
    assert len({*first, *second, *split[0]["drawn"]}) == 9


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(RGB, 1, 2)], "a sample must be .image, label., or a dict"),
        ([(RGB, "cat")], "label is str: give an array, a tensor or a number"),
        ([(RGB[..., 0], 1)], r"image is uint8 \[8, 10\]: give uint8 or float, \[H, W, C\]"),
        ([], "Rows has no samples"),
    ],
)
def test_a_first_sample_that_does_not_fit_is_refused(rows, message):
    with pytest.raises(UserError, match=message):
        dataset(*rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((RGB, 3), "label is 3, there are 3 classes"),
        ((RGB, 0.5), r"label is float32 \[\], in the first sample int64 \[\]"),
        ((RGB, [1, 2]), r"label is int64 \[2\]"),
        ((RGB / 256, 1), r"image is float32 \[8, 10, 3\]"),
        ({"image": RGB}, "the first sample has .'image', 'label'"),
    ],
)
def test_each_sample_is_compared_with_the_first(row, message):
    with pytest.raises(ValueError, match=message):
        dataset((RGB, 1), row)[1]


def test_classes_and_labels_are_those_of_torchvisions_attributes():
    rows = Rows((RGB, 0), (RGB, 2), (RGB, 1), targets=[0, 2, 1])
    train, _, classes = name_splits([Subset(rows, [2, 1]), rows], CROP, CROP, CONFIG)
    assert classes == ("0", "1", "2")
    assert train.labels is not None and train.labels.tolist() == [1, 2]
    assert train.name(1) == "Subset[1]"
    rows.classes = ["a", "b", "c"]
    assert name_splits([Subset(rows, [2, 1]), rows], CROP, CROP, CONFIG)[2] == ("a", "b", "c")
    with pytest.raises(UserError, match=r"^data.source=mine:rows: the classes are not known; "):
        name_splits([Rows((RGB, 0)), rows], CROP, CROP, CONFIG)
    with pytest.raises(UserError, match=r"^data.source=mine:rows: tuple_iterator has no"):
        name_splits([iter(()), rows, "abc"], CROP, CROP, CONFIG)


def test_a_fingerprint_depends_on_labels_and_pixels():
    found = [
        MapDataset(Rows(*rows, targets=targets), CROP, num_classes=3).fingerprint()
        for rows, targets in (
            ([(RGB, 0)] * 2, [0, 0]),
            ([(RGB, 0)] * 2, [0, 1]),
            ([(RGB, 0), (RGB + 1, 0)], [0, 0]),
            ([(RGB, 0)] * 2, [0, 0]),
        )
    ]
    assert found[0] == found[3] and len(set(found)) == 3
