"""Standard streams that are closed or break: no traceback, and the program continues."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import needs_linux

ROOT = Path(__file__).parents[2]
# Writes more than a pipe holds, and the path of a file that it opens.
PROGRAM = """
import conf, os, sys
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    for number in range(10_000):
        print("line", number)
        print("error", number, file=sys.stderr)
    assert sys.stdin.read() == ""
    file.write("finished")
"""
CLOSED = [
    " ".join(chosen)
    for count in (1, 2, 3)
    for chosen in itertools.combinations(("<&-", ">&-", "2>&-"), count)
]


def shell(tail: str, done: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run PROGRAM with a tail for the shell; its exit status is that of the program."""
    words = [sys.executable, *options, "-c", PROGRAM, str(done)]
    script = f'set -o pipefail; "$@" {tail}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("closed", CLOSED)
def test_closed(closed: str, tmp_path: Path) -> None:
    result = shell(closed, tmp_path / "done")
    assert result.returncode == 0 and (tmp_path / "done").read_text() == "finished"
    assert result.stdout.count("\n") == (0 if " >&-" in f" {closed}" else 10_000)
    assert result.stderr.count("\n") == (0 if "2>&-" in closed else 10_000)


def test_a_subprocess_may_write_to_a_closed_stream() -> None:
    program = "import conf, subprocess; subprocess.run(['bash', '-c', 'echo line'], check=True)"
    script = f'"{sys.executable}" -c "{program}" >&-'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [[], ["-u"]])
@pytest.mark.parametrize("broken", ["", "2>&1", "2>&1 >/dev/null"])
def test_broken_pipe(broken: str, options: list[str], tmp_path: Path) -> None:
    result = shell(f"{broken} | head -n 1", tmp_path / "done", *options)
    assert result.returncode == 0 and (tmp_path / "done").read_text() == "finished"
    assert result.stdout.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_full_disk_is_named_once(tmp_path: Path) -> None:
    needs_linux()
    result = shell(">/dev/full", tmp_path / "done")
    assert result.returncode == 0 and (tmp_path / "done").read_text() == "finished"
    lines = [line for line in result.stderr.splitlines() if not line.startswith("error")]
    assert lines == [
        "standard output cannot be written (No space left on device); its lines are lost"
    ]


def test_a_full_disk_is_tried_again() -> None:
    """There may be space later: the stream is not /dev/null from the first error on."""
    needs_linux()
    program = """if True:
        import conf, os
        print("lost", flush=True)
        assert os.fstat(1).st_rdev == os.stat("/dev/full").st_rdev
    """
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, check=True)


@pytest.mark.parametrize("option", ["--help", "--cfg=job"])
def test_a_result_that_is_lost_is_a_failure(option: str) -> None:
    needs_linux()
    words = [sys.executable, "train.py", option]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("standard output cannot be written (No space left on device)")
