"""Train an image classifier from a folder of JPEGs.

    python train.py data.root=/imagenet loader.workers=auto
    torchrun --nproc-per-node 8 train.py data.root=/imagenet

This file is the algorithm, top to bottom: compose the config, plan, build or resume the state, loop, evaluate, save.
Fork it: what it imports are parts, and none of them calls back.
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported Ctrl-C ends it without a word

from conf import cli

# Threads that wait for each other sleep instead of spinning: with a busy core beside them the demo runs 6 times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported

if __name__ == "__main__":
    # Before torch is imported: --help and a typo are answered in a fraction of a second.
    CONFIG = cli.parse(sys.argv[1:], script="train.py", purpose=__doc__.split("\n")[0])

import gc
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import models
from conf.schema import DATA_FOLDERS, RESULT, SPEED, Config, UserError, affecting, config_values, differences, show
from engine import checkpoint, meters
from engine.distributed import StopSignal, World, join_world
from engine.evaluate import Mistakes, evaluate
from engine.ledger import Ledger, peak_rate
from engine.optim import Curve, build_optimizer
from engine.out_of_memory import activation_bytes, explain_oom, fixed_bytes
from engine.pictures import bars
from engine.plan import (
    Plan,
    check_batch,
    check_profile,
    choose_compile,
    choose_precision,
    count_flops,
    count_steps,
    few_steps,
    precision_note,
)
from engine.profiler import StepProfiler
from engine.rundir import RunDirectory
from engine.state import MovingAverage, TrainState, params_sha256, seed_step, untouched
from engine.telemetry import GpuMonitor, allocator_figures, host_figures, spread
from engine.tracker import WORST_IMAGES, Tracker, duration
from models import gpu_layers
from pipeline.build import Datasets, build_datasets, stand_in
from pipeline.dataset import LARGE_FILE
from pipeline.feed import Feed, choose_decoder, open_feed, pixels_of
from pipeline.loader import LoaderError
from pipeline.prefetcher import Batch
from pipeline.sizing import autotune
from pipeline.sizing.budget import chosen_workers, worker_budget
from pipeline.sizing.diagnosis import Setup, describe_loader
from pipeline.sizing.memory import MemoryPlan, plan_memory

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
# Nodes may have other cores and keep the data elsewhere; all other keys decide what the ranks do together.
OWN_OF_RANKS = (*DATA_FOLDERS, "loader.workers", "loader.prefetch_factor", "loader.pin_memory", "loader.start_method")
VALIDATED_ON = {"data.val", "data.val_size", "data.mean", "data.std", "augment.val"}
# model.compile=tuned: the block sizes of every generated kernel are searched. ResNet-50 on an H200: 7,327 -> 7,798 images/s.
TUNED: dict[str, Any] = {"coordinate_descent_tuning": True}
# How long a thread that computes in Python may keep a launch waiting. With Python's own 5 ms, at each of a step's hundreds of
# launches, TensorBoard's checksum of a picture emptied the GPU's queue: 148 ms for a step of 31 (ViT-S/16 on an H200).
SWITCH_SECONDS = 1e-4


class TrainingError(RuntimeError):
    """Training cannot go on: says at which step and what to try."""


def train(config: Config) -> dict[str, Any]:
    """Run to the end, or to a signal; return what summary.json holds.

    Raises:
        UserError: something the user must change; nothing has been created then.
        LoaderError, CheckpointError, TrainingError: what went wrong, in one line.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.train.device))
        config = replace(config, run=world.agree(lambda: config.run))  # ${now:} is another time on every rank
        same_on_all_ranks(world.gather({key: v for key, v in config_values(config).items() if key not in OWN_OF_RANKS}))
        run = stack.enter_context(RunDirectory(Path(config.run.dir)))
        pixels = world.agree(lambda: run.stored_identity(config.checkpoint.resume)).get("pixels", "cpu")
        if undrawn := stand_in(config):  # a mistake shows before anything is drawn
            plan = make_plan(config, undrawn, world, pixels)
            world.all_or_none(lambda: make_room(config, undrawn, plan, world))
            build_state(config, plan, world)
        datasets = build_datasets(config)
        plan = make_plan(config, datasets, world, pixels)
        rooms = world.all_or_none(lambda: make_room(config, datasets, plan, world))
        memory = min(world.of_node(rooms), key=lambda room: room.most_workers)  # other things take memory as well, at any time
        set_up_process(config, plan)
        state = build_state(config, plan, world)
        identity = run_identity(config, datasets, plan)
        same_on_all_ranks(world.gather(identity))
        resumed, accepted = world.agree(
            lambda: run.open(config.checkpoint.resume, identity, accept_changes=config.checkpoint.accept_changes,
                             stop_step=plan.stop_step)
        )  # fmt: skip
        # The first start in this folder, perhaps from the checkpoint of another run.
        begins = resumed is None or resumed.parent.resolve() != run.checkpoints.resolve()
        changes: list[str] = []
        if resumed is not None:
            stored_config = load_checkpoint(state, resumed, begins=begins, accepted=accepted)
            changes = differences(stored_config, {**config_values(config), "ranks": world.size})
        finished = run.finished_summary(state.step) if state.step >= plan.stop_step else None
        tracker = stack.enter_context(
            Tracker(run.path if world.leads else None, start_step=state.step, total_steps=plan.stop_step, epochs=plan.epochs,
                    records=finished is None, tensorboard=config.log.tensorboard)
        )  # fmt: skip
        introduce(tracker, [*plan.lines(), f"memory   {memory.line()}"], run, resumed, state.history, changes)
        if finished is not None:
            longer = "a larger train.max_steps to continue, " * (state.step < plan.schedule_steps)
            tracker.say(f"this run is finished after {state.step:,} steps: give {longer}another run.name to train again, or "
                        "checkpoint.resume=never to start over in this directory")  # fmt: skip
            tracker.outcome(finished, compiles=plan.compile != "off")
            return finished
        if begins:
            tracker.text("config", cli.to_yaml(config))
            tracker.graph(lambda: models.build(config.model.name, num_classes=plan.num_classes, image_size=plan.image_size),
                          side=plan.image_size, parameters=plan.parameters)  # fmt: skip
        world.agree(lambda: run.begin({"config.yaml": cli.to_yaml(config), "overrides.yaml": cli.to_yaml(config.typed)}))

        workers = min(plan.workers, memory.most_workers)
        feed = stack.enter_context(
            open_feed(config, datasets, workers=min(autotune.PROBE_WORKERS, workers) if plan.measures_workers else workers,
                      most_workers=memory.most_workers, decoder=plan.decoder, device=world.device, dtype=plan.input_dtype,
                      channels_last=plan.channels_last, rank=world.rank, world_size=world.size)
        )  # fmt: skip
        network = world.wrap(state.model, torch.zeros(1, 3, plan.image_size, plan.image_size))
        objective, measure = compiled(meters.objective, plan), compiled(meters.measure, plan)
        stop = stack.enter_context(StopSignal(world))
        signal_number = 0
        stack.enter_context(memory_explained(state, plan, world, run))
        alone = tune_loader(config, plan, datasets, world, feed, state, network, objective, tracker, workers)
        meter = meters.Meter(world, plan.batch_size, state.step)
        ledger = build_ledger(plan, state.spent, step=state.step, step_alone=alone)
        monitor = stack.enter_context(GpuMonitor(world.device))

        def report() -> None:
            interval = meter.read()
            if interval is not None:
                write_interval(interval, plan, tracker, feed, monitor, ledger, memory)
                feed.train.loader.pool.warn_of_laggards()

        @contextmanager
        def left_out() -> Iterator[None]:
            """What happens inside is not training: it counts neither in the rate nor in the time of a step."""
            feed.train.end_step()
            report()  # of this very step, for which it waits
            with meter.left_out(), feed.train.pause():
                yield

        def save_all() -> None:
            tracker.flush()  # first: a kill after the checkpoint leaves no gap in the curves before it
            ledger.settle()
            with ledger.lost("checkpoint"):
                save(state, config, identity, run, world)

        def validate_and_save() -> None:
            with ledger.lost("validation"):
                validate(state, plan, world, feed, measure, tracker, stop, datasets.classes)
            save_all()

        def end_of_epoch() -> None:
            lines = ledger.epoch_verdict(describe_loader(feed), world.gather)
            for line in lines:
                tracker.say(f"verdict  {line}")
            if lines:  # summary.json has the run's, which a kill would leave without any
                tracker.record("verdict.json", {"epoch": round(plan.epoch(state.step), 4), "verdict": lines})
            tracker.figures(spread(world.gather(monitor.read("epoch"))) if world.size > 1 else {}, state.step)
            if slow := [line for line in monitor.slowdowns() if "power limit" not in line]:  # that is normal at full load
                tracker.say(f"gpu      runs below its clock: {', '.join(slow)}")

        if plan.validates(state.step) and state.last.get("step") != state.step:
            with meter.left_out():
                validate_and_save()  # an earlier start was stopped before it could
            signal_number = stop.agreed()

        gc.collect()
        gc.freeze()  # what lives as long as the run is not looked through again
        stack.callback(tracker.flush)  # before the feed is closed: after a crash that may hang, and be killed
        stack.callback(gc.unfreeze)
        stack.callback(gc.enable)
        gc.disable()  # a collection in the middle of a step stalls the launches; it runs at checkpoints instead
        first_step = state.step
        profiler = StepProfiler(config.profile.steps, run.path / "profile" if world.leads else None, world.device, tracker.say)
        stack.callback(profiler.close)
        if profiler.turns(state.step):
            profiler.turn(state.step)
        for batch in feed.train.batches(state.step, state.step if signal_number else plan.stop_step):
            if begins or plan.epochs_ended(batch.step) > plan.epochs_ended(batch.step - 1):
                tracker.images("train/images", batch.images, scale=feed.train.scale, shift=feed.train.shift,
                               step=batch.step + 1)  # fmt: skip
                begins = False
            seed_step(config.train.seed, batch.step, world.rank)
            lr = plan.curve.at(batch.step)
            values = train_step(state, network, objective, batch, lr=lr, config=config, plan=plan)
            state.step += 1
            report()  # of an earlier step: its figures have arrived while this one was launched
            meter.add(values)
            tracker.progress(state.step)
            signal_number = stop.agreed()
            if plan.logs(state.step) or signal_number:
                meter.send(state.step, lr)
            if state.step == first_step + 1:
                ledger.started(time.monotonic() - started)  # compiling is part of a start
            if profiler.running and (profiler.turns(state.step) or state.step == plan.stop_step):
                with left_out(), ledger.lost("profile"):  # before a validation, which would be in it
                    profiler.turn(state.step)
            if plan.epochs_ended(state.step) > plan.epochs_ended(state.step - 1):
                with left_out():
                    end_of_epoch()
            if plan.saves(state.step) or signal_number:
                with left_out():
                    if plan.validates(state.step) and not signal_number:
                        validate_and_save()
                        signal_number = stop.agreed()
                    else:
                        save_all()
                    gc.collect()
            if signal_number:
                break
            if profiler.turns(state.step):
                with left_out(), ledger.lost("profile"):
                    profiler.turn(state.step)

        report()
        if state.step == first_step:  # no step was left to take
            ledger.started(time.monotonic() - started)
        if profiler.running:
            with ledger.lost("profile"):
                profiler.turn(state.step)
        summary = summarise(state, plan, started, signal_number) | ledger.speed() | ledger.balance()
        summary["mfu"] = ledger.mfu(summary["images_per_second"])
        summary["workers"] = len(feed.train.loader.pool.workers)
        summary["verdict"] = ledger.run_verdict(describe_loader(feed), world.gather)
        if world.leads:
            run.write("summary.json", json.dumps(summary, indent=2) + "\n")
        if not signal_number:
            tracker.hyperparameters(config_values(config), summary, state.step)
        tracker.outcome(summary, compiles=plan.compile != "off")
        if signal_number and config.checkpoint.resume == "auto":
            tracker.say(f"resume    the same command continues from step {state.step:,}")
        lost = ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in summary["seconds_lost"].items())
        starts = f" over {summary['starts']} starts" * (summary["starts"] > 1)
        share, total = 100 * summary["effective_time"], duration(summary["total_seconds"])
        tracker.say(f"time      {share:.0f} % of {total}{starts} was training; {lost}")
        for line in summary["verdict"]:
            tracker.say(f"verdict   {line}")
        return summary


