"""Sample table of a folder: accepted files, rejected folders, and a cache that is never stale."""

import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from conf.start import default_cache_dir
from pipeline.data import index as module
from pipeline.data.decode import FORMATS
from pipeline.data.index import load_index
from pipeline.data.listing import EXTENSIONS
from tests.helpers.limits import file_size_limit
from tests.helpers.stored import as_list, as_tar, samples


def make(folder: Path, *names: str | bytes) -> Path:
    """Create empty files and their folders; the scan reads only names."""
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x").close()
    return folder


def age(folder: Path) -> Path:
    """Set the mtime of all folders to one long ago."""
    for path in filter(Path.is_dir, [folder, *folder.rglob("*")]):
        os.utime(path, (0, 1.5e9))
    return folder


def paths(folder: Path) -> list[str]:
    return [path for _, path in samples(load_index(folder, key="data.train"))]


@contextmanager
def unseen_change(folder: Path) -> Iterator[None]:
    """Restore a folder's mtime after the `with` block, so only a new scan detects the change."""
    info = folder.stat()
    yield
    os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


ALIKE = {
    "case": ("Dog", "dog"),
    "space": ("dog", "dog "),
    "zero-width space": ("dog", "do\u200bg"),
    "NFC and NFD": ("caf\u00e9", "cafe\u0301"),
    "full width": ("dog", "\uff44og"),
    "Cyrillic": ("dog", "d\u043eg"),
    "leading zero": ("1", "01"),
}


PACKS = {"train": lambda *_: None, "list.csv": as_list, "images.tar": as_tar}


