"""The run directory: one process at a time; foreign files and rejected runs stay unchanged."""

import json
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from conf.errors import RunError, UserError
from engine import checkpoint
from engine.run import FIXED, changed_keys, check_changes
from tests.engine.run_dirs import (
    CONFIG,
    IDENTITY,
    add_checkpoint,
    content_of,
    directory,
    open_run,
    resume_with,
    state_of,
)
from tests.helpers.processes import HANG_SECONDS
from tests.helpers.results import tree

CREATED = {".lock", "checkpoints", "config.yaml", "overrides.yaml"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run directory with checkpoints of steps 10 and 20."""
    path = tmp_path / "run"
    assert open_run(path) is None
    for step in (10, 20):
        add_checkpoint(path, step)
    return path


def test_run_auto_resumes_newest_intact_checkpoint(run):
    ten, twenty = checkpoint.files(run / "checkpoints")
    before = tree(run)
    assert directory(run).read_checkpoint()["identity"] == IDENTITY
    (run / "checkpoints" / "step-00000040.pt.tmp").write_bytes(b"partial")
    assert (open_run(run), tree(run)) == (twenty, before)
    twenty.write_bytes(b"partial")
    assert open_run(run) == ten
    ten.write_bytes(b"partial")
    with pytest.raises(RunError, match=r"older ones cannot be read on .* damaged, set "):
        open_run(run)


def test_run_links_best_after_kill(run):
    """The checkpoint is marked as the best, but a kill prevented best.pt."""
    best = add_checkpoint(run, 30, best={"step": 30, "top1": 50.0})
    assert open_run(run) == best
    assert (run / "checkpoints" / "best.pt").samefile(best)
    assert open_run(run) == best


def test_run_forgets_best_if_best_by_changes(run):
    add_checkpoint(run, 30, best={"step": 30}, last={"step": 30})
    state = state_of()
    opened = directory(run)
    opened.config.train.best_by = "-loss"
    with pytest.raises(UserError, match=r"\(1\): train\.best_by=top1 \(now -loss\); set "):
        resume_with(opened, state)
    opened.config.checkpoint.accept_changes = True
    resume_with(opened, state)  # a finished run validates again
    assert (state.best_validation, state.last_validation) == ({}, {})


def test_run_resume_from_path(run, tmp_path):
    ten, twenty = checkpoint.files(run / "checkpoints")
    branch = tmp_path / "branch"
    for folder in (run, run / "checkpoints"):
        assert open_run(branch, str(folder)) == twenty
    assert open_run(branch, str(ten)) == ten  # a kill before its first checkpoint
    resumed_config = {**CONFIG, "checkpoint.resume": str(ten)}
    content = {**content_of(15, state_of(15).state_dict()), "config": resumed_config}
    own = checkpoint.save(branch / "checkpoints", content, keep=9)
    ten.rename(tmp_path / "elsewhere.pt")  # its run removed it
    assert open_run(branch, str(ten)) == own  # the same command resumes
    check_rejected(r"checkpoint\.resume=.*: the run in .*/branch was", branch, branch, str(twenty))
    check_rejected("omit the key to resume it, ", run, run, str(twenty))


def test_run_never_moves_old_run_aside(run, tmp_path):
    for path in checkpoint.files(run / "checkpoints"):
        path.write_bytes(b"partial")  # the checkpoints are not read
    before = tree(run)
    for number in (1, 2):
        assert open_run(run, "never", {"dataset": "other"}) is None
        assert set(tree(run)) == CREATED
        (run / "mine").write_text(str(number))
    first, second = sorted(tmp_path.glob("run.old-*"))
    assert tree(first) == before and (second / "mine").read_text() == "1"
    assert open_run(tmp_path / "new", "never") is None
    # run.dir may be a link to a large disk, which the next run needs as well.
    (tmp_path / "link").symlink_to(run)
    assert open_run(tmp_path / "link", "never") is None
    assert ((tmp_path / "link").readlink(), set(tree(run))) == (run, CREATED)
    assert len(list(tmp_path.glob("run.old-*"))) == 3


def check_rejected(message: str, unchanged: Path, *arguments: Any) -> None:
    before = tree(unchanged)
    with pytest.raises(UserError, match=message) as error:
        open_run(*arguments)
    assert "\n" not in str(error.value)
    assert tree(unchanged) == before


def test_check_changes_lists_and_accepts():
    """At most six are listed, starting with those that cannot change within a run."""
    now = {"data.val": "b", "optim.lr": 0.4, "train.seed": 0, "optim.momentum": 0.9}
    stored = {"data.val": "c", "optim.lr": 0.2, "train.seed": 0, "optim.betas": [0.9]}
    changes = changed_keys(stored, now)
    assert list(changes) == ["data.val", "optim.lr", "optim.momentum"]
    path = Path("step-7.pt")
    found = r"data\.val=c \(now b\), optim\.lr=0\.2 \(now 0\.4\), optim\.momentum=null \(now 0\.9\)"
    with pytest.raises(UserError, match=rf"{found}.*run\.name=NAME.*accept_changes=true"):
        check_changes(path, changes, accept=False)
    check_changes(path, changes, accept=True)
    check_changes(path, changed_keys(now, now), accept=False)
    many = dict.fromkeys(["a", "b", "c", "d", "e", "classes", "f"], 8)
    with pytest.raises(UserError, match=r"\(7\): classes=8 \(now 9\), a=.*, e=.*9\); s"):
        check_changes(path, changed_keys(many, dict.fromkeys(many, 9)), accept=False)


@pytest.mark.parametrize("name", FIXED)
def test_check_changes_rejects_fixed_keys(name):
    changes = changed_keys({"a": 1, name: 1}, {"a": 2, name: 2})
    message = rf"changed \(1\): {name}=1 \(now 2\); set run\.name=NAME to .*, unless one of these"
    with pytest.raises(UserError, match=message):
        check_changes(Path("step-7.pt"), changes, accept=True)


def test_run_resume_detects_progress_of_other_process(tmp_path):
    """A process trained between both steps of this startup; resuming would lose its steps."""
    with directory(tmp_path) as run:
        run.read_checkpoint()
        add_checkpoint(tmp_path, 7)
        with pytest.raises(UserError, match="a different process trained in it during this start"):
            run.resume(state_of(), {"identity": {}}, 100)


def hold_run(path: Path, connection: Connection) -> None:
    """Open a run directory in a child process until it is killed."""
    signal.alarm(HANG_SECONDS)
    resume_with(directory(path), state_of(), {})
    connection.send("open")
    connection.recv()


def test_run_lock_excludes_second_process(tmp_path):
    here, there = multiprocessing.Pipe()
    arguments = (tmp_path / "run", there)
    holder = multiprocessing.get_context("fork").Process(target=hold_run, args=arguments)
    holder.start()
    try:
        assert here.poll(HANG_SECONDS)
        assert here.recv() == "open"
        for resume in ("auto", "never"):
            message = r"run\.dir=.*: in use by a process; set "
            check_rejected(message, tmp_path, tmp_path / "run", resume, {})
    finally:
        holder.kill()
        holder.join()
    assert open_run(tmp_path / "run", identity={}) is None


COMPLETE = {"status": "finished", "step": 20}


@pytest.mark.parametrize(
    ("text", "stop_step", "validated", "finished"),
    [
        (json.dumps(COMPLETE), 10, {"step": 20}, COMPLETE),  # train.max_steps is lower now
        (json.dumps(COMPLETE), 10, {}, None),  # other images
        (json.dumps(COMPLETE), 30, {"step": 20}, None),
        (json.dumps({**COMPLETE, "status": "interrupted"}), 20, {"step": 20}, None),
        ('{"status": "fin', 20, {"step": 20}, None),
    ],
)
def test_run_finished_summary(run, text, stop_step, validated, finished):
    """A finished run's directory is unchanged; otherwise, an earlier summary is removed."""
    add_checkpoint(run, 20, last=validated)
    (run / "config.yaml").write_text("mine")
    (run / "summary.json").write_text(text)
    with directory(run) as opened:
        resume_with(opened, state_of(), stop_step=stop_step)
    assert opened.finished_summary == finished
    assert ((run / "config.yaml").read_text() == "mine") == (finished is not None)
    assert (run / "summary.json").exists() == (finished is not None)
