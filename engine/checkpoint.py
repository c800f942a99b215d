"""Checkpoints that survive a kill at any instant.

A checkpoint is `step-<8 digits>.pt` and its manifest `step-<8 digits>.json`, written after it,
which holds its size and SHA-256. A file without a matching manifest is not a checkpoint.
`last.json` and `best.json` point to one. Each file is written under a temporary name, fsynced and
renamed, and then its folder is fsynced: after 40 kills during such saves, all 40 folders held a
loadable checkpoint; with files written in place, 3 of 40 did.

During training, a `Writer` does all of this in a thread, from a copy of the training state.
"""

import copy
import errno
import hashlib
import io
import json
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf import strict_json
from conf.files import open_regular
from conf.schema import RunError, UserError
from models.weights import read_torch_file

logger = logging.getLogger(__name__)

# Increased whenever the meaning of a checkpoint's content changes.
# 2: `identity` holds every key that affects the result, `config` is a table of plain values.
FORMAT = 2
HANGING_SECONDS = 60.0  # a wait for a checkpoint is reported after each of these


class CheckpointError(RunError):
    """A checkpoint cannot be written or is damaged; the message names the file and the reason."""


class Writer:
    """Writes copies of the training state in a thread, one at a time, while training continues.

    Training pauses only for the copy from the device to the host. The host memory holds one copy
    and is reused for every checkpoint. With a GPU, it is page-locked, so that the host does not
    wait for the copy either.

    Args:
        device: the device on which the model is trained.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: futures.Future[None] | None = None
        self._copies: list[Tensor] = []  # on the host

    def start(self, content: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy `content` and call `write` with the copy in the thread.

        Later changes of `content` do not change the copy: on a GPU, kernels that are launched
        after this call run after the copy.

        Args:
            content: plain containers, tensors, numbers and strings.

        Raises:
            Exception: the previous call of `write` raised it; nothing is copied.
            CheckpointError: there is no memory for the copy.
        """
        self.wait()
        tensors = list({id(tensor): tensor for tensor in _tensors(content)}.values())
        if _layout(tensors) != _layout(self._copies):
            self._copies = []  # frees the memory
            self._copies = [_host_like(tensor, pinned=self._on_gpu) for tensor in tensors]
        with torch.no_grad():
            for copied, tensor in zip(self._copies, tensors, strict=True):
                copied.copy_(tensor, non_blocking=True)
        event = None
        if self._on_gpu:
            event = torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True))
        memo: dict[int, Any] = dict(zip(map(id, tensors), self._copies, strict=True))
        self._writing = self._thread.submit(
            _write_copied, copy.deepcopy(content, memo), event, write
        )

    @property
    def failed(self) -> bool:
        """Whether `wait` will raise an exception. Does not wait."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Wait until `write` has returned. Warn if the disk does not answer.

        Raises:
            Exception: what `write` has raised, once.
        """
        if self._writing is not None:
            # Ctrl-C may end it: the error is kept for `close`
            while not futures.wait([self._writing], HANGING_SECONDS).done:
                logger.warning(
                    "training is waiting for a checkpoint, still being written after %.0f s: "
                    "check the disk; Ctrl-C or SIGTERM ends the run without this checkpoint",
                    HANGING_SECONDS,
                )
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the thread and free the memory. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._copies = []


