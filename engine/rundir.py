"""The run directory: what a run is known by. One process at a time trains in it, and the same command goes on in it."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import UserError
from engine import checkpoint

logger = logging.getLogger(__name__)


class RunDirectory:
    """config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and at the end summary.json, below one folder.

    Args:
        path: created by `open`, not before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def check(self, resume: str) -> None:
        """Refuse, as `open` does, what shows before the data is known. Nothing is created.

        Raises:
            UserError: the folder holds something else, or the checkpoint is missing.
        """
        if resume not in ("auto", "never") and not os.path.isfile(resume):
            what = "is a folder" if os.path.isdir(resume) else "no such file"
            raise UserError(f"checkpoint.resume={resume}: {what}; give a checkpoint's path (step-*.pt), auto or never")
        with self._usable():
            if self.path.exists():
                self._refuse_foreign()

    def open(self, resume: str, identity: dict[str, Any]) -> Path | None:
        """Claim the folder and find the checkpoint to go on from. Rank 0 calls this; nothing is created when it raises.

        Args:
            resume: `auto`, `never`, or a checkpoint's path.
            identity: what the checkpoint's run must have in common with this one.

        Returns:
            The checkpoint, or None to start from step 0.

        Raises:
            UserError: the folder holds something else or is in use, or the checkpoint is missing or of another training.
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        self.check(resume)
        given = None if resume in ("auto", "never") else Path(resume)
        if given is not None:
            try:
                stored = checkpoint.load(given)
            except checkpoint.CheckpointError as error:
                raise UserError(f"checkpoint.resume: {error}; give the path of a step-*.pt") from None
            checkpoint.check_compatible(stored["identity"], identity, given)
        with self._usable():
            return self._open(resume, identity, given)

    def _open(self, resume: str, identity: dict[str, Any], given: Path | None) -> Path | None:
        if self.path.exists():
            self._claim()
            checkpoint.remove_leftovers(self.checkpoints, keep=given)
        found = given
        newest = checkpoint.load_newest(self.checkpoints) if resume != "never" else None
        if newest is not None:
            own, stored = newest
            if given is None or not given.parent.samefile(self.checkpoints):
                # A path to somewhere else is where the run began; started again, it goes on from its own checkpoints.
                found = own
                checkpoint.check_compatible(stored["identity"], identity, own)
            elif given.name < own.name:
                raise UserError(f"checkpoint.resume={resume}: {self.path} holds a later one, {own.name}; leave the key out to "
                                "go on from there, or give another run.dir to branch off")  # fmt: skip
        if resume == "never" and self.path.exists():
            self._move_aside()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._claim()
        return found

    def begin(self, config: str) -> None:
        """Write config.yaml, and take away an earlier life's summary: this one has not ended.

        Raises:
            CheckpointError: config.yaml cannot be written.
            UserError: the summary cannot be removed.
        """
        self.write("config.yaml", config)
        with self._usable():
            (self.path / "summary.json").unlink(missing_ok=True)

    def write(self, name: str, content: str) -> None:
        """Replace a file of the folder.

        Raises:
            CheckpointError: it cannot be written; the one before is untouched.
        """
        try:
            checkpoint.replace_file(self.path / name, content)
        except OSError as error:
            whole = "the checkpoints are whole, and the same command goes on from them"
            kept = whole if any(self.checkpoints.glob("step-*.pt")) else "nothing has been trained yet"
            reason = error.strerror or error
            raise checkpoint.CheckpointError(f"{self.path / name}: cannot be written: {reason}; {kept}") from error

    def finished_summary(self, step: int) -> dict[str, Any] | None:
        """The summary an earlier life left, if it finished at `step`."""
        try:
            summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == "finished" and summary.get("step") == step else None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"run.dir={self.path}: cannot be used: {error.strerror}; give a folder to write in") from None

    def _refuse_foreign(self) -> None:
        if not self.path.is_dir():
            raise UserError(f"run.dir={self.path}: is a file; give a folder")
        content = {p.name for p in self.path.iterdir()}
        if content and not content & {"config.yaml", "checkpoints", ".lock"}:
            raise UserError(f"run.dir={self.path}: holds other things than a run; give a folder of its own")

    def _claim(self) -> None:
        """Lock the folder; the kernel lets go when the process ends, however it ends."""
        lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"run.dir={self.path}: another process is training in it; give another run.dir or run.name"
            ) from None
        self._lock = lock

    def _move_aside(self) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        logger.info("the earlier run is now %s", aside)
        self.close()
