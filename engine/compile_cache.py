"""Compiled kernels in the run directory, so that a start in a new container need not compile again.

The kernels are executable code. They are loaded only if this user wrote them, into this folder.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from engine.distributed import World

logger = logging.getLogger(__name__)


class CompileCache:
    """The compiled kernels of one rank, stored in `compiled/` in the run directory.

    Each rank of a node has a file, because the index of its GPU is a part of torch's cache keys.
    The first node's ranks write these files. torch finds a kernel by a hash of what it computes.
    """

    def __init__(self, run: Path, world: World) -> None:
        self.path = run / "compiled" / f"rank{world.local_rank}.bin"
        self.writes = world.rank == world.local_rank
        self._stored: set[Any] = set()  # kind and key of each artefact in the file

    def load(self) -> bool:
        """Give the stored kernels to torch.compile, if any. Call it before the first step."""
        try:
            manifest, _ = _read_own(self.path.with_suffix(".json"))
            content, identity = _read_own(self.path)
            if json.loads(manifest) != _manifest(content, identity):
                raise ValueError("it is damaged or copied, or was made by another version of torch")
            self._stored = _keys(torch.compiler.load_cache_artifacts(content))
        except FileNotFoundError:
            return False
        except Exception as error:  # torch raises many types for content that it does not know
            logger.warning("%s is not used (%s); the model is compiled again", self.path, error)
            return False
        return True

    def save(self) -> None:
        """Store the kernels if any were compiled since the last time. Call it after a step."""
        made = torch.compiler.save_cache_artifacts() if self.writes else None
        if made is None or _keys(made[1]) <= self._stored:
            return
        self._stored = _keys(made[1])
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            _replace(self.path, made[0])
            # A kill in between leaves a file that is not used.
            manifest = _manifest(*_read_own(self.path))
            _replace(self.path.with_suffix(".json"), json.dumps(manifest).encode())
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error.strerror)


def _keys(info: Any) -> set[Any]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


def _manifest(content: bytes, identity: list[int]) -> dict[str, Any]:
    """Return what must be stored beside a file with this content."""
    digest = hashlib.sha256(content).hexdigest()
    return {"torch": str(torch.__version__), "sha256": digest, "identity": identity}


def _read_own(path: Path) -> tuple[bytes, list[int]]:
    """Read a file that only this user can write, in a folder that only this user can write.

    Returns:
        Its content, and its inode and change time, which the kernel sets. Whoever packs a folder
        cannot know the nanosecond in which it will be unpacked.

    Raises:
        OSError: it cannot be read.
        ValueError: another user can write it, or the folder.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        for each in (os.lstat(path.parent), status):  # everybody may write a symbolic link
            if each.st_uid != os.geteuid() or each.st_mode & 0o022:
                raise ValueError("another user owns it or its folder, or can write there")
        return file.read(), [status.st_ino, status.st_ctime_ns]


def _replace(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(content)
    os.replace(temporary, path)
