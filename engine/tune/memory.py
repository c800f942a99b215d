"""Micro-batches that fit into the memory: chosen before the first step, or named in a message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import models
from engine.compute import OUT_OF_MEMORY, RECOMPUTE_NEEDS, dtype_of
from engine.distributed import World
from engine.plan import SMALL_BATCH, Plan, micro_batches
from engine.state import TrainingError, TrainState, state_bytes, tensors, trained_bytes
from pipeline.batch import Batch
from pipeline.machine import free_memory

GIB = 2**30
# Share of the memory: blocks leave gaps, and cuDNN needs workspaces. With 0.9, ResNet-18 at 224 px
# did not fit into 8 GiB. A CPU's memory is also for the workers.
USABLE = 0.8


Build = Callable[[Plan, World], TrainState]
Loss = Callable[..., tuple[Tensor, Any]]


def fit_memory(
    plan: Plan, world: World, build_state: Build, loss: Loss, *, resumed: bool = False
) -> Plan:
    """Return the plan with micro-batches that fit into the memory of every rank. Collective.

    A plan whose estimated memory is free stays as it is. So does one on a GPU that has room for its
    forward and backward pass, which are tried. Otherwise, a rank trains on its images in more
    parts. If these would become too small on a GPU, model.compile=auto is `recompute`. A resumed
    run keeps its parts, because BatchNorm works over one of them.
    """
    kind = world.device.type
    images, image = plan.batch_size // world.size, activation_bytes(plan)
    if not image or kind not in ("cuda", "cpu", "mps"):  # it is not known what is needed, or free
        return plan
    part = images // plan.micro_batches
    room = int(USABLE * usable_bytes(world)) - plan.state_bytes - 4 * plan.parameters  # gradients
    fits = part * image <= room or (kind == "cuda" and _runs(plan, world, build_state, loss))
    if all(world.all_gather(fits)):
        return plan
    room = min(world.all_gather(room))
    least = part if resumed else min(part, SMALL_BATCH if plan.has_batch_norm else 1)
    if least * image > room and kind == "cuda" and plan.config.model.compile == "auto":
        plan = replace(plan, compile="recompute", compile_reason="the memory is small")
        image = activation_bytes(plan)
    parts = micro_batches(images, max(least, room // image))
    if not least <= images // parts < part:
        return plan
    note = f"the memory is too small for {part} images at a time, {images // parts} should fit"
    if plan.has_batch_norm:
        note += "; BatchNorm works over fewer images, so the result may differ from the recipe's"
    notes = (*plan.notes, note)
    return replace(plan, micro_batches=parts, fitted_batch=images // parts, notes=notes)


def _runs(plan: Plan, world: World, build_state: Build, loss: Loss) -> bool:
    """Whether the GPU of this rank has room for a forward and backward pass; not compiled."""
    if plan.compile == "recompute" or (plan.config.model.sync_bn and world.size > 1):
        return False  # it would need less, or other ranks

    def step() -> None:
        state = build_state(replace(plan, compile="off"), world)
        _moments = torch.empty(plan.state_bytes, dtype=torch.uint8, device=world.device)
        images = plan.batch_size // world.size // plan.micro_batches
        mean_loss, _ = plan.autocast()(loss)(
            state.model, Batch.zeros(plan.fields, world.device, images)
        )
        state.divergence.scaled(mean_loss).backward()

    try:
        step()
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def usable_bytes(world: World) -> int:
    """Return the bytes that this rank can allocate, with what it has allocated on a GPU."""
    if world.device.type != "cuda":
        return free_memory() // world.local_size
    free, total = torch.cuda.mem_get_info(world.device)
    own = torch.cuda.memory_reserved(world.device)
    return min(free + own, int(torch.cuda.get_per_process_memory_fraction(world.device) * total))


@contextmanager
def explain_out_of_memory(plan: Plan, state: TrainState, world: World) -> Iterator[None]:
    """Replace an out-of-memory error by a TrainingError with micro-batches that should fit."""
    try:
        yield
    except RuntimeError as error:  # its only class on a CPU (`ulimit -v`) and on mps
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        fixed = state_bytes(state) + trained_bytes(state)  # with the gradients, for any batch size
        image = activation_bytes(plan)
        fits = int((USABLE * usable_bytes(world) - fixed) / max(1, image))
        images = plan.batch_size // world.size
        most = max(1, min(fits, images // plan.micro_batches - 1))  # fewer than now
        remedy = "use a smaller loader.batch_size, model.name or data.image_size"
        if (part := images // micro_batches(images, most)) >= SMALL_BATCH:
            remedy = f"train.micro_batch={part} should fit, with the same batch and learning rate"
        raise TrainingError(
            f"loader.batch_size={plan.batch_size}: out of memory on {world.device}; an image takes "
            f"about {image / 2**20:.0f} MiB, the model {fixed / GIB:.2f} GiB: {remedy}"
        ) from error


def activation_bytes(plan: Plan) -> int:
    """Estimate the peak memory of one image in a training step, in bytes; 0 if that fails.

    The estimate is what the forward pass saves for the backward pass, plus two gradients of the
    size of the largest saved tensor. torch.compile saves about as much. The model is on the meta
    device: nothing is computed.
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
    try:
        with kept_bytes({tensor.untyped_storage()._cdata for tensor in tensors(model)}) as saved:
            _ = models.train_mode(model)(images)
    except RuntimeError:  # an operation that cannot be computed without data
        return 0
    per_image = (sum(saved.values()) + 2 * max(saved.values(), default=0)) // 2
    share = RECOMPUTE_NEEDS if plan.compile == "recompute" else 1
    return int(share * per_image * dtype_of(plan.precision).itemsize) // 4


@contextmanager
def kept_bytes(weights: set[int]) -> Iterator[dict[int, int]]:
    """Collect the storages that a forward pass keeps for the backward pass, and their bytes.

    Several layers may keep the same one. `weights`: storages that do not count.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
