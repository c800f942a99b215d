"""Files that cannot be read: no kind of them makes the program wait or fill the memory."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.compose import load
from conf.files import LARGEST_TEXT, described, open_regular, read_bytes, read_text
from engine import checkpoint
from engine.log.tracker import Tracker
from pipeline import build, index
from pipeline.containers import csv_rows
from scripts import report
from tests.conf.refused import refusal
from tests.sources import PROGRAM, ROOT, calls

KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file": lambda path: (path.touch(), os.truncate(path, 2**43)),
    "a folder": Path.mkdir,
}
SAYS = {"a sparse file": "has 8,796,093,022,208 bytes", "a folder": "Is a directory"}


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    KINDS[request.param](path := tmp_path / "odd")
    return path


def test_odd_files_are_named(odd: Path, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["odd"]
    for read in (read_bytes, read_text, lambda path: list(csv_rows(path))):
        with pytest.raises(OSError, match=SAYS.get(kind, "is not a regular file")) as error:
            read(odd)
        assert error.value.filename == str(odd)


def test_a_row_of_a_list(odd: Path) -> None:
    (odd.parent / "train.csv").write_text(f"path,label\n{odd},dots\n{odd},stripes\n")
    typed = ["recipe=demo", "data=folder", f"data.root={odd.parent}", "data.val=train.csv"]
    datasets = build.build_datasets(load(typed))
    assert datasets.train.fingerprint()
    with pytest.raises(Exception, match=f"{odd}: ") as error:
        datasets.train.load(0, 0)
    assert type(error.value).__name__ == "BadImageError"


@pytest.mark.parametrize("choice", ["recipe/unused", "model/mine"])
def test_a_file_of_config_dir(odd: Path, choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = odd.parent / "conf"
    (folder / choice).parent.mkdir(parents=True)
    odd.rename(folder / f"{choice}.yaml")
    message = refusal([f"--config-dir={folder}", "recipe=demo"], capsys)
    assert message.startswith(f"{folder}/{choice}.yaml: cannot be read as YAML (")


def test_files_of_a_run_and_caches(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.read_manifest(odd) == {}
    assert index._read_cache(odd) is None
    run = odd.parent / "run"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).symlink_to(odd)
    assert [note for note in report.read_run(run).notes if "cannot be read" in note]
    with Tracker(run, load(["recipe=demo", "log.trackers=[]"]), start_step=0) as tracker:
        tracker.write("kept.txt", "one unusable file ends nothing")
    assert (run / "kept.txt").exists()
    autotune = pytest.importorskip("engine.tune.autotune")
    monkeypatch.setattr(autotune, "_cache_file", lambda question: odd)
    assert autotune.load_result({}) is None


def test_a_row_of_each_step_of_ninety_epochs(tmp_path: Path) -> None:
    """log.every_steps=1 with 450,378 steps: the run still resumes with all rows."""
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", 450_378 * 1_000)
    open_regular(tmp_path / "metrics.jsonl", LARGEST_TEXT).close()


def test_the_place_of_an_error_is_not_in_a_library() -> None:
    """`make env` installs the libraries below the program's folder."""
    library = compile("open('nowhere')", str(ROOT / ".venv/lib/site-packages/library.py"), "exec")
    with pytest.raises(OSError) as caught:
        exec(library)
    assert "(tests/conf/test_files.py:" in described(caught.value)


# Files of the program itself, and of /proc and /sys.
OWN = ("conf.files", "conf.schema", "pipeline.class_names", "pipeline.region", "engine.distributed")
SYSTEM = ("pipeline.machine", "pipeline.clock", "engine.log.telemetry")


def test_files_are_opened_in_one_place() -> None:
    for name, path in PROGRAM.items():
        for call in calls(path) if name not in (*OWN, *SYSTEM) else ():
            called = ast.unparse(call.func)
            mode = ast.unparse(call.args[1]) if len(call.args) > 1 else "r"
            reads = called in ("open", "FileIO") and not set(mode) & set("wax")
            reads |= called.endswith((".read_text", ".read_bytes")) and called != "files.read_text"
            assert not reads, f"{name}, line {call.lineno}: use conf/files.py"
