"""Measure frozen features: by nearest neighbours, and by a linear classifier.

    python scripts/predict.py runs/NAME data/train --features > train.jsonl
    python scripts/predict.py runs/NAME data/val --features > val.jsonl
    python scripts/probe.py train.jsonl val.jsonl

The class of an image is the name of its folder. Both ways learn from the images in TRAIN alone;
their top-1 is that of the images in VAL:

knn      The 20 images in TRAIN with the largest cosine similarity vote, with the weight
         exp(similarity / 0.07): arXiv 1805.01978, and 2104.14294 (DINO) for the 20.
linear   Logistic regression on the features as they are, with up to 1,000 iterations of L-BFGS:
         arXiv 2103.00020 (CLIP). The penalty of the squared weights, of 1e-6, 1e-5, ... 1e6, is the
         best one on a tenth of TRAIN, after training on the rest; then all of TRAIN is used.

Both are scikit-learn's (pip install scikit-learn), on the CPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    for name in ("TRAIN", "VAL"):
        parser.add_argument(name, type=Path, help="JSON lines of predict.py --features")
    OPTIONS = parser.parse_args()

import json
from functools import partial

import numpy as np

from conf import cli
from conf.errors import UserError, describe

NEIGHBOURS, TEMPERATURE = 20, 0.07


def read_features(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of images, float32 [N, C], and their folders, [N]. Raises UserError."""
    features, folders = [], []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for row in map(json.loads, file):
                features.append(np.array(row["features"], np.float32))
                folders.append(Path(row["path"]).parent.name)
        return np.stack(features), np.array(folders)
    except (OSError, ValueError, LookupError, TypeError) as error:
        cure = "give the FILE of `python scripts/predict.py runs/NAME FOLDER --features > FILE`"
        raise UserError(f"{path}: {getattr(error, 'strerror', describe(error))}; {cure}") from None


def probe_features(train: Path, val: Path) -> int:
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import GridSearchCV, ShuffleSplit
        from sklearn.neighbors import KNeighborsClassifier
    except ImportError:
        raise UserError("needs scikit-learn; run `pip install scikit-learn`") from None
    (bank, labels), (queries, truth) = read_features(train), read_features(val)
    if unknown := sorted({*truth} - {*labels}):
        raise UserError(f"{val}: has images in the folder {unknown[0]}, and {train} has none there")
    if (sizes := [bank.shape[1], queries.shape[1]])[0] != sizes[1]:
        raise UserError(f"{val}: has {sizes[1]} features, {train} has {sizes[0]}; use one model")
    votes = {"metric": "cosine", "weights": lambda distance: np.exp((1 - distance) / TEMPERATURE)}
    knn = KNeighborsClassifier(min(NEIGHBOURS, len(bank)), **votes).fit(bank, labels)
    # Of equally good penalties the largest, so the smallest C
    tried, tenth = {"C": 10.0 ** np.arange(-6, 7)}, ShuffleSplit(1, test_size=0.1, random_state=0)
    linear = GridSearchCV(LogisticRegression(max_iter=1000), tried, cv=tenth).fit(bank, labels)
    found = {"knn": knn, f"linear, penalty {1 / linear.best_params_['C']:g}": linear}
    classes = len({*labels})
    print(f"{len(bank):,} training, {len(queries):,} validation images, {classes:,} classes")
    for name, model in found.items():
        print(f"top1 {100 * model.score(queries, truth):.2f} %  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(probe_features, OPTIONS.TRAIN, OPTIONS.VAL)))
