"""Exported files: each is read as another program would, and compared with the model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import models
import train
from conf.compose import load
from conf.schema import Config, UserError
from engine.distributed import World, join_world
from engine.extras.finetune import decide
from models.kernels import layers as gpu_layers
from models.vit import VisionTransformer
from pipeline.dataset import BadImageError
from scripts import evaluate, export
from scripts.export import CPU, IMAGES, ExportError, Job
from scripts.lib.trained import Trained, open_trained
from tests import small_run
from tests.conftest import CLASSES, VAL_IMAGES

ROOT = Path(__file__).parents[2]
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
HERE = ["train.device=cpu", "loader.workers=0"]
needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in export.FORMATS["onnx"]),
    reason=f"needs {', '.join(export.FORMATS['onnx'])}",
)


@pytest.fixture(scope="module")
def folder(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run.run(image_root, folder, "train.epochs=1", "train.ema_decay=0.9")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """A model whose predictions differ between images, unlike those of a few steps."""
    found = evaluate.with_config(open_trained(folder, HERE), HERE, ALONE)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator)
        if name.startswith("fc")
        else value
        for name, value in found.weights.items()
    }
    return replace(found, weights=weights)


@pytest.fixture(scope="module")
def images(trained: Trained) -> list[np.ndarray]:
    return export.images_for(trained, HERE)[0]


def job_for(trained: Trained, to: str, *, inside: bool = False) -> Job:
    return Job(trained, to, inside, 32)


def random_images(count: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (size, size, 3), np.uint8) for _ in range(count)]


def script(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, export.__file__, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


# Whole exports.


@pytest.mark.parametrize(
    ("to", "inside"),
    [
        ("pt2", True),
        ("safetensors", False),
        pytest.param("onnx", False, marks=needs_onnx),
        pytest.param("onnx", True, marks=needs_onnx),
    ],
)
def test_self_check_of_each_format(
    trained: Trained, images: list[np.ndarray], tmp_path: Path, to: str, inside: bool
) -> None:
    job, out = job_for(trained, to, inside=inside), tmp_path / f"model.{to}"
    out.write_text("earlier")
    lines = export.export(job, out, images, lambda: export.evaluated(job, HERE, ALONE))
    count = VAL_IMAGES * len(CLASSES)
    assert lines[1] == f"self-check: {count} of {count} predictions are equal"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    predict, texts = export.open_exported(job, out)
    assert texts["classes"] == list(CLASSES)
    assert texts["preprocessing"]["transforms"] == [
        {"resize": {"size": 32, "interpolation": "bilinear"}},
        {"center_crop": {"size": 32}},
    ]
    model = trained.build(CPU)
    with torch.no_grad():
        eager = model(job.normalised(torch.from_numpy(np.stack(images))))
        assert eager.argmax(1).unique().numel() > 1
        torch.testing.assert_close(predict(job.input(images)), eager)


def test_another_program_needs_only_the_file(
    trained: Trained, images: list[np.ndarray], image_root: Path, tmp_path: Path
) -> None:
    """It uses torch and Pillow. Pillow's resize rounds differently, by up to one level."""
    out = tmp_path / "model.pt2"
    export.export(job_for(trained, "pt2"), out, images)
    texts = {"classes": "", "preprocessing": ""}
    program = torch.export.load(out, extra_files=texts).module()
    given = json.loads(texts["preprocessing"])
    resize, crop = (entry for entry in given["transforms"])
    path = image_root / "val" / "dots" / "00.jpg"
    image = Image.open(path)
    factor = resize["resize"]["size"] / min(image.size)
    size = (int(image.width * factor), int(image.height * factor))
    image = image.resize(size, Image.Resampling.BILINEAR)
    side = crop["center_crop"]["size"]
    left, top = round((image.width - side) / 2), round((image.height - side) / 2)
    image = image.crop((left, top, left + side, top + side))
    pixels = (np.asarray(image) / 255 - given["mean"]) / given["std"]
    logits = program(torch.tensor(pixels.transpose(2, 0, 1)[None], dtype=torch.float32))[0]
    datasets = evaluate.build_val(trained.config)
    place = [datasets.val.name(i) for i in range(len(datasets.val))].index(str(path))
    batch = torch.from_numpy(datasets.val.load(0, place)[0])[None]
    with torch.no_grad():
        eager = trained.build(CPU)(job_for(trained, "pt2").normalised(batch))[0]
    torch.testing.assert_close(logits, eager, rtol=0.05, atol=0.05)
    assert len(json.loads(texts["classes"])) == len(logits)


