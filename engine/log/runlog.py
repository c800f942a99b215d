"""Everything that observes a run: console, metrics.jsonl, TensorBoard, NVML, times, profiler.

The loop in train.py trains, validates and saves, and calls the methods here.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor

from conf import strict_json
from conf.compose import to_yaml
from conf.rooms import has_room, require_room
from conf.schema import Config
from engine.distributed import World
from engine.log.bad_files import BadFiles
from engine.log.console import Console
from engine.log.measurements import Measurements, Meter
from engine.log.pictures import tiles
from engine.log.predictions import Predictions
from engine.log.tracker import Tracker, wandb_board
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainState, diverged, params_sha256, state_bytes
from engine.stop_signal import StopSignal
from pipeline.class_names import readable
from pipeline.feed import Feed
from pipeline.loader import Loader
from pipeline.prefetcher import Batch, ImageFormat

# Without log rows, the host looks for non-finite gradients this often.
CHECK_STEPS = 50
SHOWN_IMAGES = 16  # of the first batch
NAMED_IMAGES = 3  # of the batch of a step with non-finite gradients, in the message


def check_log(config: Config) -> None:
    """Raise UserError for what this copy of the program cannot report."""
    if "wandb" in config.log.trackers:
        wandb_board(config.log.trackers)
    if steps := config.profile.steps:
        require_room("engine.extras.profiler", f"profile.steps={steps}")


class RunLog:
    """Reports a run while the loop trains.

    Args:
        state: read for the reports; only `totals`, the seconds by kind, are modified.
        started: time.monotonic() when the program began.
    """

    def __init__(
        self, plan: Plan, run: RunDirectory, state: TrainState, world: World, *, started: float
    ) -> None:
        self.plan, self.run, self.state, self.world = plan, run, state, world
        self._started, config = started, plan.config
        self.console = Console(world.is_main, config.train.epochs)
        self.say = self.console.say
        self.tracker = Tracker(
            run.path if world.is_main and run.finished is None else None,
            start_step=state.step,
            trackers=config.log.trackers,
            config=config,
        )
        self.meter = Meter(world)
        self.bad_files: BadFiles | None = None
        self._first_step = self._last_step = state.step
        self.expectation: Any = None
        if config.expect is not None and has_room("engine.extras.expectation"):
            from engine.extras.expectation import Expectation

            data = plan.num_classes, plan.train_images, plan.val_images
            self.expectation = Expectation(config, data, continues=bool(state.history))
        self.profiler: Any = None
        if config.profile.steps and world.is_main:
            from engine.extras.profiler import StepProfiler

            path = run.path / "profile"
            self.profiler = StepProfiler(config.profile.steps, path, world.device, self.say)

    def __exit__(self, *error: Any) -> None:
        self.tracker.__exit__(*error)

    def __enter__(self) -> "RunLog":
        """Say what the run will do, and which keys differ from the resumed checkpoint's config."""
        run, resumed = self.run, ""
        if run.resumed is not None:
            name = run.resumed if run.is_first_start else run.resumed.name
            resumed = f", resumed from {name}"
        self.say(
            *self.plan.lines(),
            f"run      {run.path}{resumed}",
            *(f"history  {line}" for line in self.state.history),
            *(f"changed  {change}" for change in run.changes),
        )
        if run.is_first_start:
            self.tracker.text("config", to_yaml(self.plan.config))
        return self

    def already_finished(self) -> dict[str, Any]:
        """Say that an earlier start finished this run; return its summary."""
        summary = self.run.finished
        assert summary is not None
        step = self.state.step
        more = "a larger train.max_steps to continue, " if step < self.plan.schedule_steps else ""
        self.say(
            f"this run is finished after {step:,} steps: give {more}another run.name to train "
            "again, or checkpoint.resume=never to start over in this directory"
        )
        self.console.outcome(self.run.path, summary, resumes=False)
        return summary

    @contextmanager
    def watch(self, feed: Feed, stop: StopSignal, verdict: Any) -> Iterator[None]:
        """Observe the training steps of the `with` block. For `verdict`, see `Measurements`."""
        self.feed, self._stop = feed, stop
        data, world, loader = self.plan.config.data, self.world, feed.train.loader
        if data.on_error == "skip":
            limit = data.max_bad_fraction
            self.bad_files = BadFiles(loader, world, self.run.path, self.tracker, limit)
        with Measurements(
            feed, verdict, self.plan, self.state, world, began=self._started
        ) as self.measured:
            try:
                yield
            finally:
                # After an error, others may end while rank 0 still writes.
                world.set_section(None)
                if self.profiler is not None:
                    self.profiler.close()
                self.tracker.flush()  # before the feed is closed: after a crash, that may hang

    def begin_step(self, batch: Batch) -> None:
        """Start the profiler or draw the run's first batch, if either is due."""
        self.world.set_section(f"step {batch.step + 1}")
        train = self.feed.train
        if self.profiler is not None and self.profiler.starts(batch.step):
            with self.measured.lost("profile"):
                self.profiler.start(batch.step)
            train.clock.skip()
        if self.run.is_first_start and batch.step == self._first_step:
            draw = partial(draw_batch, batch, train.format, self.plan.classes)
            self.tracker.pictures(draw, batch.step + 1)
            train.clock.skip()
        train.clock.mark("ready")

    def end_step(self, values: Mapping[str, Tensor], *, send: bool) -> None:
        """Add the values of a step, float [] on the device. Nothing here waits for the GPU.

        Args:
            send: this step is the last one of a log row.
        """
        step = self.state.step
        self._report()  # of an earlier step: its values have arrived while this one was launched
        self.meter.add(values)
        self._last_step = step
        if send:
            self.meter.send(step)
        if send or step % CHECK_STEPS == 0:
            self.state.divergence.send(step)
        if step == self._first_step + 1:
            self.measured.started()
        if self.profiler is not None and self.profiler.ends(step, last=self.plan.stop_step):
            with self.pause("profile"):
                self.profiler.stop(step)

    def failed(self) -> bool:
        """Whether this rank cannot continue; `save` in train.py or `finish` raises the error."""
        return self.run.failed() or (self.bad_files is not None and self.bad_files.too_many)

    def end_epoch(self) -> None:
        """Report the verdict of the epoch."""
        with self.pause("training"):
            lines = self.measured.verdict("epoch")
            self.say(*(f"verdict  {line}" for line in lines))
            if lines:  # a killed run leaves this file instead of the verdict in summary.json
                epoch = round(self.plan.epoch(self.state.step), 4)
                self.tracker.record("verdict.json", {"epoch": epoch, "verdict": lines})

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Count the block neither in images/s nor in the time of a step, but in the seconds lost.

        Args:
            kind: of the seconds; "training" counts as no loss.
        """
        self.world.set_section(kind)
        self.feed.train.end_step()
        self.state.divergence.send(self.state.step)
        # Waits for this step. A signal may have ended training between two rows.
        self._report(rest=bool(self._stop))
        with self.feed.train.pause(), self.measured.lost(kind):
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
            previous: the row of the validation before.
        """
        found = Predictions.gather(each, self.world)
        if not self.world.is_main:
            return
        self.console.val_row(row, best=best)
        if self.expectation is not None:
            columns, warning = self.expectation.judge(row, previous, self.plan)
            row = row | columns
            if warning:
                self.say(f"warning  {warning}")
        self.tracker.row(row)
        classes, step = self.plan.classes, self.state.step
        content = {"step": step, "classes": found.per_class(classes)}
        self.tracker.record("per_class.json", content)
        dataset = self.feed.val.loader.dataset
        self.tracker.pictures(partial(found.draw, classes, dataset), step)

    def _report(self, *, rest: bool = False) -> None:
        """Write a log row if an interval of steps was sent; with `rest`, of the last steps, too."""
        interval, found = self.meter.read(), self.state.divergence.read()
        if interval is None and self.meter.steps and (rest or found is not None):
            self.meter.send(self._last_step)
            interval = self.meter.read()
        if interval is not None:
            row = self.measured.row(interval)
            if self.bad_files is not None:
                row["data/unreadable_images"] = self.bad_files.write()
            self.tracker.row(row)
            self.console.train_row(row, interval.values)
        if found is not None:
            loader, path = self.feed.train.loader, self.run.path / "diverged.json"
            content, reason = describe_divergence(*found, self.plan, loader, self.world)
            self.tracker.record(path.name, content)
            raise diverged(f"{reason} ({path} lists them)")
        if interval is not None and not math.isfinite(loss := interval.values["loss"]):
            # It may overflow with finite gradients.
            raise diverged(f"the loss is {loss} at step {interval.step} (lr {row['lr']:g})")

    def finish(self, stop: StopSignal) -> dict[str, Any]:
        """Report the end of the run, once its last checkpoint is on disk; return the summary.

        A signal may still arrive during that checkpoint.

        Raises:
            TrainingError, CheckpointError: it could not be written, or too many images are bad.
        """
        state, plan, path = self.state, self.plan, self.run.path
        # Not what follows: wandb may take longer than the disk.
        with stop.saving(path, state_bytes(state)):
            self._report(rest=True)
            with self.measured.lost("checkpoint"):
                self.run.wait()
            stop.poll()
            if stop.number == stop.FAILED and self.bad_files is not None:
                self.bad_files.share()
            signal_number = stop.number
            summary = {
                "status": "interrupted" if signal_number else "finished",
                "signal": signal_number,  # the exit status follows from it
                **results(state, plan, self.expectation),
                "seconds": time.monotonic() - self._started,
                **self.measured.summary(),
                "unreadable_images": len(self.bad_files.listed) if self.bad_files else 0,
            }
            if self.world.is_main:
                self.run.write("summary.json", strict_json.dumps(summary, indent=2) + "\n")
        if not signal_number and self.world.is_main and state.sample_losses is not None:
            table = state.sample_losses.csv(self.feed.train.loader.dataset, plan.classes)
            if table:  # nothing was counted in a short run
                self.run.write("suspects.csv", table)
        self.console.outcome(path, summary, resumes=plan.config.checkpoint.resume == "auto")
        return summary


