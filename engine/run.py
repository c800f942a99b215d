"""One run: its folder, which one process uses at a time, and what must not change when it resumes.

`read_checkpoint` chooses the checkpoint from which this start continues; `resume` refuses another
training, loads the state and claims the folder; `save` writes checkpoints while training continues.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from conf.compose import to_yaml
from conf.errors import UserError
from conf.schema import CHOOSE_SAMPLES, Config, config_values, result_keys, show
from engine import checkpoint
from engine.compute import Compute
from engine.distributed import World
from engine.files import replace_file
from engine.schedule import Schedule
from engine.state import TrainState, diverged
from pipeline.batch import IMAGE
from pipeline.build import Datasets
from pipeline.splits import refuse_inside

logger = logging.getLogger(__name__)

# Tensor shapes or step numbers depend on these: no checkpoint can resume with other values.
FIXED = ("model.name", "model.freeze", "optim.name", "optim.args", "loader.batch_size", "classes")
WEIGHTS = ("model.weights",)  # keys that name a file, whose content counts
# Keys that decide what a validation measures. If one changes, earlier results are not comparable.
VALIDATED_ON = {"data.val", "data.val_size", "data.mean", "data.std", "augment.val"}
VALIDATED_ON |= {"data.exif_orientation"}
# Key -> pattern of others that follow from it; a refusal does not list them.
FOLLOW = {f"{s}.name": rf"{s}\.(?!name)|parameters" for s in ("model", "optim", "schedule")}
FOLLOW |= {"data.image_size": r"data\.val_size|augment\.(train|val)"}
FOLLOW |= {"train.epochs": r"schedule\.warmup", "classes": r"data\.(train|val)$|classes|parameters"}
BEGAN, WITH = "began at step ", " with "  # of a line in the history: `began at step 5 with PATH`


class Run(AbstractContextManager["Run"]):
    """config.yaml, metrics.jsonl, checkpoints/, TensorBoard's files and summary.json, in a folder.

    Rank 0 writes the folder, run.dir, and all ranks read the checkpoint to resume.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed: Path | None = None  # the checkpoint from which this start continues
        # Whether the folder has no checkpoint of its own; `resumed` is then None or another run's.
        self.is_first_start = True
        self.finished_summary: dict[str, Any] | None = None  # if an earlier start finished it
        self.facts: dict[str, Any] = {}  # result of `run_facts`, in each checkpoint
        self.stop_step = 0  # where training ends
        # Step of the newest checkpoint, perhaps still being written; at first, that of the start
        self.last_saved_step = 0
        self._made_for: TrainState | None = None  # the state, if this start has made the folder
        self._stored: dict[str, Any] = {}  # content of `resumed`, until it is loaded
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: futures.Future[None] | None = None
        self._lock: int | None = None

    def read_checkpoint(self) -> dict[str, Any]:
        """Read the checkpoint to resume; return its content, {} to begin at step 0. Collective.

        Raises UserError if the folder holds something else, or if the checkpoint that
        checkpoint.resume names is not one or not of this run; CheckpointError for damaged ones.
        """
        given = self.config.checkpoint.resume
        paths = self.world.on_rank_0(self._own_checkpoints)
        if paths:
            self.is_first_start = False
            self.resumed, self._stored = checkpoint.load_newest(paths)
            # The same command again must resume: `history` names the checkpoint it began with.
            began = [line for line in self._stored["state"]["history"] if line.startswith(BEGAN)]
            if given != "auto" and not any(line.endswith(f"{WITH}{given}") for line in began):
                wrong = f"checkpoint.resume={given}: {self.path} holds a run that began without it"
                cure = f"leave the key out to resume from {self.resumed.name}, or give a run.name"
                raise UserError(f"{wrong}; {cure}")
        elif given not in ("auto", "never"):
            self.resumed = [Path(given), *checkpoint.files(Path(given, "checkpoints"))][-1]
            self._stored = checkpoint.load(self.resumed)
        return self._stored

    def _own_checkpoints(self) -> list[Path]:
        """Return the checkpoints of this folder, newest first; refuse a folder that is no run."""
        refuse_inside(self.path, self.config.data, f"run.dir={self.path}")
        content = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        if content and not content & {"config.yaml", "checkpoints", ".lock"}:
            raise UserError(f"run.dir={self.path}: holds files that are not of a run; give another")
        restarts = self.config.checkpoint.resume == "never"
        return [] if restarts else checkpoint.files(self.checkpoints)[::-1]

    def resume(self, state: TrainState, facts: dict[str, Any], stop_step: int) -> None:
        """Load what `read_checkpoint` has read, claim the folder and write config.yaml. Collective.

        `facts`: of `run_facts`; training ends at `stop_step`.

        Raises UserError, before anything is created, if the checkpoint is of another training, or
        if another process uses the folder. If the run is finished, nothing is written.
        """
        self.world.require_same({"checkpoint": str(self.resumed), **facts["identity"]})
        if self.resumed is not None:
            accept = self.config.checkpoint.accept_changes
            changes = accepted_changes(self.resumed, self._stored, facts, accept, stop_step)
            _load_state(state, self.resumed, self._stored)
            if self.is_first_start or changes.keys() & VALIDATED_ON:
                # The best checkpoint is in another folder, or was validated on other images.
                state.best, state.last = {}, {}
            if self.is_first_start:
                state.history.append(f"{BEGAN}{state.step:,}{WITH}{self.config.checkpoint.resume}")
            state.history += [f"accepted at step {state.step:,}: {v}" for v in changes.values()]
        self._stored = {}  # frees the memory
        self.facts, self.stop_step, self.last_saved_step = facts, stop_step, state.step
        self.finished_summary = self.world.on_rank_0(lambda: self._claim(state))

    def _claim(self, state: TrainState) -> dict[str, Any] | None:
        """Lock the folder; return its summary if the run is finished, else write the config."""
        if self.config.checkpoint.resume == "never" and self.path.exists():
            os.close(_lock(self.path))  # fails if another process trains in it
            _move_aside(self.path)
        self._made_for = None if self.path.exists() else state
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        for left in self.checkpoints.glob("*.tmp"):  # a kill leaves them
            left.unlink()
        if state.best:
            checkpoint.link_best(self.checkpoints, int(state.best["step"]))
        path = self.path / "summary.json"
        with suppress(OSError, ValueError, AttributeError):  # none, or cut off by a full disk
            summary: dict[str, Any] = json.loads(path.read_bytes())
            expected = "finished", state.step, self.config.train.best_by
            stated = tuple(map(summary.get, ("status", "step", "best_by")))
            if state.step >= self.stop_step and stated == expected:
                return summary
        # This also fsyncs the name of checkpoints/ in the folder.
        replace_file(self.path / "config.yaml", to_yaml(self.config))
        replace_file(
            self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(self.config.overrides))
        )
        path.unlink(missing_ok=True)  # the summary of an earlier start
        return None

    def save(self, state: TrainState) -> None:
        """Copy the state to the host, and write a checkpoint in a thread. Collective.

        Raises TrainingError or CheckpointError if the previous one had weights that are not finite
        or was not written.
        """
        self.wait()
        self.world.broadcast_buffers(state.model)
        stored = state.state_dict()
        content = {"step": state.step, "state": stored, **self.facts}
        # timm, among others, looks for weights under this key. The file holds them only once.
        content["state_dict"] = stored["ema"] or stored["model"]
        if self.world.is_main:
            self._writing = self._thread.submit(self._write, checkpoint.host_copy(content))
        self.last_saved_step = state.step

    def _write(self, content: dict[str, Any]) -> None:
        if not all(bool(each.isfinite().all()) for each in content["state"]["model"].values()):
            raise diverged(f"the weights are not finite at step {content['step']}")
        checkpoint.save(self.checkpoints, content, keep=self.config.checkpoint.keep)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises what `save` raises."""
        self.world.on_rank_0(lambda: self._writing.result() if self._writing else None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is on disk, and release the lock; remove an empty run."""
        self._thread.shutdown()  # not `wait`: its error would hide the one that ends the run
        if kind is KeyboardInterrupt and self.world.is_main:  # no StopSignal handled it
            newest = ["none", *checkpoint.files(self.checkpoints)][-1]
            print(f"status    stopped by Ctrl-C; newest checkpoint: {newest}", flush=True)
            if self.config.checkpoint.resume != "never" and newest != "none":
                print("resume    run the same command again to continue", flush=True)
        if self._lock is not None:
            stopped = kind is KeyboardInterrupt or (self.path / "summary.json").exists()
            state, saved = self._made_for, checkpoint.files(self.checkpoints)
            if stopped and not saved and state and state.step == self.last_saved_step:
                shutil.rmtree(self.path)
                print(f"removed   {self.path}: no step was made", flush=True)
            os.close(self._lock)


