"""Several mistakes of a command line, names of classes, and the length of a run's name."""

import os
import re

import pytest

from conf import cli, tables
from conf.compose import from_overrides
from conf.overrides import read_overrides
from conf.schema import FIELDS
from conf.tables import table_names, torchvision_models
from engine.losses import LOSSES
from engine.metrics import METRICS
from models.zoo import OURS, available
from pipeline.data.augment import TRANSFORMS
from pipeline.feed.batch_augment import BATCH_TRANSFORMS
from tests.conf.refused import DATA
from tests.helpers.processes import run_python


def lines(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what the lines of an answer begin with, the words that are wrong."""
    with pytest.raises(SystemExit):
        cli.parse(words.split(), script="train.py", purpose="")
    return [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]


def test_all_mistakes_of_a_command_line_are_answered_at_once(capsys):
    five = "--epochs 90 -b 256 optim.lrr=1 train.precision=bf61 optim=adamww train.seed=1"
    expected = ["--epochs", "-b", "optim.lrr=1", "train.precision=bf61", "optim=adamww"]
    assert lines(five, capsys) == expected
    no_effect = "optim.betas=[0.8,0.9] data.fake_images=50 train.loss=bcee model.name=resnet51"
    wrong = ["data.fake_images=50", "optim.betas=[0.8, 0.9]", "model.name=resnet51"]
    assert lines(no_effect, capsys) == [*wrong, "train.loss=bcee"]


@pytest.mark.parametrize("words", ["optim.lr = 0.3", "optim.lr =0.3", "--lr 0.3", "--seed -1"])
def test_what_follows_a_mistake_is_not_another(words, capsys):
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
def test_names_of_classes_are_taken_as_typed(typed, weights):
    values = read_overrides([f"train.class_weights={typed}"]).values
    assert values == {"train.class_weights": weights}


def test_the_names_in_tables_are_those_of_the_program():
    assert table_names("engine.losses:LOSSES") == [*LOSSES]
    assert table_names("engine.metrics:METRICS") == [*METRICS]
    images = [name for name in TRANSFORMS if name.isidentifier()]
    assert table_names("pipeline.data.augment:TRANSFORMS") == images
    assert table_names("pipeline.feed.batch_augment:BATCH_TRANSFORMS") == [*BATCH_TRANSFORMS]
    assert table_names("models.zoo:OURS") == [*OURS]
    assert {*available()} <= {*OURS, *torchvision_models()}


UNKNOWN = ("train.loss=bcee", "train.best_by=top6", "model.name=resnet51", "augment.val=[resiz]")


def test_unknown_names_are_refused_without_importing_torch():
    options = ("-X", "importtime", "train.py", "data.root=.", *UNKNOWN)
    done = run_python(*options)
    errors = [line for line in done.stderr.splitlines() if line.startswith("train.py")]
    assert (done.returncode, len(errors)) == (2, 4), done.stderr
    assert not re.search(r"\| +(torch|torchvision)$", done.stderr, re.MULTILINE)


def test_a_table_that_cannot_be_read_is_not_checked(monkeypatch):
    monkeypatch.setitem(tables.TABLES, "train.loss", ("engine.losses:NO_TABLE", ""))
    assert from_overrides([DATA, "train.loss=focal"]).train.loss == "focal"


@pytest.mark.parametrize("name", ["timm/any", "models.vit:vit_s16", "regnet_y_400mf", "vit_s16"])
def test_names_that_only_a_library_knows_are_composed(name):
    assert from_overrides([DATA, f"model.name={name}"]).model.name == name


def test_a_run_directory_can_be_created_for_any_name(tmp_path):
    keys = ("train.label_smoothing", "train.ema_decay", "optim.weight_decay", "optim.momentum")
    typed = [f"{key}=0.{'123456789' * 3}" for key in (*keys, "optim.lr", "schedule.final_lr")]
    name = from_overrides([DATA, "schedule=cosine", *typed], varied=FIELDS).run.name
    assert len(os.fsencode(f"{name}.old-20261130-200000-123456")) <= 255
