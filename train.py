"""Train an image classifier, or a network for a different task on images of one size.

    python train.py data.root=/imagenet
    torchrun --nproc-per-node 8 train.py data.root=/imagenet

This file contains the algorithm from top to bottom: the loop, the step, its loss, the validation.
The networks are in models/. Fork this file: no module that it imports depends on it. Scripts call
the `build_...` functions, `forward`, `validation_values` and `predictions`. All ranks must call
functions marked "Collective." at the same step.
"""

if __name__ == "__main__":
    # Parse the command line before importing torch, to answer --help and typos within a second.
    import os
    import sys

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not set with PYTHONSAFEPATH=1
    from conf.start import boot

    CONFIG = boot(__file__, __doc__)
    from pipeline.feed.forkserver import start_forkserver

    start_forkserver(CONFIG.loader.workers)  # imports the workers' modules in the background

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import models
from conf import cli
from conf.named import create_object
from conf.schema import Config
from engine.checkpoint import find_checkpoint
from engine.classifier import classifier_means, classifier_values
from engine.compute import (
    Compute,
    autocast,
    build_model,
    choose_compute,
    compile_blocks,
    compile_function,
    garbage_collection_paused,
    is_search_worthwhile,
    set_up_kernels,
)
from engine.distributed import World, average_gradients, join_world, set_ddp_sync
from engine.log.observer import named_observers
from engine.log.plan import print_plan
from engine.log.runlog import RunLog, open_log
from engine.losses import Criterion, Loss, build_criterion, class_weights
from engine.memory import explain_limit
from engine.metrics import Metrics, Values
from engine.optim import build_optimizer
from engine.run import Parts, Run, checkpoint_metadata, resolve_config
from engine.schedule import make_schedule
from engine.state import MovingAverage, TrainState, check_loss, seed_step
from engine.step_graph import StepGraph
from engine.stop_signal import StopSignal
from engine.tune import fit_to_machine
from engine.validation import dry_run, evaluate, validation_batches
from pipeline.data.build import Datasets, build_datasets
from pipeline.data.field import TARGET
from pipeline.feed.batch import Batch
from pipeline.feed.batch_augment import build_batch_transforms
from pipeline.feed.feed import Feed, open_feed


