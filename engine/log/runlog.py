"""Report a run: console, metrics.jsonl, TensorBoard, GPU figures, verdict and log.observers."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from engine.checkpoint import file_name
from engine.compute import device_name
from engine.files import write_json
from engine.log import console
from engine.log.observer import ObservedRun, Observers
from engine.log.telemetry import GpuMonitor, memory_figures
from engine.log.tracker import TIME, Tracker
from engine.log.verdict import SHORT_EPOCH, SHORT_RUN, verdict_of
from engine.meter import Meter
from engine.run import Parts, Run
from engine.schedule import Due, Schedule
from engine.state import params_sha256
from engine.step_graph import FIRST_STEPS, StepGraph
from engine.stop_signal import StopSignal
from engine.validation import Validation
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed
from pipeline.feed.step_times import StepTimes, mean_of

HEADER_ROWS = 40  # rows between two headers, because a terminal has fewer lines


@contextmanager
def open_log(parts: Parts, feed: Feed, step: StepGraph, run: Run) -> Iterator["RunLog"]:
    """Print the table's header and start the observers; close all outputs on exit. Collective."""
    with Tracker(run.path, run.config, parts.state, writes=run.world.is_main) as tracker:
        tracker.print(f"loader    workers={feed.pool.active} decoder={feed.decoder_name}")
        try:
            yield RunLog(parts, feed, step, run, tracker)
        except SystemExit:  # called by an observer; other ranks would not save
            if run.world.size == 1 and parts.state.step > run.last_saved_step:
                run.save(parts.state)
                run.wait()
            raise


