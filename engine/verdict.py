"""Why a run is as fast as it is, in a sentence or two with the numbers, and the one change that would help most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WAITS = 0.05  # share of the time; less is not worth a change
COPIES = 0.8  # share of the time in which copies run: they cannot be hidden behind the step any more
UNPINNED_COPIES = 0.5  # likewise, of copies from ordinary memory: they hold up the host as well
DRAINED = 0.5  # share of the steps at which the GPU had nothing left to do
BESIDE = 0.9  # of what the step took alone, in seconds at the start: over hours a GPU runs warmer and slower
HELD_UP = 0.1  # share of the steps at which the GPU had nothing left to do, where the host lacks a core
SHRINK = "scripts/shrink.py makes the files smaller once"
SPARE = 1.3  # workers that could give so much more than is taken are not what limits
FEW = 0.5  # share of the workers' time that a few files take; the others are not to blame then


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
        few, slow_files: share of the workers' time that single files took, each of them seconds at a time; and which.
        large_files: whether scripts/shrink.py would make them much smaller.
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
    few: float
    slow_files: tuple[str, ...]
    large_files: bool
    decoder: str
    compile: str
    pinned: bool

    @property
    def ceiling(self) -> float:
        """Images/s if the next batch were always there, copied and launched."""
        return self.images_per_second / max(1e-3, 1 - self.idle)

    @property
    def idle(self) -> float:
        """Share of the time in which the device did not compute, as far as it shows between the steps."""
        return self.wait + self.late + (0 if self.on_gpu else self.copy)

    @property
    def beside(self) -> float:
        """Images/s of the step while the loader runs, its waiting for images left out."""
        return self.images_per_second / max(1e-3, 1 - self.wait)

    @property
    def slower(self) -> bool:
        """Whether the step was slower than when it was measured alone."""
        return self.beside < BESIDE * self.alone

    @property
    def step_ms(self) -> float:
        return 1e3 * self.batch_size / max(self.ceiling, 1e-9)

    @property
    def supply(self) -> float:
        """Images/s that the workers could give, by the time they take for one."""
        return 1e3 * self.ranks * max(1, self.workers) / max(self.cpu_ms + self.wait_ms + self.core_ms, 1e-6)

    @property
    def cause(self) -> str:
        """storage, files, decode, engines, hand-off, copy, cores, launch or compute: what the next image waits for."""
        if self.wait >= WAITS:
            if self.on_gpu and self.copy >= (COPIES if self.pinned else UNPINNED_COPIES):
                return "copy"
            if self.few > FEW:
                return "files"
            if self.workers and self.supply > SPARE * self.images_per_second:
                return "engines" if self.decoder == "gpu" else "hand-off"
            return "storage" if self.wait_ms > self.cpu_ms else "decode"
        if self.slower and self.decoder != "gpu" and (self.late >= WAITS or self.drained >= HELD_UP):
            return "cores"
        return "launch" if self.on_gpu and (self.late >= WAITS or self.drained >= DRAINED) else "compute"


def slowest(accounts: Sequence[Account | None]) -> Account | None:
    """Of every rank's account the one the others wait for, which to them looks like computing; None when a rank has none."""
    known = [account for account in accounts if account is not None]
    if len(known) < len(accounts):
        return None
    idle = max(known, key=lambda account: account.idle)
    return idle if idle.idle >= WAITS else max(known, key=lambda account: account.drained)


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
            return [f"input-bound by storage: {waited}.", f"{image}: {_faster_storage(a)}."]
        case "files":
            return [f"input-bound by single files: {waited}.",
                    f"They took {100 * a.few:.0f} % of the workers' time, seconds each: {', '.join(a.slow_files)}; copy them "
                    "anew or leave them out."]  # fmt: skip
        case "decode":
            return [f"input-bound by decode: {waited}.", f"{image}: {_faster_decoding(a)}."]
        case "engines":
            return [f"input-bound by decode: {waited}.", f"The GPU's JPEG engines limit: {_less_decoding(a)}."]
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
            idle = (f"before {100 * a.drained:.0f} % of the steps the GPU had nothing left to do" if a.drained >= DRAINED
                    else f"{100 * a.late:.0f} % of the time the GPU had nothing to do")  # fmt: skip
            graphs = "" if a.compile == "reduce-overhead" else ", or set model.compile=reduce-overhead"
            return [
                f"launch-bound: {idle}, though the images were there; it got {a.images_per_second:,.0f} img/s.",
                f"Raise loader.batch_size{graphs}.",
            ]
    bound = (f"compute-bound: {a.images_per_second:,.0f} of {a.ceiling:,.0f} img/s; the {device} waited {100 * a.wait:.1f} % "
             "of the time for images: the input has nothing more to give")  # fmt: skip
    if a.slower:
        bound += f"; alone the step took {a.alone:,.0f}: " + ("decoding takes its part of the GPU" if a.decoder == "gpu"
                                                        else "see the GPU's clocks, and what else runs on it")  # fmt: skip
    faster = {"off": "model.compile=default would speed up the step", "default": "a long run gains by model.compile=tuned"}
    return [f"{bound}; {faster[a.compile]}." if a.on_gpu and a.compile in faster else f"{bound}."]


def _faster_storage(account: Account) -> str:
    """What to try when storage limits, the most effective first."""
    a = account
    ways = ["move the images to faster storage" + f", or {SHRINK}" * a.large_files]
    # Those that wait leave their core to others. Where loader.workers=auto has measured, it has tried that.
    room = min(2 * a.most_workers + 8, math.floor(a.most_workers * (1 + a.wait_ms / max(a.cpu_ms, 1e-3))))
    more = min(room, math.ceil(1.15 * max(1, a.workers) * a.ceiling / max(a.images_per_second, 1e-9)))
    if more > a.workers and not a.alone and a.core_ms < 0.1 * a.wait_ms:
        ways.insert(0, f"try loader.workers={more}, as reading is mostly waiting, and distant storage serves many at a time")
    return "; else ".join(ways)


def _faster_decoding(account: Account) -> str:
    """What to try when decoding limits, the most effective first."""
    a, ways = account, [_less_decoding(account)]
    if not a.workers:
        ways.insert(0, "loader.workers=auto decodes beside the step")
    elif a.workers < a.most_workers and a.core_ms < 0.1 * a.cpu_ms:
        ways.insert(0, f"loader.workers can be raised, the cores are enough for {a.most_workers}")
    elif not a.on_gpu and a.workers == a.most_workers and a.wait > 0.5 and a.core_ms < 0.1 * a.cpu_ms:
        ways.insert(0, f"loader.workers={a.workers + 1} would use the step's core, which waits")
    return "; ".join(ways)


def _less_decoding(account: Account) -> str:
    """What takes work from the cores, the most effective first."""
    ways = []
    if account.decoder == "gpu":
        ways.append("loader.decoder=hybrid shares each batch with the CPU's cores")
    elif account.on_gpu and account.decoder not in ("hybrid", "none"):
        ways.append("loader.decoder=hybrid takes the GPU's JPEG engines, where it has them")
    if account.large_files:
        ways.append(SHRINK)
    return "; ".join(ways or ["the training needs more cores"])
