"""What is measured while a run trains: times, GPU, memory, unreadable images, and the verdict."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor

from engine.compute import peak_rate
from engine.distributed import World
from engine.log.bad_files import BadFiles
from engine.log.memory import Leaks, allocator_figures, host_figures, memory_now
from engine.log.meters import Interval
from engine.log.telemetry import GpuMonitor, spread
from engine.log.times import RunTimes
from engine.plan import Plan
from engine.state import TrainState
from pipeline.clock import StepClock
from pipeline.feed import Feed


class Measurements(AbstractContextManager["Measurements"]):
    """Measures from the first to the last step of a start.

    Args:
        verdict: judges the speed, see engine/tune/verdict.py; None without that room.
        bad_files: the training images that cannot be read.
        began: time.monotonic() when the program began.

    Attributes:
        times: where the time goes.
        monitor: the GPU's metrics.
    """

    def __init__(
        self,
        feed: Feed,
        verdict: Any,
        plan: Plan,
        state: TrainState,
        world: World,
        bad_files: BadFiles,
        *,
        began: float,
    ) -> None:
        self.feed, self.plan, self.state, self.world = feed, plan, state, world
        self.bad_files = bad_files
        self.times = RunTimes(
            state.spent,
            batch_size=plan.batch_size,
            num_ranks=world.size,
            train_images=plan.train_images,
            step=state.step,
            began=began,
        )
        self.monitor = GpuMonitor(world.device)
        self._verdict, self._leaks = verdict, Leaks()
        self._open = ExitStack()
        self._open.enter_context(self.monitor)
        if world.size > 1:
            self._open.enter_context(step_points(state, feed.train.clock))

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def row(self, interval: Interval) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the log row of an interval, and figures by TensorBoard tag."""
        plan, step = self.plan, interval.step
        timing = self.feed.train.clock.timing(interval.steps)
        assert timing is not None, "every step of an interval has been ended"
        times = self.times.add(timing, step, self._peak_rate(plan.flops(step - 1)))
        if self._verdict is not None:
            self._verdict.add(timing)
        row = {
            "step": step,
            "epoch": plan.epoch(step),
            "split": "train",
            **interval.values,
            "lr": interval.lr,
            **times,
            "seconds_left": (plan.stop_step - step) * plan.batch_size / times["images_per_second"],
        }
        figures = {
            **self.monitor.read(),
            **allocator_figures(self.world.device),
            **host_figures(self.feed.train.loader.pool.pids),
        }
        if self.bad_files.limit is not None:
            figures["data/unreadable_images"] = self.bad_files.write()
        return row, figures

    def end_epoch(self) -> tuple[list[str], str, dict[str, float]]:
        """Return the verdict of an epoch, why the GPU was slow, and figures over the ranks.

        Collective.
        """
        workers = self.feed.train.loader.pool.pids
        setting = (*workers, self.plan.size(self.state.step - 1))
        self._leaks.note(memory_now(workers, self.world.device), setting)
        slow = self.monitor.slowdowns("epoch")
        lines = self.verdict("epoch", slow)
        if self.world.size == 1:
            return lines, slow, {}
        return lines, slow, spread(self.world.all_gather(self.monitor.read("epoch")))

    def verdict(self, period: Literal["epoch", "run"], slowdowns: str) -> list[str]:
        """Return what limits the speed, and which memory grows. Collective.

        Args:
            slowdowns: why this rank's GPU ran below its maximum clock.
        """
        sentences: list[str] = []
        if self._verdict is not None:
            sentences = self._verdict.sentences(period, slowdowns=slowdowns)
        leaks = enumerate(self.world.all_gather(self._leaks.sentences()))
        rank, found = next((one for one in leaks if one[1]), (0, []))
        where = f"on rank {rank}, " if self.world.size > 1 else ""
        return sentences + [f"{where}{sentence}" for sentence in found]

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says about speed and time. Collective."""
        speed = self.times.speed()
        peak = self._peak_rate(self.plan.mean_flops(self.state.step))
        return {
            **speed,
            **self.times.balance(),
            "mfu": speed["images_per_second"] / peak if peak else None,
            "unreadable_images": len(self.bad_files.listed),
            "workers": self.feed.train.loader.pool.active,
            "verdict": self.verdict("run", self.monitor.slowdowns("run")),
        }

    def _peak_rate(self, flops_per_image: int) -> float | None:
        return peak_rate(
            self.plan.device,
            precision=self.plan.precision,
            flops_per_image=flops_per_image,
            ranks=self.plan.world_size,
        )


@contextmanager
def step_points(state: TrainState, clock: StepClock) -> Iterator[None]:
    """In each step of the `with` block, mark when gradients have been computed and averaged.

    A backward pass ends with the last gradient; the update follows the averaging. Only the last
    gradient is marked: a CUDA graph would record an event for each of hundreds. A step that leaves
    out a parameter is not marked.
    """
    parameters = [each for each in state.model.parameters() if each.requires_grad]
    done = 0

    def computed(_: Tensor) -> None:
        nonlocal done
        done += 1
        if done % len(parameters) == 0:  # once for each micro-batch
            clock.mark("computed")

    def averaged(*_: object) -> None:
        nonlocal done
        done = 0
        clock.mark("averaged")

    hooks = [
        *(each.register_post_accumulate_grad_hook(computed) for each in parameters),
        state.optimizer.register_step_pre_hook(averaged),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
