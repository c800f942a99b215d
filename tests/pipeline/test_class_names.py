"""The table of ImageNet's classes."""

import hashlib

from conf.packages import import_torchvision
from pipeline.class_names import imagenet_names, readable


def test_table_of_imagenet() -> None:
    """The IDs are those of ImageNet-1k, in the order of the labels of published weights."""
    names = imagenet_names()
    ids = list(names)
    assert len(ids) == 1000 and ids == sorted(ids)
    digest = hashlib.sha256(" ".join(ids).encode()).hexdigest()
    assert digest == "791ce0333040dd249d13133f90d28ef0263ffc01e5de0afd85b3e32048d7d456"
    weights = import_torchvision().models.ResNet18_Weights.IMAGENET1K_V1
    assert list(names.values()) == weights.meta["categories"]


def test_readable() -> None:
    assert readable("n01443537") == "goldfish" and readable("n02510455") == "giant panda"
    for other in ("", "cat", "n00000000", "n0144353"):
        assert readable(other) == other
    assert len(set(imagenet_names().values())) == 1000  # a name stands for one class
