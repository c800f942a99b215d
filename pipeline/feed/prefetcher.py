"""Batches on the device, ahead of the step: copy, augment, normalise and mix on a side stream.

Journey of a batch, 5: uint8 [B, S, S, 3] in a pinned slot -> float [B, 3, S, S] on the device. The
fields that are not images are copied as they are.

Safe in both directions: the step's stream waits for the event after the copy before it reads a
batch, and the side stream waits for the event after the step before it overwrites the memory of
that batch. The memory is owned here and reused, so no allocator is involved.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.data.device_stage import DeviceDecodeError
from pipeline.data.field import TARGET
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat
from pipeline.feed.batch_augment import BatchTransforms, replace_numbers
from pipeline.feed.clock import BatchEvents, StepClock
from pipeline.feed.loader import Loader


class AtOnce(Executor):
    """Calls a function when it is submitted: on a CPU, nothing runs ahead."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@dataclass(eq=False)
class MixingSlot(DeviceSlot):
    """Memory on the device for one batch of the training, and its batch transforms.

    On a GPU, they become a CUDA graph after the first batch, if each gets its numbers from
    `BatchShare.numbers`. A call of torch gives up the interpreter's lock, which this thread has to
    win back from the training loop: cutmix takes fifty calls, a graph of its kernels takes one.
    """

    transforms: BatchTransforms
    image_names: Sequence[str]  # of the image fields
    unmixed: DeviceSlot  # float32 images before mixing; all slots take turns to use this memory

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of a batch that can be captured: one tensor of numbers per image field and transform.
        self.numbers_needed = len(self.image_names) * len(self.transforms.transforms)
        self._graph: Any = None
        self._last_fields: dict[str, Tensor] = {}  # of the newest batch mixed without a graph
        self._used: list[Tensor] = []  # the numbers of that batch
        self._addresses: list[int] = []  # of the fields that the graph reads
        self._numbers: list[Tensor] = []  # the numbers that it reads
        self._mixed: dict[str, Tensor] = {}  # what it writes

    def output(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.unmixed.images(name, shape)

    def mixed(self, fields: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        if self._addresses != [*map(Tensor.data_ptr, fields.values())]:
            self._last_fields = fields
            return fields | self._mix(fields, step)
        numbers = iter(self._numbers)
        for name in self.image_names:
            share = self.transforms.share(step, len(fields[name]))
            for transform in self.transforms.transforms:
                values = share.draw(transform, fields[name].shape[-1])
                replace_numbers(next(numbers), values)
        self._graph.replay()
        return fields | self._mixed

    def capture(self, pool: Any) -> None:
        """Capture the graph after a batch that was mixed without one.

        In the thread that captures the step: two captures at a time disturb each other. `pool`:
        memory for intermediate results, of graphs that run one after another.
        """
        if self._graph is not None or len(self._used) != self.numbers_needed:
            return
        fields = self._last_fields
        self._numbers = self._used
        graph = torch.cuda.CUDAGraph()
        # A replay writes the seed of its generator to the device, where the step may be reading it
        # for dropout: this graph, which draws nothing there, gets a generator of its own.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._mixed = self._mix(fields, 0, iter(self._numbers))
        finally:
            generator.graphsafe_set_state(state)
        self._graph = graph
        self._addresses = [*map(Tensor.data_ptr, fields.values())]

    def _mix(self, fields: dict[str, Tensor], step: int, drawn: Any = None) -> dict[str, Tensor]:
        """Return the mixed images and TARGET in this memory; `drawn`: see `BatchShare`."""
        mixed: dict[str, Tensor] = {}
        self._used = []
        targets = self.transforms.targets(fields)
        for name in self.image_names:
            share = self.transforms.share(step, len(fields[name]))
            share = replace(share, drawn=drawn, used=self._used)
            if drawn is not None:  # a graph would repeat what else is drawn
                share = replace(share, rng=None)
            # A clone: a transform may change the targets in place.
            images, mixed_targets = self.transforms.apply(fields[name], targets.clone(), share)
            mixed[name] = self.images(name, images.shape).copy_(images)
        if self.transforms.label is not None:
            mixed[TARGET] = self.copy(TARGET, mixed_targets)
        return mixed


@dataclass(eq=False)
class Prefetcher:
    """Moves a loader's batches to a device: a GPU gets up to `depth` ahead, a CPU one at a time."""

    loader: Loader
    format: ImageFormat
    batch_transforms: BatchTransforms | None = None  # for training; None for validation

    def __post_init__(self) -> None:
        device = self.format.device
        self.cuda = device.type == "cuda"
        self.depth = 1  # batches kept ready; one more is the consumer's
        self.side: torch.cuda.Stream | None = None
        self._thread: Executor = AtOnce()
        if self.cuda:
            self.depth = self.loader.in_use - 1
            # The step waits for this stream. On 8 to 32 SMs only, it slows training by 1 to 18 %.
            self.side = torch.cuda.Stream(device, priority=-1)
            # `DeviceStage.on_device` may block the host for as long as a step takes.
            self._thread = ThreadPoolExecutor(1, "upload", torch.cuda.set_stream, (self.side,))
            self._pool = torch.cuda.graph_pool_handle()
        new_slot: Callable[[], DeviceSlot] = partial(DeviceSlot, self.format)
        if self.batch_transforms is not None:
            names = [name for name, field in self.loader.dataset.fields.items() if field.image]
            unmixed = DeviceSlot(replace(self.format, dtype=torch.float32))
            new_slot = partial(MixingSlot, self.format, self.batch_transforms, names, unmixed)
        self.slots = [new_slot() for _ in range(self.depth + 1)]
        self.clock = StepClock(self.cuda)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1."""
        # An iteration may have ended early: its uploads and kernels that read its slots come first.
        self._thread.submit(self.clock.now().wait).result()
        loaded = self.loader.batches(start, stop)
        begun: deque[Future[Batch]] = deque()  # done when their kernels are launched
        self.clock.start()
        for _ in range(start, stop):
            self._fill(begun, loaded)
            while not begun[0].done():
                self.loader.pool.receive()  # meanwhile, workers get tasks
                self._fill(begun, loaded)
            batch = begun.popleft().result()
            slot = self._slot(batch)
            slot.events.copy_end.wait()
            if self.cuda:
                slot.capture(self._pool)
            self.clock.begin_step(slot.events)
            yield batch
            self.clock.end_step()

    def _fill(self, begun: deque[Future[Batch]], loaded: Iterator[Batch]) -> None:
        """Begin uploads without waiting; wait for a batch only if the device would become idle."""
        while not begun or (len(begun) < self.depth and self.loader.ready()):
            host = next(loaded)
            begun.append(self._thread.submit(self._enqueue, host, self._slot(host)))

    def _slot(self, batch: Batch) -> DeviceSlot:
        return self.slots[batch.step % len(self.slots)]

    def close(self) -> None:
        """Wait for the thread and the stream. After this the loader's memory may be freed."""
        self._thread.shutdown(cancel_futures=True)
        if self.side is not None:
            self.side.synchronize()

    def _enqueue(self, host: Batch, slot: DeviceSlot) -> Batch:
        """Launch upload and transforms of one batch into a slot, once its reader is done."""
        slot.events.end.wait()
        slot.events = BatchEvents()
        slot.events.copy_begin = self.clock.now()
        try:
            fields = self._on_device(host, slot)
        except DeviceDecodeError:
            self.loader.load_in_process(host)  # on the CPU
            fields = self._on_device(host, slot)
        samples = slot.copy("", host.samples)  # no field has this name
        self.loader.keep_until(self.clock.now(), host)
        fields = slot.mixed(fields, host.step)
        slot.events.copy_end = self.clock.now()
        return Batch(fields, samples, host.step)

    def _on_device(self, host: Batch, slot: DeviceSlot) -> dict[str, Tensor]:
        """Return the fields of the training step from those of a batch on the host."""
        dataset = self.loader.dataset
        tensors = dataset.stage.on_device(host.fields, slot)
        for name, field in dataset.fields.items():
            if name not in tensors:
                move = slot.normalise if field.image else slot.copy
                tensors[name] = move(name, host.fields[name])
        return tensors
