"""Models by name, error messages, and weights from files and libraries."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
from conf.schema import UserError
from models.weights import fit_weights, load_weights, resize_positions
from models.zoo import OURS, import_torchvision
from tests.libraries import timm_module

ROOT = Path(__file__).parents[2]


def tiny(num_classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("resnet_tiny", num_classes=num_classes, image_size=32)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A state_dict of resnet_tiny with 10 classes."""
    path = tmp_path / "weights.pt"
    torch.save(tiny(seed=5).state_dict(), path)
    return path


@pytest.mark.parametrize("name", OURS)
def test_our_models_run_and_learn(name: str) -> None:
    model = models.build(name, num_classes=7, image_size=32)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 7) and logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "name", ["resnet50", "vit_b_16", "efficientnet_b0", "mobilenet_v3_small", "vgg11_bn", "swin_t"]
)
def test_torchvision_models_by_name(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=64).eval()
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 7)


def test_names_and_sizes() -> None:
    names = models.available()
    assert {*OURS, "resnet18", "resnet50", "vit_b_16", "convnext_tiny"} <= set(names)
    # Detection models are not classifiers; googlenet returns a tuple.
    assert set(names).isdisjoint({"fasterrcnn_resnet50_fpn", "googlenet"})
    sizes = {"resnet_tiny": 308_650, "resnet50": 25_557_032, "vit_s16": 21_974_632}
    for name, count in sizes.items():
        classes = 10 if name == "resnet_tiny" else 1000
        with torch.device("meta"):
            model = models.build(name, num_classes=classes, image_size=224)
        assert models.parameter_count(model) == count
        assert models.is_convnet(model) == (name != "vit_s16")


@pytest.mark.parametrize("name", ["resnet51", "ResNet50", "", "os.system", "googlenet"])
def test_unknown_model(name: str) -> None:
    with pytest.raises(UserError) as error:
        models.build(name, num_classes=10, image_size=32)
    message = str(error.value)
    assert message.startswith(f"model.name={name}: no such model; ")
    assert "timm/<name>" in message and all(ours in message for ours in OURS)
    assert "did you mean resnet" in message or name != "resnet51"


def test_models_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"^model\.name=timm/resnet18: timm is not installed; pip"):
        models.build("timm/resnet18", num_classes=10, image_size=32)
    for name in ("vit_s16", "vit_b_16"):
        with pytest.raises(UserError, match=f"image_size=40: {name} needs a multiple of it"):
            models.build(name, num_classes=10, image_size=40)
    with pytest.raises(UserError, match="there are no published weights for resnet_tiny"):
        models.build("resnet_tiny", num_classes=10, image_size=32, pretrained=True)


