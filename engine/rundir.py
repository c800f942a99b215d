"""The directory of one run: its lock, identity and files. One process trains in it at a time."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import models
from conf.compose import to_yaml
from conf.schema import (
    CHOOSE_SAMPLES,
    RESULT,
    Config,
    UserError,
    affecting,
    config_values,
    differences,
    show,
)
from engine import checkpoint
from engine.compile_cache import CompileCache
from engine.distributed import World, same_on_all_ranks
from engine.plan import Plan
from engine.state import TrainingError, TrainState, diverged
from pipeline.build import Datasets
from pipeline.loader_plan import pixels_of
from pipeline.splits import refuse_inside

logger = logging.getLogger(__name__)

# Tensor shapes or step numbers depend on these: no checkpoint can resume with other values.
FIXED = (
    "model.name",
    "classes",
    "parameters",
    "optim.name",
    "optim.decay_norms",
    "optim.layer_decay",
    "model.freeze",
    "loader.batch_size",
)
UNUSED = "unused"  # shown for a key that another key disables, as optim.betas with optim.name=sgd
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


def accepted_changes(
    path: Path,
    content: dict[str, Any],
    identity: dict[str, Any],
    *,
    accept: bool = False,
    stop_step: int | None = None,
) -> dict[str, str]:
    """Refuse to resume with changed values, unless the user accepts the changes.

    Args:
        path, content: of the checkpoint.
        identity: of this start; see `run_identity`.
        accept: checkpoint.accept_changes.
        stop_step: where training ends; changes would have no effect from there on.

    Returns:
        The changes: a sentence for each name.
    """
    stored, now = dict(content["identity"]), dict(identity)
    if not stored.keys() & now.keys() & {"model.compile"}:
        # It affects the result with train.deterministic=true only, which may be switched.
        stored.pop("model.compile", None)
        now.pop("model.compile", None)
    changes = {}
    for name in {**now, **stored}:
        if stored.get(name) != now.get(name):
            was, value = show(stored.get(name, UNUSED)), show(now.get(name, UNUSED))
            changes[name] = f"{name} was {was}, is {value}"
    fixed = [name for name in changes if name in FIXED]
    ended = stop_step is not None and content["step"] >= stop_step
    if not changes or (accept and not fixed and not ended):
        return changes
    remedies = [
        "give run.name=NAME to train in another directory",
        "start over in this one with checkpoint.resume=never (this moves the old run aside)",
    ]
    if fixed:
        reason = f"{fixed[0]} cannot change within a run"
    elif accept:
        reason = f"training has ended at step {content['step']:,}: they would have no effect"
    else:
        reason = "these changes affect the result"
        remedies.append("continue from this checkpoint with checkpoint.accept_changes=true")
    raise UserError(
        f"cannot resume {path}: {'; '.join(changes.values())}; {reason}: {', or '.join(remedies)}"
    )


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and summary.json, in one folder.

    Only rank 0 reads and writes the folder, except compiled/ and the checkpoint to resume. If it
    raises an error, all ranks raise it.

    Args:
        config: of the run. Its folder, run.dir, is created by `open`, not before.
        world: all ranks call the collective methods `open`, `begin`, `save` and `wait`.

    Attributes:
        resumed: the checkpoint from which this start continues; None at step 0. Set by `open`.
        last_saved_step: step of the newest checkpoint, perhaps still being written; at first, the
            step at which this start begins.
        step_on_disk: step of the newest checkpoint that is known to be on disk, likewise.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed: Path | None = None
        self.step_on_disk = self.last_saved_step = 0
        self._content: dict[str, Any] = {}  # of each checkpoint, besides step and state
        self._writer = checkpoint.Writer(world.device)
        self._lock: int | None = None
        self._compiled: CompileCache | None = None

    @cached_property
    def _found(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint to resume and its content. It may be large, so it is read only once."""
        with _usable(self.path):
            _refuse_foreign(self.path, self.config)
            return _look_for(self.path, self.config.checkpoint.resume)

    def stored(self) -> tuple[int, dict[str, Any]]:
        """Return step and identity of the checkpoint that `open` will resume; 0, {} if none.

        Raises:
            UserError, CheckpointError: as `open` does.
        """
        found = self._found
        return (found[1]["step"], found[1]["identity"]) if found is not None else (0, {})

    def open(
        self, state: TrainState, identity: dict[str, Any], *, stop_step: int | None = None
    ) -> list[str]:
        """Claim the folder and load the checkpoint to resume, if there is one. Collective.

        Args:
            identity, stop_step: see `accepted_changes`.

        Returns:
            A sentence for each key that differs from the config in the checkpoint.

        Raises:
            UserError: the folder holds something else or is in use, or the checkpoint is missing or
                of another training. Nothing has been created.
            CheckpointError: there are checkpoints, and each of them is damaged.
        """
        same_on_all_ranks(self.world.all_gather(identity))
        values = {**config_values(self.config), "ranks": self.world.size}
        self.resumed, accepted, before = self.world.broadcast(
            lambda: self._open(state, identity, stop_step)
        )
        made_by = self.world.broadcast(checkpoint.provenance)
        self._content = {"identity": identity, "config": values, "made_by": made_by}
        if self.resumed is None:
            return []
        if not self.world.is_main:
            _load(state, self.resumed, checkpoint.load(self.resumed), accepted)
        self.step_on_disk = self.last_saved_step = state.step
        if state.losses is not None:
            state.losses.keep_on_rank_0(self.world)
        if self.is_first_start or accepted.keys() & VALIDATED_ON:
            # The best checkpoint is in another folder, or was validated on other images.
            state.best, state.last = {}, {}
        if self.is_first_start:
            state.spent.clear()
            state.origin = str(self.resumed.resolve())
            state.history.append(f"began at step {state.step:,} with {self.resumed}")
        state.history += [
            f"accepted at step {state.step:,}: {change}" for change in accepted.values()
        ]
        return differences(before, values)

    def _open(
        self, state: TrainState, identity: dict[str, Any], stop_step: int | None
    ) -> tuple[Path | None, dict[str, str], dict[str, Any]]:
        """Open on rank 0; return the checkpoint, the accepted changes and the stored config."""
        path: Path | None = None
        changes: dict[str, str] = {}
        before: dict[str, Any] = {}
        if self._found is not None:
            path, content = self._found
            before = content["config"]
            accept = self.config.checkpoint.accept_changes
            changes = accepted_changes(path, content, identity, accept=accept, stop_step=stop_step)
            _load(state, path, content, changes)
        self._found = None  # frees the memory
        with _usable(self.path):
            if self.config.checkpoint.resume == "never" and self.path.exists():
                os.close(_claim(self.path))  # no other process trains in it
                _move_aside(self.path)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _claim(self.path)
            for incomplete in self.checkpoints.glob("*.tmp"):
                incomplete.unlink()
            if state.best:
                checkpoint.point_to_best(self.checkpoints, int(state.best["step"]))
        return path, changes, before

    @property
    def is_first_start(self) -> bool:
        """Whether this is the first start in this folder, perhaps from another run's checkpoint."""
        return self.resumed is None or self.resumed.parent.resolve() != self.checkpoints.resolve()

    def set_pixels(self, pixels: str) -> None:
        """Store which kind of decoder loader.decoder=auto has chosen; later starts keep it."""
        self._content["identity"]["pixels"] = pixels

    def begin(self, plan: Plan) -> None:
        """Write config.yaml and overrides.yaml, and remove an earlier start's summary. Collective.

        Also loads the kernels that an earlier start has compiled. Checkpoints store `plan.record`.
        """

        def write_files() -> None:
            self.write("config.yaml", to_yaml(self.config))
            self.write("overrides.yaml", to_yaml(self.config.typed))
            for name in ("summary.json", "diverged.json"):
                (self.path / name).unlink(missing_ok=True)

        self._content["plan"] = plan.record
        self.world.broadcast(write_files)
        if plan.compile != "off":
            self._compiled = CompileCache(self.path, self.world)
            self._compiled.load()

    def save(self, state: TrainState, flush: Callable[[], None] = lambda: None) -> None:
        """Copy the state and write a checkpoint in a thread. Collective.

        Also stores the kernels that were compiled since the previous one.

        Args:
            flush: called in the thread, before it writes.

        Raises:
            TrainingError, CheckpointError: the weights in the previous checkpoint were not finite,
                or it could not be written.
        """
        self.world.broadcast_buffers(state.model)
        if state.losses is not None:
            state.losses.collect(self.world)
        content = {"step": state.step, "state": state.state_dict(), **self._content}

        def write(copied: dict[str, Any]) -> None:
            flush()
            weights, best = copied["state"]["model"], copied["state"]["best"]
            if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
                raise diverged(f"the weights are not finite at step {copied['step']}")
            keep, best_step = self.config.checkpoint.keep, int(best["step"]) if best else None
            checkpoint.save(self.checkpoints, copied, keep=keep, best_step=best_step)

        self.world.broadcast(lambda: self._writer.start(content, write))
        self.step_on_disk, self.last_saved_step = self.last_saved_step, state.step
        if self._compiled is not None:
            self._compiled.save()

    def failed(self) -> bool:
        """Whether the last checkpoint of this rank could not be written. Does not wait."""
        return self._writer.failed

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises what `save` raises."""
        self.world.broadcast(self._writer.wait)
        self.step_on_disk = self.last_saved_step

    def write(self, name: str, content: str) -> None:
        """Replace a file of the folder.

        Raises:
            CheckpointError: it cannot be written; the earlier file is untouched.
        """
        path = self.path / name
        try:
            checkpoint.replace_file(path, content)
        except OSError as error:
            raise checkpoint.CheckpointError(
                f"{path}: cannot be written: {error.strerror}; check the disk, and run the same "
                "command again: checkpoints are intact"
            ) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is on disk, and release the lock."""
        try:
            self._writer.close()
        except Exception as error:
            if kind is None:
                raise
            if not (kind is TrainingError and isinstance(error, TrainingError)):
                logger.error("%s", error)  # another error ends the run
            # Otherwise the divergence was already reported by the loss of a later step.
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


