"""Remedies for slow input, with the images/s that each would give, predicted from measurements.

`predicted_rate` is the model; `measure_remedies` measures what smaller files and decoders give.
"""

import io
import logging
import math
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from engine.plan import Plan
from engine.stop_signal import StopSignal
from engine.tune.measured import WAITS, Figures, Measured
from pipeline.augment import sample_rng
from pipeline.dataset import Dataset, FolderDataset
from pipeline.decode import DECODERS, installed, open_image, open_picture
from pipeline.feed import Feed

logger = logging.getLogger(__name__)

SAMPLE = 24  # files that `measure_remedies` decodes
# The next two are fitted to the sweeps in tests/engine/tune/sweeps.py (H200, 16 cores). SCALING is
# 0.95 on some of these hosts and 0.75 on others, whose cores share more.
REACHED = 0.98  # of the step's rate, by a run that does not wait
SCALING = 0.87  # n times the workers supply n ** SCALING times the images
PAYS = 1.03  # factor by which a change must raise images/s to be listed
SMALLER = 0.7  # share of the bytes from which on shrinking also helps JPEG engines
# Short side in pixels of smaller copies for training at 224 px.
SHRUNK_SIDE = 352
SHRINK = f"re-encode the images once with scripts/prepare.py --side {SHRUNK_SIDE}"
AUTO = "set loader.workers=auto and loader.decoder=auto in a new run"
AUTO_WORKERS = "set loader.workers=auto in a new run"


class Remedy(NamedTuple):
    """What to do, and its effect: the arguments of `predicted_rate`; empty if it is not known."""

    text: str
    effect: dict[str, float]


def predicted_rate(
    figures: Figures, *, cpu: float = 1.0, storage: float = 1.0, workers: float = 1.0
) -> float:
    """Predict images/s of all ranks after a change; the arguments are relative to now.

    `cpu` stands for the images per core, `storage` for the time that a worker waits for storage per
    image, `workers` for their number. While the step waits, the workers have no pause, so the rate
    is what they supply. It grows with their number to the power of SCALING, and inversely with
    their time per image. Images from JPEG engines keep their rate. A step that does not wait is
    slowed by the computing of the workers, in proportion. The rate is at most REACHED times that of
    the step, in this run or alone.
    """
    rank, rate = figures.slowest, figures.rate
    if figures.waited < WAITS:
        faster_step = figures.alone - (figures.alone - figures.step) / cpu
        return max(rate, min(REACHED * figures.alone, rate * faster_step / figures.step))
    busy = rank.cpu_ms + rank.core_ms
    computing = busy / max(busy + rank.storage_ms, 1e-9)
    seconds = computing / cpu + (1 - computing) * storage
    decoded = _decoded_share(rank)
    supply = rate * (1 - decoded + decoded * workers**SCALING / max(seconds, 1e-9))
    return max(rate, min(reachable_rate(figures), supply))


def reachable_rate(figures: Figures) -> float:
    """Images/s of a run that does not wait."""
    return max(figures.rate, REACHED * min(figures.step, figures.alone))


def workers_to_reach(figures: Figures) -> float:
    """Number of workers with which the step does not wait, relative to now."""
    decoded = _decoded_share(figures.slowest)
    lack = reachable_rate(figures) / figures.rate - 1 + decoded
    return float((lack / max(decoded, 0.01)) ** (1 / SCALING))


def _decoded_share(rank: Measured) -> float:
    """Share of the images whose rate depends on the workers."""
    return rank.decoded if rank.decoder == "hybrid" else 1.0


def priced(figures: Figures, remedies: Sequence[Remedy]) -> list[str]:
    """Name the remedies that pay with their rates, the highest first, after those without."""
    unknown = [text for text, effect in remedies if not effect]
    rates = [(predicted_rate(figures, **effect), text) for text, effect in remedies if effect]
    pays = sorted((each for each in rates if each[0] >= PAYS * figures.rate), reverse=True)
    return unknown + [f"{text} (about {rate:,.0f} img/s)" for rate, text in pays]


