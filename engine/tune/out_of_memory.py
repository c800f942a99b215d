"""The message for a full GPU: the number of micro-batches that should fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import models
from engine.compute import dtype_of
from engine.distributed import World
from engine.plan import SMALL_BATCH, Plan, micro_batches
from engine.state import TrainingError, TrainState, state_bytes, tensors, trained_bytes

GIB = 2**30
# Share of the memory: blocks leave gaps, and cuDNN needs workspaces. With 0.9, ResNet-18 at 224 px
# did not fit into 8 GiB.
USABLE = 0.8


@contextmanager
def explain_out_of_memory(plan: Plan, state: TrainState, world: World) -> Iterator[None]:
    """Replace CUDA's out-of-memory error by a TrainingError with micro-batches that should fit."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        fixed = state_bytes(state) + trained_bytes(state)  # with the gradients, for any batch size
        free, total = torch.cuda.mem_get_info(world.device)
        own = torch.cuda.memory_reserved(world.device)
        allowed = torch.cuda.get_per_process_memory_fraction(world.device) * total
        image = activation_bytes(plan)
        fits = int((USABLE * min(free + own, allowed) - fixed) / max(1, image))
        images = plan.batch_size // world.size
        most = max(1, min(fits, images // plan.micro_batches - 1))  # fewer than now
        remedy = "use a smaller loader.batch_size, model.name or data.image_size"
        if (part := images // micro_batches(images, most)) >= SMALL_BATCH:
            remedy = (
                f"train.micro_batch={part} should fit, and keeps the batch and its learning rate"
            )
        raise TrainingError(
            f"loader.batch_size={plan.batch_size}: out of memory on {world.device}; an image takes "
            f"about {image / 2**20:.0f} MiB, the model {fixed / GIB:.2f} GiB: {remedy}"
        ) from error


def activation_bytes(plan: Plan) -> int:
    """Estimate the peak memory of one image in a training step, in bytes; 0 if that fails.

    The estimate is what the forward pass saves for the backward pass, plus two gradients of the
    size of the largest saved tensor. torch.compile saves less: it recomputes cheap tensors. The
    model is on the meta device: nothing is computed.
    """
    config = plan.config.model
    with torch.device("meta"):
        images = torch.empty(2, *plan.image_shape)  # BatchNorm has no statistics of one
        model = models.build(
            config.name,
            num_classes=plan.num_classes,
            image_size=plan.image_size,
            in_channels=plan.image_shape[-3],
            args=config.args,
        )
    models.freeze(model, config.freeze)
    weights = {tensor.untyped_storage()._cdata for tensor in tensors(model)}
    saved: dict[int, int] = {}  # storage -> bytes: several layers may save the same one

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            _ = models.train_mode(model)(images)
    except RuntimeError:  # an operation that cannot be computed without data
        return 0
    per_image = (sum(saved.values()) + 2 * max(saved.values(), default=0)) // 2
    return per_image * dtype_of(plan.precision).itemsize // 4
