"""Tar files behind URLs: in object storage such as S3, or on a web server.

    python train.py data.root=s3://bucket/imagenet

A split is train.tar, train-*.tar or train/*.tar; an image is a range request of fsspec, in any
order. train.tar.json (`prepare.py --format tar`) lists train.tar; else, all headers are read once.
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

# URL -> fsspec's object, once per process, without lists that would hide changes; path in it
_file_system = cache(partial(url_to_fs, use_listings_cache=False))


@dataclass(frozen=True)
class RemoteTar(Storage):
    path: str  # the URL
    stamp: tuple[int, int]  # hash of what the storage says about it, and its size in bytes
    copy: str = ""  # sparse file, which keeps the images that were read
    kept: float = 0  # bytes at the beginning of the tar file whose images it keeps

    def read(self, name: str, start: int, length: int) -> bytes:
        if start + length > self.kept:
            return self._fetch(name, start, length)
        with suppress(OSError), open(self.copy, "rb", buffering=0) as copy:
            block = os.pread(copy.fileno(), BLOCK + length, start - BLOCK)
            data = block[BLOCK:]
            if zlib.crc32(data, length) == int.from_bytes(block[:BLOCK], "big"):
                return data
        data = self._fetch(name, start, length)
        checksum = zlib.crc32(data, length).to_bytes(BLOCK, "big")  # a kill leaves parts of images
        with suppress(OSError):  # a full disk: the next epoch reads the image again
            with open(os.open(self.copy, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=0) as copy:
                os.pwrite(copy.fileno(), checksum + data, start - BLOCK)
        return data

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        """Read an image and its header, which is another one if the tar file was replaced."""
        try:
            block = _range_of(self)(start - BLOCK, start + length)
            header = TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
            is_named = _is_named(header, name)
            if is_named and len(block) - BLOCK == header.size == length:
                return block[BLOCK:]
            problem = f"{len(block)} of {BLOCK + length} bytes arrived"
            if not is_named:
                others = f"{self.path}.json, if it exists, and {default_cache_dir()}"
                problem = f"{header.name} is in its place; delete {others}"
        except Exception as error:  # plugins raise many types
            problem = describe(error).partition("?")[0]  # without the signature of a URL
            _range_of.cache_clear()  # the signature may have expired
        with suppress(UserError):
            if self.stamp_of(self.path) != self.stamp:
                problem = f"{self.path} has changed since the start; start again"
        raise OSError(errno.EIO, problem)  # Index.read tries again

    @staticmethod
    def stamp_of(url: str | bytes) -> tuple[int, int]:
        """Return a negative number, as it is no time at which a file has changed, and the size."""
        info = {**_ask(url, "info"), "url": ""}  # a redirect may lead to a new signature
        digest = blake2b(repr(info).encode(), digest_size=7).digest()
        return -1 - int.from_bytes(digest), int(info["size"])

    @staticmethod
    def members(url: str, _: str) -> Members:
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # none, or another file
            index = json.loads(_ask(f"{url}.json", "cat_file"))
            if index["size"] == _ask(url, "size"):
                return {os.fsencode(name): place for name, place in index["members"].items()}
        file_system, path = _file_system(url)
        opened = partial(file_system.open, block_size=1 << 22, cache_type="readahead")  # 40 images
        return tar_members(path, url, opened=opened)


def tars(place: str, cache: str = "", gigabytes: float = 0) -> Callable[[str], Index] | None:
    """Find a split. `cache`, `gigabytes`: folder for images of it that were read, and its size."""
    before, separator, rest = place.rpartition("://")  # of data.train, a URL behind data.root
    url = f"{before.rpartition('/')[2]}://{rest}"
    parts = urlsplit(url)
    if not separator:
        return None
    if parts.password or parts.query:
        wrong = "has a password or a query, which the run would store"
        cure = "set the credentials in the environment (docs/performance.md#object-storage)"
        raise UserError(f"{parts.scheme}://{parts.hostname}{parts.path}", wrong, cure)
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
        _range_of(first)(1, 2)
    except Exception as error:  # plugins raise many types
        cure = "give a server that answers range requests; `python -m http.server` does not"
        raise UserError(files[0], describe(error).partition("?")[0], cure) from None
    index: Any = load_files(files, url, key, RemoteTar)
    share = limit / sum(tar.stamp[1] for tar in index.sources)
    os.makedirs(cache, exist_ok=True)  # now, because an error of a worker is not seen
    copies = []
    for tar in index.sources:
        copy = os.path.join(cache, "{:x}-{}.tar".format(*tar.stamp))
        copies.append(replace(tar, copy=copy, kept=share * tar.stamp[1]))
    return replace(index, sources=copies)


def _ask(url: str | bytes, method: str) -> Any:
    """Call a method of fsspec's object for a URL. Raises UserError whatever that raises."""
    try:
        file_system, path = _file_system(os.fsdecode(url))
        return getattr(file_system, method)(path)
    except Exception as error:
        cure = "check the network, the credentials, and that the plugin of fsspec is installed"
        raise UserError(os.fsdecode(url), describe(error), cure) from None


def _is_named(header: TarInfo, name: str) -> bool:
    """Whether a header may be that of an image. That of a longer name may stand before it."""
    is_cut = len(header.name) >= 99
    return is_cut or not name.isascii() or os.path.normpath(header.name).endswith(name)


@cache
def _range_of(tar: RemoteTar) -> Callable[[int, int], bytes]:
    """Open a tar file, once per process; return what reads a range of this version of it."""
    file_system, path = _file_system(tar.path)
    file = file_system.open(path, "rb", cache_type="none")
    if tar.stamp_of(tar.path) != tar.stamp:
        raise OSError("it has changed")
    with suppress(Exception):  # plain HTTP takes a third of the CPU time of s3fs
        options = {"size": tar.stamp[1], "headers": {"If-Match": file_system.info(path)["ETag"]}}
        with suppress(NotImplementedError):
            path = file_system.sign(path, expiration=86_400)  # a day
        direct = _file_system(path)[0].open(path, "rb", cache_type="none", **options)
        direct._fetch_range(1, 2)
        file = direct
    return getattr(file, "_fetch_range", partial(file_system.cat_file, path))
