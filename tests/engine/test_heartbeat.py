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
from tests.processes import wait_until

SECONDS = 0.5  # a datagram every 0.1 s


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which a heartbeat would have ended this process."""
    found = list[int]()
    monkeypatch.setattr(os, "_exit", found.append)
    return found


@pytest.fixture
def two() -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Two ranks. The first one has an address that cannot be reached from elsewhere."""
    first, second = Heartbeat(0, SECONDS), Heartbeat(1, SECONDS)
    name, peer = first.introduction("localhost")
    introductions = [(name, Peer((peer.address[0], 9))), second.introduction("localhost")]
    for each in (first, second):
        each.meet(introductions)
    yield first, second
    for each in (first, second):
        each.set_section(None)


def other(beat: Heartbeat) -> Peer:
    (peer,) = beat.peers.values()
    return peer


def test_each_rank_learns_the_section_of_the_other(two: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = two
    second.set_section("validation")
    wait_until(lambda: other(first).section == "validation" and other(second).section == "start")
    assert other(second).address[1] != 9, "the datagrams of the first one tell where it is"
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
    wait_until(lambda: other(first).heard < 1000)
    second.set_section(None)
    second.name = "another program"  # its datagrams do not count any more
    first.set_section(None)
    heard = other(first).heard
    wait_until(lambda: first._clock > heard + 2 * SECONDS)
    assert not exits
    first.set_section("step 12")
    wait_until(lambda: bool(exits))
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
    wait_until(lambda: second._clock > 0.2)
    other(first).heard = float("inf")
    address = first._socket.getsockname()
    with socket.socket(first._socket.family, socket.SOCK_DGRAM) as stranger:
        for content in (
            *(b"", b"\xff", b"3", b"[]"),
            json.dumps(["wrong", "step 5", 0]).encode(),
            json.dumps([[1], "step 5", 0]).encode(),
        ):
            stranger.sendto(content, address)
    began = first._clock
    wait_until(lambda: first._clock > began + 3 * SECONDS)
    assert other(first).heard == float("inf") and not exits


def test_time_in_which_this_process_did_not_run_does_not_count(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was suspended: no rank could respond."""
    first, _ = two
    before, monotonic = first._clock, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000)
    wait_until(lambda: first._clock > before + 0.2)
    assert first._clock < before + 100


def test_a_signal_is_passed_on_once(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    sent = list[tuple[int | None, int]]()
    monkeypatch.setattr(signal, "pthread_kill", lambda *one: sent.append(one))
    first.wakeup.send(bytes([signal.SIGCHLD, signal.SIGTERM]))
    wait_until(lambda: first._signal == signal.SIGTERM)
    began = second._clock
    wait_until(lambda: second._clock > began + 0.3)
    assert not sent, "before its main thread handles signals"
    second.forwards = True
    wait_until(lambda: bool(sent))
    began = first._clock
    wait_until(lambda: first._clock > began + 0.3)
    assert sent == [(threading.main_thread().ident, signal.SIGTERM)]
