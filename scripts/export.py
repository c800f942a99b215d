"""Export a trained model to a file that other programs can load without this project.

    python scripts/export.py runs/NAME --to onnx --preprocessing
    python scripts/export.py resnet50-0676ba61.pth --to safetensors model.name=resnet50

    --to onnx         ONNX, for onnxruntime and others; needs onnx, onnxscript and onnxruntime
    --to pt2          torch.export, for torch.export.load and AOTInductor
    --to safetensors  only the weights, for the model with the same name
    --to hub          a folder for timm and the Hugging Face Hub; needs timm and a model timm/NAME

The result computes in fp32. It is written only if it matches eager PyTorch on random images.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import RunError, UserError, describe
from scripts.lib.options import OUT, TEMPERATURE, Parser, parse_paths, positive

# format -> required packages besides torch
FORMATS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": (), "safetensors": (), "hub": ()}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--to FORMAT [options] [key=value ...]")
    add = parser.add_argument
    add("--to", choices=FORMATS, required=True, help="output format; required")
    add(*OUT, type=Path, metavar="FILE", help="output file (./<checkpoint>.<format>)")
    add("--preprocessing", action="store_true", help="normalize inside the graph; uint8 input")
    add("--temperature", type=positive, metavar="T", help=TEMPERATURE)
    options = parse_paths(parser, words)
    to = options.to
    packages = FORMATS[to]
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        fix = f"run `make env EXTRAS={to}` or `pip install {' '.join(packages)}`"
        parser.error(f"--to {to}: needs {', '.join(missing)}; {fix}")
    if options.preprocessing and to in ("safetensors", "hub"):
        parser.error("--preprocessing: a safetensors file has no graph; choose --to onnx or pt2")
    if options.out is not None and options.out.suffix != f".{to}" and to != "hub":
        parser.error(f"--out {options.out}: invalid suffix; expected a file name ending in .{to}")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

import io
import json
import logging
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

import train
from engine.files import replacing
from models.weights import safetensors_metadata
from pipeline.data.build import build_image_transforms
from pipeline.data.field import IMAGE, Field, describe_fields
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat
from scripts.lib.calibration import calibrated
from scripts.lib.published import MODES, preprocessing
from scripts.lib.trained import Trained, open_trained, run_main

CPU = torch.device("cpu")
BATCHES = (1, 3, 12)  # images per batch; the export's example batch has 2
BOUND = 1e-4  # maximum difference relative to the largest logit; onnxruntime's was up to 8e-7


class WithPreprocessing(nn.Module):
    """Normalize images and call a network on them: uint8 [B, S, S, C] -> logits [B, classes]."""

    def __init__(self, network: nn.Module, format: ImageFormat) -> None:
        super().__init__()
        self.network = network
        self.scale = nn.Buffer(format.scale)
        self.shift = nn.Buffer(format.shift)

    def forward(self, images: Tensor) -> Tensor:
        planes = images.movedim(-1, -3).float()
        return self.network(planes * self.scale + self.shift)


class WithFields(nn.Module):
    """Call `train.forward` with one positional input for each field in `names`."""

    def __init__(self, network: nn.Module, preprocessing: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.network = network
        self.preprocessing = preprocessing  # applied to the image

        def forward(*inputs: Tensor) -> Tensor:
            fields = dict(zip(names, inputs, strict=True))
            return call(network, fields | {IMAGE: preprocessing(fields[IMAGE])})

        # torch.export takes the input names from the signature.
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def call(network: nn.Module, fields: dict[str, Tensor]) -> Tensor:
    return train.forward(network, Batch(fields, torch.zeros(0, 2), step=0))


@dataclass(frozen=True)
class Job:
    trained: Trained
    to: str  # a name in FORMATS
    inside: bool  # whether the graph normalizes
    size: int  # image size in pixels

    @property
    def format(self) -> ImageFormat:
        data = self.trained.config.data
        highest = Field(self.trained.image_dtype).highest
        return ImageFormat(CPU, data.mean, data.std, highest=highest)

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The fields that the network reads."""
        with torch.device("meta"):
            return self.trained.inputs(self.trained.on_meta(), self.size)

    @property
    def names(self) -> list[str]:
        """The graph's input names."""
        return ["images"] if len(self.fields) == 1 else [*self.fields]

    @property
    def pixels(self) -> tuple[int, ...]:
        """The shape of an image before normalization, (..., S, S, C)."""
        return self.fields[IMAGE].shape

    @property
    def transforms(self) -> list[Any]:
        """The entries of augment.val, each with all parameters."""
        return [with_all_parameters(entry) for entry in self.trained.config.augment.val]

    def input(self, batch: Tensor) -> Tensor:
        """Convert uint8 images [B, S, S, C] to the exported model's input."""
        return batch if self.inside else DeviceSlot(self.format).normalize(IMAGE, batch)

    def example(self) -> Tensor:
        """Return an example input of the exported model, a batch of two black images."""
        return self.input(torch.zeros(2, *self.pixels, dtype=torch.uint8))

    def metadata(self) -> dict[str, str]:
        """Return the metadata stored in the file; all values are JSON."""
        trained = self.trained
        config = trained.config
        example = self.example()
        channels = self.pixels[-1]
        other_fields = describe_fields(self.fields)
        del other_fields[IMAGE]
        image_input = {
            "name": self.names[0],
            "dtype": str(example.dtype).removeprefix("torch."),
            "shape": ["batch", *example.shape[1:]],
            "channels": "RGB" if channels == 3 else channels,
        }
        preprocessing = {
            "exif_orientation": config.data.exif_orientation,
            "transforms": self.transforms,
            "mean": list(config.data.mean),
            "std": list(config.data.std),
            "highest": self.format.highest,
            "inside": self.inside,
            "input": image_input,
            **({"fields": other_fields} if other_fields else {}),
        }
        model = {
            "name": config.model.name,
            "args": dict(config.model.args),
            "image_size": trained.image_size,
            "num_classes": trained.num_classes,
            "checkpoint": trained.name,
            "step": trained.stored.get("step"),
            "averaged_weights": trained.averaged,
            "temperature": trained.temperature,
        }
        return {
            "classes": json.dumps(trained.classes),
            "preprocessing": json.dumps(preprocessing),
            "model": json.dumps(model),
        }


