"""A moto S3 server behind a proxy that fails like networks and servers do."""

import http.client
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

STALL_SECONDS = 1000.0
HOPS = {"connection", "transfer-encoding", "content-length", "keep-alive"}  # per connection


class Bucket(ThreadingHTTPServer):
    """A bucket `photos`, available as s3://photos and url/photos.

    Attributes:
        fault: maps a range request's index, from 0, to "" or a fault: an HTTP status, "cut",
            "stall", "loop" (redirects to itself), "unsized" (no Content-Length) or "etag" (a
            different one).
        broken: maps a path, such as /photos/val.tar, to the faults of all its next requests.
        ranges: number of range requests per path.
        redirects: whether each request is redirected to a URL with a new signature.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = port
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self) -> None:
        self.fault: Callable[[int], str] = lambda number: ""
        self.broken: dict[str, Iterator[str]] = {}
        self.ranges: Counter[str] = Counter()
        self.redirects = False

    def put(self, folder: Path, name: str = "") -> None:
        """Upload the files in a directory as photos/<name>/<relative path>."""
        for path in filter(Path.is_file, folder.rglob("*")):
            self.write(f"{name}/{path.relative_to(folder)}".lstrip("/"), path.read_bytes())

    def write(self, path: str, data: bytes) -> None:
        public = {"x-amz-acl": "public-read"}  # moto lets nobody replace a private object
        assert self.send("PUT", f"/photos/{path}", data, **public).status == 200

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.behind)
        # Moto requires no signature, but reads the service name from one.
        connection.request(method, path, body or None, {"Host": "s3.amazonaws.com", **headers})
        return connection.getresponse()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that close a connection."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_GET(self) -> None:
        if self.server.redirects and "?" not in self.path:
            self.redirect(f"{self.path}?signature={time.time_ns()}")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {key: value for key, value in self.headers.items() if key.lower() not in HOPS}
        fault = self.next_fault()
        if fault == "stall":
            time.sleep(STALL_SECONDS)
        answer = self.server.send(self.command, self.path, body, **headers)
        if fault == "loop":
            self.redirect(self.path)
        elif fault.isdigit():
            self.send_error(int(fault))
        else:
            self.answer(answer, fault)

    def next_fault(self) -> str:
        path = self.path.partition("?")[0]
        fault = next(self.server.broken.get(path, iter(())), "")
        if self.headers.get("Range", "bytes=1-1") != "bytes=1-1":  # each process tests it once
            fault = fault or self.server.fault(self.server.ranges.total())
            self.server.ranges[path] += 1
        return fault

    def redirect(self, path: str) -> None:
        self.send_response(302)
        self.send_header("Location", path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, answer: Any, fault: str) -> None:
        data = answer.read()
        headers = {key: value for key, value in answer.getheaders() if key.lower() not in HOPS}
        headers["Content-Length"] = answer.getheader("Content-Length", str(len(data)))
        if fault == "etag":
            headers["ETag"] = '"other"'
        if fault == "unsized":
            del headers["Content-Length"]
        self.send_response(answer.status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        self.close_connection = fault in ("cut", "unsized")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@contextmanager
def serving() -> Iterator[Bucket]:
    """Start moto's server and the proxy in this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    bucket = Bucket(moto.get_host_and_port()[1])
    Thread(target=bucket.serve_forever, daemon=True).start()
    try:
        assert bucket.send("PUT", "/photos").status == 200
        yield bucket
    finally:
        bucket.shutdown()
        moto.stop()
