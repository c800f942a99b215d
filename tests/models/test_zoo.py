"""Models by name, error messages, and weights from files and libraries."""

import copy
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import models
from conf.errors import UserError
from conf.schema import ModelConfig
from models.resnet import resnet18_cifar
from models.weights import fit_weights, load_weights
from scripts.lib.trained import sizes_in
from tests.helpers.results import same


def tiny(num_classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("resnet_tiny", num_classes=num_classes, image_size=32)


@pytest.mark.parametrize(
    ("name", "count", "channels_last"),
    [("resnet_tiny", 308_650, True), ("vit_s16", 21_593_482, False), ("swin_t", 27_527_044, False)],
)
def test_build_names_and_sizes(name, count, channels_last):
    assert name in models.available()
    with torch.device("meta"):
        model = models.build(name, num_classes=10, image_size=64).eval()
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 10)
    assert sum(map(torch.numel, model.parameters())) == count
    found = [models.use_channels_last("auto", model, kind) for kind in ("cuda", "cpu", "mps")]
    assert found == [channels_last, channels_last, False]


def without_size(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, num_classes))


def with_image_size(num_classes: int, *, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(image_size, num_classes))


@pytest.mark.parametrize(("function", "size"), [(without_size, 4), (with_image_size, 32)])
def test_build_passes_image_size_if_accepted(function, size):
    model = models.build(f"{__name__}:{function.__name__}", num_classes=3, image_size=32)
    assert next(model.parameters()).shape[1] == size


def test_zero_init_residual():
    """Only the scales of each block's last norm are zero."""
    args = {"zero_init_residual": True}
    model = models.build("resnet_tiny", num_classes=10, image_size=32, args=args)
    for (block,) in (model.layer1, model.layer2, model.layer3):
        assert not block.bn2.weight.any()
        assert block.bn1.weight.all()


def test_build_timm_model():
    pytest.importorskip("timm")
    model = models.build("timm/vit_tiny_patch16_224", num_classes=3, image_size=64)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    with pytest.raises(UserError, match="timm has no such model; did you mean resnet18"):
        models.build("timm/resnet188", num_classes=3, image_size=64)
    with pytest.raises(UserError, match=r"Invalid pretrained tag \(gone\) for resnet18"):
        models.build("timm/resnet18.gone", num_classes=3, image_size=64)


def test_build_hugging_face_hub_name(monkeypatch):
    """timm resolves these names."""
    timm = SimpleNamespace(__spec__="found", is_model=lambda name: False)
    timm.create_model = lambda name, num_classes, **_: nn.Linear(len(name), num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = models.build("timm/hf_hub:org/name", num_classes=2, image_size=32)
    assert model.in_features == len("hf_hub:org/name")


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("name", ["resnet_tiny", "vit_s16", "timm/resnet18"])
def test_build_input_channels(name, channels):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=32, in_channels=channels).eval()
        assert model(torch.empty(2, channels, 32, 32)).shape == (2, 7)
    found = sizes_in(model.state_dict(), ModelConfig(name=name), image_size=32, origin="test")
    assert found == (channels, 7)


def test_fit_weights_new_head_is_zero(caplog):
    """The file has a different number of classes, or no head."""
    caplog.set_level("INFO")
    other = tiny(seed=5).state_dict()
    body = dict(other)
    del body["fc.weight"], body["fc.bias"]
    for stored in (other, body):
        caplog.clear()
        model = tiny(num_classes=3)
        fit_weights(model, dict(stored), origin="test", new_head=True)
        now = dict(model.state_dict())
        assert not now.pop("fc.weight").any()
        assert not now.pop("fc.bias").any()
        assert same(now, body)
        assert "does not match the classes, so fc.weight, fc.bias are newly init" in caplog.text


def test_fit_weights_new_head_before_relu_learns():
    torch.manual_seed(0)
    stored = models.build("squeezenet1_1", num_classes=10, image_size=32).state_dict()
    model = models.build("squeezenet1_1", num_classes=3, image_size=32)
    fit_weights(model, stored, origin="test", new_head=True)
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert model.get_parameter("features.0.weight").grad.any()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("named", ['["cat", "dog"]', '["dog", "cat"]', "[]", "cat,dog"])
def test_load_weights_drops_head_of_other_classes(tmp_path, caplog, suffix, named):
    """The number of classes may be equal. Files of other programs need not contain JSON."""
    stored, model, path = tiny(2, seed=5).state_dict(), tiny(2), tmp_path / f"weights{suffix}"
    kept = named in ('["cat", "dog"]', "[]")
    if suffix == ".pt":
        about = {"classes": yaml.safe_load(named)}
        torch.save({"state": {"model": stored, "ema": None}, "model_input": about}, path)
    else:
        save_file(stored, path, {"classes": named})
    caplog.set_level("INFO")
    load_weights(model, path, ("cat", "dog"))
    assert torch.equal(model.state_dict()["fc.weight"], kept * stored["fc.weight"])
    assert torch.equal(model.state_dict()["conv1.weight"], stored["conv1.weight"])
    assert bool(caplog.messages) != kept
    load_weights(model, path, ("cat", "dog", "fox"))  # two outputs are not these classes
    assert torch.equal(model.state_dict()["fc.weight"], stored["fc.weight"])


