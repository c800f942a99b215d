"""What a split holds: the images in a folder, in tar files or in a list, and what is left out."""

import csv
import os
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import UserError

# The endings that Pillow registers for decode.FORMATS; but not .pfm, whose levels have 32 bits.
EXTENSIONS = tuple(
    b".jpg .jpeg .png .webp .bmp .ppm .pgm .pbm .pnm .tif .tiff .gif .jfif .jpe .mpo .apng".split()
)
# How the names of files and folders begin that are not the user's: hidden ones, as ._name of macOS,
# and folders of macOS, Synology, QNAP, Windows and ext4.
HIDDEN_NAMES = tuple(
    b". __MACOSX @eaDir #recycle #snapshot @Recycle $RECYCLE.BIN lost+found".split()
)
# Words in the names of files, and first words of those of folders -> the split that they name.
SPLITS = dict.fromkeys(["train", "training"], "train")
SPLITS |= dict.fromkeys(["val", "valid", "validation", "dev"], "val")
SPLITS |= dict.fromkeys(["test", "testing"], "test")
THREADS = 16  # hide the latency of a network file system: 1,000 folders in sequence take minutes
# Why a file or folder is left out.
LOOSE = "in no class folder"
HIDDEN = "hidden, or of the system"
TWICE = "link to a folder that is listed, or to one around it"  # which holds all classes
IRREGULAR = "not a regular file"  # a pipe blocks the process that opens it; a link may lead nowhere
BLOCK = 512  # bytes of a header in a tar file; two blocks of zeros end the file
PADDING = 1 << 24  # most bytes of zeros at the end; tar pads to 10 kB, or what `-b` says
LeftOut = dict[bytes, str]  # path of a file or folder that is not read -> reason
Paths = list[bytes]
Classes = dict[bytes, Paths]  # name -> sorted paths of its images; sorted by name
Places = dict[bytes, tuple[int, int, int]]  # path -> source, offset and length, as in Index.places
Members = dict[bytes, tuple[int, int]]  # name in a tar file -> offset and length in bytes
# What tarfile raises for a damaged header
DAMAGED = (ArithmeticError, LookupError, MemoryError, tarfile.TarError, TypeError, ValueError)


def is_hidden(name: bytes) -> bool:
    return name.startswith(HIDDEN_NAMES)


def first_word(name: str) -> str:
    """Return the letters with which a name begins, as `training` of Training_set."""
    return "".join(takewhile(str.isalpha, name.lower()))


def is_image(path: bytes) -> bool:
    """Whether a file is taken for an image, if it is not hidden."""
    return path.lower().endswith(EXTENSIONS)


def why_left_out(path: bytes) -> str:
    """Return why a file or folder is not read; "" if it is an image."""
    if any(map(is_hidden, path.split(b"/"))):
        return HIDDEN
    if is_image(path):
        return ""
    ending = os.path.splitext(path)[1]
    return os.fsdecode(ending.lower()) or "no ending"


def describe_left_out(left_out: LeftOut) -> str:
    """Describe in one line what is not read and why, commonest reasons first; "" for nothing."""
    if not left_out:
        return ""
    by_reason = defaultdict(list)
    for path in sorted(left_out):
        by_reason[left_out[path]].append(path)
    commonest = sorted(by_reason, key=lambda reason: -len(by_reason[reason]))
    reasons = ", ".join(f"{reason} ({len(by_reason[reason]):,})" for reason in commonest[:5])
    example = os.fsdecode(by_reason[commonest[0]][0])
    text = f"files or folders that are not read: {reasons}, such as {example}"
    return " ".join(f"{text}; rename or convert what should be read".split())


def walk(top: bytes, left_out: LeftOut) -> Iterator[tuple[bytes, Paths, Paths]]:
    """Yield each folder from `top` on with the paths of its folders and regular files, sorted.

    The order is depth first. Links are followed. They may lead in a circle, or to a folder around
    `top`, so a folder comes once, and those around it never. What is not read, whatever its ending,
    is added to `left_out`. Only links and folders cost a call: the kind of a file comes with it.
    """
    path = Path(os.fsdecode(top))
    around = {path, *path.absolute().parents, *path.resolve().parents}
    seen = set(map(_identity, around))
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        folders: Paths = []
        files: Paths = []
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=attrgetter("name")):
                if is_hidden(entry.name):
                    left_out[entry.path] = HIDDEN
                elif entry.is_file():
                    files.append(entry.path)
                elif not entry.is_dir():
                    left_out[entry.path] = IRREGULAR
                elif _identity(entry.path) in seen:
                    left_out[entry.path] = TWICE
                else:
                    seen.add(_identity(entry.path))
                    folders.append(entry.path)
        yield folder, folders, files
        waiting += reversed(folders)