def describe_divergence(
    step: int, loss: float, plan: Plan, loader: Loader, world: World
) -> tuple[dict[str, Any], str]:
    """Describe the first step whose gradients were not finite, as JSON and as text. Collective.

    Args:
        step, loss: the step (1, 2, ...) and this rank's loss in it.
    """
    lr = plan.curve.at(step - 1)
    samples = [
        {"epoch": epoch, "index": index, "path": loader.dataset.name(index)}
        for epoch, index in loader.samples(step - 1).tolist()
    ]
    ranks: list[dict[str, Any]] = world.all_gather({"loss": loss, "samples": samples})
    # Gradients are averaged over the ranks: only the losses tell whose images are the cause.
    bad = [one for one in ranks if not math.isfinite(one["loss"])] or ranks
    loss = bad[0]["loss"]
    what, given = f"the loss is {loss}", f"lr {lr:g}"
    if math.isfinite(loss):
        what, given = "a gradient is not finite", f"{given}, loss {loss:g}"
    images = [f"{one['index']} ({one['path']})" for rank in bad for one in rank["samples"]]
    named = ", ".join(images[:NAMED_IMAGES])
    reason = f"{what} at step {step} ({given}) with {len(images):,} images, such as {named}"
    return {"step": step, "lr": lr, "ranks": bad}, reason


