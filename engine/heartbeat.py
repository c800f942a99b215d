"""A thread of each rank that notices when another rank does not respond.

A collective waits until all ranks take part. If one of them is stopped, or its machine hangs, the
others would wait without a word. The threads send each other a datagram every second. They do not
use the process group, in which the ranks wait, nor torchrun's store, which may block.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

BEAT_SECONDS = 1.0
# The ranks of a job may start this many times loader.timeout_seconds apart: machines may read torch
# from a shared disk.
START_FACTOR = 5
# The rank with the lowest number that still answers prints the message; others exit this much later
LATER_SECONDS = 10.0
# The section in which torch connects to MASTER_PORT: it waits forever for a process that accepts
# connections and does not answer.
CONNECTION = "connection"


@dataclass
class Peer:
    """Another rank.

    Attributes:
        address: host and port to which its datagrams are sent.
        token: text with which its datagrams begin: no other program's have it.
        process: process number and machine, for messages.
        heard: seconds on this thread's clock at its last datagram; None before the first one. Then
            the network may not transport datagrams between the two, and nothing is concluded.
        section: what it was doing then.
        left: whether it has ended without an error.
    """

    address: tuple[str, int]
    token: str
    process: str
    heard: float | None = None
    section: str = ""
    left: bool = False


class Heartbeat:
    """Ends this process with status 1 if another rank does not answer for `timeout_seconds`.

    This happens only if this rank has not reached another section for as long: its main thread
    waits in a collective, and cannot end the process. A rank that answers may take its time: it
    compiles, or waits for a slow disk. The process at MASTER_PORT must answer within the
    same time.

    Args:
        rank: of this process.
        timeout_seconds: how long a rank may be silent.

    Attributes:
        start_seconds: how long this rank may wait for the others to start. LATER_SECONDS after
            that, the process at MASTER_PORT has stopped answering.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.start_seconds = START_FACTOR * timeout_seconds
        self._period = min(BEAT_SECONDS, timeout_seconds / 5)
        self._token = uuid4().hex
        self._socket: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        # Seconds during which this process ran: those of a suspended machine do not count, in
        # which no rank could answer.
        self._clock = 0.0
        self._section = "start"
        self._entered = 0  # number of sections so far
        self._waits = True  # for other ranks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread. The others do not expect this rank to answer, unless it failed."""
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._send("", left=True)
        if self._socket is not None:
            self._socket.close()

    def set_section(self, section: str | None) -> None:
        """Note what this rank begins to do, for messages: "step 12", "validation".

        With None, it waits for no other rank from now on: it only closes what it has opened.
        """
        if section is None:
            self._waits = False
            return
        self._section = section
        self._entered += 1

    def explain(self, error: str) -> str:
        """Say in one line which collective failed, for torch's error about another rank."""
        if "imed out" not in error:
            return (
                f"rank {self.rank}: another rank ended during {self._section}; for the reason, "
                "see its message above or torchrun's message below"
            )
        places = ", ".join(f"rank {n} in {p.section or 'start'}" for n, p in self._peers.items())
        return (
            f"rank {self.rank}: {self._section} timed out, as another rank takes too long; last "
            f"known: {places}"
        )

    def introduction(self, host: str) -> str:
        """Open the socket; return what `meet` of the other ranks needs to know.

        Args:
            host: a machine that all ranks reach. The address of this one in the same network is
                used.
        """
        address = ("", 0)
        with contextlib.suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                own = probe.getsockname()[0]
            self._socket = socket.socket(family, kind)
            self._socket.bind(("", 0))
            self._socket.setblocking(False)
            address = (own, self._socket.getsockname()[1])
        process = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps([address, self._token, process])

    def meet(self, introductions: list[str]) -> None:
        """Exchange datagrams with all ranks from now on.

        Args:
            introductions: of all ranks, in rank order.
        """
        peers = {}
        for rank, introduction in enumerate(introductions):
            (host, port), token, process = json.loads(introduction)
            if rank != self.rank:
                peers[rank] = Peer((host, port), token, process)
        self._peers = peers

    def _run(self) -> None:
        last = time.monotonic()
        entered, since = -1, 0.0
        while not self._ended.wait(self._period):
            now = time.monotonic()
            self._clock += min(now - last, 2 * self._period)
            last = now
            self._send(self._section)
            self._receive()
            if self._entered != entered:
                entered, since = self._entered, self._clock
            silent = [
                rank
                for rank, peer in self._peers.items()
                if peer.heard is not None
                and not peer.left
                and self._clock - max(peer.heard, since) > self.timeout_seconds
            ]
            if silent and self._waits:
                self._fail(silent)
            connects = self._section == CONNECTION
            patience = self.timeout_seconds if connects else self.start_seconds + LATER_SECONDS
            if not self._peers and self._clock - since > patience:
                self._exit(
                    "MASTER_ADDR, MASTER_PORT: the process that listens there does not respond; "
                    "kill it if it is suspended, or set another MASTER_PORT"
                )

    def _send(self, section: str, *, left: bool = False) -> None:
        content = json.dumps([self._token, self.rank, section, left]).encode()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # full queue; no route at the moment
                if self._socket is not None:
                    self._socket.sendto(content, peer.address)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                content, sender = self._socket.recvfrom(4096)
                token, rank, section, left = json.loads(content)
                peer = self._peers[rank]
            except OSError:
                return  # nothing more has arrived
            except (ValueError, TypeError, KeyError):
                continue  # another program's
            if token == peer.token:
                peer.heard, peer.section, peer.left = self._clock, section, left
                # On Debian, a host takes its own name, MASTER_ADDR, for 127.0.1.1.
                peer.address = sender[:2]

    def _fail(self, silent: list[int]) -> None:
        if not all(rank in silent for rank in range(self.rank)):
            time.sleep(LATER_SECONDS)
            os._exit(1)
        names = ", ".join(f"rank {rank} ({self._peers[rank].process})" for rank in silent)
        self._exit(
            f"loader.timeout_seconds={self.timeout_seconds:g}: no response for that long from "
            f"{names}, while rank {self.rank} waits for it in {self._section}; the process is "
            "suspended, or its machine hangs: kill it, and run the same command again"
        )

    def _exit(self, message: str) -> NoReturn:
        try:
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
        finally:  # stderr may be closed
            os._exit(1)
