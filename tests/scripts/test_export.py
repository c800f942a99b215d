"""Exported files are read as by a different program and compared with the model."""

import random
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from conf.errors import RunError, UserError
from models.vit import PatchEmbed, VisionTransformer
from pipeline.data import decode
from pipeline.data.augment import TRANSFORMS, Compose, build_by_name
from pipeline.data.field import Field
from pipeline.feed.batch import DeviceSlot
from scripts import export
from scripts.export import CPU, Job
from scripts.lib.published import MODES, library_metadata, preprocessing
from scripts.lib.trained import Trained, build_val, open_trained
from tests.conftest import CLASSES
from tests.helpers.second_input import with_age

HERE = ["train.device=cpu", "loader.workers=0"]
needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in export.FORMATS["onnx"]), reason="needs onnxruntime"
)


@pytest.fixture(scope="module")
def trained(folder: Path, photos: Path) -> Trained:
    """Return a model whose predictions differ between images, unlike after a few steps."""
    found = open_trained(folder, [*HERE, f"data.root={photos}", "data.exif_orientation=true"])
    torch.manual_seed(0)
    head = {n: v + 0.3 * torch.randn(v.shape) for n, v in found.weights.items() if n[:2] == "fc"}
    return replace(found, weights=found.weights | head)


def preprocess(metadata: dict[str, Any], files: Any) -> Tensor:
    """Return input for the files by the exported metadata, like a different program."""
    transforms = Compose(build_by_name(metadata["transforms"], TRANSFORMS, key="augment.val"))
    turn, images = metadata["exif_orientation"], []
    for row in range(len(files)):
        picture = decode.open_picture(files.read(row), "pillow", exif_orientation=turn)
        images.append(transforms(picture, random.Random(0)).pixels())
    batch = np.stack(images)
    if not metadata["inside"]:
        mean, std = (np.array(metadata[name], np.float32) for name in ("mean", "std"))
        batch = np.moveaxis((batch / np.float32(metadata["highest"]) - mean) / std, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(batch))


@pytest.mark.parametrize(
    ("to", "inside"),
    [
        ("pt2", True),
        ("safetensors", False),
        pytest.param("onnx", False, marks=needs_onnx),
        pytest.param("onnx", True, marks=needs_onnx),
    ],
)
def test_export_formats(trained, tmp_path, to, inside):
    files = build_val(trained.config).val
    job, out = Job(trained, to, inside, 32), tmp_path / f"model.{to}"
    out.write_text("earlier")
    export.export(job, out)
    assert [*tmp_path.iterdir()] == [out] and export.logging.root.isEnabledFor(30)  # warnings
    predict, texts = export.open_exported(job, out)
    assert texts["classes"] == list(CLASSES)
    steps = [{"resize": {"size": 32, "interpolation": "bilinear"}}, {"center_crop": {"size": 32}}]
    assert texts["preprocessing"]["transforms"] == steps
    images = torch.from_numpy(np.stack([files[i]["image"] for i in range(len(files))]))
    with torch.no_grad():
        eager = trained.build(CPU)(DeviceSlot(job.format).normalize("image", images))
        assert job.names == ["images"]
        assert eager.argmax(1).unique().numel() > 1
        torch.testing.assert_close(predict(job.input(images)), eager)
        inputs = preprocess(texts["preprocessing"], files)
        difference = (inputs.float() - job.input(images)).abs().mean()
        assert difference < (1 if inside else 0.02)  # one of 255 levels
        assert torch.equal(predict(inputs).argmax(1), eager.argmax(1))


@pytest.mark.parametrize(
    ("to", "inside"),
    [
        ("pt2", False),
        ("pt2", True),
        ("safetensors", False),
        pytest.param("onnx", True, marks=needs_onnx),
    ],
)
def test_export_second_input(trained, tmp_path, monkeypatch, to, inside):
    """A graph has an input per field that forward() reads; each file states the other fields."""
    two = with_age(trained, monkeypatch)
    job, out = Job(two, to, inside, 32), tmp_path / f"model.{to}"
    export.export(job, out)
    predict, texts = export.open_exported(job, out)
    assert texts["preprocessing"]["input"]["name"] == "image"
    assert texts["preprocessing"]["fields"] == {
        "age": {"dtype": "float32", "shape": [], "image": False}
    }
    images, ages = torch.zeros(2, 32, 32, 3, dtype=torch.uint8), torch.tensor([0.0, 7])
    with torch.no_grad():
        young, old = predict(job.input(images), ages)
    torch.testing.assert_close(old - young, torch.tensor([7.0, 0, 0]))
    if to == "pt2":
        assert torch.export.load(out).graph_signature.user_inputs == ("image", "age")
    elif to == "safetensors":
        assert open_trained(out).fields == {"age": Field("float32", [])}


