"""Map-style PyTorch datasets as data.source."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from conf.compose import from_overrides
from conf.errors import UnreadableError, UserError
from pipeline.data.augment import CenterCrop, Compose, HorizontalFlip
from pipeline.data.field import LABEL, Field
from pipeline.data.shared import SharedObject
from pipeline.data.torch_dataset import TorchDataset, torch_splits
from tests.reliability.odd_images import png

RGB = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
PLANES = RGB.transpose(2, 0, 1)
CROP = Compose([CenterCrop(size=6)], 6)


class Rows:
    """A map-style dataset of given samples, or functions that return a sample."""

    def __init__(self, *rows: Any, **attributes: Any) -> None:
        self.rows = rows
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return row() if callable(row) else row


def dataset(*rows: Any, transform: Compose = CROP, **options: Any) -> TorchDataset:
    return TorchDataset(SharedObject((Rows(*rows),)), 0, transform, **options)


def splits(*found: Any, words: tuple[str, ...] = ()) -> Any:
    config = from_overrides(["data.source=tests.helpers.own_data:rows", *words])
    return torch_splits(found, config, CROP, CROP)


@pytest.mark.parametrize(
    "image",
    [Image.fromarray(RGB), RGB, torch.from_numpy(RGB), torch.from_numpy(PLANES.copy()), PLANES],
    ids=["pillow", "array", "tensor_hwc", "tensor", "array_chw"],
)
def test_torch_dataset_image_types(image):
    split = dataset((image, 2), {"image": image, "label": np.uint8(1)})
    assert split.fields == {"image": Field(np.dtype("u1"), (6, 6, 3), image=True), "label": LABEL}
    for index, label in enumerate((2, 1)):
        np.testing.assert_array_equal(split[index]["image"], RGB[1:7, 2:8])
        assert split[index]["label"] == label


def test_torch_dataset_channels_and_fields():
    sample = {"image": np.ones((8, 8, 5)), "number": 0.5, "place": np.zeros(2), "id": 7}
    split = dataset(sample, {**sample, "image": torch.ones(5, 9, 7)})
    assert split.fields["image"] == Field(np.dtype("f4"), (6, 6, 5), image=True)
    assert split.fields["place"] == Field(np.dtype("f4"), (2,))
    assert split.fields["number"] == Field(np.dtype("f4")) and split[0]["id"] == 7
    assert split[1]["image"].shape == (6, 6, 5)
    assert split.labels is None
    gray = dataset((RGB[..., 0], 1))
    np.testing.assert_array_equal(gray[0]["image"], RGB[1:7, 2:8, :1])


def test_torch_dataset_transforms_targets():
    transform = Compose([HorizontalFlip(p=0.5), CenterCrop(size=6)], 6)
    mask = Image.fromarray(RGB[..., 0])
    sample = {"image": RGB, "image_left": RGB, "mask_left": mask, "points": [[0.5, 1]]}
    split = dataset(sample, transform=transform)
    assert split.fields["image_left"].image and split.fields["mask_left"].shape == (6, 6)
    places = set()
    for split.epoch in range(8):
        found = split[0]
        np.testing.assert_array_equal(found["image_left"], found["image"])
        np.testing.assert_array_equal(found["mask_left"], found["image"][..., 0])
        places.add(tuple(found["points"][0].tolist()))
    assert places == {(-1.5, 0), (7.5, 0)}
    split.transform = Compose([CenterCrop(size=6), lambda image, rng: image[::-1]], 6)
    with pytest.raises(UserError, match=r"^Rows\[0\]: mask_left: a mask follows crops, resizes"):
        split[0]


def test_torch_dataset_seeds_global_generators():
    def row() -> Any:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"image": RGB, "drawn": np.array(drawn)}

    split = dataset(row, row)
    before = random.getstate()
    first, second = split[0]["drawn"], split[1]["drawn"]
    assert random.getstate() == before
    assert split[0]["drawn"].tolist() == first.tolist()
    split.epoch = 1
    assert len({*first, *second, *split[0]["drawn"]}) == 9
    split.epoch, split.seed = 0, 1
    assert not {*first} & {*split[0]["drawn"]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(RGB, 1, 2)], r"Rows\[0\]: a sample has type tuple; return \(image, label\) or a"),
        ([{"img": RGB, "label": 0}], "a sample has the fields img, label; rename the image to"),
        ([(RGB, "cat")], "label is str; expected a 64-bit number, array or tensor; remove"),
        ([(RGB, 2**70)], "label is int; expected a 64-bit number, array or tensor; remove"),
        ([(RGB[0, 0], 1)], r"image is uint8 \[3\]; expected uint8 or float, \[H, W, C\] or"),
        ([(RGB.astype(int), 1)], r"image is int64 \[8, 10, 3\]; expected uint8 or float"),
        ([(RGB / 255 * 4 - 2, 1)], r"values from -2 to 1.\d+, expected \[0, 1\]; divide by 255"),
        ([(RGB / 1, 1)], r"image has values from 0 to 2\d\d, expected \[0, 1\]; .* data.std=\[1\]"),
        ([(RGB / np.nan, 1)], r"image has values from nan to nan"),
        ([], "own_data:rows: a split has no samples .Rows.; return at least one"),
        ([{"image": RGB, "target": 1}], "a sample has the fields image, target; rename"),
        ([(RGB[:0], 1)], r"image is uint8 \[0, 10, 3\]; expected"),
        ([{"image": RGB, "mask": RGB[:4, :, 0]}], r"mask: the mask's .width, height. is .10, 4."),
    ],
)
def test_torch_splits_invalid_first_sample(rows, message):
    with pytest.raises(UserError, match=message):
        splits(Rows(*rows), Rows(*rows), "ab")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((RGB, 0.5), r"has the fields .*'label': 'float32'}; the first sample has .*'int64'}$"),
        ((RGB / 256, 1), r"has the fields {'image': 'float32', .*; the first sample .*'uint8'"),
        ({"image": RGB}, r"has the fields {'image': 'uint8'}; the first sample has .*'label'"),
        (None, "a sample has type NoneType; return"),
    ],
)
def test_torch_dataset_invalid_later_sample(row, message):
    with pytest.raises(UserError, match=rf"^Rows\[1\]: {message}"):
        dataset((RGB, 1), row)[1]


@pytest.mark.parametrize(
    "words", ["data.mean=[0] data.std=[1]", "data.mean=[0,0,0] data.std=[1,1,1]"]
)
def test_torch_splits_accept_normalized_images(words):
    rows = Rows((RGB / 255 - 0.5, 1))
    train, _, _ = splits(rows, rows, "ab", words=tuple(words.split()))
    assert train[0]["image"].min() < -0.1


def test_torch_dataset_negative_strides_and_gradients():
    split = dataset((RGB[:, ::-1], 0), (torch.ones(3, 8, 10, requires_grad=True), 0))
    np.testing.assert_array_equal(split[0]["image"], RGB[1:7, 7:1:-1])
    one = dataset((torch.ones(3, 8, 10, requires_grad=True), torch.tensor(2)))
    assert one[0]["image"].dtype == np.float32 and one[0]["label"] == 2


def test_torch_dataset_unreadable_samples():
    """A Pillow image from a file is loaded when its array is accessed."""

    def damaged() -> Any:
        return Image.open(io.BytesIO(png()[:600])), 0

    for row, message in ((damaged, ""), (lambda: next(iter(())), "StopIteration$")):
        with pytest.raises(UnreadableError, match=rf"^Rows\[1\]: {message}"):
            dataset((RGB, 0), row)[1]
    with pytest.raises(UserError, match=r"^data.source: Rows\[0\]: "):
        dataset(damaged)


def test_torch_splits_classes_and_labels():
    rows = Rows((RGB, 0), (RGB, 2), (RGB, 1), targets=torch.tensor([0, 2, 1]))
    train, _, classes = splits(Subset(rows, [2, 1]), rows)
    assert classes == ("0", "1", "2")
    assert train.labels is not None and train.labels.tolist() == [1, 2]
    assert train.name(1) == "Rows[1]"
    rows.classes = ["a", ("b", "β"), "c"]
    assert splits(Subset(rows, [2, 1]), rows)[2] == ("a", "b, β", "c")
    files = Rows((RGB, 0), (RGB, [1]), samples=[("a/1.jpg", 0), ("b/2.jpg", 1)])
    train, _, classes = splits(files, files, 2)
    assert (classes, train.name(1)) == (("0", "1"), "b/2.jpg")
    repeated = Rows((RGB, 0), (RGB, 1), samples=[("a/1.jpg", 0)])
    assert splits(repeated, repeated, 2)[0].name(1) == "Rows[1]"
    assert train[1]["label"] == 1 and train.labels is None
    files.labels = np.array([[False], [True]])
    assert splits(files, files, np.array(["a", "b"]))[0].labels.tolist() == [0, 1]
    changed = Rows((RGB, 1), (RGB, 0), targets=[0, 1])  # due to a target_transform
    assert splits(changed, changed)[0].labels is None
    with pytest.raises(UserError, match="the classes are unknown"):  # labels with a gap
        splits(Rows((RGB, 5), (RGB, 7), targets=[5, 7]), changed)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((Rows((RGB, 0)), Rows((RGB, 0))), "the classes are unknown; return .train, val, classes."),
        ((iter(()), Rows((RGB, 0)), "abc"), r"a split has no __len__ \(tuple_iterator\); "),
        ((Rows((RGB, 0)),), "returns an object of type tuple; return .train, val. or"),
        ((Rows((RGB, 0)), Rows((RGB, 0)), ["a", "b", "a"]), "several classes have the same name"),
        (
            (Rows((RGB, 0), classes=["a", "b"]), Rows((RGB, 0), classes=["b", "a"])),
            "the classes of the validation dataset differ from those of the training",
        ),
        ((Rows((RGB, 0)), None, "ab"), r"a split has no __len__ \(NoneType\); return"),
        ((Rows((RGB, 0)), Rows((RGB, 0)), []), "the classes are unknown; return "),
    ],
)
def test_torch_splits_invalid(found, message):
    with pytest.raises(UserError, match=rf"^data.source=tests.helpers.own_data:rows: {message}"):
        splits(*found)


@pytest.mark.parametrize("key", ["data.val_fraction=0.25", "data.val_fold=2/4"])
def test_torch_splits_held_out_samples(key):
    rows = Rows(*[(RGB, i % 2) for i in range(40)], targets=[i % 2 for i in range(40)])
    train, val, _ = splits(rows, None, words=(key,))
    assert np.bincount(train.labels).tolist() == [15, 15]
    assert np.bincount(val.labels).tolist() == [5, 5]
    names = {split.name(i) for split in (train, val) for i in range(len(split))}
    assert len(names) == 40
    del rows.targets
    _, val, _ = splits(rows, None, "ab", words=(key,))
    assert len(val) == 10
    with pytest.raises(UserError, match=rf"^{key}: the function returns a validation split"):
        splits(rows, rows, "ab", words=(key,))


def test_torch_dataset_fingerprint():
    def fingerprint(rows: list[Any], targets: list[int], **attributes: Any) -> str:
        split = Rows(*rows, targets=targets, **attributes)
        return TorchDataset(SharedObject((split,)), 0, CROP).fingerprint()

    same = fingerprint([(RGB, 0)] * 2, [0, 0])
    assert same == fingerprint([(RGB, 0), (RGB + 1, 0)], [0, 0])  # it may come from its own rng
    found = {same, fingerprint([(RGB, 0)] * 3, [0, 0, 0]), fingerprint([(RGB, 0)] * 2, [0, 1])}
    found.add(fingerprint([(RGB, 0)] * 2, [0, 0], samples=[("a/1.jpg", 0), ("a/2.jpg", 0)]))
    found.add(fingerprint([(RGB / 255, 0)] * 2, [0, 0]))
    assert len(found) == 5