def finished_summary(run: Path, step: int) -> dict[str, Any] | None:
    """Return the summary of an earlier start that finished at `step`, or None."""
    summary = checkpoint.read_manifest(run / "summary.json")
    return summary if (summary.get("status"), summary.get("step")) == ("finished", step) else None


def _load(state: TrainState, path: Path, content: dict[str, Any], changes: dict[str, str]) -> None:
    """Load what counts of a checkpoint after the accepted changes.

    Raises:
        UserError: it does not fit the model or the optimiser.
    """
    stored = content["state"]
    try:
        state.load_state_dict({**stored, "losses": None} if "data.train" in changes else stored)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"cannot resume {path}: its state does not fit this training: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; give the path of another step-*.pt, or start "
            "over with checkpoint.resume=never"
        ) from None


def _look_for(run: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that checkpoint.resume selects for a run, and its content."""
    if resume == "never":
        return None
    newest = checkpoint.load_newest(run / "checkpoints")
    if newest is None and resume != "auto":
        try:
            return Path(resume), checkpoint.load(Path(resume))
        except checkpoint.CheckpointError as error:
            raise UserError(f"checkpoint.resume: {error}; give the path of a step-*.pt") from None
    if newest is not None and resume != "auto":
        # The same command again; the checkpoint it began with may be gone.
        same = newest[1]["state"].get("origin"), str(newest[0].resolve())
        if os.path.realpath(resume) not in same:
            raise UserError(
                f"checkpoint.resume={resume}: {run} holds a run that has not begun with this "
                f"checkpoint, or a later one; leave the key out to continue from {newest[0].name}, "
                "or give another run.name to branch off"
            )
    return newest


def _refuse_foreign(path: Path, config: Config) -> None:
    """Refuse a folder that holds something else than a run, or is inside a split."""
    refuse_inside(path, config.data, f"run.dir={path}")
    content = {each.name for each in path.iterdir()} if path.exists() else set()
    if content and not content & {"config.yaml", "checkpoints", ".lock"}:
        raise UserError(
            f"run.dir={path}: holds files that are not of a run; give a folder of its own"
        )


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.dir={path}: cannot be used: {error.strerror}; give a writable folder"
        ) from None


def _claim(path: Path) -> int:
    """Lock the folder. The kernel releases the lock when the process ends, however it ends."""
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"run.dir={path}: another process is training in it; give another run.dir or run.name"
        ) from None
    return lock


def _move_aside(path: Path) -> None:
    """Rename the folder of an earlier run, and create an empty one."""
    number = 1
    folder = path.resolve()  # the path may be a link to another disk
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    folder.mkdir()
    logger.info("the earlier run is now %s", aside)
