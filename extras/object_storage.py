"""Read tar files at URLs, in object storage such as S3 or on a web server.

    python train.py data.root=s3://bucket/imagenet

A split is train.tar, train-*.tar or train/*.tar. fsspec reads images in any order by range request.
train.tar.json (`prepare.py --format tar`) lists train.tar; otherwise all headers are read once.
"""

import errno
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from tarfile import TarInfo
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile

from conf.errors import UserError, describe
from conf.schema import TEXT, Constraint, greater_than, interval, show
from conf.start import default_cache_dir
from pipeline.data import index
from pipeline.data.index import Index, Storage, load_files
from pipeline.data.listing import BLOCK, Members, tar_members

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.1  # between checks whether a request has ended
SILENT_SECONDS = 3.0  # then a line says which request the run waits for
GONE = 410  # also the status of errors without a reply that a retry cannot fix
PERMANENT = (401, 403, 404, GONE)
FIX = "check the network, the credentials, fsspec's plugin, and that the server supports ranges"
CHANGED = "has changed since the run started; restart the run"

# URL -> (file system of fsspec, path), once per process, without listings, which hide changes
_file_system = cache(partial(url_to_fs, use_listings_cache=False))


@dataclass(frozen=True)
class RemoteTar(Storage):
    path: str  # the URL
    stamp: tuple[int, int]  # hash of the storage's metadata, and the size in bytes
    copy: str = ""  # sparse file that caches the images that were read
    kept: float = 0  # bytes at the beginning of the tar file whose images are cached

    def read(self, name: str, start: int, length: int) -> bytes:
        if start + length > self.kept:
            return self._fetch(name, start, length)
        with suppress(OSError), open(os.open(self.copy, os.O_NOFOLLOW), "rb", buffering=0) as copy:
            block = os.pread(copy.fileno(), BLOCK + length, start - BLOCK)
            data = block[BLOCK:]
            if zlib.crc32(data, length) == int.from_bytes(block[:BLOCK], "big"):
                return data
        data = self._fetch(name, start, length)
        checksum = zlib.crc32(data, length).to_bytes(BLOCK, "big")  # a kill leaves partial images
        with suppress(OSError):  # the disk is full; the next epoch reads the image again
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link could lead to any file
            with open(os.open(self.copy, flags, 0o666), "wb", buffering=0) as copy:
                os.pwrite(copy.fileno(), checksum + data, start - BLOCK)
        return data

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        """Read an image and its header. Raises OSError if it fails or the tar file was replaced."""
        try:
            block = _range_reader(self)(start - BLOCK, start + length)
            header = TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
            is_cut = len(header.name) >= 99 or not name.isascii()  # an extra header has the name
            is_named = is_cut or os.path.normpath(header.name).endswith(name)
            if is_named and len(block) - BLOCK == header.size == length:
                return block[BLOCK:]
            files = f"{self.path}.json, if it exists, and {default_cache_dir()}"
            problem = f"found {header.name} ({len(block)} bytes) instead; delete {files}"
        except Exception as error:  # plugins raise many types
            _, problem = _explain(error)
            _range_reader.cache_clear()  # the signature may have expired
        try:
            if _stamp(self.path) != self.stamp:
                problem = f"{self.path} {CHANGED}"
        except Exception as error:
            problem = f"{self.path} is unreachable: {_explain(error)[1]}"
        raise OSError(errno.EIO, problem)  # Index.read retries


