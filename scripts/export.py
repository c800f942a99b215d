"""Export a trained model to a file that other programs can use without this one.

    python scripts/export.py runs/NAME --to onnx --preprocessing
    python scripts/export.py resnet50-0676ba61.pth --to safetensors model.name=resnet50

    --to onnx         ONNX, for onnxruntime and others; needs onnx, onnxscript and onnxruntime
    --to pt2          torch.export, for torch.export.load and AOTInductor
    --to safetensors  the weights alone, for the model of the same name
    --to hub          a folder for timm and the Hugging Face Hub, of a model timm/NAME; needs timm

ONNX and pt2 files take `images`, a batch of any size, float32 [B, C, S, S], normalised, and return
`logits`, float32 [B, classes]. With --preprocessing, they take uint8 [B, S, S, C], RGB, the layout
of Pillow, and normalise inside. Decoding, resize and crop stay outside: every file states them, and
the names of the classes. S is data.val_size. The result computes in fp32.

The output file is written, or replaced, only if it agrees with eager PyTorch on 16 random images.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import RunError, UserError, describe
from conf.schema import override_keys
from scripts.lib.options import OUT, Parser, parse_paths

# format -> packages that it needs, besides torch
FORMATS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": (), "safetensors": (), "hub": ()}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "--to FORMAT [options] [key=value ...]")
    add = parser.add_argument
    add("--to", choices=FORMATS, help="format of the file; required")
    add(*OUT, type=Path, metavar="FILE", help="output file (the checkpoint's name, here)")
    add("--preprocessing", action="store_true", help="normalise inside the graph; uint8 input")
    options = parse_paths(parser, words)
    to, packages = options.to, FORMATS.get(options.to)
    if packages is None:
        command = shlex.join(["python", "scripts/export.py", *options.paths, "--to", "onnx"])
        parser.error(f"--to: is missing; write {command} (or {', '.join([*FORMATS][1:])})")
    if missing := [name for name in packages if find_spec(name) is None]:
        parser.error(f"--to {to}: needs {', '.join(missing)}; `pip install {' '.join(packages)}`")
    if options.preprocessing and to in ("safetensors", "hub"):
        parser.error("--preprocessing: a safetensors file has no graph; give onnx or pt2")
    if options.out is not None and options.out.suffix != f".{to}" and to != "hub":
        parser.error(f"--out {options.out}: give a file that ends in .{to}")
    if "train.precision" in override_keys(options.overrides):
        parser.error("train.precision: an exported file computes in fp32; leave the key out")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

import io
import json
import logging
import math
import os
import re
import tempfile
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from models.weights import safetensors_metadata
from pipeline.batch import Field, ImageFormat
from pipeline.build import build_image_transforms
from scripts.lib.trained import Trained, exit_status, open_trained

CPU = torch.device("cpu")
BATCHES = (1, 3, 12)  # images; the example batch of the export has 2
# Allowed difference, relative to the largest logit. onnxruntime differed by up to 8e-7 for ResNet,
# ViT, Swin and MobileNetV3; pt2 by 0.
BOUND = 1e-4


class WithPreprocessing(nn.Module):
    """A model that normalises its images: uint8 [B, S, S, C] -> logits [B, classes]."""

    def __init__(self, network: nn.Module, format: ImageFormat) -> None:
        super().__init__()
        self.network = network
        self.scale, self.shift = nn.Buffer(format.scale), nn.Buffer(format.shift)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.movedim(-1, -3).float() * self.scale + self.shift)


@dataclass(frozen=True)
class Job:
    trained: Trained
    to: str  # a name in FORMATS
    inside: bool  # whether the graph normalises
    size: int  # side of the images, pixels

    @property
    def format(self) -> ImageFormat:
        data, highest = self.trained.config.data, Field(self.trained.image_dtype).highest
        return ImageFormat(CPU, data.mean, data.std, highest=highest)

    @property
    def pixels(self) -> tuple[int, ...]:
        """The shape of an image before normalisation, (..., S, S, C)."""
        *leading, channels, height, width = self.trained.shape_at(self.size)
        return (*leading, height, width, channels)

    def file(self, path: Path) -> Path:
        """Return the file with the weights, of what is written to a path."""
        return path / "model.safetensors" if self.to == "hub" else path

    def input(self, batch: Tensor) -> Tensor:
        """Return the input of the exported file for images, uint8 [B, S, S, C]."""
        return batch if self.inside else self.format.normalised(batch)

    def texts(self) -> dict[str, str]:
        """Return what the file states about itself; all values are JSON."""
        trained, config = self.trained, self.trained.config
        preprocessing = {
            "exif_orientation": config.data.exif_orientation,
            "transforms": [explicit(entry) for entry in config.augment.val],
            "mean": list(config.data.mean),
            "std": list(config.data.std),
            "highest": self.format.highest,
            "inside": self.inside,
            "input": {
                "name": "images",
                "dtype": "uint8" if self.inside else "float32",
                "shape": ["batch", *(self.pixels if self.inside else trained.shape_at(self.size))],
                "channels": "RGB" if self.pixels[-1] == 3 else self.pixels[-1],
            },
        }
        model = {
            "name": config.model.name,
            "args": dict(config.model.args),
            "image_size": trained.image_size,
            "num_classes": trained.num_classes,
            "checkpoint": trained.name,
            "step": trained.stored.get("step"),
            "averaged_weights": trained.averaged,
        }
        texts = {"classes": trained.classes, "preprocessing": preprocessing, "model": model}
        return {name: json.dumps(value) for name, value in texts.items()}


def explicit(entry: Any) -> Any:
    """Return an entry of augment.val with the short side and the interpolation of a resize."""
    if not (isinstance(entry, dict) and isinstance(entry.get("resize"), dict)):
        return entry
    parameters = {"interpolation": "bilinear", **entry["resize"]}
    if "crop_ratio" in parameters:
        parameters["size"] = round(parameters["size"] / parameters.pop("crop_ratio"))
    return {"resize": parameters}


def write_folder(job: Job, model: nn.Module, folder: Path) -> None:
    """Write the config of a model as timm does, and a model card."""
    from timm.models import save_for_hf

    trained, about = job.trained, json.loads(job.texts()["preprocessing"])
    plain: dict[str, Any] = {"size": job.size, "interpolation": "bilinear"}
    resize = next((entry["resize"] for entry in about["transforms"] if "resize" in entry), plain)
    stated = {"input_size": about["input"]["shape"][1:], "mean": about["mean"], "std": about["std"]}
    stated |= {"interpolation": resize["interpolation"], "crop_mode": "center"}
    # timm rounds the short side, size / crop_pct, down.
    stated |= {"crop_pct": math.floor(1e6 * job.size / resize["size"]) / 1e6}
    stated |= dict.fromkeys(("tag", "license"))  # those of timm's own weights
    save_for_hf(model, str(folder), {"label_names": [*trained.classes], "pretrained_cfg": stated})
    (folder / "pytorch_model.bin").unlink()  # `save` writes the weights
    typed = trained.path.resolve().parents[1] / "overrides.yaml"
    overrides = yaml.safe_load(typed.read_text("utf-8")) if typed.is_file() else ["..."]
    names = ", ".join(trained.classes[:20]) + ", ..." * (len(trained.classes) > 20)
    facts = {"classes": f"{len(trained.classes)}: {names}", "accuracy": accuracy(trained)}
    facts |= {"name": folder.name, "command": shlex.join(["python", "train.py", *overrides])}
    card = (Path(__file__).parent / "lib/model_card.md").read_text("utf-8").format(job=job, **facts)
    (folder / "README.md").write_text(card, "utf-8", "surrogateescape")


def accuracy(trained: Trained) -> str:
    """State the top-1 of a checkpoint's validation with its 95 % interval (Wilson 1927)."""
    row, identity = (trained.stored.get(name, {}) for name in ("validation", "identity"))
    images = re.match(r"[\d,]+", identity.get("data.val", ""))  # of the split's fingerprint
    if images is None or "top1" not in row or row["step"] != trained.stored.get("step"):
        return "not known"
    p, n, z = row["top1"] / 100, int(images[0].replace(",", "")), 1.96
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2)
    low, high = (100 * (middle + way * half) / (1 + z * z / n) for way in (-1, 1))
    return f"{100 * p:.2f} % top-1 of {n:,} images; 95 % interval {low:.1f} to {high:.1f} %"


