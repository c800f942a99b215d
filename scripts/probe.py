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
import torch
from torch import Tensor, nn

from conf import cli
from conf.schema import UserError, describe

NEIGHBOURS, TEMPERATURE = 20, 0.07
PENALTIES = [10.0**power for power in range(6, -7, -1)]
BLOCK = 256  # queries; their similarities to ImageNet's training images take 1.3 GB


def read_features(path: Path) -> tuple[Tensor, list[str]]:
    """Return the features of images, float32 [N, C], and their folders. Raises UserError."""
    features, folders = [], []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for row in map(json.loads, file):
                features.append(np.array(row["features"], np.float32))
                folders.append(Path(row["path"]).parent.name)
        return torch.from_numpy(np.stack(features)), folders
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: {describe(error)}; give lines of predict.py --features") from None


def nearest(bank: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Return the class for which the nearest neighbours of each query vote, int64 [N].

    `bank`, `queries`: float32 [*, C]; `labels`: those of the bank, int64.
    """
    bank, queries = (nn.functional.normalize(features) for features in (bank, queries))
    found = []
    for block in queries.split(BLOCK):
        near, rows = (block @ bank.T).topk(min(NEIGHBOURS, len(bank)))
        votes = block.new_zeros(len(block), int(labels.max()) + 1)
        found.append(votes.scatter_add_(1, labels[rows], (near / TEMPERATURE).exp()).argmax(1))
    return torch.cat(found)


def fit(layer: nn.Linear, features: Tensor, labels: Tensor, penalty: float) -> None:
    """Minimise the sum of the cross-entropies plus `penalty` / 2 times the squared weights."""
    lbfgs = torch.optim.LBFGS(layer.parameters(), max_iter=1000, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        lbfgs.zero_grad()
        squares = penalty / 2 / len(labels) * layer.weight.square().sum()
        loss = nn.functional.cross_entropy(layer(features), labels) + squares
        loss.backward()
        return loss

    lbfgs.step(closure)


def linear(bank: Tensor, labels: Tensor, queries: Tensor) -> tuple[Tensor, float]:
    """Return the class of each query by logistic regression, int64 [N], and the penalty."""
    layer = nn.Linear(bank.shape[1], int(labels.max()) + 1, device=bank.device)
    nn.init.zeros_(layer.weight)
    held, rest = np.split(np.random.default_rng(0).permutation(len(bank)), [len(bank) // 10])
    scores = []
    for penalty in PENALTIES:  # each begins at the result of the larger one before
        fit(layer, bank[rest], labels[rest], penalty)
        scores.append((layer(bank[held]).argmax(1) == labels[held]).sum().item())
    best = PENALTIES[int(np.argmax(scores))]
    fit(layer, bank, labels, best)
    return layer(queries).argmax(1), best


def run(train: Path, val: Path) -> int:
    (bank, folders), (queries, own) = read_features(train), read_features(val)
    places = {name: place for place, name in enumerate(sorted({*folders}))}
    if unknown := sorted({*own} - {*folders}):
        raise UserError(f"{val}: has images in the folder {unknown[0]}, and {train} has none there")
    if (sizes := [bank.shape[1], queries.shape[1]])[0] != sizes[1]:
        raise UserError(f"{val}: has {sizes[1]} features, {train} has {sizes[0]}; use one model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    labels, truth = (torch.tensor([places[name] for name in names]) for names in (folders, own))
    bank, labels, queries = bank.to(device), labels.to(device), queries.to(device)
    by_regression, penalty = linear(bank, labels, queries)
    by_votes = nearest(bank, labels, queries)
    print(f"{len(bank):,} training, {len(queries):,} validation images, {len(places):,} classes")
    for name, found in (("knn", by_votes), (f"linear, penalty {penalty:g}", by_regression)):
        print(f"top1 {100 * (found.cpu() == truth).double().mean().item():.2f} %  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(run, OPTIONS.TRAIN, OPTIONS.VAL)))