@contextmanager
def memory_explained(state: TrainState, plan: Plan, world: World, run: RunDirectory) -> Iterator[None]:
    """Make one line of the GPU's out-of-memory error, with the batch that would fit; a snapshot lies in the folder."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        message = explain_oom(error, device=world.device, folder=run.path, batch_size=plan.batch_size, world_size=world.size,
                              static_bytes=fixed_bytes(state), image_bytes=plan.activation_bytes, rank=world.rank)  # fmt: skip
        raise TrainingError(message) from error


def tune_loader(
    config: Config,
    plan: Plan,
    datasets: Datasets,
    world: World,
    feed: Feed,
    state: TrainState,
    network: nn.Module,
    objective: Callable[..., Any],
    tracker: Tracker,
    budget: int,
) -> float:
    """loader.workers=auto: set the feed as is remembered for this work on this machine, or as real steps show now, and say it.

    The steps leave no trace.

    Returns:
        Images/s that the step takes on all ranks without the loader; 0 when that is not known.
    """
    if not plan.measures_workers:
        unused = "; autotune.refresh has no effect" if config.autotune.refresh else ""
        if plan.workers_unmeasured:
            tracker.say(f"autotune not measured, workers={budget}: {plan.workers_unmeasured}{unused}")
        elif unused:
            tracker.say(f"autotune loader.workers={config.loader.workers} is fixed{unused}; it needs loader.workers=auto")
        return 0.0
    question = tuning_question(config, plan, datasets, world, budget)

    def step(batch: Batch) -> None:
        train_step(state, network, objective, batch, lr=plan.curve.at(state.step), config=config, plan=plan)

    with untouched(state):
        tuner = autotune.Tuner(feed, step, first_step=state.step, setup=setup_of(plan), choices=config.loader, ranks=world)
        answer, lines = autotune.settle(tuner, question, refresh=config.autotune.refresh, last_step=plan.stop_step)
    for name, line in zip(["autotune", *[""] * len(lines)], lines, strict=False):
        tracker.say(f"{name:<8} {line}")
    if answer is not None:
        tracker.record("autotune.json", asdict(answer))
        tracker.text("autotune", "\n".join(lines))
        rows, limits = answer.bars(setup_of(plan))
        tracker.picture("autotune/supply and demand", bars(f"{config.model.name}, images/s", rows, marked=limits))
    return answer.demand * world.size if answer is not None else 0.0


def tuning_question(config: Config, plan: Plan, datasets: Datasets, world: World, budget: int) -> dict[str, Any]:
    """What the answer of loader.workers=auto depends on: an answer is remembered for exactly this."""
    return {
        "keys": {key: value for key, value in affecting(config, SPEED).items() if key not in DATA_FOLDERS},
        "data": [datasets.train_fingerprint, plan.num_classes],
        "plan": [plan.precision, plan.compile, plan.decoder, plan.channels_last],
        "machine": [plan.device, platform.node(), budget, world.size, world.local_size],
        "versions": [torch.__version__, autotune.VERSION],
    }


def train_step(
    state: TrainState,
    network: nn.Module,
    objective: Callable[..., Any],
    batch: Batch,
    *,
    lr: float,
    config: Config,
    plan: Plan,
) -> Tensor:
    """Forward, loss, backward, clip, update, average. Nothing here waits for the device.

    Returns:
        float32 [4] on the device: summed loss, top-1 hits, top-5 hits, images.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    with plan.autocast():
        loss, values = objective(network, batch.images, batch.targets, batch.labels, config.train.label_smoothing)
    loss.backward()
    if config.optim.clip_norm is not None:
        nn.utils.clip_grad_norm_(network.parameters(), config.optim.clip_norm)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if state.ema is not None:
        state.ema.update_parameters(state.model)
    return values