def with_all_parameters(entry: Any) -> Any:
    """Return an augment.val entry in which a resize states its size or sizes and interpolation."""
    match entry:
        case {"resize": resize}:
            parameters = {"interpolation": "bilinear", **resize}
            sides = np.divide(parameters["size"], parameters.pop("crop_ratio", 1.0))
            parameters["size"] = np.rint(sides).astype(int).tolist()
            return {"resize": parameters}
    return entry


def write_weights(job: Job, model: nn.Module, path: Path) -> None:
    # Clone, because safetensors rejects shared memory and CoaT shares parameters between names.
    weights = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    with replacing(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(weights, job.metadata()))


def write_folder(job: Job, model: nn.Module, folder: Path) -> None:
    """Write a model's weights and config in timm's format, and a model card."""
    from timm.models import save_for_hf

    trained = job.trained
    data = trained.config.data
    modes = []
    match job.transforms:
        case [{"resize": {"size": int(side) | [side, _], "interpolation": kernel}}, _]:
            in_mode = partial(preprocessing, job.size, side, kernel, data)
            modes = [mode for mode in MODES if in_mode(mode)["augment.val"] == job.transforms]
    if not modes:
        problem = f"supports a resize and a center_crop as in timm, not {job.transforms}"
        raise UserError("--to hub", problem, "choose safetensors, which stores all transforms")
    pretrained_cfg = {
        "input_size": job.example().shape[1:],
        "mean": list(data.mean),
        "std": list(data.std),
        "interpolation": kernel,
        "crop_mode": modes[0],
        # Round crop_pct down, because timm rounds the resized side, size / crop_pct, down.
        "crop_pct": math.floor(1e6 * job.size / side) / 1e6,
        "fixed_input_size": False,
        "tag": None,  # this and the next keys would describe timm's weights
        "license": None,
        "test_input_size": None,
        "test_crop_pct": None,
    }
    save_for_hf(model, str(folder), {"label_names": [*trained.classes]})
    config = folder / "config.json"  # timm has described its own weights in it
    content = json.loads(config.read_text("utf-8"))
    content["pretrained_cfg"] |= pretrained_cfg
    config.write_text(json.dumps(content, indent=2), "utf-8")
    (folder / "pytorch_model.bin").unlink()
    write_weights(job, model, folder / "model.safetensors")
    template = Path(__file__).parent / "lib/model_card.md"
    card = template.read_text("utf-8").format(
        job=job,
        name=folder.name,
        accuracy=accuracy(trained),
        command=training_command(trained),
    )
    (folder / "README.md").write_text(card, "utf-8", "surrogateescape")


