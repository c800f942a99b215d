"""Trained models from files of every kind; no file content is executed or resolved."""

import argparse
import struct
from typing import Any

import pytest
import torch

import models
from conf.errors import UserError
from engine import checkpoint
from pipeline.data.field import Field
from scripts.lib.trained import open_trained
from tests.conftest import CLASSES
from tests.helpers.processes import run_python
from tests.helpers.results import same
from tests.helpers.second_input import with_age

CPU = torch.device("cpu")
TINY = ["model.name=resnet_tiny", "data.image_size=32"]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(0)
    return models.build("resnet_tiny", num_classes=7, image_size=32).state_dict()


def prefixed(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


ZERO = {"fc.bias": torch.zeros(7)}
KINDS: dict[str, Any] = {
    "pytorch/examples": lambda w: {"arch": "resnet_tiny", "state_dict": prefixed("module.", w)},
    "torchvision": lambda w: {"model": w, "args": argparse.Namespace(model="resnet_tiny", lr=0.1)},
    "torchvision with EMA": lambda w: {
        "model": ZERO,
        "model_ema": {"n_averaged": torch.tensor(3), **prefixed("module.", w)},
    },
    "timm with EMA": lambda w: {"state_dict": ZERO, "state_dict_ema": w},
    "torch.compile of DDP": lambda w: prefixed("_orig_mod.module.", w),
    "DDP of torch.compile": lambda w: prefixed("module._orig_mod.", w),
    "Lightning": lambda w: {"state_dict": prefixed("model.", w), "pytorch-lightning_version": "2"},
    "format 1": lambda w: {"format": 1, "step": 3, "state": {"model": ZERO, "ema": w}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_open_trained_files_of_other_projects(tmp_path, weights, kind):
    torch.save(KINDS[kind](weights), tmp_path / "file.pth")
    found = open_trained(tmp_path / "file.pth", TINY)
    assert same(found.weights, weights)
    assert (found.num_classes, found.classes, found.stored) == (7, (), {})
    model = found.build(CPU)
    assert not model.training and same(model.state_dict(), weights)
    found.check_fields(found.fields_at(48))
    assert [*found.inputs(model, 32)] == ["image"]


def test_open_trained_rejects_files(tmp_path, weights):
    path = tmp_path / "file.pth"
    torch.save({"arch": "x", "state_dict": weights}, path)
    no_name = "not a checkpoint of this .*; set model.name=NAME "
    other = "has no head.weight, head.bias of model.name=vit_s16, but keys such as "
    for words, message in (([], no_name), (["model.name=vit_s16"], other)):
        with pytest.raises(UserError, match=rf"^{path}: {message}"):
            open_trained(path, words)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10**7) + b"{}")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read \(.*\.safetensors\)$"):
        open_trained(tmp_path / "model.safetensors", TINY)


@pytest.mark.parametrize("name", ["", "checkpoints/../checkpoints", "checkpoints/best.pt"])
def test_open_trained_checkpoint(folder, name):
    config = (found := open_trained(folder / name)).config
    state = checkpoint.load(found.path)["state"]
    assert same(found.weights, state["ema"]) and found.averaged
    assert (found.classes, found.num_classes, found.image_size) == (CLASSES, 3, 32)
    assert (found.name, found.stored["step"]) == (f"{folder.name},{found.path.stem}", state["step"])
    assert config.model.name == "resnet_tiny" and config.data.val_size == 32
    assert config.augment.val == [{"resize": {"size": 32}}, {"center_crop": {"size": 32}}]
    # Settings for a different machine are not used.
    assert (config.loader.workers, config.train.device) == ("auto", "auto")
    for key in ("data.image_size", "model"):
        with pytest.raises(UserError, match=f"^{key}: is fixed by the checkpoint; remove"):
            open_trained(folder, [f"{key}=40"])


@pytest.mark.parametrize("script", ["evaluate", "predict"])
def test_scripts_reject_checkpoint_without_config(script, folder, photos, tmp_path):
    content = checkpoint.load(checkpoint.find_checkpoint(folder))
    torch.save(content | {"config": {}}, tmp_path / "file.pt")
    words = [tmp_path / "file.pt", *[photos] * (script == "predict")]
    done = run_python(f"scripts/{script}.py", *words)
    message = f"{script}.py: {tmp_path}/file.pt: its config is incomplete; pass a different check"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(message)


@pytest.mark.parametrize(
    "fields",
    [3, ["age"], {"age": 3}, {"age": {"kind": "int64"}}, {"age": {"dtype": "number"}}]
    + [{"age": {"dtype": "int64", "shape": "2"}}, {"age": {"dtype": "int64", "shape": 2}}],
)
def test_open_trained_rejects_invalid_fields(fields, folder, tmp_path):
    content = checkpoint.load(checkpoint.find_checkpoint(folder))
    content["model_input"]["fields"] = fields
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(UserError, match=r"file\.pt: its sample fields are invalid; pass a diff"):
        open_trained(tmp_path / "file.pt")


def test_open_trained_sample_fields(folder, tmp_path, monkeypatch):
    """A checkpoint without fields has only the image."""
    found = open_trained(folder)
    assert found.fields["label"] == Field("int64", [])
    content = checkpoint.load(found.path)
    del content["model_input"]["fields"]
    torch.save(content, tmp_path / "old.pt")
    old = open_trained(tmp_path / "old.pt")
    assert [*old.fields_at(32)] == ["image"] == [*old.inputs(old.on_meta(), 32)]
    aged = with_age(found, monkeypatch)
    assert [*aged.inputs(aged.on_meta(), 32)] == ["image", "age"]
    with pytest.raises(UserError, match=r'^batch\["age"\]: samples have no such field, only '):
        old.check_fields(old.fields_at(32))


def test_best_checkpoint_in_other_libraries(folder):
    """The file has the weights where timm expects them, and only once."""
    path, state = checkpoint.find_checkpoint(folder), open_trained(folder).weights
    assert same(dict(torch.load(path)["state_dict"]), state)
    assert same(dict(pytest.importorskip("timm").models.load_state_dict(str(path))), state)
    size = sum(t.nbytes for t in models.weights_in(torch.load(path), origin="").values())
    assert path.stat().st_size < 4 * size + 100_000


def test_open_trained_class_names(tmp_path, weights):
    path, names = tmp_path / "file.pth", tmp_path / "names.txt"
    torch.save(weights, path)
    names.write_text("".join(f"class {i}\n" for i in range(7)))
    assert open_trained(path, TINY, classes=names).classes == tuple(f"class {i}" for i in range(7))
    names.write_text("one\ntwo\ntwo\n")
    with pytest.raises(UserError, match=r"has 2 different lines, the model has 7 classes"):
        open_trained(path, TINY, classes=names)


def test_trained_build_skips_rewritten_layers(folder):
    """A GPU run in bf16 trains with rewritten layers; exported files have none."""
    found = open_trained(folder, ["train.precision=bf16"])
    found.stored["model_input"]["rewrites_layers"] = True
    plain = models.build("resnet_tiny", num_classes=3, image_size=32)
    types = [type(module) for module in found.build(CPU).modules()]
    assert types == [type(module) for module in plain.modules()]