class Requests:
    """Sends requests at startup in daemon threads, because Ctrl-C does not end fsspec's calls."""

    __call__ = staticmethod(RemoteTar)  # `load_files` calls an object like the class TarFile

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.unsaid = Lock()  # acquired by the thread that reports a stalled request
        self.ended: BaseException | None = None  # error or Ctrl-C, which ends the other threads

    def ask(self, url: str, call: Callable[[], Any], absent: Sequence[int] = ()) -> Any:
        """Retry like Index.read. Return None for an HTTP status in `absent`, or raise UserError."""
        for pause in (*index.PAUSES, 0):
            reply = self._wait(url, _start(call))
            error = reply.exception()
            if error is None:
                return reply.result()
            status, problem = _explain(error)
            if status in absent:
                return None
            if status in PERMANENT:
                break
            _range_reader.cache_clear()  # a signature may have expired
            time.sleep(pause)
        self.ended = UserError(url, problem, FIX)
        raise self.ended

    def _wait(self, url: str, reply: Future[Any]) -> Future[Any]:
        started = time.monotonic()
        while not wait([reply], STEP_SECONDS).done:
            seconds = time.monotonic() - started
            if seconds > SILENT_SECONDS and self.unsaid.acquire(blocking=False):
                logger.warning("waiting for %s", url)
            if seconds > self.timeout_seconds:
                problem = f"no reply for loader.timeout_seconds={self.timeout_seconds:g}"
                self.ended = UserError(url, problem, FIX)
            if self.ended:
                raise self.ended
        return reply

    def find(self, url: str) -> list[str]:
        """Return the URLs of the tar files of a split; [] if there are none."""
        file_system, path = self.ask(url, lambda: _file_system(url))
        if self.ask(f"{url}.tar", lambda: file_system.info(f"{path}.tar"), [404]):
            return [f"{url}.tar"]
        for folder, start in ((os.path.dirname(path), f"{path}-"), (path, f"{path}/")):
            listing = partial(file_system.ls, folder, detail=False)
            listed = self.ask(url, listing, [404]) or []
            found = [name for name in listed if name.startswith(start) and name.endswith(".tar")]
            if found:
                return list(map(file_system.unstrip_protocol, sorted(found)))
        return []

    def stamp_of(self, url: str | bytes) -> tuple[int, int]:
        url = os.fsdecode(url)
        _file_system(url)  # not in the request's thread, because fsspec creates one per thread
        return self.ask(url, partial(_stamp, url))

    def members(self, url: str, _: str) -> Members:
        """List a tar file's members: read its index file, or all headers if that is invalid."""
        tar = RemoteTar(url, self.stamp_of(url))
        file_system, path = _file_system(url)
        content = self.ask(f"{url}.json", lambda: file_system.cat_file(f"{path}.json"), PERMANENT)
        with suppress(Exception):  # it is missing, or damaged in any way
            return _indexed_members(content, tar.stamp[1])
        file = AbstractBufferedFile(file_system, path, block_size=1 << 22, size=tar.stamp[1])
        file.cache.fetcher = lambda *place: self.ask(url, lambda: _range_reader(tar)(*place))
        return tar_members(path, url, opened=lambda *_: file)


def tars(
    place: str, cache: str = "", gigabytes: float = 0, timeout_seconds: float = 120
) -> Callable[[str], Index] | None:
    """Find a split. `cache`: folder for images that were read; `gigabytes`: its maximum size."""
    for name, value, kind in (
        ("cache", cache, Constraint(lambda path: type(path) is str, TEXT.description)),
        ("gigabytes", gigabytes, interval(0)),
        ("timeout_seconds", timeout_seconds, greater_than(0)),
    ):
        if not kind.check(value):
            problem = f"{name}={show(value)}: invalid value"
            raise UserError(
                f"data.storage: {__name__}:tars", problem, f"expected {kind.description}"
            )
    before, separator, rest = place.rpartition("://")  # data.train may be a URL after data.root
    url = f"{before.rpartition('/')[2]}://{rest}"
    parts = urlsplit(url)
    if not separator:
        return None
    if parts.password or parts.query:
        problem = "has a password or a query, which the run would store"
        fix = "set the credentials in the environment (docs/performance.md#object-storage)"
        raise UserError(f"{parts.scheme}://{parts.hostname}{parts.path}", problem, fix)
    requests = Requests(timeout_seconds)
    files = requests.find(url.removesuffix(".tar"))
    folder = os.path.abspath(os.path.expanduser(cache))
    return partial(_load, requests, files, url, folder, gigabytes * 1e9) if files else None


