"""Config layers. Commands share a run directory if and only if they train the same."""

import csv
import shlex
from pathlib import Path
from typing import Any

import pytest

from conf.compose import from_checkpoint, from_overrides
from conf.errors import UserError
from conf.schema import Config, config_values, result_keys
from tests.conf.errors import DATA, compose_or_skip


def composed(typed: str) -> Config:
    return compose_or_skip([DATA, *shlex.split(typed)])


# Pairs of commands that train the same ("same") or not; tests/repository/equal has more pairs.
with Path(__file__).with_name("pairs.csv").open(newline="", encoding="utf-8") as file:
    PAIRS = [*csv.reader(file)]
SAME, OTHER = ([pair for kind, *pair in PAIRS if kind == wanted] for wanted in ("same", "other"))
# run_identity contains the content that these keys select.
IGNORED = ("data.root", "data.val", "loader.decoder", "model.weights")


@pytest.mark.parametrize(("one", "other"), SAME)
def test_run_dir_equal_for_equal_training(one, other):
    first, second = composed(one), composed(other)
    assert first.run == second.run
    ignored = dict.fromkeys(IGNORED)
    assert result_keys(first) | ignored == result_keys(second) | ignored


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_run_dir_differs_for_different_training(one, other):
    first, second = composed(one), composed(other)
    assert first.run.dir != second.run.dir
    assert result_keys(first) != result_keys(second)


@pytest.fixture
def values() -> dict[str, Any]:
    return config_values(compose_or_skip(["recipe=imagenet_rn50_fast", "data.root=/images"]))


def test_from_checkpoint_roundtrip(values):
    assert config_values(from_checkpoint(values)) == values
    del values["data.on_error"]  # written by a different version
    assert from_checkpoint({**values, "data.former": 3, "ranks": 8}).data.on_error == "raise"
    # Transforms and losses may have been renamed since.
    former = {**values, "augment.train": ["former"], "train.loss": "former"}
    assert from_checkpoint(former).train.loss == "former"


def test_from_checkpoint_drops_deleted_code(values):
    """Drop deleted code if it does not affect the result, as in a fork that deletes an extra."""
    gone = {**values, "log.observers": ["gone:Observer"], "model.rewrite": "gone:rewrite"}
    assert config_values(from_checkpoint(gone)) == values
    with pytest.raises(UserError, match=r"model\.name=gone:net: gone\.py not found in .*; correct"):
        from_checkpoint({**values, "model.name": "gone:net"})


def test_from_checkpoint_val_size_scales_transforms(values):
    assert values["data.val_size"] == 256
    entries = [
        "v2.RandomInvert",
        {"resize": {"size": 300}},
        {"resize": {"size": [256, 256]}},
        {"resize": {"size": 256, "crop_ratio": 0.875}},
    ]
    config = from_checkpoint({**values, "augment.val": entries}, ["data.val_size=288"])
    assert config.augment.val == [
        "v2.RandomInvert",
        {"resize": {"size": 338}},
        {"resize": {"size": [288, 288]}},
        {"resize": {"size": 288, "crop_ratio": 0.875}},
    ]
    assert config.data.image_size == 192


def test_from_checkpoint_applies_overrides(values):
    config = from_checkpoint(values, ["augment=demo", "data.root=/other", "data.mean=[0,0,0]"])
    assert config.augment.val[0] == {"resize": {"size": 256}}
    assert (config.data.root, config.data.mean) == ("/other", [0, 0, 0])
    for override, message in {
        "optim.lrr=1": "unknown key",
        "data.val_size=7": "invalid value",
        "recipe=demo": "the checkpoint contains the config; remove recipe=NAME",
    }.items():
        with pytest.raises(UserError, match=message):
            from_checkpoint(values, [override])


@pytest.mark.parametrize("value", ["${oc.env:HOME}", 5.5, [1], {"a": 1}])
def test_from_checkpoint_checks_stored_values(values, value):
    message = "only" if isinstance(value, str) else "invalid value"
    with pytest.raises(UserError, match=rf"data\.image_size=.*: {message}"):
        from_checkpoint({**values, "data.image_size": value})


def test_overrides_resolve_environment_in_paths(monkeypatch):
    monkeypatch.setenv("DIR", "/images")
    config = from_overrides(["data.root=${oc.env:DIR}/a", "run.dir=${oc.env:NONE,/runs}/${now:%Y}"])
    assert config.data.root == "/images/a"
    assert config.run.dir.startswith("/runs/20")
