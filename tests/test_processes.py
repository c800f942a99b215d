"""Nothing is left of what tests start, and a wait that fails says what it has waited for."""

import sys
from subprocess import PIPE

import pytest

from tests.processes import Started, is_running, needs_linux, wait_for

# The child has a session of its own, and its parent ends.
CHILD = """
import subprocess as s
print(s.Popen(["sleep", "99"], start_new_session=True).pid, flush=True)
"""


def test_an_orphan_is_killed_at_the_end_of_the_block() -> None:
    needs_linux()
    with Started([sys.executable, "-c", CHILD], stdout=PIPE) as process:
        child = int(process.stdout.readline())
        process.wait()
        assert process.members() == {child}
    assert not is_running(child)


def test_what_killed_tests_have_started_is_killed() -> None:
    needs_linux()
    begin, end = "from tests.processes import leave_nothing as l; l()", "import os; os.abort()"
    with Started([sys.executable, "-c", f"{begin}{CHILD}{end}"], stdout=PIPE) as process:
        child = int(process.stdout.readline())
        wait_for("the end of the child", lambda: not is_running(child))


def test_a_wait_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0 s: rain"):
        wait_for("rain", lambda: False, seconds=0)
    with Started(["true"]) as process:
        with pytest.raises(AssertionError, match=r"^ended with status 0 before: rain"):
            wait_for("rain", lambda: False, process)
