"""Why a run is as fast as it is, in a sentence or two with the numbers, and the one change that would help most."""

from collections.abc import Sequence
from dataclasses import dataclass

WAITS = 0.05  # share of the time; less is not worth a change
COPIES = 0.8  # share of the time in which copies run: they cannot be hidden behind the step any more
UNPINNED_COPIES = 0.5  # likewise, of copies from ordinary memory: they hold up the host as well
DRAINED = 0.5  # share of the steps at which the GPU had nothing left to do
SLOWED = 0.9  # of what the step took alone
LARGE_FILE = 50e3  # bytes; ImageNet's own files have 110,000, those that scripts/shrink.py makes 27,000
SHRINK = "scripts/shrink.py makes the files smaller once"
SPARE = 1.3  # workers that could give so much more than is taken are not what limits


@dataclass(frozen=True)
class Account:
    """Where the time of some steps went; fractions and milliseconds are one rank's: the others wait for the slowest.

    Attributes:
        images_per_second: reached by all ranks.
        alone: what the step took before the loader ran beside it; 0 when that was not measured.
        copy_ms: of a batch, by the device's clock.
        wait, late, copy, drained: fractions as in the prefetcher's timing.
        batch_size: the global batch.
        on_gpu: else the step and the workers share the CPU.
        ranks: how many there are.
        workers: processes of a rank; 0 decodes in the training process.
        most_workers: what the cores are enough for.
        cpu_ms, wait_ms, core_ms: of one image in a worker: computing, waiting for storage, waiting for a core.
        file_bytes: mean size of an image's file; 0 when there are none.
        decoder, compile, pinned: what the loader and the step run with.
    """

    images_per_second: float
    alone: float
    copy_ms: float
    wait: float
    late: float
    copy: float
    drained: float
    batch_size: int
    on_gpu: bool
    ranks: int
    workers: int
    most_workers: int
    cpu_ms: float
    wait_ms: float
    core_ms: float
    file_bytes: float
    decoder: str
    compile: str
    pinned: bool

    @property
    def ceiling(self) -> float:
        """Images/s if the next batch were always there, copied and launched."""
        return self.images_per_second / max(1e-3, 1 - self.wait - self.late - (0 if self.on_gpu else self.copy))

    @property
    def large_files(self) -> bool:
        """Whether making the files smaller would help."""
        return self.file_bytes > LARGE_FILE

    @property
    def beside(self) -> float:
        """Images/s of the step while the loader runs, its waiting for images left out."""
        return self.images_per_second / max(1e-3, 1 - self.wait)

    @property
    def step_ms(self) -> float:
        return 1e3 * self.batch_size / max(self.ceiling, 1e-9)

    @property
    def supply(self) -> float:
        """Images/s that the workers could give, by the time they take for one."""
        return 1e3 * self.ranks * max(1, self.workers) / max(self.cpu_ms + self.wait_ms + self.core_ms, 1e-6)

    @property
    def cause(self) -> str:
        """storage, decode, hand-off, copy, cores, launch or compute: what the next image waits for."""
        if self.wait >= WAITS:
            if self.on_gpu and self.copy >= (COPIES if self.pinned else UNPINNED_COPIES):
                return "copy"
            if self.wait_ms > self.cpu_ms:
                return "storage"
            return "hand-off" if self.workers and self.supply > SPARE * self.images_per_second else "decode"
        if self.beside < SLOWED * self.alone:
            return "cores"
        return "launch" if self.on_gpu and (self.late >= WAITS or self.drained >= DRAINED) else "compute"


def slowest(accounts: Sequence[Account | None]) -> Account | None:
    """Of every rank's account, of the same steps, the one the others wait for; None when a rank has none."""
    known = [account for account in accounts if account is not None]
    return max(known, key=lambda account: account.wait) if len(known) == len(accounts) else None


def verdict(account: Account) -> list[str]:
    """One or two plain sentences: the cause with its numbers, and what to change."""
    a, device = account, "GPU" if account.on_gpu else "CPU"
    reached = f"the step could take {a.ceiling:,.0f} img/s and got {a.images_per_second:,.0f}"
    waited = f"the {device} waited {100 * a.wait:.0f} % of the time for images; {reached}"
    workers = f"each of {a.workers} workers" if a.workers > 1 else "the one worker"
    who = workers + " of a rank" * (a.ranks > 1) if a.workers else "the training process (loader.workers=0)"
    core = f", {a.core_ms:.1f} ms for a core" if a.core_ms > 0.1 * a.cpu_ms else ""
    image = f"An image takes {who} {a.cpu_ms:.1f} ms of computing and {a.wait_ms:.1f} ms of waiting for storage{core}"
    match a.cause:
        case "storage":
            return [f"input-bound by storage: {waited}.",
                    f"{image}: move the images to faster storage{f', or {SHRINK}' * a.large_files}."]  # fmt: skip
        case "decode":
            return [f"input-bound by decode: {waited}.", f"{image}: {_faster_decoding(a)}."]
        case "hand-off":
            return [f"input-bound by the hand-off: {waited}, though the workers could give {a.supply:,.0f}.",
                    f"{image}: raise loader.prefetch_batches and leave the training process a core of its own."]  # fmt: skip
        case "copy":
            return [f"copy-bound: a batch takes {a.copy_ms:.1f} ms to the GPU and {a.step_ms:.1f} ms there; {reached}.",
                    "The buffers are page-locked already: give the GPU a wider link." if a.pinned
                    else "The buffers are not page-locked: set loader.pin_memory=true, and see ulimit -l."]  # fmt: skip
        case "cores":
            return [f"core-bound: the step took {a.alone:,.0f} img/s alone and takes {a.beside:,.0f} beside the workers; "
                    f"the {device} waited {100 * a.wait:.1f} % of the time for images.",
                    f"The training process shares its cores with them: {_less_decoding(a)}."]  # fmt: skip
        case "launch":
            idle = f"before {100 * a.drained:.0f} % of the steps the GPU had nothing left to do, though the images were there"
            graphs = "" if a.compile == "reduce-overhead" else ", or set model.compile=reduce-overhead"
            return [f"launch-bound: {idle}; it got {a.images_per_second:,.0f} img/s.", f"Raise loader.batch_size{graphs}."]
    bound = (f"compute-bound: {a.images_per_second:,.0f} of {a.ceiling:,.0f} img/s; the {device} waited {100 * a.wait:.1f} % "
             "of the time for images: the input has nothing more to give")  # fmt: skip
    faster = {"off": "model.compile=default would speed up the step", "default": "a long run gains by model.compile=tuned"}
    return [f"{bound}; {faster[a.compile]}." if a.on_gpu and a.compile in faster else f"{bound}."]


def _faster_decoding(account: Account) -> str:
    """What to try when decoding limits, the most effective first."""
    if not account.workers:
        return f"loader.workers=auto decodes beside the step; {_less_decoding(account)}"
    if account.workers < account.most_workers and account.core_ms < 0.1 * account.cpu_ms:
        return f"loader.workers can be raised to {account.most_workers}, for the cores are not full; {_less_decoding(account)}"
    return _less_decoding(account)


def _less_decoding(account: Account) -> str:
    """What takes work from the cores, the most effective first."""
    ways = []
    if account.on_gpu and account.decoder not in ("gpu", "hybrid"):
        ways.append("loader.decoder=hybrid takes the GPU's JPEG engines, where it has them")
    if account.large_files:
        ways.append(SHRINK)
    return "; ".join(ways or ["the training needs more cores"])
