"""Checkpoints that survive a kill at any time.

A checkpoint is `step-<8 digits or more>.pt`, a zip file by torch.save whose CRC-32 sums detect
damage. `best.pt` is a hard link to the best checkpoint. engine/files.py writes the files.
"""

import copy
import logging
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import PIL
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conf.errors import RunError, UserError
from engine.files import replacing
from models.weights import read_file

logger = logging.getLogger(__name__)

BEST = "best.pt"
# Incremented if checkpoint contents or the result of the same config change. A run resumes from
# this format only. In format 3, mixup and random operations match the recipes' sources.
FORMAT = 3
READABLE = (2, 3)  # formats whose weights, config and model_input have the same meaning
RESUME_CHOICES = "a run directory, a step-*.pt, never (start over) or auto (the default)"
# Required part of a checkpoint -> its type
PARTS = {"format": int, "step": int, "state": dict}
PARTS |= {"identity": dict, "config": dict, "model_input": dict}


def host_copy(content: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy nested containers, with their tensors on the host. Synchronizes the device.

    Tensors are copied to pinned memory, which torch keeps for later copies. ResNet-50 with SGD
    takes 16 ms on an H200, compared with 182 ms for new memory that is not pinned.
    """
    copies: dict[int, Any] = {}
    for leaf in tree_leaves(content):
        if isinstance(leaf, Tensor):
            copies[id(leaf)] = leaf.detach().to("cpu", copy=True, non_blocking=True)
    torch.get_device_module(device).synchronize()
    return copy.deepcopy(content, copies)  # takes the copies in place of the tensors


def save(folder: Path, content: dict[str, Any], *, keep: int) -> Path:
    """Write a checkpoint, link `best.pt` to the best one so far, and remove older checkpoints.

    Raises RunError if the disk is full or not writable. Earlier checkpoints are then untouched.

    Args:
        folder: `checkpoints/` in a run directory.
        content: PARTS and more, made of plain containers, tensors, numbers and strings.
        keep: number of newest checkpoints to keep, in addition to the best one.
    """
    step = content["step"]
    best_step = content["state"]["best"].get("step")
    path = folder / file_name(step)
    try:
        folder.mkdir(exist_ok=True)  # the user may have removed it
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
        paths = files(folder)
        kept = {path, *paths[-keep:]}
        if best_step is None:
            (folder / BEST).unlink(missing_ok=True)  # no longer comparable
        else:
            kept.add(folder / file_name(best_step))
        if best_step == step:
            link_best(folder, step)
        for old in set(paths) - kept:
            old.unlink()
    except (OSError, RuntimeError) as error:
        reason: BaseException = error
        while reason.__context__ is not None:  # torch.save hides a full disk behind RuntimeError
            reason = reason.__context__
        problem = f"{path}: cannot be written ({reason}); earlier checkpoints are intact"
        fix = "free disk space or check the disk, then run the same command again"
        raise RunError(f"{problem}; {fix}") from error
    return path


def link_best(folder: Path, step: int) -> None:
    """Link `best.pt` to the checkpoint saved at a step, unless that file is gone."""
    source = folder / file_name(step)
    best = folder / BEST
    # Renaming a link to the file that it replaces would do nothing and leave the temporary name.
    if source.exists() and not (best.exists() and best.samefile(source)):
        with replacing(best) as temporary:
            try:
                os.link(source, temporary)
            except OSError:  # the file system has no hard links
                shutil.copyfile(source, temporary)


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def files(folder: Path) -> list[Path]:
    """Return the checkpoints in a directory, sorted by step, which may have 9 digits."""
    paths = {path.stem.removeprefix("step-"): path for path in folder.glob("step-*.pt")}
    steps = sorted(filter(str.isdecimal, paths), key=int)
    return [paths[step] for step in steps]


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint for a path. Raises UserError if a directory contains none.

    A run directory or its `checkpoints/` stands for the best checkpoint, or for the newest one if
    none was validated. A file stands for itself.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    best = filter(Path.exists, [path / BEST, path / "checkpoints" / BEST])
    paths = [*files(path), *files(path / "checkpoints"), *best]
    if not paths:
        raise UserError(str(path), "contains no checkpoints", "pass a run directory that has some")
    return paths[-1]


def load_newest(paths: list[Path]) -> tuple[Path, dict[str, Any]]:
    """Read the first intact file of `paths`, which are sorted from the newest to the oldest.

    Raises RunError if none can be read; UserError if it is from a different program or version.
    """
    for path in paths:
        try:
            content = read_file(path, origin=str(path))
        except UserError as error:
            logger.warning("%s; trying an earlier checkpoint", error)
            continue
        _check_format(path, content)
        return path, content
    fix = "if damaged, set checkpoint.resume=never; on several nodes, run.dir must be shared"
    raise RunError(f"{paths[0]} and older ones cannot be read on {platform.node()}; {fix}")


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises UserError if it is missing, damaged or no checkpoint."""
    origin = f"checkpoint.resume={path}"
    content: dict[str, Any] = read_file(path, origin=origin, expected=RESUME_CHOICES)
    _check_format(path, content)
    return content


def _check_format(path: Path, content: Any) -> None:
    """Raise UserError unless this program can resume from the checkpoint."""
    if not is_ours(content):
        raise UserError(str(path), "not a checkpoint of this program", f"expected {RESUME_CHOICES}")
    if content["format"] != FORMAT:
        problem = "written by a version of this program that trains differently"
        fix = f"set run.name=NAME and model.weights={path} to start a new run from its weights"
        raise UserError(str(path), problem, fix)


def is_ours(content: Any) -> bool:
    """Return whether file contents are a checkpoint that this version can read."""
    with suppress(LookupError, TypeError):  # not a dict, or a part is missing
        types = {name: type(content[name]) for name in PARTS}
        return types == PARTS and content["format"] in READABLE
    return False


def provenance() -> dict[str, str]:
    """Return the versions of software that changes results, and this program's git commit.

    Pillow 12.2 and 13.0 scale images to slightly different pixels (measured).
    """
    folder = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        text = subprocess.check_output(command, cwd=folder, stderr=subprocess.DEVNULL, timeout=5)
        commit = text.decode().strip()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pillow": PIL.__version__,
        "git_commit": commit,
    }
