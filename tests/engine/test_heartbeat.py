"""Two heartbeats exchange datagrams. tests/reliability/test_orphans.py stops a rank."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine import heartbeat
from engine.heartbeat import Heartbeat, Peer
from tests.processes import wait_for

SECONDS = 0.5  # a datagram every 0.1 s


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which a heartbeat would have ended this process."""
    found = list[int]()
    monkeypatch.setattr(os, "_exit", found.append)
    return found


@pytest.fixture
def two(exits: list[int]) -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Two ranks that do not wait for each other yet, or they would end on a busy machine.

    The first one has an address that cannot be reached from elsewhere.
    """
    first, second = Heartbeat(0, SECONDS), Heartbeat(1, SECONDS)
    name, peer = first.introduction("localhost")
    introductions = [(name, Peer((peer.address[0], 9))), second.introduction("localhost")]
    for each in (first, second):
        each.set_section(None)
        each.meet(introductions)
    yield first, second
    for each in (first, second):
        each.set_section(None)


def other(beat: Heartbeat) -> Peer:
    (peer,) = beat.peers.values()
    return peer


def pass_time(beat: Heartbeat, seconds: float = 0.0) -> None:
    """Wait until so much time has passed for a rank, and it has exchanged datagrams."""
    for more in (seconds, 0.0):
        wanted = beat._clock + more
        wait_for("the clock of a rank", lambda wanted=wanted: beat._clock > wanted)


def test_each_rank_learns_the_section_of_the_other(two: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = two
    second.set_section("validation")
    wait_for("the section of the second one", lambda: other(first).section == "validation")
    # Its datagrams tell it.
    wait_for("the address of the first one", lambda: other(second).address[1] != 9)
    assert other(second).section == "start"
    assert list(first.peers) == [f"rank 1 (process {os.getpid()} on {socket.gethostname()})"]


def test_ranks_have_heard_each_other_when_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stopped before its thread runs again would be taken for a lossy network."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 3600)
    first, second = Heartbeat(0, 1e6), Heartbeat(1, 1e6)
    introductions = [each.introduction("localhost") for each in (first, second)]
    second.meet(introductions)
    first.meet(introductions)
    assert first.peers[second.name].heard < 1000


def test_a_rank_that_does_not_respond(
    two: tuple[Heartbeat, Heartbeat], exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends this rank, unless this one waits for no other, as when it only closes files."""
    first, second = two
    wait_for("a datagram", lambda: other(first).heard < 1000)
    second.name = "another program"  # its datagrams do not count any more
    pass_time(first, 3 * SECONDS)
    assert not exits
    first.set_section("step 12")
    wait_for("its end", lambda: exits)
    assert exits[0] == 1
    message = capfd.readouterr().err
    assert f"no response for {SECONDS:g} s from {next(iter(first.peers))}, while " in message
    assert f"{first.name} waits for it in step 12; " in message


def test_nothing_is_concluded_without_datagrams(
    two: tuple[Heartbeat, Heartbeat], exits: list[int]
) -> None:
    """The network may drop them; those of other programs do not count."""
    first, second = two
    second.peers = {}
    pass_time(second)
    pass_time(first)  # none is left to be received
    other(first).heard = float("inf")
    first.set_section("start")
    address = first._socket.getsockname()
    with socket.socket(first._socket.family, socket.SOCK_DGRAM) as stranger:
        for content in (
            *(b"", b"\xff", b"3", b"[]"),
            json.dumps(["wrong", "step 5", 0]).encode(),
            json.dumps([[1], "step 5", 0]).encode(),
        ):
            stranger.sendto(content, address)
    pass_time(first, 3 * SECONDS)
    assert other(first).heard == float("inf") and not exits


def test_time_in_which_this_process_did_not_run_does_not_count(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was suspended: no rank could respond."""
    first, _ = two
    before, monotonic = first._clock, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000)
    pass_time(first, 0.2)
    assert first._clock < before + 100


def test_a_signal_is_passed_on_once(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    sent = list[tuple[int | None, int]]()
    monkeypatch.setattr(signal, "pthread_kill", lambda *one: sent.append(one))
    first.wakeup.send(bytes([signal.SIGCHLD, signal.SIGTERM]))
    wait_for("the signal", lambda: first._signal == signal.SIGTERM)
    pass_time(second, 0.3)
    assert not sent, "before its main thread handles signals"
    second.forwards = True
    wait_for("the signal is passed on", lambda: sent)
    pass_time(first, 0.3)
    assert sent == [(threading.main_thread().ident, signal.SIGTERM)]
