"""Two nodes: network namespaces of this machine with a cable between them, and torchrun on each."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.helpers.processes import Started, processes, run_command, wait_for
from tests.helpers.results import logged_steps, rows
from tests.helpers.small_run import command, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_logging")]
OPTIONS = ["train.epochs=40", "checkpoint.every_steps=10", "loader.workers=0"]
ADDRESSES = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Two namespaces; what to write before a command so that it runs in one of them."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    with ExitStack() as stack:
        words = ["unshare", "--net", "sh", "-c", "echo made; exec sleep 100000"]
        started = (Started(words, stdout=PIPE, stderr=STDOUT) for _ in ADDRESSES)
        holders = [*map(stack.enter_context, started)]
        for holder in holders:
            if (said := holder.stdout.readline()) != "made\n":
                pytest.skip(f"no network namespaces here: {said}")
        pids = [str(holder.pid) for holder in holders]
        prefixes = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in pids]
        cable = ["ip", "link", "add", "wire", "netns", pids[0], "type", "veth", "peer", "name"]
        commands = [[*cable, "wire", "netns", pids[1]]]
        for prefix, address in zip(prefixes, ADDRESSES, strict=True):
            commands += [
                [*prefix, "ip", "link", "set", "lo", "up"],
                [*prefix, "ip", "address", "add", f"{address}/24", "dev", "wire"],
                [*prefix, "ip", "link", "set", "wire", "up"],
            ]
        for words in commands:
            done = run_command(words)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield prefixes


def start(prefix: list[str], arguments: list[str], node: int, log: Path) -> Started:
    """Start one rank on a node. Node 0 is the meeting point."""
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
        *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "test"),
        # Both nodes have the host name of this machine, so torchrun cannot tell which one it is on.
        *("--rdzv-conf", f"last_call_timeout=5,is_host={int(node == 0)}"),
        *("--local-addr", ADDRESSES[node]),
    ]
    command = [*prefix, *launcher, *arguments[1:]]
    with log.open("wb") as file:
        return Started(command, {"GLOO_SOCKET_IFNAME": "wire"}, stdout=file, stderr=STDOUT)


def test_killed_ranks_restart_both_nodes_and_one_continues_without_the_other(
    nodes: list[list[str]], image_root: Path, tmp_path: Path
) -> None:
    """torchrun on the node of a killed rank counts a restart, on the other one perhaps a node."""
    folder, logs = tmp_path / "two", [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = command(image_root, folder, *OPTIONS)
    with ExitStack() as stack:
        started = [stack.enter_context(start(nodes[i], words, i, logs[i])) for i in (0, 1)]
        for node, step in ((1, 25), (0, 60)):
            wait_for(f"step {step}", lambda step=step: logged_steps(folder) >= step, started[0])
            (rank,) = (pid for pid, one in processes().items() if one.parent == started[node].pid)
            os.kill(rank, signal.SIGKILL)
        wait_for("step 100", lambda: logged_steps(folder) >= 100, started[0])
        started[1].kill_all()  # without a goodbye
        assert started[0].wait() == 0, logs[0].read_text()
    console = logs[0].read_text()
    assert "4 on each of 2 ranks" in console
    assert "resumed at step " in console
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 180)
    assert [row["step"] for row in rows(folder, "train")] == [*range(1, 181)]
    run(image_root, tmp_path / "one", *OPTIONS, "train.max_steps=9")
    # Neighbouring steps differ by far more: the first steps saw the same samples.
    two, one = (rows(path, "train")[0]["loss"] for path in (folder, tmp_path / "one"))
    assert two == pytest.approx(one, abs=0.2)