def elsewhere(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the modules in tmp_path and a proxy that refuses every connection."""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
        "TORCH_HOME": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )


MISFIT = """
import torch
torch.library.register_fake('torchvision::nms', lambda dets, scores, iou_threshold: dets)
whole = True
"""

TIMM = """
import torchvision
from torch import nn


def is_model(name):
    return name == "tiny"


def list_models(pattern):
    return []


def create_model(name, pretrained, num_classes):
    if pretrained:
        raise ConnectionError("no route to huggingface.co\\nand more")
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
"""


@pytest.mark.slow
def test_timm_imports_a_torchvision_whose_operators_do_not_load(tmp_path: Path) -> None:
    """timm imports torchvision by itself."""
    (tmp_path / "timm.py").write_text(TIMM)
    (tmp_path / "torchvision.py").write_text(MISFIT)
    done = elsewhere(
        tmp_path,
        "import models; model = models.build('timm/tiny', num_classes=2, image_size=32); "
        "print(type(model).__name__)",
    )
    assert done.stdout == "Sequential\n", done.stderr


@pytest.mark.slow
def test_published_weights_without_a_network(tmp_path: Path) -> None:
    """One line with the URL, the reason and both remedies."""
    (tmp_path / "timm.py").write_text(TIMM)
    code = """
import models
from conf.schema import UserError
for name in ("resnet18", "timm/tiny"):
    try:
        models.build(name, num_classes=2, image_size=32, pretrained=True)
    except UserError as error:
        print(error)
"""
    done = elsewhere(tmp_path, code)
    *_, torchvision, timm = done.stdout.splitlines()  # torch.hub prints the URL first
    assert torchvision.startswith(
        "model.weights=pretrained: https://download.pytorch.org/models/resnet18-f37072fd.pth "
        "cannot be loaded (URLError: <urlopen error [Errno 111] Connection refused>); "
    )
    assert torchvision.endswith(
        f"; put it into {tmp_path}/hub/checkpoints, "
        "or give a file with model.weights=/path/to/file.pth"
    )
    assert timm == (
        "model.weights=pretrained: timm's weights for tiny cannot be loaded (ConnectionError: "
        "no route to huggingface.co); give a file with model.weights=/path/to/file.pth"
    )


@pytest.mark.parametrize("averaged", [True, False])
def test_weights_from_a_checkpoint_are_the_validated_ones(tmp_path: Path, averaged: bool) -> None:
    plain, average = tiny(seed=1).state_dict(), tiny(seed=2).state_dict()
    state = {"model": plain, "ema": average if averaged else None, "optimizer": {}, "step": 3}
    torch.save({"format": 1, "step": 3, "state": state}, tmp_path / "step-00000003.pt")
    model = tiny()
    load_weights(model, tmp_path / "step-00000003.pt")
    assert same(model.state_dict(), average if averaged else plain)


def test_weights_for_another_number_of_classes(
    weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(num_classes=3)
    fresh = {k: v.clone() for k, v in model.state_dict().items()}
    with caplog.at_level(logging.WARNING):
        load_weights(model, weights)
    stored, now = torch.load(weights, weights_only=True), model.state_dict()
    assert all(torch.equal(now[k], (fresh if k.startswith("fc.") else stored)[k]) for k in now)
    (record,) = caplog.records
    assert "fc.weight, fc.bias keep their initial weights" in record.getMessage()


def test_weights_without_a_head(caplog: pytest.LogCaptureFixture) -> None:
    stored = {k: v for k, v in tiny(seed=5).state_dict().items() if not k.startswith("fc.")}
    model = tiny(num_classes=3)
    fit_weights(model, stored, origin="test", new_head=True)
    assert all(torch.equal(model.state_dict()[k], stored[k]) for k in stored)
    (record,) = caplog.records
    assert record.getMessage() == (
        "test: fc.weight, fc.bias keep their initial weights: the file has no head"
    )
    with pytest.raises(UserError, match=r"fc.weight, fc.bias are missing; check model.name$"):
        fit_weights(model, stored, origin="test")


@pytest.mark.parametrize(
    ("size", "other"), [(64, 96), pytest.param(96, 64, marks=pytest.mark.slow)]
)
def test_positions_of_another_image_size(size: int, other: int) -> None:
    """The result of torchvision's interpolate_embeddings."""
    import_torchvision()
    from torchvision.models.vision_transformer import interpolate_embeddings

    stored = models.build("vit_b_32", num_classes=3, image_size=size).state_dict()
    model = models.build("vit_b_32", num_classes=3, image_size=other)
    fit_weights(model, dict(stored), origin="test", new_head=True)
    theirs = interpolate_embeddings(other, 32, stored.copy())
    assert same(model.state_dict(), theirs)


@pytest.mark.parametrize("tokens", [1, 0, 5])
def test_positions_as_in_timm(tokens: int) -> None:
    """Also without a class token, or with registers."""
    resample = timm_module("layers").resample_abs_pos_embed
    positions = torch.randn(1, tokens + 14 * 14, 8)
    for side in (7, 10, 24):
        resized = resize_positions(positions, tokens + side**2, antialias=True)
        theirs = resample(positions, [side, side], num_prefix_tokens=tokens)
        assert resized is not None and torch.equal(resized, theirs)


def test_timm_model_for_another_image_size() -> None:
    timm_module("models")
    model = models.build("timm/vit_tiny_patch16_224", num_classes=3, image_size=64)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize("name", ["densenet121", "vit_b_32"])
def test_former_names_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=32)
    former = {
        re.sub(r"(denselayer\d+\.(norm|conv))([12])", r"\1.\3", key)
        .replace(".mlp.0.", ".mlp.linear_1.")
        .replace(".mlp.3.", ".mlp.linear_2."): value
        for key, value in model.state_dict().items()
    }
    assert former.keys() != model.state_dict().keys()
    fit_weights(model, former, origin="test")


