"""Class names: readable ones for WordNet IDs such as n01443537, and names that look alike."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# Cyrillic, then Greek letters -> the Latin letters that they resemble, in one of both cases
LATIN = str.maketrans("авекмнорстухіјѕοαβεικνρτυχ", "abekmhopctyxijsoabeiknptyx")
TABLE = Path(__file__).with_name("imagenet_classes.tsv")


def readable(name: str) -> str:
    """Return the class name to show: `goldfish` for n01443537, any other name unchanged."""
    return imagenet_names().get(name, name)


@cache
def imagenet_names() -> dict[str, str]:
    """Return WordNet ID -> name, for the 1,000 classes of ImageNet-1k (ILSVRC 2012), by label.

    The IDs are the sorted folder names of the data, as in imagenet_synsets.txt of timm 1.0. The
    names are the categories of torchvision's ImageNet weights, which are in the same order.
    """
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def look_alikes(names: Iterable[str]) -> list[str]:
    """Describe groups of class names that a reader cannot tell apart, with their code points.

    Compares Unicode forms (NFKC), case, spaces at the ends, invisible characters, leading zeros,
    and Cyrillic and Greek letters with the Latin ones.
    """
    groups = defaultdict(list)
    for name in sorted(set(names)):
        code_points = " ".join(f"{ord(character):X}" for character in name)
        visible = "".join(filter(str.isprintable, unicodedata.normalize("NFKC", name)))
        shape = visible.casefold().strip().lstrip("0").translate(LATIN)
        groups[shape].append(f"{name!r} ({code_points})")
    return [" and ".join(group) for group in groups.values() if len(group) > 1]
