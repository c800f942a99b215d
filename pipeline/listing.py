"""What a split holds: the images in a folder, in tar files or in a list, and what is left out.

One rule for all programs tells images from other files.
"""

import csv
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from conf.errors import UserError

# The endings that Pillow registers for decode.FORMATS; but not .pfm, whose levels have 32 bits.
EXTENSIONS = tuple(
    b".jpg .jpeg .png .webp .bmp .ppm .pgm .pbm .pnm .tif .tiff .gif .jfif .jpe .mpo .apng".split()
)
# Folders that macOS, Synology, QNAP, Windows and ext4 create next to the folders of a user.
SYSTEM = set(b"__MACOSX @eaDir #recycle #snapshot @Recycle $RECYCLE.BIN lost+found".split())
# Words in the names of files and folders -> the split that they name.
SPLITS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(("test", "testing"), "test")
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
THREADS = 16  # hide the latency of a network file system: 1,000 folders in sequence take minutes
LOOSE = "in no class folder"  # why an image is left out
LeftOut = dict[bytes, str]  # path of a file or folder that is not read -> reason
Classes = dict[bytes, list[bytes]]  # name -> sorted paths of its images; sorted by name
Places = dict[bytes, tuple[int, int, int]]  # path -> source, offset and length, as in Index.places


def is_hidden(name: bytes) -> bool:
    """Whether a file or folder is hidden, as ._name, which macOS adds, or one of SYSTEM."""
    return name.startswith(b".") or name in SYSTEM


def is_image(path: bytes) -> bool:
    """Whether a file is taken for an image, if it is not hidden."""
    return path.lower().endswith(EXTENSIONS)


def why_left_out(path: bytes) -> str:
    """Return why a file or folder is not read; "" if it is an image."""
    for part in path.split(b"/"):
        if is_hidden(part):
            return os.fsdecode(part) if part in SYSTEM else "hidden"
    return "" if is_image(path) else os.fsdecode(os.path.splitext(path)[1].lower()) or "no ending"


def count_left_out(left_out: LeftOut) -> str:
    """Say in one line how much is left out for which reason; "" if nothing is."""
    if not left_out:
        return ""
    counts = Counter(sorted(left_out.values())).most_common(5)
    example = os.fsdecode(min(path for path, reason in left_out.items() if reason == counts[0][0]))
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in counts)
    what = "file or folder is" if len(left_out) == 1 else "files or folders are"
    text = f"{len(left_out):,} {what} not read: {reasons}, such as {example}"
    return " ".join(f"{text}; rename or convert what should be read".split())


