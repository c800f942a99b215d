"""Export a trained model to a file that other programs can use without this one.

    python scripts/export.py runs/NAME --to onnx --preprocessing
    python scripts/export.py runs/NAME --to pt2 --self-check
    python scripts/export.py resnet50-0676ba61.pth --to safetensors model.name=resnet50

CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.json, last.json or
step-*.pt, or a file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which
model.name=NAME is required. Where a file holds a moving average of the weights, the average is
exported. The result computes in fp32, on the CPU or on a GPU.

    --to onnx         ONNX, for onnxruntime and others; needs onnx, onnxscript and onnxruntime
    --to pt2          torch.export, for torch.export.load and AOTInductor
    --to safetensors  the weights alone, for the model of the same name

ONNX and pt2 files take `images`, a batch of any size, float32 [B, 3, S, S], normalised, and return
`logits`, float32 [B, classes]. With --preprocessing, they take uint8 [B, S, S, 3], RGB, the layout
of Pillow, and normalise inside. Decoding, resize and crop stay outside. S is data.val_size.

Every file has three texts, each of them JSON: `classes`, the names in the order of the logits;
`preprocessing`, which lists the transforms before the model, mean, std and the expected input; and
`model`. They are the metadata_props of ONNX, the extra_files of pt2 and the __metadata__ of
safetensors.

Compares the file with eager PyTorch on 16 images, in batches of 1, 3 and 12: of the validation
split if data.root is given or the checkpoint's still exists, and synthetic ones otherwise. The
largest difference of two logits must be at most 1e-4 of the largest logit. --self-check also
predicts every file of the validation split, with only what the exported file states, and compares
with an fp32 evaluation: predictions may differ only where its two largest logits are less than
1e-3 apart, and these files are listed.

The output file is written, or replaced, only if every check has passed.

Exit status: 0 exported, 1 failed or a check found a difference, 2 wrong arguments.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli
from conf.schema import UserError, did_you_mean, typed_keys

SCRIPT = "export.py"
CHECKPOINT = "a checkpoint, the folder of a run, or a file with weights"
# format -> packages that it needs, besides torch
FORMATS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": (), "safetensors": ()}


def check_options(options: argparse.Namespace, paths: list[str]) -> None:
    """Check the command line.

    Raises:
        UserError: says what is wrong.
    """
    if len(paths) != 1:
        given = f"{len(paths)} are given; export one at a time" if paths else f"give {CHECKPOINT}"
        raise UserError(f"CHECKPOINT: {given}; see --help")
    if options.to not in FORMATS:
        names = ", ".join(FORMATS)
        given = f" {options.to}: no such format" if options.to else " is missing"
        raise UserError(f"--to{given}; give {names}{did_you_mean(options.to or '', FORMATS)}")
    missing = [name for name in FORMATS[options.to] if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"--to {options.to}: {', '.join(missing)} {verb} not installed; "
            f"`pip install {' '.join(FORMATS[options.to])}`"
        )
    if options.preprocessing and options.to == "safetensors":
        raise UserError("--preprocessing: a safetensors file has no graph; give --to onnx or pt2")
    if options.out is not None:
        check_output(options.out, options.to)


def check_output(path: Path, to: str) -> None:
    """Check that a file can be written.

    Raises:
        UserError: it cannot.
    """
    folder = path.absolute().parent
    if path.is_dir() or path.suffix != f".{to}":
        raise UserError(f"--out {path}: give the name of a file that ends in .{to}")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"--out {path}: {folder} is not a writable folder; give another one")


if __name__ == "__main__":
    parser = cli.option_parser(
        __doc__, usage="python scripts/export.py CHECKPOINT --to FORMAT [options] [key=value ...]"
    )
    parser.add_argument("--to", metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file (default: the checkpoint's name, here)",
    )
    parser.add_argument(
        "--preprocessing", action="store_true", help="normalise inside the graph; uint8 input"
    )
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="compare the prediction for every validation file with an fp32 evaluation",
    )
    cli.add_classes(parser)
    OPTIONS, WORDS = parser.parse_known_args()
    try:
        PATHS, OVERRIDES = cli.split_paths(WORDS, what=CHECKPOINT)
        check_options(OPTIONS, PATHS)
    except UserError as mistake:
        cli.fail(str(mistake), SCRIPT)

import io
import json
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import models
from engine.checkpoint import CheckpointError
from engine.distributed import World, join_world
from engine.log.predictions import Ints
from pipeline import augment, decode
from pipeline.augment import Compose
from pipeline.build import build_val
from pipeline.dataset import BadImageError, FileDataset, FolderDataset
from pipeline.decode import Picture
from pipeline.demo.images import TEXTURES, draw_image
from pipeline.loader import LoaderError, start_forkserver
from pipeline.machine import cores
from pipeline.prefetcher import ImageFormat
from pipeline.splits import has_split
from scripts import evaluate
from scripts.lib.trained import Trained, open_trained

CPU = torch.device("cpu")
BATCHES = (1, 3, 12)  # images; the example batch of the export has 2
IMAGES = sum(BATCHES)
# Of the largest logit. onnxruntime differed by up to 8e-7 of it for ResNet, ViT, Swin and
# MobileNetV3; pt2 by 0.
BOUND = 1e-4
CLOSE = 1e-3  # difference of the two largest logits, below which rounding may change the order
LARGEST_ONNX = 2**31 - 2**24  # bytes of weights; protobuf reads at most 2 GiB
# Loggers of the exporters, which describe their own passes.
QUIET = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
TEXTS = ("classes", "preprocessing", "model")

Predict = Callable[[Tensor], Tensor]
"""float32 [B, 3, S, S], or uint8 [B, S, S, 3] with --preprocessing -> float32 [B, classes]."""


class ExportError(RuntimeError):
    """The model cannot be exported, or the exported file differs from it."""


class WithPreprocessing(nn.Module):
    """A model that normalises its images: uint8 [B, S, S, 3] -> logits [B, classes].

    Args:
        network: float32 [B, 3, S, S] -> logits.
        format: has the mean and the standard deviation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, format: ImageFormat) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", format.scale)
        self.register_buffer("shift", format.shift)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.permute(0, 3, 1, 2).float() * self.scale + self.shift)


