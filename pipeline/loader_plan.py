"""How the loader will run on this machine: modes, number of workers, slots."""

import math
from dataclasses import dataclass

import torch

from conf.schema import Config, UserError
from pipeline import decode, machine
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FakeDataset
from pipeline.ring import slots_needed

PROBE_WORKERS = 2  # loader.workers=auto starts with these, and measures them
FEWEST_BATCHES = 16  # a shorter epoch is over before the number of workers matters
# A worker decodes 15,500 files of this size in bytes per second, so that so many of them keep up
# with ResNet-18 at 32 px on an H200 (62,000 images/s), and measuring takes longer than it can save.
SMALL_FILE, ENOUGH_WORKERS = 4096, 4
# loader.prefetch_factor=auto, in tasks per worker: measured on an H200 (docs/benchmarks.md).
PREFETCH_FACTOR = 3


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device


@dataclass(frozen=True)
class LoaderPlan:
    """How the loader of one rank will run."""

    workers: int  # to train with; if `measured`, the upper bound from the cores
    processes: int  # workers to start; validation uses all of them
    cores: int  # number of workers that the cores are enough for, regardless of the config
    reason: str  # how `workers` was found
    decoder: str  # the CPU decoder of the images; none if the dataset has no files
    modes: tuple[str, ...]  # of the dataset, to compare; without a measurement, the first is used
    unused: str  # why other modes are not used, for the console
    measured: bool  # whether loader.workers=auto is measured before the first step
    not_measured: str  # why it is not; "" if it is, or if the user set loader.workers
    ceiling: int  # largest number of workers, for which the buffers are allocated
    slots: int  # batches in each of the two rings of buffers
    dtype: torch.dtype  # of the images on the device
    channels_last: bool  # of the images on the device

    @property
    def start_workers(self) -> int:
        """Workers to begin with."""
        return min(PROBE_WORKERS, self.workers) if self.measured else self.workers

    def lines(self) -> list[str]:
        """The plan for the console."""
        upto = "up to " if self.measured else ""
        plural = "" if self.workers == 1 else "s"
        decoder = " or ".join(self.decoder if mode == "cpu" else mode for mode in self.modes)
        unused = f" ({self.unused})" if self.unused else ""
        return [
            f"loader   {upto}{self.workers} worker{plural} per rank ({self.reason}), "
            f"decoder {decoder}{unused}",
        ]


def plan_loader(
    config: Config,
    datasets: Datasets,
    world: Place,
    *,
    dtype: torch.dtype,
    channels_last: bool,
    stored_mode: str | None = None,
) -> LoaderPlan:
    """Choose modes and workers.

    `stored_mode`: that of the checkpoint to resume, which loader.decoder=auto keeps; None without a
    checkpoint. Raises UserError if the mode is not available.
    """
    train, loader, auto = datasets.train, config.loader, config.loader.workers == "auto"
    budget, limit = worker_budget(world.local_size)
    not_measured = why_not_measured(config, train, world.device, budget) if auto else ""
    measured = auto and not not_measured
    modes, unused = choose_modes(config, train, stored_mode, measured=measured)
    cores = train.workers_in(modes[0], budget)
    workers = ceiling = cores if auto else loader.workers
    reason = "as configured"
    if auto:
        # All cores validate, even if few workers are enough for training. Measured workers may wait
        # for storage, and need no core then.
        ceiling = max(budget, 2 * cores if measured else 0)
        reason = limit if cores == budget else f"enough for loader.decoder={modes[0]}"
    factor = PREFETCH_FACTOR if loader.prefetch_factor == "auto" else loader.prefetch_factor
    share = loader.batch_size // world.size
    return LoaderPlan(
        workers=workers,
        processes=budget if auto else workers,
        cores=cores,
        reason=reason,
        decoder=getattr(train, "decoder", "none"),
        modes=modes,
        unused=unused,
        measured=measured,
        not_measured=not_measured,
        ceiling=ceiling,
        slots=slots_needed(share, ceiling, factor, loader.prefetch_batches),
        dtype=dtype,
        channels_last=channels_last,
    )


def why_not_measured(config: Config, dataset: Dataset, device: torch.device, workers: int) -> str:
    """Why loader.workers=auto takes all workers that the cores allow; "" if it measures."""
    batches = len(dataset) / config.loader.batch_size
    if device.type == "cpu":
        return "training runs on the CPU and shares it with the workers"
    if device.type != "cuda":
        return "it is only measured with CUDA"
    if isinstance(dataset, FakeDataset):
        return "synthetic images cost nearly nothing"
    if batches < FEWEST_BATCHES:
        return f"an epoch of {batches:.1f} batches is over before it matters"
    if 0 < dataset.mean_bytes() <= SMALL_FILE and workers >= ENOUGH_WORKERS:
        kilobytes = dataset.mean_bytes() / 1000
        return f"small files ({kilobytes:.1f} kB on average) decode faster than the GPU trains"
    return ""


def choose_modes(
    config: Config, dataset: Dataset, stored: str | None = None, *, measured: bool = False
) -> tuple[tuple[str, ...], str]:
    """Resolve loader.decoder to modes of a dataset; for `stored`, see `plan_loader`.

    `measured`: whether a measurement can choose between several modes. Returns the modes to choose
    from, the first one to begin with; and why others are not used, for the console. Raises
    UserError if the machine or the dataset does not have the mode.
    """
    name, modes = config.loader.decoder, tuple(dataset.modes)
    # Without the stored mode, auto begins with the default, and the identity check refuses it.
    if name == "auto" and stored in modes:
        return (stored,), ""
    if name in modes:
        return (name,), ""
    if name not in ("auto", *decode.DECODERS):
        choice = ", ".join(("auto", *decode.DECODERS, *modes[1:]))
        raise UserError(f"loader.decoder={name}: there is none here; give one of {choice}")
    if name != "auto" or stored is not None:
        return modes[:1], ""
    if len(modes) > 1 and not measured:
        others = " and ".join(modes[1:])
        return modes[:1], f"{others} are only compared if loader.workers=auto is measured"
    return modes, dataset.no_modes


def worker_budget(local_size: int = 1) -> tuple[int, str]:
    """Return the number of workers for which a rank has cores, and how it was found.

    The ranks of a node share its cores; each training process keeps one.
    """
    cores, kept = min(machine.cores(), machine.cpu_quota()), machine.threads_per_core()
    workers = max(1, math.floor(cores / local_size) - kept)
    left = "shared with" if cores < (workers + kept) * local_size else f"{kept} left to"
    ranks = f", {local_size} ranks here" if local_size > 1 else ""
    return workers, f"{cores:g} core{'' if cores == 1 else 's'}{ranks}, {left} the training process"
