"""Everything that observes a run: console, metrics.jsonl, TensorBoard, NVML, times, profiler.

It never trains, validates or saves: the loop in train.py does, and calls the methods here.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from conf import cli, strict_json
from conf.rooms import has_room, require_room
from conf.schema import RESULT, Config, in_effect, show, walk
from engine.bad_files import NAME as BAD_FILES
from engine.bad_files import BadFiles
from engine.compute import peak_rate
from engine.distributed import StopSignal, World
from engine.log.console import Console
from engine.log.memory import Leaks, allocator_figures, host_figures, memory_now
from engine.log.meters import Meter
from engine.log.predictions import Predictions
from engine.log.telemetry import GpuMonitor, spread
from engine.log.times import RunTimes
from engine.log.tracker import Tracker, wandb_board
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainingError, TrainState, diverged, params_sha256, state_bytes
from engine.step_graph import StepGraph
from pipeline.clock import StepClock
from pipeline.feed import Feed
from pipeline.prefetcher import Batch

# Without log rows, the host looks for non-finite gradients this often.
CHECK_STEPS = 50
SHOWN_IMAGES = 3  # of the batch of a step with non-finite gradients, in the message


def check_log(config: Config) -> None:
    """Refuse what this copy of the program cannot report, before anything is created.

    Raises:
        UserError: wandb or an optional file of this program is missing.
    """
    if "wandb" in config.log.trackers:
        wandb_board(config.log.trackers)
    if steps := config.profile.steps:
        require_room("engine.extras.profiler", f"profile.steps={steps}")


class RunLog:
    """Reports a run while the loop trains.

    Args:
        plan, run, world: of this run.
        state: read for the reports; only `spent`, the seconds by kind, is modified.
        started: time.monotonic() when the program began.

    Attributes:
        finished: summary.json of an earlier start that finished this run; None while steps are
            left to train.
    """

    def __init__(
        self, plan: Plan, run: RunDirectory, state: TrainState, world: World, *, started: float
    ) -> None:
        self.plan, self.run, self.state, self.world = plan, run, state, world
        self._started, config = started, plan.config
        ended = state.step >= plan.stop_step
        self.finished = run.finished_summary(state.step) if ended else None
        self.console = Console(
            prints=world.is_main, total_steps=plan.stop_step, epochs=config.train.epochs
        )
        self.say = self.console.say
        self.tracker = Tracker(
            run.path if world.is_main else None,
            start_step=state.step,
            records=self.finished is None,
            trackers=config.log.trackers,
            values=_values(config),
        )
        self.meter, self.leaks = Meter(world), Leaks()
        self.bad_files: BadFiles | None = None
        self._first_step = self._last_step = state.step
        self._wants_images = run.is_first_start or plan.due(state.step).epoch
        self.profiler: Any = None  # of the optional room engine/extras, as the next one
        self.expectation: Any = None
        if config.profile.steps and world.is_main:
            from engine.extras.profiler import StepProfiler

            folder = run.path / "profile"
            self.profiler = StepProfiler(config.profile.steps, folder, world.device, self.say)
        if config.expect is not None and has_room("engine.extras.expectation"):
            from engine.extras.expectation import Expectation

            data = plan.num_classes, plan.train_images, plan.val_images
            self.expectation = Expectation(config, data, continues=bool(state.history))

    def __enter__(self) -> "RunLog":
        self.tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.console.clear()
        self.tracker.__exit__(*error)

    # Before the first step

    def introduce(self, changes: Sequence[str]) -> None:
        """Say what the run will do.

        Args:
            changes: keys that differ from the resumed checkpoint's config, each as a sentence.
        """
        resumed = ""
        if self.run.resumed is not None:
            name = self.run.resumed if self.run.is_first_start else self.run.resumed.name
            resumed = f", resumed from {name}"
        self.say(
            *self.plan.lines(),
            f"run      {self.run.path}{resumed}",
            *(f"history  {line}" for line in self.state.history),
            *(f"changed  {change}" for change in changes),
        )
        if self.run.is_first_start:
            self.tracker.text("config", cli.to_yaml(self.plan.config))

    def already_finished(self) -> dict[str, Any]:
        """Say that an earlier start finished this run; return its summary."""
        assert self.finished is not None
        stopped_early = self.state.step < self.plan.schedule_steps
        more = "a larger train.max_steps to continue, " if stopped_early else ""
        self.say(
            f"this run is finished after {self.state.step:,} steps: give {more}another run.name to "
            "train again, or checkpoint.resume=never to start over in this directory"
        )
        self.console.outcome(self.run.path, self.finished, compiles=self.plan.compile != "off")
        return self.finished

    @contextmanager
    def watch(self, feed: Feed, step: StepGraph, stop: StopSignal, verdict: Any) -> Iterator[None]:
        """Observe the training steps of the `with` block, which take their batches from `feed`.

        Args:
            verdict: judges the speed, see engine/tune/verdict.py; None without that room.
        """
        self.feed, self._stop, self.verdict = feed, stop, verdict
        plan, data = self.plan, self.plan.config.data
        self.bad_files = BadFiles(
            feed.train.loader,
            self.world,
            self.run.path,
            self.tracker,
            limit=data.max_bad_fraction if data.on_error == "skip" else None,
        )
        self.times = RunTimes(
            self.state.spent,
            batch_size=plan.batch_size,
            num_ranks=self.world.size,
            train_images=plan.train_images,
            step=self.state.step,
            began=self._started,
        )
        points = step_points(self.state, feed.train.clock) if self.world.size > 1 else nullcontext()
        with points, GpuMonitor(self.world.device) as self.monitor:
            try:
                yield
            finally:
                self.world.set_section(
                    None
                )  # after an error, others may end while rank 0 still writes
                if self.profiler is not None:
                    self.profiler.close()
                self.tracker.flush()  # before the feed is closed: after a crash, that may hang

    # In the loop

    def begin_step(self, batch: Batch) -> None:
        """Start the profiler or write the images of the batch, if either is due."""
        self.world.set_section(f"step {batch.step + 1}")
        train = self.feed.train
        if self.profiler is not None and self.profiler.starts(batch.step):
            with self.times.lost("profile"):
                self.profiler.start(batch.step)
            train.clock.restart_step()
        if self._wants_images:
            self._wants_images = False
            format = train.format
            self.tracker.images(
                "train/images",
                batch.images,
                scale=format.scale,
                shift=format.shift,
                step=batch.step + 1,
            )
        train.clock.mark("ready")

    def end_step(self, values: Mapping[str, Tensor], *, send: bool) -> None:
        """Add the values of a step. Nothing here waits for the GPU.

        Args:
            values: named means of the step, float [] on the device.
            send: this step is the last one of a log row.
        """
        step = self.state.step
        self._report()  # of an earlier step: its values have arrived while this one was launched
        self.meter.add(values)
        self._last_step = step
        if send:
            self.meter.send(step, self.plan.curve.at(step - 1))
        if send or step % CHECK_STEPS == 0:
            self.state.divergence.send(step)
        self.console.progress(step)
        if step == self._first_step + 1:
            self.times.started()
        if self.profiler is not None and self.profiler.ends(step, last=self.plan.stop_step):
            with self.pause("profile"):
                self.profiler.stop(step)

    def failed(self) -> bool:
        """Whether this rank cannot continue; `save` in train.py or `finish` raises the error."""
        return self.run.failed() or (self.bad_files is not None and self.bad_files.too_many)

    def end_epoch(self) -> None:
        """Report the verdict of the epoch and the GPU's slowdowns."""
        step = self.state.step
        self._wants_images = True
        with self.pause("training"):
            workers = self.feed.train.loader.pool.pids
            setting = (*workers, self.plan.size(step - 1))
            self.leaks.note(memory_now(workers, self.world.device), setting)
            slow = self.monitor.slowdowns("epoch")
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
        """Count the block neither in images/s nor in the time of a step, but in the seconds lost.

        Args:
            kind: "validation", "checkpoint" or "profile"; "training" for a block that is part of
                it.
        """
        self.world.set_section(kind)
        self.feed.train.end_step()
        self.state.divergence.send(self.state.step)
        # Waits for this step. A signal may have ended training between two rows.
        self._report(rest=bool(self._stop))
        with self.feed.train.pause(), self.times.lost(kind):
            yield
            if kind == "checkpoint" and self.bad_files is not None:
                self.bad_files.share()  # later starts do not repeat the steps before it

    def validated(
        self,
        row: dict[str, Any],
        each: Sequence[Mapping[str, Tensor]],
        *,
        best: bool,
        previous: Mapping[str, float],
    ) -> None:
        """Report a validation, and warn if the run falls behind its recipe. Collective.

        Args:
            each: what `engine.validation.evaluate` has collected on this rank.
            previous: the row of the validation before; empty if there was none.
        """
        found = Predictions.gather(each, self.world)
        if not self.world.is_main:
            return
        self.console.val_row(row, best=best)
        columns: dict[str, float] = {}
        if self.expectation is not None:
            epochs = [_epoch_ended(self.plan, int(one.get("step", 0))) for one in (row, previous)]
            columns = self.expectation.columns(epochs[0])
            now, before = (epochs[0], row["top1"]), (epochs[1], previous.get("top1", 0.0))
            if warning := self.expectation.warning(now, before):
                self.say(f"warning  {warning}")
        self.tracker.row(row | columns, {})
        dataset = self.feed.val.loader.dataset
        self.tracker.predictions(
            found,
            self.plan.classes,
            load=lambda index: torch.from_numpy(dataset.load(0, index)[0]),
            step=self.state.step,
        )

    def _report(self, *, rest: bool = False) -> None:
        """Write a log row if an interval of steps was sent and not yet reported.

        Args:
            rest: end an interval after the last step, too.

        Raises:
            TrainingError: a gradient or the mean loss is not finite.
        """
        plan, train = self.plan, self.feed.train
        interval, found = self.meter.read(), self.state.divergence.read()
        if interval is None and self.meter.steps and (rest or found is not None):
            self.meter.send(self._last_step, plan.curve.at(self._last_step - 1))
            interval = self.meter.read()
        if interval is not None:
            step = interval.step
            timing = train.clock.timing(interval.steps)
            assert timing is not None, "every step of an interval has been ended"
            times = self.times.add(timing, step, _peak_rate(plan, plan.flops(step - 1)))
            if self.verdict is not None:
                self.verdict.add(timing)
            left = (plan.stop_step - step) * plan.batch_size / times["images_per_second"]
            row = {
                "step": step,
                "epoch": plan.epoch(step),
                "split": "train",
                **interval.values,
                "lr": interval.lr,
                **times,
                "seconds_left": left,
            }
            figures = {
                **self.monitor.read(),
                **allocator_figures(self.world.device),
                **host_figures(train.loader.pool.pids),
            }
            if self.bad_files is not None and self.bad_files.limit is not None:
                figures["data/unreadable_images"] = self.bad_files.write()
            self.tracker.row(row, figures)
            self.console.train_row(row, interval.values)
        if found is not None:
            path = self.run.path / "diverged.json"
            raise report_divergence(*found, plan, self.feed, self.world, self.tracker, path=path)
        if interval is not None and not math.isfinite(interval.values["loss"]):
            loss, lr = interval.values["loss"], interval.lr
            raise diverged(f"the loss is {loss} at step {interval.step} (lr {lr:g})")

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
        state, plan, path = self.state, self.plan, self.run.path
        # Not what follows: wandb may take longer than the disk.
        with stop.saving(path, state_bytes(state)):
            self._report(rest=True)
            with self.times.lost("checkpoint"):
                self.run.wait()
            stop.poll()
            if stop.number == stop.FAILED and self.bad_files is not None:
                self.bad_files.share()
            signal_number = stop.number
            if self.profiler is not None and self.profiler.running:
                with self.times.lost("profile"):
                    self.profiler.stop(state.step)
            speed = self.times.speed()
            peak = _peak_rate(plan, plan.mean_flops(state.step))
            summary = {
                "status": "interrupted" if signal_number else "finished",
                "signal": signal_number,  # the exit status follows from it
                **results(state, plan, self.expectation),
                "seconds": time.monotonic() - self._started,
                **speed,
                **self.times.balance(),
                "mfu": speed["images_per_second"] / peak if peak else None,
                "unreadable_images": len(self.bad_files.listed) if self.bad_files else 0,
                "workers": self.feed.train.loader.pool.active,
                "verdict": self._verdict("run", self.monitor.slowdowns("run")),
            }
            if self.world.is_main:
                self.run.write("summary.json", strict_json.dumps(summary, indent=2) + "\n")
        if not signal_number:
            self.tracker.results(summary, state.step)
        self.console.outcome(path, summary, compiles=plan.compile != "off")
        if not signal_number and self.world.is_main and state.losses is not None:
            table = state.losses.csv(self.feed.train.loader.dataset, plan.classes)
            if table:
                self.run.write("suspects.csv", table)
                self.say(
                    f"suspects  {path / 'suspects.csv'}: the training images with the highest "
                    "mean loss; the label of the first ones may be wrong"
                )
        if unreadable := summary["unreadable_images"]:
            self.say(f"skipped   {unreadable:,} unreadable images: {path / BAD_FILES}")
        if signal_number and plan.config.checkpoint.resume == "auto":
            self.say(f"resume    run the same command again to resume at step {state.step:,}")
        self.console.balance(summary)
        return summary

    def _verdict(self, period: Literal["epoch", "run"], slowdowns: str) -> list[str]:
        """Return the sentences of the verdict. Collective."""
        limits: list[str] = []
        if self.verdict is not None:
            limits = self.verdict.sentences(period, slowdowns=slowdowns)
        leaks = enumerate(self.world.all_gather(self.leaks.sentences()))
        rank, found = next((one for one in leaks if one[1]), (0, []))
        where = f"on rank {rank}, " if self.world.size > 1 else ""
        return limits + [f"{where}{sentence}" for sentence in found]


