"""What a change of the input pipeline would give: images/s, predicted from measurements of the run.

`predicted_rate` is the model, `measure_remedies` measures what files and decoders can give.
"""

import io
import logging
import time
from functools import lru_cache

import numpy as np
import torch

from engine.tune.measured import (
    WAITS,
    Ranks,
    slowest,
    step_rate,
    total_rate,
    waited_fraction,
)
from pipeline.dataset import SHRUNK_SIDE, Dataset, FolderDataset, time_decoding
from pipeline.decode import DECODERS, installed, open_image

logger = logging.getLogger(__name__)

# What to do, and its effect relative to now: `cpu` images per core, `storage` time that a worker
# waits for storage, `workers` their number. Without an effect, it is not known.
Remedy = tuple[str, dict[str, float]]

SAMPLE = 24  # files that `measure_remedies` decodes
# The next two are fitted to the sweeps in tests/engine/tune/test_search.py (H200, 16 cores).
# SCALING is 0.95 on some of these hosts and 0.75 on others, whose cores share more.
REACHED = 0.98  # of the step's rate, by a run that does not wait
SCALING = 0.87  # n times the workers supply n ** SCALING times the images
# Images/s of one core, from docs/benchmarks.md, "Each stage", for decoders that are not installed.
# That of region is the figure of its predecessor, TurboJPEG 3.
DOCUMENTED = {"region": 564, "simplejpeg": 490, "pillow": 416}
SHRINK = f"re-encode the images once with scripts/prepare.py --side {SHRUNK_SIDE}"


def predicted_rate(
    ranks: Ranks, *, cpu: float = 1.0, storage: float = 1.0, workers: float = 1.0
) -> float:
    """Predict images/s of all ranks after a change; the arguments are relative to now.

    Assumptions:
        While the step waits, the workers have no pause, so the rate is what they supply. It grows
        with their number to the power of SCALING, and inversely with their time per image. Images
        from JPEG engines keep their rate. Storage serves smaller files in proportion to their bytes
        (the caller's `storage`), however many workers read.
        The rate is at most REACHED times that of the step, in this run or alone (the lower).
        A step that does not wait is slowed by the computing of the workers, in proportion.

    Args:
        cpu: images per core.
        storage: time that a worker waits for storage per image.
        workers: number of workers.
    """
    seen, rate, step = slowest(ranks), total_rate(ranks), step_rate(ranks)
    alone = len(ranks) * seen.step_alone or step
    if waited_fraction(ranks) < WAITS:
        faster_step = alone - (alone - step) / cpu
        return max(rate, min(REACHED * alone, rate * faster_step / step))
    busy = seen.cpu_ms + seen.core_ms
    computing = busy / (busy + seen.storage_ms) if busy + seen.storage_ms else 1.0
    seconds = computing / cpu + (1 - computing) * storage
    decoded = _decoded_share(ranks)
    supply = rate * (1 - decoded + decoded * workers**SCALING / max(seconds, 1e-9))
    return max(rate, min(reachable_rate(ranks), supply))


def reachable_rate(ranks: Ranks) -> float:
    """Images/s of a run that does not wait."""
    step = step_rate(ranks)
    alone = len(ranks) * slowest(ranks).step_alone or step
    return max(total_rate(ranks), REACHED * min(step, alone))


def workers_to_reach(ranks: Ranks) -> float:
    """Number of workers with which the step does not wait, relative to now."""
    decoded = _decoded_share(ranks)
    lack = reachable_rate(ranks) / total_rate(ranks) - 1 + decoded
    return float((lack / max(decoded, 0.01)) ** (1 / SCALING))


def _decoded_share(ranks: Ranks) -> float:
    """Share of the images whose rate depends on the workers."""
    seen = slowest(ranks)
    return seen.decoded if seen.decoder == "hybrid" else 1.0


@lru_cache(maxsize=1)  # a run has one training dataset, and may ask after every epoch
def measure_remedies(
    dataset: Dataset, images: int = SAMPLE, *, draw_only: bool = False
) -> tuple[Remedy, ...]:
    """Decode some files as they are, shrunk, and with the fastest CPU decoder, in half a second.

    Args:
        dataset: the training dataset.
        images: number of files.
        draw_only: leave out the operations of RandAugment, because the GPU applies them.

    Returns:
        Smaller files and, if there is one, a faster decoder; nothing for a dataset without files.
    """
    if not isinstance(dataset, FolderDataset):
        return ()
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
        logger.debug("measure_remedies: %s", error)
        return ()
    finally:
        torch.set_num_threads(threads)
    _, smaller, faster = (seconds[0] / seconds).tolist()
    shrink: Remedy = (SHRINK, {"cpu": smaller, "storage": sizes[1] / sizes[0]})
    fastest = next(iter(DECODERS))
    if best != dataset.decoder:
        return shrink, (f"set loader.decoder=auto, which is {best} here", {"cpu": faster})
    if best != fastest:
        gain = DOCUMENTED[fastest] / DOCUMENTED[best]
        source = "a C compiler for loader.decoder=region" if fastest == "region" else fastest
        return shrink, (f"install {source}, x{gain:.2f} in docs/benchmarks.md", {"cpu": gain})
    return (shrink,)


def _shrunk(data: bytes) -> bytes:
    """An image file as `scripts/prepare.py --side` makes it."""
    with open_image(data) as image:
        scale = SHRUNK_SIDE / min(image.size)
        if scale >= 1:
            return data
        buffer = io.BytesIO()
        size = round(scale * image.width), round(scale * image.height)
        image.convert("RGB").resize(size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
