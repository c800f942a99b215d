"""The sample table: accepted files, refused folders, and a cache that is never stale."""

import contextlib
import io
import os
import random
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from conf.files import default_cache_dir
from conf.schema import UserError
from pipeline.index import Index, check_splits, load_index

NOBODY = 65534  # root may read and write what permissions forbid


def make(folder: Path, *names: str | bytes) -> Path:
    """Create empty files and their folders; the scan reads names only."""
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x").close()
    return folder


def settle(folder: Path) -> Path:
    """Set the mtime of every folder to an hour ago."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            info = path.stat()
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns - 3600 * 10**9))
    return folder


def content(index: Index) -> list[tuple[str, str]]:
    """(class, path below the root) of every sample."""
    labels = index.labels.array.tolist()
    return [
        (index.classes[labels[i]], os.path.relpath(index.path(i), index.root))
        for i in range(len(index))
    ]


def paths(folder: Path, **options: Path) -> list[str]:
    return [path for _, path in content(load_index(folder, key="data.train", **options))]


@contextmanager
def unseen_change(folder: Path) -> Iterator[None]:
    """Restore the mtime of a folder after the `with` block: only a new scan sees the change."""
    info = folder.stat()
    yield
    os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


@contextmanager
def as_other_user() -> Iterator[Path]:
    """Give a folder to another user, and become that user within the `with` block if permitted."""
    with tempfile.TemporaryDirectory() as folder:
        own = os.geteuid()
        if own == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if own == 0:
                os.seteuid(0)


# What an image is.


def test_index_lists_every_image_once_in_order_with_its_label(image_root: Path) -> None:
    index = load_index(image_root / "train", key="data.train")
    assert index.classes == ("checks", "dots", "stripes")
    assert content(index) == [
        (name, f"{name}/{i:02d}.jpg") for name in index.classes for i in range(12)
    ]
    assert all(os.path.isfile(index.path(i)) for i in range(len(index)))


def test_order_follows_the_names_not_the_disk(tmp_path: Path) -> None:
    names = [f"{c}/{n}.jpg" for c in "acbd" for n in (10, 9, 1, 2)]
    make(tmp_path / "one", *names)
    make(tmp_path / "two", *reversed(names))
    assert paths(tmp_path / "one") == paths(tmp_path / "two") == sorted(names)


def test_only_images_are_listed_at_any_depth(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a/1.jpg",
        "a/2.JPEG",
        "a/deep/er/3.png",
        "a/4.webp",
        "a/notes.txt",
        "a/5.jpg.part",
        "a/jpg",
        "readme.jpg",
    )
    make(tmp_path, "a/.hidden/6.jpg", ".git/7.jpg", "a/folder.jpg/8.jpg")
    assert paths(tmp_path) == [
        "a/1.jpg",
        "a/2.JPEG",
        "a/4.webp",
        "a/deep/er/3.png",
        "a/folder.jpg/8.jpg",
    ]


def test_linked_folders_are_listed_once_and_special_files_never(tmp_path: Path) -> None:
    make(tmp_path, "root/a/1.jpg", "elsewhere/2.jpg", "elsewhere/sub/3.jpg")
    a = tmp_path / "root" / "a"
    (a / "loop").symlink_to(a)
    (a / "up").mkdir()
    (a / "up" / "loop").symlink_to("..")
    (tmp_path / "root" / "self").symlink_to("self")
    (a / "linked.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    assert paths(tmp_path / "root") == ["a/1.jpg", "a/linked.jpg", "b/2.jpg", "b/sub/3.jpg"]


SPECIAL = ("dangling.jpg (a dangling link)", "pipe.JPG (a FIFO)", "self.jpg (a link to itself)")


def make_special_files(folder: Path) -> None:
    (folder / "dangling.jpg").symlink_to("nowhere.jpg")
    (folder / "self.jpg").symlink_to("self.jpg")
    os.mkfifo(folder / "pipe.JPG")
    os.mkfifo(folder / "pipe.txt")  # does not count: its name is not that of an image
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("socket.jpg")  # a path to a socket is limited to 107 bytes


def test_special_files_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the scan and at each later start, which reads the cached scan."""
    images = [f"a/{number:03d}.jpg" for number in range(396)]
    root = make(tmp_path / "root", *images)
    make_special_files(root / "a")
    settle(root)
    named = ", ".join(f"a/{text}" for text in SPECIAL)
    for start in range(2):
        assert paths(root) == images
        expected = f"data.train={root}: 4 of 400 images are not regular files: {named}, ...; they "
        assert len(caplog.messages) == start + 1 and caplog.messages[start].startswith(expected)


