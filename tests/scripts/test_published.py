"""Preprocessing of published weights: torchvision's by file name, timm's by model."""

import io
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import models
from pipeline.data.build import build_image_transforms
from pipeline.data.decode import open_picture
from scripts.lib.published import MODES, UNKNOWN, library_metadata, timm_config
from scripts.lib.trained import open_trained
from tests.helpers.drawings import draw_image
from tests.reliability.odd_images import encoded

PHOTO = draw_image("dots", np.random.default_rng(3))


def test_published_torchvision():
    """tests/extras/test_finetune.py has files with other values."""
    path = Path("/somewhere/resnet50-0676ba61.pth")
    found = library_metadata("resnet50", path)
    assert found.classes[:2] == ("tench", "goldfish")
    means = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
    resize = {"size": 256, "interpolation": "bilinear"}
    transforms = [{"resize": resize}, {"center_crop": {"size": 224}}]
    sizes = dict.fromkeys(("data.image_size", "data.val_size"), 224)
    assert found.config == {**sizes, **means, "augment.val": transforms}
    assert library_metadata("vit_s16", path) is UNKNOWN
    assert library_metadata("resnet50", Path("checkpoint.pth")) is UNKNOWN


def test_published_every_torchvision_file():
    """Each file has a resize and a center crop that a list of transforms can express."""
    from torchvision import models as vision

    for name in vision.list_models(module=vision):
        paths = [Path(entry.url) for entry in vision.get_model_weights(name)]
        for path in (paths[0], paths[-1], Path("pretrained")):
            assert library_metadata(name, path).config


def test_published_size_keeps_crop_ratio(tmp_path):
    path = tmp_path / "squeezenet1_1-b8a52dc0.pth"
    model = models.build("squeezenet1_1", num_classes=1000, image_size=224)
    torch.save(model.state_dict(), path)
    config = open_trained(path, ["model.name=squeezenet1_1", "data.val_size=112"]).config
    resize, crop = config.augment.val
    assert (resize["resize"]["size"], crop["center_crop"]["size"]) == (128, 112)


@pytest.mark.parametrize(
    ("changes", "resize", "crop"),
    [
        ({}, {"size": 248}, {"size": 224}),  # timm rounds down; 224 / 0.9 is 248.9
        ({"test_input_size": (3, 288, 288), "test_crop_pct": 1}, {"size": 288}, {"size": 288}),
        ({"crop_mode": "squash"}, {"size": [248, 248]}, {"size": 224}),
        ({"crop_mode": "border"}, {"size": 248, "side": "longer"}, {"fill": [0, 128, 255]}),
    ],
)
def test_published_timm(changes, resize, crop):
    cfg = {"input_size": (3, 256, 224), "test_input_size": None, "crop_pct": 0.9}
    cfg |= {"test_crop_pct": None, "crop_mode": "center", "interpolation": "bicubic"}
    cfg |= {"mean": (0, 0.5, 1), "std": (0.4, 0.5, 0.6)}
    config = timm_config(SimpleNamespace(**cfg | changes))
    assert (config["data.mean"], config["data.std"]) == ([0, 0.5, 1], [0.4, 0.5, 0.6])
    assert config["data.image_size"] == 224
    crop = {"size": config["data.val_size"], **crop}
    resize = {**resize, "interpolation": "bicubic"}
    assert config["augment.val"] == [{"resize": resize}, {"center_crop": crop}]


def test_published_every_timm_model():
    """Pixels differ by rounding. Pillow 13 may resize the height first, but torch the width."""
    timm = pytest.importorskip("timm")
    files = [encoded(PHOTO.resize(size)) for size in ((300, 200), (20, 15), (200, 300), (90, 90))]
    modes: dict[str, str] = {}  # of each list of transforms
    for name in timm.list_models(pretrained=True):
        cfg = timm.get_pretrained_cfg(name)
        config, theirs = timm_config(cfg), timm.data.resolve_data_config({}, vars(cfg), None, True)
        *_, height, width = theirs["input_size"]
        assert config["data.val_size"] == min(height, width)
        assert config["data.mean"] == [*theirs["mean"]] and config["data.std"] == [*theirs["std"]]
        entries = config["augment.val"]
        if height != width or str(entries) in modes:
            continue
        modes[str(entries)] = theirs["crop_mode"]
        transform = build_image_transforms(entries, "augment.val")
        expected = timm.data.create_transform(**theirs, normalize=False)
        for data in files[len(modes) % 2 :: 2]:
            ours = transform(open_picture(data, "pillow"), Random(0)).pixels().astype(float)
            image = expected(Image.open(io.BytesIO(data))).permute(1, 2, 0).numpy()
            assert abs(image - ours).mean() < 0.2, name  # of 255 levels
    assert {*modes.values()} == {*MODES}
    former = library_metadata("timm/vit_tiny_patch16_224_in21k", Path("x")).config
    assert former["data.mean"] == [0.5] * 3
