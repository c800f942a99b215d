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
import mmap
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf import strict_json
from conf.files import open_regular
from conf.schema import RunError, UserError, show
from models.weights import read_torch_file
from pipeline.shared import page_lock, page_unlock

logger = logging.getLogger(__name__)

# Increased whenever the meaning of a checkpoint's content changes.
# 2: `identity` holds every key that affects the result, `config` is a table of plain values.
FORMAT = 2
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
MOST_CHANGES = 5  # largest number of changes to list in a message
HANGING_SECONDS = 60.0  # a wait for a checkpoint is reported after each of these
ALIGNMENT = 64  # bytes, of each tensor in a Writer's memory; as torch aligns on a CPU
MOST_VALUES = 10_000  # in `identity` or `config` of a checkpoint; a config has about 100
LONGEST_TEXT = 100_000  # letters of such a value
MOST_MANIFEST = 100_000  # bytes


class CheckpointError(RunError):
    """A checkpoint cannot be written or is damaged; the message names the file and the reason."""


class Writer:
    """Writes copies of the training state in a thread, one at a time, while training continues.

    Training pauses only for the copy from the device to the host. The host memory holds one copy
    and is reused for every checkpoint. With a GPU, it is page-locked if the system permits, so that
    the host does not wait for the copy either.

    Args:
        device: the device on which the model is trained.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: futures.Future[None] | None = None
        self._memory: mmap.mmap | None = None
        self._locked: list[int] = []  # its address if it is page-locked
        self._copied: list[Tensor] = []  # in this memory
        self._layout: list[Any] | None = None  # shapes, strides and dtypes of `_copied`

    def reserve(self, size: int) -> None:
        """Allocate memory for copies of `size` bytes; page-locking it is slow.

        `start` does the same if a copy does not fit.

        Raises:
            CheckpointError: the system does not allocate it.
        """
        self._free()
        size = max(size, 1)
        try:
            # Shared: a worker process that is forked later does not get a copy of its own.
            populate = getattr(mmap, "MAP_POPULATE", 0)  # Linux only; saves page faults
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | populate)
        except OSError as error:
            raise CheckpointError(
                f"{size / 2**20:.0f} MiB of host memory for a copy of the weights cannot be "
                f"allocated ({error.strerror}); raise the memory limit"
            ) from error
        if self._on_gpu:
            self._locked = page_lock(
                [np.frombuffer(self._memory, np.uint8)],
                purpose="checkpoints",
                effect="each checkpoint delays training slightly longer",
            )

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
        tensors = {id(tensor): tensor for tensor in _tensors(content)}
        memo = dict(zip(tensors, self._copies(list(tensors.values())), strict=True))
        copied = None
        if self._on_gpu:
            copied = torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True))
        self._writing = self._thread.submit(
            _write_copied, copy.deepcopy(content, memo), copied, write
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
            self._free()

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy the tensors into the memory. On a GPU, the copies are not complete on return."""
        layout = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if layout != self._layout:  # else the host tensors of the previous checkpoint serve again
            sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
            *places, end = accumulate(sizes, initial=0)
            if self._memory is None or len(self._memory) < end:
                self.reserve(end)
            assert self._memory is not None
            self._copied = [
                _host_like(tensor, self._memory, place)
                for tensor, place in zip(tensors, places, strict=True)
            ]
            self._layout = layout
        with torch.no_grad():
            for copy, tensor in zip(self._copied, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        return list(self._copied)

    def _free(self) -> None:
        page_unlock(self._locked)
        self._locked = []
        self._layout, self._copied = None, []
        self._memory = None  # freed with the last tensor in it


def _write_copied(
    content: dict[str, Any], copied: Any, write: Callable[[dict[str, Any]], None]
) -> None:
    if copied is not None:
        copied.synchronize()
    write(content)


def _host_like(tensor: Tensor, memory: mmap.mmap, place: int) -> Tensor:
    """Return a tensor at an offset of the memory, with the strides of `tensor` if it is dense.

    It has a storage of its own, because torch.save writes whole storages. Equal strides make the
    copy a plain transfer of bytes.
    """
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu")
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


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
    manifest_path = path.with_suffix(".json")
    manifest = {"file": path.name, "step": content["step"], "best": best}
    before = _read_manifest(manifest_path)

    def announce(digest: str) -> None:
        """When a step is saved again, keep the old file valid until the new one replaces it."""
        if before:
            write_json(
                manifest_path, {**manifest, "sha256": digest, "replaces": _valid_digests(before)}
            )

    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync_folder(folder.parent)
        digest = _write(
            path, lambda file: torch.save({"format": FORMAT, **content}, file), announce
        )
        manifest |= {"bytes": path.stat().st_size, "sha256": digest}
        write_json(manifest_path, manifest)
        write_json(folder / "last.json", manifest)
        if best:
            write_json(folder / "best.json", manifest)
        elif best_step is None and (folder / "best.json").exists():
            (folder / "best.json").unlink()  # not comparable after accepted changes
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(_write_error(path, content, error)) from error
    _prune(folder, keep, {path.name, file_name(best_step) if best_step is not None else ""})
    return path


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def files(folder: Path, suffix: str = ".pt") -> list[Path]:
    """Return the checkpoints in a folder, or their manifests (.json), in the order of the steps.

    From step 100,000,000 on, the order of the names is another one.
    """
    found = []
    for path in folder.glob(f"step-*{suffix}"):
        if match := re.fullmatch(r"step-([0-9]+)", path.stem):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


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
    if wrong := _wrong(content):
        raise CheckpointError(f"{path}: not a checkpoint of this program: {wrong}")
    return content


def is_ours(content: Any) -> bool:
    """Return whether the content of a file is a checkpoint of this version's format."""
    return isinstance(content, dict) and content.get("format") == FORMAT and not _wrong(content)


def _wrong(content: dict[str, Any]) -> str:
    """Return which required part of a checkpoint is missing or of another type; "" if none is."""
    kinds = {"step": int, "state": dict, "identity": dict, "config": dict}
    missing = [name for name in kinds if name not in content]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    other = [name for name, kind in kinds.items() if type(content[name]) is not kind]
    if other:
        return f"invalid {' and '.join(other)}"
    step = content["state"].get("step", content["step"])
    if type(step) is not int or not 0 <= step == content["step"]:
        return "invalid step"
    tables = [name for name in ("identity", "config") if not _is_plain(content[name])]
    return f"invalid {' and '.join(tables)}" if tables else ""


def _is_plain(table: dict[Any, Any]) -> bool:
    """Return whether a table holds what a config can hold, and not more."""
    waiting: list[Any] = [table]
    for _ in range(MOST_VALUES):
        if not waiting:
            return True
        value = waiting.pop()
        if isinstance(value, dict):
            if not all(isinstance(name, (str, int)) for name in value):
                return False
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, str):
            if len(value) > LONGEST_TEXT:
                return False
        elif value is not None and type(value) not in (bool, int, float):
            return False
    return False