def test_a_link_to_a_disk_that_is_mounted_later(tmp_path: Path) -> None:
    """The scan with a dangling link is cached, but not used once the link leads to a file."""
    images = [f"a/{number:03d}.jpg" for number in range(1, 100)]
    root = make(tmp_path / "root", *images)
    (root / "a" / "000.jpg").symlink_to(tmp_path / "disk" / "0.jpg")
    settle(root)
    assert paths(root) == images
    make(tmp_path / "disk", "0.jpg")
    assert paths(root) == ["a/000.jpg", *images]


def test_entries_left_out_are_looked_at_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each may take a millisecond on network storage, at every start."""
    root = make(tmp_path / "root", *(f"a/{number:03d}.jpg" for number in range(396)))
    for number in range(4):
        (root / "a" / f"gone{number}.jpg").symlink_to("nowhere.jpg")
    settle(root)
    load_index(root, key="data.train")
    caplog.clear()
    all_at_once, isfile = threading.Barrier(4, timeout=10), os.path.isfile

    def waiting(path: str | bytes) -> bool:
        if b"gone" in os.fsencode(path):
            all_at_once.wait()
        return isfile(path)

    monkeypatch.setattr(os.path, "isfile", waiting)
    load_index(root, key="data.train")
    assert len(caplog.messages) == 1 and "are left out" in caplog.messages[0]


@pytest.mark.parametrize("images", [395, 0])
def test_more_than_a_hundredth_of_special_files_is_refused(tmp_path: Path, images: int) -> None:
    """Also if they are all: links to a disk that is not mounted."""
    root = make(tmp_path / "root", *(f"a/{number:03d}.jpg" for number in range(images)), "a/x.txt")
    make_special_files(root / "a")
    settle(root)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            load_index(root, key="data.train")
        assert str(error.value).startswith(
            f"data.train={root}: 4 of {images + 4} images are not regular files: a/{SPECIAL[0]}, "
        )
        assert str(error.value).endswith("; restore or remove them")


def test_classes_are_sorted_by_bytes_as_in_torchvision(tmp_path: Path) -> None:
    """Labels equal those of torchvision's ImageFolder: upper before lower case, 10 before 2."""
    make(tmp_path, *(f"{name}/1.jpg" for name in ("a", "B", "b", "2", "10", "_", "é")))
    index = load_index(tmp_path, key="data.train")
    assert (
        index.classes == tuple(sorted(os.listdir(tmp_path))) == ("10", "2", "B", "_", "a", "b", "é")
    )
    assert content(index) == [(name, f"{name}/1.jpg") for name in index.classes]


# Links between folders.


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("stored", ["here", "classes elsewhere", "root elsewhere"])
def test_link_to_a_parent_folder_adds_nothing(
    tmp_path: Path, depth: int, absolute: bool, stored: str
) -> None:
    """The class itself, the split, the folder of both splits, and its parent."""
    store = make(
        tmp_path / "store",
        "data/train/a/1.jpg",
        "data/train/b/2.jpg",
        "data/val/a/3.jpg",
        "more/c/4.jpg",
    )
    train = store / "data" / "train"
    parents = [train / "a", train, store / "data", store]
    if stored == "classes elsewhere":
        train = tmp_path / "split"
        train.mkdir()
        for name in "ab":
            (train / name).symlink_to(store / "data" / "train" / name)
    elif stored == "root elsewhere":
        make(tmp_path / "view", "other/5.jpg")
        (tmp_path / "view" / "link").symlink_to(store)
        train = tmp_path / "view" / "link" / "data" / "train"
        if absolute:  # the parents by the path that was given
            parents = [train / "a", train, train.parent, tmp_path / "view"]
    (store / "data" / "train" / "a" / "up").symlink_to(
        parents[depth] if absolute else "/".join([".", *[".."] * depth])
    )
    assert paths(train) == ["a/1.jpg", "b/2.jpg"]