def results(state: TrainState, plan: Plan, expectation: Any) -> dict[str, Any]:
    """Return what summary.json says about the result of a run.

    Args:
        expectation: `engine.extras.expectation.Expectation`, or None.
    """
    last, best_step = state.last, int(state.best.get("step", 0))
    # A signal during the last step leaves the validation of an earlier epoch.
    validated = expectation is not None and last.get("step") == plan.schedule_steps
    return {
        "step": state.step,
        "epoch": round(plan.epoch(state.step), 4),
        "loss": last.get("loss"),
        "top1": last.get("top1"),
        "top5": last.get("top5"),
        **{key: value for key, value in last.items() if key.endswith("_raw")},
        "expectation": expectation.compare(last["top1"]) if validated else None,
        "best_top1": state.best.get("top1"),
        "best_epoch": round(plan.epoch(best_step), 4) if best_step else None,
        "best_checkpoint": f"step-{best_step:08d}.pt" if best_step else None,
        "history": state.history,
        "params_sha256": params_sha256(state.model),
    }


def report_divergence(
    step: int,
    loss: float,
    plan: Plan,
    feed: Feed,
    world: World,
    tracker: Tracker,
    *,
    path: Path,
) -> TrainingError:
    """Write a JSON file about the first step whose gradients were not finite. Collective.

    Args:
        step: 1, 2, ...
        loss: of this rank in that step.
        path: of the file.
    """
    loader, lr = feed.train.loader, plan.curve.at(step - 1)
    samples = [
        {"epoch": epoch, "index": index, "path": loader.dataset.name(index)}
        for epoch, index in loader.samples(step - 1).tolist()
    ]
    ranks: list[dict[str, Any]] = world.all_gather({"loss": loss, "samples": samples})
    # Gradients are averaged over the ranks: only the losses tell whose images are the cause.
    bad = [one for one in ranks if not math.isfinite(one["loss"])] or ranks
    tracker.record(path.name, {"step": step, "lr": lr, "ranks": bad})
    finite = math.isfinite(bad[0]["loss"])
    what = "a gradient is not finite" if finite else f"the loss is {bad[0]['loss']}"
    given = f"lr {lr:g}, loss {bad[0]['loss']:g}" if finite else f"lr {lr:g}"
    images = [f"{one['index']} ({one['path']})" for rank in bad for one in rank["samples"]]
    return diverged(
        f"{what} at step {step} ({given}) with the images {', '.join(images[:SHOWN_IMAGES])}, "
        f"... ({len(images):,} images in {path})"
    )


def _epoch_ended(plan: Plan, step: int) -> int | None:
    """Return the epoch that ended with this step, 1, 2, ..., or None."""
    return plan.epochs_ended(step) if plan.due(step).epoch else None


def _peak_rate(plan: Plan, flops_per_image: int) -> float | None:
    return peak_rate(
        plan.device,
        precision=plan.precision,
        flops_per_image=flops_per_image,
        ranks=plan.world_size,
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


def _values(config: Config) -> dict[str, Any]:
    """What affects the result, for the boards: key -> value; None if a key is not in effect."""
    keys = {
        name: (show(value) if value is None else value) if in_effect(config, f) else None
        for name, f, value in walk(config)
        if f.metadata["affects"] & RESULT
    }
    return {"recipe": config.recipe, **keys}