def run_facts(datasets: Datasets, schedule: Schedule, compute: Compute) -> dict[str, Any]:
    """Return what each checkpoint of a run stores in addition to its step and its state.

    `identity` is compared when the run resumes; `config` and `plan` are for programs that use the
    model; `made_by` is for the reader.
    """
    image = datasets.train.fields[IMAGE]
    return {
        "identity": run_identity(datasets, schedule, compute),
        "config": {**config_values(schedule.config), "ranks": schedule.ranks},
        "plan": {
            "classes": list(datasets.classes),
            "image_size": datasets.train_size,
            "image_shape": list(image.device_shape),
            "image_dtype": np.dtype(image.dtype).name,
            "channels_last": compute.channels_last,
            "rewrites_layers": compute.rewrite is not None,
        },
        "made_by": checkpoint.provenance(),
    }


def run_identity(datasets: Datasets, schedule: Schedule, compute: Compute) -> dict[str, Any]:
    """Return everything that affects the result, name -> value: a resumed run must have the same.

    Some keys are replaced by what follows from them: the folders of the images, which may move, by
    a fingerprint of the samples; the decoder by the mode of the dataset; and a file of weights by a
    hash of its content.
    """
    config, replaced = schedule.config, (*CHOOSE_SAMPLES, "loader.decoder")
    keys = {name: v for name, v in result_keys(config).items() if name not in replaced}
    for name in WEIGHTS:
        if keys[name] not in (None, "pretrained"):
            with open(checkpoint.find_checkpoint(keys[name]), "rb") as file:
                keys[name] = f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    return {
        "data.train": datasets.train.fingerprint(),
        "data.val": datasets.val.fingerprint(),
        **keys,
        "classes": len(datasets.classes),
        "parameters": compute.parameters,
        "train.precision": compute.precision,
        "pixels": datasets.modes[0],
        "fitted_batch": schedule.fitted_batch,
    }