def test_command_line(folder: Path, image_root: Path, tmp_path: Path) -> None:
    """The data of the run is found again; the file states what its weights need."""
    done = script(folder, "--to", "safetensors", *HERE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"checked with 16 images of {image_root / 'val'}\n" in done.stdout
    (out,) = tmp_path.iterdir()
    assert out.name == f"{open_trained(folder).name}.safetensors"
    again, own = open_trained(out), open_trained(folder)
    assert (again.classes, again.image_size) == (own.classes, own.image_size)
    assert again.config.model == own.config.model
    assert (again.config.data.mean, again.config.data.std) == (
        own.config.data.mean,
        own.config.data.std,
    )
    assert [export.explicit(entry) for entry in own.config.augment.val] == again.config.augment.val
    assert own.averaged and all(torch.equal(again.weights[k], own.weights[k]) for k in own.weights)
    # Fine-tuning takes the same model and preprocessing from the file as from the run.
    adapted = [finetuned(path) for path in (out, folder)]
    assert adapted[0].model.name == own.config.model.name == "resnet_tiny"
    assert adapted[0].model.args == adapted[1].model.args
    assert adapted[0].augment.val == again.config.augment.val
    assert adapted[0].data == adapted[1].data


def finetuned(weights: Path) -> Config:
    config = load(["recipe=finetune", "data.root=/nowhere", f"model.weights={weights}"])
    return load(config.typed, decided=decide(config, 36))


def test_safetensors_package_reads_the_file(trained: Trained, tmp_path: Path) -> None:
    job = job_for(trained, "safetensors")
    export.save(job, trained.build(CPU), tmp_path / "a.safetensors")
    weights = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(weights[k], trained.weights[k]) for k in trained.weights)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == job.texts()


# Models.


def small_vit() -> nn.Module:
    model = VisionTransformer(
        num_classes=5, image_size=32, patch=16, width=32, depth=2, heads=2, hidden=64
    )
    nn.init.normal_(model.head.weight)
    return model


def small_shufflenet() -> nn.Module:
    """A model of torchvision with `view` on the batch dimension."""
    return models.build("shufflenet_v2_x0_5", num_classes=5, image_size=32)


def small_blurred() -> nn.Module:
    return models.build("resnet_tiny", num_classes=5, image_size=32, args={"blur_pool": True})


@pytest.mark.parametrize(
    "build",
    [small_vit, pytest.param(small_shufflenet, marks=pytest.mark.slow), small_blurred],
)
@pytest.mark.parametrize("to", ["pt2", pytest.param("onnx", marks=needs_onnx)])
def test_models(trained: Trained, tmp_path: Path, build: Any, to: str) -> None:
    """Batches of 1, 3 and 12 images: the size of a batch is not fixed."""
    torch.manual_seed(0)
    model, job = build().eval(), job_for(trained, to, inside=True)
    export.save(job, model, tmp_path / f"a.{to}")
    predict, _ = export.open_exported(job, tmp_path / f"a.{to}")
    difference, bound = export.compare(job, predict, model, random_images(IMAGES, 32))
    assert difference <= bound


def test_rewritten_layers_are_not_in_the_graph(trained: Trained, tmp_path: Path) -> None:
    """A run on a GPU with bf16 has trained with them."""
    plan = {**trained.stored["plan"], "rewrites_layers": True}
    job = job_for(replace(trained, stored={**trained.stored, "plan": plan}), "pt2")
    model = job.trained.build(CPU)
    faster = (
        gpu_layers.BlockConv,
        gpu_layers.OnePassAddNorm,
        gpu_layers.OnePassBatchNorm,
        gpu_layers.PlacedMaxPool,
    )
    assert not any(isinstance(module, faster) for module in model.modules())


@pytest.mark.gpu
def test_self_check_with_an_evaluation_on_a_gpu(
    trained: Trained, images: list[np.ndarray], tmp_path: Path
) -> None:
    job = job_for(trained, "pt2")
    with join_world("cuda") as world:
        lines = export.export(
            job, tmp_path / "a.pt2", images, lambda: export.evaluated(job, HERE, world)
        )
    assert lines[1].startswith("self-check: 15 of 15 ")
    train.set_up_kernels(deterministic=False, precision="bf16")


# Faults.


