"""How a device computes a model: operations per image, precision, kernels, torch.compile."""

import gc
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

# (network, batch) -> the network's outputs: `train.forward`
Forward = Callable[[nn.Module, Batch], Tensor]

# model.compile=auto compiles for more steps than this. On one H200, ResNet-50 compiles in a minute,
# at later starts in 11 s, and then saves 18 of the 53 ms of a step of 256 images.
MANY_STEPS = 2_000
# In longer runs, cuDNN searches for faster algorithms: for 1 to 40 s; a step takes 0 to 6 % less.
SEARCH_STEPS = 10_000
# With more operations per GPU than this, auto is `tuned`: ResNet-50 takes 3 hours for them on an
# H200. Its first start then takes 132 s more, and a step is 1.06 times as fast.
MANY_OPERATIONS = 2e18
# How long a thread of Python may delay a kernel launch. With the default of 5 ms and a thread that
# computed a checksum for TensorBoard, a step of ViT-S/16 on an H200 took 148 ms instead of 31 ms.
SWITCH_SECONDS = 1e-4


@dataclass(frozen=True)
class Compute:
    device: torch.device
    precision: str
    channels_last: bool
    compile_mode: str
    rewrite: str | None  # `model.rewrite` where it helps: for compiled bf16 on a GPU
    fields: Mapping[str, Field]  # of a training sample
    parameters: int
    flops: int  # operations of a forward pass for a training sample

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the images on the device: two bytes per value halve what a layer reads."""
        return dtype_of(self.precision)

    @property
    def image_format(self) -> dict[str, Any]:
        """Arguments of `open_feed` about the images on the device."""
        return {"dtype": self.dtype, "channels_last": self.channels_last}

    def autocast(self) -> torch.autocast:
        """Return the context of every forward pass."""
        return autocast(self.device.type, self.precision)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Autocast, without `compile_blocks`: each size of a batch would be compiled again."""
        with self.autocast(), torch.compiler.set_stance("force_eager"):
            yield


def build_model(config: Config, datasets: Datasets, *, pretrained: bool = False) -> nn.Module:
    """Build the model of the config for the datasets. Raises UserError as `models.build`."""
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
    """Choose what the config leaves open. Raises UserError if the model cannot take the samples."""
    fields, val_fields = datasets.train.fields, datasets.val.fields
    shape = fields[IMAGE].device_shape
    if shape[-1] != config.data.image_size:
        given = f"data.image_size={config.data.image_size}"
        wrong = f"the training images have {shape[-1]} px"
        raise UserError(given, wrong, "give their size, or change augment.train")
    with torch.device("meta"):  # where the model takes no memory
        model = build_model(config, datasets)
    models.freeze(model, config.model.freeze)  # refuses a wrong name before weights are read
    flops = count_flops(model, fields, forward)
    if val_fields != fields:  # fails here, not when it validates
        count_flops(model, val_fields, forward, key="data.val_size, augment.val")
    precision = choose_precision(config.train.precision, device)
    steps = schedule.stop_step
    operations = 3 * flops * steps * schedule.local_batch_size  # of this rank, in the whole run
    mode = resolve_compile(config, device, steps, operations)
    if mode == "default" and has_equal_blocks(model):
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
    """Count the operations of one sample's forward pass (a multiply-add counts as two).

    Raises UserError if the model does not take the images, or `forward` a field that they lack.

    Args:
        model: on the meta device; it is set to evaluation, and all of it is frozen.
        key: key to name if the model does not take such images.
    """
    model.eval().requires_grad_(False)  # the counter fails at views of parameters
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            forward(model, Batch.zeros(fields, torch.device("meta")))
    except UserError:  # samples lack a field
        raise
    except (RuntimeError, AssertionError, ValueError) as error:  # whatever a layer raises
        reason = describe(error).splitlines()[0]
        channels, *_, size = fields[IMAGE].device_shape[-3:]
        wrong = f"the model does not take images of {size} px with {channels} channels ({reason})"
        raise UserError(key, wrong, "set a different value, or fix the model") from None
    return int(counter.get_total_flops())


def device_name(device: torch.device) -> str:
    """Return the model of a CUDA GPU, such as `NVIDIA H200`, else the type of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def choose_precision(choice: str, device: torch.device) -> str:
    """Resolve train.precision=auto to what the tensor cores of a device compute in.

    bf16, or fp16 on a T4, V100, RTX 20xx; fp32 on a CPU, and on older GPUs, which have none.
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
    """Whether model.rewrite has faster layers for a device and a precision."""
    return device.type == "cuda" and precision == "bf16"


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of images and of autocast's matrix products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def longest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: float64, or float32 on GPUs without it (Apple, some of Intel)."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Return the context of a forward pass. Gradients in fp16 need a loss scale."""
    dtype = dtype_of(precision)
    return torch.autocast(device_type, dtype, enabled=dtype != torch.float32)


def resolve_compile(config: Config, device: torch.device, steps: int, operations: int) -> str:
    """Resolve model.compile=auto, from all steps and operations of a rank in the whole run.

    So a resumed run keeps its mode, unless train.max_steps changes; other modes round differently.
    """
    if config.model.compile != "auto":
        return config.model.compile
    if device.type != "cuda" or steps <= MANY_STEPS:
        return "off"
    if operations <= MANY_OPERATIONS or config.train.deterministic:
        return "default"
    return "tuned"


def is_search_worthwhile(config: Config, steps: int) -> bool:
    """Whether cuDNN searches for algorithms. A start may find others, which round differently."""
    return steps > SEARCH_STEPS and not config.train.deterministic


def set_up_kernels(deterministic: bool, precision: str) -> None:
    """Set torch's global options for precision, cuDNN, determinism and torch.compile.

    Other threads yield to kernel launches after SWITCH_SECONDS.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    set_float32_precision(precision)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with this
    torch.use_deterministic_algorithms(deterministic)
    # Without this, torch does not cache compiled graphs with a gradient that is written by hand.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def set_float32_precision(precision: str) -> None:
    """Allow TF32 for products of float32, unless `precision` is fp32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect garbage at checkpoints only: within a step, it would delay kernel launches."""
    gc.freeze()  # a collection examines later objects only; the others would take 1.8 s on an H200
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def has_equal_blocks(model: nn.Module) -> bool:
    """Whether all of `model.blocks` print alike, as in a vision transformer without drop path.

    Such modules differ in their weights only, and one compilation serves them all.
    """
    blocks = dict(model.named_children()).get("blocks", nn.Sequential())
    printed = set(map(repr, blocks.children()))
    return len(printed) == 1


def compile_blocks(model: nn.Module) -> None:
    """Compile `model.blocks`, each alone, for the training.

    On an H200, the first start of ViT-S/16 takes 27 s instead of 41 s, and a step 0.3 % more time.
    """
    for block in model.get_submodule("blocks").children():
        block.compile(dynamic=False, mode="default")


def compile_function(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return the function compiled, or unchanged if the mode is `off`, or `blocks` of the model."""
    if mode in ("off", "blocks"):
        return function
    if mode == "tuned":  # searches all block sizes; not a mode of torch.compile
        options: dict[str, Any] = {"coordinate_descent_tuning": True}
        return torch.compile(function, dynamic=False, options=options)
    return torch.compile(function, dynamic=False, mode=mode)