def training_command(trained: Trained) -> str:
    overrides = ["..."]
    stored = trained.path.resolve().parent.parent / "overrides.yaml"
    if stored.is_file():
        overrides = yaml.safe_load(stored.read_text("utf-8"))
    return shlex.join(["python", "train.py", *overrides])


def accuracy(trained: Trained) -> str:
    """Return a checkpoint's validation top-1 as text; "not known" if its step has none."""
    stored = trained.stored
    row = stored.get("validation", {})
    if "top1" not in row or row["step"] != stored["step"]:
        return "not known"
    images, _, _ = stored["identity"]["data.val"].partition(", SHA")  # part of the fingerprint
    return f"{row['top1']:.2f} % top-1 of {images}"


def write_graph(job: Job, model: nn.Module, path: Path) -> None:
    """Write a pt2 or an ONNX file, for batches of any size."""
    graph = WithPreprocessing(model, job.format).eval() if job.inside else model
    if len(job.fields) > 1:
        only_image = WithPreprocessing(nn.Identity(), job.format) if job.inside else nn.Identity()
        graph = WithFields(model, only_image, job.names).eval()
    example = Batch.zeros(job.fields, CPU, samples=2).fields | {IMAGE: job.example()}
    inputs = tuple(example.values())
    shapes = ({0: torch.export.Dim("batch")},) * len(inputs)
    if job.to == "pt2":
        program = torch.export.export(graph, inputs, dynamic_shapes=shapes)
        buffer = io.BytesIO()  # given a path, torch aborts the process if the disk is full
        torch.export.save(program, buffer, extra_files=dict(job.metadata()))
        path.write_bytes(buffer.getbuffer())
        return
    exported = torch.onnx.export(
        graph,
        inputs,
        input_names=job.names,
        output_names=["logits"],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )
    assert exported is not None
    exported.model.metadata_props.update(job.metadata())
    exported.save(path, external_data=False)


@torch.no_grad()
def save(job: Job, model: nn.Module, path: Path) -> None:
    """Write the file. `model` is the unexported model, in eval mode on the CPU."""
    writers = {"hub": write_folder, "safetensors": write_weights}
    writers.get(job.to, write_graph)(job, model, path)


def open_exported(job: Job, path: Path) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Load an exported file like other programs do; return the model and the parsed metadata."""
    predict: Callable[..., Tensor]
    if job.to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map

        def predict(*inputs: Tensor) -> Tensor:
            named = dict(zip(job.names, map(Tensor.numpy, inputs), strict=True))
            return torch.from_numpy(session.run(["logits"], named)[0])

    elif job.to == "pt2":
        metadata = dict.fromkeys(job.metadata(), "")
        predict = torch.export.load(path, extra_files=metadata).module()  # fills in the metadata
    elif job.to == "hub":
        import timm

        metadata = safetensors_metadata(path / "model.safetensors")
        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
        predict = partial(call_with, job, model)
    else:
        metadata = safetensors_metadata(path)
        predict = partial(call_with, job, open_trained(path).build(CPU))
    return predict, {name: json.loads(metadata[name]) for name in job.metadata()}


def call_with(job: Job, network: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a network with a tensor for each field."""
    return call(network, dict(zip(job.fields, inputs, strict=True)))


