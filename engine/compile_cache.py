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

from conf.files import open_regular
from engine.distributed import World

logger = logging.getLogger(__name__)


class CompileCache:
    """The compiled kernels of one rank, stored in `compiled/` in the run directory.

    torch's cache keys contain the index of a rank's GPU, so each rank of a node has a file. The
    first node's ranks write these files.
    """

    def __init__(self, run: Path, world: World) -> None:
        self.path = run / "compiled" / f"rank{world.local_rank}.bin"
        self.manifest = self.path.with_suffix(".json")
        self._writes = world.rank == world.local_rank
        self._stored: set[Any] = set()  # kind and key of each kernel in the file

    def load(self) -> bool:
        """Give the stored kernels to torch.compile, if any. Call it before the first step."""
        try:
            content, facts = _read_own(self.path)
            if json.loads(_read_own(self.manifest)[0]) != facts:
                raise ValueError("it is damaged or copied, or written by another version of torch")
            self._stored = _keys(torch.compiler.load_cache_artifacts(content))
        except FileNotFoundError:
            return False
        except Exception as error:  # torch raises many types for content that it does not know
            logger.warning("%s is not used (%s); the model is compiled again", self.path, error)
            return False
        return True

    def save(self) -> None:
        """Store the kernels if any were compiled since the last time. Call it after a step."""
        compiled = torch.compiler.save_cache_artifacts() if self._writes else None
        if compiled is None or _keys(compiled[1]) <= self._stored:
            return
        self._stored = _keys(compiled[1])
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            _replace(self.path, compiled[0])
            # After a kill here, the old manifest does not fit, and the file is not used.
            _replace(self.manifest, json.dumps(_read_own(self.path)[1]).encode())
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error.strerror)


def _keys(info: Any) -> set[Any]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


def _read_own(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a file, and what its manifest must hold.

    That includes the inode and the time of the last change, which the system sets: a manifest does
    not fit a file that was copied or unpacked, even if somebody else has prepared the two. Raises
    ValueError if another user can write the file or its folder.
    """
    with open_regular(path, flags=os.O_NOFOLLOW) as file:
        status = os.fstat(file.fileno())
        for each in (os.lstat(path.parent), status):  # everybody may write a symbolic link
            if each.st_uid != os.geteuid() or each.st_mode & 0o022:
                raise ValueError("another user owns it or its folder, or can write there")
        content = file.read()
    return content, {
        "torch": str(torch.__version__),
        "sha256": hashlib.sha256(content).hexdigest(),
        "identity": [status.st_ino, status.st_ctime_ns],
    }


def _replace(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(content)
    os.replace(temporary, path)