class RunLog(ObservedRun):
    """Reports a run through a tracker, whose exit also closes the observers."""

    def __init__(
        self, parts: Parts, feed: Feed, step: StepGraph, run: Run, tracker: Tracker
    ) -> None:
        super().__init__(parts, feed, run, tracker)
        self._run = run
        self._step = step
        self._meter = Meter(self.world, feed.train.clock)
        self._times: list[StepTimes] = []  # times of each training row since launch
        self._epoch_start = 0  # index of the epoch's first row in _times
        self._cause = ""  # cause in the latest epoch's verdict
        self._pause_start = 0.0  # time.monotonic() of the latest `pause`
        self._observers = Observers(tracker)
        self.world.on_rank_0(lambda: self._observers.start(self))
        self._monitor = GpuMonitor(self.world.device)
        tracker.print(console.header(self.metrics))
        self._loop_start = time.monotonic()
        done = self.state.step
        # The first steps are not timed, because they compile.
        self._warm_step = done + (FIRST_STEPS if self.world.device.type == "cuda" else 1)
        # After a resume, a row of less than half its steps would look like a change of the loss.
        every = self.schedule.log_every
        self._first_row = min(self.schedule.stop_step, every * math.ceil(done / every + 0.5))
        bar = console.epoch_bar(self.schedule.steps_per_epoch, done, shown=self.world.is_main)
        self._bar = tracker.enter_context(bar)

    def begin_step(self, batch: Batch) -> None:
        """Call the observers, whose time is not part of the step's time."""
        self._observers.notify(lambda observer: observer.begin_step(batch))
        self.feed.train.clock.ranks_ready()  # all ranks have their batches

    def end_step(self, values: Mapping[str, Tensor], due: Due) -> dict[str, Any]:
        """Add a step's values, float [] on the device; return the latest log row. Collective.

        One step after a row is due, waits for the row's last step while the device runs this one.
        If an epoch ends or a checkpoint follows, waits for this step and writes the due row.
        """
        step = self.state.step
        self._report()  # values of an earlier step, which arrived while this one was launched
        self._meter.add(values)
        if due.log and step >= self._first_row:
            self._meter.send(step)
        self._observers.notify(lambda observer: observer.end_step(step))
        self._bar.update()
        if due.epoch or due.save:
            self.end_interval()
        if due.epoch:
            self._judge_epoch()
            self._bar.reset()
        return self.row

    def end_interval(self) -> dict[str, Any]:
        """Wait for the interval that was sent, if any, and report it; return the latest row."""
        self.feed.train.clock.end_step()
        self._report()
        return self.row

    def _judge_epoch(self) -> None:
        """Print the epoch's verdict if its cause has changed; `finish` prints the last verdict."""
        rows = self._times[self._epoch_start :]
        self._epoch_start = len(self._times)
        with self.pause():
            verdict = self._verdict(rows, SHORT_EPOCH)
        if not verdict:
            return
        # A killed run has this file, but no verdict in summary.json.
        epoch = round(self.schedule.epoch(self.state.step), 4)
        self.tracker.write_json("verdict.json", {"epoch": epoch, "verdict": verdict})
        cause = verdict[0].partition(":")[0]
        if cause != self._cause and self.state.step < self.schedule.stop_step:
            self.tracker.print(*console.verdict_lines(verdict))
        self._cause = cause

    def _verdict(self, rows: list[StepTimes], shortest: float) -> list[str]:
        """Return the verdict on these rows, over all ranks. Collective."""
        ranks = self.world.all_gather(mean_of(rows))
        return verdict_of(ranks, shortest, self.feed, self._step.disabled_reason)

    @contextmanager
    def pause(self, doing: str = "epoch") -> Iterator[None]:
        """Exclude the `with` block from images/s and step times; show `doing` in the bar."""
        self._pause_start = time.monotonic()
        with self.feed.train.clock.pause():
            self._bar.set_description(doing)
            yield
            self._bar.set_description("epoch")

    def validated(self, row: dict[str, Any], result: Validation, *, best: bool) -> None:
        """Report a validation. `row`: values of the result and of the raw model."""
        self.world.on_rank_0(self._run.check_lock)  # observers write files
        seconds = time.monotonic() - self._pause_start
        row = row | {"split": "val", "images": result.images, "seconds": seconds}
        names = self.metrics.computations(result.rows)
        epochs = self.config.train.epochs
        self.tracker.print(console.val_line(row, names, self.metrics, epochs, best=best))
        self._write(self._observers.extend(row, lambda each: each.validated(row, result.rows)))

    def _report(self) -> None:
        """Write a row for the interval that was sent and not yet read, if any."""
        interval = self._meter.read()
        if interval is None:
            return
        skip = max(0, self._warm_step - (interval.step - interval.steps))
        gpu = self._monitor.sample()
        times = self.feed.step_times(interval.steps, skip=skip)
        times = times._replace(throttled_fraction=self._monitor.throttled)
        # Compiling steps count as 0 seconds, which have no weight in a mean.
        self._times.append(StepTimes() if skip >= interval.steps else times)
        row = train_row(interval.step, interval.means, times, self.schedule, self.feed.pool.active)
        row |= gpu | memory_figures(self.feed.pool.pids, self.world.device)
        self._write(row)
        if len(self._times) % HEADER_ROWS == 0:
            self.tracker.print(console.header(self.metrics))
        epochs = self.config.train.epochs
        self.tracker.print(console.train_line(row, interval.means, self.metrics, epochs))
        self.row = row

    def _write(self, row: dict[str, Any]) -> None:
        self.tracker.write_row(row)
        self._observers.notify(lambda observer: observer.logged(dict(row)))

    def finish(self, stop: StopSignal, started: float) -> dict[str, Any]:
        """Write the summary once the last checkpoint is on disk, and return it. Collective.

        `started`: time.monotonic() when `train` was called. A signal may still arrive while the
        checkpoint is written. Raises RunError if that fails.
        """
        self._run.wait()
        stop.poll()
        self._bar.close()
        per_rank = self.world.all_gather(self.feed.pool.unreadable)
        unreadable = set[int]().union(*per_rank)
        summary = {
            "status": "interrupted" if stop.number else "finished",
            "signal": stop.number,  # determines the exit status
            "step": self.state.step,
            "epoch": round(self.schedule.epoch(self.state.step), 4),
            "best_by": self.config.train.best_by,
            **self._validation_results(),
            "history": self.state.history,
            "params_sha256": params_sha256(self.state.model),
            "seconds": time.monotonic() - started,
            "seconds_to_first_step": self._loop_start - started,
            "images_per_second": mean_of(self._times).images_per_second * self.world.size,
            "verdict": self._verdict(self._times, SHORT_RUN),
            "device": device_name(self.compute.device),
            "made_by": self._run.metadata["made_by"],
            "training_images": self._run.metadata["identity"]["data.train"],
            "validation_images": self._run.metadata["identity"]["data.val"],
            "workers": self.feed.pool.active,
            "unreadable_images": len(unreadable),  # number of training images replaced on any rank
        }
        summary = self._observers.extend(summary, lambda each: each.finish(summary))
        path = self.path / "summary.json"
        self.tracker.guard(path.name, write_json, path, summary, reraise=Exception)
        resumes = self.config.checkpoint.resume != "never"
        self.tracker.print(*console.outcome(self.path, summary, self.metrics, resumes=resumes))
        return summary

    def _validation_results(self) -> dict[str, Any]:
        """Return the latest validation's values, and the best one's value, epoch and checkpoint.

        `values` lists their names without `_raw`. A result without a validation is None.
        """
        values = dict(self.state.last_validation)
        step = values.pop("step", None)
        values.pop("epoch", None)
        best_name = f"best_{self.metrics.best_by}"
        results: dict[str, Any] = {
            **values,
            "values": [name for name in values if not name.endswith("_raw")],
            "units": {name: self.metrics[name.removesuffix("_raw")].unit for name in values},
            "validated_step": step,
            best_name: None,
            "best_epoch": None,
            "best_checkpoint": None,
        }
        best = self.state.best_validation
        if best:
            results[best_name] = best.get(self.metrics.best_by)
            results["best_epoch"] = round(best["epoch"], 4)
            results["best_checkpoint"] = file_name(int(best["step"]))
        return results


def train_row(
    step: int, values: dict[str, float], times: StepTimes, schedule: Schedule, workers: int
) -> dict[str, Any]:
    """Return the log row of the steps up to `step`, without GPU and memory figures."""
    rate = times.images_per_second * schedule.ranks
    row = {
        "step": step,
        "epoch": schedule.epoch(step),
        "split": "train",
        **values,
        "lr": schedule.lr(step - 1),
        "images_per_second": rate,
        "workers": workers,
        **{name: getattr(times, name) for name in TIME},
        "seconds_left": (schedule.stop_step - step) * schedule.batch_size / rate,
    }
    if schedule.ranks == 1:  # would be the observers' time
        del row["ranks_wait_fraction"]
    return row
