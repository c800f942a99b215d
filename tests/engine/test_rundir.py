"""The run directory: one process at a time; foreign files and refused runs stay unchanged."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import Checkpoint, Config, Data, Run, UserError
from engine import checkpoint
from engine.checkpoint import CheckpointError
from engine.distributed import World
from engine.rundir import SUMMARY, VALIDATION, RunDirectory

ROOT = Path(__file__).parents[2]
IDENTITY = {"dataset": "abc", "model.name": "resnet_tiny"}


ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))


def directory(path: Path, resume: str = "auto", accept_changes: bool = False) -> RunDirectory:
    checkpoints = Checkpoint(resume=resume, accept_changes=accept_changes)
    return RunDirectory(Config(run=Run(dir=str(path)), checkpoint=checkpoints), ALONE)


def open_run(path: Path, resume: str = "auto", identity: dict[str, Any] = IDENTITY) -> Path | None:
    """Open and close a run directory; return the checkpoint to resume."""
    with directory(path, resume) as run:
        run.open(identity)
    assert run.accepted == {}
    return run.resumed


def add_checkpoint(
    path: Path, step: int, identity: dict[str, Any] = IDENTITY, origin: str | None = None
) -> Path:
    content = {
        "step": step,
        "identity": identity,
        "config": {},
        "state": {"weights": torch.ones(10), "origin": origin},
    }
    return checkpoint.save(path / "checkpoints", content, keep=9)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 and 20."""
    path = tmp_path / "run"
    assert open_run(path) is None
    for step in (10, 20):
        add_checkpoint(path, step)
    (path / "config.yaml").write_text("a: 1\n")
    return path


def test_new_folder_with_its_parents(tmp_path: Path) -> None:
    assert open_run(tmp_path / "a" / "b" / "run name") is None
    assert set(tree(tmp_path / "a" / "b" / "run name")) == {".lock", "checkpoints"}


def test_nothing_is_created_before_open(tmp_path: Path) -> None:
    with directory(tmp_path / "run"):
        assert tree(tmp_path) == {}


def test_empty_folder_is_used(tmp_path: Path) -> None:
    assert open_run(tmp_path) is None


def test_auto_resumes_the_newest_checkpoint(run: Path) -> None:
    assert open_run(run) == run / "checkpoints" / "step-00000020.pt"


def test_auto_skips_damaged_checkpoints(run: Path) -> None:
    (run / "checkpoints" / "step-00000020.pt").write_bytes(b"partial")
    assert open_run(run) == run / "checkpoints" / "step-00000010.pt"
    (run / "checkpoints" / "step-00000010.pt").write_bytes(b"partial")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        open_run(run)


def test_leftovers_of_a_killed_process_are_removed(run: Path) -> None:
    before = tree(run)
    (run / "checkpoints" / "step-00000030.pt").write_bytes(b"no manifest yet")
    (run / "checkpoints" / "step-00000040.pt.tmp").write_bytes(b"partial")
    assert open_run(run) == run / "checkpoints" / "step-00000020.pt"
    assert tree(run) == before


def test_new_run_starts_from_a_path(run: Path, tmp_path: Path) -> None:
    ten = run / "checkpoints" / "step-00000010.pt"
    branch = tmp_path / "branch"
    assert open_run(branch, str(ten)) == ten
    assert open_run(branch, str(ten)) == ten  # killed before its first checkpoint
    own = add_checkpoint(branch, 15, origin=str(ten))
    ten.rename(tmp_path / "elsewhere.pt")  # as if its run had removed it
    assert open_run(branch, str(ten)) == own  # the same command resumes
    (tmp_path / "elsewhere.pt").rename(ten)
    twenty = ten.with_name("step-00000020.pt")
    with pytest.raises(
        UserError,
        match=r"checkpoint\.resume=.*: .*/branch holds a run that did not start from this "
        r"checkpoint; leave",
    ):
        open_run(branch, str(twenty))


def test_path_in_the_same_run(run: Path) -> None:
    """An earlier checkpoint is refused: one folder would hold two trainings."""
    ten, twenty = (run / "checkpoints" / f"step-000000{step}.pt" for step in (10, 20))
    assert open_run(run, str(twenty)) == twenty
    before = tree(run)
    with pytest.raises(
        UserError, match=r"checkpoint\.resume=.*: .* holds a later one, step-00000020\.pt; "
    ):
        open_run(run, str(ten))
    assert tree(run) == before
    twenty.write_bytes(b"partial")
    assert open_run(run, str(ten)) == ten


def test_path_without_manifest_is_kept(run: Path, tmp_path: Path) -> None:
    """A user may copy one file from another machine."""
    copied = run / "checkpoints" / "step-00000030.pt"
    add_checkpoint(tmp_path / "elsewhere", 30).rename(copied)
    before = copied.read_bytes()
    assert open_run(run, str(copied)) == copied
    assert copied.read_bytes() == before


