"""Load a trained model from a checkpoint of this project or a weights file of a different one.

A safetensors file from scripts/export.py contains the model name, its preprocessing and the class
names. For other files, overrides name the model; torchvision or timm provide the preprocessing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import models
import train
from conf import cli
from conf.compose import from_checkpoint, from_overrides, scaled
from conf.errors import UserError
from conf.named import import_object
from conf.schema import Config, ModelConfig, override_keys
from engine import checkpoint
from engine.compute import can_rewrite, choose_precision, count_flops
from engine.memory import explain_limit
from models.weights import head_of
from models.zoo import RGB
from pipeline.data.build import Datasets, build_image_transforms, build_splits, check_channels
from pipeline.data.dataset import FakeDataset
from pipeline.data.field import IMAGE, Field
from pipeline.data.splits import held_out
from pipeline.feed.batch import Batch
from scripts.lib.options import is_training_key
from scripts.lib.published import Metadata, exported_metadata, library_metadata

# Keys of the training or the machine; defaults replace a checkpoint's values.
OVERRIDABLE_PREFIXES = ("loader.", "log.", "model.weights", "model.freeze", "train.device")
# Keys fixed by a checkpoint; `model` is the group.
FIXED = {"model", "model.name", "model.args", "data.image_size"}


class RecordedFields(dict[str, Tensor]):
    """Fields of a batch that record in `names` which of them were read."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        super().__init__(fields)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)


