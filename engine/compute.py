"""Precision, kernels and torch.compile for a device, and a model's operations per image."""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import models
from conf.errors import UserError, describe
from conf.schema import Config
from engine.schedule import Schedule
from pipeline.data.build import Datasets
from pipeline.data.field import IMAGE, Field
from pipeline.feed.batch import Batch

# (network, batch) -> the network's outputs, such as `train.forward`
Forward = Callable[[nn.Module, Batch], Tensor]

# model.compile=auto compiles runs with more steps than this. On one H200, ResNet-50 compiles in a
# minute, in later starts in 11 s, and this saves 18 of the 53 ms of a step with 256 images.
MANY_STEPS = 2_000
# Longer runs let cuDNN search for faster algorithms for 1 to 40 s, which saves 0 to 6 % of a step.
SEARCH_STEPS = 10_000
# model.compile=auto is `tuned` for more operations per GPU than this, which takes ResNet-50 3 hours
# on an H200. Its first start is then 132 s longer, and a step is 1.06 times as fast.
MANY_OPERATIONS = 2e18
# Seconds for which a Python thread may delay a kernel launch. With the default of 5 ms and a thread
# that computed a checksum for TensorBoard, ViT-S/16 took 148 ms instead of 31 ms a step on an H200.
SWITCH_SECONDS = 1e-4


@dataclass(frozen=True)
class Compute:
    device: torch.device
    precision: str
    channels_last: bool
    compile_mode: str
    rewrite: str | None  # model.rewrite if it helps, which is in compiled bf16 on a GPU
    fields: Mapping[str, Field]  # fields of a training sample
    parameters: int
    flops: int  # operations in the forward pass of a training sample

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of images on the device. With two bytes per value, a layer reads half as much."""
        return dtype_of(self.precision)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Enter autocast, without `compile_blocks`, which would recompile for each batch size."""
        with autocast(self.device.type, self.precision), torch.compiler.set_stance("force_eager"):
            yield


def build_model(config: Config, datasets: Datasets, *, pretrained: bool = False) -> nn.Module:
    """Build the config's model for the datasets. Raises UserError like `models.build`."""
    return models.build(
        config.model.name,
        num_classes=len(datasets.classes),
        image_size=config.data.image_size,
        in_channels=datasets.train.fields[IMAGE].device_shape[-3],
        pretrained=pretrained,
        args=config.model.args,
    )


def choose_compute(
    config: Config, datasets: Datasets, schedule: Schedule, device: torch.device, forward: Forward
) -> Compute:
    """Resolve options set to auto. Raises UserError if the model does not accept the samples."""
    fields, val_fields = datasets.train.fields, datasets.val.fields
    shape = fields[IMAGE].device_shape
    if shape[-1] != config.data.image_size:
        given = f"data.image_size={config.data.image_size}"
        problem = f"the training images have {shape[-1]} px"
        raise UserError(given, problem, "set it to their size, or change augment.train")
    with torch.device("meta"):  # allocates no memory
        model = build_model(config, datasets)
    models.freeze(model, config.model.freeze)  # raises for an unknown name before weights are read
    flops = count_flops(model, fields, forward)
    if val_fields != fields:  # raises here instead of in the first validation
        count_flops(model, val_fields, forward, key="data.val_size, augment.val")
    precision = choose_precision(config.train.precision, device)
    steps = schedule.stop_step
    operations = 3 * flops * steps * schedule.local_batch_size  # total of this rank in the run
    mode = resolve_compile(config, device, steps, operations)
    if mode == "default" and has_identical_blocks(model):
        mode = "blocks"
    is_rewritten = can_rewrite(device, precision) and mode != "off"
    return Compute(
        device=device,
        precision=precision,
        channels_last=models.use_channels_last(config.model.channels_last, model, device.type),
        compile_mode=mode,
        rewrite=config.model.rewrite if is_rewritten else None,
        fields=fields,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=flops,
    )


