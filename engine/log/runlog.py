"""Everything that observes a run: console, metrics.jsonl, TensorBoard, NVML, times, profiler.

It never trains, validates or saves: the loop in train.py does, and calls the methods here.
"""

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import models
from conf import strict_json
from conf.schema import RESULT, Config, in_effect, show, walk
from engine.bad_files import NAME as BAD_FILES
from engine.bad_files import BadFiles
from engine.compute import peak_rate
from engine.distributed import StopSignal, World
from engine.extras.expectation import Expectation, compare
from engine.extras.profiler import StepProfiler
from engine.log.leaks import Leaks, memory_now
from engine.log.ledger import Ledger, Period
from engine.log.meters import Interval, Meter
from engine.log.predictions import Predictions
from engine.log.telemetry import GpuMonitor, allocator_figures, host_figures, spread
from engine.log.tracker import Tracker, duration
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainingError, TrainState, diverged, params_sha256, state_bytes
from engine.step_graph import StepGraph
from engine.tune.prices import measure_gains
from engine.tune.verdict import Observation, describe_loader, setup_of
from pipeline.clock import StepClock
from pipeline.feed import Feed
from pipeline.prefetcher import Batch

# Without log rows, the host looks for non-finite gradients this often.
CHECK_STEPS = 50
SHOWN_IMAGES = 3  # of the batch of a step with non-finite gradients, in the message