def _identity(folder: bytes | Path) -> tuple[int, int]:
    """Return the device and the number of a folder, which are the same through any link."""
    info = os.stat(folder)
    return info.st_dev, info.st_ino


def contents_of(top: bytes, left_out: LeftOut, base: bytes = b"") -> tuple[Paths, Paths]:
    """Return the images in `top` and below it, and all folders, in the order of `walk`.

    Adds what is not read to `left_out`. `base`: the beginning that the paths of images leave out.
    """
    images = []
    folders = []
    for folder, _, files in walk(top, left_out):
        folders.append(folder)
        for path in files:
            if is_image(path):
                images.append(path.removeprefix(base))
            else:
                left_out[path] = why_left_out(os.path.basename(path))
    return images, folders


def list_folder(base: bytes, origin: str, left_out: LeftOut) -> tuple[Classes, list[bytes]]:
    """List the images in class folders, and all folders; add the rest to `left_out`.

    `origin`: key=value, for messages. Raises UserError if there is no class, or some are empty.
    """
    _, class_folders, files = next(walk(base, left_out))
    if not class_folders:
        wrong = "holds no folder for each class"
        raise UserError(origin, wrong, "put each image into <class>/, a folder in it")
    left_out |= dict.fromkeys(filter(is_image, files), LOOSE)
    list_one = partial(contents_of, left_out=left_out, base=os.path.join(base, b""))
    with ThreadPoolExecutor(THREADS) as pool:
        contents = list(pool.map(list_one, class_folders))
    classes: Classes = {}
    listed = [base]
    empty = []
    for path, (images, folders) in zip(class_folders, contents, strict=True):
        name = os.path.basename(path)
        if not images:
            empty.append(os.fsdecode(name))
        if len(folders) > 1:
            _check_split(os.fsdecode(name), origin)
        classes[name] = sorted(images)
        listed += folders
    if empty:
        wrong = f"class folders without images (.jpg, .png, ...): {', '.join(empty[:10])}"
        cure = f"fill or remove them. {describe_left_out(left_out)}".rstrip(". ")
        raise UserError(origin, wrong, cure)
    return classes, listed


def _check_split(folder: str, origin: str) -> None:
    """Refuse a class with folders in it, if it has the name of a split."""
    if first_word(folder) in SPLITS:
        wrong = f"class folder {folder} holds folders, as a split does"
        raise UserError(origin, wrong, "give data.train and data.val; a tar file holds one split")


def list_tars(
    files: Sequence[str], origin: str, left_out: LeftOut, members_of: Callable[..., Members]
) -> tuple[Classes, Places]:
    """List the images in tar files, and the place of each; add the rest to `left_out`.

    Raises UserError if there is no image in a folder, or two tar files hold one of the same name.
    """
    images: Places = {}
    with ThreadPoolExecutor(THREADS) as pool:
        # A file is opened by its path, which messages show, too.
        for number, members in enumerate(pool.map(members_of, files, files)):
            _add_images(images, members, number, left_out)
    if not images:
        cure = "python scripts/prepare.py SOURCE --to DIR converts other tar files"
        raise UserError(origin, "holds no <class>/<name> with the suffix of an image", cure)
    # Folders around all class folders, such as train/, are no part of the names.
    folders = set(map(os.path.dirname, images))
    outer = os.path.commonpath(set(map(os.path.dirname, folders)))
    classes: Classes = {}
    places: Places = {}
    for name in sorted(images):  # not the order of the classes: `-` sorts before `/`
        path = name.removeprefix(outer).lstrip(b"/")
        label, *inner = path.split(b"/")
        if len(inner) > 1:
            _check_split(os.fsdecode(label), origin)
        classes.setdefault(label, []).append(path)
        places[path] = images[name]
    return dict(sorted(classes.items())), places


def _add_images(images: Places, members: Members, number: int, left_out: LeftOut) -> None:
    """Add the images in folders of tar file `number` to `images`, and the rest to `left_out`."""
    for name, place in members.items():
        reason = why_left_out(name)
        if b"/" not in name:  # not in a class folder: other files than images describe the dataset
            if not reason:
                left_out[name] = LOOSE
        elif reason:
            left_out[name] = reason
        elif name in images:
            wrong = "two of the tar files hold it"
            raise UserError(os.fsdecode(name), wrong, "rename or remove one of them")
        else:
            images[name] = (number, *place)


