"""The message for a full GPU: micro-batches that should fit, and a snapshot of the allocator."""

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
from engine.state import TrainingError, TrainState, tensors

GIB = 2**30
USABLE = 0.9  # share of the memory: blocks leave gaps, and libraries need some memory as well


@contextmanager
def explain_out_of_memory(
    state: TrainState,
    world: World,
    *,
    folder: Path,
    batch_size: int,
    accumulate: int,
    image_bytes: int,
) -> Iterator[None]:
    """Replace CUDA's out-of-memory error by one line that names micro-batches that should fit.

    Args:
        folder: for the snapshot of the allocator.
        batch_size: the global batch.
        accumulate: micro-batches per optimiser step.
        image_bytes: memory of one image in the model, see `activation_bytes`.

    Raises:
        TrainingError: out of GPU memory.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise TrainingError(
            explain_oom(
                error,
                world,
                folder=folder,
                batch_size=batch_size,
                accumulate=accumulate,
                static_bytes=fixed_bytes(state),
                image_bytes=image_bytes,
            )
        ) from error


def fixed_bytes(state: TrainState) -> int:
    """Return the bytes that training takes on the device for any batch size.

    These are the state and the gradients.
    """
    return state_bytes(state) + _trained_bytes(state)


def state_bytes(state: TrainState) -> int:
    """Return the bytes of weights, buffers, the optimiser's moments and the moving average.

    The optimiser allocates its moments in the first step; they count before, too.
    """
    options = state.optimizer.defaults
    moments = 2 if "betas" in options else int(bool(options.get("momentum")))
    held = sum(tensor.nbytes for tensor in state.tensors())
    return held + moments * _trained_bytes(state)


def _trained_bytes(state: TrainState) -> int:
    groups = state.optimizer.param_groups
    return sum(tensor.nbytes for group in groups for tensor in group["params"])


def activation_bytes(model: nn.Module, image_size: int, dtype: torch.dtype) -> int:
    """Estimate the peak memory of one image in a training step, in bytes; 0 if that fails.

    The estimate is the memory that the forward pass saves for the backward pass, plus two gradients
    of the size of the largest saved tensor. torch.compile saves less: it recomputes cheap tensors.

    Args:
        model: on the meta device: nothing is computed.
        image_size: pixels.
        dtype: of the activations.
    """
    own = {tensor.untyped_storage()._cdata for tensor in tensors(model)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # several layers may save the same storage
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    mode = model.training
    # Two images: BatchNorm has no statistics of one.
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _ = model.train()(images)
    except Exception:
        return 0
    finally:
        model.train(mode)
    largest = max(saved.values(), default=0)
    return (sum(saved.values()) + 2 * largest) // 2 * dtype.itemsize // 4


def explain_oom(
    error: BaseException,
    world: World,
    *,
    folder: Path | None,
    batch_size: int,
    accumulate: int = 1,
    static_bytes: int = 0,
    image_bytes: int = 0,
) -> str:
    """Explain a torch.cuda.OutOfMemoryError in one line, with micro-batches that should fit.

    Call it in the `except` block: it allocates no GPU memory, does not synchronise, and never
    raises.

    Args:
        folder: for `oom-rank<rank>.pickle`, a snapshot for https://pytorch.org/memory_viz; None
            writes no file.
        batch_size: the global batch that did not fit.
        accumulate: micro-batches per optimiser step.
        static_bytes: memory in use for any batch size, see `fixed_bytes`.
        image_bytes: memory of one image, see `activation_bytes`; 0 if not known.
    """
    try:
        message = _diagnosis(error, world, batch_size, accumulate, static_bytes, image_bytes)
    except Exception:
        message = (
            f"loader.batch_size={batch_size}: out of memory on {world.device} "
            f"({_first_line(error)}); try a higher train.accumulate or a smaller batch"
        )
    if folder is None:
        return message
    try:
        path = _write_snapshot(folder, world.rank)
    except Exception as problem:
        return f"{message}; no memory snapshot could be written ({_first_line(problem)})"
    return f"{message}; memory snapshot: {path} (open it at https://pytorch.org/memory_viz)"


@dataclass(frozen=True)
class Fit:
    """An estimate from the step that failed.

    Attributes:
        image: memory of one image, bytes.
        batch: the most images that should fit a rank's GPU at a time; 0 if not even 8 do.
        known: False if an image takes more than `image`; `batch` is then a guess.
    """

    image: float
    batch: int
    known: bool


def estimate(
    *,
    peak: int,
    wanted: int,
    available: int,
    static: int,
    expected: int,
    images: int,
    forward_done: bool,
) -> Fit:
    """Estimate the batch that fits from the memory of a step that failed.

    `USABLE` of the available memory, minus the static memory, is divided among images. An image
    takes (peak + wanted - static) / images if the forward pass was complete. Otherwise, memory was
    still growing, and an image takes the expected memory of the model; if that is less than the
    memory already in use, it is not known, and half of the batch is a guess.

    Args:
        peak: peak of the allocated memory, including static memory, bytes.
        wanted: size of the failed allocation, bytes.
        available: memory that the allocator can use, bytes.
        static: memory that does not grow with the batch, bytes.
        expected: memory of one image, bytes; 0 if not known.
        images: images of the batch or micro-batch per rank that failed.
        forward_done: whether the forward pass was complete.
    """
    static = min(static, peak)
    taken = (peak + wanted - static) / images
    image = taken if forward_done else max(taken, expected)
    known = forward_done or expected >= taken
    fits = int(max(0.0, USABLE * available - static) / max(1.0, image))
    fewer = min(fits, images - 1 if known else images // 2)
    return Fit(image, fewer // 8 * 8, known)


def _diagnosis(
    error: BaseException,
    world: World,
    batch_size: int,
    accumulate: int,
    static_bytes: int,
    image_bytes: int,
) -> str:
    device = world.device
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats["reserved_bytes.all.current"]
    wanted = _requested_bytes(str(error))
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    fit = estimate(
        peak=stats["allocated_bytes.all.peak"],
        wanted=wanted,
        available=min(free + reserved, allowed),
        static=static_bytes,
        expected=image_bytes,
        images=batch_size // world.size // accumulate,
        forward_done=_forward_done(error),
    )
    others = total - free - reserved
    elsewhere = (
        f", {others / GIB:.1f} GiB in use outside this process's allocator"
        if others > 0.1 * total
        else ""
    )
    return (
        f"loader.batch_size={batch_size}: out of memory on {device} ({wanted / GIB:.2f} GiB "
        f"requested, {free / GIB:.2f} of {total / GIB:.1f} GiB free{elsewhere}); an image takes "
        f"{'about' if fit.known else 'over'} {fit.image / 2**20:.0f} MiB, the model "
        f"{static_bytes / GIB:.2f} GiB: {_remedy(fit, world.size, batch_size, accumulate)}"
    )


def _remedy(fit: Fit, ranks: int, batch_size: int, accumulate: int) -> str:
    """Advise more micro-batches, which keep the batch and its learning rate, or a smaller batch."""
    if not fit.batch:
        return (
            f"even a batch of {8 * ranks} may not fit: use a smaller model.name or data.image_size"
        )
    share = batch_size // ranks
    part = max(n for n in range(1, fit.batch + 1) if share % n == 0)
    fits = f"loader.batch_size={fit.batch * accumulate * ranks}"
    if part >= 8:  # fewer images are too few for batch normalisation
        fits = f"train.accumulate={share // part} (keeps the batch and its learning rate) or {fits}"
    return f"{fits} should fit" if fit.known else f"try {fits}"


def _requested_bytes(message: str) -> int:
    """Return the size of the failed allocation; torch reports it in its message only."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", message)
    if found is None:
        return 0
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    return int(float(found[1]) * units[found[2]])


def _forward_done(error: BaseException) -> bool:
    """Whether the backward pass or the optimiser's step was running.

    All activations of the batch had been allocated by then.
    """
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        code.co_name == "_engine_run_backward" or "/torch/optim/" in code.co_filename
        for code in frames
    )


def _write_snapshot(folder: Path, rank: int) -> Path:
    """Write the allocator's segments and blocks, with their sizes and whether they are in use.

    Without a history, there are no stack traces and no timeline. To record them, call
    `torch.cuda.memory._record_memory_history()` before the loop; it is off because it walks the
    stack at every allocation.
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
