"""Images in tar files and lists equal those of the same folder, in the same order."""

import io
import os
import resource
import shutil
import tarfile
from pathlib import Path

import pytest

from conf.errors import UserError
from pipeline.data.index import Index, _opened, load_index
from tests.helpers.limits import soft_limit
from tests.helpers.stored import as_list, as_tar, as_tars

JPEG = b"\xff\xd8 content"


def write_tar(
    path: Path, *members: tarfile.TarInfo | str, format: int = tarfile.PAX_FORMAT
) -> Path:
    """Write a tar file whose members contain their own name."""
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            data = os.fsencode(info.name) if info.isreg() else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def header_of(path: Path, number: int) -> int:
    """Return the offset of a member's header."""
    with tarfile.open(path) as tar:
        return tar.getmembers()[number].offset


def special(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a/1.jpg"
    return info


def content(path: Path | str) -> list[tuple[str, bytes]]:
    return content_of(load_index(path, key="data.train"))


def content_of(index: Index) -> list[tuple[str, bytes]]:
    return [(index.name(i), index.read(i)) for i in range(len(index))]


def error_message(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_index(path, key="data.train")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("pack", "suffix"), [(as_tar, ".tar"), (as_tars, ""), (as_list, ".csv")])
def test_load_index_tar_and_csv_equal_folder(image_root, tmp_path, pack, suffix):
    split = image_root / "train"
    pack(split, tmp_path / f"train{suffix}")
    for path in tmp_path.rglob("*.*"):
        os.utime(path, (0, 0))
    folder = load_index(split, key="data.train")
    contents = [data for _, data in content_of(folder)]
    for _ in range(2):  # scanned, then read from the cache
        index = load_index(tmp_path / "train", key="data.train")
        assert index.classes == folder.classes
        assert [data for _, data in content_of(index)] == contents
        # A list keeps the paths that it contains.
        assert pack is as_list or index.digest == folder.digest


def test_tar_index_order_is_by_class(tmp_path):
    """`-` sorts before `/`, so a-b/ would come before a/."""
    members = ["a-b/1.jpg", "a/2.jpg", "a/10.jfif", "a/deep/3.jpg", "B/1.jpg"]
    for member in members:
        (tmp_path / "folder" / member).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / member).write_bytes(member.encode())
    write_tar(tmp_path / "packed.tar", *members)
    assert content(tmp_path / "packed") == content(tmp_path / "folder")


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_index_unusual_members(tmp_path, format):
    long = "a/" + "x" * 200 + ".JPEG"
    files = "./a/1.jpg", "a/._1.jpg", "a/.hidden/2.jpg", "a/notes.txt", "loose.jpg", long
    others = "b/\udcff\xe9.png", special("b/pipe.jpg", tarfile.FIFOTYPE)
    members = special("./a", tarfile.DIRTYPE), *files, *others
    path = write_tar(tmp_path / "train.tar", *members, format=format)
    assert dict(content(path)) == {
        "a/1.jpg": b"./a/1.jpg",
        long: long.encode(),
        "b/\udcff\xe9.png": b"b/\xff\xc3\xa9.png",
    }


@pytest.mark.parametrize("prefix", ["./", "./train/", "ILSVRC/Data/train/", "/data/"])
def test_tar_index_strips_outer_folders(tmp_path, prefix):
    write_tar(tmp_path / "train.tar", f"{prefix}a/x/1.jpg", f"{prefix}b/2.jpg", "readme.txt")
    assert [name for name, _ in content(tmp_path / "train")] == ["a/x/1.jpg", "b/2.jpg"]
    (tmp_path / "val").mkdir()
    write_tar(tmp_path / "val" / "0.tar", "val/1.jpg")  # a class with the split's name
    write_tar(tmp_path / "val" / "1.tar", "bus/1.jpg")
    assert [name for name, _ in content(tmp_path / "val")] == ["bus/1.jpg", "val/1.jpg"]


