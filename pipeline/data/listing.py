"""List a split's images in a folder, tar files or a list, and the files that are ignored."""

import csv
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from multiprocessing.pool import ThreadPool
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import UserError

# Suffixes that Pillow registers for decode.FORMATS, except .pfm, whose levels have 32 bits
EXTENSIONS = tuple(
    b".jpg .jpeg .png .webp .bmp .ppm .pgm .pbm .pnm .tif .tiff .gif .jfif .jpe .mpo .apng".split()
)
# Name prefixes of files and folders that do not belong to the user, which are hidden, such as
# macOS's ._name, or created by macOS, Synology, QNAP, Windows or ext4
HIDDEN_NAMES = tuple(
    b". __MACOSX @eaDir #recycle #snapshot @Recycle $RECYCLE.BIN lost+found".split()
)
# Words in file names, and first words of folder names -> the split that they name
SPLITS = dict.fromkeys(["train", "training"], "train")
SPLITS |= dict.fromkeys(["val", "valid", "validation", "dev"], "val")
SPLITS |= dict.fromkeys(["test", "testing"], "test")
THREADS = 16  # hides network file system latency: 1,000 folders in sequence take minutes
# Reasons for ignoring a file or folder
LOOSE = "not in a class folder"
HIDDEN = "hidden or system"
TWICE = "link to a folder listed already, or to a parent"  # a parent contains all classes
IRREGULAR = "not a regular file"  # a pipe blocks the process that opens it; a link may be dangling
BLOCK = 512  # bytes of a tar header; two blocks of zeros end the file
PADDING = 1 << 24  # maximum bytes of zeros at the end; tar pads to 10 kB, or as set with `-b`
Ignored = dict[bytes, str]  # path of a file or folder that is not read -> reason
Paths = list[bytes]
Classes = dict[bytes, Paths]  # class name -> sorted paths of its images; sorted by name
Places = dict[bytes, tuple[int, int, int]]  # path -> storage, offset and length, as in Index.places
Members = dict[bytes, tuple[int, int]]  # name in a tar file -> offset and length in bytes
# Exceptions that tarfile raises for a damaged header
DAMAGED = (ArithmeticError, LookupError, MemoryError, tarfile.TarError, TypeError, ValueError)


def is_hidden(name: bytes) -> bool:
    return name.startswith(HIDDEN_NAMES)


def first_word(name: str) -> str:
    """Return a name's leading letters, such as `training` for Training_set."""
    return "".join(takewhile(str.isalpha, name.lower()))


def is_image(path: bytes) -> bool:
    """Return whether a file counts as an image, unless it is hidden."""
    return path.lower().endswith(EXTENSIONS)


def why_ignored(path: bytes) -> str:
    """Return the reason for ignoring a file or folder; "" if it is an image."""
    if any(map(is_hidden, path.split(b"/"))):
        return HIDDEN
    if is_image(path):
        return ""
    suffix = os.path.splitext(path)[1]
    return os.fsdecode(suffix.lower()) or "no suffix"


def describe_ignored(ignored: Ignored) -> str:
    """Describe ignored paths in one line, with the commonest reasons first; "" if none."""
    if not ignored:
        return ""
    commonest = Counter(map(ignored.__getitem__, sorted(ignored))).most_common(5)
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in commonest)
    example = min(ignored, key=lambda path: (ignored[path] != commonest[0][0], path))
    text = f"ignored files or folders: {reasons}, such as {os.fsdecode(example)}"
    return " ".join(f"{text}; rename or convert those that should be read".split())


def walk(top: bytes, ignored: Ignored) -> Iterator[tuple[bytes, Paths, Paths]]:
    """Yield each folder, starting at `top`, with the paths of its folders and files, sorted.

    The order is depth first. Links are followed. They may form a cycle or point to a parent of
    `top`, so each folder is yielded once, and the parents never. Adds everything that is not read,
    whatever its suffix, to `ignored`. Only links and folders need a stat call.
    """
    path = Path(os.fsdecode(top))
    parents = {path, *path.absolute().parents, *path.resolve().parents}
    seen = set(map(_identity, parents))
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        folders: Paths = []
        files: Paths = []
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=attrgetter("name")):
                # An entry raises OSError for a link to itself; a Path has no target there either.
                target = Path(os.fsdecode(entry.path)) if entry.is_symlink() else entry
                if is_hidden(entry.name):
                    ignored[entry.path] = HIDDEN
                elif target.is_file():
                    files.append(entry.path)
                elif not target.is_dir():
                    ignored[entry.path] = IRREGULAR
                elif _identity(entry.path) in seen:
                    ignored[entry.path] = TWICE
                else:
                    seen.add(_identity(entry.path))
                    folders.append(entry.path)
        yield folder, folders, files
        waiting += reversed(folders)