class RunLog:
    """Reports a run while the loop trains.

    Args:
        plan, world, run: of this run.
        state: read for the reports; only `spent`, the seconds by kind, is modified.
        started: time.monotonic() when the program began.

    Attributes:
        finished: summary.json of an earlier start that finished this run; None while steps are
            left to train.
    """

    def __init__(
        self, plan: Plan, world: World, run: RunDirectory, state: TrainState, *, started: float
    ) -> None:
        self.plan, self.world, self.run, self.state = plan, world, run, state
        self._started = started
        finished = state.step >= plan.stop_step
        self.finished = run.finished_summary(state.step) if finished else None
        config = plan.config
        self.tracker = Tracker(
            run.path if world.is_main else None,
            start_step=state.step,
            total_steps=plan.stop_step,
            epochs=config.train.epochs,
            records=self.finished is None,
            trackers=config.log.trackers,
            values=_values(config),
        )
        self.say = self.tracker.say
        self.meter = Meter(world)
        folder = run.path / "profile" if world.is_main else None
        self.profiler = StepProfiler(config.profile.steps, folder, world.device, self.say)
        self.expectation = Expectation(
            config,
            classes=plan.num_classes,
            train_images=plan.train_images,
            val_images=plan.val_images,
            continues=bool(state.history),
        )
        self._first_step = self._last_step = state.step
        self._wants_images = run.is_first_start or plan.due(state.step).epoch
        self.leaks = Leaks()
        self.bad_files: BadFiles | None = None

    def __enter__(self) -> "RunLog":
        self.tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.tracker.__exit__(*error)

    # Before the first step

    def introduce(self, changes: Sequence[str], config_text: str) -> None:
        """Say what the run will do.

        Args:
            changes: keys that differ from the resumed checkpoint's config, each as a sentence.
            config_text: the config as YAML, for TensorBoard.
        """
        self.say(*self.plan.lines())
        resumed = ""
        if self.run.resumed is not None:
            name = self.run.resumed if self.run.is_first_start else self.run.resumed.name
            resumed = f", resumed from {name}"
        self.say(f"run      {self.run.path}{resumed}")
        self.say(*(f"history  {line}" for line in self.state.history))
        self.say(*(f"changed  {change}" for change in changes))
        if self.run.is_first_start and self.finished is None:
            plan = self.plan
            self.tracker.text("config", config_text)
            self.tracker.graph(
                lambda: models.build(
                    plan.config.model.name,
                    num_classes=plan.num_classes,
                    image_size=plan.image_size,
                    args=plan.config.model.args,
                ),
                image_size=plan.image_size,
                parameters=plan.parameters,
            )

    def already_finished(self) -> dict[str, Any]:
        """Say that an earlier start finished this run; return its summary."""
        assert self.finished is not None
        stopped_early = self.state.step < self.plan.schedule_steps
        more = "a larger train.max_steps to continue, " if stopped_early else ""
        self.say(
            f"this run is finished after {self.state.step:,} steps: give {more}another run.name to "
            "train again, or checkpoint.resume=never to start over in this directory"
        )
        self.tracker.outcome(self.finished, compiles=self.plan.compile != "off")
        return self.finished

    @contextmanager
    def watch(
        self, feed: Feed, step: StepGraph, stop: StopSignal, tuned: Observation | None
    ) -> Iterator[None]:
        """Observe the training steps of the `with` block, which take their batches from `feed`.

        Args:
            tuned: what `engine.tune.autotune.tune_loader` has returned.
        """
        self.feed, self._step, self._stop = feed, step, stop
        plan, data = self.plan, self.plan.config.data
        self.bad_files = BadFiles(
            feed.train.loader,
            self.world,
            self.run.path,
            self.tracker,
            limit=data.max_bad_fraction if data.on_error == "skip" else None,
        )
        self.ledger = Ledger(
            replace(setup_of(plan), decoder=feed.decoder),
            self.state.spent,
            train_images=plan.train_images,
            step=self.state.step,
            began=self._started,
            tuned=tuned,
            peak_rate=self._peak_rate(plan.flops(self.state.step)),
        )
        points = step_points(self.state, feed.train.clock) if self.world.size > 1 else nullcontext()
        with points, GpuMonitor(self.world.device) as self.monitor:
            try:
                yield
            finally:
                # After an error, other ranks may end while rank 0 still writes.
                self.world.set_section(None)
                self.profiler.close()
                self.tracker.flush()  # before the feed is closed: after a crash, that may hang

    # In the loop

    def begin_step(self, batch: Batch) -> None:
        """Start the profiler or write the images of the batch, if either is due."""
        self.world.set_section(f"step {batch.step + 1}")
        if self.profiler.starts(batch.step):
            with self.ledger.lost("profile"):
                self.profiler.start(batch.step)
            self.feed.train.clock.restart_step()
        if self._wants_images:
            self._wants_images = False
            train = self.feed.train
            self.tracker.images(
                "train/images",
                batch.images,
                scale=train.format.scale,
                shift=train.format.shift,
                step=batch.step + 1,
            )
        self.feed.train.clock.mark("ready")

    def end_step(self, values: Mapping[str, Tensor], *, send: bool) -> None:
        """Add the values of a step. Nothing here waits for the GPU.

        Args:
            values: named means of the step, float [] on the device.
            send: this step is the last one of a log row.
        """
        step, divergence = self.state.step, self.state.divergence
        self._report()  # of an earlier step: its values have arrived while this one was launched
        self.meter.add(values)
        self._last_step = step
        if send:
            self._send(step)
        if send or step % CHECK_STEPS == 0:
            divergence.send(step)
        self.tracker.progress(step)
        if step == self._first_step + 1:
            self.ledger.started()
        if self.profiler.ends(step) or (self.profiler.running and step == self.plan.stop_step):
            with self.pause("profile"):
                self.profiler.stop(step)

    def _send(self, step: int) -> None:
        """End the interval of a log row with step `step`."""
        self.meter.send(step, self.plan.curve.at(step - 1))

    def end_early(self) -> None:
        """Send the steps since the last log row: a signal has ended training between two rows."""
        if self.meter.steps:
            self._send(self.state.step)

    def failed(self) -> bool:
        """Whether this rank cannot continue; `save` in train.py or `finish` raises the error."""
        return self.run.failed() or (self.bad_files is not None and self.bad_files.too_many)

    def end_epoch(self) -> None:
        """Report the verdict of the epoch and the GPU's slowdowns."""
        step = self.state.step
        self._wants_images = True
        with self._paused():
            workers = self.feed.train.loader.pool.pids
            setting = (*workers, self.plan.size(step - 1))
            self.leaks.note(memory_now(workers, self.world.device), setting)
            slow = self._slowdowns("epoch")
            lines = self._verdict("epoch", slow)
            self.say(*(f"verdict  {line}" for line in lines))
            if lines:  # a killed run leaves this file instead of the verdict in summary.json
                epoch = round(self.plan.epoch(step), 4)
                self.tracker.record("verdict.json", {"epoch": epoch, "verdict": lines})
            if self.world.size > 1:
                figures = spread(self.world.all_gather(self.monitor.read("epoch")))
                self.tracker.figures(figures, step)
            if slow:
                self.say(f"gpu      runs below its maximum clock: {slow}")

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Count the block as `kind` ("validation", "checkpoint" or "profile"), not as training.

        It counts neither in images/s nor in the time of a step.
        """
        self.world.set_section(kind)
        with self._paused(), self.ledger.lost(kind):
            yield
            if kind == "checkpoint" and self.bad_files is not None:
                self.bad_files.share()  # later starts do not repeat the steps before it

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.feed.train.end_step()
        self.state.divergence.send(self.state.step)
        self._report()  # waits for this step
        with self.feed.train.pause():
            yield

    def validated(
        self,
        row: dict[str, Any],
        each: Sequence[Mapping[str, Tensor]],
        *,
        best: bool,
        previous: Mapping[str, float],
    ) -> None:
        """Report a validation, and warn if the run falls behind its recipe.

        Args:
            each: what `engine.validation.evaluate` has collected on this rank.
            previous: the row of the validation before; empty if there was none.
        """
        loader = self.feed.val.loader
        dataset = loader.pool.sources[loader.source].dataset
        after, before = (
            (self._ended(int(r.get("step", 0))), r.get("top1", 0.0)) for r in (row, previous)
        )
        self.tracker.val_row(row | self.expectation.columns(after[0]), best=best)
        if warning := self.expectation.warning(after, before):
            self.say(f"warning  {warning}")
        self.tracker.predictions(
            Predictions.gather(each, self.world),
            self.plan.classes,
            load=lambda index: torch.from_numpy(dataset.load(0, index)[0]),
            step=self.state.step,
        )

    def _ended(self, step: int) -> int | None:
        """Return the epoch that ended with this step, 1, 2, ..., or None."""
        return self.plan.epochs_ended(step) if self.plan.due(step).epoch else None

    def _report(self) -> None:
        """Write a log row if an interval of steps was sent and not yet reported.

        Raises:
            TrainingError: a gradient or the mean loss is not finite.
        """
        interval, found = self.meter.read(), self.state.divergence.read()
        if interval is None and found is not None and self.meter.steps:
            self._send(self._last_step)  # the steps since the last row
            interval = self.meter.read()
        if interval is not None:
            self._train_row(interval)
        if found is not None:
            raise self._diverged(*found)
        if interval is not None and not math.isfinite(interval.values["loss"]):
            loss, lr = interval.values["loss"], interval.lr
            raise diverged(f"the loss is {loss} at step {interval.step} (lr {lr:g})")

    def _diverged(self, step: int, loss: float) -> TrainingError:
        """Report the first step whose gradients were not finite. Collective.

        Args:
            step: 1, 2, ...
            loss: of this rank in that step.
        """
        feed, lr = self.feed.train, self.plan.curve.at(step - 1)
        dataset = feed.loader.pool.sources[feed.loader.source].dataset
        samples = [
            {"epoch": epoch, "index": index, "path": dataset.name(index)}
            for epoch, index in feed.loader.samples(step - 1).tolist()
        ]
        own: dict[str, Any] = {"loss": loss, "samples": samples}
        ranks = self.world.all_gather(own)
        # Gradients are averaged over the ranks: only the losses tell whose images are the cause.
        bad = [one for one in ranks if not math.isfinite(one["loss"])] or ranks
        name = "diverged.json"
        self.tracker.record(name, {"step": step, "lr": lr, "ranks": bad})
        finite = math.isfinite(bad[0]["loss"])
        what = "a gradient is not finite" if finite else f"the loss is {bad[0]['loss']}"
        given = f"lr {lr:g}, loss {bad[0]['loss']:g}" if finite else f"lr {lr:g}"
        images = [f"{one['index']} ({one['path']})" for rank in bad for one in rank["samples"]]
        return diverged(
            f"{what} at step {step} ({given}) with the images {', '.join(images[:SHOWN_IMAGES])}, "
            f"... ({len(images):,} images in {self.run.path / name})"
        )

    def _train_row(self, interval: Interval) -> None:
        step = interval.step
        timing = self.feed.train.clock.timing(interval.steps)
        assert timing is not None, "every step of an interval has been ended"
        self.ledger.peak_rate = self._peak_rate(self.plan.flops(step - 1))
        times = self.ledger.note(timing, step)
        images_left = (self.plan.stop_step - step) * self.plan.batch_size
        row = {
            "step": step,
            "epoch": self.plan.epoch(step),
            "split": "train",
            **interval.values,
            "lr": interval.lr,
            **times,
            "seconds_left": images_left / times["images_per_second"],
        }
        pool = self.feed.train.loader.pool
        figures = {
            **self.monitor.read(),
            **allocator_figures(self.world.device),
            **host_figures(pool.pids),
        }
        if self.bad_files is not None and self.bad_files.limit is not None:
            figures["data/unreadable_images"] = self.bad_files.write()
        self.tracker.train_row(row, figures)
        pool.warn_about_slow_workers()

    # At the end

    def finish(self, stop: StopSignal) -> dict[str, Any]:
        """Report the end of the run, once its last checkpoint is on disk.

        Args:
            stop: the signal that ends this start, if any, including one that arrives while the
                last checkpoint is written.

        Returns:
            What summary.json holds.

        Raises:
            TrainingError, CheckpointError: the last checkpoint could not be written; or too many
                images cannot be read.
        """
        # Not what follows: wandb may take longer than the disk.
        with stop.saving(self.run.path, state_bytes(self.state)):
            self._report()
            with self.ledger.lost("checkpoint"):
                self.run.wait()
            stop.poll()
            if stop.number == stop.FAILED and self.bad_files is not None:
                self.bad_files.share()
            signal_number = stop.number
            if self.profiler.running:
                with self.ledger.lost("profile"):
                    self.profiler.stop(self.state.step)
            summary = self._summary(signal_number)
            if self.world.is_main:
                self.run.write("summary.json", strict_json.dumps(summary, indent=2) + "\n")
        config = self.plan.config
        if not signal_number:
            self.tracker.results(summary, self.state.step)
        self.tracker.outcome(summary, compiles=self.plan.compile != "off")
        if not signal_number and self.world.is_main:
            self._write_suspects()
        if unreadable := summary["unreadable_images"]:
            self.say(f"skipped   {unreadable:,} unreadable images: {self.run.path / BAD_FILES}")
        if signal_number and config.checkpoint.resume == "auto":
            self.say(f"resume    run the same command again to resume at step {self.state.step:,}")
        lost = [f"{kind} {duration(seconds)}" for kind, seconds in summary["seconds_lost"].items()]
        starts = f" over {summary['starts']} starts" if summary["starts"] > 1 else ""
        self.say(
            f"time      {100 * summary['effective_time']:.0f} % of "
            f"{duration(summary['total_seconds'])}{starts} was training; {', '.join(lost)}",
            *(f"verdict   {line}" for line in summary["verdict"]),
        )
        return summary

    def _write_suspects(self) -> None:
        """Write suspects.csv from the sums that the last checkpoint has collected on this rank."""
        assert self.state.losses is not None
        loader = self.feed.train.loader
        table = self.state.losses.csv(loader.pool.sources[loader.source].dataset, self.plan.classes)
        if table:
            self.run.write("suspects.csv", table)
            self.say(
                f"suspects  {self.run.path / 'suspects.csv'}: the training images with the highest "
                "mean loss; the label of the first ones may be wrong"
            )

    def _summary(self, signal_number: int) -> dict[str, Any]:
        """Return what summary.json holds. The exit status follows from the signal's number."""
        state, epoch = self.state, self.plan.epoch
        last, best_step = state.last, int(state.best.get("step", 0))
        # A signal during the last step leaves the validation of an earlier epoch.
        validated = last.get("step") == self.plan.schedule_steps
        expect = self.expectation.final if validated else None
        speed = self.ledger.speed()
        self.ledger.peak_rate = self._peak_rate(self.plan.mean_flops(state.step))
        return {
            "status": "interrupted" if signal_number else "finished",
            "signal": signal_number,
            "step": state.step,
            "epoch": round(epoch(state.step), 4),
            "loss": last.get("loss"),
            "top1": last.get("top1"),
            "top5": last.get("top5"),
            **{key: value for key, value in last.items() if key.endswith("_raw")},
            "expectation": compare(expect, last["top1"]) if expect else None,
            "best_top1": state.best.get("top1"),
            "best_epoch": round(epoch(best_step), 4) if best_step else None,
            "best_checkpoint": f"step-{best_step:08d}.pt" if best_step else None,
            "seconds": time.monotonic() - self._started,
            "history": state.history,
            "params_sha256": params_sha256(state.model),
            **speed,
            **self.ledger.balance(),
            "mfu": self.ledger.mfu(speed["images_per_second"]),
            "unreadable_images": len(self.bad_files.listed) if self.bad_files else 0,
            "workers": self.feed.train.loader.pool.active,
            "verdict": self._verdict("run", self._slowdowns("run")),
        }

    def _slowdowns(self, reader: str) -> str:
        """Return why the GPU ran below its maximum clock; "" if it did not."""
        slow = self.monitor.slowdowns(f"slowdowns of {reader}")
        # At full load, the power limit is normal.
        return ", ".join(line for line in slow if "power limit" not in line)

    def _peak_rate(self, flops_per_image: int) -> float | None:
        return peak_rate(
            self.plan.device,
            precision=self.plan.precision,
            flops_per_image=flops_per_image,
            ranks=self.plan.world_size,
        )

    def _verdict(self, period: Period, slowdowns: str) -> list[str]:
        loader = self.feed.train.loader
        source = loader.pool.sources[loader.source]
        draw_only = source.operations is not None
        gains = partial(measure_gains, source.dataset, draw_only=draw_only)  # reads files
        measure = partial(self._stop.wait_for, gains)
        self.ledger.setup = replace(self.ledger.setup, graph_refused=self._step.refused)
        if self.plan.size(self._first_step) != self.plan.size(self.state.step - 1):
            self.ledger.images_changed()
        limits = self.ledger.verdict(
            period,
            describe_loader(self.feed),
            self.world.all_gather,
            measure,
            slowdowns=slowdowns,
            place=f"rank {self.world.rank} on {socket.gethostname()}",
        )
        leaks = enumerate(self.world.all_gather(self.leaks.sentences()))
        rank, found = next((one for one in leaks if one[1]), (0, []))
        where = f"on rank {rank}, " if self.world.size > 1 else ""
        return limits + [f"{where}{sentence}" for sentence in found]


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


def _values(config: Config) -> dict[str, Any]:
    """What affects the result, for the boards: key -> value; None if a key is not in effect."""
    keys = {
        name: (show(value) if value is None else value) if in_effect(config, f) else None
        for name, f, value in walk(config)
        if f.metadata["affects"] & RESULT
    }
    return {"recipe": config.recipe, **keys}