@dataclass(frozen=True)
class Job:
    """What to export.

    Attributes:
        trained: the model.
        to: a name in FORMATS.
        inside: whether the graph normalises.
        size: side of the images, pixels.
    """

    trained: Trained
    to: str
    inside: bool
    size: int

    @property
    def format(self) -> ImageFormat:
        data = self.trained.config.data
        return ImageFormat(CPU, data.mean, data.std)

    def input(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Return the input of the exported file for images, each uint8 [S, S, 3]."""
        batch = torch.from_numpy(np.stack(pixels))
        return batch if self.inside else self.normalised(batch)

    def normalised(self, batch: Tensor) -> Tensor:
        """uint8 [B, S, S, 3] -> float32 [B, 3, S, S], as the pipeline computes it."""
        return batch.permute(0, 3, 1, 2) * self.format.scale + self.format.shift

    def texts(self) -> dict[str, str]:
        """Return what the file states about itself; all values are JSON."""
        trained, size = self.trained, self.size
        data = trained.config.data
        preprocessing = {
            "transforms": [explicit(entry) for entry in trained.config.augment.val],
            "mean": list(data.mean),
            "std": list(data.std),
            "inside": self.inside,
            "input": {
                "name": "images",
                "dtype": "uint8" if self.inside else "float32",
                "shape": ["batch", size, size, 3] if self.inside else ["batch", 3, size, size],
                "channels": "RGB",
            },
        }
        model = {
            "name": trained.config.model.name,
            "args": dict(trained.config.model.args),
            "image_size": trained.image_size,
            "num_classes": trained.num_classes,
            "checkpoint": trained.name,
            "step": trained.step,
            "averaged_weights": trained.averaged,
        }
        values = (list(trained.classes), preprocessing, model)
        return {name: json.dumps(value) for name, value in zip(TEXTS, values, strict=True)}


def explicit(entry: Any) -> Any:
    """Return an entry of augment.val with the short side and the interpolation of a resize."""
    if not (isinstance(entry, dict) and isinstance(entry.get("resize"), dict)):
        return entry
    parameters = {"interpolation": "bilinear", **entry["resize"]}
    if "crop_ratio" in parameters:
        ratio = parameters.pop("crop_ratio")
        parameters["size"] = round(parameters["size"] / ratio)
    return {"resize": parameters}


# Writing.


def save(job: Job, model: nn.Module, path: Path) -> None:
    """Write the file. `model` is the plain model, in eval mode on the CPU.

    Raises:
        ExportError: torch.export or the ONNX exporter refuses the model.
    """
    if job.to == "safetensors":
        models.write_safetensors(path, model.state_dict(), job.texts())
        return
    graph = WithPreprocessing(model, job.format).eval() if job.inside else model
    example = job.input([np.zeros((job.size, job.size, 3), np.uint8)] * 2)
    with torch.no_grad(), quiet():
        try:
            (save_onnx if job.to == "onnx" else save_pt2)(graph, example, job.texts(), path)
        except OSError:
            raise
        except Exception as error:  # both raise many types
            name = job.trained.config.model.name
            reason = next(iter(str(error).strip().splitlines()), "")
            raise ExportError(
                f"--to {job.to}: model.name={name} cannot be exported "
                f"({type(error).__name__}: {reason})"
            ) from None


def save_onnx(graph: nn.Module, example: Tensor, texts: dict[str, str], path: Path) -> None:
    program = torch.onnx.export(
        graph,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    assert program is not None
    program.model.metadata_props.update(texts)
    program.save(path, external_data=False)


def save_pt2(graph: nn.Module, example: Tensor, texts: dict[str, str], path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(graph, (example,), dynamic_shapes=shapes)
    buffer = io.BytesIO()  # with a path, torch aborts the process if the disk is full
    torch.export.save(program, buffer, extra_files=dict(texts))
    path.write_bytes(buffer.getbuffer())


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of the exporters about their own code."""
    loggers = [logging.getLogger(name) for name in QUIET]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `out`; rename it to `out` if no error is raised."""
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
        temporary = Path(folder) / out.name
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)


# Reading, as another program would.


def open_exported(job: Job, path: Path) -> tuple[Predict, dict[str, Any]]:
    """Open an exported file.

    Returns:
        The model, and the texts of the file, parsed.
    """
    read = {"onnx": open_onnx, "pt2": open_pt2}
    with quiet():
        if job.to in read:
            predict, texts = read[job.to](path)
        else:
            predict, texts = open_safetensors(path, job.trained)
    return predict, {name: json.loads(texts[name]) for name in TEXTS}


def open_onnx(path: Path) -> tuple[Predict, dict[str, str]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def predict(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return predict, session.get_modelmeta().custom_metadata_map


def open_pt2(path: Path) -> tuple[Predict, dict[str, str]]:
    texts = dict.fromkeys(TEXTS, "")
    program = torch.export.load(path, extra_files=texts)  # fills them in
    return program.module(), texts


def open_safetensors(path: Path, trained: Trained) -> tuple[Predict, dict[str, str]]:
    weights = models.weights_in(models.read_file(path, origin=str(path)), origin=str(path))
    texts = models.safetensors_metadata(path)
    return replace(trained, weights=weights).build(CPU), texts


# Checks.


def images_for(
    trained: Trained, overrides: Sequence[str], *, labelled: bool = False
) -> tuple[list[np.ndarray], int, str]:
    """Return IMAGES transformed images, uint8 [S, S, 3], their side, and where they are from.

    Args:
        labelled: only files of the validation split that have labels of the model will do.

    Raises:
        UserError: a typed folder or a transform is wrong.
        BadImageError: a file cannot be read.
    """
    config = trained.config
    data = config.data
    if labelled and data.source == "fake":
        raise UserError("--self-check: data.source=fake has no files; give data.root=/path")
    needed = labelled or bool({"data", "data.root", "data.val"} & typed_keys(overrides))
    present = data.root and has_split(data, data.train if data.val_fraction else data.val)
    if data.source != "fake" and (needed or present):
        datasets = build_val(config)
        datasets.prepare()
        if labelled:
            evaluate.with_labels_of(trained, datasets)  # find mistakes before the export
        val = datasets.val
        where = val.index.root if isinstance(val, FolderDataset) else data.val
        places = np.linspace(0, len(val) - 1, IMAGES).astype(int).tolist()
        return [val.load(0, i)[0] for i in places], datasets.val_size, f"images of {where}"
    # This dataset checks the transforms and has no files.
    size = build_val(replace(config, data=replace(data, source="fake"))).val_size
    transform = Compose(augment.build(config.augment.val, augment.TRANSFORMS, key="augment.val"))
    rng = np.random.default_rng(0)
    labels = islice(cycle(TEXTURES), IMAGES)
    drawn = [Picture(np.asarray(draw_image(label, rng))) for label in labels]
    return (
        [transform(picture, random.Random(0)).pixels() for picture in drawn],
        size,
        "drawn images",
    )


@torch.no_grad()
def compare(
    job: Job, predict: Predict, model: nn.Module, images: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Return the largest difference from eager mode, and the bound, both in logits.

    Raises:
        ExportError: the file cannot run a batch, or returns another shape.
    """
    difference = largest = 0.0
    rest = list(images)
    for count in BATCHES:
        batch, rest = rest[:count], rest[count:]
        eager = model(job.normalised(torch.from_numpy(np.stack(batch))))
        try:
            found = predict(job.input(batch))
        except Exception as error:  # onnxruntime and graphs raise many types
            reason = next(iter(str(error).strip().splitlines()), "")
            raise ExportError(
                f"the exported file cannot run a batch of {count} images "
                f"({type(error).__name__}: {reason})"
            ) from None
        if found.shape != eager.shape:
            raise ExportError(f"the exported file returns {[*found.shape]}, not {[*eager.shape]}")
        # A NaN must not disappear in a maximum of Python.
        difference = float(torch.tensor(difference).maximum((found - eager).abs().amax()))
        largest = max(largest, float(eager.abs().amax()))
    return difference, BOUND * largest


def evaluated(job: Job, overrides: Sequence[str], world: World) -> evaluate.Evaluated:
    """Evaluate the model in fp32."""
    trained = evaluate.with_config(job.trained, overrides, world)
    config = trained.config
    config = replace(
        config,
        train=replace(config.train, precision="fp32"),
        loader=replace(config.loader, decoder="pillow"),
    )
    trained = replace(trained, config=config)
    return evaluate.run(trained, world, flip=False, self_check=False)


def predictions_of(
    files: FileDataset, predict: Predict, preprocessing: dict[str, Any], max_pixels: int
) -> Ints:
    """Predict all files of a split with only what an exported file states.

    Returns:
        int64 [N], positions of classes.

    Raises:
        BadImageError: a file cannot be read.
    """
    transforms = Compose(
        augment.build(preprocessing["transforms"], augment.TRANSFORMS, key="augment.val")
    )
    mean, std = (np.array(preprocessing[name], np.float32) for name in ("mean", "std"))

    def load(i: int) -> np.ndarray:
        try:
            picture = decode.open_picture(files.read(i), "pillow", max_pixels)
            pixels = transforms(picture, random.Random(0)).pixels()
        except Exception as error:  # Pillow raises many types
            raise BadImageError(f"{files.name(i)}: {type(error).__name__}: {error}") from error
        if preprocessing["inside"]:
            return pixels
        return ((pixels / np.float32(255) - mean) / std).transpose(2, 0, 1)

    found: list[Tensor] = []
    with ThreadPoolExecutor(cores()) as pool, torch.no_grad():
        for start in range(0, len(files), evaluate.CPU_BATCH):
            rows = range(start, min(start + evaluate.CPU_BATCH, len(files)))
            found.append(predict(torch.from_numpy(np.stack(list(pool.map(load, rows))))).argmax(1))
    return torch.cat(found).numpy()


@torch.no_grad()
def self_check(
    job: Job, predict: Predict, texts: dict[str, Any], reference: evaluate.Evaluated
) -> list[str]:
    """Compare the predictions for all validation files with an fp32 evaluation.

    Returns:
        The number of equal predictions, and the files that differ with a margin below CLOSE.

    Raises:
        ExportError: a prediction with a larger margin differs.
    """
    files = reference.datasets.val
    assert isinstance(files, FileDataset)
    expected = reference.predictions.predictions
    most = reference.trained.config.data.max_pixels
    found = predictions_of(files, predict, texts["preprocessing"], most)
    model = job.trained.build(CPU)
    close: list[str] = []
    wrong: list[str] = []
    for i in np.flatnonzero(found != expected).tolist():
        pixels = torch.from_numpy(files.load(0, i)[0])[None]
        first, second = model(job.normalised(pixels))[0].topk(2).values.tolist()
        margin = first - second
        names = (reference.classes[place] for place in (found[i], expected[i]))
        line = "{}: {}, evaluation {}, margin {:.1e}".format(files.name(i), *names, margin)
        (close if margin < CLOSE else wrong).append(line)
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ExportError(f"--self-check: another prediction for {wrong[0]}{more}")
    equal = f"{len(found) - len(close):,} of {len(found):,} predictions are equal"
    return [f"self-check: {line}" for line in (equal, *close)]


# The command.


def opened(overrides: Sequence[str]) -> Trained:
    """Open the checkpoint, for a model in plain memory format.

    Raises:
        UserError: the file or an override is wrong.
    """
    if "train.precision" in typed_keys(overrides):
        raise UserError("train.precision: an exported file computes in fp32; leave the key out")
    trained = open_trained(Path(PATHS[0]), overrides, classes=OPTIONS.classes)
    config = trained.config
    if not trained.classes:
        logging.warning("the names of the classes are unknown; give --classes FILE")
    return replace(
        trained, config=replace(config, model=replace(config.model, channels_last=False))
    )


def output_file(trained: Trained) -> Path:
    """Return the output file: by default the checkpoint's name, in the current folder.

    Raises:
        UserError: it cannot be written, or is the checkpoint itself.
    """
    name = trained.name if trained.stored else trained.path.stem
    out: Path = OPTIONS.out or Path(f"{name}.{OPTIONS.to}")
    check_output(out, OPTIONS.to)
    if out.exists() and out.samefile(trained.path):
        raise UserError(f"--out {out}: is the checkpoint itself; give another name")
    return out


def export(
    job: Job,
    out: Path,
    images: Sequence[np.ndarray],
    reference: Callable[[], evaluate.Evaluated] | None = None,
) -> list[str]:
    """Write, check and only then rename the file.

    Args:
        images: IMAGES images to compare with eager mode, each uint8 [S, S, 3].
        reference: evaluates the model in fp32, for --self-check.

    Returns:
        Lines about the checks and the file.

    Raises:
        UserError: the weights do not fit the model, or are too large for the format.
        ExportError: a check has found a difference, or the model cannot be exported.
        BadImageError, LoaderError: an image cannot be read.
    """
    model = job.trained.build(CPU)
    size = sum(value.nbytes for value in model.state_dict().values())
    if job.to == "onnx" and size > LARGEST_ONNX:
        raise UserError(
            f"--to onnx: the weights have {size:,} bytes, an ONNX file holds 2 GiB; give --to pt2"
        )
    with replacing(out) as temporary:
        save(job, model, temporary)
        predict, texts = open_exported(job, temporary)
        difference, bound = compare(job, predict, model, images)
        found = f"largest difference {difference:.2g}, bound {bound:.2g}"
        if not difference <= bound:  # also if it is NaN
            raise ExportError(
                f"--to {job.to}: differs from eager mode: {found}; nothing is written"
            )
        lines = [f"compared with eager mode: {found}"]
        if reference is not None:
            lines += self_check(job, predict, texts, reference())
    return [*lines, f"written to {out}: {out.stat().st_size / 1e6:,.1f} MB, {signature(job)}"]


def signature(job: Job) -> str:
    """Describe the graph in a few words."""
    if job.to == "safetensors":
        return f"the weights of {job.trained.config.model.name}"
    wanted = json.loads(job.texts()["preprocessing"])["input"]
    shape = ", ".join(map(str, wanted["shape"]))
    return f"images {wanted['dtype']} [{shape}] -> logits [batch, {job.trained.num_classes}]"


def run_command() -> None:
    """Find all mistakes in the arguments; then export."""
    trained = opened(OVERRIDES)
    out = output_file(trained)
    config, check = trained.config, OPTIONS.self_check
    if check and config.loader.start_method == "forkserver" and config.loader.workers != 0:
        start_forkserver()  # it imports what the workers need, while this process exports
    with join_world(config.train.device if check else "cpu") as world:
        if world.size > 1:
            raise UserError("an export needs one process; run it without torchrun")
        if check:
            trained = evaluate.with_config(trained, OVERRIDES, world)
        images, size, origin = images_for(trained, OVERRIDES, labelled=check)
        trained.check_size(size)
        job = Job(trained, OPTIONS.to, OPTIONS.preprocessing, size)
        print(f"exporting {trained.name}; checked with {IMAGES} {origin}", flush=True)
        reference = partial(evaluated, job, OVERRIDES, world) if check else None
        print(*export(job, out, images, reference), sep="\n")


def main() -> int:
    cli.log_to_stderr()
    try:
        run_command()
    except UserError as error:
        cli.fail(str(error), SCRIPT)
    except torch.OutOfMemoryError:
        cli.complain("the GPU has no memory left; lower loader.batch_size", SCRIPT)
        return 1
    except (BadImageError, CheckpointError, ExportError, LoaderError) as error:
        cli.complain(str(error), SCRIPT)
        return 1
    except OSError as error:
        cli.complain(f"cannot write the file: {error.strerror or error}", SCRIPT)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