def walk(top: bytes, left_out: LeftOut) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Yield each folder from `top` on, the folders and the files in it, sorted, as os.walk does.

    Links are followed; they may lead in a circle, so a folder comes once. What is hidden is added
    to `left_out` instead. So is a link to a folder around it: it leads to images of all classes.
    """
    seen = set()
    for folder, inner, names in os.walk(top, onerror=_raise, followlinks=True):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:
            inner.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        skipped = {name: why_left_out(name) for name in (*inner, *names) if is_hidden(name)}
        for name in (name for name in inner if os.path.islink(os.path.join(folder, name))):
            target = os.path.realpath(os.path.join(folder, name))
            if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                skipped[name] = "link to a folder around it"
        left_out |= {os.path.join(folder, name): reason for name, reason in skipped.items()}
        inner[:] = sorted(name for name in inner if name not in skipped)
        yield folder, inner, sorted(name for name in names if name not in skipped)


def _raise(error: OSError) -> NoReturn:
    raise error


def list_folder(base: bytes, origin: str, others: LeftOut) -> tuple[Classes, list[bytes]]:
    """List the images in class folders, and all folders; add the rest to `others`."""
    listed = [base]

    def list_class(name: bytes) -> list[bytes]:
        images = []
        for folder, _, files in walk(os.path.join(base, name), others):
            listed.append(folder)
            below = os.path.relpath(folder, base)
            for file in files:
                if is_image(file):
                    images.append(os.path.join(below, file))
                else:
                    others[os.path.join(folder, file)] = why_left_out(file)
        return sorted(images)

    _, names, loose = next(walk(base, others))
    if not names:
        above, cure = os.path.dirname(base), "put each image into <class>/, a folder in it"
        if origin.startswith("data.root=") and any(map(is_image, loose)):
            cure = f"if its images are one class of several, give {os.fsdecode(above)}"
        found = "holds no folders" if loose else "is empty"
        raise UserError(f"{origin}: {found}, but needs a folder for each class; {cure}")
    with ThreadPoolExecutor(THREADS) as pool:
        classes = dict(zip(names, pool.map(list_class, names), strict=True))
    for name, images in classes.items():
        folder = f"{origin}: class folder {os.fsdecode(name)}"
        if not images:
            own = {p: why for p, why in others.items() if p.startswith(base + b"/" + name + b"/")}
            cure = count_left_out(own) or "fill it or remove it"
            raise UserError(f"{folder} holds no images (.jpg, .png, ...); {cure}")
        if os.fsdecode(name).lower() in SPLITS and all(path.count(b"/") > 1 for path in images):
            raise UserError(f"{folder} holds folders of images only; give data.train and data.val")
    others |= {os.path.join(base, name): LOOSE for name in filter(is_image, loose)}
    return classes, listed


def list_tars(files: Sequence[str], origin: str, others: LeftOut) -> tuple[Classes, Places]:
    """List the images in tar files, and the place of each; add the rest to `others`."""
    all_places: Places = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for number, members in enumerate(pool.map(tar_members, files)):
            all_places |= {name: (number, *place) for name, place in members.items()}
    paths = [path for path in all_places if b"/" in path and not why_left_out(path)]
    inside = {path for path in all_places if b"/" in path or is_image(path)}.difference(paths)
    others |= {path: why_left_out(path) or LOOSE for path in inside}
    if not paths:
        cure = "python scripts/prepare.py SOURCE --to DIR converts other tar files"
        raise UserError(f"{origin}: holds no <class>/<name> with the suffix of an image; {cure}")
    # Folders around all class folders, such as train/, are left out.
    outer = os.path.commonpath({path.rpartition(b"/")[0].rpartition(b"/")[0] for path in paths})
    places = {path[len(outer) :].lstrip(b"/"): all_places[path] for path in paths}
    classes: Classes = {}
    for path in sorted(places):  # not the order of the classes: `-` sorts before `/`
        classes.setdefault(path.split(b"/")[0], []).append(path)
    return dict(sorted(classes.items())), places


def tar_members(path: str, start: int = 0, shown: str = "") -> dict[bytes, tuple[int, int]]:
    """Return name -> offset and length in bytes, of the files in the tar file at byte `start`.

    Raises UserError about `shown` if it is damaged or holds a link; OSError if it cannot be read.
    """
    members = {}
    try:
        with open(path, "rb") as file:
            at = file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (header := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
                    at = tar.offset
                    name = os.path.normpath(os.fsencode(header.name)).lstrip(b"/")
                    if header.isreg():
                        members[name] = header.offset_data, header.size
                    elif header.islnk() or header.issym():
                        raise ValueError(f"{header.name} is a link")
            # tarfile takes a damaged or missing header for the end, which is a block of zeros.
            file.seek(at)
            if file.read(512) != bytes(512):
                raise ValueError("no header and no end")
    except OSError:
        raise
    except Exception as error:  # tarfile raises many kinds: ReadError, IndexError, ...
        cure = "it may be damaged or compressed: download or copy it again, or pack it again "
        cure += "without compression and links (tar --dereference --hard-dereference)"
        wrong = f"cannot be read at byte {at:,}: {error}"
        raise UserError(f"{shown or path}: {wrong}; {cure}") from None
    return members


def csv_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file that is not empty.

    Raises OSError if it cannot be read, and UserError if it is damaged, and says in which line.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file)
        try:
            for cells in rows:
                if "\0" in "".join(cells):
                    raise csv.Error("a NUL character")
                if cells:
                    yield rows.line_num, [cell.strip() for cell in cells]
        except csv.Error as error:
            raise UserError(f"{path}: line {rows.line_num}: {error}; correct it") from None


def read_list(path: str, origin: str) -> Classes:
    """Read a CSV file with one image per line: path and label.

    A first line that is no file, such as `path,label` or `image,class`, is a header. Returns class
    name -> sorted paths, absolute or relative to the file's folder; the classes are sorted too.
    """
    classes, folder = Classes(), os.fsencode(os.path.dirname(os.path.abspath(path)))
    remedy = "write one image per line, and separate path and label with a comma"
    for line, cells in csv_rows(path):
        if len(cells) != 2 or not all(cells):
            raise UserError(f"{origin}: line {line} is not path,label; {remedy}")
        first = os.path.join(os.path.dirname(path), cells[0])
        if line == 1 and not is_image(os.fsencode(first)) and not os.path.exists(first):
            continue
        classes.setdefault(os.fsencode(cells[1]), []).append(os.fsencode(cells[0]))
    if not classes:
        raise UserError(f"{origin}: holds no images; {remedy}")
    if not any(os.path.exists(os.path.join(folder, names[0])) for names in classes.values()):
        swapped = "; or exchange the columns" if is_image(os.fsencode(cells[1])) else ""
        wrong = f"no file at its paths, such as {cells[0]}; write absolute ones, or relative to"
        raise UserError(f"{origin}: {wrong} {os.fsdecode(folder)}{swapped}")
    return {label: sorted(names) for label, names in sorted(classes.items())}
