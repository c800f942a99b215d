"""One run: its folder, which one process uses at a time, and what must not change when it resumes.

`read_checkpoint` chooses the checkpoint from which this start continues; `resume` refuses another
training, loads the state and claims the folder; `save` writes checkpoints while training continues.
"""

import fcntl
import gc
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from conf.compose import to_yaml
from conf.errors import RunError, UserError
from conf.named import create_object, split_entry
from conf.schema import CHOOSE_SAMPLES, Config, config_values, result_keys, show
from engine import checkpoint
from engine.compute import Compute
from engine.distributed import World
from engine.files import replace_file
from engine.losses import Loss
from engine.metrics import Metrics
from engine.schedule import Schedule
from engine.state import TrainState, diverged
from pipeline.data.build import Datasets
from pipeline.data.field import IMAGE, describe_fields
from pipeline.data.splits import check_output_path

logger = logging.getLogger(__name__)

# Tensor shapes or step numbers depend on these: no checkpoint can resume with other values.
FIXED = ("model.name", "model.freeze", "optim.name", "optim.args", "loader.batch_size", "classes")
# Keys that decide what validations measure, or which is best: earlier results are not comparable.
VALIDATED_ON = {"data.val", "data.val_size", "data.mean", "data.std", "data.exif_orientation"}
VALIDATED_ON |= {"augment.val", "train.best_by"}
RUN_FILES = {"config.yaml", "checkpoints", ".lock"}  # a folder with other files holds one of these
MAX_CHANGES_SHOWN = 6  # keys that a refusal lists


@dataclass(frozen=True)
class Parts:
    """What a training consists of, before it loads batches: the result of `train.build_parts`."""

    world: World
    datasets: Datasets
    schedule: Schedule
    compute: Compute
    loss_fn: Loss
    metrics: Metrics
    state: TrainState


