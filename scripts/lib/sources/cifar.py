"""CIFAR-10 and CIFAR-100 in the Python version, as they are published, for layouts.py.

A file is a pickle with many images, each as 3,072 bytes: the red, green and blue planes of 32 x 32
pixels. A pickle can run any function; here it can only make NumPy's arrays. Source:
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import io
import os
import pickle
from typing import Any

import numpy as np

from conf.errors import UserError
from scripts.lib.sources.files import Place, Sample, Tree, damaged, read_place

# File with the names of the classes -> the training files and the validation file.
VERSIONS = {
    "batches.meta": (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "meta": ("train", "test"),
}


def ppm(planes: np.ndarray) -> bytes:
    """Return an image as a PPM file: lossless, and decoded in half the time of a PNG."""
    return b"P6 32 32 255\n" + planes.reshape(3, -1).T.tobytes()


def cifar_samples(source: str, tree: Tree) -> list[Sample]:
    """List the images, named by file and number; empty if the tree does not hold CIFAR.

    Raises UserError if there are both datasets, or a file is missing or damaged.
    """
    metas = [(folder, meta) for folder, meta in map(os.path.split, tree) if meta in VERSIONS]
    copies = [(f, meta) for f, meta in metas if os.path.join(f, VERSIONS[meta][-1]) in tree]
    if not copies:
        return []
    if len(copies) > 1:
        names = ", ".join(folder or "." for folder, _ in copies)
        raise UserError(f"{source}: holds CIFAR more than once ({names}); give one of them")
    folder, meta = copies[0]
    path, *paths = (os.path.join(folder, name) for name in (meta, *VERSIONS[meta]))
    samples: list[Sample] = []
    try:
        fields = unpickled(tree[path])
        classes = fields.get("label_names") or fields["fine_label_names"]
        for path in paths:
            fields, name = unpickled(tree[path]), os.path.basename(path)
            labels = fields.get("labels") or fields["fine_labels"]
            split = "val" if name.startswith("test") else "train"
            images = np.asarray(fields["data"], np.uint8).reshape(len(labels), 3, 32, 32)
            for row, (label, planes) in enumerate(zip(labels, images, strict=True)):
                samples.append(Sample(split, classes[label], f"{name}-{row:05d}.ppm", planes))
    except OSError:
        raise
    except Exception as error:  # the opcodes of a damaged pickle raise many kinds
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
