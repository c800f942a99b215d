"""Checkpoints that survive a kill at any instant.

A checkpoint is `step-<8 digits>.pt`. Its manifest `step-<8 digits>.json` holds its SHA-256, which
detects damage. `last.json` and `best.json` are copies of the manifests of two of them. Each file is
written under a temporary name, fsynced and renamed, and then its folder is fsynced. During
training, a `Writer` does all of this in a thread, from a copy of the training state.
"""

import copy
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from conf import strict_json
from conf.schema import RunError, UserError
from models.weights import read_torch_file

logger = logging.getLogger(__name__)

# Increased whenever the content of a checkpoint or the result of the same config changes: a run
# resumes from this format only. 3: mixup and random operations are as in the recipes' sources.
FORMAT = 3
READABLE = (2, 3)  # formats whose weights, config and plan have the same meaning
PARTS = {"step": int, **dict.fromkeys(("state", "identity", "config", "plan"), dict)}
HANGING_SECONDS = 60.0  # a wait for a checkpoint is reported after each of these


class CheckpointError(RunError):
    """A checkpoint cannot be written or is damaged; the message names the file and the reason."""


class Writer:
    """Writes copies of the training state in a thread, one at a time, while training continues.

    Training pauses only for the copy from the device to the host memory, which is reused for every
    checkpoint. With a GPU, this memory is page-locked: the host does not wait for the copy either.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._writing: futures.Future[None] | None = None
        self._copies: list[Tensor] = []  # on the host

    def start(self, content: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy `content` and call `write` with the copy in the thread. Raises what `wait` raises.

        Later changes of `content` do not change the copy: on a GPU, kernels that are launched
        after this call run after the copy.
        """
        self.wait()
        tensors = list({id(tensor): tensor for tensor in _tensors(content)}.values())
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = []  # frees the memory
            # With the same strides, the copy moves plain bytes.
            self._copies = [
                torch.empty_like(tensor, device="cpu", pin_memory=self._on_gpu)
                for tensor in tensors
            ]
        with torch.no_grad():
            for copied, tensor in zip(self._copies, tensors, strict=True):
                copied.copy_(tensor, non_blocking=self._on_gpu)
        copied_event = torch.cuda.Event(blocking=True) if self._on_gpu else None
        if copied_event is not None:
            copied_event.record(torch.cuda.current_stream())
        # deepcopy takes these copies in place of the tensors, and copies everything else.
        memo: dict[int, Any] = dict(zip(map(id, tensors), self._copies, strict=True))
        duplicate = copy.deepcopy(content, memo)

        def write_copy() -> None:
            if copied_event is not None:
                copied_event.synchronize()
            write(duplicate)

        self._writing = self._thread.submit(write_copy)

    @property
    def failed(self) -> bool:
        """Whether `wait` will raise an exception. Does not wait."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Wait until `write` has returned; raise what it has raised, once."""
        if self._writing is None:
            return
        seconds = HANGING_SECONDS
        # If Ctrl-C interrupts this wait, `close` raises the error of the write.
        while not futures.wait([self._writing], HANGING_SECONDS).done:
            logger.warning(
                "training waits for a checkpoint that is still being written after %.0f s: check "
                "the disk; Ctrl-C or SIGTERM ends the run without this checkpoint",
                seconds,
            )
            seconds += HANGING_SECONDS
        writing, self._writing = self._writing, None
        writing.result()

    def close(self) -> None:
        """Wait for the thread and free the memory. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._copies = []


def save(folder: Path, content: dict[str, Any], *, keep: int, best_step: int | None = None) -> Path:
    """Write a checkpoint, point `last` (and `best`) to it, and remove older checkpoints.

    Raises CheckpointError if the disk is full or cannot be written; earlier ones are untouched.

    Args:
        folder: `checkpoints/` of a run.
        content: PARTS and more: plain containers, tensors, numbers and strings.
        keep: number of newest checkpoints to keep, in addition to the best one.
        best_step: step of the best checkpoint so far; may be the step of this one.
    """
    path = folder / file_name(content["step"])
    manifest = path.with_suffix(".json")
    content = {"format": FORMAT, **content}
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync_folder(folder.parent)
        manifest.unlink(missing_ok=True)  # of an earlier file of this step
        _write(path, lambda file: torch.save(content, file))
        entry = {"file": path.name, "step": content["step"], "sha256": sha256(path)}
        write_json(manifest, entry)
        write_json(folder / "last.json", entry)
        if best_step is None:
            (folder / "best.json").unlink(missing_ok=True)  # no longer comparable
        else:
            point_to_best(folder, best_step)
        for old in files(folder)[:-keep]:
            if old != path and (best_step is None or old.name != file_name(best_step)):
                # The manifest first: a file without a manifest can be loaded.
                old.with_suffix(".json").unlink(missing_ok=True)
                old.unlink()
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        needed = sum(tensor.nbytes for tensor in _tensors(content)) / 2**20
        free = shutil.disk_usage(folder.parent).free / 2**20
        raise CheckpointError(
            f"{path}: cannot be written: {error.__context__ or error} ({needed:.1f} MiB needed, "
            f"{free:.1f} MiB free); free some space or check the disk, and run the same command "
            "again: earlier checkpoints are intact"
        ) from error
    return path


def point_to_best(folder: Path, step: int) -> None:
    """Let `best.json` name the checkpoint of a step, unless it is in another folder."""
    entry = read_manifest(folder / Path(file_name(step)).with_suffix(".json"))
    if entry and entry != read_manifest(folder / "best.json"):
        write_json(folder / "best.json", entry)


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder in the order of their steps, which may have 9 digits."""
    paths = [path for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem[5:]))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, without executing code from it.

    Raises CheckpointError if it is missing, damaged or something else, UserError if it has
    another format.
    """
    try:
        verify(path)
        content: dict[str, Any] = read_torch_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read as a checkpoint: {reason}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found != FORMAT:
        raise UserError(
            f"{path}: written by another version of this program (format {found}, this one "
            f"resumes {FORMAT}), which trains differently; give run.name=NAME model.weights={path} "
            "to start a new run from its weights, or checkpoint.resume=never to start over in this "
            "directory"
        )
    if is_ours(content):
        return content
    raise CheckpointError(f"{path}: not a checkpoint of this program: needs {', '.join(PARTS)}")


def is_ours(content: Any) -> bool:
    """Return whether the content of a file is a checkpoint that this version can read."""
    ours = isinstance(content, dict) and content.get("format") in READABLE
    return ours and all(isinstance(content.get(name), kind) for name, kind in PARTS.items())


def verify(path: Path) -> None:
    """Raise CheckpointError if a checkpoint differs from its manifest. It may have none."""
    manifest = path.with_suffix(".json")
    if manifest.exists() and sha256(path) != read_manifest(manifest).get("sha256"):
        raise CheckpointError(f"{path}: damaged: its SHA-256 differs from the manifest")


def find(path: str | Path) -> Path:
    """Return the checkpoint that a path stands for.

    The folder of a run and its `checkpoints/` stand for the best checkpoint, or the newest one if
    none was validated; `best.json`, `last.json` or a manifest for the file that it names; any other
    file for itself. Raises UserError if there is none.
    """
    path = Path(path)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        for pointer in (folder / "best.json", folder / "last.json"):
            if pointer.exists():
                return find(pointer)
        raise UserError(f"{path}: holds no checkpoints; give a file or the folder of a run")
    if path.suffix != ".json":
        return path
    found = path.parent / Path(str(read_manifest(path).get("file", ""))).name  # of its own folder
    if not found.is_file():
        raise UserError(f"{path}: names no checkpoint; give a file such as step-00001000.pt")
    return found


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return path and content of the newest intact checkpoint, and warn about newer damaged ones.

    A file lacks its manifest after a kill, or if only the .pt files were copied. Returns None if
    there is no checkpoint. Raises CheckpointError if all are damaged, UserError for another format.
    """
    damaged = []
    for path in reversed(files(folder)):
        try:
            content = load(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            logger.warning("%s; continuing from %s instead", line, path.name)
        if not path.with_suffix(".json").exists():
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
    git = ["git", "-C", str(Path(__file__).parent)]
    command = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        commit = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    python = platform.python_version()
    return {"python": python, "torch": str(torch.__version__), "git_commit": commit}


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically. A number that is not finite becomes null."""
    replace_file(path, strict_json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    _write(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest or pointer; return {} if it is missing or damaged."""
    try:
        manifest = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace a file by what `fill` writes, atomically, also if the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensors(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, (dict, list, tuple)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors(value)