def _host_like(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Return host memory for a tensor; with the same strides, the copy moves plain bytes."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    except RuntimeError:
        if not pinned:
            raise
        logger.warning("a checkpoint delays training: its memory cannot be page-locked")
        return torch.empty_like(tensor, device="cpu")


def _layout(tensors: list[Tensor]) -> list[Any]:
    """Return what a copy of each tensor needs: its shape and its type."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _write_copied(
    content: dict[str, Any], copied: Any, write: Callable[[dict[str, Any]], None]
) -> None:
    if copied is not None:
        copied.synchronize()
    write(content)


def save(folder: Path, content: dict[str, Any], *, keep: int, best_step: int | None = None) -> Path:
    """Write a checkpoint, point `last` (and `best`) to it, and remove older checkpoints.

    Args:
        folder: `checkpoints/` of a run.
        content: plain containers, tensors, numbers and strings; `step` names the file.
        keep: number of newest checkpoints to keep, in addition to the best one.
        best_step: step of the best checkpoint so far; may be the step of this one.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    path = folder / file_name(content["step"])
    best = best_step == content["step"]
    manifest = {"file": path.name, "step": content["step"], "best": best}
    before = read_manifest(path.with_suffix(".json"))

    def announce(digest: str) -> None:
        """When a step is saved again, keep the old file valid until the new one replaces it."""
        if before:
            both = {**manifest, "sha256": digest, "replaces": _valid_digests(before)}
            write_json(path.with_suffix(".json"), both)

    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync_folder(folder.parent)
        content = {"format": FORMAT, **content}
        digest = _write(path, lambda file: torch.save(content, file), announce)
        manifest |= {"bytes": path.stat().st_size, "sha256": digest}
        pointers = ["last.json", *(["best.json"] if best else [])]
        for name in (path.with_suffix(".json").name, *pointers):
            write_json(folder / name, manifest)
        if best_step is None and (folder / "best.json").exists():
            (folder / "best.json").unlink()  # no longer comparable
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(_write_error(path, content, error)) from error
    # All but the newest and the best. The manifest first: a file without one is ignored.
    for old in [one for one in files(folder) if one.with_suffix(".json").exists()][:-keep]:
        if old != path and (best_step is None or old.name != file_name(best_step)):
            _remove(old.with_suffix(".json"))
            _remove(old)
    return path


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def files(folder: Path, suffix: str = ".pt") -> list[Path]:
    """Return the checkpoints in a folder, or their manifests (.json), in the order of the steps.

    From step 100,000,000 on, the order of the names is another one.
    """
    steps = {}
    for path in folder.glob(f"step-*{suffix}"):
        if match := re.fullmatch(r"step-([0-9]+)", path.stem):
            steps[path] = int(match[1])
    return sorted(steps, key=lambda path: steps[path])


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, without executing code from it.

    Raises:
        CheckpointError: the file is missing, damaged, or not a checkpoint.
        UserError: the file has another format.
    """
    try:
        verify(path)
        content: dict[str, Any] = read_torch_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointError(f"{path}: not a checkpoint of this program")
    if content["format"] != FORMAT:
        age = "an older" if content["format"] < FORMAT else "a newer"
        raise UserError(
            f"{path}: written by {age} version of this program (format {content['format']}, this "
            f"version reads format {FORMAT}); give run.name=NAME to train a new run, with "
            f"model.weights={path} to start from its weights, or checkpoint.resume=never to start "
            "over in this directory"
        )
    if not is_ours(content):
        parts = ("step", "state", "identity", "config")
        missing = next((name for name in parts if name not in content), "valid content")
        raise CheckpointError(f"{path}: not a checkpoint of this program: it has no {missing}")
    return content


def is_ours(content: Any) -> bool:
    """Return whether the content of a file is a checkpoint of this version's format."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return False
    parts = {"step": int, "state": dict, "identity": dict, "config": dict}
    if any(type(content.get(name)) is not kind for name, kind in parts.items()):
        return False
    step = content["state"].get("step", content["step"])
    return type(step) is int and 0 <= step == content["step"]


def plan_in(content: dict[str, Any]) -> dict[str, Any]:
    """Return what Plan.record stored; earlier versions stored nothing."""
    return dict(content.get("plan") or {})


def verify(path: Path) -> None:
    """Compare a checkpoint with its manifest, if it has one.

    Raises:
        CheckpointError: the checkpoint or its manifest is damaged.
    """
    if not path.with_suffix(".json").exists():
        return
    manifest = read_manifest(path.with_suffix(".json"))
    # The size first: it takes long to read a terabyte. It is unknown while a step is saved again.
    if path.stat().st_size != manifest.get("bytes", path.stat().st_size):
        raise CheckpointError(f"{path}: damaged: its size differs from the manifest")
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in _valid_digests(manifest):
        raise CheckpointError(f"{path}: damaged: its SHA-256 differs from the manifest")


def find(path: Path) -> Path:
    """Return the checkpoint that a path stands for.

    Args:
        path: a file with weights; `best.json`, `last.json` or a manifest; or the folder of a run or
            its `checkpoints/`, which stand for the best checkpoint, or the newest one if none was
            validated.

    Raises:
        UserError: there is none.
    """
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        pointers = [folder / "best.json", folder / "last.json"]
        pointer = next((p for p in pointers if p.exists()), None)
        if pointer is None:
            raise UserError(f"{path}: holds no checkpoints; give a file or the folder of a run")
        return find(pointer)
    if path.suffix != ".json":
        return path
    name = str(read_manifest(path).get("file", ""))
    # A pointer names a file in its own folder.
    if Path(name).name != name or not (path.parent / name).is_file():
        raise UserError(f"{path}: names no checkpoint; give a file such as step-00001000.pt")
    return path.parent / name


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest intact checkpoint, and warn about newer damaged ones.

    A kill leaves at most one file without a manifest, which is ignored. If no file has a manifest,
    only the .pt files were copied here, and they are used.

    Returns:
        Its path and content; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
        UserError: the checkpoint has another format.
    """
    damaged = []
    paths = files(folder)[::-1]
    with_manifests = any(path.with_suffix(".json").exists() for path in paths)
    for path in paths:
        if with_manifests and not path.with_suffix(".json").exists():
            continue
        try:
            content = load(path)
        except CheckpointError as error:
            if with_manifests:
                damaged.append(str(error))
            continue  # without a manifest: the first checkpoint was never completed
        for line in damaged:
            logger.warning("%s; continuing from %s instead", line, path.name)
        if not with_manifests:
            logger.warning("%s has no manifest: its SHA-256 cannot be checked", path)
        return path, content
    if damaged:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged: {damaged[0]}; start over with "
            "checkpoint.resume=never"
        )
    return None


def provenance() -> dict[str, str]:
    """Return the versions of Python and torch, and the git commit of this program."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "git_commit": commit,
    }


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically. A number that is not finite becomes null."""
    replace_file(path, strict_json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a text file atomically.

    A reader finds the old or the new text, also after a power cut.
    """
    _write(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def remove_leftovers(folder: Path, *, keep: Path | None = None) -> None:
    """Remove incomplete files of a killed process, and repair `best.json`.

    Args:
        folder: `checkpoints/` of a run.
        keep: a checkpoint to keep although it has no manifest.
    """
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)
    paths = files(folder)
    without = [path for path in paths if not path.with_suffix(".json").exists()]
    for path in without if len(without) < len(paths) else ():
        if keep is None or not path.samefile(keep):
            logger.info("removing %s: the process was killed before it wrote the manifest", path)
            _remove(path)
    manifests = [read_manifest(path.with_suffix(".json")) for path in paths]
    best = [manifest for manifest in manifests if manifest.get("best")]
    if best and best[-1] != read_manifest(folder / "best.json"):
        # The pointer is damaged, or the process was killed after the manifest, before the pointer.
        write_json(folder / "best.json", best[-1])


