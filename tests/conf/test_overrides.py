"""Several errors in one command line, class names as keys, and the length of the run name."""

import os

import pytest

from conf import cli
from conf.compose import from_overrides
from conf.errors import UserError
from conf.overrides import read_overrides
from conf.schema import FIELDS
from tests.conf.errors import DATA


def lines(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the invalid word that starts each line of the error message."""
    with pytest.raises(SystemExit):
        cli.parse(words.split(), script="train.py", purpose="")
    return [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]


def test_cli_reports_all_errors_at_once(capsys):
    five = "--epochs 90 -b 256 optim.lrr=1 train.precision=bf61 optim=adamww train.seed=1"
    expected = ["--epochs", "-b", "optim.lrr=1", "train.precision=bf61", "optim=adamww"]
    assert lines(five, capsys) == expected
    no_effect = "optim.betas=[0.8,0.9] data.fake_images=50"
    assert lines(no_effect, capsys) == ["data.fake_images=50", "optim.betas=[0.8, 0.9]"]


@pytest.mark.parametrize("words", ["optim.lr = 0.3", "optim.lr =0.3", "--lr 0.3", "--seed -1"])
def test_cli_skips_words_after_an_error(words, capsys):
    assert lines(f"{words} train.epochs=2", capsys) == [words.split()[0]]


CLASS_WEIGHTS = {
    "{7: 2, 8: 0.5}": {"7": 2, "8": 0.5},
    "{10_2: 3,true:1}": {"10_2": 3, "true": 1},
    "{1: 2, 1.0: 1e-3}": {"1": 2, "1.0": 0.001},
    "{été: 2, 010: 3}": {"été": 2, "010": 3},
    "{'a, b': 2, a b: 1}": {"a, b": 2, "a b": 1},
    "{a:b: 2}": {"a:b": 2},
}


@pytest.mark.parametrize(("typed", "weights"), CLASS_WEIGHTS.items())
def test_read_overrides_class_names(typed, weights):
    values = read_overrides([f"train.class_weights={typed}"]).values
    assert values == {"train.class_weights": weights}


def test_read_overrides_number_with_too_many_digits():
    digits = "1" * 5000  # int() raises ValueError for more than 4300
    with pytest.raises(UserError, match="invalid value; expected a number > 0"):
        read_overrides([f"optim.lr={digits}"])


def test_run_name_fits_in_a_file_name(tmp_path):
    keys = ("train.label_smoothing", "train.ema_decay", "optim.weight_decay", "optim.momentum")
    typed = [f"{key}=0.{'123456789' * 3}" for key in (*keys, "optim.lr", "schedule.final_lr")]
    name = from_overrides([DATA, "schedule=cosine", *typed], varied=FIELDS).run.name
    assert len(os.fsencode(f"{name}.old-20261130-200000-123456")) <= 255