def validate(
    state: TrainState,
    plan: Plan,
    world: World,
    feed: Feed,
    measure: Callable[..., tuple[Tensor, Tensor, Tensor]],
    tracker: Tracker,
    stop: StopSignal,
    classes: Sequence[str],
) -> None:
    """Measure the model over the whole validation split, once each image, and note in the state whether it is the best so far.

    With train.ema_decay the moving average is measured, and the raw model beside it: `loss_raw`, `top1_raw`, `top5_raw`.
    A signal ends it early, and then nothing is recorded: the next start validates again.
    """
    began = time.perf_counter()
    networks = [state.validated_model] if state.ema is None else [state.validated_model, state.model]
    for network in networks:
        world.share_buffers(network)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in feed.val.batches(0, feed.val_batches):
            if stop.received and world.size == 1:
                return
            yield batch.images, batch.labels

    mistakes = Mistakes(plan.num_classes, world.device, worst=WORST_IMAGES if tracker.draws else 0)
    with plan.autocast(), feed.for_validation():
        found, *raw = evaluate(networks, measure, batches(), world, mistakes)
    if found.images < plan.val_images:
        return
    row = {
        "step": state.step,
        "epoch": plan.epoch(state.step),
        "loss": found.loss,
        "top1": found.top1,
        "top5": found.top5,
    }
    for metrics in raw:
        row |= {"loss_raw": metrics.loss, "top1_raw": metrics.top1, "top5_raw": metrics.top5}
    best = not state.best or found.top1 > state.best["top1"]
    state.last = row
    if best:
        state.best = row
    seconds = time.perf_counter() - began
    tracker.val_row({**row, "split": "val", "images": found.images, "seconds": seconds}, best=best)
    tracker.mistakes(mistakes, classes, scale=feed.val.scale, shift=feed.val.shift, step=state.step)