def count_flops(
    model: nn.Module, fields: Mapping[str, Field], forward: Forward, *, key: str = "data.image_size"
) -> int:
    """Count the operations in one sample's forward pass; a multiply-add counts as two.

    Raises UserError if the model does not accept the images or the arguments that `forward` passes,
    or if `forward` needs a missing field.

    Args:
        model: a model on the meta device, which is set to eval mode and frozen.
        key: key to name in the error if the model does not accept the images.
    """
    model.eval().requires_grad_(False)  # the counter fails on views of trainable parameters
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            forward(model, Batch.zeros(fields, torch.device("meta")))
    except (TypeError, UserError) as error:
        if not str(error).startswith(f"{type(model).forward.__qualname__}() "):
            raise  # a missing field, or an error within the model, whose traceback helps
        names = ", ".join(inspect.signature(model.forward).parameters)
        fix = f"change it to call the network with ({names})"
        raise UserError("forward() in train.py", str(error), fix) from None
    except (RuntimeError, AssertionError, ValueError) as error:  # raised by a layer
        reason = describe(error).splitlines()[0]
        channels, *_, size = fields[IMAGE].device_shape[-3:]
        images = f"images of {size} px and {channels} channels"
        problem = f"the model does not accept {images} ({reason})"
        raise UserError(key, problem, "set a different value, or fix the model") from None
    return int(counter.get_total_flops())


def device_name(device: torch.device) -> str:
    """Return the name of a CUDA GPU, such as `NVIDIA H200`, or else the device type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def choose_precision(choice: str, device: torch.device) -> str:
    """Resolve train.precision=auto to a precision that the device's tensor cores support.

    This is bf16, or fp16 on a T4, V100 or RTX 20xx. CPUs and older GPUs have none and use fp32.
    """
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    if torch.cuda.get_device_capability(device) >= (7, 0):
        return "fp16"
    return "fp32"


def can_rewrite(device: torch.device, precision: str) -> bool:
    """Return whether model.rewrite has faster layers for a device and a precision."""
    return device.type == "cuda" and precision == "bf16"


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype for images and for autocast's matrix products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def longest_float(device: torch.device) -> torch.dtype:
    """Return float64 for sums, or float32 on GPUs without float64 (Apple, some by Intel)."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Return the autocast context for a forward pass. Gradients in fp16 need a loss scale."""
    dtype = dtype_of(precision)
    return torch.autocast(device_type, dtype, enabled=dtype != torch.float32)


def resolve_compile(config: Config, device: torch.device, steps: int, operations: int) -> str:
    """Resolve model.compile=auto from a rank's steps and operations in the whole run.

    Thus, a resumed run keeps its mode, unless train.max_steps changes. Modes round differently.
    """
    if config.model.compile != "auto":
        return config.model.compile
    if device.type != "cuda" or steps <= MANY_STEPS:
        return "off"
    if operations <= MANY_OPERATIONS or config.train.deterministic:
        return "default"
    return "tuned"


def is_search_worthwhile(config: Config, steps: int) -> bool:
    """Return whether cuDNN searches for algorithms, whose rounding may differ between starts."""
    return steps > SEARCH_STEPS and not config.train.deterministic


def set_up_kernels(deterministic: bool, precision: str) -> None:
    """Set torch's global options for precision, cuDNN, determinism and torch.compile.

    Also let other threads yield to kernel launches after SWITCH_SECONDS.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    set_float32_precision(precision)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required for deterministic cuBLAS
    torch.use_deterministic_algorithms(deterministic)
    # Without this option, torch does not cache graphs that contain a custom autograd.Function.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def set_float32_precision(precision: str) -> None:
    """Allow TF32 in float32 matrix products and convolutions unless `precision` is fp32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect garbage only at checkpoints, because in a step it would delay kernel launches."""
    gc.freeze()  # excludes earlier objects, which would take 1.8 s per collection on an H200
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def has_identical_blocks(model: nn.Module) -> bool:
    """Return whether all `model.blocks` have the same repr, like a ViT's without drop path.

    Such modules differ only in their weights, so one compilation serves them all.
    """
    blocks = dict(model.named_children()).get("blocks", nn.Sequential())
    return len(set(map(repr, blocks.children()))) == 1


def compile_blocks(model: nn.Module) -> None:
    """Compile each of `model.blocks` separately for training.

    On an H200, ViT-S/16's first start takes 27 s instead of 41 s, and a step takes 0.3 % longer.
    """
    for block in model.get_submodule("blocks").children():
        block.compile(dynamic=False, mode="default")


def compile_function(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return the compiled function, or the function itself if the mode is `off` or `blocks`."""
    if mode in ("off", "blocks"):
        return function
    if mode == "tuned":  # not a mode of torch.compile; searches all block sizes
        options: dict[str, Any] = {"coordinate_descent_tuning": True}
        return torch.compile(function, dynamic=False, options=options)
    return torch.compile(function, dynamic=False, mode=mode)
