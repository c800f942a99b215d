"""What to say and keep when the GPU's memory is full: the batch that would fit, and a map of the allocator's blocks."""

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.state import TrainingError, TrainState

GIB = 2**30
USABLE = 0.9  # of what the allocator can have: blocks do not pack without gaps, and libraries want some memory, too


@contextmanager
def explain_out_of_memory(
    state: TrainState, world: World, *, folder: Path, batch_size: int, image_bytes: int
) -> Iterator[None]:
    """Replace the GPU's out-of-memory error by one line that names the batch that should fit.

    Args:
        folder: gets a snapshot of the allocator.
        batch_size: the global batch.
        image_bytes: memory that one image takes in the model, see `activation_bytes`.

    Raises:
        TrainingError: the memory of the GPU is full.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        message = explain_oom(
            error,
            device=world.device,
            folder=folder,
            batch_size=batch_size,
            world_size=world.size,
            static_bytes=fixed_bytes(state),
            image_bytes=image_bytes,
            rank=world.rank,
        )
        raise TrainingError(message) from error


def fixed_bytes(state: TrainState) -> int:
    """What training holds on the device for any batch: weights, buffers, gradients, the optimiser's moments, the average."""
    options = state.optimizer.defaults
    moments = 2 if "betas" in options else int(bool(options.get("momentum")))  # there from the first step on
    modules = [state.model] if state.ema is None else [state.model, state.ema]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    trained = [tensor for group in state.optimizer.param_groups for tensor in group["params"]]
    return sum(tensor.nbytes for tensor in held) + (1 + moments) * sum(tensor.nbytes for tensor in trained)


def activation_bytes(model: nn.Module, image_size: int, dtype: torch.dtype) -> int:
    """What a step holds of one image where it holds most; 0 if that cannot be found out.

    It is what the forward pass keeps for the backward pass, and two gradients of the size of the largest of it. torch.compile
    keeps less: it computes again what is cheap.

    Args:
        model: on the meta device: nothing is computed.
        dtype: of the activations.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # several layers may keep the same one
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    mode = model.training
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _ = model.train()(torch.empty(2, 3, image_size, image_size, device="meta"))  # of one, BatchNorm has no statistics
    except Exception:
        return 0
    finally:
        model.train(mode)
    return (sum(kept.values()) + 2 * max(kept.values(), default=0)) // 2 * dtype.itemsize // 4


def explain_oom(
    error: BaseException,
    *,
    device: torch.device,
    folder: Path | None,
    batch_size: int,
    world_size: int,
    static_bytes: int = 0,
    image_bytes: int = 0,
    rank: int = 0,
) -> str:
    """One line on a torch.cuda.OutOfMemoryError: what is full, the batch that should fit, where the map of the memory lies.

    Call it in the `except` block: it takes no memory of the GPU, does not wait for it, and never raises.

    Args:
        folder: gets `oom-rank<rank>.pickle`, for https://pytorch.org/memory_viz; None for no file.
        batch_size: the global batch that did not fit.
        static_bytes: what is held on the device whatever the batch, see `fixed_bytes`.
        image_bytes: what a step keeps of an image, see `activation_bytes`; 0 if not known.
    """
    try:
        said = _diagnosis(error, device, batch_size, world_size, static_bytes, image_bytes)
    except Exception:
        said = (f"loader.batch_size={batch_size}: the memory of {device} is full ({_first_line(error)}); "
                "a smaller batch takes less")  # fmt: skip
    try:
        if folder is not None:
            said += f"; the allocator's blocks are in {_write_map(folder, rank)} (open it at https://pytorch.org/memory_viz)"
    except Exception as problem:
        said += f"; no map of the memory could be written ({_first_line(problem)})"
    return said


@dataclass(frozen=True)
class Fit:
    """An estimate from the step that failed.

    Attributes:
        image: bytes that one image takes.
        batch: the largest global batch that should fit; 0 for none of 8 images a rank.
        known: False if an image takes more than `image`, and `batch` is a guess.
    """

    image: float
    batch: int
    known: bool


def estimate(
    *, peak: int, wanted: int, available: int, static: int, expected: int, batch_size: int, world_size: int, forward_done: bool
) -> Fit:
    """The batch that fits, from what a step had taken when it failed.

    `USABLE` of what is available, less what is static, is shared out among images. An image takes (peak + wanted - static) /
    images if the forward pass had ended. If not, memory was still growing, and it takes what is expected of the model; where
    that is less than it had already taken, nobody knows, and half of the batch is the guess.

    Args:
        peak: most that was allocated, static included, in bytes.
        wanted: what was asked for and not there.
        available: what the allocator could have in all.
        static: what does not grow with the batch.
        expected: for one image; 0 if not known.
    """
    images = batch_size // world_size
    static = min(static, peak)
    taken = (peak + wanted - static) / images
    image = taken if forward_done else max(taken, expected)
    known = forward_done or expected >= taken
    fits = int(max(0.0, USABLE * available - static) / max(1.0, image))
    fewer = min(fits, images - 1 if known else images // 2)
    return Fit(image, fewer // 8 * 8 * world_size, known)


def _diagnosis(
    error: BaseException, device: torch.device, batch_size: int, world_size: int, static_bytes: int, image_bytes: int
) -> str:
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved, wanted = stats["reserved_bytes.all.current"], _wanted(str(error))
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    fit = estimate(peak=stats["allocated_bytes.all.peak"], wanted=wanted, available=min(free + reserved, allowed),
                   static=static_bytes, expected=image_bytes, batch_size=batch_size, world_size=world_size,
                   forward_done=_forward_done(error))  # fmt: skip
    if fit.batch:
        remedy = f"loader.batch_size={fit.batch} should fit" if fit.known else f"try loader.batch_size={fit.batch}"
    else:
        remedy = f"a batch of {8 * world_size} would hardly fit: take a smaller model.name or data.image_size"
    others = total - free - reserved
    elsewhere = f", {others / GIB:.1f} GiB outside of this process's allocator" if others > 0.1 * total else ""
    return (f"loader.batch_size={batch_size}: the memory of {device} is full ({wanted / GIB:.2f} GiB wanted, "
            f"{free / GIB:.2f} of {total / GIB:.1f} GiB free{elsewhere}); an image takes {'about' if fit.known else 'over'} "
            f"{fit.image / 2**20:.0f} MiB beside {static_bytes / GIB:.2f} GiB for the model: {remedy}")  # fmt: skip


def _wanted(message: str) -> int:
    """The request that failed; torch says it in its message alone."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", message)
    if found is None:
        return 0
    return int(float(found[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[found[2]])


def _forward_done(error: BaseException) -> bool:
    """Whether the backward pass or the optimiser's step was running: then the batch's activations had all been there."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name == "_engine_run_backward" or "/torch/optim/" in code.co_filename for code in frames)


def _write_map(folder: Path, rank: int) -> Path:
    """Every segment and block, with its size and whether it is in use: which pieces are free, and too small.

    Without a history there are no stack traces and no timeline. To have them, too, call
    `torch.cuda.memory._record_memory_history()` before the loop; it costs a stack walk for each allocation, and is off.
    """
    path = folder / f"oom-rank{rank}.pickle"
    partial = path.with_suffix(".partial")
    try:
        torch.cuda.memory._dump_snapshot(str(partial))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
