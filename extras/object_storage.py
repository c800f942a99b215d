"""Tar files behind URLs: in object storage such as S3, or on a web server.

    python train.py data.root=s3://bucket/imagenet

By default, conf/config.yaml names it. A split is train.tar, train-*.tar or train/*.tar; an image is
a range request, in any order. fsspec and its plugins do that, with credentials of the environment.
train.tar.json (`prepare.py --format tar`) lists train.tar; without it, all headers are read once.
"""

import errno
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tarfile import TarInfo
from typing import Any
from urllib.parse import urlsplit

from conf.errors import UserError, describe
from pipeline.index import Index, Storage, load_files
from pipeline.listing import BLOCK, Members, tar_members

DAY = 86_400  # seconds
HEADERS_AT_ONCE = 1 << 22  # bytes of a request for headers: one for each of 40 images takes longer


@dataclass(frozen=True)
class RemoteTar(Storage):
    path: str  # the URL
    stamp: tuple[int, int]  # what changes with its ETag, and its size in bytes
    cache: str = ""
    kept: float = 0  # bytes at its beginning, whose images are kept in the folder `cache`

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def read(self, name: str, start: int, length: int) -> bytes:
        if start + length > self.kept:
            return self._fetch(start, length)
        file = Path(self.cache, "{:x}-{}".format(*self.stamp), str(start))
        with suppress(OSError):
            data = file.read_bytes()
            if len(data) == length:  # a power failure can leave a file of 0 bytes
                return data
        data = self._fetch(start, length)
        with suppress(OSError):  # a full disk: the next epoch reads the image again
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")  # a kill leaves no part of an image
            temporary.write_bytes(data)
            temporary.replace(file)
        return data

    def _fetch(self, start: int, length: int) -> bytes:
        """Read an image and its header, which is another one if the tar file was replaced."""
        try:
            block = _range_of(self)(start - BLOCK, start + length)
            size = TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape").size
            if (size, len(block)) == (length, BLOCK + length):
                return block[BLOCK:]
            problem = f"{len(block)} of {BLOCK + length} bytes arrived"
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
        shown = os.fsdecode(url)
        return -1 - _ask(shown, "checksum") % (1 << 62), _ask(shown, "size")

    @staticmethod
    def members(url: str, _: str) -> Members:
        with suppress(UserError):  # there is no such file
            index = json.loads(_ask(f"{url}.json", "cat_file"))
            if index["size"] == _ask(url, "size"):
                return {os.fsencode(name): place for name, place in index["members"].items()}
        logging.info("%s: reading all headers, as it has no .json file", url)
        file_system, path = _file_system(url)
        opened = partial(file_system.open, block_size=HEADERS_AT_ONCE, cache_type="readahead")
        return tar_members(path, url, opened=opened)


def tars(place: str, cache: str = "", gigabytes: float = 1e6) -> Callable[[str], Index] | None:
    """Find the tar files of a split; None if there are none, or the place is no URL.

    `cache`, `gigabytes`: a folder that keeps images that were read, and its size for each split.
    """
    before, separator, rest = place.rpartition("://")  # of data.train, a URL behind data.root
    if not separator:
        return None
    url = f"{before.rpartition('/')[2]}://{rest}"
    parts = urlsplit(url)
    if parts.password or parts.query:
        shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        cure = "take the credentials from the environment (docs/performance.md#object-storage)"
        raise UserError(shown, "has a password or a query, which the run would store", cure)
    for ending in (".tar", "-*.tar", "/*.tar"):
        found = _ask(url.removesuffix(".tar") + ending, "glob")
        if found:
            complete = map(_file_system(url)[0].unstrip_protocol, sorted(found))
            return partial(_load, list(complete), url, os.path.expanduser(cache), gigabytes * 1e9)
    return None


def _load(files: list[str], url: str, cache: str, limit: float, key: str) -> Index:
    index = load_files(files, url, key, RemoteTar)
    if not cache:
        return index
    os.makedirs(cache, exist_ok=True)
    tars: Any = index.sources
    share = limit / sum(tar.stamp[1] for tar in tars)
    kept = [replace(tar, cache=os.path.abspath(cache), kept=share * tar.stamp[1]) for tar in tars]
    return replace(index, sources=kept)


def _ask(url: str, method: str) -> Any:
    """Call a method of fsspec's object for a URL. Raises UserError whatever that raises."""
    try:
        file_system, path = _file_system(url)
        return getattr(file_system, method)(path)
    except Exception as error:
        cure = "check the network, the credentials, and that the plugin of fsspec is installed"
        raise UserError(url, describe(error), cure) from None


@cache
def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's object for a URL, once per process, and the path in it."""
    from fsspec.core import url_to_fs

    return url_to_fs(url, use_listings_cache=False)  # a list would hide that an object changes


@cache
def _range_of(tar: RemoteTar) -> Callable[[int, int], bytes]:
    """Open a tar file, once per process; return what reads a range of this version of it."""
    file_system, path = _file_system(tar.path)
    opened = file_system.open(path, "rb", cache_type="none")
    if tar.stamp_of(tar.path) != tar.stamp:
        raise OSError("it has changed")
    with suppress(Exception):  # plain HTTP takes a quarter of the CPU time of s3fs
        match = {"If-Match": file_system.info(path)["ETag"]}
        with suppress(NotImplementedError):
            path = file_system.sign(path, expiration=DAY)
        web, _ = _file_system(path)
        file = web.open(path, "rb", cache_type="none", size=tar.stamp[1], headers=match)
        file._fetch_range(0, 1)
        opened = file
    return getattr(opened, "_fetch_range", partial(file_system.cat_file, path))
