"""Which files of a folder or tar file are images, which are left out: one rule for all programs."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

# The endings that Pillow registers for decode.FORMATS; but not .pfm, whose levels have 32 bits.
EXTENSIONS = tuple(
    b".jpg .jpeg .png .webp .bmp .ppm .pgm .pbm .pnm .tif .tiff .gif .jfif .jpe .mpo .apng".split()
)
# Folders that macOS, Synology, QNAP, Windows and ext4 create next to the folders of a user.
SYSTEM = set(b"__MACOSX @eaDir #recycle #snapshot @Recycle $RECYCLE.BIN lost+found".split())
# Words in the names of files and folders -> the split that they name.
SPLITS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(("test", "testing"), "test")
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
LeftOut = dict[bytes, str]  # path of a file or folder that is not read -> reason


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
    ending = os.fsdecode(os.path.splitext(path)[1].lower())
    return "" if is_image(path) else ending or "no ending"


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