def test_link_out_of_a_linked_folder_to_its_parent_adds_nothing(tmp_path: Path) -> None:
    store = make(tmp_path / "store", "deep/2.jpg", "3.jpg")
    (store / "deep" / "up").symlink_to("..")
    root = make(tmp_path / "root", "a/1.jpg")
    (root / "a" / "more").symlink_to(store / "deep")
    assert paths(root) == ["a/1.jpg", "a/more/2.jpg"]


def test_folder_with_two_links_in_a_class_is_listed_once(tmp_path: Path) -> None:
    store = make(tmp_path / "store", "deep/2.jpg", "3.jpg")
    root = make(tmp_path / "root", "a/1.jpg")
    for name, target in (("x", store / "deep"), ("y", store), ("z", store)):
        (root / "a" / name).symlink_to(target)
    assert paths(root) == ["a/1.jpg", "a/x/2.jpg", "a/y/3.jpg"]


@pytest.mark.parametrize(
    ("links", "one", "other"),
    [
        ({"b": "store"}, None, None),  # a class that lies elsewhere
        ({"a/more": "store", "b/more": "other"}, None, None),
        ({"b": "store", "d": "store"}, "b", "d"),
        ({"b": "root/a"}, "a", "b"),
        ({"a/more": "root/c"}, "a/more", "c"),
        ({"c/more": "root/a"}, "a", "c/more"),
        ({"a/more": "root/c/deep"}, "a/more", "c/deep"),
        ({"a/more": "store", "c/some": "store/sub"}, "a/more/sub", "c/some"),
    ],
)
def test_folder_in_two_classes_is_refused(
    tmp_path: Path, links: dict[str, str], one: str | None, other: str | None
) -> None:
    make(
        tmp_path,
        "root/a/1.jpg",
        "root/c/deep/2.jpg",
        "store/3.jpg",
        "store/sub/4.jpg",
        "other/5.jpg",
    )
    root = tmp_path / "root"
    for name, target in links.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(tmp_path / target)
    if one is None:
        assert len(paths(root)) == (4 if "b" in links else 5)
        return
    with pytest.raises(UserError) as error:
        load_index(root, key="data.train")
    assert str(error.value) == (
        f"data.train={root}: {one} and {other} are the same folder, "
        "so its images would have two labels; remove the link that is wrong"
    )


def test_undecodable_and_unusual_names(tmp_path: Path) -> None:
    names = [
        b"caf\xe9/\xff\xfe.jpg",
        b"caf\xe9/new\nline.jpg",
        "日本/ü ber.jpg".encode(),
        b"-x/$(rm).jpg",
    ]
    settle(make(tmp_path / "root", *names))
    for _ in range(2):  # scanned, then read from the cache
        index = load_index(tmp_path / "root", key="data.train")
        assert sorted(os.fsencode(path) for _, path in content(index)) == sorted(names)
        assert sorted(os.fsencode(name) for name in index.classes) == [
            b"-x",
            b"caf\xe9",
            "日本".encode(),
        ]
        assert all(os.path.isfile(index.path(i)) for i in range(len(index)))
        assert len(index.fingerprint()) == 64


# What is refused, with the key and what to do.


def test_missing_root_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "file")
    for root in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(UserError, match=f"^data.val={root}: no such folder"):
            load_index(root, key="data.val")


def test_folder_without_classes_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "1.jpg", ".cache/2.jpg")
    with pytest.raises(UserError, match=f"^data.train={tmp_path}: no class folders"):
        load_index(tmp_path, key="data.train")


def test_empty_class_is_named(tmp_path: Path) -> None:
    make(tmp_path, "full/1.jpg", "hollow/readme.txt")
    with pytest.raises(UserError, match=r"^data.train=.*: class folder hollow holds no images"):
        load_index(tmp_path, key="data.train")
    make(tmp_path, "also/sub/notes.txt")
    with pytest.raises(UserError, match=r"class folder also and 1 more holds no images"):
        load_index(tmp_path, key="data.train")


def test_class_missing_in_one_split_is_named(tmp_path: Path) -> None:
    make(
        tmp_path,
        "train/a/1.jpg",
        "train/b/1.jpg",
        "val/a/1.jpg",
        "val/b/1.jpg",
        "more/a/1.jpg",
        "more/b/1.jpg",
    )
    make(tmp_path, "more/xylophone/1.jpg", *(f"many/{name}/1.jpg" for name in "abcdefghi"))
    train, val, more, many = (
        load_index(tmp_path / name, key="data") for name in ("train", "val", "more", "many")
    )
    check_splits(train, val)
    with pytest.raises(
        UserError, match=r"^data.val=.*/val: has no class xylophone, which train has"
    ):
        check_splits(more, val)
    with pytest.raises(
        UserError, match=r"^data.train=.*/train: has no class xylophone, which val has"
    ):
        check_splits(train, more)
    with pytest.raises(UserError, match=r"has no class c, d, e, f, g and 2 more, which"):
        check_splits(many, val)


