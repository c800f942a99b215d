"""Open a trained model from a file: a checkpoint of this project, or a file of another one.

A safetensors file of scripts/export.py states the model, its preprocessing and the classes. For
other files, the overrides name the model; torchvision and timm state the preprocessing.
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
from scripts.lib.published import Stated, exported, published

# Keys of the training or the machine, not of the model: their defaults are used.
OVERRIDABLE_PREFIXES = ("loader.", "log.", "model.weights", "model.freeze", "train.device")
# Keys that a checkpoint fixes; `model` is the group.
FIXED = {"model", "model.name", "model.args", "data.image_size"}


class Recorded(dict[str, Tensor]):
    """Fields of a batch, and the names of those that were read."""

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
    config: Config  # of the run, or the defaults for files of other projects; with the overrides
    weights: dict[str, torch.Tensor]  # state_dict; the moving average if the file holds one
    averaged: bool  # whether `weights` is the moving average of a run
    num_classes: int  # of the run; of other files, from the shape of the head
    classes: tuple[str, ...]  # their names, in the order of the logits; empty if unknown
    # Shape of a training image on the device, (..., C, S, S); parameters of some models depend on S
    image_shape: tuple[int, ...]
    stored: dict[str, Any]  # what a checkpoint of this project holds, except the weights; or empty
    # Other fields of a training sample than the image; none if the file does not state them
    fields: Mapping[str, Field] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name: of the run and the checkpoint, or of the file."""
        folder = Path(os.path.abspath(self.path)).parent  # ../checkpoints/best.pt has no name
        if self.stored and folder.name == "checkpoints":
            return f"{folder.parent.name},{self.path.stem}"
        return self.path.name

    @property
    def image_size(self) -> int:
        """Side of the training images in pixels."""
        return self.image_shape[-1]

    @property
    def image_dtype(self) -> np.dtype[Any]:
        """Dtype of an image before it is normalised."""
        return np.dtype(self.stored.get("model_input", {}).get("image_dtype", "uint8"))

    def channels_last(self, model: nn.Module, device: torch.device) -> bool:
        """Return the memory format for a model on a device."""
        return models.use_channels_last(self.config.model.channels_last, model, device.type)

    def check(self, fields: Mapping[str, Field]) -> int:
        """Return the operations for one sample. Raises UserError if the model does not take it."""
        with torch.device("meta"):
            return count_flops(self._model(), fields, train.forward, key="data.val_size")

    @torch.no_grad()
    def inputs(self, network: nn.Module, size: int) -> dict[str, Field]:
        """Return the fields that `train.forward` reads, with images of `size` pixels."""
        fields = self.fields_at(size)
        batch = Batch.zeros(fields, next(network.parameters()).device)
        read = Recorded(batch.fields)
        train.forward(network, replace(batch, fields=read))
        return {name: fields[name] for name in fields if name in read.names}

    def on_meta(self) -> nn.Module:
        """Build the model in eval mode on the meta device."""
        with torch.device("meta"):
            return self._model().eval()

    def fields_at(self, size: int) -> dict[str, Field]:
        """Return the fields of a sample whose image has `size` pixels."""
        *leading, channels, _, _ = self.image_shape
        image = Field(self.image_dtype, (*leading, size, size, channels), image=True)
        return {IMAGE: image, **self.fields}

    def build(self, device: torch.device) -> nn.Module:
        """Build the model in eval mode on a device, with the layers that its run validated with.

        Returns:
            float [B, C, S, S] -> logits [B, num_classes].

        Raises UserError if the weights are of another model.
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
        """Return whether the run has replaced layers, as on a GPU in bf16, and this is one."""
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
    """Run a command and return the exit status; print an expected error in one line."""
    cli.log_to_stderr()
    return cli.run_main(command, partial(explain_limit, remedy="lower loader.batch_size"))


def open_trained(
    path: Path, overrides: Sequence[str] = (), *, classes: Path | None = None
) -> Trained:
    """Open a trained model from any file. Nothing in the file is executed.

    `path`: a checkpoint, a run directory, or what else `find_checkpoint` takes; or a file of
    torchvision, timm or pytorch/examples (.pth, .pt, .safetensors). `overrides`: groups and keys as
    typed; for files of other projects, model.name is required. `classes`: a text file with the name
    of a class in each line, in the order of the logits; replaces the names in the file.

    Raises UserError if the file cannot be read or is damaged, or the overrides are wrong.
    """
    path = checkpoint.find_checkpoint(path)
    content = models.read_file(path, origin=str(path))
    weights = models.weights_in(content, origin=str(path))
    stored: dict[str, Any] = {}
    averaged = False
    if checkpoint.is_ours(content):
        stored = dict(content)
        state = stored.pop("state")
        stored["validation"] = state.get("last", {})  # perhaps of an earlier step
        averaged = bool(state.get("ema"))
        stated: Stated | None = _stated_by_run(content, overrides)
    else:
        stated = exported(path)
    if stated is not None:
        config = from_checkpoint(stated.values, overrides)
    else:
        stated = _stated_by_library(path, overrides)
        config = from_overrides(overrides, decided=stated.values)
    num_classes, shape = stated.num_classes, stated.image_shape
    if num_classes is None or shape is None:
        size = stored.get("model_input", {}).get("image_size", config.data.image_size)
        model = config.model
        channels, num_classes = sizes_in(weights, model, image_size=size, origin=str(path))
        shape = shape or (channels, size, size)
    check_channels(config.data, shape[-3])
    names = stated.classes
    if classes is not None:
        names = _read_names(classes, num_classes)
    if len(names) != num_classes:
        names = ()
    fields = {name: Field(**about) for name, about in stated.fields.items()}
    fields.pop(IMAGE, None)
    shape = tuple(shape)
    return Trained(path, config, weights, averaged, num_classes, names, shape, stored, fields)


def _stated_by_run(content: dict[str, Any], overrides: Sequence[str]) -> Stated:
    """Return what a checkpoint says about its model. Raises UserError for keys that it fixes."""
    stored = content["config"]
    model_input = content["model_input"]
    fixed = sorted(FIXED & override_keys(overrides))
    if fixed:
        cure = "leave it out; data.val_size is the size of other images"
        raise UserError(fixed[0], "is fixed by the checkpoint", cure)
    values = {}
    for key, value in stored.items():
        if not (is_training_key(key) or key.startswith(OVERRIDABLE_PREFIXES)):
            values[key] = value
    # The share of one rank, which fits into the memory of one device.
    values["loader.batch_size"] = stored["loader.batch_size"] // stored.get("ranks", 1)
    classes = tuple(model_input.get("classes", ()))
    num_classes = len(classes) or None
    shape, fields = model_input.get("image_shape"), model_input.get("fields", {})
    return Stated(values, classes, num_classes, shape, fields)


def _stated_by_library(path: Path, overrides: Sequence[str]) -> Stated:
    """Return what torchvision or timm states about a file, for a model that the overrides name."""
    typed = override_keys(overrides)
    if not typed & {"model", "model.name", "recipe"}:
        cure = "give model.name=NAME, of torchvision, of timm as timm/NAME, or of models/"
        raise UserError(str(path), "is no checkpoint of this version of the program", cure)
    config = from_overrides(overrides)
    stated = published(config.model.name, path)
    if stated.values and typed & {"data.image_size", "data.val_size"}:
        values, size = stated.values, config.data.val_size
        values["augment.val"] = scaled(values["augment.val"], size / values["data.val_size"])
        values["data.val_size"] = size
    return stated


def _read_names(path: Path, count: int) -> tuple[str, ...]:
    names = path.read_text("utf-8-sig", "surrogateescape").splitlines()
    different = set(names)
    if not len(names) == len(different) == count:
        wrong = f"has {len(different)} different lines, the model has {count} classes"
        cure = "give one name per line, in the order of the logits"
        raise UserError(f"--classes {path}", wrong, cure)
    return tuple(names)


def build_val(config: Config) -> Datasets:
    """Build the validation split alone: synthetic images of 1 px stand for the training images."""
    transform = build_image_transforms(config.augment.val, "augment.val")
    data = config.data
    if not held_out(data):
        data = replace(data, train=data.val)
    _, val, classes = build_splits(config, data, transform, transform)
    nothing = FakeDataset(config.loader.batch_size, len(classes), 1)
    return Datasets(nothing, val, classes)


def sizes_in(
    weights: Mapping[str, Tensor], config: ModelConfig, *, image_size: int, origin: str
) -> tuple[int, int]:
    """Return the numbers of input channels and of classes of weights.

    They are the second dimension of the first convolution, and the first dimension of the head.
    Raises UserError if they have no head of the model that `config` names.
    """
    with torch.device("meta"):
        model = models.build(config.name, num_classes=2, image_size=image_size, args=config.args)
    head = head_of(model)
    sizes = [weights[key].shape[0] for key in head if key in weights]
    if not sizes:
        key = min(weights, default="none")
        wrong = f"has no {', '.join(head)} of model.name={config.name}, but keys such as {key}"
        cure = "give another model.name, or remove a prefix of all keys, as `model.` of Lightning"
        raise UserError(origin, wrong, cure)
    return _channels_in(weights, model), sizes[0]


def _channels_in(weights: Mapping[str, Tensor], model: nn.Module) -> int:
    """Return the number of input channels; RGB without a convolution."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            stored = weights.get(f"{name}.weight", module.weight)
            if stored.ndim != 4:
                return RGB
            # In proportion, because a stem may see blocks of pixels.
            return RGB * stored.shape[1] // module.weight.shape[1]
    return RGB