def save(state: TrainState, config: Config, identity: dict[str, Any], run: RunDirectory, world: World) -> None:
    """Write a checkpoint; rank 0 writes, and all ranks hear of a failure.

    Raises:
        TrainingError: the weights are not finite: no later start could go on from them.
        CheckpointError: it cannot be written.
    """
    world.share_buffers(state.model)
    if not all(bool(tensor.isfinite().all()) for tensor in state.model.state_dict().values()):  # waits for the device
        raise diverged(f"the weights are not finite at step {state.step}")
    content = {
        "step": state.step,
        "state": state.state_dict(),
        "identity": identity,
        "config": {**config_values(config), "ranks": world.size},
        "made_by": checkpoint.provenance(),
    }
    best = int(state.best["step"]) if state.best else None
    world.agree(lambda: checkpoint.save(run.checkpoints, content, keep=config.checkpoint.keep, best_step=best))


def diverged(how: str) -> TrainingError:
    return TrainingError(f"{how}; these weights were not saved: lower optim.lr, lengthen schedule.warmup_epochs or set "
                         "optim.clip_norm, and start over with checkpoint.resume=never or continue from the newest checkpoint "
                         "with checkpoint.resume=PATH checkpoint.accept_changes=true")  # fmt: skip


def make_plan(config: Config, datasets: Datasets, world: World, stored_pixels: str = "cpu") -> Plan:
    """Derive what the run will do.

    Args:
        stored_pixels: `pixels` in the identity of the checkpoint to resume.

    Raises:
        UserError: the batch, the model or the image size cannot be.
    """
    images, size = len(datasets.train), config.loader.batch_size
    check_batch(config, images, world.size)
    with torch.device("meta"):
        model = models.build(config.model.name, num_classes=len(datasets.classes), image_size=datasets.train_side)
    flops = count_flops(model, datasets.train_side)
    precision = choose_precision(config.train.precision, world.device)
    activations = activation_bytes(model, datasets.train_side, torch.bfloat16 if precision == "bf16" else torch.float32)
    count_flops(
        model, datasets.val_side, key="data.val_size, augment.val"
    )  # what would fail at the first validation is refused here
    steps = count_steps(epochs=config.train.epochs, train_images=images, batch_size=size)
    stop_step = min(steps, config.train.max_steps or steps)
    check_profile(config.profile.steps, stop_step)
    channels_last = config.model.channels_last
    if channels_last == "auto":
        channels_last = world.device.type == "cuda" and models.is_convnet(model)
    warmup_steps = round(config.schedule.warmup_epochs * images / size)
    decoder = choose_decoder(config, world.device, stored_pixels)
    budget = chosen_workers(config, world.local_size, decoder)
    unmeasured = autotune.why_not(world.device, decoder, images / size, budget.workers)
    return Plan(
        train_images=images,
        val_images=len(datasets.val),
        num_classes=len(datasets.classes),
        image_size=datasets.train_side,
        val_size=datasets.val_side,
        batch_size=size,
        batch_per_rank=size // world.size,
        world_size=world.size,
        epochs=config.train.epochs,
        schedule_steps=steps,
        stop_step=stop_step,
        curve=Curve(config.schedule, config.optim.lr, warmup_steps, steps, images / size),
        validate_every_epochs=config.train.validate_every_epochs,
        log_every_steps=config.log.every_steps,
        save_every_steps=config.checkpoint.every_steps,
        workers=budget.workers,
        workers_reason=budget.reason,
        measures_workers=config.loader.workers == "auto" and unmeasured is None,
        workers_unmeasured=unmeasured if config.loader.workers == "auto" else None,
        most_workers=worker_budget(world.local_size, decoder=decoder).workers,
        large_files=datasets.train.mean_bytes() > LARGE_FILE,
        decoder=decoder,
        device=str(world.device) if world.device.type == "cpu" else torch.cuda.get_device_name(world.device),
        device_type=world.device.type,
        precision=precision,
        channels_last=channels_last,
        compile=choose_compile(config.model.compile, world.device),
        parameters=models.parameter_count(model),
        flops_per_image=flops,
        activation_bytes=activations,
        notes=(
            *config.notes,
            *precision_note(config.train.precision, world.device),
            *few_steps(config, images, world.size),
            *same_images(datasets),
            *literal_sizes(config, datasets),
        ),
    )


