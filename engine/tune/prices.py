"""What a change of the input pipeline would give: images/s, predicted from measurements of the run.

`Flow.after` is the model, `measure_gains` the measurement of what files and decoders can give.
"""

import io
import logging
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from pipeline.dataset import SHRUNK_SIDE, Dataset, FolderDataset, time_decoding
from pipeline.decode import DECODERS, installed, open_image

logger = logging.getLogger(__name__)

SAMPLE = 24  # files that `measure_gains` decodes
# The next two are fitted to the sweeps in tests/engine/tune/test_autotune.py (H200, 16 cores).
# SCALING is 0.95 on some of these hosts and 0.75 on others, whose cores share more.
REACHED = 0.98  # of the step's rate, by a run that does not wait
SCALING = 0.87  # n times the workers supply n ** SCALING times the images
# Images/s of one core, from docs/benchmarks.md, "Each stage", for decoders that are not installed.
# That of region is the figure of its predecessor, TurboJPEG 3.
DOCUMENTED = {"region": 564, "simplejpeg": 490, "pillow": 416}


@dataclass(frozen=True)
class Change:
    """A change of the input pipeline.

    Attributes:
        text: what to do.
        cpu: images per core, relative to now.
        wait: time that a worker waits for storage per image, relative to now.
        workers: number of workers, relative to now.
    """

    text: str
    cpu: float = 1.0
    wait: float = 1.0
    workers: float = 1.0

    def __add__(self, other: "Change") -> "Change":
        return Change(
            f"{self.text}; {other.text}",
            self.cpu * other.cpu,
            self.wait * other.wait,
            self.workers * other.workers,
        )


@dataclass(frozen=True)
class Flow:
    """The rates of a run, in images/s of all ranks together.

    Attributes:
        rate: now.
        step: of the step while the workers run, without the time it waits for images.
        alone: of the step without workers; `step` if not measured.
        waits: whether the step waits for images; if not, the workers can only slow it down.
        cpu_share: share of a worker's time in which it computes or waits for a core; in the rest it
            waits for storage.
        decoded: share of the images that workers decode; JPEG engines decode the others.
    """

    rate: float
    step: float
    alone: float
    waits: bool
    cpu_share: float = 1.0
    decoded: float = 1.0

    def after(self, change: Change) -> float:
        """Predict images/s after a change.

        Assumptions:
            While the step waits, the workers have no pause, so the rate is what they supply. It
            grows with their number to the power of SCALING, and inversely with their time per
            image. Images from JPEG engines keep their rate. Storage serves smaller files in
            proportion to their bytes (the caller's `wait`), however many workers read.
            The rate is at most REACHED times that of the step, in this run or alone (the lower).
            A step that does not wait is slowed by the computing of the workers, in proportion.
        """
        if not self.waits:
            step = self.alone - (self.alone - self.step) / change.cpu
            return max(self.rate, min(REACHED * self.alone, self.rate * step / self.step))
        seconds = self.cpu_share / change.cpu + (1 - self.cpu_share) * change.wait
        workers = change.workers**SCALING / max(seconds, 1e-9)
        supply = self.rate * (1 - self.decoded + self.decoded * workers)
        return max(self.rate, min(self.reach, supply))

    @property
    def reach(self) -> float:
        """Images/s of a run that does not wait."""
        return max(self.rate, REACHED * min(self.step, self.alone))

    @property
    def workers_to_reach(self) -> float:
        """Number of workers with which the step does not wait, relative to now."""
        lack = (self.reach / self.rate - 1 + self.decoded) / max(self.decoded, 0.01)
        return float(lack ** (1 / SCALING))


@dataclass(frozen=True)
class Gains:
    """What smaller files and a faster decoder gain on this machine, measured on some files.

    Attributes:
        shrink: gain in images per core from `prepare.py --side 352`; 1 if it could not be measured.
        file_bytes: size of the files after it, relative to now.
        decoder: a faster CPU decoder than the dataset's; "" if there is none.
        decode: gain in images per core from `decoder`.
        installed: whether `decoder` is installed; if not, `decode` comes from DOCUMENTED.
    """

    shrink: float = 1.0
    file_bytes: float = 1.0
    decoder: str = ""
    decode: float = 1.0
    installed: bool = False


@lru_cache(maxsize=1)  # a run has one training dataset, and may ask after every epoch
def measure_gains(
    dataset: Dataset, images: int = SAMPLE, *, draw_only: bool = False
) -> Gains | None:
    """Decode some files as they are, shrunk, and with the fastest CPU decoder, in half a second.

    Args:
        dataset: the training dataset.
        images: number of files.
        draw_only: leave out the operations of RandAugment, because the GPU applies them.

    Returns:
        None for a dataset without files.
    """
    if not isinstance(dataset, FolderDataset):
        return None
    best = installed()[0]
    seconds, sizes = np.zeros(3), np.zeros(2)  # CPU time to read and decode
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index in np.linspace(0, len(dataset) - 1, images).astype(int).tolist():
            began = time.thread_time()
            data = dataset.read(index)
            reading = time.thread_time() - began
            small = _shrunk(data)
            sizes += len(data), len(small)
            ways = [(data, dataset.decoder), (small, dataset.decoder), (data, best)]
            for way in ways:
                time_decoding(dataset, index, *way, draw_only=draw_only)  # warm-up
            times = [time_decoding(dataset, index, *way, draw_only=draw_only) for way in ways]
            seconds += np.add(times, [reading * len(way[0]) / len(data) for way in ways])
    except Exception as error:  # an unreadable file: training will report it by name
        logger.debug("measure_gains: %s", error)
        return Gains()
    finally:
        torch.set_num_threads(threads)
    gain = seconds[0] / seconds
    found = Gains(shrink=float(gain[1]), file_bytes=float(sizes[1] / sizes[0]))
    fastest = next(iter(DECODERS))
    if best != dataset.decoder:
        return replace(found, decoder=best, decode=float(gain[2]), installed=True)
    if best != fastest:
        return replace(found, decoder=fastest, decode=DOCUMENTED[fastest] / DOCUMENTED[best])
    return found


def _shrunk(data: bytes) -> bytes:
    """An image file as scripts/prepare.py --side 352 makes it."""
    with open_image(data) as image:
        scale = SHRUNK_SIDE / min(image.size)
        if scale >= 1:
            return data
        buffer = io.BytesIO()
        size = round(scale * image.width), round(scale * image.height)
        image.convert("RGB").resize(size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
