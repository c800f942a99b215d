"""The directory of one run: its lock, its files and its checkpoints. One process at a time trains in it."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import UserError
from engine import checkpoint

logger = logging.getLogger(__name__)

# What Tracker.outcome shows of a finished run.
SUMMARY = {"status", "step", "epoch", "seconds", "top1", "top5", "best_top1", "best_epoch", "images_per_second"}


@dataclass(frozen=True)
class _Found:
    """A checkpoint to go on from. `origin` is the checkpoint of another run that its own run began with."""

    path: Path
    step: int
    identity: dict[str, Any]
    origin: str | None

    @classmethod
    def of(cls, path: Path, content: dict[str, Any]) -> "_Found":
        return cls(path, content["step"], content["identity"], content["state"].get("origin"))


class RunDirectory:
    """config.yaml, metrics.jsonl, checkpoints/, tensorboard/ and at the end summary.json, below one folder.

    Args:
        path: created by `open`, not before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None
        self._found: tuple[object, _Found | None] | None = None

    def check(self) -> None:
        """Refuse, as `open` does, what shows before the data is known. Nothing is created.

        Raises:
            UserError: the folder holds something else.
        """
        with self._usable():
            if self.path.exists():
                self._refuse_foreign()

    def stored_identity(self, resume: str) -> dict[str, Any]:
        """The identity in the checkpoint that `open` would go on from; empty where there is none. Changes nothing.

        Raises:
            UserError, CheckpointError: as `open` does.
        """
        self.check()
        found = self._find(resume)
        return found.identity if found is not None else {}

    def open(
        self, resume: str, identity: dict[str, Any], *, accept_changes: bool = False, stop_step: int | None = None
    ) -> tuple[Path | None, dict[str, str]]:
        """Claim the folder and find the checkpoint to go on from. Rank 0 calls this; nothing is created when it raises.

        Args:
            resume: `auto`, `never`, or a checkpoint's path.
            identity: what affects the result, by the name a person knows it by.
            accept_changes: go on although some of it was different when the checkpoint was written.
            stop_step: where training ends. Changes are not accepted for a checkpoint that has got there.

        Returns:
            The checkpoint, or None to start from step 0; and the changes that were accepted, each key with a sentence.

        Raises:
            UserError: the folder holds something else or is in use, or the checkpoint is missing or of another training.
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        self.check()
        with self._usable():
            while True:
                before = self._listing()
                found, changes = self._find(resume), dict[str, str]()
                if found is not None:
                    changes = checkpoint.compare(found.identity, identity, found.path, accept_changes=accept_changes)
                    if changes and stop_step is not None and found.step >= stop_step:
                        named = "; ".join(changes.values())
                        raise UserError(f"cannot resume {found.path}: training has ended at step {found.step:,}, so these "
                                        f"changes would have no effect: {named}; give run.name=NAME, or start over with "
                                        "checkpoint.resume=never")  # fmt: skip
                if self.path.exists() and self._lock is None:
                    self._claim()
                if self._listing() == before:  # else another process has trained here since we looked
                    break
            if self._lock is not None:
                given = None if resume in ("auto", "never") else Path(resume)
                checkpoint.remove_leftovers(self.checkpoints, keep=given)
                if resume == "never":
                    self._move_aside()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._claim()
        return (found.path if found is not None else None), changes

    def _find(self, resume: str) -> "_Found | None":
        """The checkpoint to go on from."""
        key = (resume, self._listing())
        if self._found is None or self._found[0] != key:  # reading gigabytes twice would double the start
            self._found = key, self._look_for(resume)
        return self._found[1]

    def _look_for(self, resume: str) -> "_Found | None":
        if resume == "never":
            return None
        newest = checkpoint.load_newest(self.checkpoints)
        own = _Found.of(*newest) if newest is not None else None
        if resume == "auto":
            return own
        if own is not None and own.origin == str(Path(resume).resolve()):
            return own  # the same command again; the checkpoint that this run began with may be gone
        if not os.path.isfile(resume):
            what = "is a folder" if os.path.isdir(resume) else "no such file"
            raise UserError(f"checkpoint.resume={resume}: {what}; give a checkpoint's path (step-*.pt), auto or never")
        try:
            given = _Found.of(Path(resume), checkpoint.load(Path(resume)))
        except checkpoint.CheckpointError as error:
            raise UserError(f"checkpoint.resume: {error}; give the path of a step-*.pt") from None
        if own is None:
            return given
        if given.path.parent.samefile(self.checkpoints):
            if given.step < own.step:
                raise UserError(f"checkpoint.resume={resume}: {self.path} holds a later one, {own.path.name}; leave the key "
                                "out to continue from that, or give another run.name to branch off")  # fmt: skip
            return given
        raise UserError(f"checkpoint.resume={resume}: {self.path} holds a run that did not start from this checkpoint; "
                        f"leave the key out to continue from {own.path.name}, or give another run.name")  # fmt: skip

    def _listing(self) -> list[tuple[str, int]]:
        """Names and times of the checkpoints' manifests."""
        found = []
        for path in sorted(self.checkpoints.glob("step-*.json")):
            with suppress(FileNotFoundError):  # removed by a process that trains here; the lock will tell
                found.append((path.name, path.stat().st_mtime_ns))
        return found

    def begin(self, files: dict[str, str]) -> None:
        """Write config.yaml and the like, and remove the summary of an earlier start: this one has not ended.

        Args:
            files: content by name.

        Raises:
            CheckpointError: a file cannot be written.
            UserError: the summary cannot be removed.
        """
        for name, content in files.items():
            self.write(name, content)
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
        """The summary that an earlier start left, if it finished at `step`."""
        try:
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        whole = isinstance(summary, dict) and summary.keys() >= SUMMARY
        return summary if whole and summary["status"] == "finished" and summary["step"] == step else None

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
        number, folder = 1, self.path.resolve()  # the path may be a link to another disk
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        os.rename(folder, aside)
        folder.mkdir()
        logger.info("the earlier run is now %s", aside)
        self.close()
