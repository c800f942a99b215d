"""A run and its directory: locking, checkpoints, and checks for changes when the run resumes.

`read_checkpoint` selects the checkpoint to resume from. `resume` checks that it matches this
training, loads the state and locks the directory. `save` writes checkpoints while it continues.
"""

import gc
import hashlib
import json
import logging
import os
from collections.abc import Mapping
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
from engine.files import lock, replace_file
from engine.losses import Loss
from engine.metrics import Metrics
from engine.schedule import Schedule
from engine.state import TrainState, diverged
from models.weights import finite_in
from pipeline.data.build import Datasets
from pipeline.data.field import IMAGE, describe_fields
from pipeline.data.splits import check_output_path

logger = logging.getLogger(__name__)

# Tensor shapes or step numbers depend on these keys, so no checkpoint resumes with other values.
FIXED = ("model.name", "model.freeze", "optim.name", "optim.args", "loader.batch_size", "classes")
# Keys that affect validation results or their order, so that earlier results are not comparable.
VALIDATED_ON = {"data.val", "data.val_size", "data.mean", "data.std", "data.exif_orientation"}
VALIDATED_ON |= {"augment.val", "train.best_by"}
RUN_FILES = {"config.yaml", "checkpoints", ".lock"}  # at least one exists in a run directory
MAX_CHANGES_SHOWN = 6  # keys in an error message


@dataclass(frozen=True)
class Parts:
    """Components of a run before it loads batches, returned by `train.build_parts`."""

    world: World
    datasets: Datasets
    schedule: Schedule
    compute: Compute
    loss_fn: Loss
    metrics: Metrics
    state: TrainState


