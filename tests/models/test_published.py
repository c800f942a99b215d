"""The preprocessing of published weights: torchvision's by file name, timm's by model."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conf.packages import import_torchvision
from conf.schema import UserError
from models import Preprocessing, published


@pytest.mark.parametrize(
    ("name", "file", "sizes"),
    [
        ("resnet50", "resnet50-0676ba61.pth", (256, 224, "bilinear")),
        ("resnet50", "resnet50-11ad3fa6.pth", (232, 224, "bilinear")),
        ("efficientnet_b0", "efficientnet_b0_rwightman-7f5810bc.pth", (256, 224, "bicubic")),
    ],
)
def test_torchvision(name: str, file: str, sizes: tuple[int, int, str]) -> None:
    found = published(name, Path("/somewhere") / file)
    assert found is not None
    assert (found.short_side, found.val_size, found.interpolation) == sizes
    assert found.mean == (0.485, 0.456, 0.406) and found.classes[:2] == ("tench", "goldfish")
    assert published("vit_s16", Path(file)) is None
    assert published(name, Path("checkpoint.pth")) is None


def test_every_file_of_torchvision() -> None:
    """Each has a resize and a centre crop that a list of transforms can state."""
    vision = import_torchvision()
    for name in vision.models.list_models(module=vision.models):
        for entry in vision.models.get_model_weights(name):
            found = published(name, Path(Path(entry.url).name))
            assert found is not None and len(found.transforms(found.val_size)) == 2


def stub(monkeypatch: pytest.MonkeyPatch, **stated: Any) -> None:
    """Replace timm by a module that states a preprocessing."""
    common = {
        "input_size": (3, 224, 224),
        "test_input_size": None,
        "crop_pct": 0.9,
        "test_crop_pct": None,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.4, 0.5, 0.6),
        "crop_mode": "center",
    }
    timm = ModuleType("timm")
    timm.__spec__ = ModuleSpec("timm", None)
    timm.get_pretrained_cfg = lambda name: SimpleNamespace(**common | stated)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm rounds the short side down: 224 / 0.9 is 248.9."""
    stub(monkeypatch)
    assert published("timm/vit", Path("x")) == Preprocessing(
        224, 224, 248, "bicubic", (0.5, 0.5, 0.5), (0.4, 0.5, 0.6)
    )
    stub(monkeypatch, test_input_size=(3, 288, 288), test_crop_pct=1.0)
    found = published("timm/resnet50", Path("x"))
    assert found is not None
    assert (found.image_size, found.val_size, found.short_side) == (224, 288, 288)
    resize = {"size": 320, "interpolation": "bicubic"}
    assert found.transforms(320) == [{"resize": resize}, {"center_crop": {"size": 320}}]


@pytest.mark.parametrize("stated", [{"crop_mode": "squash"}, {"interpolation": "nearest"}])
def test_preprocessing_that_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, str]
) -> None:
    stub(monkeypatch, **stated)
    found = published("timm/vit", Path("x"))
    assert found is not None
    with pytest.raises(UserError, match=r"^augment\.val: .*; give augment\.val="):
        found.transforms(224)