class Faulty(nn.Module):
    """Behaves differently while it is exported."""

    def forward(self, images: Tensor) -> Tensor:
        values = images.mean((2, 3))
        return values * 1.01 if torch.compiler.is_exporting() else values


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
def test_wrong_export_keeps_an_earlier_file(
    trained: Trained,
    images: list[np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    message: str,
) -> None:
    monkeypatch.setattr(Trained, "build", lambda *_: model)
    out = tmp_path / "model.pt2"
    out.write_text("earlier")
    with pytest.raises(ExportError, match=message):
        export.export(job_for(trained, "pt2"), out, images)
    assert out.read_text() == "earlier" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("to", ["pt2", "safetensors"])
def test_full_disk(
    trained: Trained,
    images: list[np.ndarray],
    tmp_path: Path,
    file_size_limit: Callable[[int], AbstractContextManager[None]],
    to: str,
) -> None:
    with file_size_limit(100_000), pytest.raises(OSError, match="File too large"):
        export.export(job_for(trained, to), tmp_path / f"a.{to}", images)
    assert not list(tmp_path.iterdir())


def test_weights_that_an_onnx_file_cannot_hold(
    trained: Trained, images: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LARGEST_ONNX", 1000)
    with pytest.raises(UserError, match=r"^--to onnx: the weights have .* bytes, .* --to pt2$"):
        export.export(job_for(trained, "onnx"), tmp_path / "a.onnx", images)


def test_nan_is_a_difference(trained: Trained, images: list[np.ndarray]) -> None:
    job, model = job_for(trained, "pt2"), trained.build(CPU)
    difference, bound = export.compare(job, lambda x: model(x) * torch.nan, model, images)
    assert not difference <= bound


def test_self_check_finds_another_normalisation(trained: Trained) -> None:
    job = job_for(trained, "pt2")
    texts = {name: json.loads(text) for name, text in job.texts().items()}
    texts["preprocessing"]["mean"] = [-2.0, 3.0, -2.0]
    reference = export.evaluated(job, HERE, ALONE)
    with pytest.raises(ExportError, match=r"^--self-check: another prediction for /.*\.jpg: "):
        export.self_check(job, trained.build(CPU), texts, reference)


def test_self_check_has_the_limit_of_the_run(trained: Trained) -> None:
    """For the largest image."""
    job = job_for(trained, "pt2")
    texts = {name: json.loads(text) for name, text in job.texts().items()}
    reference = export.evaluated(job, HERE, ALONE)
    config = reference.trained.config
    config = replace(config, data=replace(config.data, max_pixels=99))
    reference = replace(reference, trained=replace(reference.trained, config=config))
    with pytest.raises(BadImageError, match=r"data\.max_pixels=99"):
        export.self_check(job, trained.build(CPU), texts, reference)


def test_self_check_lists_files_with_a_small_margin(trained: Trained) -> None:
    """Two logits are equal, and the exported model rounds in favour of the second."""
    weights = {name: value.clone() for name, value in trained.weights.items()}
    for name in ("fc.weight", "fc.bias"):
        weights[name][:2] = 0
    weights["fc.bias"][2] = -1000
    job = job_for(replace(trained, weights=weights), "pt2")
    model = job.trained.build(CPU)
    rounding = torch.tensor([0.0, 1e-5, 0.0])
    texts = {name: json.loads(text) for name, text in job.texts().items()}
    reference = export.evaluated(job, HERE, ALONE)
    first, *rest = export.self_check(job, lambda x: model(x) + rounding, texts, reference)
    assert first == "self-check: 0 of 15 predictions are equal" and len(rest) == 15
    assert rest[0].endswith("00.jpg: dots, evaluation checks, margin 0.0e+00")


# Arguments and images.


def test_images_without_the_data_of_the_run(trained: Trained) -> None:
    config = replace(trained.config, data=replace(trained.config.data, root="/gone"))
    drawn, size, origin = export.images_for(replace(trained, config=config), HERE)
    assert (len(drawn), size, origin) == (IMAGES, 32, "drawn images")
    assert drawn[0].shape == (32, 32, 3) and (drawn[0] != drawn[10]).any()
    with pytest.raises(UserError, match=r"^data\.root=/gone: no such folder"):
        export.images_for(replace(trained, config=config), ["data.root=/gone"])


def test_explicit_transforms() -> None:
    entry = {"resize": {"size": 224, "crop_ratio": 0.875}}
    assert export.explicit(entry) == {"resize": {"size": 256, "interpolation": "bilinear"}}
    assert export.explicit("horizontal_flip") == "horizontal_flip"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to pt2", "CHECKPOINT: give a checkpoint"),
        (".", "--to is missing; give onnx, pt2, safetensors"),
        (". --to pt", "--to pt: no such format; give onnx, pt2, safetensors; did you mean pt2?"),
        (". --to pt2 --out a.onnx", "--out a.onnx: give the name of a file that ends in .pt2"),
        (". --to pt2 --out gone/a.pt2", "--out gone/a.pt2: "),
        (". --to safetensors --preprocessing", "--preprocessing: a safetensors file has no graph"),
        (". --to pt2 optim.lrr=1", "optim.lrr=1: there is no key optim.lrr; did you mean optim.lr"),
    ],
)
def test_mistakes_in_the_command_line(tmp_path: Path, arguments: str, message: str) -> None:
    done = script(*arguments.split(), folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"export.py: {message}")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name != "onnx" else True)
    options = export.argparse.Namespace(to="onnx", preprocessing=False, out=None)
    with pytest.raises(
        UserError, match=r"onnxscript, onnxruntime are not installed; `pip install "
    ):
        export.check_options(options, ["."])
