"""The directory of one run: its lock and its files. One process trains in it at a time."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.compose import to_yaml
from conf.schema import Config, UserError, config_values
from engine import checkpoint
from engine.checkpoint import CheckpointError
from engine.distributed import World
from engine.identity import VALIDATED_ON, accepted_changes
from engine.plan import Plan
from engine.state import TrainingError, TrainState, diverged
from pipeline.splits import refuse_inside

logger = logging.getLogger(__name__)


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and summary.json, in one folder.

    Rank 0 reads and writes the folder; if it raises an error, all ranks raise it. The other ranks
    only read the checkpoint to resume. The folder, run.dir, is created by `open`, not before.

    Attributes, set by `open`:
        resumed: the checkpoint from which this start continues; None at step 0.
        finished: summary.json of an earlier start that finished this run, or None.
        last_saved_step: step of the newest checkpoint, perhaps still being written; at first, the
            step at which this start begins.
        step_on_disk: step of the newest checkpoint that is known to be on disk, likewise.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.path = Path(config.run.dir)
        self.checkpoints = self.path / "checkpoints"
        self.resumed: Path | None = None
        self.finished: dict[str, Any] | None = None
        self.step_on_disk = self.last_saved_step = 0
        self._content: dict[str, Any] = {}  # of each checkpoint, besides step and state
        self._writer = checkpoint.Writer(world.device)
        self._lock: int | None = None

    @cached_property
    def _found(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint to resume and its content. It may be large, so it is read only once."""
        with _usable(self.path):
            refuse_inside(self.path, self.config.data, f"run.dir={self.path}")
            content = {each.name for each in self.path.iterdir()} if self.path.exists() else set()
            if content and not content & {"config.yaml", "checkpoints", ".lock"}:
                raise UserError(
                    f"run.dir={self.path}: holds files that are not of a run; give a folder of its "
                    "own"
                )
            return _checkpoint_to_resume(self.path, self.config.checkpoint.resume)

    def stored(self) -> tuple[int, dict[str, Any]]:
        """Return step and identity of the checkpoint that `open` will resume; 0, {} if none."""
        found = self._found
        return (found[1]["step"], found[1]["identity"]) if found is not None else (0, {})

    def open(self, state: TrainState, plan: Plan, identity: dict[str, Any]) -> None:
        """Claim the folder, load the checkpoint to resume, and write config.yaml. Collective.

        Raises UserError, before anything is created, if the folder holds something else or is in
        use, or if the checkpoint is missing or of another training; CheckpointError if all
        checkpoints are damaged.
        """
        world, values = self.world, {**config_values(self.config), "ranks": self.world.size}
        world.require_same(identity)
        self.resumed, accepted, self.finished = world.broadcast(
            lambda: self._open(state, plan, identity)
        )
        if self.resumed is not None:
            if not world.is_main:
                _load_state(state, self.resumed, checkpoint.load(self.resumed))
            self.step_on_disk = self.last_saved_step = state.step
            self._adjust(state, self.resumed, accepted)
        made_by = world.broadcast(checkpoint.provenance)
        self._content = {"identity": identity, "config": values, "made_by": made_by}
        self._content["plan"] = plan.record

    def _open(
        self, state: TrainState, plan: Plan, identity: dict[str, Any]
    ) -> tuple[Path | None, dict[str, str], dict[str, Any] | None]:
        """Open the folder on rank 0, which reads the checkpoint before it creates anything.

        Return the checkpoint, the accepted changes, and the summary if the run is finished. Then
        nothing is written.
        """
        path: Path | None = None
        changes: dict[str, str] = {}
        if self._found is not None:
            path, content = self._found
            accept = self.config.checkpoint.accept_changes
            changes = accepted_changes(
                path, content, identity, accept=accept, stop_step=plan.stop_step
            )
            _load_state(state, path, content)
        self._found = None  # frees the memory
        with _usable(self.path):
            if self.config.checkpoint.resume == "never" and self.path.exists():
                os.close(_lock(self.path))  # no other process trains in it
                _move_aside(self.path)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            for incomplete in self.checkpoints.glob("*.tmp"):
                incomplete.unlink()
            if state.best:
                checkpoint.point_to_best(self.checkpoints, int(state.best["step"]))
        summary = checkpoint.read_manifest(self.path / "summary.json")
        found = tuple(map(summary.get, ("status", "step", "best_by")))
        expected = "finished", state.step, self.config.train.best_by
        if state.step >= plan.stop_step and found == expected:
            return path, changes, summary
        self.write("config.yaml", to_yaml(self.config))
        self.write("overrides.yaml", to_yaml(self.config.typed))
        (self.path / "summary.json").unlink(missing_ok=True)  # of an earlier start
        return path, changes, None

    def _adjust(self, state: TrainState, resumed: Path, accepted: dict[str, str]) -> None:
        """Drop from a loaded state what does not hold in this run, and note where it came from."""
        if self.is_first_start or accepted.keys() & VALIDATED_ON:
            # The best checkpoint is in another folder, or was validated on other images.
            state.best, state.last = {}, {}
        if self.is_first_start:
            state.origin = str(resumed.resolve())
            state.history.append(f"began at step {state.step:,} with {resumed}")
        state.history += [f"accepted at step {state.step:,}: {line}" for line in accepted.values()]

    @property
    def is_first_start(self) -> bool:
        """Whether this is the first start in this folder, perhaps from another run's checkpoint."""
        return self.resumed is None or self.resumed.parent.resolve() != self.checkpoints.resolve()

    def set_pixels(self, pixels: str) -> None:
        """Store which kind of decoder loader.decoder=auto has chosen; later starts keep it."""
        self._content["identity"]["pixels"] = pixels

    def set_fitted_batch(self, images: int | None) -> None:
        """Store the micro-batch that the memory has limited; a resumed run uses it again."""
        self._content["identity"]["fitted_batch"] = images

    def save(self, state: TrainState, flush: Callable[[], None] = lambda: None) -> None:
        """Copy the state and write a checkpoint in a thread, which calls `flush` first. Collective.

        Raises TrainingError or CheckpointError if the previous one had weights that are not finite
        or was not written.
        """
        self.world.broadcast_buffers(state.model)
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

    def failed(self) -> bool:
        """Whether the last checkpoint of this rank could not be written. Does not wait."""
        return self._writer.failed

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective. Raises what `save` raises."""
        self.world.broadcast(self._writer.wait)
        self.step_on_disk = self.last_saved_step

    def write(self, name: str, content: str) -> None:
        """Replace a file of the folder. After a CheckpointError, the earlier one is intact."""
        path = self.path / name
        try:
            checkpoint.replace_file(path, content)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be written: {error.strerror}; check the disk, and run the same "
                "command again: checkpoints are intact"
            ) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is on disk, and release the lock.

        If another error ends the run, an error of the checkpoint is logged, not raised; two errors
        about diverged weights have the same cause, and only the first one is reported.
        """
        try:
            self._writer.close()
        except Exception as error:
            if kind is None:
                raise
            if not (kind is TrainingError and isinstance(error, TrainingError)):
                logger.error("%s", error)
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