def _identity(folder: bytes | Path) -> tuple[int, int]:
    """Return a folder's device and inode number, which are the same through any link."""
    info = os.stat(folder)
    return info.st_dev, info.st_ino


def contents_of(top: bytes, ignored: Ignored, base: bytes = b"") -> tuple[Paths, Paths]:
    """Return the images in `top` and its subfolders, and all folders, in the order of `walk`.

    Adds all other entries to `ignored`. `base`: prefix to remove from the paths of images.
    """
    images = []
    folders = []
    for folder, _, files in walk(top, ignored):
        folders.append(folder)
        for path in files:
            if is_image(path):
                images.append(path.removeprefix(base))
            else:
                ignored[path] = why_ignored(os.path.basename(path))
    return images, folders


def list_folder(base: bytes, origin: str, ignored: Ignored) -> tuple[Classes, list[bytes]]:
    """List the images in class folders, and all folders; add the rest to `ignored`.

    `origin`: key=value, for messages. Raises UserError if there is no class, or if some are empty.
    """
    _, class_folders, files = next(walk(base, ignored))
    if not class_folders:
        raise UserError(origin, "contains no class folders", "move each image to <class>/ in it")
    ignored |= dict.fromkeys(filter(is_image, files), LOOSE)
    list_one = partial(contents_of, ignored=ignored, base=os.path.join(base, b""))
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
        problem = f"class folders without images (.jpg, .png, ...): {', '.join(empty[:10])}"
        fix = f"add images to them or remove them. {describe_ignored(ignored)}".rstrip(". ")
        raise UserError(origin, problem, fix)
    return classes, listed


def _check_split(folder: str, origin: str) -> None:
    """Raise UserError if a class that contains folders is named like a split."""
    if first_word(folder) in SPLITS:
        problem = f"class folder {folder} contains folders, like a split"
        raise UserError(origin, problem, "set data.train and data.val; a tar file holds one split")


def list_tars(
    files: Sequence[str], origin: str, ignored: Ignored, members_of: Callable[..., Members]
) -> tuple[Classes, Places]:
    """List the images in tar files, and the place of each; add the rest to `ignored`.

    Raises UserError if no folder contains an image, or if two tar files contain the same path.
    """
    images: Places = {}
    with ThreadPoolExecutor(THREADS) as pool:
        # `files` twice: the path to open is also the path that messages show.
        for number, members in enumerate(pool.map(members_of, files, files)):
            _add_images(images, members, number, ignored)
    if not images:
        fix = "convert other tar files with python scripts/prepare.py SOURCE --to DIR"
        raise UserError(origin, "contains no <class>/<name> with an image suffix", fix)
    # Parents of all class folders, such as train/, are not part of the names.
    folders = set(map(os.path.dirname, images))
    outer = os.path.commonpath(set(map(os.path.dirname, folders)))
    classes: Classes = {}
    places: Places = {}
    for name in sorted(images):  # not sorted by class, because `-` sorts before `/`
        path = name.removeprefix(outer).lstrip(b"/")
        label, *inner = path.split(b"/")
        if len(inner) > 1:
            _check_split(os.fsdecode(label), origin)
        classes.setdefault(label, []).append(path)
        places[path] = images[name]
    return dict(sorted(classes.items())), places


def _add_images(images: Places, members: Members, number: int, ignored: Ignored) -> None:
    """Add the images in folders of tar file `number` to `images`, and the rest to `ignored`."""
    for name, place in members.items():
        reason = why_ignored(name)
        if b"/" not in name:  # outside class folders, files other than images describe the dataset
            if not reason:
                ignored[name] = LOOSE
        elif reason:
            ignored[name] = reason
        elif name in images:
            problem = "found in two of the tar files"
            raise UserError(os.fsdecode(name), problem, "rename or remove one of them")
        else:
            images[name] = (number, *place)