class Run(AbstractContextManager["Run"]):
    """config.yaml, metrics.jsonl, checkpoints/, TensorBoard's files and summary.json, in a folder.

    Rank 0 writes the folder, run.dir, and all ranks read the checkpoint to resume.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed_from: Path | None = None  # the checkpoint from which this start continues
        self.finished_summary: dict[str, Any] | None = None  # if an earlier start finished it
        self.metadata: dict[str, Any] = {}  # stored in each checkpoint
        # Step of the newest checkpoint, perhaps still being written; at first, that of the start
        self.last_saved_step = 0
        self._found: list[Path] = []  # checkpoints of this folder when `read_checkpoint` looked
        self._stored: dict[str, Any] = {}  # content of `resumed_from`, until it is loaded
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: futures.Future[None] = futures.Future()  # the last checkpoint
        self._writing.set_result(None)
        self._lock: int | None = None  # on rank 0, once this start owns the folder

    def read_checkpoint(self) -> dict[str, Any]:
        """Read the checkpoint to resume; return its content, {} to begin at step 0. Collective.

        Raises UserError if the folder holds something else, or if the checkpoint that
        checkpoint.resume names is not one or not of this run; RunError for damaged ones.
        """
        given = self.config.checkpoint.resume
        self._found = self.world.on_rank_0(self._own_checkpoints)
        with self.world.shared_errors():  # a node may not see the folder
            if self._found:
                self.resumed_from, self._stored = checkpoint.load_newest(self._found)
                before = self._stored["config"].get("checkpoint.resume")
                if given not in ("auto", before):
                    wrong = f"{self.path} holds a run that was last started with {before}"
                    cure = "leave the key out to resume it, or give a run.name"
                    raise UserError(f"checkpoint.resume={given}", wrong, cure)
            elif given not in ("auto", "never"):
                path = Path(given)
                in_folder = checkpoint.files(path) + checkpoint.files(path / "checkpoints")
                if in_folder:
                    path = in_folder[-1]  # the newest
                self.resumed_from = path
                self._stored = checkpoint.load(path)
        return self._stored

    def _own_checkpoints(self) -> list[Path]:
        """Return the checkpoints of this folder, newest first; refuse a folder that is no run."""
        given = f"run.dir={self.path}"
        check_output_path(self.path, self.config.data, given)
        names = set(map(os.path.basename, self.path.glob("*")))
        if names and names.isdisjoint(RUN_FILES):
            raise UserError(given, "holds files that are not of a run", "give another")
        if self.config.checkpoint.resume == "never":
            return []
        return checkpoint.files(self.checkpoints)[::-1]

    def resume(self, state: TrainState, metadata: dict[str, Any], stop_step: int) -> None:
        """Load what `read_checkpoint` has read, claim the folder and write config.yaml. Collective.

        `metadata`: of `checkpoint_metadata`. Raises UserError, before it changes a run, if the
        checkpoint is of another training, or another process uses or has just used the folder. A
        finished run keeps its config and its summary.
        """
        self.world.check_same({"checkpoint": str(self.resumed_from), **metadata["identity"]})
        if self.resumed_from is not None:
            self._continue(state, self.resumed_from, metadata["identity"])
        self._stored = {}  # frees the memory
        self.metadata = metadata
        self.last_saved_step = state.step
        self.finished_summary = self.world.on_rank_0(lambda: self._claim(state, stop_step))

    def note_measured(self, fitted_micro_batch: int | None, decode_mode: str) -> None:
        """Add to the identity what is measured at the start; later starts keep it."""
        measured = {"fitted_micro_batch": fitted_micro_batch, "decode_mode": decode_mode}
        self.metadata["identity"] |= measured

    def _continue(self, state: TrainState, path: Path, identity: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, unless it is of another training."""
        changes = changed_keys(self._stored["identity"], identity)
        # Not in the identity, because the weights do not depend on it.
        best_by = {"train.best_by": self.config.train.best_by}
        changes |= changed_keys(self._stored["config"], best_by)
        check_changes(path, changes, accept=self.config.checkpoint.accept_changes)
        try:
            state.load_state_dict(self._stored["state"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            wrong = f"its state does not fit this training: {reason}"
            cure = "give checkpoint.resume=PATH of another one"
            raise UserError(f"cannot resume {path}", wrong, cure) from None
        if path not in self._found:
            state.forget_validations()  # the best checkpoint is in another folder
            given = self.config.checkpoint.resume
            state.history.append(f"began at step {state.step:,} with {given}")
        if not VALIDATED_ON.isdisjoint(changes):
            state.forget_validations()
        for change in changes.values():
            state.history.append(f"accepted at step {state.step:,}: {change}")

    def _claim(self, state: TrainState, stop_step: int) -> dict[str, Any] | None:
        """Lock the folder and tidy it up after a kill; return the summary of a finished run.

        Raises UserError if another process has trained in it since `read_checkpoint`.
        checkpoint.resume=never moves an earlier run aside. Without a summary, writes the config.
        """
        if self.config.checkpoint.resume == "never" and self.path.exists():
            lock = _lock(self.path)  # fails if another process trains in it
            folder = self.path.resolve()  # run.dir may be a link to another disk
            aside = folder.with_name(f"{folder.name}.old-{datetime.now():%Y%m%d-%H%M%S-%f}")
            os.rename(folder, aside)
            folder.mkdir()
            os.close(lock)
            logger.info("the earlier run is now %s", aside)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        if self._own_checkpoints() != self._found:
            wrong = "another process has trained in it during this start"
            raise UserError(f"run.dir={self.path}", wrong, "give the same command again")
        for left in self.checkpoints.glob("*.tmp"):  # a kill leaves them
            left.unlink()
        if state.best_validation:
            checkpoint.link_best(self.checkpoints, int(state.best_validation["step"]))
        summary = self._summary_of_finished(state, stop_step)
        if summary is None:
            # This also fsyncs the name of checkpoints/ in the folder.
            replace_file(self.path / "config.yaml", to_yaml(self.config))
            typed = OmegaConf.create(self.config.overrides)
            replace_file(self.path / "overrides.yaml", OmegaConf.to_yaml(typed))
            (self.path / "summary.json").unlink(missing_ok=True)  # of an earlier start
        return summary

    def _summary_of_finished(self, state: TrainState, stop_step: int) -> dict[str, Any] | None:
        """Return the summary of an earlier start that finished with this state and validation."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # none, or cut off by a full disk
            summary: dict[str, Any] = json.loads((self.path / "summary.json").read_bytes())
            finished = summary["status"] == "finished" and summary["step"] == state.step
            if finished and state.step >= stop_step and state.last_validation:
                return summary
        return None

    def save(self, state: TrainState) -> None:
        """Copy the state to the host, and write a checkpoint in a thread. Collective.

        Raises RunError if the weights of the previous one are not finite, or it cannot be written.
        """
        self.wait()
        if not self.world.has_equal_weights(state.model):
            text = "step %d: the weights differ between ranks, and the checkpoint has rank 0's; "
            text += "train_step must draw the same random numbers on all ranks after the averaging"
            logger.warning(text, state.step)
        self.world.broadcast_buffers(state.model)
        if self.world.is_main:
            copied = checkpoint.host_copy(state.state_dict(), self.world.device)
            content = {"step": state.step, "state": copied, **self.metadata}
            # timm, among others, looks for weights under this key. The file holds them only once.
            content["state_dict"] = copied["ema"] or copied["model"]
            parameters = [name for name, _ in state.model.named_parameters()]
            self._writing = self._thread.submit(self._write, content, parameters)
        self.last_saved_step = state.step
        gc.collect(1)  # the loop collects nothing; 1: newer objects, in Python 3.14 perhaps more

    def _write(self, content: dict[str, Any], parameters: Sequence[str]) -> None:
        weights = content["state"]["model"]
        for name in weights.keys() & parameters:  # not buffers: a mask may hold inf
            if not weights[name].isfinite().all():
                raise diverged(f"the weights are not finite at step {content['step']}", self.path)
        self.check_lock()
        checkpoint.save(self.checkpoints, content, keep=self.config.checkpoint.keep)

    def check_lock(self) -> None:
        """Raise RunError if run.dir is no longer the folder that this start has locked."""
        assert self._lock is not None
        is_ours = False
        with suppress(OSError):  # the folder was removed
            is_ours = os.path.samestat(os.fstat(self._lock), os.stat(self.path / ".lock"))
        if not is_ours:
            text = "was moved or removed; to resume it, give run.dir its new path"
            raise RunError(f"run.dir={self.path}: {text}")

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises what `save` raises."""
        self.world.on_rank_0(self._writing.result)

    def __exit__(self, *_: object) -> None:
        """Wait until the last checkpoint is on disk, and release the lock."""
        self._thread.shutdown()  # not `wait`: its error would hide the one that ends the run
        if self._lock is not None:
            os.close(self._lock)


def resolve_config(config: Config, world: World) -> Config:
    """Apply train.prepare, and share rank 0's `run` keys with all ranks. Collective.

    The ranks would resolve ${now:} differently. Raises UserError if their types of device differ,
    or their values of a key that is not in CHOOSE_SAMPLES; and what train.prepare raises.
    """
    if config.train.prepare is not None:
        name, parameters = split_entry(config.train.prepare, "train.prepare")
        config = create_object(name, "train.prepare", Config, config, world, **parameters)
    config = replace(config, run=world.on_rank_0(lambda: config.run))
    shared = config_values(config)
    for name in CHOOSE_SAMPLES:
        del shared[name]
    shared["train.device"] = world.device.type
    world.check_same(shared)
    return config


def checkpoint_metadata(parts: Parts) -> dict[str, Any]:
    """Return what each checkpoint of a run stores in addition to its step and its state.

    `identity` is compared when the run resumes; `config` and `model_input` are for programs that
    use the model; `made_by` is for the reader.
    """
    datasets, schedule, compute = parts.datasets, parts.schedule, parts.compute
    image = datasets.train.fields[IMAGE]
    return {
        "identity": run_identity(datasets, schedule, compute),
        "config": {**config_values(schedule.config), "ranks": schedule.ranks},
        "model_input": {
            "classes": list(datasets.classes),
            "image_size": schedule.config.data.image_size,
            "image_shape": list(image.device_shape),
            "image_dtype": np.dtype(image.dtype).name,
            "fields": describe_fields(datasets.train.fields),
            "channels_last": compute.channels_last,
            "rewrites_layers": compute.rewrite is not None,
        },
        "made_by": checkpoint.provenance(),
    }


def run_identity(datasets: Datasets, schedule: Schedule, compute: Compute) -> dict[str, Any]:
    """Return everything that affects the result, name -> value: a resumed run must have the same.

    Instead of the folders of the images, which may move, a fingerprint of the samples; instead of
    the decoder, the mode of the dataset; instead of a file of weights, a hash of its content.
    """
    keys = result_keys(schedule.config)
    for replaced in (*CHOOSE_SAMPLES, "loader.decoder"):
        keys.pop(replaced, None)
    return {
        "data.train": datasets.train.fingerprint(),
        "data.val": datasets.val.fingerprint(),
        **keys,
        "model.weights": _weights_identity(schedule.config.model.weights),
        "classes": len(datasets.classes),
        "parameters": compute.parameters,
        "train.precision": compute.precision,
        "decode_mode": datasets.decode_modes[0],
        "fitted_micro_batch": schedule.fitted_micro_batch,
    }


def _weights_identity(weights: str | None) -> str | None:
    """Return the SHA-256 of the file that model.weights names; other values as they are."""
    if weights in (None, "pretrained"):
        return weights
    with open(checkpoint.find_checkpoint(weights), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"SHA-256 {digest[:16]}"


def changed_keys(stored: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, str]:
    """Return how a checkpoint's identity differs from that of this start, name -> both values.

    Keys of FIXED come first. A key that only the checkpoint has is left out.
    """
    changes = {}
    for name in sorted(identity, key=lambda name: name not in FIXED):
        before = stored.get(name)
        now = identity[name]
        if before != now:
            changes[name] = f"{name}={show(before)} (now {show(now)})"
    return changes


def check_changes(path: Path, changes: Mapping[str, str], *, accept: bool) -> None:
    """Raise UserError for changes that are not accepted, or with which the state does not fit."""
    refused = [change for name, change in changes.items() if name in FIXED or not accept]
    if refused:
        shown = ", ".join(refused[:MAX_CHANGES_SHOWN])
        wrong = f"keys that affect the result have changed ({len(refused)}): {shown}"
        cure = "give run.name=NAME to start another run; checkpoint.accept_changes=true continues "
        cure += f"this one, unless one of these has changed: {', '.join(FIXED)}"
        raise UserError(f"cannot resume {path}", wrong, cure)


def _lock(path: Path) -> int:
    """Lock the folder. The kernel releases the lock when the process ends, however it ends."""
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"run.dir={path}", "a process trains in it", "give a run.name") from None
    return lock