def _load_state(state: TrainState, path: Path, content: dict[str, Any]) -> None:
    """Load the state of a checkpoint; UserError if it does not fit the model or the optimiser."""
    try:
        state.load_state_dict(content["state"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"cannot resume {path}: its state does not fit this training: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; give the path of another step-*.pt, or start "
            "over with checkpoint.resume=never"
        ) from None


def _checkpoint_to_resume(run: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that checkpoint.resume selects for a run, and its content."""
    if resume == "never":
        return None
    newest = checkpoint.load_newest(run / "checkpoints")
    if resume == "auto":
        return newest
    if newest is None:
        try:
            return Path(resume), checkpoint.load(Path(resume))
        except CheckpointError as error:
            raise UserError(f"checkpoint.resume: {error}; give the path of a step-*.pt") from None
    # The same command again resumes the run; the checkpoint with which it began may be gone.
    same = newest[1]["state"].get("origin"), str(newest[0].resolve())
    if os.path.realpath(resume) not in same:
        raise UserError(
            f"checkpoint.resume={resume}: {run} holds a run that has not begun with this "
            f"checkpoint, or a later one; leave the key out to continue from {newest[0].name}, "
            "or give another run.name to branch off"
        )
    return newest


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn errors of the file system into user errors about run.dir."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.dir={path}: cannot be used: {error.strerror}; give a writable folder"
        ) from None


def _lock(path: Path) -> int:
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
