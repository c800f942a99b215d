"""Checkpoints that survive a kill at any instant.

A checkpoint is `step-<8 digits>.pt` and, written after it, `step-<8 digits>.json`: its size and SHA-256. Without a manifest
that fits, a file does not count. `last.json` and `best.json` point to one. Every file is written under another name, synced,
renamed, and its folder synced: 40 of 40 kills during such saves left a loadable checkpoint, 3 of 40 when writing in place.
"""

import errno
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conf.schema import UserError, show

logger = logging.getLogger(__name__)

# Raised whenever what a checkpoint holds changes its meaning.
# 2: `identity` is every key that affects the result, `config` a table of plain values.
FORMAT = 2
# Keys and figures that tensors or step numbers depend on: no checkpoint can go on with another value, accepted or not.
FIXED = ("model.name", "classes", "parameters", "optim.name", "optim.decay_norms", "loader.batch_size")
UNSET = "without effect"  # shown for a key that has no effect beside the others, as optim.betas with optim.name=sgd
MOST_CHANGES = 5  # that a message names
# What a checkpoint holds besides what the state needs, by type.
CONTENT: dict[str, type] = {"step": int, "state": dict, "identity": dict, "config": dict}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged: names the file and the reason."""


def save(folder: Path, content: dict[str, Any], *, keep: int, best_step: int | None = None) -> Path:
    """Write a checkpoint, point `last` (and `best`) to it, and remove what is no longer kept.

    Args:
        folder: `checkpoints/` of a run.
        content: plain containers, tensors, numbers and strings; `step` names the file.
        keep: newest checkpoints to keep; the best is kept besides.
        best_step: step of the best checkpoint so far, perhaps this one.

    Raises:
        CheckpointError: the disk is full or cannot be written; what was there before is untouched.
    """
    path, best = folder / file_name(content["step"]), best_step == content["step"]
    manifest_path = path.with_suffix(".json")
    manifest = {"file": path.name, "step": content["step"], "best": best}
    before = _read_manifest(manifest_path)

    def announce(digest: str) -> None:
        """Saving a step again: the file that is there stays valid until the new one is in its place."""
        if before:
            write_json(manifest_path, {**manifest, "sha256": digest, "replaces": _valid_digests(before)})

    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync_folder(folder.parent)
        digest = _write(path, lambda temporary: torch.save({"format": FORMAT, **content}, temporary), announce)
        manifest |= {"bytes": path.stat().st_size, "sha256": digest}
        write_json(manifest_path, manifest)
        write_json(folder / "last.json", manifest)
        if best:
            write_json(folder / "best.json", manifest)
        elif best_step is None and (folder / "best.json").exists():
            (folder / "best.json").unlink()  # accepted changes have made the best incomparable
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(_why_not_written(path, content, error)) from error
    _prune(folder, keep, {path.name, file_name(best_step) if best_step is not None else ""})
    return path


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU; nothing in it is executed.

    Raises:
        CheckpointError: missing, damaged, or not a checkpoint.
        UserError: it is of another format.
    """
    manifest_path = path.with_suffix(".json")
    try:
        if manifest_path.exists():
            manifest = _read_manifest(manifest_path)
            if not manifest:
                raise CheckpointError(f"{path}: its manifest {manifest_path.name} is damaged")
            if _sha256(path) not in _valid_digests(manifest):
                raise CheckpointError(f"{path}: damaged: its bytes are not those its manifest names")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises many kinds for a file that is not a checkpoint
        raise CheckpointError(f"{path}: cannot be read as a checkpoint: {type(error).__name__}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointError(f"{path}: not a checkpoint of this program")
    if content["format"] != FORMAT:
        age = "an older" if content["format"] < FORMAT else "a newer"
        raise UserError(f"{path}: was written by {age} version of this program (format {content['format']}, this one reads "
                        f"{FORMAT}); give run.name=NAME to train anew, with model.weights={path} to start from its weights, or "
                        "checkpoint.resume=never to start over in this directory")  # fmt: skip
    if wrong := [name for name, kind in CONTENT.items() if not isinstance(content.get(name), kind)]:
        raise CheckpointError(f"{path}: not a checkpoint of this program: it has no {' and no '.join(wrong)}")
    return content


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over. None when there is none at all.

    A kill leaves at most one checkpoint without a manifest, which does not count. Where no checkpoint has one, somebody copied
    the .pt files alone, and they count.

    Raises:
        CheckpointError: there are checkpoints and every one is damaged.
        UserError: it is of another format.
    """
    damaged = []
    paths = sorted(folder.glob("step-*.pt"), reverse=True)
    some = any(path.with_suffix(".json").exists() for path in paths)
    for path in paths:
        if some and not path.with_suffix(".json").exists():
            continue
        try:
            content = load(path)
        except CheckpointError as error:
            if some:
                damaged.append(str(error))
            continue  # without a manifest: a kill came before the first checkpoint was complete
        for line in damaged:
            logger.warning("%s; going on from %s instead", line, path.name)
        if not some:
            logger.warning("%s has no manifest: its bytes cannot be checked", path)
        return path, content
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {damaged[0]}; start afresh with checkpoint.resume=never")
    return None


def compare(stored: dict[str, Any], now: dict[str, Any], path: Path, *, accept_changes: bool = False) -> dict[str, str]:
    """Refuse to resume what would be another training, unless the user accepts the changes.

    Args:
        stored, now: what affects the result, name -> value.
        path: of the checkpoint, for messages.

    Returns:
        The accepted changes: each name with a sentence.

    Raises:
        UserError: names each difference and what to do.
    """
    names = [name for name in {**now, **stored} if stored.get(name) != now.get(name)]
    changes = {name: f"{name} was {was}, is {value}"
               for name in names for was, value in [_short(stored.get(name, UNSET), now.get(name, UNSET))]}  # fmt: skip
    more = len(changes) - MOST_CHANGES
    named = "; ".join(list(changes.values())[:MOST_CHANGES]) + f"; and {more} more" * (more > 0)
    fixed = [name for name in names if name in FIXED]
    ways = ["give run.name=NAME to train in another directory",
            "start over in this one with checkpoint.resume=never (this moves the old run aside)"]  # fmt: skip
    if fixed:
        raise UserError(f"cannot resume {path}: {named}; no run can continue with another {fixed[0]}: "
                        f"{', or '.join(ways)}")  # fmt: skip
    if changes and not accept_changes:
        ways.append("continue from this checkpoint with checkpoint.accept_changes=true")
        raise UserError(f"cannot resume {path}: {named}; that would be another training: {', or '.join(ways)}")
    return changes


def provenance() -> dict[str, str]:
    """Versions and the git commit, for the record."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=here,
                                capture_output=True, text=True, timeout=5, check=True).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {**versions, "git_commit": commit}


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a text file atomically: whoever reads it, also after a power cut, finds the old or the new text."""
    _write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def remove_leftovers(folder: Path, *, keep: Path | None = None) -> None:
    """Clean up after a killed process.

    Args:
        folder: `checkpoints/` of a run.
        keep: a checkpoint that is kept although it has no manifest.
    """
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)
    some = any(path.with_suffix(".json").exists() for path in folder.glob("step-*.pt"))
    for path in folder.glob("step-*.pt") if some else ():
        if not path.with_suffix(".json").exists() and not (keep is not None and path.samefile(keep)):
            logger.info("removing %s: the process was killed before its manifest was written", path)
            _remove(path)
    manifests = map(_read_manifest, sorted(folder.glob("step-*.json"), reverse=True))
    best = next((manifest for manifest in manifests if manifest.get("best")), None)
    if best is not None and best != _read_manifest(folder / "best.json"):
        write_json(folder / "best.json", best)  # damaged, or the kill came between the checkpoint and its pointer


def _write(path: Path, fill: Callable[[Path], Any], announce: Callable[[str], None] = lambda digest: None) -> str:
    """Fill a temporary file, sync it, `announce` its SHA-256, move it over `path`, sync the folder; return the SHA-256."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        fill(temporary)
        digest = _sha256(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
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
    """A manifest or pointer; nothing when it is missing or damaged."""
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _valid_digests(manifest: dict[str, Any]) -> list[str | None]:
    return [manifest.get("sha256"), *manifest.get("replaces", [])]


def _prune(folder: Path, keep: int, needed: set[str]) -> None:
    """Remove all checkpoints but the newest `keep` and those `needed`. One that cannot be removed costs disk, not the run."""
    paths = sorted(path for path in folder.glob("step-*.pt") if path.with_suffix(".json").exists())
    for path in paths[:-keep]:
        if path.name in needed:
            continue
        # The manifest goes first: a file without one does not count, a manifest without a file would.
        for part in (path.with_suffix(".json"), path):
            _remove(part)


def _remove(path: Path) -> None:
    """Remove a file that is not needed. One that stays costs disk, not the run."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed (%s); training continues, and a later start tries again", path,
                       error.strerror or error)  # fmt: skip


def _why_not_written(path: Path, content: dict[str, Any], error: Exception) -> str:
    free = shutil.disk_usage(path.parent).free
    needed = _tensor_bytes(content)
    full = (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or free < needed
    if full:
        sizes = f"{needed / 2**20:.0f} MiB needed, {free / 2**20:.{0 if free >= 2**20 else 1}f} MiB free"
        return f"{path}: the disk is full: {sizes}; make room and give the same command again: whole checkpoints are kept"
    return f"{path}: cannot be written: {error}"


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, dict):
        return sum(_tensor_bytes(v) for v in content.values())
    return sum(_tensor_bytes(v) for v in content) if isinstance(content, (list, tuple)) else 0


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(*values: Any) -> list[str]:
    """Values for a message, cut where that leaves them different."""
    whole = [show(value) for value in values]
    cut = [text if len(text) <= 60 else f"{text[:57]}..." for text in whole]
    return cut if len(set(cut)) == len(set(whole)) else whole