def plan_in(content: dict[str, Any]) -> dict[str, Any]:
    """Return the valid part of what Plan.record stored; earlier versions stored nothing."""
    plan = content.get("plan")
    plan = dict(plan) if isinstance(plan, dict) else {}
    size, classes = plan.get("image_size"), plan.get("classes")
    if not (type(size) is int and 8 <= size <= 4096):
        plan.pop("image_size", None)
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        plan.pop("classes", None)
    return plan


def verify(path: Path) -> None:
    """Compare a checkpoint with its manifest, if it has one.

    Raises:
        CheckpointError: the checkpoint or its manifest is damaged.
    """
    manifest_path = path.with_suffix(".json")
    if not manifest_path.exists():
        return
    manifest = _read_manifest(manifest_path)
    if not manifest:
        raise CheckpointError(f"{path}: its manifest {manifest_path.name} is damaged")
    # The size first: it takes long to read a terabyte. It is unknown while a step is saved again.
    if path.stat().st_size != manifest.get("bytes", path.stat().st_size):
        raise CheckpointError(f"{path}: damaged: its size differs from the manifest")
    if _sha256(path) not in _valid_digests(manifest):
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
    name = str(_read_manifest(path).get("file", ""))
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


def compare(
    stored: dict[str, Any], now: dict[str, Any], path: Path, *, accept_changes: bool = False
) -> dict[str, str]:
    """Refuse to resume with changed values, unless the user accepts the changes.

    Args:
        stored: values in the checkpoint that affect the result, by name.
        now: the same values of this start.
        path: the checkpoint's, for messages.

    Returns:
        The accepted changes: a sentence for each name.

    Raises:
        UserError: lists the differences and the remedies.
    """
    names = [name for name in {**now, **stored} if stored.get(name) != now.get(name)]
    changes = {}
    for name in names:
        was, value = _shortened(stored.get(name, UNUSED), now.get(name, UNUSED))
        changes[name] = f"{name} was {was}, is {value}"
    listed = list(changes.values())
    if len(listed) > MOST_CHANGES:
        listed = [*listed[:MOST_CHANGES], f"and {len(listed) - MOST_CHANGES} more"]
    remedies = [
        "give run.name=NAME to train in another directory",
        "start over in this one with checkpoint.resume=never (this moves the old run aside)",
    ]
    fixed = [name for name in names if name in FIXED]
    if fixed:
        raise UserError(
            f"cannot resume {path}: {'; '.join(listed)}; {fixed[0]} cannot change within a run: "
            f"{', or '.join(remedies)}"
        )
    if changes and not accept_changes:
        remedies.append("continue from this checkpoint with checkpoint.accept_changes=true")
        raise UserError(
            f"cannot resume {path}: {'; '.join(listed)}; these changes affect the result: "
            f"{', or '.join(remedies)}"
        )
    return changes


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
    manifests = map(_read_manifest, files(folder, ".json")[::-1])
    best = next((manifest for manifest in manifests if manifest.get("best")), None)
    if best is not None and best != _read_manifest(folder / "best.json"):
        # The pointer is damaged, or the process was killed after the manifest, before the pointer.
        write_json(folder / "best.json", best)


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


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest or pointer; return {} if it is missing or damaged."""
    try:
        with open_regular(path) as file:
            manifest = json.loads(file.read(MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _valid_digests(manifest: dict[str, Any]) -> list[Any]:
    replaced = manifest.get("replaces")
    return [manifest.get("sha256"), *(replaced if isinstance(replaced, list) else [])]


def _prune(folder: Path, keep: int, needed: set[str]) -> None:
    """Remove all checkpoints except the newest `keep` and those named in `needed`."""
    paths = [path for path in files(folder) if path.with_suffix(".json").exists()]
    for path in paths[:-keep]:
        if path.name not in needed:
            # The manifest first: a file without a manifest is ignored, the reverse is an error.
            _remove(path.with_suffix(".json"))
            _remove(path)


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


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shortened(*values: Any) -> list[str]:
    """Format values for a message, shortened unless that hides their difference."""
    full = [show(value) for value in values]
    short = [text if len(text) <= 60 else f"{text[:57]}..." for text in full]
    return short if len(set(short)) == len(set(full)) else full