def test_unreadable_folder_is_refused(tmp_path: Path) -> None:
    with as_other_user() as root:
        make(root, "a/1.jpg", "b/2.jpg")
        (root / "b").chmod(0)
        with pytest.raises(UserError, match=rf"^data.train={root}: cannot be read .*{root}/b"):
            load_index(root, key="data.train", cache_dir=tmp_path)
        (root / "b").chmod(0o700)


# The cache.


def test_scan_is_cached_and_reused(tmp_path: Path) -> None:
    root = settle(make(tmp_path / "root", "a/1.jpg", "b/deep/2.jpg"))
    first = load_index(root, key="data.train")
    with unseen_change(root / "a"):
        make(root, "a/unseen.jpg")
    again = load_index(root, key="data.train")
    assert content(again) == content(first) == [("a", "a/1.jpg"), ("b", "b/deep/2.jpg")]
    assert again.fingerprint() == first.fingerprint()
    assert paths(root, cache_dir=tmp_path / "another cache") == [
        "a/1.jpg",
        "a/unseen.jpg",
        "b/deep/2.jpg",
    ]


@pytest.mark.parametrize(
    "change", ["file", "deep file", "removed", "class", "moved", "older", "link"]
)
def test_changed_folder_is_scanned_again(tmp_path: Path, change: str) -> None:
    make(tmp_path / "other", "9.jpg")
    root = make(tmp_path / "root", "a/1.jpg", "a/2.jpg", "b/deep/3.jpg")
    (root / "c").symlink_to(tmp_path / "other")
    settle(root)
    settle(tmp_path / "other")
    kept = ["a/1.jpg", "a/2.jpg", "b/deep/3.jpg", "c/9.jpg"]
    assert paths(root) == kept
    with unseen_change(root / "a"):
        make(root, "a/unseen.jpg")  # only a new scan finds it
    assert paths(root) == kept
    if change == "file":
        make(root, "b/4.jpg")
        kept.append("b/4.jpg")
    elif change == "deep file":
        make(root, "b/deep/4.jpg")
        kept.append("b/deep/4.jpg")
    elif change == "removed":
        (root / "a" / "2.jpg").unlink()
        kept.remove("a/2.jpg")
    elif change == "class":
        make(root, "d/5.jpg")
        kept.append("d/5.jpg")
    elif change == "moved":
        (root / "b" / "deep" / "3.jpg").rename(root / "b" / "3.jpg")
        kept[kept.index("b/deep/3.jpg")] = "b/3.jpg"
    elif change == "older":  # restored from a backup: not newer, but not the same
        os.utime(root / "b", ns=(0, 10**18))
    elif change == "link":
        make(tmp_path / "other", "10.jpg")
        kept.append("c/10.jpg")
    assert paths(root) == sorted([*kept, "a/unseen.jpg"])


def test_recently_changed_folder_is_not_cached(tmp_path: Path) -> None:
    root = settle(make(tmp_path / "root", "a/1.jpg", "b/2.jpg"))
    make(root, "b/3.jpg")  # now: another file in this tick of the clock would not move b's mtime
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg"]
    with unseen_change(root / "b"):
        make(root, "b/4.jpg")
    assert paths(root) == ["a/1.jpg", "b/2.jpg", "b/3.jpg", "b/4.jpg"]


def test_each_root_has_its_own_cache(tmp_path: Path) -> None:
    for name in ("one", "two"):
        settle(make(tmp_path / name, f"{name}/{name}.jpg"))
    for _ in range(2):
        assert paths(tmp_path / "one") == ["one/one.jpg"]
        assert paths(tmp_path / "two") == ["two/two.jpg"]


