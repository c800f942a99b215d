"""Two nodes: network namespaces on this machine, connected by a cable, with torchrun on each."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.helpers.processes import Started, kill_until_gone, processes, run_command, wait_for
from tests.helpers.results import column, logged_steps, summary_of
from tests.helpers.small_run import command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("restored_logging")]
OPTIONS = ["train.epochs=40", "checkpoint.every_steps=10", "loader.workers=0"]
ADDRESSES = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Create two namespaces; return the prefixes that run a command in each of them."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    with ExitStack() as stack:
        pids = []
        for _ in ADDRESSES:
            words = ["unshare", "--net", "sh", "-c", "echo made; exec sleep 100000"]
            holder = stack.enter_context(Started(words, stdout=PIPE, stderr=STDOUT))
            said = holder.stdout.readline()
            if said != "made\n":
                pytest.skip(f"no network namespaces here: {said}")
            pids.append(str(holder.pid))
        cable = f"ip link add wire netns {pids[0]} type veth peer name wire netns {pids[1]}"
        set_up(cable.split())
        prefixes = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in pids]
        for prefix, address in zip(prefixes, ADDRESSES, strict=True):
            set_up([*prefix, *"ip link set lo up".split()])
            set_up([*prefix, *f"ip address add {address}/24 dev wire".split()])
            set_up([*prefix, *"ip link set wire up".split()])
        yield prefixes


def set_up(command: list[str]) -> None:
    done = run_command(command)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


def start(prefix: list[str], arguments: list[str], node: int, log: Path) -> Started:
    """Start two ranks on a node. Node 0 hosts the rendezvous."""
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "test"),
        # Both nodes have this machine's host name, so torchrun cannot tell which one it is on.
        *("--rdzv-conf", f"last_call_timeout=5,is_host={int(node == 0)}"),
        *("--local-addr", ADDRESSES[node]),
    ]
    command = [*prefix, *launcher, *arguments[1:]]
    variables = {"GLOO_SOCKET_IFNAME": "wire", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as file:
        return Started(command, variables, stdout=file, stderr=STDOUT)


def test_two_nodes_restart_and_one_continues(nodes, image_root, tmp_path):
    """torchrun counts a restart on the killed rank's node; on the other, it may count a node."""
    folder, logs = tmp_path / "two", [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = command(image_root, folder, *OPTIONS)
    with ExitStack() as stack:
        started = [stack.enter_context(start(nodes[i], words, i, logs[i])) for i in (0, 1)]
        for node, step in ((1, 25), (0, 60)):
            wait_for(f"step {step}", lambda step=step: logged_steps(folder) >= step, started[0])
            ranks = [pid for pid, one in processes().items() if one.parent == started[node].pid]
            os.kill(ranks[-1], signal.SIGKILL)
        wait_for("step 100", lambda: logged_steps(folder) >= 100, started[0])
        kill_until_gone(started[1].members)  # without a clean shutdown
        assert started[0].wait() == 0, logs[0].read_text()
    console = logs[0].read_text()
    assert "(ranks: 4, images per rank: 2, micro-batches: 1)" in console
    assert "resumed at step " in console
    summary = summary_of(folder)
    assert (summary["status"], summary["step"]) == ("finished", 180)
    assert column(folder, "train", "step") == [*range(1, 181)]
