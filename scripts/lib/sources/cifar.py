"""Read the published Python versions of CIFAR-10 and CIFAR-100 for layouts.py.

A file is a pickle of many images, each stored as 3,072 bytes: the red, green and blue planes of
32 x 32 pixels. A pickle can run any function, so unpickling only allows NumPy arrays. Source:
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import os
import pickle
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from scripts.lib.sources.files import Sample, Tree, check_unique, class_of, damaged, read_place


class Version(NamedTuple):
    prefix: str  # prefix of the field names
    val_file: str
    train_files: tuple[str, ...]


BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
# Name of the file with the class names -> version
VERSIONS = {
    "batches.meta": Version("", "test_batch", BATCHES),
    "meta": Version("fine_", "test", ("train",)),
}


def ppm(planes: np.ndarray) -> bytes:
    """Encode an image as PPM, which is lossless and decodes twice as fast as PNG."""
    return b"P6 32 32 255\n" + planes.reshape(3, -1).T.tobytes()


def cifar_samples(source: str, tree: Tree) -> list[Sample]:
    """List the images, named by file and index; return [] if the tree does not contain CIFAR.

    Raises UserError if CIFAR is found more than once, or if a file is missing or damaged.
    """
    metas = [path for path in tree if is_meta(path, tree)]
    if len(metas) > 1:
        names = ", ".join(metas)
        raise UserError(source, f"contains CIFAR more than once ({names})", "choose one of them")
    return read_version(metas[0], tree) if metas else []


def is_meta(path: str, tree: Tree) -> bool:
    """Whether a file has CIFAR's class names, and the images are in the same folder."""
    folder, name = os.path.split(path)
    return name in VERSIONS and os.path.join(folder, VERSIONS[name].val_file) in tree


def read_version(meta: str, tree: Tree) -> list[Sample]:
    """List the images of CIFAR-10 or CIFAR-100. Raises UserError for missing or damaged files."""
    folder, name = os.path.split(meta)
    prefix, val_file, train_files = VERSIONS[name]
    splits = dict.fromkeys(train_files, "train") | {val_file: "val"}
    samples = []
    path = meta
    try:
        classes = unpickle(read_place(tree[meta]))[f"{prefix}label_names"]
        check_unique(classes, meta)
        for name, split in splits.items():
            path = os.path.join(folder, name)
            fields = unpickle(read_place(tree[path]))
            labels = fields[f"{prefix}labels"]
            images = np.asarray(fields["data"], np.uint8)
            images = images.reshape(len(labels), 3, 32, 32)
            for row, label in enumerate(labels):
                file = f"{name}-{row:05d}.ppm"
                class_name = class_of(label, classes, f"{path}: image {row}")
                samples.append(Sample(split, class_name, file, images[row]))
    except UserError:
        raise
    except Exception as error:  # a missing file; opcodes of a damaged pickle raise many types
        raise damaged(path, error) from None
    return samples


def unpickle(content: bytes) -> Any:
    """Load a Python 2 pickle, which may contain arrays."""
    return _Arrays(io.BytesIO(content), encoding="latin1").load()


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a function that creates arrays. Raises UnpicklingError for any other name."""
        allowed: dict[str, Any] = {"ndarray": np.ndarray, "dtype": np.dtype}
        # Replaces numpy.core.multiarray._reconstruct, because NumPy 2 renamed the module.
        allowed["_reconstruct"] = lambda kind, shape, dtype: np.ndarray(shape, dtype)
        if not module.startswith("numpy") or name not in allowed:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}")
        return allowed[name]
