"""Reports a run: console, metrics.jsonl, TensorBoard, the GPU, the verdict and log.observers.

The loop in train.py trains, validates and saves, and calls the methods here.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from conf.errors import UserError
from conf.terminal import duration
from engine.checkpoint import file_name
from engine.compute import Compute
from engine.files import write_json
from engine.log.console import header, outcome, train_line, val_line
from engine.log.observer import Observer, named_observers
from engine.log.sheet import draw_batch
from engine.log.telemetry import GpuMonitor, memory_figures
from engine.log.tracker import TIME, Tracker
from engine.log.verdict import SHORT_EPOCH, SHORT_RUN, judge
from engine.metrics import BestBy, Meter, value_functions
from engine.run import Run
from engine.schedule import Due, Schedule
from engine.state import TrainState, params_sha256
from engine.step_graph import FIRST_STEPS, StepGraph
from engine.stop_signal import StopSignal
from engine.validation import Validation
from pipeline.batch import Batch
from pipeline.clock import StepTimes, mean_of
from pipeline.feed import Feed


@dataclass
class RunLog:
    """Reports a run while the loop trains, from the first step to the last.

    It writes through the tracker, whose exit also closes the observers and the GPU monitor.
    """

    feed: Feed
    schedule: Schedule
    compute: Compute
    train_on_batch: StepGraph
    state: TrainState
    run: Run
    tracker: Tracker

    def __post_init__(self) -> None:
        self.world, self.config = self.run.world, self.run.config
        self.datasets = self.feed.datasets
        self.best_by = BestBy.of(self.config.train.best_by)
        self.meter = Meter(self.world)
        # The times of each row, and whether it is of the first steps of this start, which compile,
        # and of the first epoch, which reads cold files.
        self._times: list[tuple[StepTimes, tuple[bool, bool]]] = []
        self._judged = 0  # how many of these rows are of epochs that were judged
        self.row: dict[str, Any] = {}  # the newest row of training steps
        self._pause_began = 0.0  # time.monotonic() of the newest `pause`
        self._first_step = self.state.step
        self._cause = ""  # what limited the newest epoch that was judged
        self._observers: list[tuple[str, Observer]] = []
        self.world.on_rank_0(self._start_observers)
        self.monitor = self.tracker.enter_context(GpuMonitor(self.world.device))
        self.tracker.print(header(self.best_by))
        self._began = time.monotonic()
        self._line_due = self._began + 3  # of a line with the step, each second on a terminal
        # Of the first row. After a resume, less than half its steps would look like a changed loss.
        every, stop_step = self.schedule.log_every, self.schedule.stop_step
        self._first_row = min(stop_step, math.ceil(self._first_step / every + 0.5) * every)

    def _start_observers(self) -> None:
        for name, observer, parameters in named_observers(self.config):
            create = partial(observer, self, **parameters)
            started = self.tracker.guard(name, create, reraise=UserError)  # before the first step
            if started is not None:
                self._observers.append((name, started))
                self.tracker.callback(self.tracker.guard, name, started.close)

    def _notify(self, event: Callable[[Observer], Any]) -> dict[str, Any]:
        """Call a method of each observer; return what they add, all together."""
        added: dict[str, Any] = {}
        for name, observer in self._observers:
            added.update(self.tracker.guard(name, event, observer) or {})
        return added

    def begin_step(self, batch: Batch) -> None:
        """Note that all ranks have their batch, and call the observers; draw the first batch."""
        train = self.feed.train
        if self.run.is_first_start and batch.step == self._first_step:
            draw = partial(draw_batch, batch, train.format, self.datasets.classes)
            self.tracker.images(draw, batch.step + 1)
            train.clock.skip()
        self._notify(lambda observer: observer.begin_step(batch.step))
        train.clock.ranks_ready()

    def end_step(self, values: Mapping[str, Tensor], due: Due) -> dict[str, Any]:
        """Add the values of a step, float [] on the device; return the newest log row.

        One step after a row was due, waits for the step of that row, while the device runs this
        one. If an epoch ends or a checkpoint follows, a row that is due waits for its own step.
        """
        step = self.state.step
        self._report()  # an earlier step: its values arrived while this one was launched
        self.meter.add(values)
        if due.log and step >= self._first_row:
            self.meter.send(step)
        elif (now := time.monotonic()) >= self._line_due:
            self._line_due = now + 1
            steps = self.schedule.stop_step
            mean = (now - self._began) / (step - self._first_step)  # before the first row
            mean = self.row["seconds_left"] / (steps - self.row["step"]) if self.row else mean
            left = duration((steps - step) * mean)
            self.tracker.print(f"step {step:,} of {steps:,}, {left} left", end="\r")
        self._notify(lambda observer: observer.end_step(step))
        if due.epoch or due.save:
            self.end_interval()
        if due.epoch:
            self._judge_epoch()
        return self.row

    def end_interval(self) -> dict[str, Any]:
        """Wait for the row that is due, unless a signal came before it; return the newest one."""
        self.feed.train.clock.end_step()
        self._report()
        return self.row

    def _judge_epoch(self) -> None:
        with self.pause():
            rows = [times for times, (starting, _) in self._times[self._judged :] if not starting]
            lines = judge(rows, SHORT_EPOCH, self.world, self.feed)
            self._judged = len(self._times)
            if lines:  # a killed run leaves this file instead of the verdict in summary.json
                cause, before = lines[0].partition(":")[0], self._cause
                # Not in each epoch of a long run, and not in the last one: `finish` prints it.
                if cause != before and self.state.step < self.schedule.stop_step:
                    self.tracker.print(*(f"verdict   {line}" for line in lines))
                self._cause = cause
                epoch = round(self.schedule.epoch(self.state.step), 4)
                self.tracker.record("verdict.json", {"epoch": epoch, "verdict": lines})

    @contextmanager
    def pause(self, doing: str = "") -> Iterator[None]:
        """Leave the block out of images/s and of the time of a step."""
        self._pause_began = time.monotonic()
        if doing:
            self.tracker.print(doing, end="\r")
        with self.feed.train.clock.pause():
            yield

    def validated(self, row: dict[str, Any], result: Validation, *, best: bool) -> None:
        """Report a validation. `row`: the values of its result, and those of the raw model."""
        seconds = time.monotonic() - self._pause_began
        row = row | {"split": "val", "images": result.images, "seconds": seconds}
        names, epochs = value_functions(result.rows), self.config.train.epochs
        self.tracker.print(val_line(row, names, self.best_by, epochs, best=best))
        self._write(row | self._notify(lambda observer: observer.validated(row, result.rows)))

    def _report(self) -> None:
        """Write the row of an interval of steps, if one was sent and not yet read."""
        interval = self.meter.read()
        if interval is None:
            return
        step, steps, values = interval
        schedule, pool = self.schedule, self.feed.pool
        before = step - steps
        first_steps = FIRST_STEPS if self.world.device.type == "cuda" else 1
        skip = max(0, self._first_step + first_steps - before)
        times = self.feed.step_times(steps, skip=skip)
        assert times is not None, "every step of an interval has been ended"
        refused = self.train_on_batch.disabled_reason or ""
        times = times._replace(graph_refused=refused, slowdowns=self.monitor.slowdowns())
        self._times.append((times, (skip >= steps, before * schedule.batch_size < schedule.images)))
        row = train_row(step, values, times, schedule, self.compute)
        row |= self.monitor.read() | memory_figures(pool.pids, self.world.device)
        self._write(row)
        if len(self._times) % 40 == 0:  # a terminal has fewer lines
            self.tracker.print(header(self.best_by))
        self.tracker.print(train_line(row, values, self.best_by, self.config.train.epochs))
        self.row, self._line_due = row, time.monotonic() + 1

    def _write(self, row: dict[str, Any]) -> None:
        self.tracker.row(row)
        self._notify(lambda observer: observer.logged(row))

    def finish(self, stop: StopSignal, started: float) -> dict[str, Any]:
        """Report the end of the run, once its last checkpoint is on disk; return the summary.

        `started`: time.monotonic() when `train` was called. A signal may still arrive during that
        checkpoint. Raises CheckpointError if it could not be written.
        """
        run, state, by = self.run, self.state, self.best_by.name
        run.wait()
        stop.poll()
        values = {key: value for key, value in state.last.items() if key not in ("step", "epoch")}
        best_step = int(state.best.get("step", 0))
        # Later rows tell more about the speed than those of the first steps and epoch.
        newest = self._times[-1][1] if self._times else (True, True)
        settled = [times for times, kind in self._times if kind == newest]
        unreadable = self.world.all_gather(set(self.feed.pool.unreadable))
        summary = {
            "status": "interrupted" if stop else "finished",
            "signal": stop.number,  # the exit status follows from it
            "step": state.step,
            "epoch": round(self.schedule.epoch(state.step), 4),
            **values,
            "values": [name for name in values if not name.endswith("_raw")],
            "best_by": self.config.train.best_by,
            f"best_{by}": state.best.get(by),
            "best_epoch": round(self.schedule.epoch(best_step), 4) if best_step else None,
            "best_checkpoint": file_name(best_step) if best_step else None,
            "history": state.history,
            "params_sha256": params_sha256(state.model),
            "seconds": time.monotonic() - started,
            "seconds_to_first_step": self._began - started,
            "images_per_second": mean_of(settled).rate * self.world.size if settled else 0.0,
            "device": self.compute.name,
            "made_by": run.facts["made_by"],
            "workers": self.feed.pool.active,
            "verdict": judge([] if newest[0] else settled, SHORT_RUN, self.world, self.feed),
            "unreadable_images": len(set[int]().union(*unreadable)),
        }
        summary |= self._notify(lambda observer: observer.finish(summary))
        if self.world.is_main:
            write_json(run.path / "summary.json", summary)
        resumes = self.config.checkpoint.resume != "never"
        self.tracker.print(*outcome(run.path, summary, resumes=resumes))
        return summary


def train_row(
    step: int, values: dict[str, float], times: StepTimes, schedule: Schedule, compute: Compute
) -> dict[str, Any]:
    """Return the log row up to a step, without the figures of the GPU and the memory."""
    rate = times.rate * schedule.ranks
    row = {
        "step": step,
        "epoch": schedule.epoch(step),
        "split": "train",
        **values,
        "lr": schedule.lr(step - 1),
        "images_per_second": rate,
        **{name: getattr(times, name.removesuffix("_fraction")) for name in TIME},
        "seconds_left": (schedule.stop_step - step) * schedule.batch_size / rate,
    }
    if schedule.ranks == 1:
        del row["ranks_wait_fraction"]
    if peak := compute.peak_rate():
        row["mfu"] = rate / (peak * schedule.ranks)
    return row
