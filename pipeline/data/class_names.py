"""Readable class names, because ImageNet's folders are named by WordNet ID, such as n01443537."""

from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("imagenet_classes.tsv")


def readable(name: str) -> str:
    """Return the class name to show: `goldfish` for n01443537, any other name unchanged."""
    return imagenet_names().get(name, name)


@cache
def imagenet_names() -> dict[str, str]:
    """Return WordNet ID -> name, for the 1,000 classes of ImageNet-1k, ordered by label."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))
