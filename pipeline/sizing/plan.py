"""How the loader will run on this machine: decoder, workers and memory, before any is started."""

from dataclasses import dataclass, replace

import torch

from conf.schema import Config, UserError
from pipeline import decode
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FileDataset
from pipeline.decode import ON_GPU
from pipeline.gpu_decode.decoder import EngineError, GpuDecoder, has_engines
from pipeline.sizing.budget import chosen_workers, worker_budget
from pipeline.sizing.memory import MemoryPlan, plan_memory
from pipeline.sizing.ranks import Ranks

PROBE_WORKERS = 2  # loader.workers=auto starts with these, and measures them
FEWEST_BATCHES = 16  # a shorter epoch is over before the number of workers matters


@dataclass(frozen=True)
class LoaderPlan:
    """How the loader of one rank will run.

    Attributes:
        workers: to train with; if `measured`, the upper bound from the cores.
        cores: workers that the cores are enough for, whatever is configured.
        reason: how `workers` was found.
        decoder: name of the decoder.
        memory: of buffers and workers.
        measured: loader.workers=auto is measured before the first step.
        not_measured: why loader.workers=auto is not measured; None if it is, or if the user set
            loader.workers.
        dtype: of the images on the device.
        channels_last: memory format of the images on the device.
    """

    workers: int
    cores: int
    reason: str
    decoder: str
    memory: MemoryPlan
    measured: bool
    not_measured: str | None
    dtype: torch.dtype
    channels_last: bool

    @property
    def start_workers(self) -> int:
        """Workers that `open_feed` starts."""
        return min(PROBE_WORKERS, self.workers) if self.measured else self.workers

    @property
    def uses_engines(self) -> bool:
        """Whether the GPU decodes training images."""
        return self.decoder in ON_GPU

    def limited_to(self, memory: MemoryPlan) -> "LoaderPlan":
        """The plan with this memory and no more workers than it is enough for."""
        if self.workers <= memory.ceiling:
            return replace(self, memory=memory)
        reason = "free memory allows no more"
        return replace(self, memory=memory, workers=memory.ceiling, reason=reason)

    def lines(self) -> list[str]:
        """The plan for the console."""
        upto = "up to " if self.measured else ""
        plural = "" if self.workers == 1 else "s"
        workers = f"{upto}{self.workers} worker{plural} per rank ({self.reason})"
        return [f"loader   {workers}, decoder {self.decoder}", f"memory   {self.memory.line()}"]


def plan_loader(
    config: Config,
    datasets: Datasets,
    world: Ranks,
    *,
    dtype: torch.dtype,
    channels_last: bool,
    stored_pixels: str = "cpu",
) -> LoaderPlan:
    """Choose decoder and workers, and check that their memory is free.

    Args:
        world: the node's ranks share its cores and memory.
        dtype: of the images on the device.
        channels_last: memory format of the images on the device.
        stored_pixels: `pixels` of the checkpoint to resume; loader.decoder=auto keeps to them.

    Raises:
        UserError: the decoder is not available, or files or memory are too few for the workers.
    """
    decoder = choose_decoder(config, datasets.train, world.device, stored_pixels)
    budget = chosen_workers(config, world.local_size, decoder)
    auto = config.loader.workers == "auto"
    not_measured = None
    if auto:
        batches = len(datasets.train) / config.loader.batch_size
        not_measured = why_not_measured(world.device, decoder, batches, budget.workers)
    measured = auto and not_measured is None
    # Workers that wait for storage leave their core to others.
    most = 2 * budget.workers if measured else budget.workers
    if auto and decoder == "gpu":  # few workers read files for the engines; all cores validate
        most = max(most, worker_budget(world.local_size).workers)
    fewest = min(1, most) if auto else most
    memory = plan_memory(
        config, datasets, world, workers=most, fewest=fewest, decoder=decoder, dtype=dtype
    )
    plan = LoaderPlan(
        workers=budget.workers,
        cores=worker_budget(world.local_size, decoder=decoder).workers,
        reason=budget.reason,
        decoder=decoder,
        memory=memory,
        measured=measured,
        not_measured=not_measured,
        dtype=dtype,
        channels_last=channels_last,
    )
    return plan.limited_to(memory)


def why_not_measured(
    device: torch.device, decoder: str, batches_per_epoch: float, workers: int
) -> str | None:
    """Why loader.workers=auto takes all workers that the cores allow; None if it measures."""
    few = f"an epoch of {batches_per_epoch:.1f} batches is over before it matters"
    reasons = {
        "none can be started": workers == 0,
        "training runs on the CPU and shares it with the workers": device.type != "cuda",
        "synthetic images cost nothing": decoder == "none",
        "loader.decoder=hybrid balances workers and engines itself, and uses all cores": (
            decoder == "hybrid"
        ),
        few: batches_per_epoch < FEWEST_BATCHES,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def pixels_of(decoder: str) -> str:
    """The pixels that a decoder makes: cpu (all CPU decoders agree bit for bit), gpu or hybrid."""
    return decoder if decoder in ON_GPU else "cpu"


def choose_decoder(
    config: Config, dataset: Dataset, device: torch.device, stored_pixels: str = "cpu"
) -> str:
    """Resolve loader.decoder on this machine.

    Args:
        stored_pixels: `pixels` of the checkpoint to resume; auto keeps to them.

    Raises:
        UserError: the decoder is not installed, or gpu and hybrid find no JPEG engines.
    """
    name = config.loader.decoder
    if not isinstance(dataset, FileDataset):
        return "none"
    # Without engines, auto chooses a CPU decoder, and the identity check refuses the checkpoint.
    if name == "auto" and stored_pixels in ON_GPU and has_engines(device):
        name = stored_pixels
    if name not in ON_GPU:
        return decode.resolve(name)
    if name == "hybrid" and config.train.deterministic:
        raise UserError(
            "loader.decoder=hybrid: splits each batch by measured speed, so the bits differ from "
            "run to run; use another decoder with train.deterministic=true"
        )
    try:
        if device.type != "cuda":
            raise EngineError("training runs on the CPU")
        GpuDecoder(device, 1)
    except EngineError as error:
        raise UserError(
            f"loader.decoder={name}: needs an NVIDIA GPU with JPEG engines and nvJPEG: {error}; "
            "use auto"
        ) from None
    return name
