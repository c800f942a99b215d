"""Checkpoints that survive a kill at any instant.

A checkpoint is `step-<8 digits or more>.pt`, a zip file of torch.save, whose CRC-32 sums detect
damage. `best.pt` is a hard link to the best one. engine/files.py writes them.
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
# Increased whenever the content of a checkpoint or the result of the same config changes: a run
# resumes from this format only. 3: mixup and random operations are as in the recipes' sources.
FORMAT = 3
RESUME_CHOICES = "the folder of a run, a step-*.pt, never (start over) or auto (the default)"
# Parts of every checkpoint -> type.
PARTS = {"format": int, "step": int, "state": dict, "identity": dict, "config": dict}
PARTS |= {"model_input": dict}


def host_copy(content: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy nested containers, and their tensors to the host. Waits for the device.

    The copies are in page-locked memory, which torch keeps for the next ones: for ResNet-50 with
    SGD, this takes 16 ms on an H200, and 182 ms into new memory that is not page-locked.
    """
    copies: dict[int, Any] = {}
    for leaf in tree_leaves(content):
        if isinstance(leaf, Tensor):
            copies[id(leaf)] = leaf.detach().to("cpu", copy=True, non_blocking=True)
    torch.get_device_module(device).synchronize()
    return copy.deepcopy(content, copies)  # it takes the copies instead of the tensors


def save(folder: Path, content: dict[str, Any], *, keep: int) -> Path:
    """Write a checkpoint, let `best.pt` be the best one so far, and remove older checkpoints.

    Raises RunError if the disk is full or cannot be written; earlier ones are untouched.

    Args:
        folder: `checkpoints/` of a run.
        content: PARTS and more: plain containers, tensors, numbers and strings.
        keep: number of newest checkpoints to keep, in addition to the best one.
    """
    step = content["step"]
    best_step = content["state"]["best"].get("step")
    path = folder / file_name(step)
    try:
        folder.mkdir(exist_ok=True)  # a user may have removed it
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
        paths = files(folder)
        kept = {path, *paths[-keep:]}
        if best_step is None:
            (folder / BEST).unlink(missing_ok=True)  # it is no longer comparable
        else:
            kept.add(folder / file_name(best_step))
        if best_step == step:
            link_best(folder, step)
        for old in set(paths) - kept:
            old.unlink()
    except (OSError, RuntimeError) as error:
        reason = error.__context__ or error  # torch.save reports a full disk as RuntimeError
        cure = "free some space or check the disk, and run the same command again"
        wrong = f"{path}: cannot be written: {reason}"
        raise RunError(f"{wrong}; {cure}: earlier checkpoints are intact") from error
    return path


def link_best(folder: Path, step: int) -> None:
    """Let `best.pt` be the checkpoint of a step, unless that one is gone."""
    source = folder / file_name(step)
    if source.exists():
        with replacing(folder / BEST) as temporary:
            try:
                os.link(source, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, temporary)


def file_name(step: int) -> str:
    return f"step-{step:08d}.pt"


def files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder in the order of their steps, which may have 9 digits."""
    paths = {path.stem.removeprefix("step-"): path for path in folder.glob("step-*.pt")}
    steps = sorted(filter(str.isdecimal, paths), key=int)
    return [paths[step] for step in steps]


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that a path stands for. Raises UserError if a folder has none.

    The folder of a run and its `checkpoints/` stand for the best checkpoint, or the newest one if
    none was validated; a file for itself.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    best = filter(Path.exists, [path / BEST, path / "checkpoints" / BEST])
    paths = [*files(path), *files(path / "checkpoints"), *best]
    if not paths:
        raise UserError(str(path), "holds no checkpoints", "give the folder of a run with some")
    return paths[-1]


def load_newest(paths: list[Path]) -> tuple[Path, dict[str, Any]]:
    """Read the first intact file of `paths`, which begin with the newest checkpoint.

    Raises RunError if none can be read; UserError for one of another program or version.
    """
    for path in paths:
        try:
            content = read_file(path, origin=str(path))
        except UserError as error:
            logger.warning("%s: an earlier one is tried", error)
            continue
        _check_format(path, content)
        return path, content
    cure = "if damaged, give checkpoint.resume=never; if there are several nodes, share run.dir"
    raise RunError(f"{paths[0]} and older ones cannot be read on {platform.node()}; {cure}")


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises UserError if it is absent, damaged or something else."""
    content: dict[str, Any] = read_file(path, origin=str(path), expected=RESUME_CHOICES)
    _check_format(path, content)
    return content


def _check_format(path: Path, content: Any) -> None:
    """Raise UserError unless this is a checkpoint of this program that can resume."""
    if not is_ours(content):
        raise UserError(str(path), "not a checkpoint of this program", f"give {RESUME_CHOICES}")
    if content["format"] != FORMAT:
        wrong = "is of a version of this program that trains differently"
        cure = f"give run.name=NAME model.weights={path} to start a new run from its weights"
        raise UserError(str(path), wrong, cure)


def is_ours(content: Any) -> bool:
    """Return whether the content of a file is a checkpoint that this version can read."""
    if not isinstance(content, dict):
        return False
    return {name: type(content.get(name)) for name in PARTS} == PARTS


def provenance() -> dict[str, str]:
    """Return the versions of what changes results, and the git commit of this program.

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