def same_images(datasets: Datasets) -> list[str]:
    """What to say when validation sees the training images."""
    if datasets.train_fingerprint != datasets.val_fingerprint:
        return []
    return ["data.val holds the training images, so its accuracy says nothing about new images; give another split"]


def literal_sizes(config: Config, datasets: Datasets) -> list[str]:
    """What to say when a list of transforms makes images of another size than the key for it says."""
    sizes = [("augment.train", datasets.train_side, "data.image_size", config.data.image_size),
             ("augment.val", datasets.val_side, "data.val_size", config.data.val_size)]  # fmt: skip
    return [f"{key} makes images of {side} px whatever {name}={size} says; write size: ${{{name}}} in it"
            for key, side, name, size in sizes if side != size]  # fmt: skip


def make_room(config: Config, datasets: Datasets, plan: Plan, world: World) -> MemoryPlan:
    """See that the loader's memory is there: for auto, with as many workers as fit.

    Raises:
        UserError: it is not.
    """
    most = 2 * plan.workers if plan.measures_workers else plan.workers  # workers that wait leave their core to others
    if plan.decoder == "gpu" and config.loader.workers == "auto":  # few read files for the engines, all cores validate
        most = max(most, worker_budget(world.local_size).workers)
    return plan_memory(config, datasets, workers=most, fewest=min(1, most) if config.loader.workers == "auto" else None,
                       decoder=plan.decoder, device=world.device, dtype=plan.input_dtype, world_size=world.size,
                       ranks_here=world.local_size)  # fmt: skip