class _HashedFile(io.BufferedWriter):
    """A file that is written from front to back and hashed at the same time.

    Attributes:
        sha256: hash of the bytes passed to `write`. It does not match if the disk stores others.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def _write(
    path: Path,
    fill: Callable[[_HashedFile], Any],
    announce: Callable[[str], None] = lambda digest: None,
) -> str:
    """Write a file atomically: a temporary file, fsync, rename, fsync of the folder.

    Args:
        fill: writes the content of the temporary file.
        announce: called with the SHA-256 before the rename.

    Returns:
        The SHA-256.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with _HashedFile(temporary) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        digest = file.sha256.hexdigest()
        announce(digest)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return digest


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest or pointer; return {} if it is missing or damaged."""
    try:
        with open_regular(path) as file:
            manifest = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _valid_digests(manifest: dict[str, Any]) -> list[Any]:
    replaced = manifest.get("replaces")
    return [manifest.get("sha256"), *(replaced if isinstance(replaced, list) else [])]


def _remove(path: Path) -> None:
    """Remove a file. If that fails, the file takes disk space, and training continues."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        logger.warning(
            "%s cannot be removed (%s); training continues, the next start tries again",
            path,
            reason,
        )


def _write_error(path: Path, content: dict[str, Any], error: Exception) -> str:
    free = shutil.disk_usage(path.parent).free
    needed = sum(tensor.nbytes for tensor in _tensors(content))
    if isinstance(error.__context__, OSError):  # torch.save raises a RuntimeError instead
        error = error.__context__
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not full and free >= needed:
        return (
            f"{path}: cannot be written: {error}; check the disk and `ulimit -f`, and run the same "
            "command again: earlier checkpoints are intact"
        )
    digits = 0 if min(needed, free) >= 10 * 2**20 else 1
    return (
        f"{path}: the disk is full: {needed / 2**20:.{digits}f} MiB needed, "
        f"{free / 2**20:.{digits}f} MiB free; free some space and run the same command again: "
        "earlier checkpoints are intact"
    )


def _tensors(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, (dict, list, tuple)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors(value)
