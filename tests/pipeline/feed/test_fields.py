"""Samples for other tasks: each field arrives as returned; images are normalized."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from conf.compose import from_overrides
from conf.errors import UserError
from pipeline.data.augment import build_by_name
from pipeline.data.build import DATASETS, build_datasets
from pipeline.data.dataset import Dataset
from pipeline.data.field import Field, image_field
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat, channels_first
from pipeline.feed.batch_augment import BATCH_TRANSFORMS
from pipeline.feed.feed import Feed, open_feed
from pipeline.feed.loader import LoaderError
from tests.engine.plans import ALONE
from tests.pipeline.loaders import loaded

SIZE = 12
Fields = dict[str, Field]


class Noise(Dataset):
    """Samples of any fields; `changed` replaces or removes (None) fields of sample 3."""

    fields: Fields = {}

    def __init__(self, count: int, fields: Fields, changed: Mapping[str, Any] | None = None):
        self.count, self.fields, self.changed = count, fields, changed or {}

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: random.Random) -> dict[str, Any]:
        drawn = np.random.default_rng(rng.getrandbits(64))
        sample = {
            name: (drawn.random(field.shape) * field.highest).astype(field.dtype)
            for name, field in self.fields.items()
        }
        changed = self.changed if index == 3 else {}
        return {k: v for k, v in (sample | changed).items() if v is not None}

    def name(self, index: int) -> str:
        return f"noise {index}"

    def fingerprint(self) -> str:
        return "noise"


EVERYTHING = {
    "image": image_field(SIZE),
    "view": image_field(SIZE),
    "frames": Field(np.uint8, (2, SIZE, SIZE, 3), image=True),
    "mask": Field(np.uint8, (SIZE, SIZE)),
    "number": Field(np.float32),
    "labels": Field(np.float32, (5,)),
    "place": Field(np.int32, (2,)),
}
DEEP = {"image": Field(np.uint16, (SIZE, SIZE, 5), image=True), "depth": Field(np.uint16)}


def pick(*names: str) -> Fields:
    return {name: EVERYTHING[name] for name in names}


@contextmanager
def opened(fields: Fields, *overrides: str, **changed: Any) -> Iterator[Feed]:
    """Open a feed of 20 and 11 samples in batches of 8."""
    fixed = ["data=fake", f"data.image_size={SIZE}", "data.mean=[0.5]", "data.std=[0.25]"]
    config = from_overrides([*fixed, "loader.batch_size=8", "loader.workers=0", *overrides])
    splits = Noise(20, fields, changed), Noise(11, fields), ("a", "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "fake", lambda *_: splits)
        datasets = build_datasets(config)
    with open_feed(config, datasets, ALONE) as feed:
        yield feed


def check(batch: Batch, dataset: Dataset, samples: np.ndarray) -> None:
    """Compare a batch and its split copy with its samples."""
    count, parts = len(samples), batch.clone().split(2)
    assert (batch.samples[:, 1] >= 0).tolist() == [True] * count + [False] * (8 - count)
    assert batch.samples[:count].tolist() == samples.tolist()
    assert list(batch.fields) == list(dataset.fields)
    for name, rows in loaded(dataset, samples).items():
        found = batch[name]
        assert torch.equal(torch.cat([part[name] for part in parts]), found)
        field = dataset.fields[name]
        if field.image:
            rows = (channels_first(rows).double() / field.highest - 0.5) / 0.25
            found = found.double()
        np.testing.assert_allclose(found[:count], rows, rtol=0, atol=1e-6 if field.image else 0)
        assert (found.dtype, found.shape[1:]) == (rows.dtype, rows.shape[1:])


@pytest.mark.parametrize("fields", [EVERYTHING, DEEP], ids=["everything", "deep"])
def test_feed_fields_equal_loaded(fields):
    """The last batch is short."""
    with opened(fields, "loader.workers=2") as feed:
        for split, stop in ((feed.train, 6), (feed.val, feed.num_val_batches)):
            for batch in split.batches(0, stop):
                check(batch, split.loader.dataset, split.loader.samples(batch.step))
        assert (batch.step, (batch.samples[:, 1] >= 0).sum()) == (1, 3)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mask": np.zeros((12, 11))}, r"field mask is float64 \(12, 11\), .* uint8 \(12, 12\), "),
        ({"number": np.zeros(1)}, r"field number is float64 \(1,\), expected float32 \(\), "),
        ({"mask": np.full((12, 12), 0.5)}, r"field mask is float64 .* expected uint8 \(12, 12\), "),
        ({"mask": np.full((12, 12), 258)}, r"field mask is int64 .* expected uint8 \(12, 12\), "),
        ({"number": None, "mask": None}, "sample lacks (mask|number), which is in the dataset's"),
    ],
)
def test_loader_names_invalid_sample(changed, reason):
    with (
        opened(pick("image", "mask", "number"), **changed) as feed,
        pytest.raises(LoaderError, match=rf"^noise 3: the .*{reason}"),
    ):
        list(feed.train.batches(0, 3))


def pictures(batch: Batch) -> torch.Tensor:
    """Return image, view and both frames of each sample, float32 [B, 4, 3, S, S]."""
    return torch.cat([batch["image"][:, None], batch["view"][:, None], batch["frames"]], 1)


@dataclass(kw_only=True)
class InPlace:
    p: float

    def draw(self, rng, rows, size):
        return np.zeros((0, rows))

    def __call__(self, images, targets, numbers, partners):
        return images.mul_(self.p / 2), targets.mul_(self.p / 2)


PARTNERS = torch.tensor([3, 0, 1, 2, 7, 4, 5, 6])


@pytest.mark.parametrize(
    ("names", "entry"),
    [
        (("number",), "mixup"),
        (("number",), f"{__name__}:InPlace"),
        (("labels",), "cutmix"),
        (("number", "labels", "mask"), "random_erasing"),
    ],
)
def test_mix_all_images_and_numbers(names, entry):
    """Images and frames use the same partners and boxes; other fields do not change."""
    fields = pick("image", "view", "frames", *names)
    (transform,) = build_by_name([{entry: {"p": 1.0}}], BATCH_TRANSFORMS, key="augment.batch")
    with (
        opened(fields) as plain,
        opened(fields, f"augment.batch=[{{{entry}: {{p: 1.0}}}}]") as feed,
    ):
        for before, after in zip(plain.train.batches(0, 3), feed.train.batches(0, 3), strict=True):
            numbers = before[names[0]].reshape(8, -1)
            after = feed.mix(after)
            images, found = pictures(before), pictures(after)
            for number in range(4):
                rng = np.random.Generator(np.random.PCG64([0, before.step, 0, 1]))
                drawn = torch.from_numpy(transform.draw(rng, 8, SIZE)).float()
                arguments = images[:, number] + 0, numbers + 0, drawn, PARTNERS
                expected, target = transform(*arguments)
                assert torch.equal(found[:, number], expected)
                assert not torch.equal(found[:, number], images[:, number])
            for name in names:
                assert torch.equal(after[name], before[name])
            assert ("target" in after.fields) == (entry != "random_erasing")
            if "target" in after.fields:
                assert torch.equal(after["target"], target.reshape(before[names[0]].shape))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (pick("image"), "augment.batch: .* a sample has image; remove them"),
        (pick("image", "mask"), "augment.batch: .* a sample has image, mask; "),
        (pick("image", "number", "mask"), "augment.batch: .* a sample has image, number, mask; "),
        (EVERYTHING | {"view": DEEP["image"]}, "data.mean: .* differ in"),
    ],
)
def test_open_feed_rejects_unmixable_fields(fields, reason):
    with pytest.raises(UserError, match=rf"^{reason}"), opened(fields, "augment.batch=[mixup]"):
        pass


def test_device_slot_reuses_float_memory():
    """New memory could belong to a batch that the step still reads."""
    slot = DeviceSlot(ImageFormat(torch.device("meta"), [0.5], [0.5]))
    levels = torch.zeros(2, SIZE, SIZE, 3)
    assert slot.normalize("image", levels) is slot.normalize("image", levels)
