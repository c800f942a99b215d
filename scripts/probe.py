"""Evaluate frozen features with nearest neighbors and with a linear classifier.

    python scripts/predict.py runs/NAME data/train --features > train.jsonl
    python scripts/predict.py runs/NAME data/val --features > val.jsonl
    python scripts/probe.py train.jsonl val.jsonl

The class folders are the folders in the deepest one that contains all images of a file; like in
training, they may have subfolders. Both methods learn only from the images in TRAIN and report
top-1 on the images in VAL:

knn      The 20 images in TRAIN with the largest cosine similarity vote with the weight
         exp(similarity / 0.07), after arXiv 1805.01978; 20 is from 2104.14294 (DINO).
linear   Logistic regression on the unscaled features, with up to 1,000 iterations of L-BFGS, after
         arXiv 2103.00020 (CLIP). The penalty on the squared weights is the best of 1e-6, 1e-5, ...
         1e6 on a tenth of TRAIN after training on the rest; then all of TRAIN is used.

Both use scikit-learn (pip install scikit-learn) on the CPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("TRAIN", type=Path, help="JSON lines from predict.py --features")
    parser.add_argument("VAL", type=Path, help="the same for the validation images")
    OPTIONS = parser.parse_args()

import json
import os
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np

from conf import cli
from conf.errors import UserError, describe
from scripts.lib.sources.files import below_common

NEIGHBORS = 20
TEMPERATURE = 0.07


class Features(NamedTuple):
    values: np.ndarray  # float32 [N, C]
    classes: np.ndarray  # class names, [N]


def read_features(path: Path) -> Features:
    """Read JSON lines from predict.py --features. Raises UserError if they are invalid."""
    features = []
    paths = []
    classes = []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for row in map(json.loads, file):
                features.append(np.array(row["features"], np.float32))
                paths.append(os.path.normpath(row["path"]))
        for image, below in zip(paths, below_common(paths), strict=True):
            name, slash, _ = below.partition("/")
            if not slash:
                raise ValueError(f"{image} is not in a class folder")
            classes.append(name)
        return Features(np.stack(features), np.array(classes))
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = "pass the FILE from `python scripts/predict.py runs/NAME FOLDER --features > FILE`"
        raise UserError(str(path), describe(error), fix) from None


def vote_weights(distances: np.ndarray) -> np.ndarray:
    """Return the neighbors' weights for their cosine distances, 1 - similarity."""
    return np.exp((1 - distances) / TEMPERATURE)


def probe_features(train: Path, val: Path) -> int:
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import GridSearchCV, ShuffleSplit
        from sklearn.neighbors import KNeighborsClassifier
    except ImportError:
        raise UserError("scikit-learn", "not found", "run `pip install scikit-learn`") from None
    bank = read_features(train)
    queries = read_features(val)
    classes = set(bank.classes)
    unknown = sorted(set(queries.classes) - classes)
    if unknown:
        problem = f"has images of the class {unknown[0]}, but {train} has none"
        raise UserError(str(val), problem, "use images of the same classes")
    number = min(NEIGHBORS, len(bank.classes))
    knn = KNeighborsClassifier(number, metric="cosine", weights=vote_weights)
    choices = {"C": 10.0 ** np.arange(-6, 7)}  # the search takes the smallest of equally good ones
    tenth = ShuffleSplit(1, test_size=0.1, random_state=0)
    linear = GridSearchCV(LogisticRegression(max_iter=1000), choices, cv=tenth)
    warnings.simplefilter("ignore", ConvergenceWarning)  # the docstring states the limit
    try:
        knn.fit(*bank)
        linear.fit(*bank)
        knn_top1 = 100 * knn.score(*queries)
        linear_top1 = 100 * linear.score(*queries)
    except ValueError as error:  # scikit-learn: a single class, NaN, features of two models
        raise UserError(f"{train}, {val}", str(error).strip().partition("\n")[0]) from None
    images = f"{len(bank.classes):,} training, {len(queries.classes):,} validation images"
    print(f"{images}, {len(classes):,} classes")
    print(f"top1 {knn_top1:.2f} %  knn")
    print(f"top1 {linear_top1:.2f} %  linear, penalty {1 / linear.best_params_['C']:g}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_main(partial(probe_features, OPTIONS.TRAIN, OPTIONS.VAL)))