class Run(AbstractContextManager["Run"]):
    """Run directory: config.yaml, metrics.jsonl, checkpoints/, TensorBoard files, summary.json.

    Rank 0 writes to the directory, run.dir. All ranks read the checkpoint to resume from.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed_from: Path | None = None  # checkpoint that this start resumes from
        self.finished_summary: dict[str, Any] | None = None  # set if the run has finished before
        self.metadata: dict[str, Any] = {}  # stored in each checkpoint
        # Newest checkpoint's step, even while it is written; initially the step of this start
        self.last_saved_step = 0
        self._found: list[Path] = []  # checkpoints that `read_checkpoint` found in run.dir
        self._stored: dict[str, Any] = {}  # contents of `resumed_from` until they are loaded
        self._finite: set[str] = set()  # names of tensors to check; a mask may contain inf
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._thread.submit(lambda: None)  # write of the newest checkpoint
        self._lock: int | None = None  # file descriptor on rank 0 while the directory is locked

    def read_checkpoint(self) -> dict[str, Any]:
        """Return the contents of the checkpoint to resume, or {} to begin at step 0. Collective.

        Raises UserError if run.dir is not a run directory, if checkpoint.resume is not a checkpoint
        or conflicts with the run in run.dir; RunError if all checkpoints in run.dir are damaged.
        """
        given = self.config.checkpoint.resume
        self._found = self.world.on_rank_0(self._list_checkpoints)
        with self.world.shared_errors():  # a node may not have access to the directory
            if self._found:
                self.resumed_from, self._stored = checkpoint.load_newest(self._found)
                before = self._stored["config"].get("checkpoint.resume")
                if given not in ("auto", before):
                    problem = f"the run in {self.path} was last started with {before}"
                    fix = "omit the key to resume it, or choose a different run.name"
                    raise UserError(f"checkpoint.resume={given}", problem, fix)
            elif given not in ("auto", "never"):
                path = Path(given)
                in_folder = checkpoint.files(path) + checkpoint.files(path / "checkpoints")
                self.resumed_from = [path, *in_folder][-1]  # a directory's newest checkpoint
                self._stored = checkpoint.load(self.resumed_from)
        return self._stored

    def _list_checkpoints(self) -> list[Path]:
        """Return checkpoints, newest first. Raises UserError if run.dir is not a run directory."""
        given = f"run.dir={self.path}"
        check_output_path(self.path, self.config.data, given)
        names = set(map(os.path.basename, self.path.glob("*")))
        if names and names.isdisjoint(RUN_FILES):
            raise UserError(given, "is not empty and not a run directory", "choose a new one")
        if self.config.checkpoint.resume == "never":
            return []
        return checkpoint.files(self.checkpoints)[::-1]

    def resume(self, state: TrainState, metadata: dict[str, Any], stop_step: int) -> None:
        """Load the checkpoint, lock the run directory and write config.yaml. Collective.

        A finished run keeps its config and summary. Raises UserError, before changing a run, if the
        checkpoint does not match this training, or if the directory is or was just in use by a
        different process. `metadata`: return value of `checkpoint_metadata`.
        """
        self.world.check_same({"checkpoint": str(self.resumed_from), **metadata["identity"]})
        self._finite = finite_in(state.model.state_dict())
        if self.resumed_from is not None:
            self._load_checkpoint(state, self.resumed_from, metadata["identity"])
        self._stored = {}  # free the memory
        self.metadata = metadata
        self.last_saved_step = state.step
        self.finished_summary = self.world.on_rank_0(lambda: self._lock_directory(state, stop_step))

    def _load_checkpoint(self, state: TrainState, path: Path, identity: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint. Raises UserError if it does not match this training."""
        changes = changed_keys(self._stored["identity"], identity)
        # train.best_by is not in the identity, because the weights do not depend on it.
        best_by = {"train.best_by": self.config.train.best_by}
        before = best_by | self._stored["config"]  # may come from a version without the key
        changes |= changed_keys(before, best_by)
        check_changes(path, changes, accept=self.config.checkpoint.accept_changes)
        try:
            state.load_state_dict(self._stored["state"])
            if not self._finite <= finite_in(state.model.state_dict()):
                raise ValueError("its weights are not finite")
            state.try_step()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            problem = f"its state does not match this training ({reason})"
            fix = "set checkpoint.resume=PATH to a different checkpoint"
            raise UserError(f"cannot resume {path}", problem, fix) from None
        if path not in self._found:
            state.forget_validations()  # the best checkpoint is in a different directory
            given = self.config.checkpoint.resume
            state.history.append(f"began at step {state.step:,} with {given}")
        if not VALIDATED_ON.isdisjoint(changes):
            state.forget_validations()
        for change in changes.values():
            state.history.append(f"accepted at step {state.step:,}: {change}")

    def _lock_directory(self, state: TrainState, stop_step: int) -> dict[str, Any] | None:
        """Lock the directory, clean up after a kill and return the summary if the run is finished.

        Writes the config if the run is not finished. With checkpoint.resume=never, first renames an
        earlier run. Raises UserError if a process has trained in it since `read_checkpoint`.
        """
        if self.config.checkpoint.resume == "never" and self.path.exists():
            descriptor = _lock(self.path)  # fails if a process trains in it
            folder = self.path.resolve()  # run.dir may be a symlink to a different disk
            aside = folder.with_name(f"{folder.name}.old-{datetime.now():%Y%m%d-%H%M%S-%f}")
            os.rename(folder, aside)
            folder.mkdir()
            os.close(descriptor)
            logger.info("moved the earlier run to %s", aside)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        if self._list_checkpoints() != self._found:
            problem = "a different process trained in it during this start"
            raise UserError(f"run.dir={self.path}", problem, "run the same command again")
        for temporary in self.checkpoints.glob("*.tmp"):  # left behind by a kill
            temporary.unlink()
        if state.best_validation:
            checkpoint.link_best(self.checkpoints, int(state.best_validation["step"]))
        summary = self._summary_of_finished(state, stop_step)
        if summary is None:
            # This also fsyncs the entry of checkpoints/ in the directory.
            replace_file(self.path / "config.yaml", to_yaml(self.config))
            typed = OmegaConf.create(self.config.overrides)
            replace_file(self.path / "overrides.yaml", OmegaConf.to_yaml(typed))
            (self.path / "summary.json").unlink(missing_ok=True)  # written by an earlier start
        return summary

    def _summary_of_finished(self, state: TrainState, stop_step: int) -> dict[str, Any] | None:
        """Return the summary if an earlier start finished with this state and validation."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # absent or truncated (full disk)
            summary: dict[str, Any] = json.loads((self.path / "summary.json").read_bytes())
            finished = summary["status"] == "finished" and summary["step"] == state.step
            if finished and state.step >= stop_step and state.last_validation:
                return summary
        return None

    def save(self, state: TrainState) -> None:
        """Copy the state to the host and start to write a checkpoint in a thread. Collective.

        Raises RunError if the previous one cannot be written, or if its weights are not finite.
        """
        self.wait()
        if not self.world.has_equal_weights(state.model):
            text = "step %d: the weights differ between ranks, and the checkpoint has rank 0's; "
            text += "train_step must draw equal random numbers on all ranks after average_gradients"
            logger.warning(text, state.step)
        self.world.broadcast(state.model.buffers())
        if self.world.is_main:
            copied = checkpoint.host_copy(state.state_dict(), self.world.device)
            content = {"step": state.step, "state": copied, **self.metadata}
            # timm and others look for weights under this key. The file stores them only once.
            content["state_dict"] = copied["ema"] or copied["model"]
            self._writing = self._thread.submit(self._write, content)
        self.last_saved_step = state.step
        gc.collect(1)  # the loop collects nothing; 1 means newer objects, in Python 3.14 maybe more

    def _write(self, content: dict[str, Any]) -> None:
        if not self._finite <= finite_in(content["state"]["model"]):
            raise diverged(f"the weights are not finite at step {content['step']}", self.path)
        self.check_lock()
        checkpoint.save(self.checkpoints, content, keep=self.config.checkpoint.keep)

    def check_lock(self) -> None:
        """Raise RunError if run.dir is no longer ours; lock it again if its .lock was deleted."""
        assert self._lock is not None
        path = self.path / ".lock"
        with suppress(OSError):  # the directory was removed
            if not path.exists() and (self.path / "config.yaml").exists():
                os.close(self._lock)
                self._lock = _lock(self.path)
            if os.path.samestat(os.fstat(self._lock), os.stat(path)):
                return
        text = "was moved or removed, or its .lock was deleted and a different process trains in it"
        raise RunError(f"run.dir={self.path}: {text}; set run.dir to its new path to resume it")

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk. Collective. Raises RunError like `save`."""
        self.world.on_rank_0(self._writing.result)

    def __exit__(self, *_: object) -> None:
        """Wait until the newest checkpoint is on disk, and release the lock."""
        self._thread.shutdown()  # an error raised by `wait` would hide the one that ends the run
        if self._lock is not None:
            os.close(self._lock)