@torch.no_grad()
def compare(job: Job, predict: Callable[..., Tensor], model: nn.Module) -> str:
    """Return the largest difference from eager mode on random samples. RunError above BOUND."""
    rng = np.random.default_rng(0)
    levels = rng.random((sum(BATCHES), *job.pixels))
    levels *= job.format.highest
    images = torch.from_numpy(levels.astype(job.trained.image_dtype))
    samples = Batch.zeros(job.fields, CPU, len(images)).fields
    for value in samples.values():  # integers are 0 or 1; larger ones may be invalid indices
        value.copy_(torch.from_numpy(2 * rng.random(value.shape)))
    eager = call(model, samples | {IMAGE: DeviceSlot(job.format).normalize(IMAGE, images)})
    inputs = samples | {IMAGE: job.input(images)}
    parts = [value.split(BATCHES) for value in inputs.values()]
    exported = torch.cat(list(map(predict, *parts)))
    difference = (exported - eager).abs().amax()  # NaN if any difference is NaN
    bound = BOUND * eager.abs().amax()
    result = f"largest difference {difference:.2g}, bound {bound:.2g}"
    if not difference <= bound:  # true for NaN
        raise RunError(f"--to {job.to}: differs from eager mode: {result}; no file was written")
    return f"compared with eager mode: {result}"


def export(job: Job, out: Path) -> None:
    """Write, check and only then rename the file; print the difference.

    Raises UserError if the weights do not match the model, RunError if export or check fails.
    """
    model = job.trained.build(CPU)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
        temporary = Path(folder) / out.name
        try:
            with warnings.catch_warnings(action="ignore"):  # exporters warn about their own code
                save(job, model, temporary)
                predict, _ = open_exported(job, temporary)
            result = compare(job, predict, model)
        except (OSError, UserError, RunError):
            raise
        except Exception as error:  # exporters, their graphs and onnxruntime raise many types
            name = job.trained.config.model.name
            reason = " ".join(describe(error).split())[:300]
            text = f"--to {job.to}: model.name={name} cannot be exported ({reason})"
            raise RunError(text) from None
        os.replace(temporary, out)
    print(f"{result}\nwritten to {out}")


def output_path(options: argparse.Namespace, trained: Trained) -> Path:
    """Return --out, or a path in the current directory. Raises UserError if it must be kept."""
    name = trained.name.removesuffix(trained.path.suffix)
    if options.preprocessing:
        name += "-preprocessing"
    name = name.replace(",", "-")
    out = options.out or Path(f"{name}.{options.to}")
    if out.exists() and (options.to == "hub" or out.is_dir() or out.samefile(trained.path)):
        raise UserError(f"--out {out}", "already exists", "choose a different name")
    return out


def export_model(options: argparse.Namespace) -> int:
    """Check all arguments, then export."""
    for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir"):  # these log their passes
        logging.getLogger(name).setLevel(logging.ERROR)
    overrides = [*options.overrides, "model.channels_last=false"]
    trained = open_trained(options.checkpoint, overrides, classes=options.classes)
    trained = calibrated(trained, options.temperature)
    if not trained.classes:
        logging.warning("the class names are unknown; pass --classes FILE")
    out = output_path(options, trained)
    name = trained.config.model.name
    if options.to == "hub" and not name.startswith("timm/"):
        raise UserError("--to hub", f"needs a model timm/NAME, not {name}", "choose safetensors")
    size = build_image_transforms(trained.config.augment.val, "augment.val").image_size
    trained.check_fields(trained.fields_at(size))
    if options.preprocessing and trained.image_dtype != np.uint8:
        problem = f"needs uint8 images, but the model was trained on {trained.image_dtype}"
        raise UserError("--preprocessing", problem, "omit it")
    print(f"exporting {trained.name}", flush=True)
    export(Job(trained, options.to, options.preprocessing, size), out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(partial(export_model, OPTIONS)))