def test_layers_with_versions() -> None:
    """mnasnet refuses a state_dict without the versions of its layers."""
    stored = models.build("mnasnet0_5", num_classes=7, image_size=32).state_dict()
    model = models.build("mnasnet0_5", num_classes=7, image_size=32)
    fit_weights(model, dict(stored), origin="test")
    assert same(model.state_dict(), stored)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("resnet18", "resnet34"),
        ("resnet34", "resnet18"),
        ("resnet50", "wide_resnet50_2"),
        ("resnet18", "resnet18_cifar"),
        ("vit_s16", "resnet18"),
    ],
)
def test_weights_of_another_model(name: str, other: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=10, image_size=32)
        for classes in (10, 3):
            stored = models.build(other, num_classes=classes, image_size=32).state_dict()
            with pytest.raises(UserError, match=r"^their file: does not fit the model: "):
                fit_weights(model, stored, origin="their file", new_head=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, None, f"{key} is missing; check model.name$") for key in ("fc.bias", "bn1.weight")),
        ("layer9.weight", torch.zeros(3), "layer9.weight is unknown; check model.name$"),
        (
            "layer1.0.conv1.weight",
            torch.zeros(3, 32, 3, 3),
            "layer1.0.conv1.weight is of another shape; check model.name and data.image_size$",
        ),
        ("fc.weight", torch.zeros(10, 5), "fc.weight is of another shape"),
    ],
)
def test_refused_weights_do_not_change_the_model(
    key: str, value: torch.Tensor | None, message: str
) -> None:
    model, before, stored = tiny(seed=1), tiny(seed=1).state_dict(), tiny(seed=2).state_dict()
    stored[key] = value  # type: ignore[assignment]
    weights = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(UserError, match=f"does not fit the model: {message}"):
        fit_weights(model, weights, origin="their file", new_head=True)
    assert same(model.state_dict(), before)


def test_weights_older_than_the_batch_counters(caplog: pytest.LogCaptureFixture) -> None:
    """The oldest weights of torchvision, such as resnet18, have no num_batches_tracked."""
    stored = tiny(seed=5).state_dict()
    old = {k: v for k, v in stored.items() if not k.endswith("num_batches_tracked")}
    model = tiny()
    fit_weights(model, old, origin="test", new_head=True)
    assert same(model.state_dict(), stored) and not caplog.records


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_weights_that_would_run_code(tmp_path: Path) -> None:
    path, mark = tmp_path / "weights.pt", tmp_path / "executed"
    torch.save({**tiny().state_dict(), "evil": Evil(mark)}, path)
    with pytest.raises(UserError, match=rf"^model\.weights={path}: cannot be read"):
        load_weights(tiny(), path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have


@pytest.mark.parametrize(
    "content",
    [[1, 2], torch.zeros(3), {"conv1.weight": 5}, {"state": 5}, {"state": {}}, {}, {1: 2}, None],
)
def test_files_that_hold_something_else(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match=r"^model\.weights=.*: is not a state_dict"):
        load_weights(tiny(), path)


@pytest.mark.parametrize(
    ("name", "last"),
    [("resnet18", "bn2"), ("resnet50", "bn3"), ("resnet_tiny", "bn2"), ("resnet18_cifar", "bn2")],
)
def test_zero_init_residual_makes_each_block_the_identity(name: str, last: str) -> None:
    """Only the scales of the last norms change, as in torchvision; also with stochastic depth."""
    built = []
    for args in ({}, {"zero_init_residual": True, "stochastic_depth_prob": 0.1}):
        torch.manual_seed(0)
        built.append(models.build(name, num_classes=10, image_size=32, args=args).state_dict())
    changed = {key for key in built[0] if not torch.equal(built[0][key], built[1][key])}
    assert changed == {key for key in built[0] if re.search(rf"layer.*{last}\.weight", key)}
    assert not any(built[1][key].any() for key in changed)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet_tiny", {"drop_path_rate": 0.1}, r"resnet_tiny does not take these arguments \("),
        ("resnet18", {"stochastic_depth_prob": 1}, "stochastic_depth_prob: give a number"),
        ("vit_s16", {"zero_init_residual": True}, r"vit_s16 does not take these arguments \("),
        ("resnet18", {"zero_init": True}, r"resnet18 does not take these arguments \("),
        ("resnet18", {"norm_layer": "x"}, r"resnet18 does not take these arguments \("),
        ("resnet18", {"num_classes": 3}, "num_classes follows from other keys"),
        ("resnet18", {"blur_pool": "yes"}, "blur_pool: give true or false"),
        ("vit_b_16", {"blur_pool": True}, "vit_b_16 has no strided convolutions after the first"),
        ("timm/resnet18", {"checkpoint_path": "x"}, "checkpoint_path follows from other keys"),
        ("convnext_tiny", {"stochastic_depth_prob": 1}, "stochastic_depth_prob: give a number"),
        ("mobilenet_v3_small", {"stochastic_depth_prob": 0.1}, "mobilenet_v3_small has no "),
        ("convnext_tiny", {"stochastic_depth_prob": "x"}, "stochastic_depth_prob: give a number"),
    ],
)
def test_wrong_argument_of_a_model_is_refused(
    name: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=rf"^model\.args={{.*}}: {message}") as error:
        models.build(name, num_classes=10, image_size=64, args=args)
    assert "\n" not in str(error.value)