@dataclass(frozen=True)
class Trained:
    """A trained model, on the CPU."""

    path: Path
    config: Config  # the run's, or the defaults for files of other projects; plus overrides
    weights: dict[str, torch.Tensor]  # state_dict; the EMA if the file has one
    averaged: bool  # whether `weights` is a run's EMA
    num_classes: int  # the run's; for other files, from the shape of the head
    classes: tuple[str, ...]  # class names in logit order; empty if unknown
    # Shape of a training image on the device, (..., C, S, S); parameters of some models depend on S
    image_shape: tuple[int, ...]
    stored: dict[str, Any]  # contents of this project's checkpoint without the weights, or empty
    fields: Mapping[str, Field] = field(default_factory=dict)  # stored fields besides the image
    temperature: float = 1.0  # probabilities are softmax(logits / temperature)

    @property
    def name(self) -> str:
        """The short name: that of the run and the checkpoint, or of the file."""
        folder = Path(os.path.abspath(self.path)).parent  # ../checkpoints/best.pt has no name
        if self.stored and folder.name == "checkpoints":
            return f"{folder.parent.name},{self.path.stem}"
        return self.path.name

    @property
    def image_size(self) -> int:
        """Size of the training images in pixels."""
        return self.image_shape[-1]

    @property
    def image_dtype(self) -> np.dtype[Any]:
        """Dtype of an image before normalization."""
        return np.dtype(self.stored.get("model_input", {}).get("image_dtype", "uint8"))

    def channels_last(self, model: nn.Module, device: torch.device) -> bool:
        """Return whether a model on a device should use the channels_last memory format."""
        return models.use_channels_last(self.config.model.channels_last, model, device.type)

    def check_fields(self, fields: Mapping[str, Field]) -> None:
        """Raise UserError if the model rejects a sample with these fields."""
        with torch.device("meta"):
            count_flops(self._model(), fields, train.forward, key="data.val_size")

    @torch.no_grad()
    def inputs(self, network: nn.Module, size: int) -> dict[str, Field]:
        """Return the fields that `train.forward` reads for images of `size` pixels."""
        fields = self.fields_at(size)
        batch = Batch.zeros(fields, next(network.parameters()).device)
        read = RecordedFields(batch.fields)
        train.forward(network, replace(batch, fields=read))
        return {name: fields[name] for name in fields if name in read.names}

    def on_meta(self) -> nn.Module:
        """Build the model in eval mode on the meta device."""
        with torch.device("meta"):
            return self._model().eval()

    def fields_at(self, size: int) -> dict[str, Field]:
        """Return a sample's fields, with an image of `size` pixels."""
        *leading, channels, _, _ = self.image_shape
        image = Field(self.image_dtype, (*leading, size, size, channels), image=True)
        return {IMAGE: image, **self.fields}

    def build(self, device: torch.device) -> nn.Module:
        """Build the model on a device in eval mode: float [B, C, S, S] -> logits [B, num_classes].

        It has the layers that its run validated with. Raises UserError if the weights do not match.
        """
        model = self._model()
        models.fit_weights(model, self.weights, origin=str(self.path))
        channels_last = self.channels_last(model, device)
        model = model.to(device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        rewrite = self.config.model.rewrite
        if rewrite and self._rewrites_layers(device):
            import_object(rewrite, "model.rewrite")(model, channels_last=channels_last)
        return model.eval()

    def _rewrites_layers(self, device: torch.device) -> bool:
        """Return whether the run replaced layers (on a GPU in bf16) and this device can too."""
        rewritten = self.stored.get("model_input", {}).get("rewrites_layers")
        precision = choose_precision(self.config.train.precision, device)
        return bool(rewritten) and can_rewrite(device, precision)

    def _model(self) -> nn.Module:
        return models.build(
            self.config.model.name,
            num_classes=self.num_classes,
            image_size=self.image_size,
            in_channels=self.image_shape[-3],
            args=self.config.model.args,
        )


def run_main(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; print expected errors in one line."""
    cli.log_to_stderr()
    return cli.run_main(command, partial(explain_limit, remedy="lower loader.batch_size"))


def open_trained(
    path: Path, overrides: Sequence[str] = (), *, classes: Path | None = None
) -> Trained:
    """Load a trained model from any supported file without executing code in it.

    `path`: a checkpoint, a run directory or any other path that `find_checkpoint` accepts; or a
    torchvision, timm or pytorch/examples file (.pth, .pt, .safetensors). `overrides`: groups and
    keys; files of other projects require model.name. `classes`: a text file with one class name per
    line, in logit order; replaces the names in the file.

    Raises UserError if the file is unreadable or damaged, or if the overrides are invalid.
    """
    path = checkpoint.find_checkpoint(path)
    content = models.read_file(path, origin=str(path))
    weights = models.weights_in(content, origin=str(path))
    stored: dict[str, Any] = {}
    averaged = False
    if checkpoint.is_ours(content):
        stored = dict(content)
        state = stored.pop("state")
        stored["validation"] = state.get("last", {})  # may be from an earlier step
        averaged = bool(state.get("ema"))
        if not content["config"].keys() >= {"loader.batch_size", "model.name"}:
            raise UserError(str(path), "its config is incomplete", "pass a different checkpoint")
        metadata: Metadata | None = _run_metadata(content, overrides)
    else:
        metadata = exported_metadata(path)
    if metadata is not None:
        config = from_checkpoint(metadata.config, overrides)
    else:
        metadata = _published_metadata(path, overrides)
        config = from_overrides(overrides, decided=metadata.config)
    num_classes, shape = metadata.num_classes, metadata.image_shape
    if num_classes is None or shape is None:
        size = stored.get("model_input", {}).get("image_size", config.data.image_size)
        model = config.model
        channels, num_classes = sizes_in(weights, model, image_size=size, origin=str(path))
        shape = shape or (channels, size, size)
    check_channels(config.data, shape[-3])
    names = metadata.classes
    if classes is not None:
        names = _read_names(classes, num_classes)
    if len(names) != num_classes:
        names = ()
    fields = _stored_fields(metadata, path)
    shape = tuple(shape)
    found = Trained(path, config, weights, averaged, num_classes, names, shape, stored, fields)
    return replace(found, temperature=metadata.temperature)


def _run_metadata(content: dict[str, Any], overrides: Sequence[str]) -> Metadata:
    """Return the metadata in a checkpoint. Raises UserError if overrides change FIXED keys."""
    stored = content["config"]
    model_input = content["model_input"]
    fixed = sorted(FIXED & override_keys(overrides))
    if fixed:
        fix = "remove it; data.val_size sets the size for evaluation"
        raise UserError(fixed[0], "is fixed by the checkpoint", fix)
    config = {}
    for key, value in stored.items():
        if not (is_training_key(key) or key.startswith(OVERRIDABLE_PREFIXES)):
            config[key] = value
    # Use the per-rank batch size, which fits into the memory of one device.
    config["loader.batch_size"] = stored["loader.batch_size"] // stored.get("ranks", 1)
    classes = tuple(model_input.get("classes", ()))
    num_classes = len(classes) or None
    shape, fields = model_input.get("image_shape"), model_input.get("fields", {})
    return Metadata(config, classes, num_classes, shape, fields)


def _stored_fields(metadata: Metadata, path: Path) -> dict[str, Field]:
    """Return the fields besides the image. Raises UserError if a different program wrote them."""
    try:
        fields = {name: Field(**about) for name, about in metadata.fields.items()}
        Batch.zeros(fields, torch.device("cpu"))
    except (AttributeError, TypeError, ValueError):
        problem = "its sample fields are invalid"
        raise UserError(str(path), problem, "pass a different checkpoint") from None
    fields.pop(IMAGE, None)
    return fields


def _published_metadata(path: Path, overrides: Sequence[str]) -> Metadata:
    """Return a library's metadata for a file. Raises UserError unless overrides name a model."""
    typed = override_keys(overrides)
    if not typed & {"model", "model.name", "recipe"}:
        fix = "set model.name=NAME (torchvision or models/) or model.name=timm/NAME"
        raise UserError(str(path), "not a checkpoint of this version of the program", fix)
    config = from_overrides(overrides)
    metadata = library_metadata(config.model.name, path)
    if metadata.config and typed & {"data.image_size", "data.val_size"}:
        values, size = metadata.config, config.data.val_size
        values["augment.val"] = scaled(values["augment.val"], size / values["data.val_size"])
        values["data.val_size"] = size
    return metadata


def _read_names(path: Path, count: int) -> tuple[str, ...]:
    names = path.read_text("utf-8-sig", "surrogateescape").splitlines()
    different = set(names)
    if not len(names) == len(different) == count:
        problem = f"has {len(different)} different lines, the model has {count} classes"
        fix = "write one name per line, in logit order"
        raise UserError(f"--classes {path}", problem, fix)
    return tuple(names)


def build_val(config: Config) -> Datasets:
    """Build only the validation split; synthetic 1 px images replace the training images."""
    transform = build_image_transforms(config.augment.val, "augment.val")
    data = config.data
    if not held_out(data):
        data = replace(data, train=data.val)
    _, val, classes = build_splits(config, data, transform, transform)
    placeholder = FakeDataset(config.loader.batch_size, len(classes), 1)
    return Datasets(placeholder, val, classes)


def sizes_in(
    weights: Mapping[str, Tensor], config: ModelConfig, *, image_size: int, origin: str
) -> tuple[int, int]:
    """Return the number of input channels and the number of classes of weights.

    They are dimension 1 of the first convolution's weight and dimension 0 of the head's. Raises
    UserError if the weights do not contain the head of the model named in `config`.
    """
    with torch.device("meta"):
        model = models.build(config.name, num_classes=2, image_size=image_size, args=config.args)
    head = head_of(model)
    sizes = [weights[key].shape[0] for key in head if key in weights]
    if not sizes:
        key = min(weights, default="none")
        problem = f"has no {', '.join(head)} of model.name={config.name}, but keys such as {key}"
        fix = "set a different model.name, or remove a key prefix such as Lightning's `model.`"
        raise UserError(origin, problem, fix)
    return _channels_in(weights, model), sizes[0]


def _channels_in(weights: Mapping[str, Tensor], model: nn.Module) -> int:
    """Return the number of input channels; RGB if there is no convolution."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            stored = weights.get(f"{name}.weight", module.weight)
            if stored.ndim != 4:
                return RGB
            # Scale, because a stem's input channels may be blocks of pixels.
            return RGB * stored.shape[1] // module.weight.shape[1]
    return RGB
