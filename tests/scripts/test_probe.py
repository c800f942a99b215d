"""The probes of features: compared with numpy, and by their commands on small JPEG files."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.schema import UserError
from engine.files import json_text
from scripts import predict, probe
from tests.helpers.processes import run_command, run_python
from tests.helpers.results import newest

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(4, 8))


def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features of four classes that overlap, float32 [N, 8], and their labels."""
    labels = RNG.integers(0, 4, count)
    return (CENTRES[labels] + RNG.normal(size=(count, 8))).astype(np.float32), labels


def test_neighbours_vote_by_their_similarity() -> None:
    (bank, labels), (queries, _) = drawn(300), drawn(40)
    near = (queries / np.linalg.norm(queries, axis=1)[:, None]) @ (
        bank / np.linalg.norm(bank, axis=1)[:, None]
    ).T
    expected = []
    for row in near:
        votes = np.zeros(4)
        for i in np.argsort(-row)[:20]:
            votes[labels[i]] += np.exp(row[i] / 0.07)
        expected.append(votes.argmax())
    found = probe.nearest(*map(torch.from_numpy, (bank, labels, queries)))
    assert found.tolist() == expected
    assert len(probe.nearest(*map(torch.from_numpy, (bank[:3], labels[:3], queries)))) == 40


@pytest.mark.parametrize("penalty", [0.1, 10])
def test_regression_is_at_the_minimum(penalty: float) -> None:
    """The gradient is 0 there; scikit-learn has the same problem with C = 1 / penalty."""
    features, labels = drawn(300)
    layer = torch.nn.Linear(8, 4)
    probe.fit(layer, *map(torch.from_numpy, (features, labels)), penalty)
    weight, bias = (each.detach().double().numpy() for each in layer.parameters())
    logits = features @ weight.T + bias
    odds = np.exp(logits - logits.max(1, keepdims=True))
    error = odds / odds.sum(1, keepdims=True) - np.eye(4)[labels]
    assert abs(error.T @ features + penalty * weight).max() < 0.05
    assert abs(error.sum(0)).max() < 0.05 < abs(features).sum() / 100


def test_penalty_is_chosen_without_the_queries() -> None:
    (bank, labels), (queries, own) = map(drawn, (300, 200))
    found, penalty = probe.linear(*map(torch.from_numpy, (bank, labels, queries)))
    assert penalty in probe.PENALTIES and (found.numpy() == own).mean() > 0.7
    again, same = probe.linear(*map(torch.from_numpy, (bank, labels, -queries)))
    assert same == penalty and (again != found).any()


def test_command(folder: Path, image_root: Path, tmp_path: Path) -> None:
    """The features of a run, of both splits."""
    files = []
    for split in ("train", "val"):
        words = [str(newest(folder)), str(image_root / split), "--features", "train.device=cpu"]
        done = run_python(predict.__file__, *words)
        (tmp_path / split).write_text(done.stdout)
        files.append(tmp_path / split)
    done = run_command([sys.executable, probe.__file__, *map(str, files)])
    assert done.returncode == 0, done.stderr
    first, *scores = done.stdout.splitlines()
    assert first == "36 training, 15 validation images, 3 classes"
    assert [line.split()[0] for line in scores] == ["top1", "top1"]
    assert all(float(line.split()[1]) > 60 for line in scores), done.stdout
    wrong = {
        "": "give lines of predict.py --features",
        '{"path": "checks/a.jpg"}\n': "give lines of predict.py --features",
        json_text({"path": "cats/a.jpg", "features": [0] * 128}): "has images in the folder cats",
        json_text({"path": "dots/a.jpg", "features": [0]}): "has 1 features, .* has 128; use one",
    }
    for text, message in wrong.items():
        files[1].write_text(text)
        with pytest.raises(UserError, match=message):
            probe.run(*files)