def results(state: TrainState, plan: Plan, expectation: Any) -> dict[str, Any]:
    """Return what summary.json says about the result of a run."""
    last, best_step = state.last, int(state.best.get("step", 0))
    # A signal during the last step leaves the validation of an earlier epoch.
    validated = expectation is not None and last.get("step") == plan.schedule_steps
    return {
        "step": state.step,
        "epoch": round(plan.epoch(state.step), 4),
        **dict.fromkeys(("loss", "top1", "top5")),
        **{key: value for key, value in last.items() if key not in ("step", "epoch")},
        "expectation": expectation.compare(last["top1"]) if validated else None,
        "best_top1": state.best.get("top1"),
        "best_epoch": round(plan.epoch(best_step), 4) if best_step else None,
        "best_checkpoint": f"step-{best_step:08d}.pt" if best_step else None,
        "history": state.history,
        "params_sha256": params_sha256(state.model),
    }


def draw_batch(batch: Batch, format: ImageFormat, classes: Sequence[str]) -> dict[str, Image.Image]:
    """Draw the first images of a batch, without normalisation; waits for the device."""
    pixels = batch.images[:SHOWN_IMAGES].float().sub(format.shift).div(format.scale)
    shown = pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
    labels = batch.labels[:SHOWN_IMAGES].tolist()
    captions = [[(readable(classes[label]), "black")] for label in labels]
    return {"train/images": tiles("input of the first step", list(shown), captions)}