def test_never_moves_the_old_run_aside(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    for number in (1, 2):
        assert open_run(run, "never") is None
        assert set(tree(run)) == {".lock", "checkpoints"}
        (run / "mine").write_text(str(number))
    assert tree(tmp_path / "run.old-1") == before
    assert (tmp_path / "run.old-2" / "mine").read_text() == "1"
    assert open_run(tmp_path / "new", "never") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "run", "run.old-1", "run.old-2"]


def test_never_keeps_a_symbolic_link(run: Path, tmp_path: Path) -> None:
    """run.dir may be a link to a large disk, which the next run needs as well."""
    (tmp_path / "link").symlink_to(run)
    before = tree(run)
    assert open_run(tmp_path / "link", "never") is None
    assert (tmp_path / "link").readlink() == run
    assert tree(tmp_path / "run.old-1") == before and set(tree(run)) == {".lock", "checkpoints"}


def test_never_does_not_read_the_checkpoints(run: Path) -> None:
    for path in (run / "checkpoints").glob("*.pt"):
        path.write_bytes(b"partial")
    assert open_run(run, "never", {"dataset": "other"}) is None


REFUSALS = {
    "foreign folder": (r"run\.dir=.*/run: holds files that are not of a run", "auto"),
    "file": (r"run\.dir=.*/run: is a file", "auto"),
    "below a file": (r"run\.dir=.*/run/below: cannot be used", "auto"),
    "path that is not there": (r"checkpoint\.resume=gone\.pt: no such file", "gone.pt"),
    "path that is a folder": (
        r"checkpoint\.resume=\.: is a folder; give the path of a checkpoint \(step-\*\.pt\)",
        ".",
    ),
    "too long": (r"run\.dir=.*: cannot be used: File name too long", "auto"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_change_nothing(case: str, tmp_path: Path) -> None:
    message, given = REFUSALS[case]
    path = tmp_path / "run"
    if case == "foreign folder":
        (path / "photos").mkdir(parents=True)
        (path / "photos" / "cat.jpg").write_bytes(b"mine")
    elif "file" in case:
        path.write_text("mine")
    elif case.startswith("path"):
        path.mkdir()
    if case == "below a file":
        path = path / "below"
    elif case == "too long":
        path = tmp_path / ("x" * 300)
    before = tree(tmp_path)
    for resume in ("auto", "never") if given == "auto" else (given,):
        with pytest.raises(UserError, match=message) as error:
            open_run(path, resume)
        assert "\n" not in str(error.value)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step-00000020.pt"])
def test_changed_identity_is_refused_and_nothing_changes(run: Path, resume: str) -> None:
    before = tree(run)
    path = resume if resume == "auto" else str(run / resume)
    with pytest.raises(
        UserError,
        match=r"cannot resume .*: model\.name was resnet_tiny, is resnet50; "
        r"model\.name cannot change",
    ):
        open_run(run, path, {**IDENTITY, "model.name": "resnet50"})
    with pytest.raises(
        UserError,
        match=r"cannot resume .*: dataset was abc, is def; these changes affect the result",
    ):
        open_run(run, path, {**IDENTITY, "dataset": "def"})
    assert tree(run) == before


def test_accepted_changes_are_returned(run: Path) -> None:
    with directory(run, accept_changes=True) as opened:
        opened.open({**IDENTITY, "dataset": "def"})
    assert opened.resumed == run / "checkpoints" / "step-00000020.pt"
    assert opened.accepted == {"dataset": "dataset was abc, is def"}


def test_stored_step_and_identity(run: Path, tmp_path: Path) -> None:
    other = add_checkpoint(tmp_path / "elsewhere", 5, {"pixels": "gpu"})
    before = tree(tmp_path)
    for path, resume, stored in (
        (run, "auto", (20, IDENTITY)),
        (run, "never", (0, {})),
        (tmp_path / "new", "auto", (0, {})),
        (tmp_path / "new", str(other), (5, {"pixels": "gpu"})),
    ):
        assert directory(path, resume).stored() == stored
    assert tree(tmp_path) == before


def test_checkpoint_added_before_open(run: Path) -> None:
    """Another process may train and end between the first read and the lock."""
    with directory(run) as opened:
        assert opened.stored() == (20, IDENTITY)
        thirty = add_checkpoint(run, 30)
        opened.open(IDENTITY)
        assert opened.resumed == thirty


def test_refused_path_leaves_an_empty_folder_empty(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot resume"):
        open_run(
            tmp_path / "empty", str(run / "checkpoints" / "step-00000010.pt"), {"dataset": "other"}
        )
    assert tree(tmp_path / "empty") == {}


def test_lock_that_cannot_be_opened(run: Path) -> None:
    (run / ".lock").unlink()
    (run / ".lock").mkdir()
    with pytest.raises(UserError, match=r"run\.dir=.*: cannot be used: Is a directory"):
        open_run(run)


def test_second_open_in_the_same_process_is_refused(run: Path) -> None:
    before = tree(run)
    with directory(run) as first:
        first.open(IDENTITY)
        for resume in ("auto", "never"):
            with pytest.raises(UserError, match=r"run\.dir=.*: another process is training in it"):
                open_run(run, resume)
        assert tree(run) == before
    assert open_run(run) is not None


HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.engine.test_rundir import directory
run = directory(Path(sys.argv[1]))
run.open({})
print("open", flush=True)
sys.stdin.read()
"""


def start(code: str, *arguments: object, close_fds: bool = True) -> subprocess.Popen[str]:
    """Start a Python process that ends when its standard input is closed, or before."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        close_fds=close_fds,
    )


def test_second_process_is_refused_until_the_first_one_is_killed(tmp_path: Path) -> None:
    with start(HOLDER, tmp_path / "run") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="another process is training in it"):
            open_run(tmp_path / "run", identity={})
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert open_run(tmp_path / "run", identity={}) is None


def test_lock_is_not_inherited(run: Path) -> None:
    """A child process that outlives the trainer must not keep the lock."""
    with directory(run) as first:
        first.open(IDENTITY)
        with start(
            "import sys; print('ready', flush=True); sys.stdin.read()", close_fds=False
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            first.close()
            assert open_run(run) is not None


def test_write(run: Path) -> None:
    directory(run).write("config.yaml", "b: 2\n")
    assert (run / "config.yaml").read_text() == "b: 2\n"
    assert not list(run.glob("*.tmp"))


COMPLETE = dict.fromkeys(SUMMARY, 5) | {"status": "finished", "step": 20}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (json.dumps(COMPLETE), COMPLETE),
        (json.dumps({**COMPLETE, "step": 10}), None),
        (json.dumps({**COMPLETE, "status": "interrupted"}), None),
        ('{"status": "finished", "step": 20}', None),
        ("[]", None),
        ("3", None),
        ("null", None),
        ("", None),
        ('{"status": "fin', None),
        ("[" * 100_000, None),
        (json.dumps({**COMPLETE, "top1": "5"}), None),
        (json.dumps({**COMPLETE, "best_top1": None}), None),
        (json.dumps({**COMPLETE, "seconds": float("inf")}), None),
        (json.dumps({**COMPLETE, "epoch": True}), None),
        (
            json.dumps({**COMPLETE, **dict.fromkeys(VALIDATION)}),
            COMPLETE | dict.fromkeys(VALIDATION),
        ),
        (None, None),
    ],
)
def test_finished_summary(run: Path, text: str | None, found: dict[str, Any] | None) -> None:
    if text is not None:
        (run / "summary.json").write_text(text)
    assert directory(run).finished_summary(20) == found