def more_cores(figures: Figures) -> list[str]:
    """Name the cores per rank with which the step does not wait, and the rate, if more would help.

    The training process needs one of them, and with hybrid, one for waiting for the engines.
    """
    rank, factor = figures.slowest, workers_to_reach(figures)
    workers = math.ceil(min(rank.workers, rank.cores) * factor)
    if rank.decoder == "gpu" or workers <= rank.cores:
        return []
    cores = workers + 1 + (rank.decoder == "hybrid")
    each = " for each rank" if len(figures.ranks) > 1 else ""
    rate = predicted_rate(figures, workers=factor)
    return [f"use a machine with about {cores} CPU cores{each} (about {rate:,.0f} img/s)"]


def find_remedies(feed: Feed, plan: Plan, stop: StopSignal) -> list[Remedy]:
    """Return what could make images faster: a measurement, and what `measure_remedies` finds."""
    loader = feed.train.loader
    source = loader.pool.sources[loader.source]
    measure = partial(measure_remedies, source.dataset, draw_only=source.operations is not None)
    remedies = list(stop.wait_for(measure) or ())  # it reads files
    if feed.decoder == "gpu":  # what shrinking gives to JPEG engines is not measured
        remedies = [
            Remedy(text, {})
            for text, effect in remedies
            if text == SHRINK and effect["storage"] < SMALLER
        ]
    decoder, auto = plan.config.loader.decoder, AUTO
    if feed.decoder == "none":  # the dataset does not use it
        decoder, auto = "auto", AUTO_WORKERS
    if {plan.config.loader.workers, decoder} != {"auto"}:
        remedies.insert(0, Remedy(auto, {}))
    return remedies


@lru_cache(maxsize=1)  # a run has one training dataset, and may ask after every epoch
def measure_remedies(dataset: Dataset, *, draw_only: bool = False) -> tuple[Remedy, ...]:
    """Decode some files as they are, shrunk, and with the fastest CPU decoder, in half a second.

    `draw_only` leaves out the operations of RandAugment, because the GPU applies them. Returns
    smaller files and, if there is one, a faster decoder; nothing for a dataset without files.
    """
    if not isinstance(dataset, FolderDataset) or not dataset.is_plain:
        return ()
    best, fastest = installed()[0], next(iter(DECODERS))
    seconds, sizes = np.zeros(3), np.zeros(2)  # CPU time to read and decode
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index in np.linspace(0, len(dataset) - 1, SAMPLE).astype(int).tolist():
            began = time.thread_time()
            data = dataset.read(index)
            reading = time.thread_time() - began
            small = _shrunk(data)
            sizes += len(data), len(small)
            ways = [(data, dataset.decoder), (small, dataset.decoder), (data, best)]
            for way in ways:
                _time_decoding(dataset, index, *way, draw_only=draw_only)  # warm-up
            times = [_time_decoding(dataset, index, *way, draw_only=draw_only) for way in ways]
            seconds += np.add(times, [reading * len(way[0]) / len(data) for way in ways])
    except Exception as error:  # an unreadable file: training will report it by name
        logger.debug("measure_remedies: %s", error)
        return ()
    finally:
        torch.set_num_threads(threads)
    _, smaller, faster = (seconds[0] / seconds).tolist()
    found = []
    if sizes[1] < sizes[0]:
        found.append(Remedy(SHRINK, {"cpu": smaller, "storage": sizes[1] / sizes[0]}))
    if best != dataset.decoder:
        found.append(Remedy(f"set loader.decoder=auto, which is {best} here", {"cpu": faster}))
    elif best != fastest:
        found.append(Remedy(f"install a C compiler for loader.decoder={fastest}", {}))
    return tuple(found)


def _time_decoding(
    dataset: FolderDataset, index: int, data: bytes, decoder: str, *, draw_only: bool
) -> float:
    """Return the CPU seconds to decode and augment `data` as a sample of epoch 0."""
    began = time.thread_time()
    turn = dataset.exif_orientation
    picture = open_picture(data, decoder, dataset.max_pixels, exif_orientation=turn)
    rng = sample_rng(dataset.seed, 0, index)
    if draw_only:
        dataset.transform.sample(picture, rng)[0].pixels()
    else:
        dataset.transform(picture, rng).pixels()
    return time.thread_time() - began


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
