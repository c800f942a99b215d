"""Feature probes compared with their formulas, and from the command line on small JPEGs."""

import re
import sys

import numpy as np
import pytest

from conf.errors import UserError
from engine.files import json_text
from scripts import predict, probe
from tests.helpers.results import newest

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(4, 8))


def test_probe_features_formulas(tmp_path, capsys):
    """Neighbors vote as in a NumPy loop; the penalty is selected without the queries."""
    files = tmp_path / "train", tmp_path / "val"
    rows = {}
    for file, count in zip(files, (300, 100), strict=True):
        labels = RNG.integers(0, 4, count)
        features = (CENTRES[labels] + RNG.normal(size=(count, 8))).astype(np.float32)
        lines = zip(labels.tolist(), features.tolist(), strict=True)
        texts = [json_text({"path": f"/x/{c}/y/a.jpg", "features": v}) for c, v in lines]
        file.write_text("\n".join(texts))
        rows[file] = labels, features / np.linalg.norm(features, axis=1, keepdims=True)
    (labels, bank), (truth, queries) = rows.values()
    hits = 0
    for own, similar in zip(truth, queries @ bank.T, strict=True):
        near = np.argsort(-similar)[:20]
        hits += np.bincount(labels[near], np.exp(similar[near] / 0.07), 4).argmax() == own
    assert probe.probe_features(*files) == 0
    images, knn, linear = capsys.readouterr().out.splitlines()
    assert images == "300 training, 100 validation images, 4 classes"
    assert knn == f"top1 {hits:.2f} %  knn" and 60 < hits < 100
    found = re.fullmatch(r"top1 (\S+) %  linear(, penalty .*)", linear)
    assert found and float(found[1]) > 60
    files[1].write_text("\n".join(texts[:9]))
    assert probe.probe_features(*files) == 0 and f"{found[2]}\n" in capsys.readouterr().out


def test_probe_command_line(folder, image_root, tmp_path, ranks):
    """Features of a run for both splits; and invalid files."""
    files = tmp_path / "train", tmp_path / "val"
    for file in files:
        words = [str(newest(folder)), str(image_root / file.name), "--features", "train.device=cpu"]
        file.write_text(ranks.run([sys.executable, predict.__file__, *words], 1).stdout)
    done = ranks.run([sys.executable, probe.__file__, *map(str, files)], 1)
    images, knn, linear = done.stdout.splitlines()
    assert images == "36 training, 15 validation images, 3 classes"
    # Four images select the penalty here, so the number of threads may change it.
    assert re.fullmatch(r"top1 \d+\.\d\d %  linear, penalty \S+", linear) and knn[-3:] == "knn"
    wrong = {
        '{"path": "checks/a.jpg"}\n': "pass the FILE from .*predict.py",
        json_text({"path": "cats/a.jpg", "features": [0] * 128}): "has images of the class cats",
        json_text({"path": "dots/a.jpg", "features": [0] * 9}): "9 features",
        "\n".join(
            json_text({"path": f"x/{name}", "features": [0]}) for name in ("a.jpg", "a/b.jpg")
        ): "x/a.jpg is not in a class folder",
    }
    for text, message in wrong.items():
        files[1].write_text(text)
        with pytest.raises(UserError, match=message):
            probe.probe_features(*files)
