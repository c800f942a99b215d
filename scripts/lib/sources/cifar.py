"""CIFAR-10 and CIFAR-100 in the Python version, as they are published, for layouts.py.

A file is a pickle with many images, each as 3,072 bytes: the red, green and blue planes of 32 x 32
pixels. A pickle can run any function; here it can only make NumPy's arrays. Source:
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import os
import pickle
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from scripts.lib.sources.files import Place, Sample, Tree, damaged, read_place


class Version(NamedTuple):
    prefix: str  # of the names of its fields
    val_file: str
    train_files: tuple[str, ...]


BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
# By the name of the file with the names of the classes.
VERSIONS = {
    "batches.meta": Version("", "test_batch", BATCHES),
    "meta": Version("fine_", "test", ("train",)),
}


def ppm(planes: np.ndarray) -> bytes:
    """Return an image as a PPM file: lossless, and decoded in half the time of a PNG."""
    return b"P6 32 32 255\n" + planes.reshape(3, -1).T.tobytes()


def cifar_samples(source: str, tree: Tree) -> list[Sample]:
    """List the images, named by file and number; empty if the tree does not hold CIFAR.

    Raises UserError if there are both datasets, or a file is missing or damaged.
    """
    metas = [path for path in tree if is_meta(path, tree)]
    if len(metas) > 1:
        names = ", ".join(metas)
        raise UserError(source, f"holds CIFAR more than once ({names})", "give one of them")
    return read_version(metas[0], tree) if metas else []


def is_meta(path: str, tree: Tree) -> bool:
    """Whether a file has the names of CIFAR's classes, with the images in the same folder."""
    folder, name = os.path.split(path)
    return name in VERSIONS and os.path.join(folder, VERSIONS[name].val_file) in tree


def read_version(meta: str, tree: Tree) -> list[Sample]:
    """List the images of CIFAR-10 or CIFAR-100. Raises UserError for a missing or damaged file."""
    folder, name = os.path.split(meta)
    prefix, val_file, train_files = VERSIONS[name]
    splits = dict.fromkeys(train_files, "train") | {val_file: "val"}
    samples: list[Sample] = []
    path = meta
    try:
        classes = unpickled(tree[meta])[f"{prefix}label_names"]
        for name, split in splits.items():
            path = os.path.join(folder, name)
            fields = unpickled(tree[path])
            labels = fields[f"{prefix}labels"]
            images = np.asarray(fields["data"], np.uint8)
            images = images.reshape(len(labels), 3, 32, 32)
            for row, label in enumerate(labels):
                file = f"{name}-{row:05d}.ppm"
                samples.append(Sample(split, classes[label], file, images[row]))
    except Exception as error:  # a missing file; the opcodes of a damaged pickle raise many kinds
        raise damaged(path, error) from None
    return samples


def unpickled(place: Place) -> Any:
    """Return the content of a pickle of Python 2, which may hold arrays."""
    return _Arrays(io.BytesIO(read_place(place)), encoding="latin1").load()


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return one of the functions that make an array; a pickle could name any other."""
        allowed: dict[str, Any] = {"ndarray": np.ndarray, "dtype": np.dtype}
        # A function of numpy.core.multiarray, a module with another name in NumPy 2.
        allowed["_reconstruct"] = lambda kind, shape, dtype: np.ndarray(shape, dtype)
        if not module.startswith("numpy") or name not in allowed:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}")
        return allowed[name]
