"""Read tar files at URLs, in object storage such as S3 or on a web server.

    python train.py data.root=s3://bucket/imagenet

A split is train.tar, train-*.tar or train/*.tar. fsspec reads images in any order by range request.
train.tar.json (`prepare.py --format tar`) lists train.tar; otherwise all headers are read once.
"""

import errno
import glob
import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from tarfile import TarInfo
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs

from conf.errors import UserError, describe
from conf.start import default_cache_dir
from pipeline.data.index import Index, Storage, load_files
from pipeline.data.listing import BLOCK, Members, tar_members

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
        with suppress(OSError), open(self.copy, "rb", buffering=0) as copy:
            block = os.pread(copy.fileno(), BLOCK + length, start - BLOCK)
            data = block[BLOCK:]
            if zlib.crc32(data, length) == int.from_bytes(block[:BLOCK], "big"):
                return data
        data = self._fetch(name, start, length)
        checksum = zlib.crc32(data, length).to_bytes(BLOCK, "big")  # a kill leaves partial images
        with suppress(OSError):  # the disk is full; the next epoch reads the image again
            with open(os.open(self.copy, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=0) as copy:
                os.pwrite(copy.fileno(), checksum + data, start - BLOCK)
        return data

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        """Read an image and its header. Raises OSError if it fails or the tar file was replaced."""
        try:
            block = _range_reader(self)(start - BLOCK, start + length)
            header = TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
            is_named = _is_named(header, name)
            if is_named and len(block) - BLOCK == header.size == length:
                return block[BLOCK:]
            problem = f"received {len(block)} of {BLOCK + length} bytes"
            if not is_named:
                files = f"{self.path}.json, if it exists, and {default_cache_dir()}"
                problem = f"found {header.name} instead; delete {files}"
        except Exception as error:  # plugins raise many types
            problem = describe(error).partition("?")[0]  # omit the URL's signature
            _range_reader.cache_clear()  # the signature may have expired
        with suppress(UserError):
            if self.stamp_of(self.path) != self.stamp:
                problem = f"{self.path} has changed since the run started; restart the run"
        raise OSError(errno.EIO, problem)  # Index.read retries

    @staticmethod
    def stamp_of(url: str | bytes) -> tuple[int, int]:
        """Return a hash, negative because it is not a modification time, and the size in bytes."""
        info = {**_ask(url, "info"), "url": ""}  # a redirect may lead to a new signature
        digest = blake2b(repr(info).encode(), digest_size=7).digest()
        return -1 - int.from_bytes(digest), int(info["size"])

    @staticmethod
    def members(url: str, _: str) -> Members:
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # missing or different
            index = json.loads(_ask(f"{url}.json", "cat_file"))
            if index["size"] == _ask(url, "size"):
                return {os.fsencode(name): place for name, place in index["members"].items()}
        file_system, path = _file_system(url)
        opened = partial(file_system.open, block_size=1 << 22, cache_type="readahead")  # 40 images
        return tar_members(path, url, opened=opened)


def tars(place: str, cache: str = "", gigabytes: float = 0) -> Callable[[str], Index] | None:
    """Find a split. `cache`: folder for images that were read; `gigabytes`: its maximum size."""
    before, separator, rest = place.rpartition("://")  # data.train may be a URL after data.root
    url = f"{before.rpartition('/')[2]}://{rest}"
    parts = urlsplit(url)
    if not separator:
        return None
    if parts.password or parts.query:
        wrong = "has a password or a query, which the run would store"
        fix = "set the credentials in the environment (docs/performance.md#object-storage)"
        raise UserError(f"{parts.scheme}://{parts.hostname}{parts.path}", wrong, fix)
    for ending in (".tar", "-*.tar", "/*.tar"):
        found = _ask(glob.escape(url.removesuffix(".tar")) + ending, "glob")
        if found:
            files = list(map(_file_system(url)[0].unstrip_protocol, sorted(found)))
            folder = os.path.abspath(os.path.expanduser(cache))
            return partial(_load, files, url, folder, gigabytes * 1e9)
    return None


def _load(files: list[str], url: str, cache: str, limit: float, key: str) -> Index:
    first = RemoteTar(files[0], RemoteTar.stamp_of(files[0]))
    try:
        _range_reader(first)(1, 2)
    except Exception as error:  # plugins raise many types
        fix = "use a server that supports range requests; `python -m http.server` does not"
        raise UserError(files[0], describe(error).partition("?")[0], fix) from None
    index: Any = load_files(files, url, key, RemoteTar)
    fraction = limit / sum(tar.stamp[1] for tar in index.sources)
    os.makedirs(cache, exist_ok=True)  # raise errors here, because workers hide theirs
    copies = []
    for tar in index.sources:
        copy = os.path.join(cache, "{:x}-{}.tar".format(*tar.stamp))
        copies.append(replace(tar, copy=copy, kept=fraction * tar.stamp[1]))
    return replace(index, sources=copies)


def _ask(url: str | bytes, method: str) -> Any:
    """Call a method of fsspec's file system for a URL. Converts all errors to UserError."""
    try:
        file_system, path = _file_system(os.fsdecode(url))
        return getattr(file_system, method)(path)
    except Exception as error:
        fix = "check the network, the credentials, and that fsspec's plugin is installed"
        raise UserError(os.fsdecode(url), describe(error), fix) from None


def _is_named(header: TarInfo, name: str) -> bool:
    """Whether a header may belong to an image. An extra header with a long name may precede it."""
    is_cut = len(header.name) >= 99
    return is_cut or not name.isascii() or os.path.normpath(header.name).endswith(name)


@cache
def _range_reader(tar: RemoteTar) -> Callable[[int, int], bytes]:
    """Open a tar file, once per process; return a function that reads a range of this version."""
    file_system, path = _file_system(tar.path)
    file = file_system.open(path, "rb", cache_type="none")
    if tar.stamp_of(tar.path) != tar.stamp:
        raise OSError("the file has changed")
    with suppress(Exception):  # plain HTTP takes a third of s3fs's CPU time
        options = {"size": tar.stamp[1], "headers": {"If-Match": file_system.info(path)["ETag"]}}
        with suppress(NotImplementedError):
            path = file_system.sign(path, expiration=86_400)  # a day
        direct = _file_system(path)[0].open(path, "rb", cache_type="none", **options)
        direct._fetch_range(1, 2)
        file = direct
    return getattr(file, "_fetch_range", partial(file_system.cat_file, path))