def test_export_command_line(folder, image_root, tmp_path, monkeypatch, capsys):
    """The run's data is found again; the file states everything that its weights need."""
    monkeypatch.chdir(tmp_path)
    assert export.export_model(export.arguments([str(folder), "--to", "safetensors", *HERE])) == 0
    assert "compared with eager mode: largest difference " in capsys.readouterr().out
    (out,) = tmp_path.iterdir()
    assert out.name == "small-optim.lr=0.05-best.safetensors"
    again, own = open_trained(out), open_trained(folder)
    assert (again.classes, again.image_size) == (own.classes, own.image_size)
    assert again.config.model.name == own.config.model.name
    assert again.config.data.mean == own.config.data.mean
    found = list(map(export.with_all_parameters, own.config.augment.val))
    assert found == again.config.augment.val
    entry = export.with_all_parameters({"resize": {"size": [224, 112], "crop_ratio": 0.875}})
    assert entry == {"resize": {"size": [256, 128], "interpolation": "bilinear"}}
    assert export.with_all_parameters("horizontal_flip") == "horizontal_flip"
    assert own.averaged and all(torch.equal(again.weights[k], own.weights[k]) for k in own.weights)
    words = [str(folder), "--to", "pt2", "--preprocessing", *HERE]
    assert export.export_model(export.arguments(words)) == 0
    out.with_name("small-optim.lr=0.05-best-preprocessing.pt2").unlink()  # not that of --to pt2
    with pytest.raises(UserError, match=r"^--to hub: needs a model timm/NAME, not resnet_tiny; "):
        export.export_model(export.arguments([str(folder), "--to", "hub", *HERE]))


@pytest.mark.parametrize(
    ("name", "mode"),
    [*product(["timm/resnet10t"], MODES), ("timm/efficientvit_m0", "center")],
)
def test_export_hub_folder_for_timm(name, mode, trained, tmp_path):
    """timm's own weights of the first are tested at 224 px; the last states that it takes 224."""
    pytest.importorskip("timm")
    data = trained.config.data
    out = tmp_path / "model"
    weights = models.build(name, num_classes=3, image_size=32).state_dict()
    val = preprocessing(32, 36, "bicubic", data, mode)["augment.val"]
    config = replace(trained.config, model=replace(trained.config.model, name=name))
    config = replace(config, augment=replace(config.augment, val=val))
    job = Job(replace(trained, config=config, weights=weights), "hub", False, 32)
    export.export(job, out)
    found = {path.name for path in out.iterdir()}
    assert found == {"README.md", "config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # all follow the umask
    card = (out / "README.md").read_text()
    assert " % top-1 of 15 images\n" in card and "`python train.py recipe=" in card
    metadata = library_metadata(f"timm/local-dir:{out}", Path("pretrained"))
    assert metadata.classes == CLASSES
    assert metadata.config["data.mean"] == list(config.data.mean)
    assert metadata.config["augment.val"] == val
    config = replace(config, augment=replace(config.augment, val=["horizontal_flip"]))
    with pytest.raises(UserError, match=r"^--to hub: supports a resize and a center_crop as in "):
        export.export(replace(job, trained=replace(job.trained, config=config)), tmp_path / "other")


def test_export_card_accuracy(trained):
    row = {"step": 7, "top1": 90.0}
    stored = {"step": 7, "validation": row, "identity": {"data.val": "1,000 images, SHA-256 0"}}
    assert export.accuracy(replace(trained, stored=stored)) == "90.00 % top-1 of 1,000 images"
    assert export.accuracy(replace(trained, stored=stored | {"step": 8})) == "not known"


@pytest.mark.parametrize("to", ["pt2", pytest.param("onnx", marks=needs_onnx)])
def test_export_vision_transformer(trained, tmp_path, to):
    """Batches have 1, 3 and 12 images, because the batch size is not fixed."""
    torch.manual_seed(0)
    sizes = {"num_classes": 5, "image_size": 32, "depth": 2, "heads": 2, "hidden": 64}
    model = VisionTransformer(patch_embed=PatchEmbed(3, 16, 32), **sizes).eval()
    nn.init.normal_(model.head.weight)
    job = Job(trained, to, True, 32)
    export.save(job, model, tmp_path / f"a.{to}")
    predict, _ = export.open_exported(job, tmp_path / f"a.{to}")
    export.compare(job, predict, model)


class Faulty(nn.Module):
    """Behaves differently during export."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) * (1.01 if torch.compiler.is_exporting() else 1)


class FixedBatch(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.reshape(2, 3, -1).mean(2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Faulty(), r"^--to pt2: differs from eager mode: largest difference .*, bound "),
        (FixedBatch(), r"^--to pt2: model\.name=resnet_tiny cannot be exported \("),
    ],
)
def test_export_failure_keeps_earlier_file(trained, tmp_path, monkeypatch, model, message):
    monkeypatch.setattr(Trained, "build", lambda *_: model)
    out = tmp_path / "model.pt2"
    out.write_text("earlier")
    with pytest.raises(RunError, match=message):
        export.export(Job(trained, "pt2", False, 32), out)
    assert out.read_text() == "earlier" and list(tmp_path.iterdir()) == [out]


def test_export_compare_rejects_nan(trained):
    job, model = Job(trained, "pt2", False, 32), trained.build(CPU)
    with pytest.raises(RunError, match="largest difference nan"):
        export.compare(job, lambda x: model(x) * torch.nan, model)
