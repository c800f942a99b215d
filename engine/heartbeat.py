"""A thread of each rank that notices when another rank does not respond.

In a collective, a rank waits silently for another one that is stopped or whose machine hangs. The
threads send each other a datagram every second, independently of the process group. They also pass
a signal on to a rank that waits for input.
"""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from conf.signals import STOPS

BEAT_SECONDS = 1.0
START_FACTOR = 5  # the ranks may start this many times loader.timeout_seconds apart


@dataclass
class Peer:
    """Another rank."""

    address: tuple[str, int]
    heard: float = math.inf  # when, by this rank's clock; inf: never, the network drops datagrams
    section: str = "start"


class Heartbeat:
    """Ends this process with status 1 if another rank does not respond for `timeout_seconds`.

    It does so only if this rank has been in the same section for as long: then its main thread
    waits in a collective. A rank that responds may take longer.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self.name = f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"
        self.timeout_seconds = timeout_seconds
        self.section = "start"
        self.peers: dict[str, Peer] = {}  # by name
        self.forwards = False  # whether the main thread handles signals of other ranks
        # For signal.set_wakeup_fd: it receives the signals of this process.
        self._woken, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self._signal = 0
        self._clock = self._since = 0.0  # now, and at the beginning of the section
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def set_section(self, section: str | None) -> None:
        """Note what this rank begins to do; None: it waits for no other rank from now on."""
        self.section = section or self.section
        self._since = math.inf if section is None else self._clock

    def introduction(self, host: str) -> tuple[str, Peer]:
        """Open the socket; return the name of this rank and its address as `host` sees it."""
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
        return self.name, Peer((own, self._socket.getsockname()[1]))

    def meet(self, introductions: list[tuple[str, Peer]]) -> None:
        """Exchange datagrams with the other ranks from now on; the first ones now."""
        self.peers = {name: peer for name, peer in introductions if name != self.name}
        self._exchange()

    def _run(self) -> None:
        period = min(BEAT_SECONDS, self.timeout_seconds / 5)
        last = time.monotonic()
        while True:
            if connection.wait([self._woken], period):
                received = [number for number in self._woken.recv(64) if number in STOPS]
                self._signal = received[0] if received else self._signal
            # While the whole job is suspended, no rank can respond: this time does not count.
            now = time.monotonic()
            self._clock, last = self._clock + min(now - last, 2 * period), now
            self._exchange()
            self._check()

    def _exchange(self) -> None:
        """Send each rank a datagram, and receive those that have arrived."""
        content = json.dumps([self.name, self.section, self._signal]).encode()
        for peer in self.peers.values():
            with suppress(OSError):  # full queue; no route at the moment
                self._socket.sendto(content, peer.address)
        with suppress(OSError):  # until nothing more has arrived
            while self.peers:
                self._receive(*self._socket.recvfrom(4096))

    def _receive(self, content: bytes, sender: Any) -> None:
        try:
            name, section, number = json.loads(content)
            peer = self.peers[name]
        except (ValueError, TypeError, KeyError):
            return  # of another program
        peer.heard, peer.section = self._clock, section
        peer.address = sender[:2]  # on Debian, a host resolves its own name to 127.0.1.1
        if number and self.forwards and not self._signal:
            self._signal = number
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _check(self) -> None:
        """End this process if it has waited too long for the ranks to start, or for one of them."""
        limit = self.timeout_seconds * (1 if self.peers else START_FACTOR)
        late = self._clock - limit
        silent = ", ".join(name for name, peer in self.peers.items() if peer.heard < late)
        if self._since > late or (self.peers and not silent):
            return
        reason = (
            f"loader.timeout_seconds={self.timeout_seconds:g}: no response for {limit:g} s from "
            f"{silent or 'the others at MASTER_ADDR and MASTER_PORT'}, while {self.name} waits for "
            f"it in {self.section}; it was not started or is suspended, or its machine hangs: kill "
            "it, and run the same command again"
        )
        with suppress(Exception):  # stderr may be closed
            print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr, flush=True)
        os._exit(1)
