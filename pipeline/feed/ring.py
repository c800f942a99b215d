"""Ring of batch buffers in shared memory, written by workers and read by the training process.

Data flow, step 4: a batch is one slot of the ring. Workers write samples directly into its rows, so
there is no tensor per sample, no collate copy and no pin-memory thread. A batch is split into tasks
of a few rows, so that all workers work on the batch that is needed next. A slot is reused only
after the copy from it has completed.

class        process    thread   writes
Loader       training   main     EMPTY_ROW into all rows of a slot, before it submits its tasks
Pool         training   main     tasks into pipes; replies into Task.done and Ring.replies
worker_main  worker     main     a task's samples into the rows of its slot, then its reply
Prefetcher   training   upload   copies of a slot on the device, and their event into Loader._copied
Pool         training   upload   after a DeviceDecodeError, the slot again, like a reply

There are no locks. A slot belongs to its tasks until they are done, then to the upload until the
event of the copy. Without workers, the main thread runs the tasks. Without a GPU, it uploads.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.dataset import Dataset
from pipeline.data.field import LABEL
from pipeline.data.shared import SharedArray
from pipeline.feed.step_times import column

EMPTY_ROW = -1  # epoch and index of a row without a sample, which validation does not count
CHECK = "run `python scripts/doctor.py --all` with the same overrides to check every file"
SKIP = "data.on_error=skip skips such training images, up to data.max_bad_fraction"
REMEDY = f"replace or remove it; {CHECK}; {SKIP}"  # advice about an unreadable sample
MAX_REPLACEMENTS = 100  # samples to try in place of an unreadable one

SlotArrays = dict[str, np.ndarray]  # field name -> [B, *shape] of one batch
Skipped = tuple[int, str]  # index and message of an unreadable sample


@dataclass(eq=False)
class Task:
    """Rows of one slot to fill. They depend only on the samples, so any worker may fill them."""

    ring: int  # position of the ring in the pool
    slot: int
    row: int  # first row
    samples: np.ndarray  # int64 [n, 2] of (epoch, index), one per row
    done: bool = False


class Reply(NamedTuple):
    """The result of a task. A worker replies to its tasks in order."""

    rows: int
    skipped: list[Skipped]
    traces: list[str]  # tracebacks of errors that are not about a file
    cpu_seconds: float = 0.0
    storage_seconds: float = 0.0  # time neither computing nor waiting for a core
    core_seconds: float = 0.0  # time ready to run, but waiting for a core
    error: str = ""  # reason why the task failed


@dataclass(eq=False)
class Ring:
    dataset: Dataset
    local_batch_size: int  # rows on this rank
    slots: int
    replacements: int = 0  # samples to try in place of an unreadable one; with 0, it is an error
    max_bad_fraction: float = 0.0  # fraction of unreadable samples above which the run fails
    num_classes: int | None = None  # labels must be below it, if they are class indices

    def __post_init__(self) -> None:
        rows = self.slots, self.local_batch_size
        fields = {**self.dataset.fields, **self.dataset.stage.fields}
        if fields.get("label") != LABEL:
            self.num_classes = None
        self.memory: dict[str, SharedArray] = {}  # field name -> [slots, B, *shape]
        for name, field in fields.items():
            self.memory[name] = SharedArray((*rows, *field.shape), field.dtype)
        # int64 [slots, B, 2], (epoch, index) of each row's sample. The index differs from the
        # task's if that sample was unreadable and has been replaced.
        self.samples = SharedArray((*rows, 2), np.int64)
        self.buffers = [*self.memory.values(), self.samples]
        self.replies: deque[Reply] = deque(maxlen=64)  # the newest replies

    def worker_ms(self) -> dict[str, Any]:
        """Return the `StepTimes` fields about a worker, averaged over the newest tasks' images."""
        replies = list(self.replies)  # The upload thread may append one at the same time.
        scale = 1e3 / max(1, sum(column(replies, "rows")))
        return {
            "image_cpu_ms": scale * sum(column(replies, "cpu_seconds")),
            # The maximum is needed because the thread's and the kernel's clocks differ slightly.
            "image_storage_ms": scale * max(0.0, sum(column(replies, "storage_seconds"))),
            "image_cpu_wait_ms": scale * sum(column(replies, "core_seconds")),
        }

    def candidates(self, index: int) -> Iterable[int]:
        """Return a sample and, if unreadable samples are skipped, its possible replacements."""
        return chain([index], islice(self.dataset.replacements(index), self.replacements))
