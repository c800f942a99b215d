"""The directory of one run: its lock, files and checkpoints. One process trains in it at a time."""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import models
from conf.files import open_regular
from conf.schema import (
    CHOOSE_SAMPLES,
    RESULT,
    Config,
    UserError,
    affecting,
    config_values,
    differences,
)
from engine import checkpoint
from engine.compile_cache import CompileCache
from engine.distributed import World, same_on_all_ranks
from engine.plan import Plan
from engine.state import TrainingError, TrainState, diverged, state_bytes
from pipeline.build import Datasets
from pipeline.dataset import in_form_of
from pipeline.loader_plan import pixels_of
from pipeline.splits import refuse_inside

logger = logging.getLogger(__name__)

Check = Callable[[dict[str, Any]], None]  # of a state whose tensors are on the meta device
# What Tracker.outcome shows of a finished run.
SUMMARY = {
    "status",
    "step",
    "epoch",
    "seconds",
    "top1",
    "top5",
    "best_top1",
    "best_epoch",
    "images_per_second",
}
VALIDATION = {"top1", "top5", "best_top1", "best_epoch"}  # null if nothing was validated
# Memory of a checkpoint in addition to `state_bytes`: counters of the optimiser, and alignment.
SPARE_BYTES = 1 << 20
# Keys that decide what a validation measures: their change makes the best checkpoint incomparable.
VALIDATED_ON = {"data.val", "data.val_size", "data.mean", "data.std", "augment.val"}


def run_identity(config: Config, datasets: Datasets, plan: Plan) -> dict[str, Any]:
    """Return everything that affects the result, name -> value.

    A checkpoint with another identity belongs to another run. Derived values replace their keys:
    a fingerprint of the samples stands for their folders, which may move.
    """
    replaced = (*CHOOSE_SAMPLES, "loader.decoder")
    keys = {name: v for name, v in affecting(config, RESULT).items() if name not in replaced}
    if not config.data.sizes:
        del keys["data.sizes"]  # checkpoints of earlier versions do not have it
    weights = config.model.weights
    if weights not in (None, "pretrained"):
        keys["model.weights"] = models.file_fingerprint(checkpoint.find(Path(str(weights))))
    if config.train.deterministic:  # eager and compiled steps round differently
        keys["model.compile"] = plan.compile
    return {
        "data.train": datasets.train.fingerprint(),
        "data.val": datasets.val.fingerprint(),
        **keys,
        "classes": plan.num_classes,
        "parameters": plan.parameters,
        "train.precision": plan.precision,
        "pixels": pixels_of(plan.loader.decoder),
    }


