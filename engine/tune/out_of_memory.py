"""The message for a full GPU: the number of micro-batches that should fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import models
from engine.distributed import World
from engine.plan import Plan
from engine.state import TrainingError, TrainState, state_bytes, tensors, trained_bytes

GIB = 2**30
# Share of the memory: blocks leave gaps, and cuDNN needs workspaces. With 0.9, ResNet-18 at 224 px
# did not fit into 8 GiB.
USABLE = 0.8
FEWEST_IMAGES = 8  # of a micro-batch: fewer are too few for batch normalisation


@contextmanager
def explain_out_of_memory(plan: Plan, state: TrainState, world: World) -> Iterator[None]:
    """Replace CUDA's out-of-memory error by one line that names micro-batches that should fit.

    Raises:
        TrainingError: out of GPU memory.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise TrainingError(explanation(plan, state, world)) from error


def explanation(plan: Plan, state: TrainState, world: World) -> str:
    """Say in one line how much memory an image takes, and which train.accumulate should fit.

    An image takes what the failed step had allocated for it, or what the model saves for the
    backward pass if that is more: a forward pass may have failed at its first layers.
    """
    device, accumulate = world.device, plan.config.train.accumulate
    statistics = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    available = min(free + statistics["reserved_bytes.all.current"], allowed)
    fixed = state_bytes(state) + trained_bytes(state)  # with the gradients, for any batch size
    share = plan.batch_size // world.size
    taken = (statistics["allocated_bytes.all.peak"] - fixed) * accumulate / share
    image = max(taken, activation_bytes(plan), 1.0)
    fits = (USABLE * available - fixed) / image
    parts = range(accumulate + 1, share // FEWEST_IMAGES + 1)
    enough = next((n for n in parts if share % n == 0 and share // n <= fits), None)
    remedy = (
        "use a smaller loader.batch_size, model.name or data.image_size"
        if enough is None
        else f"train.accumulate={enough} should fit, and keeps the batch and its learning rate"
    )
    return (
        f"loader.batch_size={plan.batch_size}: out of memory on {device} ({free / GIB:.2f} of "
        f"{total / GIB:.1f} GiB free); an image takes about {image / 2**20:.0f} MiB, the model "
        f"{fixed / GIB:.2f} GiB: {remedy}"
    )


def activation_bytes(plan: Plan) -> int:
    """Estimate the peak memory of one image in a training step, in bytes; 0 if that fails.

    The estimate is the memory that the forward pass saves for the backward pass, plus two gradients
    of the size of the largest saved tensor. torch.compile saves less: it recomputes cheap tensors.
    """
    with torch.device("meta"):
        model = models.build(
            plan.config.model.name,
            num_classes=plan.num_classes,
            image_size=plan.image_size,
            args=plan.config.model.args,
        )
    models.freeze(model, plan.config.model.freeze)
    item_bytes = 2 if plan.precision == "bf16" else 4
    return saved_elements(model, plan.image_size) * item_bytes


def saved_elements(model: nn.Module, image_size: int) -> int:
    """Count the numbers that training keeps for one image; 0 if the model takes no such images.

    Args:
        model: float32 and on the meta device: nothing is computed.
        image_size: pixels.
    """
    own = {tensor.untyped_storage()._cdata for tensor in tensors(model)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # several layers may save the same storage
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    # Two images: BatchNorm has no statistics of one.
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _ = models.train_mode(model)(images)
    except RuntimeError:
        return 0
    largest = max(saved.values(), default=0)
    return (sum(saved.values()) + 2 * largest) // (2 * 4)
