"""Plans of the loader that a test writes down instead of asking the machine."""

import torch

from conf.schema import Config
from engine.distributed import World
from pipeline.build import Datasets
from pipeline.loader_plan import PREFETCH_FACTOR, LoaderPlan
from pipeline.ring import slots_needed


def world_of(device: torch.device, ranks: int = 1, ranks_here: int = 1) -> World:
    """Rank 0 of a run."""
    return World(rank=0, size=ranks, local_rank=0, local_size=ranks_here, device=device)


def loader_plan(
    config: Config,
    datasets: Datasets,
    world: World,
    *,
    workers: int,
    ceiling: int = 0,
    processes: int = 0,
    modes: tuple[str, ...] = ("cpu",),
    dtype: torch.dtype = torch.float32,
) -> LoaderPlan:
    """A plan for so many workers, with buffers for `ceiling` of them, and more for validation."""
    most, share = max(workers, ceiling), config.loader.batch_size // world.size
    given = config.loader.prefetch_factor
    factor = PREFETCH_FACTOR if given == "auto" else given
    return LoaderPlan(
        workers=workers,
        processes=max(workers, processes),
        cores=workers,
        reason="as configured",
        decoder=getattr(datasets.train, "decoder", "none"),
        modes=modes,
        unused="",
        measured=False,
        not_measured="",
        dtype=dtype,
        channels_last=False,
        ceiling=most,
        slots=slots_needed(share, most, factor, config.loader.prefetch_batches),
    )
