"""Containers: what tarfile and zipfile read, after a kill at any byte."""

import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from conf.schema import UserError
from scripts.lib import destination
from scripts.lib.destination import CONTAINERS, ContainerWriter

MEMBERS = {
    "n01/a.JPEG": b"a" * 700,
    "n01/" + "long" * 40 + ".JPEG": b"b" * 512,  # more than the 100 bytes of a tar header
    "n02/ünder score.JPEG": b"",
    "n03/d.JPEG": b"PK\3\4" * 300,
}


def read(path: Path) -> dict[str, bytes]:
    """Read a container with the standard library."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        return {name: file.read() for name, file in members.items() if file}


def opened(path: Path) -> ContainerWriter:
    return CONTAINERS[path.suffix[1:]](str(path))


def write(path: Path, members: dict[str, bytes] = MEMBERS) -> None:
    container = opened(path)
    for name, data in members.items():
        if name not in container.sizes:
            container.add(name, data)
    container.finish()


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_standard_library_reads_a_container(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"train.{kind}"
    write(path)
    assert read(path) == MEMBERS
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert opened(path).sizes == {name: len(data) for name, data in MEMBERS.items()}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_cut_at_any_byte_is_completed(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"whole.{kind}")
    whole = (tmp_path / f"whole.{kind}").read_bytes()
    path = tmp_path / f"train.{kind}"
    for length in [*range(0, len(whole), 97), len(whole)]:
        path.unlink(missing_ok=True)
        Path(f"{path}.partial").write_bytes(whole[:length])
        write(path)
        assert path.read_bytes() == whole, length


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_later_run_adds_to_a_complete_container(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{kind}"
    write(path, dict(list(MEMBERS.items())[:2]))
    write(path)
    write(tmp_path / f"whole.{kind}")
    assert path.read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()


def test_offsets_above_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "train.zip"
    container = opened(path)
    assert isinstance(container, destination.Zip)
    container.add("a/first.jpg", b"first")
    container._end = 5 << 30  # a hole in the file
    container.add("a/second.jpg", b"second")
    container.finish()
    assert path.stat().st_size > 5 << 30
    with zipfile.ZipFile(path) as archive:
        assert archive.read("a/second.jpg") == b"second" and archive.read("a/first.jpg") == b"first"


def test_more_than_65535_members(tmp_path: Path) -> None:
    members = {f"{i:05d}.jpg": b"" for i in range(65_537)}
    write(tmp_path / "train.zip", members)
    with zipfile.ZipFile(tmp_path / "train.zip") as archive:
        assert archive.namelist() == list(members)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"a/\xff.jpg")
    write(tmp_path / "train.tar", {name: b"data"})
    assert opened(tmp_path / "train.tar").sizes == {name: 4}
    assert read(tmp_path / "train.tar") == {name: b"data"}
    with pytest.raises(UserError, match=r"^--format zip: the name a/.xff\.jpg is not UTF-8; "):
        destination.check_names([name])