def save(job: Job, model: nn.Module, path: Path) -> None:
    """Write the file. `model` is the plain model, in eval mode on the CPU."""
    if job.to == "hub":
        write_folder(job, model, path)
    if job.to in ("safetensors", "hub"):
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        job.file(path).write_bytes(safetensors.torch.save(weights, job.texts()))
        return
    graph = WithPreprocessing(model, job.format).eval() if job.inside else model
    example = job.input(torch.zeros(2, *job.pixels, dtype=torch.uint8))
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        if job.to == "pt2":
            program = torch.export.export(graph, (example,), dynamic_shapes=shapes)
            buffer = io.BytesIO()  # with a path, torch aborts the process if the disk is full
            torch.export.save(program, buffer, extra_files=dict(job.texts()))
            path.write_bytes(buffer.getbuffer())
            return
        more: Any = {"input_names": ["images"], "output_names": ["logits"], "verbose": False}
        more |= {"dynamo": True, "dynamic_shapes": shapes}
        exported = torch.onnx.export(graph, (example,), **more)
        assert exported is not None
        exported.model.metadata_props.update(job.texts())
        exported.save(path, external_data=False)


def open_exported(job: Job, path: Path) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """Open an exported file as another program would; return the model and the texts, parsed."""
    predict: Callable[[Tensor], Tensor]
    if job.to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        texts = session.get_modelmeta().custom_metadata_map

        def predict(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    elif job.to == "pt2":
        texts = dict.fromkeys(job.texts(), "")
        predict = torch.export.load(path, extra_files=texts).module()  # fills the texts in
    elif job.to == "hub":
        import timm

        texts = safetensors_metadata(job.file(path))
        predict = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    else:
        predict, texts = open_trained(path).build(CPU), safetensors_metadata(path)
    return predict, {name: json.loads(texts[name]) for name in job.texts()}


@torch.no_grad()
def compare(job: Job, predict: Callable[[Tensor], Tensor], model: nn.Module) -> str:
    """Return the largest difference from eager mode on random images; RunError above BOUND."""
    highest = job.format.highest
    levels = np.random.default_rng(0).random((sum(BATCHES), *job.pixels))
    levels *= highest + (highest > 1)
    batches = torch.from_numpy(levels.astype(job.trained.image_dtype)).split(BATCHES)
    eager = torch.cat([model(job.format.normalised(batch)) for batch in batches])
    exported = torch.cat([predict(job.input(batch)) for batch in batches])
    # torch's maximum keeps a NaN.
    difference, bound = (exported - eager).abs().amax(), BOUND * eager.abs().amax()
    result = f"largest difference {difference:.2g}, bound {bound:.2g}"
    if not difference <= bound:  # also if it is NaN
        raise RunError(f"--to {job.to}: differs from eager mode: {result}; nothing is written")
    return f"compared with eager mode: {result}"


def export(job: Job, out: Path) -> None:
    """Write, check and only then rename the file; print the difference and what it takes.

    Raises UserError if the weights do not fit the model, and RunError if a check has found a
    difference, or the model cannot be exported.
    """
    model = job.trained.build(CPU)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
        temporary = Path(folder) / out.name
        try:
            with warnings.catch_warnings(action="ignore"):  # of exporters, about their own code
                save(job, model, temporary)
                predict, texts = open_exported(job, temporary)
            result = compare(job, predict, model)
        except (OSError, UserError, RunError):
            raise
        except Exception as error:  # the exporters, their graphs and onnxruntime raise many types
            name, reason = job.trained.config.model.name, describe(error).partition("\n")[0]
            text = f"--to {job.to}: model.name={name} cannot be exported ({reason})"
            raise RunError(text) from None
        with open(job.file(temporary), "rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.replace(temporary, out)
    takes = texts["preprocessing"]["input"]
    use = {"safetensors": "weights alone", "hub": f"`hf upload OWNER/NAME {out}` publishes it"}
    graph = use.get(job.to, f"images {takes['dtype']} {takes['shape']} -> logits")
    print(result, f"written to {out}: {size / 1e6:,.1f} MB, {graph}", sep="\n")


def export_model(options: argparse.Namespace) -> int:
    """Find all mistakes in the arguments; then export."""
    for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir"):  # describe their passes
        logging.getLogger(name).setLevel(logging.ERROR)
    trained = open_trained(Path(*options.paths), options.overrides, classes=options.classes)
    if not trained.classes:
        logging.warning("the names of the classes are unknown; give --classes FILE")
    model = replace(trained.config.model, channels_last=False)
    trained = replace(trained, config=replace(trained.config, model=model))
    name = trained.name if trained.stored else trained.path.stem
    out = options.out or Path(f"{name.replace(',', '-')}.{options.to}")
    if out.is_dir() or (out.exists() and (options.to == "hub" or out.samefile(trained.path))):
        raise UserError(f"--out {out}: is there already; give another name")
    if not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {out.parent} is no folder that can be written; give another")
    if options.to == "hub" and not model.name.startswith("timm/"):
        raise UserError(f"--to hub: is for models timm/NAME, not {model.name}; give safetensors")
    size = build_image_transforms(trained.config.augment.val, "augment.val").image_size
    trained.check_size(size)
    if options.preprocessing and (dtype := trained.image_dtype) != np.uint8:
        raise UserError(f"--preprocessing: takes uint8, the model was trained on {dtype}; omit it")
    print(f"exporting {trained.name}", flush=True)
    export(Job(trained, options.to, options.preprocessing, size), out)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(partial(export_model, OPTIONS)))