def accepted_changes(
    path: Path, content: dict[str, Any], facts: dict[str, Any], accept: bool, stop_step: int
) -> dict[str, str]:
    """Return how a checkpoint's identity differs from that of this start, name -> sentence.

    A key that only the checkpoint has is not listed: another key, which is listed, disables it.
    Raises UserError for changes that are not accepted.
    """
    stored, identity = content["identity"], facts["identity"]

    def changed(before: Any, now: Any, names: Any) -> dict[str, str]:
        differ = [name for name in names if before.get(name) != now.get(name)]
        return {n: f"{n}={show(before.get(n))} (now {show(now.get(n))})" for n in differ}

    changes = changed(stored, identity, sorted(identity, key=lambda name: name not in FIXED))
    fixed = [name for name in changes if name in FIXED]
    if not changes or (accept and not fixed):
        return changes
    why = f"{fixed[0]} cannot change within a run" if fixed else "these keys affect the result"
    cure = "give run.name=NAME to train elsewhere or checkpoint.resume=never to start over"
    more = "" if content["step"] < stop_step else "a larger train.epochs and "
    cure += f", or {more}checkpoint.accept_changes=true to continue from here" * (not fixed)
    before, now = ({*each["plan"].get("classes", ())} for each in (content, facts))
    told = [f"class {c} is {'new' if c in now else 'gone'}" for c in sorted(before ^ now)[:6]]
    if changes.keys() & {"data.train", "data.val"}:
        told += changed(content["config"], facts["config"], CHOOSE_SAMPLES).values()
    follow = [FOLLOW[key] for key in FOLLOW if key in changes or (told and key == "classes")]
    told += [changes[name] for name in changes if not re.match("|".join(follow) or "$", name)]
    raise UserError(f"cannot resume {path}: {', '.join(told)}; {why}: {cure}")


def _load_state(state: TrainState, path: Path, content: dict[str, Any]) -> None:
    """Load the state of a checkpoint; UserError if it does not fit the model or the optimiser."""
    try:
        state.load_state_dict(content["state"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        text = f"cannot resume {path}: its state does not fit this training: {reason}"
        raise UserError(f"{text}; give checkpoint.resume=PATH of another one") from None


def _lock(path: Path) -> int:
    """Lock the folder. The kernel releases the lock when the process ends, however it ends."""
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"run.dir={path}: a process trains in it; give another run.name") from None
    return lock


def _move_aside(path: Path) -> None:
    number = 1
    folder = path.resolve()  # the path may be a link to another disk
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    folder.mkdir()
    logger.info("the earlier run is now %s", aside)