def test_relative_root_is_the_same_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(make(tmp_path / "root", "a/1.jpg"))
    monkeypatch.chdir(tmp_path)
    index = load_index("root", key="data.train", cache_dir=tmp_path / "cache")
    assert index.root == str(tmp_path / "root")
    load_index(tmp_path / "root" / "", key="data.train", cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_damaged_cache_is_scanned_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = settle(make(tmp_path / "root", "a/1.jpg", "b/2.jpg", "b/3.jpg"))
    expected = paths(root, cache_dir=tmp_path)
    (cache,) = tmp_path.glob("*.npz")
    good, rng = cache.read_bytes(), random.Random(0)
    damaged = [good[: rng.randrange(len(good))] for _ in range(25)]
    damaged += [b"", b"\0" * len(good), b"<html>quota exceeded</html>", good + good]
    for _ in range(50):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    with np.load(io.BytesIO(good)) as stored:
        for name in stored:  # as if the directory of the zip file had lost a member
            file = io.BytesIO()
            np.savez(file, **{other: stored[other] for other in stored if other != name})
            damaged.append(file.getvalue())
    for data in damaged:
        caplog.clear()
        cache.write_bytes(data)
        assert paths(root, cache_dir=tmp_path) == expected
        assert all(
            f"index cache {cache} cannot be read" in record.message for record in caplog.records
        )
    assert cache.stat().st_size >= len(good)  # written anew


def test_interrupted_write_leaves_no_partial_cache(tmp_path: Path) -> None:
    """The cache is written under another name and renamed."""
    root, cache = settle(make(tmp_path / "root", "a/1.jpg")), tmp_path / "cache"
    paths(root, cache_dir=cache)
    (kept,) = cache.iterdir()
    half = kept.rename(cache / "tmpabc.tmp")
    half.write_bytes(half.read_bytes()[:100])
    assert paths(root, cache_dir=cache) == ["a/1.jpg"]
    assert kept.exists()


@pytest.mark.parametrize("fault", ["file in the way", "read-only", "disk full"])
def test_unwritable_cache_is_one_warning(caplog: pytest.LogCaptureFixture, fault: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with as_other_user() as folder:
        root, cache = settle(make(folder / "root", "a/1.jpg")), folder / "cache"
        if fault == "file in the way":
            make(folder, "cache")
        elif fault == "read-only":
            cache.mkdir(mode=0o500)
        try:
            if fault == "disk full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            assert paths(root, cache_dir=cache) == ["a/1.jpg"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not cache.is_dir() or not list(cache.iterdir())  # no temporary file is left either
    written = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(written) == 1
    assert str(cache) in written[0]


def test_scan_works_without_a_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/nonexistent")
    if os.geteuid() == 0:  # could create it
        monkeypatch.setenv("HOME", str(make(tmp_path, "file") / "file"))
    assert paths(settle(make(tmp_path / "root", "a/1.jpg"))) == ["a/1.jpg"]


@pytest.mark.parametrize("given", ["", "relative"])
def test_cache_folder_is_absolute(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification: "If an implementation encounters a relative path, ignore it"."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path("/home/me/.cache/imagenet-trainer")
    monkeypatch.setenv("HOME", "nowhere")
    with pytest.raises(UserError, match="no home folder for the cache; set HOME or XDG_CACHE"):
        default_cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache_dir() == Path("/cache/imagenet-trainer")


# The fingerprint.


def test_fingerprint_depends_on_the_samples_not_on_their_root(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return load_index(folder, key="data.train").fingerprint()

    base = make(tmp_path / "base", "a/1.jpg", "a/2.jpg", "b/3.jpg")
    moved = shutil.copytree(base, tmp_path / "else" / "where")
    assert fingerprint(moved) == fingerprint(base)

    changed = {"base": fingerprint(base)}
    changed["renamed file"] = fingerprint(make(tmp_path / "1", "a/1.jpg", "a/2b.jpg", "b/3.jpg"))
    changed["renamed class"] = fingerprint(make(tmp_path / "2", "a/1.jpg", "a/2.jpg", "c/3.jpg"))
    changed["one more"] = fingerprint(
        make(tmp_path / "3", "a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg")
    )
    changed["one fewer"] = fingerprint(make(tmp_path / "4", "a/1.jpg", "b/3.jpg"))
    changed["other class"] = fingerprint(make(tmp_path / "5", "a/1.jpg", "b/2.jpg", "b/3.jpg"))
    changed["other cut"] = fingerprint(make(tmp_path / "6", "a/1.jpga/2.jpg", "b/3.jpg"))
    assert len(set(changed.values())) == len(changed)
