"""Compiled kernels in the run directory, so that a later start in it need not compile again.

torch.compile caches compiled kernels on the machine. A new container starts with an empty cache,
but usually mounts the run directory.

The kernels are executable code, in contrast to everything else in a run directory. They are
therefore loaded only if this user wrote them, into this folder: see `_trusted` and `_read`.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from engine.distributed import World
from engine.plan import Plan

logger = logging.getLogger(__name__)

FOLDER = "compiled"


class CompileCache:
    """The compiled kernels of one rank, stored in `compiled/` in the run directory.

    Each rank of a node has a file, because the index of its GPU is a part of torch's cache keys.
    The first node's ranks write these files; the ranks of every node read them. No method raises:
    without the file, the first step takes longer.

    Args:
        run: the run directory.
        plan: decides what is compiled; a file that was made for another plan is not loaded.
    """

    def __init__(self, run: Path, plan: Plan, world: World) -> None:
        self.folder = run / FOLDER
        self.name = f"rank{world.local_rank}"
        self.compiles = plan.compile != "off"
        self.writes = world.rank == world.local_rank
        self.made_for = {
            "model": plan.config.model.name,
            "classes": plan.num_classes,
            "image_size": plan.image_size,
            "batch": plan.batch_size // world.size,
            "precision": plan.precision,
            "channels_last": plan.channels_last,
            "compile": plan.compile,
            "device": plan.device,
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
        }
        self._stored: set[tuple[str, str]] = set()  # kind and key of each artefact in the file

    def load(self) -> bool:
        """Give the stored kernels to torch.compile. Call it before the first compiled step.

        Returns:
            Whether stored kernels were loaded.
        """
        if not self.compiles:
            return False
        try:
            with _trusted(self.folder) as folder:
                content = _read(folder, self.name, self.made_for)
            loaded = torch.compiler.load_cache_artifacts(content)
            if loaded is None:
                raise _UnusableError("torch cannot read it")
        except FileNotFoundError:
            return False
        except Exception as error:  # torch raises many types for content that it does not know
            self._warn("is not used", error, "the model is compiled again")
            return False
        self._stored = _keys(loaded)
        return True

    def save(self) -> None:
        """Store the kernels if any were compiled since the last time.

        Call it after a compiled step, while nothing is being compiled.
        """
        made = torch.compiler.save_cache_artifacts() if self.compiles and self.writes else None
        if made is None or _keys(made[1]) <= self._stored:
            return
        self._stored = _keys(made[1])
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with _trusted(self.folder) as folder:
                _write(folder, self.name, made[0], self.made_for)
        except (OSError, _UnusableError) as error:
            self._warn("cannot be written", error, "a start in another container compiles again")

    def _warn(self, problem: str, error: Exception, consequence: str) -> None:
        reason = getattr(error, "strerror", None) or error
        logger.warning(
            "%s %s (%s); %s", self.folder / f"{self.name}.bin", problem, reason, consequence
        )


class _UnusableError(Exception):
    """A file or folder must not or cannot be used; the message says why."""


def _keys(info: Any) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


@contextmanager
def _trusted(folder: Path) -> Iterator[int]:
    """Open a folder that only this user can write; its files are opened relative to it.

    The checks examine the folder after it is opened, so nobody can replace it between check and
    use. If a group may write to the run directory above it (umask 002), another user can replace
    the folder, but not by one that this user owns and that holds a file accepted by `_read`.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(handle), "the folder")
        yield handle
    finally:
        os.close(handle)


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise _UnusableError(f"{what} belongs to another user")
    if status.st_mode & 0o022:
        raise _UnusableError(f"other users can write {what}")


def _open(folder: int, name: str) -> int:
    """Open a file in a trusted folder for reading. Only this user may have write access to it."""
    # Without O_NONBLOCK, opening a named pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(name, flags, dir_fd=folder)
    status = os.fstat(handle)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise _UnusableError("it is not a file")
        _check_owner(status, "the file")
    except _UnusableError:
        os.close(handle)
        raise
    return handle


def _identity(status: os.stat_result) -> list[int]:
    """Return the inode and the change time of a file. They differ for every copy of it.

    The kernel sets both. An attacker who packs a folder cannot know the nanosecond in which it will
    be unpacked.
    """
    return [status.st_ino, status.st_ctime_ns]


def _read(folder: int, name: str, made_for: dict[str, Any]) -> bytes:
    """Read a file that `_write` wrote, into this folder and for the same plan.

    Raises:
        OSError: it cannot be read.
        _UnusableError: it was made for another plan, is damaged, or was written elsewhere.
    """
    with open(_open(folder, f"{name}.json"), encoding="utf-8") as file:
        try:
            manifest = json.load(file)
            stored, digest, identity = (manifest[k] for k in ("made_for", "sha256", "identity"))
        except (ValueError, TypeError, LookupError):
            raise _UnusableError("its manifest is damaged") from None
    if stored != made_for:
        raise _UnusableError("it was made for another model, batch, GPU or version of torch")
    with open(_open(folder, f"{name}.bin"), "rb") as file:
        if _identity(os.fstat(file.fileno())) != identity:
            raise _UnusableError("it was copied or changed")
        content = file.read()
    if hashlib.sha256(content).hexdigest() != digest:
        raise _UnusableError("it is damaged")
    return content


def _write(folder: int, name: str, content: bytes, made_for: dict[str, Any]) -> None:
    """Replace the file and then its manifest. A kill in between leaves a file that is not used."""
    identity = _identity(_replace(folder, f"{name}.bin", content))
    digest = hashlib.sha256(content).hexdigest()
    manifest = {"made_for": made_for, "sha256": digest, "identity": identity}
    _replace(folder, f"{name}.json", json.dumps(manifest, indent=2).encode())


def _replace(folder: int, name: str, content: bytes) -> os.stat_result:
    """Write a file under a temporary name and rename it; return its status."""
    temporary = f"{name}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)  # left by a killed process, or put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)
