"""Reports a run: console, metrics.jsonl, TensorBoard, the GPU, the verdict and log.observers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from conf.errors import UserError
from engine.checkpoint import file_name
from engine.compute import Compute, device_name
from engine.files import write_json
from engine.log import console
from engine.log.observer import Observer, named_observers
from engine.log.telemetry import GpuMonitor, memory_figures
from engine.log.tracker import TIME, Tracker
from engine.log.verdict import SHORT_EPOCH, SHORT_RUN, judge
from engine.meter import Interval, Meter
from engine.metrics import Metrics
from engine.run import Parts, Run
from engine.schedule import Due, Schedule
from engine.state import TrainState, params_sha256
from engine.step_graph import FIRST_STEPS, StepGraph
from engine.stop_signal import StopSignal
from engine.validation import Validation
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed
from pipeline.feed.step_times import StepTimes, mean_of

HEADER_ROWS = 40  # the columns are named again after so many rows: a terminal has fewer lines


@contextmanager
def open_log(parts: Parts, feed: Feed, step: StepGraph, run: Run) -> Iterator["RunLog"]:
    """Print the columns and start the observers; close all outputs on exit. Collective."""
    folder = run.path if run.world.is_main else None
    with Tracker(folder, run.config, parts.state) as tracker:
        tracker.print(f"loader    workers={feed.pool.active} decoder={feed.decoder_name}")
        yield RunLog(
            feed, parts.schedule, parts.compute, step, parts.state, run, tracker, parts.metrics
        )


@dataclass
class RunLog:
    """Reports a run through the tracker, whose exit closes observers and GPU monitor, too."""

    feed: Feed
    schedule: Schedule
    compute: Compute
    train_on_batch: StepGraph
    state: TrainState
    run: Run
    tracker: Tracker
    metrics: Metrics

    def __post_init__(self) -> None:
        self.world = self.run.world
        self.config = self.run.config
        self.path = self.run.path
        self.datasets = self.feed.datasets
        self.meter = Meter(self.world, self.feed.train.clock)
        self.row: dict[str, Any] = {}  # the newest row of training steps
        self.timed_rows: list[StepTimes] = []  # of all log rows of this start
        self._judged = 0  # how many of these rows are of epochs that were judged
        self._cause = ""  # what limited the newest epoch that was judged
        self._pause_began = 0.0  # time.monotonic() of the newest `pause`
        self._first_step = self.state.step
        self._observers: list[tuple[str, Observer]] = []
        self.tracker.callback(self._observers.clear)  # else they keep this object and the run alive
        self.world.on_rank_0(self._start_observers)
        self.monitor = self.tracker.enter_context(GpuMonitor(self.world.device))
        self.tracker.print(console.header(self.metrics))
        self._began = time.monotonic()
        # After a resume, less than half the steps of a row would look like a changed loss.
        every = self.schedule.log_every
        first_row = every * math.ceil(self._first_step / every + 0.5)
        self._first_row = min(self.schedule.stop_step, first_row)
        steps = math.ceil(self.schedule.steps_per_epoch)
        done = int(self._first_step % self.schedule.steps_per_epoch)
        bar = console.epoch_bar(steps=steps, done=done, shown=self.world.is_main)
        self._bar = self.tracker.enter_context(bar)

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
            values = self.tracker.guard(name, event, observer)
            if values:
                added.update(values)
        return added

    def begin_step(self, batch: Batch) -> None:
        """Call the observers, then note that all ranks have their batch.

        So the time of the observers is not part of the step.
        """
        self._notify(lambda observer: observer.begin_step(batch))
        self.feed.train.clock.ranks_ready()

    def end_step(self, values: Mapping[str, Tensor], due: Due) -> dict[str, Any]:
        """Add the values of a step, float [] on the device; return the newest log row. Collective.

        One step after a row was due, waits for the step of that row, while the device runs this
        one. If an epoch ends or a checkpoint follows, a row that is due waits for its own step.
        """
        step = self.state.step
        self._report()  # an earlier step: its values arrived while this one was launched
        self.meter.add(values)
        if due.log and step >= self._first_row:
            self.meter.send(step)
        self._notify(lambda observer: observer.end_step(step))
        self._bar.update()
        if due.epoch or due.save:
            self.end_interval()
        if due.epoch:
            self._judge_epoch()
            self._bar.reset()
        return self.row

    def end_interval(self) -> dict[str, Any]:
        """Report the interval that was sent, if there is one; return the newest row.

        Waits for the last step of the interval.
        """
        self.feed.train.clock.end_step()
        self._report()
        return self.row

    def _judge_epoch(self) -> None:
        """Print what limited the epoch, if it is something new; `finish` does it at the end."""
        with self.pause():
            newest = self.timed_rows[self._judged :]
            self._judged = len(self.timed_rows)
            rows = [row for row in newest if not row.starting]
            verdict = judge(rows, SHORT_EPOCH, self.world, self.feed)
            if not verdict.cause:
                return
            # A killed run leaves this file instead of the verdict in summary.json.
            epoch = round(self.schedule.epoch(self.state.step), 4)
            self.tracker.write_json("verdict.json", {"epoch": epoch, "verdict": verdict.sentences})
            is_last = self.state.step == self.schedule.stop_step
            if verdict.cause != self._cause and not is_last:
                self.tracker.print(*console.verdict_lines(verdict.sentences))
            self._cause = verdict.cause

    @contextmanager
    def pause(self, doing: str = "epoch") -> Iterator[None]:
        """Leave the block out of images/s and of the time of a step; the bar says what it does."""
        self._pause_began = time.monotonic()
        with self.feed.train.clock.pause():
            self._bar.set_description(doing)
            yield
            self._bar.set_description("epoch")

    def validated(self, row: dict[str, Any], result: Validation, *, best: bool) -> None:
        """Report a validation. `row`: the values of its result, and those of the raw model."""
        self.world.on_rank_0(self.run.require_own_folder)  # observers write files
        seconds = time.monotonic() - self._pause_began
        row = row | {"split": "val", "images": result.images, "seconds": seconds}
        names = self.metrics.computations(result.rows)
        epochs = self.config.train.epochs
        self.tracker.print(console.val_line(row, names, self.metrics, epochs, best=best))
        added = self._notify(lambda observer: observer.validated(row, result.rows))
        self._write(row | added)

    def _report(self) -> None:
        """Write the row of an interval of steps, if one was sent and not yet read."""
        interval = self.meter.read()
        if interval is None:
            return
        times = self._add_timed_row(interval)
        row = train_row(interval.step, interval.means, times, self.schedule)
        row |= self.monitor.read()
        row |= memory_figures(self.feed.pool.pids, self.world.device)
        self._write(row)
        if len(self.timed_rows) % HEADER_ROWS == 0:
            self.tracker.print(console.header(self.metrics))
        line = console.train_line(row, interval.means, self.metrics, self.config.train.epochs)
        self.tracker.print(line)
        self.row = row

    def _add_timed_row(self, interval: Interval) -> StepTimes:
        """Note and return the mean times of an interval, without the first steps of this start."""
        before = interval.step - interval.steps
        first_steps = FIRST_STEPS if self.world.device.type == "cuda" else 1
        skip = max(0, self._first_step + first_steps - before)
        times = self.feed.step_times(interval.steps, skip=skip)
        times = times._replace(
            graph_refused=self.train_on_batch.disabled_reason,
            slowed=self.monitor.slowed(),
            starting=skip >= interval.steps,
        )
        self.timed_rows.append(times)
        return times

    def _write(self, row: dict[str, Any]) -> None:
        self.tracker.write_row(row)
        self._notify(lambda observer: observer.logged(row))

    def finish(self, stop: StopSignal, started: float) -> dict[str, Any]:
        """Report the end once the last checkpoint is on disk; return the summary. Collective.

        `started`: time.monotonic() when `train` was called. A signal may still arrive during that
        checkpoint. Raises RunError if it could not be written.
        """
        self.run.wait()
        stop.poll()
        self._bar.close()
        of_ranks = self.world.all_gather(self.feed.pool.unreadable)
        unreadable = set[int]().union(*of_ranks)
        summary = {
            "status": "interrupted" if stop else "finished",
            "signal": stop.number,  # the exit status follows from it
            "step": self.state.step,
            "epoch": round(self.schedule.epoch(self.state.step), 4),
            **self._newest_values(),
            **self._best_values(),
            "history": self.state.history,
            "params_sha256": params_sha256(self.state.model),
            "seconds": time.monotonic() - started,
            "seconds_to_first_step": self._began - started,
            **self._speed(),
            "device": device_name(self.compute.device),
            "made_by": self.run.metadata["made_by"],
            "training_images": self.run.metadata["identity"]["data.train"],
            "validation_images": self.run.metadata["identity"]["data.val"],
            "workers": self.feed.pool.active,
            "unreadable_images": len(unreadable),  # training images replaced on any rank
        }
        summary |= self._notify(lambda observer: observer.finish(summary))
        if self.world.is_main:
            write_json(self.path / "summary.json", summary)
        resumes = self.config.checkpoint.resume != "never"
        self.tracker.print(*console.outcome(self.path, summary, self.metrics, resumes=resumes))
        return summary

    def _newest_values(self) -> dict[str, Any]:
        """Return the values of the last validation, their units, and the names without `_raw`."""
        values = dict(self.state.last_validation)
        step = values.pop("step", None)
        values.pop("epoch", None)
        names = [name for name in values if not name.endswith("_raw")]
        units = {name: self.metrics[name.removesuffix("_raw")].unit for name in values}
        return {**values, "values": names, "units": units, "validated_step": step}

    def _best_values(self) -> dict[str, Any]:
        """Return the best validation so far, with None where there is none."""
        name = self.metrics.best_by
        key = f"best_{name}"
        values: dict[str, Any] = {"best_by": self.config.train.best_by}
        values |= {key: None, "best_epoch": None, "best_checkpoint": None}
        best = self.state.best_validation
        if best:
            values[key] = best.get(name)
            values["best_epoch"] = round(best["epoch"], 4)
            values["best_checkpoint"] = file_name(int(best["step"]))
        return values

    def _speed(self) -> dict[str, Any]:
        """Return images/s and the verdict of the rows after the first steps. Collective."""
        settled = [row for row in self.timed_rows if not row.starting]
        rate = 0.0
        if settled:
            rate = mean_of(settled).rate * self.world.size
        verdict = judge(settled, SHORT_RUN, self.world, self.feed)
        return {"images_per_second": rate, "verdict": list(verdict.sentences)}


def train_row(
    step: int, values: dict[str, float], times: StepTimes, schedule: Schedule
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
        "workers": times.workers,
    }
    for name in TIME:
        row[name] = getattr(times, name.removesuffix("_fraction"))
    row["seconds_left"] = (schedule.stop_step - step) * schedule.batch_size / rate
    if schedule.ranks == 1:  # it would be the time of the observers
        del row["ranks_wait_fraction"]
    return row
