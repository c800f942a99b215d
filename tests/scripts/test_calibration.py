"""Temperatures are fitted, stored beside checkpoints and used for these weights only."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from scripts import evaluate, export, predict
from scripts.lib import calibration, notebook
from scripts.lib.trained import open_trained
from tests.helpers.results import newest

CPU = torch.device("cpu")
HERE = ["train.device=cpu", "loader.workers=0"]


def test_fit_temperature_minimizes_cross_entropy():
    """Labels are drawn from softmax(logits / 2.5)."""
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(5000, 7, generator=rng)
    labels = (logits / 2.5).softmax(1).multinomial(1, generator=rng)[:, 0]
    temperatures = torch.linspace(2, 3, 1001, dtype=torch.float64)
    losses = [F.cross_entropy(logits.double() / t, labels) for t in temperatures]
    best = temperatures[torch.stack(losses).argmin()].item()
    found = calibration.calibrate(logits, labels, CPU)
    assert found["temperature"] == pytest.approx(best, abs=0.02) == pytest.approx(2.5, abs=0.1)
    assert found["ece_odd_calibrated"] < 3 < 10 < found["ece_odd"]
    assert 0.01 < calibration.fit_temperature(logits, logits.argmax(1), CPU) < 1  # all are correct


def probabilities(path: Path, image_root: Path, capsys: pytest.CaptureFixture, *words: str):
    """Return the classes that predict.py prints for an image, and their probabilities."""
    image = image_root / "val" / "dots" / "00.jpg"
    assert predict.predict_all(predict.arguments([str(path), str(image), *HERE, *words])) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    entries = sorted(row["predictions"], key=lambda entry: entry["index"])
    return torch.tensor([entry["probability"] for entry in entries])


def test_temperature_of_run(folder, image_root, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(folder, "run"))
    stored = run / "checkpoints" / calibration.FILE

    def evaluated(*words: str) -> str:
        assert evaluate.evaluate_one(evaluate.arguments([*words, *HERE, "--out", "out"])) == 0
        return capsys.readouterr().out

    plain = probabilities(run, image_root, capsys)
    for words in (["--flip"], [f"data.val={image_root / 'train'}"]):
        evaluated(str(run), *words)
        assert not stored.exists()
    assert f"stored in {stored}" in evaluated(str(run))
    temperature = json.loads(Path("out/evaluation.json").read_text())["temperature"]
    assert list(json.loads(stored.read_text()).values()) == [temperature]
    scaled = (plain.log() / temperature).softmax(0)
    assert probabilities(run, image_root, capsys) == pytest.approx(scaled, abs=1e-4)
    assert f"softmax(logits / {temperature:.4g})" in caplog.messages[-1]
    (result,) = notebook.predict(str(run), str(image_root / "val" / "dots" / "00.jpg"))
    highest = result.values["predictions"][0]["probability"]
    assert highest == pytest.approx(scaled.max().item(), abs=1e-4)
    export.export_model(export.arguments([str(run), "--to", "safetensors", *HERE]))
    capsys.readouterr()
    exported = Path("run-best.safetensors")
    assert probabilities(exported, image_root, capsys) == pytest.approx(scaled, abs=1e-4)
    forced = probabilities(run, image_root, capsys, "--temperature", "1")
    assert forced == pytest.approx(plain, abs=1e-5)
    # Different weights or preprocessing, then a folder that cannot be written.
    probabilities(newest(run).with_name("step-00000005.pt"), image_root, capsys)
    probabilities(run, image_root, capsys, "data.val_size=48")
    assert caplog.text.count(f"{stored}: fitted to other ") == 2
    stored.unlink()
    stored.mkdir()
    assert "pass --temperature " in evaluated(str(run))
    monkeypatch.setattr(evaluate, "MAX_LOGITS", 44)  # 15 images, 3 classes
    assert "softmax" not in evaluated(str(run))


def test_evaluate_soup(folder, image_root, tmp_path, monkeypatch, capsys, caplog):
    """The first run, with a head that would turn the average around, is the worst."""
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    content = torch.load(newest(folder), weights_only=True)
    head = content["state"]["ema"]["fc.weight"].clone()
    for name, scale in (("worst", -10), ("first", 1), ("second", 3)):
        content["state"]["ema"]["fc.weight"] = scale * head
        torch.save(content, f"{name}.pt")
    words = ["worst.pt", "first.pt", "second.pt", "--soup", "soup.safetensors", *HERE]
    assert evaluate.evaluate_one(evaluate.arguments([*words, "--out", "out"])) == 0
    assert "added: second.pt (top1 " in caplog.text and "not added: worst.pt (top1 " in caplog.text
    soup, first = open_trained(Path("soup.safetensors")), open_trained(Path("first.pt"))
    assert soup.classes == first.classes
    for name, value in first.weights.items():
        assert torch.equal(soup.weights[name], 2 * value if name == "fc.weight" else value)
    content["model_input"]["classes"] = ["a", "b", "c"]
    torch.save(content, "second.pt")
    with pytest.raises(evaluate.UserError, match=r"^--soup: second\.pt: its model, classes, "):
        evaluate.evaluate_one(evaluate.arguments(words))
    with pytest.raises(evaluate.UserError, match=r"^--soup a\.pt: invalid suffix; expected \.safe"):
        evaluate.evaluate_one(evaluate.arguments(["first.pt", "--soup", "a.pt", *HERE]))
