"""Mistakes in the arguments of the scripts."""

from pathlib import Path
from types import ModuleType

import pytest

from scripts import evaluate, export, predict, prepare


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (evaluate, "", "CHECKPOINT: is missing; give the folder of a run (runs/NAME), a check"),
        (export, ".", "--to: is missing; give onnx or pt2 or safetensors or hub"),
        (export, ". --to pt2 --out a.onnx", "--out a.onnx: give a file that ends in .pt2"),
        (export, ". --to safetensors --preprocessing", "--preprocessing: a safetensors file has n"),
        (export, ". --to pt2 train.precision=bf16", "train.precision: an exported file computes i"),
        (export, ". --to onnx", "onnxscript, onnxruntime; `pip install onnx onnxscript onnxruntim"),
        (predict, "runs/b,lr=1 a.jpg", "runs/b,lr=1: there is no such run directory or file; give"),
        (predict, "- .", "give a checkpoint, then images or folders, or - for a list"),
        (predict, ".", "give a checkpoint, then images or folders, or - for a list"),
        (predict, ". . --top 0", "--top 0: give 1 or more"),
        (predict, ". . data.val_siz=32", "data.val_siz=32: there is no key"),
        (prepare, "in --to out --side 3", "--side 3: give 8 to 8192"),
    ],
)
def test_mistakes(
    script: ModuleType,
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are one line, the status is 2, and no file is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "find_spec", lambda name: True if name == "onnx" else None)
    with pytest.raises(SystemExit, match="2"):
        script.arguments(words.split())
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