@pytest.mark.parametrize("names", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("place", PACKS)
def test_load_index_warns_of_class_names_that_look_alike(tmp_path, caplog, place, names):
    files = [f"{name}/1.jpg" for name in (*names, "cat")]
    PACKS[place](make(tmp_path / "train", *files), tmp_path / place)
    found = load_index(tmp_path / place, key="data.train")
    warnings = [text for text in caplog.messages if "look alike" in text]
    if len(found.classes) == 2:  # a list without spaces at the ends of labels
        assert (place, names) == ("list.csv", ALIKE["space"]) and not warnings
    else:
        (text,) = warnings
        assert all(" ".join(f"{ord(c):X}" for c in name) in text for name in names)
        assert repr("cat") not in text


def test_load_index_sorts_images_at_any_depth(tmp_path):
    """Labels equal those of torchvision's ImageFolder, sorted by bytes: 10 before 2."""
    names = [f"{c}/{n}.jpg" for c in ("b", "B", "10", "2", "é") for n in (10, 9, 1)]
    names += ["b/2.JPEG", "b/deep/er/3.png", "b/folder.jpg/8.webp", "b/new\nline.jpg"]
    names += ["b/\udcff\udcfe.jpg"]  # not UTF-8
    others = ["b/notes.txt", "b/5.jpg.part", "b/jpg", "readme.jpg"]
    others += ["b/.hid/6.jpg", "b/._7.jpg", ".git/7.jpg"]
    age(make(tmp_path / "one", *names, *others))
    make(tmp_path / "two", *reversed(names))
    expected = sorted(names, key=os.fsencode)
    for _ in range(2):  # scanned, then read from the cache
        index = load_index(tmp_path / "one", key="data.train")
        assert index.classes == ("10", "2", "B", "b", "é")
        assert samples(index) == [(name.split("/")[0], name) for name in expected]
        assert all(os.path.isfile(index.path(i)) for i in range(len(index)))
    assert paths(tmp_path / "two") == expected


def test_load_index_follows_links(tmp_path):
    """Links may be circular or dangling; a class counts each folder once."""
    store = make(tmp_path / "store", "deep/2.jpg", "3.jpg")
    root = make(tmp_path / "root", "a/1.jpg", "b/1.jpg")
    for name, target in (("x", store / "deep"), ("y", store), ("z", store), ("self", Path("."))):
        (root / "a" / name).symlink_to(target)
    for place in ("up", "a/up"):  # to the images of all classes
        (root / place).symlink_to("..")
    (root / "b" / "linked.jpg").symlink_to(store / "3.jpg")
    lost = {"b/lost.jpg": "nowhere", "b/self.jpg": "self.jpg", "self": "self", "b/x": "1.jpg/x"}
    for place, target in lost.items():
        (root / place).symlink_to(target)
    os.mkfifo(root / "b" / "pipe.jpg")  # blocks the process that opens it
    assert paths(root) == ["a/1.jpg", "a/x/2.jpg", "a/y/3.jpg", "b/1.jpg", "b/linked.jpg"]
    index = load_index(root, key="data.train")
    reasons = "link to a folder listed already, or to a parent (5), not a regular file (5)"
    assert index.ignored.startswith(f"ignored files or folders: {reasons}, such as ")


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_load_index_counts_skipped_files(kind, tmp_path, caplog):
    """The rule is the same for folders and tar files, and for scans from the cache."""
    images = ["a/1.jfif", "a/2.JPE", "a/3.pnm", "b/1.jpg"]
    others = ["a/1.heic", "a/2.HEIC", "a/3", "b/._1.jpg", "b/@eaDir/M.jpg", "__MACOSX/b/1.jpg"]
    root = age(make(tmp_path / "train", *images, *others, "1.jpg", "readme.txt"))  # no image
    if kind == "tar":
        with tarfile.open(tmp_path / "train.tar", "w") as tar:
            tar.add(root, ".")
        shutil.rmtree(root)
        os.utime(tmp_path / "train.tar", (0, 0))
    for _ in range(2):
        caplog.clear()
        assert paths(root) == images
        (said,) = (text for text in caplog.messages if "ignored files" in text)
        reasons = "hidden or system (3), .heic (2), not in a class folder (1), no suffix (1)"
        assert f": ignored files or folders: {reasons}, such as " in said
        assert "__MACOSX" in said


def test_extensions_equal_decoded_formats():
    kinds = {*FORMATS, "MPO"}
    found = {end for end, kind in Image.registered_extensions().items() if kind in kinds}
    assert {*map(os.fsdecode, EXTENSIONS)} == found - {".pfm"}


@pytest.mark.parametrize(
    ("new", "gone"),
    [
        (["b/4.jpg"], []),
        (["b/deep/4.jpg"], []),
        (["d/5.jpg"], []),
        (["c/10.jpg"], []),  # c is a link
        ([], ["a/2.jpg"]),
    ],
)
def test_index_cache_rescans_changed_folder(tmp_path, new, gone):
    root = make(tmp_path / "root", "a/1.jpg", "a/2.jpg", "b/deep/3.jpg")
    (root / "c").symlink_to(make(tmp_path / "other", "9.jpg"))
    age(root)
    age(tmp_path / "other")
    first = load_index(root, key="data.train")
    with unseen_change(root / "a"):
        make(root, "a/unseen.jpg")  # only a new scan finds it
    assert load_index(root, key="data.train").digest == first.digest
    make(root, *new)
    for name in gone:
        (root / name).unlink()
    files = {"a/1.jpg", "a/2.jpg", "a/unseen.jpg", "b/deep/3.jpg", "c/9.jpg", *new}
    assert paths(root) == sorted(files.difference(gone))


def test_index_cache_skips_recently_changed_folder(tmp_path):
    root = age(make(tmp_path / "root", "a/1.jpg", "b/2.jpg"))
    assert paths(root) == ["a/1.jpg", "b/2.jpg"]
    make(root, "b/3.jpg")
    os.utime(root / "b", ns=(0, 10**18))  # a backup's mtime, not newer but different
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg"]
    make(root, "b/4.jpg")  # now; a later file in this clock tick would not change b's mtime
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg", "b/4.jpg"]
    with unseen_change(root / "b"):
        make(root, "b/5.jpg")
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg", "b/4.jpg", "b/5.jpg"]


def test_index_cache_rescans_dangling_link(tmp_path):
    root = make(tmp_path / "root", "a/1.jpg", "b/2.jpg")
    (root / "b" / "3.jpg").symlink_to(tmp_path / "3.jpg")
    age(root)
    assert paths(root) == ["a/1.jpg", "b/2.jpg"]
    shutil.copy(root / "a" / "1.jpg", tmp_path / "3.jpg")
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg"]


def test_index_cache_ignores_damaged_file(tmp_path, cache, monkeypatch):
    root = age(make(tmp_path / "root", "a/1.jpg", "b/2.jpg", "b/3.jpg"))
    expected = paths(root)
    (stored,) = cache.glob("*.npz")
    good, rng = stored.read_bytes(), random.Random(0)
    files = [b"", b"<html>quota exceeded</html>", good[: len(good) // 2]]
    for place in rng.choices(range(len(good)), k=80):
        files.append(good[:place] + bytes([good[place] ^ 128]) + good[place + 1 :])
    for damaged in files:
        stored.write_bytes(damaged)
        assert paths(root) == expected
    monkeypatch.setattr(module, "CACHE_FORMAT", module.CACHE_FORMAT + 1)
    with unseen_change(root / "b"):
        make(root, "b/4.jpg")
    assert paths(root) == [*expected, "b/4.jpg"]
    # One file per format, written under a temporary name and renamed.
    assert len(os.listdir(cache)) == 2
    assert stored.name in os.listdir(cache)


def test_index_cache_unwritable_is_one_warning(tmp_path, cache, caplog):
    root = age(make(tmp_path / "root", "a/1.jpg"))
    with file_size_limit(100):
        assert paths(root) == ["a/1.jpg"]
    assert not list(cache.iterdir())  # no temporary file is left
    assert ["cannot write the cache" in text for text in caplog.messages] == [True]


def test_default_cache_dir(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    root, temporary = age(make(tmp_path / "root", "a/1.jpg")), f"imagenet-trainer-{os.geteuid()}"
    for given, folder in (("", ".cache/imagenet-trainer"), (f"{tmp_path}/file", temporary)):
        monkeypatch.setenv("XDG_CACHE_HOME", given)  # the file is not a folder, like a missing home
        assert default_cache_dir() == tmp_path / folder
        assert (tmp_path / folder).is_dir()
        assert paths(root) == ["a/1.jpg"]
        assert list((tmp_path / folder).glob("*.npz"))
