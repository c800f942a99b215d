"""CIFAR-10 and CIFAR-100 as they are published, for layouts.py.

A file holds many images, each as 3,072 bytes: the red, green and blue planes of 32 x 32 pixels. In
the binary version, a label precedes each image. In the Python version, a file is a pickle, which
could run a program. So it is never unpickled, but searched for labels and pixels, and refused if it
names another function than those that make an array. Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import os
import pickletools
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from conf.schema import UserError
from scripts.lib.sources.files import Place, Sample, Tree, damaged, read_place

TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
# File with the names of the classes -> the training files and the validation file.
VERSIONS = {
    "batches.meta": (*TEN, "test_batch"),
    "batches.meta.txt": (*(f"{name}.bin" for name in TEN), "test_batch.bin"),
    "meta": ("train", "test"),
    "fine_label_names.txt": ("train.bin", "test.bin"),
}
IMAGE = 3 * 32 * 32  # bytes
LARGEST_BATCH = 2**28  # bytes; CIFAR-100's training images have 155 MB
# The keys of the dicts that are pickled, and the functions that would make NumPy's arrays.
KEYS = re.compile(r"((fine_|coarse_)?label(s|_names)|batch_label|data|filenames|num_.*)")
NAMES = ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype")
REFUSED = ("GLOBAL", "STACK_GLOBAL", "INST", "NEWTRUE")  # True: the pixels are stored by column
MOST_OPCODES = 2**20  # of a pickle; CIFAR-100's training images have 300,000


class Planes(Place):
    """The place of the three planes of an image."""


def ppm(planes: bytes) -> bytes:
    """Return an image as a PPM file: lossless, and decoded in half the time of a PNG."""
    return b"P6 32 32 255\n" + np.frombuffer(planes, np.uint8).reshape(3, -1).T.tobytes()


def cifar_samples(source: str, tree: Tree) -> list[Sample]:
    """List the images, named by file and number; empty if the tree does not hold CIFAR.

    Raises UserError: there are several versions, or a file is missing or damaged.
    """
    found = [
        (folder, meta)
        for folder, meta in map(os.path.split, tree)
        if meta in VERSIONS and os.path.join(folder, VERSIONS[meta][-1]) in tree
    ]
    if not found:
        return []
    if len(found) > 1:
        names = ", ".join(folder or "." for folder, _ in found)
        raise UserError(f"{source}: holds several versions of CIFAR ({names}); give one of them")
    folder, meta = found[0]
    path, *paths = (os.path.join(folder, name) for name in (meta, *VERSIONS[meta]))
    if tree[path].member:
        raise UserError(f"{source}: holds CIFAR in a zip file; unpack it and give the folder")
    if missing := [path for path in paths if path not in tree]:
        raise UserError(f"{source}: {missing[0]} is missing; download or copy it again")
    samples: list[Sample] = []
    try:
        content = read_place(tree[path], LARGEST_BATCH)
        if path.endswith(".txt"):
            classes = content.decode().split()
        else:
            fields = pickled(content)
            classes = fields["label_names"] or fields["fine_label_names"]
        if not classes:
            raise ValueError("no names of classes")
        for path in paths:
            samples += batch(path, tree[path], classes, 1 + meta.startswith("fine"))
    except (ValueError, LookupError, OSError) as error:
        raise damaged(path, error) from None
    return samples


def batch(path: str, place: Place, classes: Sequence[str], label_bytes: int) -> list[Sample]:
    """List the images of a file; of the label bytes of the binary version, the last one counts.

    Raises ValueError, LookupError, OSError: it is damaged or cannot be read.
    """
    content = read_place(place, LARGEST_BATCH)
    name, binary, _ = os.path.basename(path).partition(".bin")
    labels: Sequence[int]
    if binary:
        start, size, step = label_bytes, len(content), label_bytes + IMAGE
        labels = content[label_bytes - 1 :: step]
    else:
        fields = pickled(content)
        labels, step = fields["labels"] or fields["fine_labels"], IMAGE
        start, size = fields["pixels"] or (0, 0)
    if not labels or size != step * len(labels):
        raise ValueError(f"{size:,} bytes for {len(labels):,} images")
    return [
        Sample(
            "val" if name.startswith("test") else "train",
            classes[label],
            f"{name}-{row:05d}.ppm",
            Planes(place.file, place.start + start + step * row, IMAGE),
        )
        for row, label in enumerate(labels)
    ]


def pickled(content: bytes) -> dict[str, list[Any]]:
    """Return the strings and small numbers under each key of a pickle, without unpickling it.

    The bytes of an array are its pixels: "pixels" gives their position and number.

    Raises ValueError: it is no pickle of CIFAR.
    """
    fields: dict[str, list[Any]] = defaultdict(list)
    key = ""
    for opcode, value, position in islice(pickletools.genops(content), MOST_OPCODES):
        assert position is not None
        text = str(value)
        if opcode.name == "BINSTRING":
            fields["pixels"] += [position + 5, len(text)]  # behind the opcode and the length
        elif opcode.name == "SHORT_BINSTRING" and KEYS.fullmatch(text):
            key = text
        elif opcode.name in ("SHORT_BINSTRING", "BININT1"):
            fields[key].append(value)
        elif opcode.name in REFUSED and value not in NAMES:
            raise ValueError(f"its pickle holds {opcode.name} {text[:60]}")
    return fields