def tar_members(
    path: str, shown: str, start: int = 0, length: int = sys.maxsize, opened: Any = open
) -> Members:
    """List the files in a tar file: name -> offset in `path` and length, in bytes.

    The tar file starts at byte `start` of `path` and has `length` bytes, or fewer if `path` ends.
    `shown`: path for messages; `opened`: function like `open`, for `path`. Raises UserError if it
    is damaged or contains a link or a file without its zeros (sparse), OSError for I/O errors.
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
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte per member
                header = tar.next()
            end = file.seek(0, os.SEEK_END)
            _check_end(file, at, min(end, start + length))
    except DAMAGED as error:
        fix = "it may be damaged or compressed: download or copy it again, or pack it again "
        fix += "without compression and links (tar --dereference --hard-dereference)"
        raise UserError(shown, f"cannot be read at byte {at:,}: {error}", fix) from None
    return members


def _add_member(members: Members, header: tarfile.TarInfo) -> None:
    """Add a regular file. Raises ValueError for a link and for a duplicate name."""
    name = os.path.normpath(os.fsencode(header.name)).lstrip(b"/")
    if header.type in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        raise ValueError(f"{header.name} is a link")
    if name in members:
        raise ValueError(f"{header.name} occurs twice")
    if header.isreg():
        members[name] = (header.offset_data, header.size)


def _check_end(file: BinaryIO, at: int, stop: int) -> None:
    """Raise ValueError unless the bytes from `at` to `stop` are a tar file's end, all zeros.

    tarfile treats a block of zeros and a damaged header as the end, wherever they are.
    """
    file.seek(at)
    rest = file.read(min(stop - at, PADDING + 1))
    if rest.strip(b"\0") or not 2 * BLOCK <= len(rest) <= PADDING:
        raise ValueError("neither a header nor the end, two blocks of zeros with nothing after")


def csv_rows(path: str | os.PathLike[str], origin: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line's number and the cells of each row in a CSV file, skipping empty rows.

    Raises OSError if the file cannot be read, UserError for UTF-16 or, with the line, invalid CSV.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        if file.read(2) in ("\udcff\udcfe", "\udcfe\udcff"):  # as Excel's Unicode text
            raise UserError(origin, "encoded in UTF-16", "save it as CSV in UTF-8")
        file.seek(0)
        rows = csv.reader(file, skipinitialspace=True, strict=True)
        line = 1
        try:
            for cells in rows:
                if cells:
                    yield line, list(map(str.rstrip, cells))  # the reader strips the left
                line = rows.line_num + 1
        except csv.Error as error:  # a quote may be closed many lines later, or never
            raise UserError(origin, f"line {line}: {error}", "correct its quotes") from None


def read_list(path: str, origin: str) -> Classes:
    """Read a CSV file with one image path and label per line.

    A first line that is not a file, such as `path,label` or `image,class`, is a header. Returns
    class name -> sorted paths, absolute or relative to the file's folder; the classes are sorted.
    Raises UserError for any other line, if an image has a second label, or if a file is missing.
    """
    classes: Classes = {}
    listed: dict[str, tuple[int, str, str]] = {}  # path -> first line, label, path in that line
    folder = os.path.join(os.path.dirname(os.path.abspath(path)), "")
    rows = list(_listed_rows(path, origin))
    if rows and _is_header(rows, folder):
        del rows[0]
    for line, image, label in rows:
        place = os.path.normpath(os.path.join(folder, image))
        _, known, written = listed.setdefault(place, (line, label, image))
        if known != label:
            problem = f"line {line}: {image} has the label {label}, but {known} in an earlier line"
            raise UserError(origin, problem, "assign one label to each image")
        classes.setdefault(os.fsencode(label), []).append(os.fsencode(written))
    if not listed:
        raise UserError(origin, "contains no images", "write one image per line, as path,label")
    places = list(listed)
    with ThreadPool(THREADS) as pool:  # a million local paths take 3 s
        are_files = pool.map(os.path.isfile, places)
    if not all(are_files):
        line, _, image = listed[places[are_files.index(False)]]
        missing = f"{are_files.count(False):,} of {len(places):,} images"
        problem = f"line {line}: {image}: no such file ({missing})"
        fix = f"remove the line, or correct the path, absolute or relative to {folder}"
        raise UserError(origin, problem, f"{fix}, with / between folders")
    return {label: sorted(classes[label]) for label in sorted(classes)}


def _listed_rows(path: str, origin: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, path and label of each image in a list, and of a header."""
    for line, row in csv_rows(path, origin):
        cells = list(filter(None, row))
        if len(cells) != 2 or is_image(os.fsencode(cells[1])):
            fix = "write one image per line; the columns are path,label"
            raise UserError(origin, f"line {line} is not path,label", fix)
        yield line, cells[0], cells[1]


def _is_header(rows: list[tuple[int, str, str]], folder: str) -> bool:
    """Whether the first line names no file, and no other line has its label."""
    (_, image, label), *others = rows
    if is_image(os.fsencode(image)) or os.path.isfile(os.path.join(folder, image)):
        return False
    return all(label != other for _, _, other in others)
