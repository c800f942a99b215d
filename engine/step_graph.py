"""The training step as one CUDA graph: one launch per step instead of hundreds.

Where the host's cores are slow or busy decoding, the launches take longer than the kernels, and the
GPU is idle between them. A graph runs the same kernels with the same arguments, so the results are
bitwise equal. For the rules, see https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
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

# The steps before the capture compile, choose kernels and create the optimiser's state.
STEPS_BEFORE_CAPTURE = 3
# DDP times its first ten steps with CUDA events, which cannot be captured.
STEPS_BEFORE_CAPTURE_DDP = 12
# After a start on CUDA, each of these first steps may compile, choose kernels or be captured. The
# first step on any device may wait for workers.
FIRST_STEPS = STEPS_BEFORE_CAPTURE_DDP + 1
# A graph keeps the memory of a whole step. A validation needs another quarter of that memory.
VALIDATION_SHARE = 0.25


class StepGraph(AbstractContextManager["StepGraph"], ABC):
    """Runs a training step, `launch`: as a CUDA graph on a GPU, as a plain function elsewhere.

    The first steps, and all steps after a capture that failed, launch their kernels one by one. All
    batches have the same shape.
    """

    def __init__(self, network: nn.Module, state: TrainState) -> None:
        """`network`: what is trained; more steps precede a capture if it is DDP."""
        self.network = network
        self.state = state
        has_ddp = isinstance(self.network, DistributedDataParallel)
        on_gpu = next(self.network.parameters()).is_cuda
        # Why there is no graph
        self.disabled_reason = "" if on_gpu else "CUDA graphs need a GPU of NVIDIA or AMD"
        self.steps_before_capture = STEPS_BEFORE_CAPTURE_DDP if has_ddp else STEPS_BEFORE_CAPTURE
        self._needed = 0  # bytes of a step, beyond what is allocated between steps
        self._steps = 0  # so far, on a GPU; `reset` lowers it, which delays the next capture
        # A graph, with the batch that it reads and the values that it writes at each replay.
        self._captured: tuple[torch.cuda.CUDAGraph, Batch, Values] | None = None

    def __exit__(self, *_: object) -> None:
        """Destroy the graph, even if a traceback still refers to it.

        NCCL waits for a graph with collectives: the process group would not end (pytorch#115388).
        """
        if self._captured is not None:
            self._captured[0].reset()
            self._captured = None

    @abstractmethod
    def launch(self, batch: Batch) -> Values:
        """Train, without waiting for the GPU. All tensors but the batch keep their addresses."""

    def __call__(self, batch: Batch) -> Values:
        """Train on a batch. The next step overwrites the values that are returned."""
        if self.disabled_reason:
            return self.launch(batch)
        self._steps += 1
        if self._captured is None and self._steps > self.steps_before_capture:
            self._capture(batch)
        if self._captured is None:
            values = self.launch(batch)
            peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            self._needed = max(self._needed, peak)
            return values
        graph, static, values = self._captured
        static.copy_(batch)
        graph.replay()
        return values

    def reset(self) -> None:
        """Drop the graph after tensors of the step have moved; later steps capture another one."""
        self._captured = None
        # One more step is enough: it creates the optimiser's state.
        self._steps = min(self._steps, self.steps_before_capture - 1)

    def _capture(self, batch: Batch) -> None:
        """Capture the step, or set `disabled_reason`. The caller replays it."""
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free <= (1 + VALIDATION_SHARE) * self._needed:
            self._disable("the GPU's memory is nearly full, and a graph keeps the memory of a step")
            return
        static = batch.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()  # not the default stream, see join_world
        generator = torch.cuda.default_generators[stream.device_index]
        before = generator.clone_state()
        drawn = host_random_states()
        try:
            # Other threads may call CUDA meanwhile: they upload batches and write checkpoints.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                values = self.launch(static)
            if host_random_states() != drawn:
                raise RuntimeError("it draws random numbers on the host, which a graph repeats")
        except RuntimeError as error:
            generator.graphsafe_set_state(before)  # a failed capture leaves capture mode on
            self.state.clear_gradients()  # they would be added to those of the next step
            self._disable(str(error).splitlines()[0])
        else:
            self._captured = graph, static, values

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        text = "the step is not captured in a CUDA graph (%s): the GPU may wait for a slow host"
        logger.warning(text, reason)


def host_random_states() -> str:
    """Return the states of the global generators of Python, NumPy and torch, as text."""
    return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))