def train(config: Config) -> dict[str, Any]:
    """Train to the last step, or until a signal; return the contents of summary.json.

    Raises UserError for invalid configs or data, usually before the run directory is created, and
    RunError if training fails.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        enter = stack.enter_context
        run, parts = enter(open_run(config))  # joins the ranks, builds the parts, resumes
        if run.finished_summary is not None:
            return run.finished_summary
        schedule, state, compute = parts.schedule, parts.state, parts.compute
        image_format = compute.dtype, compute.channels_last
        feed = enter(open_feed(run.config, parts.datasets, run.world, *image_format))
        step = enter(TrainStep(parts, feed.mix))
        stop = enter(StopSignal(run.world, feed.pool))
        fit_to_machine(parts, feed, step, run, stop)  # micro-batches, decoder, workers
        log = enter(open_log(parts, feed, step, run))
        # Missing if the validation due at this step was interrupted.
        if schedule.due(state.step).validate and state.last_validation.get("step") != state.step:
            validate(parts, feed, stop, log)
            save(run, state, log)

        # If any rank receives a signal, all ranks leave the loop before the same step.
        for batch in stop.interruptible(feed.train.batches(state.step, schedule.stop_step)):
            log.begin_step(batch)
            values = step(batch)  # lr, mixup, forward, backward, all-reduce, clip, update, EMA
            state.step += 1
            due = schedule.due(state.step)  # log, epoch, validate, save
            row = log.end_step(values, due)
            check_loss(row, run.path)  # the newest row, usually from an earlier step
            if due.validate:
                validate(parts, feed, stop, log)
            if due.save:
                save(run, state, log)
        check_loss(log.end_interval(), run.path)
        if state.step != run.last_saved_step:
            save(run, state, log)
        return log.finish(stop, started)


class TrainStep(StepGraph):
    """`step(batch)` seeds torch, sets the learning rate and calls `train_step`. Collective.

    On a GPU, it replays a CUDA graph of `train_step`; see `StepGraph`.
    """

    def __init__(self, parts: Parts, mix: Callable[[Batch], Batch]) -> None:
        schedule, compute = parts.schedule, parts.compute
        device = parts.world.device
        example = Batch.zeros(compute.fields, device)
        network = parts.world.wrap(parts.state.model, partial(forward, batch=example))
        super().__init__(network, parts.state)
        # Not set earlier, because a search takes seconds, which is too long for the dry run.
        torch.backends.cudnn.benchmark = is_search_worthwhile(schedule.config, schedule.stop_step)
        self.parts = parts
        self.mix = compile_function(mix, compute.compile_mode)
        # A CUDA graph reads the learning rate from memory; torch's fused optimizers expect float32.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        groups = self.state.optimizer.param_groups
        self.lrs = [torch.zeros((), dtype=dtype, device=device) for _ in groups]

    def __call__(self, batch: Batch) -> Values:
        """Train on a batch. The next step overwrites the returned values."""
        schedule, world = self.parts.schedule, self.parts.world
        seed_step(schedule.config.train.seed, batch.step, world.rank, world.device)
        for group, lr in zip(self.state.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr.fill_(schedule.lr(batch.step) * group.get("lr_scale", 1.0))
        return super().__call__(batch)

    def launch(self, batch: Batch) -> Values:
        schedule = self.parts.schedule
        return train_step(
            self.state,
            self.network,
            self.parts.loss_fn,
            batch,
            mix=self.mix,
            clip_norm=schedule.config.optim.clip_norm,
            num_micro_batches=schedule.num_micro_batches,
        )


def train_step(
    state: TrainState,
    network: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    *,
    mix: Callable[[Batch], Batch] = lambda batch: batch,
    clip_norm: float | None = None,
    num_micro_batches: int = 1,
) -> Values:
    """Mix the batch, then run forward, loss, backward, all-reduce, clipping, update and EMA.

    Nothing synchronizes with the device, except an fp16 step of an optimizer that is not fused.

    Args:
        network: the model, wrapped in DDP in multi-node training.
        loss_fn: `training_loss`, or the function that `build_loss` returns.
        mix: `Feed.mix`, the augment.batch transforms.
        clip_norm: maximum global gradient norm; None disables clipping.
        num_micro_batches: number of micro-batches; each image has the same weight.

    Returns:
        Named values to log, including "loss". All logs and the report show values that you add.
    """
    batch = mix(batch)
    means: Values = {}
    for number, micro_batch in enumerate(batch.split(num_micro_batches), start=1):
        set_ddp_sync(network, enabled=number == num_micro_batches)
        loss, values = loss_fn(network, micro_batch)
        weight = len(micro_batch.samples) / len(batch.samples)
        state.scaler.scale(weight * loss).backward()  # DDP averages gradients, if enabled
        for name, value in {"loss": loss.detach(), **values}.items():
            means[name] = means.get(name, 0.0) + weight * value.float()
    average_gradients(network)
    # Without fp16, the scaler is disabled: `step` calls the optimizer, other methods do nothing.
    state.scaler.unscale_(state.optimizer)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.clear_gradients()
    if state.ema is not None:
        state.ema.update_parameters(state.model)
    if state.scaler.is_enabled():
        # `get_scale` would synchronize with the device.
        means["loss_scale"] = state.scaler.scale(torch.ones_like(means["loss"]))
    return means


def build_loss(criterion: Criterion, compute: Compute) -> Loss:
    """Return `training_loss` with this criterion, compiled and under autocast."""
    compiled = compile_function(training_loss, compute.compile_mode)
    context = autocast(compute.device.type, compute.precision)  # once, as it queries the device
    return partial(context(compiled), criterion=criterion)


def forward(network: nn.Module, batch: Batch) -> Tensor:
    """Call the network. Training, validation, prediction and export call it only here.

    For a network with a second input, pass a second batch field, such as `batch["age"]`.
    """
    outputs: Tensor = network(batch["image"])
    return outputs


def training_loss(
    network: nn.Module, batch: Batch, criterion: Criterion = nn.functional.cross_entropy
) -> tuple[Tensor, Values]:
    """Compute the forward pass and the loss (the compiled region).

    Args:
        batch: `image`, float [B, C, S, S]; `label`, int64 [B], used for top1 and top5; and, after
            mixup or cutmix, `target`, float [B, classes].
        criterion: maps float32 [B, classes] logits to the mean loss; see engine/losses.py.

    Returns:
        The mean loss, float32 [], and named batch means to log, each float32 [].
    """
    labels = batch["label"]
    targets = batch.fields.get(TARGET, labels)
    logits = forward(network, batch).float()
    return criterion(logits, targets), classifier_means(logits, labels)


def validation_values(network: nn.Module, batch: Batch) -> Values:
    """Compute the forward pass and the loss in validation.

    Not compiled, because decoding the validation images on the CPU usually takes longer.

    Returns:
        Named per-sample values, [B, ...]. Float values [B] are averaged over the split, except
        `confidence`, `score` and values used only as metric inputs (engine/metrics.py).
    """
    return classifier_values(forward(network, batch).float(), batch["label"])


def predictions(outputs: Tensor) -> Values:
    """Convert network outputs to the values that scripts/predict.py prints for each image.

    For `probability`, float [B, classes], it prints the most probable classes. It prints any other
    value of shape [B] as a number, and of shape [B, n] as a list.
    """
    return {"probability": outputs.float().softmax(1)}


def validate(parts: Parts, feed: Feed, stop: StopSignal, log: RunLog) -> None:
    """Validate on each image once, and record the result and whether it is best. Collective.

    With train.ema_decay, validate the EMA model and also the raw model (`loss_raw`, `top1_raw`,
    ...). If a signal interrupts validation, nothing is recorded and the next start validates again.
    """
    world, schedule = parts.world, parts.schedule
    metrics, state = parts.metrics, parts.state
    networks = [state.model] if state.ema is None else [state.ema.module, state.model]
    with log.pause(f"validating {len(parts.datasets.val):,} images"):
        for network in networks:
            world.broadcast(network.buffers())
        batches = validation_batches(feed, stop, schedule.num_micro_batches)
        with parts.compute.for_validation(), feed.for_validation():
            result, *raw_results = evaluate(networks, validation_values, batches, world)
        if result.images < len(parts.datasets.val):
            return  # interrupted by a signal
        row = {"step": state.step, "epoch": schedule.epoch(state.step)}
        row |= result.values(metrics)
        for raw in raw_results:
            row |= {f"{name}_raw": value for name, value in raw.values(metrics).items()}
        best = metrics.prefers(row, state.best_validation)
        state.last_validation = row
        if best:
            state.best_validation = row
        log.validated(row, result, best=best)


def save(run: Run, state: TrainState, log: RunLog) -> None:
    """Start writing a checkpoint in a thread while training continues. Collective."""
    with log.pause():
        log.tracker.flush()  # leaves no gap in the curves if the process is killed
        run.save(state)


@contextmanager
def open_run(config: Config) -> Iterator[tuple[Run, Parts]]:
    """Join the ranks, build the parts, and start or resume the run. Collective."""
    with join_world(config.train.device, config.loader.timeout_seconds) as world:
        config = resolve_config(config, world)
        with Run(config, world) as run:
            parts = build_parts(config, world, run.read_checkpoint())
            run.resume(parts.state, checkpoint_metadata(parts), parts.schedule.stop_step)
            print_plan(parts, run)
            with garbage_collection_paused():
                yield run, parts


def build_parts(config: Config, world: World, stored: dict[str, Any]) -> Parts:
    """Find the images, and build the model, loss, optimizer and schedule. Collective.

    `stored`: contents of the checkpoint to resume, {} to start at step 0. Nearly all user errors
    are raised here as UserError, before the run directory is created.
    """
    identity = stored.get("identity", {})
    with world.shared_errors():
        metrics = Metrics.of(config)
        datasets = build_datasets(config, world.device, identity.get("decode_mode"))
        mixing = build_batch_transforms(config, datasets)  # raises UserError for invalid transforms
        schedule = make_schedule(config, len(datasets.train), world, identity)
        compute = choose_compute(config, datasets, schedule, world.device, forward)
        set_up_kernels(config.train.deterministic, compute.precision)
        weights = class_weights(config.train, datasets, world.device)
        criterion = build_criterion(config.train, weights)
        loss_fn = build_loss(criterion, compute)
        state = build_state(config, datasets, compute, world)
        named_observers(config)  # raises UserError for an unknown name
    parts = Parts(world, datasets, schedule, compute, loss_fn, metrics, state)
    dry_run(
        parts,
        mixing,
        criterion,
        lambda network, batch: predictions(forward(network, batch)),
        validation_values,
    )
    return parts


def build_state(config: Config, datasets: Datasets, compute: Compute, world: World) -> TrainState:
    """Build the model, optimizer and EMA on the device.

    Initial weights are identical across ranks and device types. Raises UserError if model.weights
    is not found or does not match the model.
    """
    weights = config.model.weights
    torch.manual_seed(config.train.seed)
    model = build_model(config, datasets, pretrained=weights == "pretrained")
    if weights not in (None, "pretrained"):
        models.load_weights(model, find_checkpoint(weights), datasets.classes)
    if config.model.sync_bn and world.size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    models.freeze(model, config.model.freeze)
    layout = torch.channels_last if compute.channels_last else torch.preserve_format
    model = model.to(world.device).to(memory_format=layout)
    if compute.rewrite is not None:
        options = {"channels_last": compute.channels_last}
        create_object(compute.rewrite, "model.rewrite", object, model, **options)
    if compute.compile_mode == "blocks":
        compile_blocks(model)
    decay = config.train.ema_decay
    ema = None if decay is None else MovingAverage(model, decay)
    scaler = torch.amp.GradScaler(world.device.type, enabled=compute.precision == "fp16")
    return TrainState(model, build_optimizer(model, config.optim), ema, scaler=scaler)


def main(config: Config) -> int:
    """Train and return the exit status: 0 finished, 1 failed, 2 user error, 128 + signal."""

    def status() -> int:
        signal_number = train(config)["signal"]
        return 128 + signal_number if signal_number else 0

    cli.log_to_stderr(force=True)
    return cli.run_main(status, explain_limit)


if __name__ == "__main__":
    sys.exit(main(CONFIG))
