"""The probes of features: compared with scikit-learn, and by their commands on small JPEG files."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from conf.schema import UserError
from engine.files import json_text
from scripts import predict, probe
from tests.conftest import CLASSES
from tests.helpers.ranks import Ranks
from tests.helpers.results import newest

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(4, 8))


def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features of four classes that overlap, float32 [N, 8], and their labels."""
    labels = RNG.integers(0, 4, count)
    return (CENTRES[labels] + RNG.normal(size=(count, 8))).astype(np.float32), labels


def test_neighbours_vote_as_in_scikit_learn() -> None:
    (bank, labels), (queries, _) = drawn(300), drawn(40)
    ours = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    found = probe.nearest(*map(torch.from_numpy, (bank, labels, queries)))
    assert found.tolist() == ours.fit(bank, labels).predict(queries).tolist()
    assert len(probe.nearest(*map(torch.from_numpy, (bank[:3], labels[:3], queries)))) == 40


@pytest.mark.parametrize("penalty", [0.1, 10])
def test_regression_is_scikit_learns(penalty: float) -> None:
    features, labels = drawn(300)
    layer = torch.nn.Linear(8, 4)
    probe.fit(layer, *map(torch.from_numpy, (features, labels)), penalty)
    theirs = LogisticRegression(C=1 / penalty, tol=1e-6).fit(features, labels)
    assert layer.weight.detach().numpy() == pytest.approx(theirs.coef_, abs=0.01)


def test_penalty_is_chosen_without_the_queries() -> None:
    (bank, labels), (queries, own) = map(drawn, (300, 200))
    found, penalty = probe.linear(*map(torch.from_numpy, (bank, labels, queries)))
    assert penalty in probe.PENALTIES and (found.numpy() == own).mean() > 0.7
    again, same = probe.linear(*map(torch.from_numpy, (bank, labels, -queries)))
    assert same == penalty and (again != found).any()


def test_command(folder: Path, image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The features of a run, of both splits: it prints what `nearest` finds."""
    files = tmp_path / "train", tmp_path / "val"
    for file in files:
        words = [str(newest(folder)), str(image_root / file.name), "--features", "train.device=cpu"]
        file.write_text(ranks.run([sys.executable, predict.__file__, *words], 1).stdout)
    done = ranks.run([sys.executable, probe.__file__, *map(str, files)], 1)
    assert done.returncode == 0, done.stderr
    (bank, folders), (queries, own) = map(probe.read_features, files)
    labels, truth = (torch.tensor([*map(CLASSES.index, names)]) for names in (folders, own))
    images, knn, linear = done.stdout.splitlines()
    assert images == "36 training, 15 validation images, 3 classes"
    assert knn == f"top1 {(probe.nearest(bank, labels, queries) == truth).sum() / 0.15:.2f} %  knn"
    # The penalty is chosen by three images here: the number of threads may change it.
    assert re.fullmatch(r"top1 \d+\.\d\d %  linear, penalty \S+", linear)
    wrong = {
        '{"path": "checks/a.jpg"}\n': "give lines of predict.py --features",
        json_text({"path": "cats/a.jpg", "features": [0] * 128}): "has images in the folder cats",
        json_text({"path": "dots/a.jpg", "features": [0]}): "has 1 features, .* has 128; use one",
    }
    for text, message in wrong.items():
        files[1].write_text(text)
        with pytest.raises(UserError, match=message):
            probe.run(*files)
