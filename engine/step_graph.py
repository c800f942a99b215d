"""The training step as one CUDA graph, with one launch per step instead of hundreds.

On hosts with slow cores or cores busy decoding, launches take longer than the kernels, and the GPU
is idle between them. A graph runs the same kernels with the same arguments, so results are bitwise
identical. For the rules, see https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import logging
import random
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine.metrics import Values
from engine.state import TrainState
from pipeline.feed.batch import Batch

logger = logging.getLogger(__name__)

# Steps before the capture compile, select kernels and create the optimizer state.
STEPS_BEFORE_CAPTURE = 3
# DDP times its first ten steps with CUDA events, which cannot be captured.
STEPS_BEFORE_CAPTURE_DDP = 12
# On CUDA, each of these steps after a start may compile, select kernels or be captured. On any
# device, the first step may wait for workers.
FIRST_STEPS = STEPS_BEFORE_CAPTURE_DDP + 1
# A graph keeps the memory for a whole step. Validation needs this fraction of it in addition.
VALIDATION_FRACTION = 0.25


class StepGraph(AbstractContextManager["StepGraph"], ABC):
    """Runs the training step `launch` as a CUDA graph on a GPU and as a function elsewhere.

    The first steps, and all steps after a failed capture, launch their kernels one by one. All
    batches must have the same shape.
    """

    def __init__(self, network: nn.Module, state: TrainState) -> None:
        """`network`: the module to train. DDP needs more steps before the capture."""
        self.network = network
        self.state = state
        has_ddp = isinstance(self.network, DistributedDataParallel)
        on_gpu = next(self.network.parameters()).is_cuda
        # Reason why there is no graph
        self.disabled_reason = "" if on_gpu else "CUDA graphs need an NVIDIA or AMD GPU"
        self.steps_before_capture = STEPS_BEFORE_CAPTURE_DDP if has_ddp else STEPS_BEFORE_CAPTURE
        self._needed = 0  # bytes that a step needs in addition to the allocations between steps
        self._steps = 0  # steps so far on a GPU; `reset` lowers it to delay the next capture
        # Graph, batch that each replay reads, and values that it writes.
        self._captured: tuple[torch.cuda.CUDAGraph, Batch, Values] | None = None

    def __exit__(self, *_: object) -> None:
        self.reset()

    @abstractmethod
    def launch(self, batch: Batch) -> Values:
        """Train without synchronizing the GPU. Tensors except the batch keep their addresses."""

    def __call__(self, batch: Batch) -> Values:
        """Train on a batch. The next step overwrites the returned values."""
        if self.disabled_reason:
            return self.launch(batch)
        self._steps += 1
        if self._captured is None and self._steps > self.steps_before_capture:
            self._capture(batch)
        if self._captured is None:
            torch.cuda.reset_peak_memory_stats()
            values = self.launch(batch)
            peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            self._needed = max(self._needed, peak)
            return values
        graph, static, values = self._captured
        static.copy_(batch)
        graph.replay()
        return values

    def reset(self) -> None:
        """Destroy the graph, even if a traceback refers to it; later steps capture a new one.

        Required if the step's tensors have moved, and before the process group is destroyed: NCCL
        waits for graphs with collectives, so the group would hang (pytorch#115388).
        """
        if self._captured is not None:
            self._captured[0].reset()
        self._captured = None
        # One more step is enough, because it creates the optimizer state.
        self._steps = min(self._steps, self.steps_before_capture - 1)

    def _capture(self, batch: Batch) -> None:
        """Capture the step or set `disabled_reason`. The caller replays the graph."""
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free <= (1 + VALIDATION_FRACTION) * self._needed:
            self._disable("GPU memory is nearly full, and a graph keeps the memory for a step")
            return
        static = batch.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()  # not the default stream, see join_world
        generator = torch.cuda.default_generators[stream.device_index]
        before = generator.clone_state()
        drawn = host_random_states()
        try:
            # Other threads may call CUDA meanwhile to upload batches and write checkpoints.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                values = self.launch(static)
            if host_random_states() != drawn:
                raise RuntimeError("it draws random numbers on the host, which a graph repeats")
        except RuntimeError as error:
            generator.graphsafe_set_state(before)  # a failed capture leaves capture mode on
            self.state.clear_gradients()  # the next step would add to them
            self._disable(str(error).splitlines()[0])
        else:
            self._captured = graph, static, values

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        text = "the step is not captured in a CUDA graph (%s), so the GPU may wait for a slow host"
        logger.warning(text, reason)


def host_random_states() -> str:
    """Return the states of Python's, NumPy's and torch's global generators as text."""
    return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))