def test_tar_index_exceeds_open_file_limit(tmp_path):
    (tmp_path / "train").mkdir()
    for number in range(2300):
        write_tar(tmp_path / "train" / f"{number:04d}.tar", f"a/{number:04d}.jpg")
    index = load_index(tmp_path / "train", key="data.train")
    with soft_limit(resource.RLIMIT_NOFILE, len(os.listdir("/dev/fd")) + 30):  # like a worker
        assert [index.read(i) for i in range(2300)] == [b"a/%04d.jpg" % i for i in range(2300)]
        assert len(os.listdir("/dev/fd")) < 2300
        _opened.cache_clear()


def test_tar_read_detects_replaced_file(tmp_path):
    path = write_tar(tmp_path / "train.tar", "a/1.jpg")
    os.utime(path, (0, 0))
    index = load_index(tmp_path / "train", key="data")
    index.read(0)  # the file stays open
    write_tar(path, "a/22.jpg", *(f"b/{i}.jpg" for i in range(30)))
    os.utime(path, (0, 0))  # same mtime, different size
    with pytest.raises(OSError, match="has changed since the start"):
        index.read(0)
    assert len(content(tmp_path / "train")) == 31


def test_tar_index_rejects_damaged_file(image_root, tmp_path):
    as_tar(image_root / "train", tmp_path / "whole.tar")
    whole, damaged = (tmp_path / "whole.tar").read_bytes(), tmp_path / "train.tar"
    with tarfile.open(tmp_path / "whole.tar") as tar:
        last, second = tar.getmembers()[-1], tar.getmembers()[10].offset
    end = last.offset_data + (last.size + 511) // 512 * 512
    for length in (0, 100, second, second + 100, second + 600, end // 2, end - 1, end):
        damaged.write_bytes(whole[:length])
        assert error_message(tmp_path / "train").startswith(f"{damaged}: cannot be read at byte ")
    damaged.write_bytes(whole[:second] + b"\xff" * 10 + whole[second + 10 :])
    assert f"cannot be read at byte {second:,}" in error_message(tmp_path / "train")
    damaged.write_bytes(b"\x1f\x8b" + bytes(2000))
    assert "it may be damaged or compressed" in error_message(damaged)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_tar_index_rejects_zeros_within_file(blocks, tmp_path):
    """tarfile would drop all images behind them, and those of a second, appended file."""
    path = write_tar(tmp_path / "train.tar", *(f"a/{i}.jpg" for i in range(9)))
    whole, start = path.read_bytes(), header_of(path, 4)
    path.write_bytes(whole[:start] + bytes(512 * blocks) + whole[start + 512 * blocks :])
    assert f"{path}: cannot be read at byte {start:,}: neither a header" in error_message(path)
    path.write_bytes(whole + whole)
    assert "neither a header" in error_message(path)
    path.write_bytes(whole + bytes(512 * blocks))  # more padding, as `tar -b` writes
    assert len(content(path)) == 9


def test_tar_index_rejects_negative_size(tmp_path):
    """Older patch versions of Python read it forever (cpython#130577)."""
    path = write_tar(tmp_path / "train.tar", "a/1.jpg", "a/2.jpg")
    whole, start = path.read_bytes(), header_of(path, 1)
    header = bytearray(whole[start : start + 512])
    header[124:136] = (-512).to_bytes(12, "big", signed=True)  # back to this header
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(whole[:start] + header + whole[start + 512 :])
    assert f"{path}: cannot be read at byte {start:,}" in error_message(path)


def test_tar_index_rejects_members(tmp_path):
    path = tmp_path / "train.tar"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        write_tar(path, "a/1.jpg", special("a/2.jpg", kind))
        assert "a/2.jpg is a link; it may be damaged" in error_message(path)
    sparse = tarfile.TarInfo("a/2.bmp")
    sparse.pax_headers = {"GNU.sparse.map": "0,7", "GNU.sparse.size": "9000"}  # followed by zeros
    write_tar(path, "a/1.jpg", sparse)
    assert "a/2.bmp is sparse (tar --sparse), or of negative size; it may be" in error_message(path)
    write_tar(path, "a/1.jpg", "b/1.jpg", "./a/1.jpg")
    assert "./a/1.jpg occurs twice; it may be damaged" in error_message(path)
    write_tar(path, "000.jpg", "000.cls")
    assert "contains no <class>/<name> with an image suffix; convert" in error_message(path)
    (tmp_path / "val").mkdir()
    for number in range(2):
        write_tar(tmp_path / "val" / f"{number}.tar", "a/1.jpg", f"b/{number}.jpg")
    write_tar(path, "train/a/1.jpg", "val/a/1.jpg")
    assert "class folder train contains folders, like a split; " in error_message(path)
    assert error_message(tmp_path / "val").startswith("a/1.jpg: found in two of the tar files; ")


def test_load_index_prefers_folder(tmp_path):
    write_tar(tmp_path / "train.tar", "a/1.jpg")
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "2.jpg").write_bytes(JPEG)
    (tmp_path / "train.csv").write_text("train.tar,a")
    (tmp_path / "train" / "0.tar").touch()  # may be the file that was unpacked
    assert content(tmp_path / "train") == [("a/2.jpg", JPEG)]
    assert content(tmp_path / "train.tar") == [("a/1.jpg", b"a/1.jpg")]
    shutil.rmtree(tmp_path / "train")
    assert content(tmp_path / "train") == [("a/1.jpg", b"a/1.jpg")]
    assert "no such folder, .tar or .csv file; " in error_message(tmp_path / "trani")
    assert error_message(tmp_path / "trani.tar").endswith("; did you mean train.tar?")
    (tmp_path / "train.txt").write_text("1.jpg,a")
    assert not error_message(tmp_path / "train.txt").endswith("train.txt?")  # it exists


