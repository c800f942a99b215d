#!/usr/bin/env python3
"""Serve a folder over S3 and HTTP with a delay for each request, for benchmarks.

    python3 benchmarks/object_server.py FOLDER [--port 9000] [--delay 0.03] [--processes 4]

FOLDER/bucket/key is s3://bucket/key with AWS_ENDPOINT_URL=http://127.0.0.1:9000, and
http://127.0.0.1:9000/bucket/key. Supports HEAD, GET with a range and If-Match, and key listings,
and does not check signatures. GET /requests returns the number of object reads so far. Needs only
the standard library.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from hashlib import md5
from multiprocessing import Process, RawArray
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HEADER = re.compile(rb"\r\n([\w-]+):[ ]*([^\r\n]*)")


class Connection(asyncio.Protocol):
    def __init__(self, root, delay, counts, number):
        self.root, self.delay, self.counts, self.number = root, delay, counts, number
        self.received = b""
        self.files = {}

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data):
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self.delay, self.answer, head)

    def answer(self, head):
        if self.transport.is_closing():
            return None
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        headers = {key.lower(): value.decode() for key, value in HEADER.findall(head)}
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        if url.path == "/requests":
            return self.send(200, str(sum(self.counts)).encode())
        if "list-type" in query or "prefix" in query:
            return self.send(200, self.keys(url.path.strip("/"), query))
        path = self.root / unquote(url.path).lstrip("/")
        if not path.is_file():
            body = b""
            if method == "GET":
                body = b"<Error><Code>NoSuchKey</Code></Error>"
            return self.send(404, body)
        info = path.stat()
        tag = f'"{md5(f"{info.st_mtime_ns} {info.st_size}".encode()).hexdigest()}"'
        if headers.get(b"if-match", tag) != tag:
            return self.send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        first = 0
        last = info.st_size - 1
        status = 200
        lines = f"ETag: {tag}\r\nAccept-Ranges: bytes\r\n"
        lines += "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n"
        if b"range" in headers:
            start, _, stop = headers[b"range"].removeprefix("bytes=").partition("-")
            first = int(start)
            last = min(int(stop or last), last)
            status = 206
            lines += f"Content-Range: bytes {first}-{last}/{info.st_size}\r\n"
        if method == "HEAD":
            lines += f"Content-Length: {info.st_size}\r\n\r\n"
            return self.transport.write(f"HTTP/1.1 200 OK\r\n{lines}".encode())
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        self.counts[self.number] += 1
        body = os.pread(self.files[path], last - first + 1, first)
        return self.send(status, body, lines)

    def keys(self, bucket, query):
        prefix = query.get("prefix", [""])[0]
        found = ""
        for path in sorted((self.root / bucket).rglob("*")):
            name = str(path.relative_to(self.root / bucket))
            if path.is_file() and name.startswith(prefix):
                found += f"<Contents><Key>{escape(name)}</Key><Size>{path.stat().st_size}</Size>"
                found += "<LastModified>2025-01-01T00:00:00.000Z</LastModified><ETag>x</ETag>"
                found += "</Contents>"
        head = '<?xml version="1.0"?>'
        head += '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        text = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return f"{head}{text}".encode()

    def send(self, status, body, lines=""):
        head = f"HTTP/1.1 {status} -\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def connection_lost(self, error):
        for file in self.files.values():
            os.close(file)


def serve(options, counts, number):
    async def run():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(options.folder.resolve(), options.delay, counts, number),
            "127.0.0.1", options.port, reuse_port=True, backlog=4096,
        )  # fmt: skip
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--delay", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    counters = RawArray("q", given.processes)  # one per process, because += is not atomic
    for position in range(given.processes):
        Process(target=serve, args=(given, counters, position), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # also ends the other processes
    print(f"serving {given.folder} at http://127.0.0.1:{given.port}", flush=True)
    try:
        asyncio.run(asyncio.sleep(1e9))
    except KeyboardInterrupt:
        pass