def resolve_config(config: Config, world: World) -> Config:
    """Apply train.prepare, and share rank 0's `run` keys with all ranks. Collective.

    Ranks would resolve ${now:} differently. Raises UserError if device types or values of keys not
    in CHOOSE_SAMPLES differ between ranks. Also raises errors of train.prepare.
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
    """Return the metadata that each checkpoint stores in addition to the step and the state.

    `identity` is compared on resume, `config` and `model_input` are for programs that use the
    model, and `made_by` is for human readers.
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
    """Return name -> value of everything that affects the result and must not change on resume.

    Image directories, which may move, are replaced by a fingerprint of the samples, the decoder by
    the dataset's mode, and a weights file by a hash of its contents.
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
    """Return the SHA-256 of the model.weights file, or None and `pretrained` unchanged."""
    if weights in (None, "pretrained"):
        return weights
    with open(checkpoint.find_checkpoint(weights), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"SHA-256 {digest[:16]}"


def changed_keys(stored: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, str]:
    """Compare a checkpoint's identity with this start's; return name -> both values if changed.

    Keys in FIXED come first. Keys that only the checkpoint has are ignored.
    """
    changes = {}
    for name in sorted(identity, key=lambda name: name not in FIXED):
        before = stored.get(name)
        now = identity[name]
        if before != now:
            changes[name] = f"{name}={show(before)} (now {show(now)})"
    return changes


def check_changes(path: Path, changes: Mapping[str, str], *, accept: bool) -> None:
    """Raise UserError for changes that are not accepted, or whose key is in FIXED."""
    rejected = [change for name, change in changes.items() if name in FIXED or not accept]
    if rejected:
        shown = ", ".join(rejected[:MAX_CHANGES_SHOWN])
        problem = f"keys that affect the result have changed ({len(rejected)}): {shown}"
        fix = "set run.name=NAME to start a new run, or checkpoint.accept_changes=true to continue "
        fix += f"this one, unless one of these has changed: {', '.join(FIXED)}"
        raise UserError(f"cannot resume {path}", problem, fix)


def _lock(path: Path) -> int:
    """Lock the directory, and return the descriptor of its lock file."""
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    lock(descriptor, f"run.dir={path}", "set a new run.name")
    return descriptor