def test_csv_index_paths_and_errors(tmp_path):
    (tmp_path / "one, two.jpg").write_bytes(JPEG)
    (tmp_path / "three.jpg").write_bytes(JPEG)
    spaces = [" quoted.jpg", "\N{LINE SEPARATOR}plain.jpg"]  # belong to the names
    for name in spaces:
        (tmp_path / name).write_bytes(JPEG)
    text = f'\npath,label\n"one, two.jpg", "z"\n"{tmp_path / "three.jpg"}",a b\n./three.jpg,a b\n'
    text += f'"{spaces[0]}",z\n{spaces[1]}, z \n'
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "4.jpg").write_bytes(JPEG)
    (tmp_path / "train.csv").write_text(text, encoding="utf-8-sig")
    index = load_index(tmp_path / "train", key="data.train")
    assert (index.classes, [*dict(content_of(index)).values()]) == (("a b", "z"), [JPEG] * 4)
    for text, message in (
        ("image,Target\n", "contains no images"),  # no class of that name
        ("1.jpg,a\n2.jpg;a\n", "line 2 is not path,label"),
        ('"1.jpg,a\n2.jpg,a\n"3.jpg,b', "line 1: ',' expected after '\"'; correct its quotes"),
        ('1.jpg,a\n\n"2\n.jpg",a\n5.jpg,"b\n6.jpg,c\n', "line 5: unexpected end of data; correct"),
        ("a,1.jpg\nb,2.jpg", "line 1 is not path,label; write one image per line"),
        ("gone,a\nthree.jpg,a\n", "line 1: gone: no such file (1 of 2 images)"),  # no header
        ("label,path\na,1.jpg", "line 2 is not path,label; write one image per line"),
        ("path,label\nthree.jpg,a\nfour.jpg,a\n", "line 3: four.jpg: no such file (1 of 2 images)"),
        ("sub\\4.jpg,a\n", "sub\\4.jpg: no such file (1 of 1 images); remove the line, or"),
        (f"1.jpg,a\n{tmp_path}/1.jpg,b", "1.jpg has the label b, but a in"),
        ("1.jpg,a\n2.jpg,b\n./1.jpg,b", "line 3: ./1.jpg has the label b, but a in"),
    ):
        (tmp_path / "train.csv").write_text(text)
        found = error_message(tmp_path / "train")
        assert message in found and found.startswith(f"data.train={tmp_path}/train.csv: ")
    (tmp_path / "LIST.CSV").write_text("three.jpg\ta\n", "utf-16")  # as Excel's Unicode text
    assert "LIST.CSV: encoded in UTF-16; save it as" in error_message(tmp_path / "LIST.CSV")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_csv_index_accepts_only_regular_files(kind, tmp_path):
    """A pipe would block the process; a device may have no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.csv").write_text(f"path,label\n{kind},a\n")
    assert f"line 2: {kind}: no such file (1 of 1 images); remove the" in error_message(
        tmp_path / "train"
    )