def tar_members(
    path: str, shown: str, start: int = 0, length: int = sys.maxsize, opened: Any = open
) -> Members:
    """List the files in a tar file: name -> offset in `path` and length, in bytes.

    It begins at byte `start` of `path` and has `length` bytes, or fewer if `path` ends. `shown`:
    the path for messages; `opened`: opens `path`, as `open` does. Raises UserError if it is damaged
    or holds a link or a file without its zeros (sparse); OSError of the system.
    """
    members: Members = {}
    at = start
    try:
        with opened(path, "rb") as file:
            file.seek(start)
            tar = tarfile.TarFile(fileobj=file)
            header = tar.next()
            while header is not None:
                _add_member(members, header)
                if not at < header.offset_data + header.size <= tar.offset:
                    raise ValueError(f"{header.name} is sparse (tar --sparse), or of negative size")
                at = tar.offset
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
                header = tar.next()
            end = file.seek(0, os.SEEK_END)
            _check_end(file, at, min(end, start + length))
    except DAMAGED as error:
        cure = "it may be damaged or compressed: download or copy it again, or pack it again "
        cure += "without compression and links (tar --dereference --hard-dereference)"
        raise UserError(shown, f"cannot be read at byte {at:,}: {error}", cure) from None
    return members


def _add_member(members: Members, header: tarfile.TarInfo) -> None:
    """Add a regular file. Raises ValueError for a link, and for the name of an earlier file."""
    name = os.path.normpath(os.fsencode(header.name)).lstrip(b"/")
    if header.type in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        raise ValueError(f"{header.name} is a link")
    if name in members:
        raise ValueError(f"a second file has the name {header.name}")
    if header.isreg():
        members[name] = (header.offset_data, header.size)


def _check_end(file: BinaryIO, at: int, stop: int) -> None:
    """Raise ValueError unless the bytes from `at` to `stop` are the end of a tar file, all zeros.

    tarfile takes a block of zeros and a damaged header for the end, wherever they are.
    """
    file.seek(at)
    rest = file.read(min(stop - at, PADDING + 1))
    if rest.strip(b"\0") or not 2 * BLOCK <= len(rest) <= PADDING:
        raise ValueError("no header and no end, two blocks of zeros with nothing after them")


def csv_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file that is not empty.

    Raises OSError if it cannot be read, and UserError if it is damaged, and says in which line.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True, strict=True)
        try:
            for cells in rows:
                if cells:
                    yield rows.line_num, list(map(str.strip, cells))
        except csv.Error as error:
            raise UserError(f"{path}: line {rows.line_num}", str(error), "correct it") from None


def read_list(path: str, origin: str) -> Classes:
    """Read a CSV file with one image per line: path and label.

    A first line that is no file, such as `path,label` or `image,class`, is a header. Returns class
    name -> sorted paths, absolute or relative to the file's folder; the classes are sorted too.
    Raises UserError if a line is something else, or gives an image a second label.
    """
    classes: Classes = {}
    listed: dict[str, tuple[str, str]] = {}  # path -> label, and the path as it is written first
    folder = os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for number, (line, row) in enumerate(csv_rows(path)):
        cells = list(filter(None, row))
        if len(cells) != 2:
            cure = "write one image per line, as path,label"
            raise UserError(origin, f"line {line} is not path,label", cure)
        image, label = cells
        place = os.path.join(folder, image)
        if number == 0:
            names_file = is_image(os.fsencode(image)) or os.path.isfile(place)
            if not names_file:
                continue
        known, written = listed.setdefault(os.path.normpath(place), (label, image))
        if known != label:
            wrong = f"line {line}: {image} is {label}, but {known} in an earlier line"
            raise UserError(origin, wrong, "give each image one label")
        classes.setdefault(os.fsencode(label), []).append(os.fsencode(written))
    first = list(listed)[:100]
    if not any(map(os.path.exists, first)):
        wrong = f"holds no images, or no file is at their paths, such as {', '.join(first[:1])}"
        cure = f"write lines path,label; a path is absolute, or relative to {folder}"
        raise UserError(origin, wrong, cure)
    return {label: sorted(classes[label]) for label in sorted(classes)}