def test_path_of_a_file_that_is_not_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """Also the path of a pointer or manifest."""
    for name in ("last.json", "step-00000010.json"):
        with pytest.raises(
            UserError, match=r"checkpoint\.resume: .*; give the path of a step-\*\.pt"
        ):
            open_run(tmp_path / "other", str(run / "checkpoints" / name))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "given", ["train/run", "train", "val/a/../run", "link/run", "train/dots/x"]
)
def test_folder_inside_a_split_is_refused(tmp_path: Path, given: str) -> None:
    """The next scan would take it for a class."""
    for split in ("train", "val"):
        (tmp_path / split / "dots").mkdir(parents=True)
    (tmp_path / "link").symlink_to("val")
    before = tree(tmp_path)
    for root in (str(tmp_path), ["/elsewhere", str(tmp_path)]):
        config = Config(data=Data(root=root), run=Run(dir=str(tmp_path / given)))
        with (
            RunDirectory(config, ALONE) as run,
            pytest.raises(UserError, match=r"^run\.dir=.*: is inside /.*; give a folder outside"),
        ):
            run.open(IDENTITY)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("data", "given", "refused"),
    [
        (Data(), "runs/a", False),
        (Data(), "training/a", False),
        (Data(train="/images"), "/images/a", True),
        (Data(val_fraction=0.1), "runs/a", True),  # the root holds the classes
        (Data(val_fraction=0.1), "../runs/a", False),
        (Data(source="fake"), "train/a", False),
    ],
)
def test_folder_beside_the_splits(tmp_path: Path, data: Data, given: str, refused: bool) -> None:
    data = replace(data, root=str(tmp_path))
    run = RunDirectory(Config(data=data, run=Run(dir=str(tmp_path / given))), ALONE)
    if refused:
        with pytest.raises(UserError, match="where every folder is a class"):
            run.check()
    else:
        run.check()


def test_data_with_a_training_split_and_a_run_beside_it(tmp_path: Path) -> None:
    """With data.val_fraction, data.root holds the classes only if there is no training split."""
    (tmp_path / "train" / "dots").mkdir(parents=True)
    data = Data(root=str(tmp_path), val_fraction=0.1)
    RunDirectory(Config(data=data, run=Run(dir=str(tmp_path / "runs"))), ALONE).check()