def _load(site: Requests, files: list[str], url: str, cache: str, limit: float, key: str) -> Index:
    first = RemoteTar(files[0], site.stamp_of(files[0]))
    site.ask(files[0], lambda: _range_reader(first)(1, 2))
    try:
        found = _start(partial(load_files, files, url, key, site)).result()
    except BaseException as error:  # also Ctrl-C, which ends the thread pools
        site.ended = site.ended or error
        raise site.ended from None
    fraction = limit / sum(tar.stamp[1] for tar in found.sources)
    os.makedirs(cache, exist_ok=True)  # raise errors here, because workers hide theirs
    copies = []
    for tar in found.sources:
        copy = os.path.join(cache, "{:x}-{}.tar".format(*tar.stamp))
        copies.append(replace(tar, copy=copy, kept=fraction * tar.stamp[1]))
    return replace(found, sources=copies)


def _start(call: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, which never keeps the process from exiting."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # plugins raise many types
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    return result


def _explain(error: Any) -> tuple[int, str]:
    """Return an error's HTTP status, 0 if unknown, and its message without a URL's signature."""
    while error.__cause__ is not None:  # fsspec replaces most errors by FileNotFoundError
        error = error.__cause__
    kinds = {FileNotFoundError: 404, PermissionError: 403, ImportError: GONE, ValueError: GONE}
    status = getattr(error, "status", kinds.get(type(error), 0))  # an attribute in aiohttp
    with suppress(AttributeError, LookupError, TypeError):  # botocore
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        status = {"NoSuchBucket": GONE}.get(error.response["Error"]["Code"], status)
    return status, " ".join(describe(error).partition("?")[0].split())


def _stamp(url: str) -> tuple[int, int]:
    """Return a hash, negative because it is not a modification time, and the size in bytes."""
    file_system, path = _file_system(url)
    info = {**file_system.info(path), "url": ""}  # a redirect may lead to a new signature
    if info["size"] is None:
        raise ValueError("the server does not report the file's size (Content-Length)")
    digest = blake2b(repr(info).encode(), digest_size=7).digest()
    return -1 - int.from_bytes(digest), int(info["size"])


def _indexed_members(content: bytes, size: int) -> Members:
    """Return the members that an index file lists. Raises any exception if it is invalid."""
    listed = json.loads(content)
    names = [f"x/{name}" for name in listed["members"]]
    places = np.array(list(listed["members"].values()))
    starts, lengths = places[places[:, 0].argsort()].T
    valid = [
        listed["size"] == size and places.dtype == np.int64,
        names == list(map(os.path.normpath, names)),  # relative, without ..
        ((places >= [BLOCK, 0]) & (places <= size)).all(),
        (starts + lengths <= np.append(starts[1:] - BLOCK, size)).all(),  # headers in between
    ]
    if not all(valid):
        raise ValueError(valid)
    return {os.fsencode(name): tuple(place) for name, place in listed["members"].items()}


@cache
def _range_reader(tar: RemoteTar) -> Callable[[int, int], bytes]:
    """Open a tar file, once per process; return a function that reads a range of this version."""
    file_system, path = _file_system(tar.path)
    file = file_system.open(path, "rb", cache_type="none")
    if _stamp(tar.path) != tar.stamp:
        raise ValueError(f"{tar.path} {CHANGED}")
    with suppress(Exception):  # plain HTTP takes a third of s3fs's CPU time
        info = file_system.info(path)
        version = min(info.keys() & {"ETag", "Last-Modified"})  # ETag if there is one

        async def check(reply: Any) -> None:
            reply.raise_for_status()
            if reply.headers[version] != info[version]:
                raise ValueError(f"{tar.path} {CHANGED}")

        with suppress(NotImplementedError):
            path = file_system.sign(path, expiration=86_400)  # a day
        options = {"size": tar.stamp[1], "raise_for_status": check}
        direct = _file_system(path)[0].open(path, "rb", cache_type="none", **options)
        direct._fetch_range(1, 2)
        file = direct
    return getattr(file, "_fetch_range", partial(file_system.cat_file, path))