@pytest.mark.parametrize(
    ("classes", "kept"),
    [
        (("class1", "class10", "class2"), False),
        (("Banana", "apple"), False),
        (("1", "2"), True),
        (("b", "a"), True),  # a torch dataset's own order
        (("n01440764", "n01443537"), True),
    ],
)
def test_load_weights_keeps_head_only_in_known_class_order(tmp_path, caplog, classes, kept):
    """A file without class names may have them in natural order, like those of timm."""
    stored, model = tiny(len(classes), seed=5).state_dict(), tiny(len(classes))
    torch.save({"arch": "tiny", "state_dict": stored}, tmp_path / "weights.pth")
    load_weights(model, tmp_path / "weights.pth", classes)
    assert torch.equal(model.state_dict()["fc.weight"], kept * stored["fc.weight"])
    assert ("its class order is unknown; to keep its head" in caplog.text) != kept
    caplog.clear()
    load_weights(tiny(20), tmp_path / "weights.pth", [f"class{i}" for i in range(20)])
    assert "unknown" not in caplog.text  # the head has a different size


@pytest.mark.parametrize("name", ["densenet121", "vit_b_32"])
def test_fit_weights_accepts_former_names(name):
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=32)
    model = model.to_empty(device="cpu")
    former = {
        re.sub(r"(denselayer\d+\.(norm|conv))([12])", r"\1.\3", key)
        .replace(".mlp.0.", ".mlp.linear_1.")
        .replace(".mlp.3.", ".mlp.linear_2."): value
        for key, value in model.state_dict().items()
    }
    assert former.keys() != model.state_dict().keys()
    fit_weights(model, former, origin="test")


def test_fit_weights_without_num_batches_tracked(caplog):
    """mnasnet needs version metadata; torchvision's oldest weights lack num_batches_tracked."""
    stored = models.build("mnasnet0_5", num_classes=7, image_size=32).state_dict()
    old = {k: v for k, v in stored.items() if not k.endswith("num_batches_tracked")}
    model = models.build("mnasnet0_5", num_classes=7, image_size=32)
    fit_weights(model, old, origin="test", new_head=True)
    assert same(model.state_dict(), stored)
    assert not caplog.records


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fc.bias", None, "does not match the model: 1 .* such as fc.bias; check model.name"),
        ("layer9.weight", torch.zeros(3), "does not match .* as layer9.weight; check model.name"),
        ("bn1.weight", torch.zeros(3), "does not match .* as bn1.weight; check model.name"),
        ("bn1.bias", torch.tensor([*31 * [0], math.nan]), "bn1.bias is not finite; choose weights"),
        ("bn1.running_var", torch.full((32,), math.inf), "bn1.running_var is not finite; choose"),
    ],
)
def test_fit_weights_mismatch_keeps_model(key, value, message):
    model, stored = tiny(seed=1), dict(tiny(seed=2).state_dict())
    stored.pop(key, None)
    if value is not None:
        stored[key] = value
    with pytest.raises(UserError, match=f"their file: {message}"):
        fit_weights(model, stored, origin="their file", new_head=True)
    assert same(model.state_dict(), tiny(seed=1).state_dict())


@pytest.mark.parametrize("name", ["resnet18", "resnet18_cifar", "wide_resnet50_2", "vit_b_16"])
@pytest.mark.parametrize("new_head", [True, False])
def test_fit_weights_names_model_that_matches(name, new_head):
    with torch.device("meta"):
        weights = models.build(name, num_classes=7, image_size=224).state_dict()
        model = models.build("resnet50", num_classes=7, image_size=224)
    with pytest.raises(UserError, match=f"does not match the model: .*; set model.name={name}$"):
        fit_weights(model, weights, origin="their file", new_head=new_head)


@pytest.mark.parametrize("content", [[1, 2], {"conv1.weight": 5}, {"state": {}}])
def test_load_weights_rejects_other_content(tmp_path, content):
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match=r"^model\.weights=.*: is not a state_dict"):
        load_weights(tiny(), path)


def test_freeze_modules():
    """Frozen layers have no gradients and keep BatchNorm statistics in training, even in a copy."""
    model = tiny(num_classes=3)
    models.freeze(model, ["conv1", "bn1", "layer1"])
    for net in (model, copy.deepcopy(model)):
        models.train_mode(net)
        before = copy.deepcopy(net)
        net(torch.randn(4, 3, 32, 32)).sum().backward()
        trained = {key.split(".")[0] for key, p in net.named_parameters() if p.grad is not None}
        assert trained == {"layer2", "layer3", "fc"}
        buffers, old = dict(net.named_buffers()), dict(before.named_buffers())
        changed = {key.split(".")[0] for key in old if not torch.equal(buffers[key], old[key])}
        assert changed == {"layer2", "layer3"}
        net.eval()
        models.train_mode(net)
        assert (net.bn1.training, net.layer2.training) == (False, True)


def test_freeze_part_of_module():
    """layer1 does not match layer10. Freezing only a parameter keeps its module in train mode."""
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.BatchNorm1d(2) for i in (1, 10)})
    models.freeze(model, ["layer1.weight"])
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["layer1.weight"]
    assert model["layer1"].training


def test_resnet18_cifar_equals_torchvision():
    """The stem is 3x3 with stride 1, without pooling; weights have Kaiming's fan-out normal."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours, theirs = resnet18_cifar(10, 32), resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    std = ours.state_dict()["layer4.0.conv1.weight"].std().item()
    assert std == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)  # output channels, kernel area
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 32, 32)
    for training in (True, False):  # the first pass changes the running statistics
        torch.testing.assert_close(ours.train(training)(images), theirs.train(training)(images))