@dataclass(frozen=True)
class _Found:
    """A checkpoint to resume.

    Attributes:
        state: the training state; its tensors have shapes and dtypes, but no memory.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    state: dict[str, Any]

    @classmethod
    def of(cls, path: Path, content: dict[str, Any]) -> "_Found":
        return cls(path, content["step"], content["identity"], _on_meta(content["state"]))

    @property
    def origin(self) -> Any:
        """The checkpoint of another run from which this run started, if any."""
        return self.state.get("origin")


def _on_meta(content: Any) -> Any:
    """Return nested containers with all tensors on the meta device, where they take no memory."""
    if isinstance(content, Tensor):
        return content.to("meta")
    if isinstance(content, dict):
        return {name: _on_meta(value) for name, value in content.items()}
    return [_on_meta(item) for item in content] if isinstance(content, (list, tuple)) else content


def _for(changes: Mapping[str, str], state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a stored state that counts after the accepted changes."""
    return {**state, "losses": None} if "data.train" in changes else state  # other images


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and summary.json, in one folder.

    Only rank 0 reads and writes the folder, except compiled/. If it raises an error, all ranks
    raise it.

    Args:
        config: of the run. Its folder, run.dir, is created by `open`, not before.
        world: all ranks call the collective methods `open`, `begin`, `save` and `wait`.

    Attributes:
        resumed: the checkpoint from which this start continues; None at step 0. Set by `open`.
        accepted: the accepted changes, key -> sentence. Set by `open`.
        saved_step: step of the newest checkpoint that is known to be on disk; the step at which
            this start begins if there is none.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed: Path | None = None
        self.accepted: dict[str, str] = {}
        self.saved_step = self._begun_step = 0  # the latter: of the last call of `save`
        self._identity: dict[str, Any] = {}
        self._made_by: dict[str, str] = {}
        self._plan: dict[str, Any] = {}
        self._writer = checkpoint.Writer(world.device)
        self._lock: int | None = None
        self._found: tuple[object, _Found | None] | None = None
        self._compiled: CompileCache | None = None

    def check(self) -> None:
        """Refuse a folder that `open` would refuse for any data. Nothing is created.

        Raises:
            UserError: the folder holds something else, or is inside a split.
        """
        with self._usable():
            refuse_inside(self.path, self.config.data, f"run.dir={self.path}")
            if not self.path.exists():
                return
            if not self.path.is_dir():
                raise UserError(f"run.dir={self.path}: is a file; give a folder")
            content = {p.name for p in self.path.iterdir()}
            if content and not content & {"config.yaml", "checkpoints", ".lock"}:
                raise UserError(
                    f"run.dir={self.path}: holds files that are not of a run; give a folder of its "
                    "own"
                )

    def stored(self) -> tuple[int, dict[str, Any]]:
        """Return step and identity of the checkpoint that `open` would resume; 0, {} if none.

        Raises:
            UserError, CheckpointError: as `open` does.
        """
        self.check()
        found = self._find()
        return (found.step, found.identity) if found is not None else (0, {})

    def open(
        self,
        identity: dict[str, Any],
        *,
        check: Check | None = None,
        stop_step: int | None = None,
    ) -> None:
        """Claim the folder and find the checkpoint to resume. Collective.

        Nothing is created if this raises.

        Args:
            identity: everything that affects the result, by the name to use in messages.
            check: raises a ValueError if `restore` could not load the state that it is given.
            stop_step: where training ends. Changes are not accepted for a checkpoint that has
                reached it.

        Raises:
            UserError: the ranks' identities differ, the folder holds something else or is in use,
                or the checkpoint is missing or of another training.
            CheckpointError: there are checkpoints, and each of them is damaged.
        """
        same_on_all_ranks(self.world.all_gather(identity))
        self._identity = identity
        self.resumed, self.accepted = self.world.broadcast(lambda: self._open(check, stop_step))

    def _open(
        self, check: Check | None, stop_step: int | None
    ) -> tuple[Path | None, dict[str, str]]:
        self.check()
        with self._usable():
            while True:
                before = self._listing()
                found = self._find()
                changes = self._changes(found, check, stop_step) if found is not None else {}
                if self.path.exists() and self._lock is None:
                    self._claim()
                if self._listing() == before:  # else another process has trained here meanwhile
                    break
            if self._lock is not None:
                resume = self.config.checkpoint.resume
                given = None if resume in ("auto", "never") else Path(resume)
                checkpoint.remove_leftovers(self.checkpoints, keep=given)
                if resume == "never":
                    self._move_aside()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._claim()
        self._made_by = checkpoint.provenance()
        return (found.path if found is not None else None), changes

    def _changes(self, found: _Found, check: Check | None, stop_step: int | None) -> dict[str, str]:
        """Return the accepted changes since a checkpoint was written.

        Raises:
            UserError: a change is not accepted, or would have no effect; or the state in the
                checkpoint does not fit.
        """
        stored, now = dict(found.identity), dict(self._identity)
        if not stored.keys() & now.keys() & {"model.compile"}:
            # It affects the result with train.deterministic=true only, which may be switched; and
            # earlier versions did not store it.
            stored.pop("model.compile", None)
            now.pop("model.compile", None)
        for name in now.keys() & {"data.train", "data.val"}:
            now[name] = in_form_of(stored.get(name), now[name])
        changes = checkpoint.compare(
            stored,
            now,
            found.path,
            accept_changes=self.config.checkpoint.accept_changes,
        )
        if changes and stop_step is not None and found.step >= stop_step:
            raise UserError(
                f"cannot resume {found.path}: training has ended at step {found.step:,}, so these "
                f"changes would have no effect: {'; '.join(changes.values())}; give run.name=NAME, "
                "or start over with checkpoint.resume=never"
            )
        try:
            if check is not None:
                check(_for(changes, found.state))
        except ValueError as error:
            raise UserError(
                f"cannot resume {found.path}: its state does not fit this training: {error}; give "
                "the path of another step-*.pt, or start over with checkpoint.resume=never"
            ) from None
        return changes

    def set_pixels(self, pixels: str) -> None:
        """Store in the identity which kind of decoder loader.decoder=auto has chosen.

        Only a start without a checkpoint chooses; later starts keep the stored kind.
        """
        self._identity["pixels"] = pixels

    @property
    def is_first_start(self) -> bool:
        """Whether this is the first start in this folder, perhaps from another run's checkpoint."""
        return self.resumed is None or self.resumed.parent.resolve() != self.checkpoints.resolve()

    def restore(self, state: TrainState) -> list[str]:
        """Load the checkpoint to resume, if there is one, and extend the state's history.

        Returns:
            The keys that differ from the config with which the checkpoint was written, each as a
            sentence.
        """
        if self.resumed is None:
            return []
        stored = checkpoint.load(self.resumed)
        state.load_state_dict(_for(self.accepted, stored["state"]))
        self.saved_step = self._begun_step = state.step
        if state.losses is not None:
            state.losses.keep_on_rank_0(self.world)
        if self.is_first_start or self.accepted.keys() & VALIDATED_ON:
            # The best checkpoint is in another folder, or was validated on other images.
            state.best, state.last = {}, {}
        if self.is_first_start:
            state.spent.clear()
            state.origin = str(self.resumed.resolve())
            state.history.append(f"began at step {state.step:,} with {self.resumed}")
        state.history += [
            f"accepted at step {state.step:,}: {change}" for change in self.accepted.values()
        ]
        return differences(stored["config"], self._values())

    def _values(self) -> dict[str, Any]:
        return {**config_values(self.config), "ranks": self.world.size}

    def has(self, state: TrainState) -> bool:
        """Whether this start has no steps to save: the last checkpoint has them, or there are none.

        A checkpoint of no steps would fix what only the measurement before the first step chooses.
        """
        return state.step == self._begun_step

    def save(self, state: TrainState, flush: Callable[[], None] = lambda: None) -> None:
        """Copy the state and write a checkpoint in a thread. Collective.

        First waits for the previous checkpoint and raises its error, if any. Also stores the
        kernels that were compiled since then.

        Args:
            flush: called in the thread, before it writes.

        Raises:
            TrainingError: the weights were not finite: no later start could continue from them.
            CheckpointError: the checkpoint could not be written, or there is no memory to copy
                the state.
        """
        self.world.broadcast_buffers(state.model)
        if state.losses is not None:
            state.losses.collect(self.world)
        content = {
            "step": state.step,
            "state": state.state_dict(),
            "identity": self._identity,
            "config": self._values(),
            "plan": self._plan,
            "made_by": self._made_by,
        }

        def write(copied: dict[str, Any]) -> None:
            flush()
            self._write(copied)

        self.world.broadcast(lambda: self._writer.start(content, write))
        self.saved_step, self._begun_step = self._begun_step, state.step
        if self._compiled is not None:
            self._compiled.save()

    def _write(self, content: dict[str, Any]) -> None:
        weights, best = content["state"]["model"], content["state"]["best"]
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise diverged(f"the weights are not finite at step {content['step']}")
        checkpoint.save(
            self.checkpoints,
            content,
            keep=self.config.checkpoint.keep,
            best_step=int(best["step"]) if best else None,
        )

    def failed(self) -> bool:
        """Whether the last checkpoint of this rank could not be written. Does not wait."""
        return self._writer.failed

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises what `save` raises."""
        self.world.broadcast(self._writer.wait)
        self.saved_step = self._begun_step

    def _find(self) -> _Found | None:
        """Return the checkpoint to resume. The file may be large, so it is read only once."""
        listing = self._listing()
        if self._found is None or self._found[0] != listing:
            self._found = listing, self._look_for(self.config.checkpoint.resume)
        return self._found[1]

    def _look_for(self, resume: str) -> _Found | None:
        if resume == "never":
            return None
        newest = checkpoint.load_newest(self.checkpoints)
        own = _Found.of(*newest) if newest is not None else None
        if resume == "auto":
            return own
        if own is not None and own.origin == os.path.realpath(resume):
            return own  # the same command again; the checkpoint it began with may be gone
        if not os.path.isfile(resume):
            exists = "is not a regular file" if os.path.exists(resume) else "no such file"
            reason = "is a folder" if os.path.isdir(resume) else exists
            raise UserError(
                f"checkpoint.resume={resume}: {reason}; give the path of a checkpoint (step-*.pt), "
                "auto or never"
            )
        try:
            given = _Found.of(Path(resume), checkpoint.load(Path(resume)))
        except checkpoint.CheckpointError as error:
            raise UserError(f"checkpoint.resume: {error}; give the path of a step-*.pt") from None
        if own is None:
            return given
        if not given.path.parent.samefile(self.checkpoints):
            raise UserError(
                f"checkpoint.resume={resume}: {self.path} holds a run that did not start from this "
                f"checkpoint; leave the key out to continue from {own.path.name}, "
                "or give another run.name"
            )
        if given.step < own.step:
            raise UserError(
                f"checkpoint.resume={resume}: {self.path} holds a later one, {own.path.name}; "
                "leave the key out to continue from it, or give another run.name to branch off"
            )
        return given

    def _listing(self) -> list[tuple[str, int]]:
        """Return names and times of the checkpoints' manifests."""
        found = []
        for path in sorted(self.checkpoints.glob("step-*.json")):
            with suppress(FileNotFoundError):  # removed by a process that trains here
                found.append((path.name, path.stat().st_mtime_ns))
        return found

    def begin(self, plan: Plan, state: TrainState, files: dict[str, str]) -> None:
        """Write files such as config.yaml, and remove an earlier start's summary. Collective.

        Also loads the kernels that an earlier start compiled for the same plan, and allocates the
        host memory for checkpoints, before a step waits for it.

        Args:
            plan: checkpoints store its record.
            state: its size determines the memory allocated for checkpoints.
            files: content by name.

        Raises:
            CheckpointError: a file cannot be written, or there is no memory for checkpoints.
            UserError: the summary cannot be removed.
        """
        self._plan = plan.record
        self.world.broadcast(lambda: self._begin(state, files))
        self._compiled = CompileCache(self.path, plan, self.world)
        self._compiled.load()

    def _begin(self, state: TrainState, files: dict[str, str]) -> None:
        self._writer.reserve(state_bytes(state) + SPARE_BYTES)
        for name, content in files.items():
            self.write(name, content)
        with self._usable():
            for name in ("summary.json", "diverged.json"):
                (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, content: str) -> None:
        """Replace a file of the folder.

        Raises:
            CheckpointError: it cannot be written; the earlier file is untouched.
        """
        try:
            checkpoint.replace_file(self.path / name, content)
        except OSError as error:
            kept = (
                "the checkpoints are intact: run the same command again to resume"
                if any(self.checkpoints.glob("step-*.pt"))
                else "nothing has been trained yet"
            )
            raise checkpoint.CheckpointError(
                f"{self.path / name}: cannot be written: {error.strerror or error}; {kept}"
            ) from error

    def finished_summary(self, step: int) -> dict[str, Any] | None:
        """Return the summary of an earlier start that finished at `step`, or None."""
        try:
            with open_regular(self.path / "summary.json") as file:
                summary = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return None
        complete = isinstance(summary, dict) and summary.keys() >= SUMMARY
        if not complete or summary["status"] != "finished" or summary["step"] != step:
            return None
        # Tracker.outcome formats these. A value of another type is damage.
        unknown = {key for key in SUMMARY if summary[key] is None}
        known = [summary[key] for key in SUMMARY - unknown - {"status"}]
        if not all(type(value) in (int, float) and abs(value) < 1e12 for value in known):
            return None
        if unknown & {"epoch", "seconds"} or unknown & VALIDATION not in (set(), VALIDATION):
            return None
        return summary

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is on disk."""
        try:
            self._writer.close()
        except Exception as error:
            if kind is None:
                raise
            if not (kind is TrainingError and isinstance(error, TrainingError)):
                logger.error("%s", error)  # another error ends the run
            # Otherwise the divergence was already reported by the loss of a later step.
        finally:
            self.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run.dir={self.path}: cannot be used: {error.strerror}; give a writable folder"
            ) from None

    def _claim(self) -> None:
        """Lock the folder. The kernel releases the lock when the process ends, however it ends."""
        lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"run.dir={self.path}: another process is training in it; give another run.dir or "
                "run.name"
            ) from None
        self._lock = lock

    def _move_aside(self) -> None:
        number = 1
        folder = self.path.resolve()  # the path may be a link to another disk
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        os.rename(folder, aside)
        folder.mkdir()
        logger.info("the earlier run is now %s", aside)
        self.close()