def set_up_process(config: Config, plan: Plan) -> None:
    """Choose kernels: TF32 unless fp32 is asked for, cuDNN's fastest, or with train.deterministic the repeatable ones.

    And keep a launch from waiting for other threads (SWITCH_SECONDS). All of it stays as long as the process.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.set_float32_matmul_precision("highest" if plan.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = plan.precision != "fp32"
    torch.backends.cudnn.benchmark = not config.train.deterministic
    if config.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it, and reads it from nowhere else
    torch.use_deterministic_algorithms(config.train.deterministic)


def build_state(config: Config, plan: Plan, world: World) -> TrainState:
    """Model, optimiser and average on the device; the same initial weights on every rank and kind of device.

    Raises:
        UserError: the weights to start from are missing or do not fit.
    """
    torch.manual_seed(config.train.seed)
    weights = config.model.weights
    model = models.build(config.model.name, num_classes=plan.num_classes, image_size=plan.image_size,
                         pretrained=weights == "pretrained")  # fmt: skip
    if weights not in (None, "pretrained"):
        models.load_weights(model, Path(str(weights)))
    model = model.to(world.device)
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plan.rewrites_layers:
        gpu_layers.rewrite(model)
    ema = MovingAverage(model, config.train.ema_decay) if config.train.ema_decay is not None else None
    return TrainState(model, build_optimizer(model, config.optim), ema)


def run_identity(config: Config, datasets: Datasets, plan: Plan) -> dict[str, Any]:
    """Everything that affects the result, name -> value. A checkpoint with another identity is of another training.

    Derived values replace their keys: a fingerprint of the samples stands for their folders, which may move.
    """
    keys = {key: value for key, value in affecting(config, RESULT).items() if key not in (*DATA_FOLDERS, "loader.decoder")}
    if config.model.weights not in (None, "pretrained"):
        keys["model.weights"] = models.file_fingerprint(Path(str(config.model.weights)))
    return {
        "data.train": datasets.train_fingerprint,
        "data.val": datasets.val_fingerprint,
        **keys,
        "classes": len(datasets.classes),
        "parameters": plan.parameters,
        "train.precision": plan.precision,
        "pixels": pixels_of(plan.decoder),
    }


def load_checkpoint(state: TrainState, path: Path, *, begins: bool, accepted: dict[str, str]) -> dict[str, Any]:
    """Load a checkpoint into the state, and note in its history what makes this run another than its config says.

    Args:
        begins: the checkpoint is that of another run.
        accepted: changes since it was written that affect the result, each key with a sentence.

    Returns:
        The values of the keys with which it was written.
    """
    stored = checkpoint.load(path)
    state.load_state_dict(stored["state"])
    if begins or accepted.keys() & VALIDATED_ON:
        state.best, state.last = {}, {}  # its checkpoint is in another folder, or it is of other images
    if begins:
        state.spent.clear()
        state.origin = str(path.resolve())
        state.history.append(f"began at step {state.step:,} with {path}")
    state.history += [f"accepted at step {state.step:,}: {change}" for change in accepted.values()]
    config: dict[str, Any] = stored["config"]
    return config


def same_on_all_ranks(values: list[dict[str, Any]]) -> None:
    """Refuse ranks that would train different things, or wait for each other.

    Args:
        values: what must be equal, by name: a dictionary of each rank, in their order.

    Raises:
        UserError: names what differs; every rank raises it.
    """
    for rank, own in enumerate(values):
        for name, value in own.items():
            if value != values[0].get(name):
                raise UserError(f"{name}: is {show(value)} on rank {rank} and {show(values[0].get(name))} on rank 0; give "
                                "every rank the same command and the same data")  # fmt: skip


def introduce(
    tracker: Tracker, lines: list[str], run: RunDirectory, resumed: Path | None, history: list[str], changes: list[str]
) -> None:
    """Say once what will happen."""
    for line in lines:
        tracker.say(line)
    whence = "" if resumed is None else resumed.name if resumed.parent == run.checkpoints else str(resumed)
    tracker.say(f"run      {run.path}" + f", resumed from {whence}" * bool(whence))
    for line in history:
        tracker.say(f"history  {line}")
    for change in changes:
        tracker.say(f"changed  {change}")


def compiled(function: F, plan: Plan) -> F:
    """torch.compile in the planned mode; the function itself with compile=off."""
    if plan.compile == "off":
        return function
    if plan.compile == "tuned":
        return torch.compile(function, options=TUNED, dynamic=False)  # type: ignore[return-value]
    return torch.compile(function, mode=plan.compile, dynamic=False)  # type: ignore[return-value]


def setup_of(plan: Plan) -> Setup:
    """The part of the plan that a diagnosis needs."""
    return Setup(
        batch_size=plan.batch_size,
        ranks=plan.world_size,
        on_gpu=plan.device_type == "cuda",
        most_workers=plan.most_workers,
        large_files=plan.large_files,
        decoder=plan.decoder,
        compile=plan.compile,
    )


def build_ledger(plan: Plan, spent: dict[str, float], *, step: int = 0, step_alone: float = 0.0) -> Ledger:
    """The ledger of a start at `step`; arguments as for `Ledger`."""
    peak = peak_rate(plan.device, precision=plan.precision, flops_per_image=plan.flops_per_image, ranks=plan.world_size)
    return Ledger(setup_of(plan), spent, train_images=plan.train_images, step=step, step_alone=step_alone, peak_rate=peak)


def write_interval(
    interval: meters.Interval, plan: Plan, tracker: Tracker, feed: Feed, monitor: GpuMonitor, ledger: Ledger, memory: MemoryPlan
) -> dict[str, Any]:
    """Write and return one log row, from what the meter, the prefetcher's clock, NVML and the allocator found since the last.

    Raises:
        TrainingError: the loss is not finite.
    """
    found = interval.metrics
    if not math.isfinite(found.loss):
        raise diverged(f"the loss is {found.loss} at step {interval.step} (lr {interval.lr:g})")
    row: dict[str, Any] = {
        "step": interval.step,
        "epoch": plan.epoch(interval.step),
        "split": "train",
        "loss": found.loss,
        "top1": found.top1,
        "top5": found.top5,
        "lr": interval.lr,
    }
    timing = feed.train.timing(interval.images // plan.batch_size)
    assert timing is not None  # every step of the interval has ended
    row |= ledger.note(timing, interval.step)
    row["seconds_left"] = (plan.stop_step - interval.step) * plan.batch_size / row["images_per_second"]
    host = host_figures(feed.train.loader.pool.pids, memory.pinned)
    tracker.train_row(row, {**monitor.read(), **allocator_figures(feed.train.device), **host})
    return row


def summarise(state: TrainState, plan: Plan, started: float, signal_number: int) -> dict[str, Any]:
    """What summary.json holds. A signal's number is kept: the exit status follows from it."""
    best_step = state.best.get("step")
    return {
        "status": "interrupted" if signal_number else "finished",
        "signal": signal_number,
        "step": state.step,
        "epoch": round(plan.epoch(state.step), 4),
        "loss": state.last.get("loss"),
        "top1": state.last.get("top1"),
        "top5": state.last.get("top5"),
        **{key: state.last[key] for key in ("loss_raw", "top1_raw", "top5_raw") if key in state.last},
        "best_top1": state.best.get("top1"),
        "best_epoch": round(plan.epoch(int(best_step)), 4) if best_step else None,
        "best_checkpoint": f"step-{int(best_step):08d}.pt" if best_step else None,
        "seconds": time.monotonic() - started,
        "history": state.history,
        "params_sha256": params_sha256(state.model),
    }


def main(config: Config) -> int:
    """Train, and turn how it ended into an exit status: 0 finished, 1 failed, 2 the user's mistake, 128 + signal."""
    leads = int(os.environ.get("RANK", 0)) == 0
    logging.basicConfig(level=logging.INFO if leads else logging.ERROR, format="%(levelname)s: %(message)s", force=True)
    try:
        summary = train(config)
    except UserError as error:
        cli.complain_of_mistake(str(error))
        return 2
    except (LoaderError, checkpoint.CheckpointError, TrainingError) as error:
        cli.complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 128 + summary["signal"] if summary["signal"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on what was begun is cleaned up
    sys.exit(main(CONFIG))
