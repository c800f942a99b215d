"""Two heartbeats exchange datagrams. tests/reliability/test_orphans.py stops a rank."""

import json
import os
import socket
import time

import pytest

from engine.heartbeat import Heartbeat, Peer
from tests.processes import wait_until


@pytest.fixture
def two() -> tuple[Heartbeat, Heartbeat]:
    beats = (Heartbeat(0, 0.5), Heartbeat(1, 0.5))  # a datagram every 0.1 s
    introductions = [beat.introduction("localhost") for beat in beats]
    for beat in beats:
        beat.meet(introductions)
    return beats


def other(beat: Heartbeat) -> Peer:
    (peer,) = beat._peers.values()
    return peer


def test_each_rank_learns_the_section_of_the_other(two: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = two
    with first:
        with second:
            second.set_section("validation")
            wait_until(lambda: other(first).section == "validation")
            wait_until(lambda: other(second).section == "start")
            assert other(first).process == f"process {os.getpid()} on {socket.gethostname()}"
        # A rank that has left is not missed: this process goes on.
        wait_until(lambda: other(first).left)
        heard = other(first).heard
        assert heard is not None
        wait_until(lambda: first._clock > heard + 3 * first.timeout_seconds)


def test_a_rank_that_only_closes_waits_for_no_other(two: tuple[Heartbeat, Heartbeat]) -> None:
    """Rank 0 still writes its last checkpoint; rank 1, with the same error, has ended."""
    first, second = two
    with first:
        second.__enter__()
        wait_until(lambda: other(first).heard is not None)
        first.set_section(None)
        second.__exit__(KeyError)
        heard = other(first).heard
        assert heard is not None and not other(first).left
        wait_until(lambda: first._clock > heard + 3 * first.timeout_seconds)


def test_a_host_whose_own_name_is_a_loopback_address() -> None:
    """Its introduction cannot be reached from elsewhere: its datagrams tell where it is."""
    first, second = Heartbeat(0, 5), Heartbeat(1, 5)
    introductions = [first.introduction("localhost"), second.introduction("localhost")]
    first.meet(introductions)
    (_, port), *rest = json.loads(introductions[0])
    second.meet([json.dumps([["127.0.1.1", port - 1], *rest])])
    with first, second:
        wait_until(lambda: other(second).address[1] == port)
        wait_until(lambda: other(first).heard is not None)


def test_other_datagrams_are_ignored(two: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = two
    assert first._socket is not None
    address = first._socket.getsockname()
    with socket.socket(first._socket.family, socket.SOCK_DGRAM) as stranger:
        for content in (
            b"",
            b"\xff",
            b"3",
            json.dumps(["wrong", 1, "step 5", False]).encode(),
            json.dumps([second._token, 7, "step 5", False]).encode(),
            json.dumps([second._token, [1], "step 5", False]).encode(),
        ):
            stranger.sendto(content, address)
    with first:
        wait_until(lambda: first._clock > 0.3)
        assert other(first).heard is None
        # It has never heard the other one: the network may drop datagrams, so it does not conclude.
        wait_until(lambda: first._clock > 3 * first.timeout_seconds)


def test_time_in_which_this_process_did_not_run_does_not_count(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended machine: no rank could answer."""
    first, second = two
    with first, second:
        wait_until(lambda: other(first).heard is not None)
        before = first._clock
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000)
        wait_until(lambda: first._clock > before + 0.2)
        assert first._clock < before + 100


def test_errors_of_torch_become_one_line() -> None:
    beat = Heartbeat(0, 120)
    beat.meet([beat.introduction("localhost"), json.dumps([["", 0], "token", "process 5 on b"])])
    beat.set_section("step 12")
    other(beat).section = "validation"
    closed = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    assert beat.explain(closed).startswith("rank 0: another rank ended during step 12; ")
    late = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
    assert beat.explain(late) == (
        "rank 0: step 12 timed out, as another rank takes too long; last known: rank 1 in "
        "validation"
    )
