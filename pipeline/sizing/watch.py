"""autotune.online: the number of workers follows what the epochs show."""

from statistics import median

from pipeline.loader import WorkerPool
from pipeline.sizing.autotune import ENOUGH, PAYS, supply_of


class Watch:
    """Looks at the waiting of each epoch and changes the number of workers, with hysteresis.

    More when the device waited; back, and no further attempts, when it then waits hardly less, or when the rate has not gained
    half of what less waiting should give: workers can slow the step. One fewer after two epochs in which nothing waited and the
    workers could have given half as much again; back, likewise, when the device then waits or the rate falls.

    Args:
        pool: whose number is changed.
        source: of the pool's sources the one whose waiting is watched: validation has the same workers.
        most: workers there is room for.
    """

    WAITS, IDLE, TOO_MANY = 0.05, 0.002, 1.5

    def __init__(self, pool: WorkerPool, source: int, most: int) -> None:
        self.pool, self.recent, self.most = pool, pool.recent[source], most
        self._waits: list[float] = []
        self._rates: list[float] = []
        self._before: tuple[int, float, float] | None = None  # workers, waiting and rate before the last change
        self._quiet, self._settled = 0, False

    def note(self, wait_fraction: float, images_per_second: float) -> None:
        """A log interval's figures, of this rank."""
        self._waits.append(wait_fraction)
        self._rates.append(images_per_second)

    def at_epoch_end(self) -> str | None:
        """Change the number if that may help; the sentence that says so."""
        waits, rates, self._waits, self._rates = self._waits, self._rates, [], []
        if not waits or self._settled or not self.recent:
            return None
        wait, rate, workers = median(waits), median(rates), len(self.pool.workers)
        before, self._before = self._before, None
        if before is not None:
            had, waited, reached = before
            worse = wait > max(ENOUGH, waited) or rate * PAYS < reached
            better = wait <= 0.75 * waited and rate * (1 - waited) >= reached * (1 - (wait + waited) / 2)
            if worse if workers < had else not better:
                self._settled = True
                than = "worse than" if workers < had else "no better than"
                found = f"waited {100 * wait:.1f} % of the epoch for input, at {rate:,.0f} img/s"
                return self._change(had, f"{found}, {than} with {had}")
        supply = workers * supply_of(self.recent, 0.0, workers).images_per_second
        self._quiet = self._quiet + 1 if wait < self.IDLE and supply > self.TOO_MANY * rate else 0
        if wait > self.WAITS and workers < self.most:
            self._before = workers, wait, rate
            return self._change(min(self.most, max(workers + 1, round(1.15 * workers))),
                                f"waited {100 * wait:.1f} % of the epoch for input")  # fmt: skip
        if self._quiet >= 2 and workers > 1:
            self._before, self._quiet = (workers, wait, rate), 0
            return self._change(workers - 1, f"the workers could give {supply:,.0f} img/s, {rate:,.0f} are taken")
        return None

    def _change(self, workers: int, reason: str) -> str:
        now = len(self.pool.workers)
        self.pool.resize(workers)
        return f"{reason}: {now} -> {workers} workers"
