"""A stage as in a fork; workers draw a shift, and the device adds it to the images."""

from typing import Any

import numpy as np
import pytest
import torch

from conf.compose import from_overrides
from pipeline.data.augment import sample_rng
from pipeline.data.build import DATASETS, build_datasets
from pipeline.data.device_stage import DeviceStage
from pipeline.data.field import Field
from tests.pipeline.loaders import CPU, Files, assert_equal, opened, training, validation

SHIFTED = f"data.on_device=[{__name__}:shifted]"


class Shifted(DeviceStage):
    fields = {"shift": Field(np.float32)}

    def draw(self, picture: Any, rng: Any) -> Any:
        return picture, {"shift": rng.random()}

    def image_fields(self, picture: Any) -> dict[str, Any]:
        return {"image": 255 - picture.pixels()}

    def on_device(self, fields: Any, slot: Any) -> dict[str, torch.Tensor]:
        images = super().on_device(fields, slot)["image"]
        return {"image": fields["shift"][:, None, None, None] - images}


def shifted(*_: object) -> DeviceStage:
    return Shifted()


@pytest.mark.parametrize("workers", [0, 2])
def test_device_stage_changes_training_images_only(image_root, workers):
    """The training step gets the dataset's fields, but not the stage's."""
    levels = ("data.mean=[0.5]", f"data.std=[{1 / 255}]")  # the negative gets the opposite sign
    with opened(image_root, *levels, workers=workers) as feed:
        plain, validated = training(feed), validation(feed)
    with opened(image_root, *levels, SHIFTED, workers=workers) as feed:
        dataset = feed.datasets.train
        for batch, before in zip(training(feed), plain, strict=True):
            rngs = [(i, sample_rng(dataset.seed, e, i)) for e, i in batch.samples.tolist()]
            shifts = torch.tensor([dataset.load(*each)["shift"] for each in rngs])
            expected = shifts[:, None, None, None] + before["image"]
            torch.testing.assert_close(batch["image"], expected)
            assert batch.fields.keys() == {"image", "label"}
            assert torch.equal(batch["label"], before["label"])
        assert_equal(validation(feed), validated)


def test_device_stage_not_used_for_validation(monkeypatch):
    same = Files(9)
    monkeypatch.setitem(DATASETS, "fake", lambda *_: (same, same, ("a", "b")))
    datasets = build_datasets(from_overrides(["data=fake", SHIFTED]), CPU)
    assert type(datasets.train.stage) is Shifted
    assert type(datasets.val.stage) is DeviceStage
