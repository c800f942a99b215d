"""Recipes and groups in user files, selected by path."""

import shutil
from pathlib import Path

import pytest
import yaml

import train
from conf.compose import from_checkpoint, from_overrides
from conf.schema import config_values
from scripts.lib.trained import open_trained
from tests.conf.errors import DATA, error_message
from tests.helpers.small_run import SMALL_RUN

RECIPE = """\
defaults:
  - cifar10
  - override /data: fake
  - override /model: wide
optim: {lr: 0.05}
schedule: {warmup_epochs: 0.5}
train: {epochs: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a directory with a model and with a recipe based on a built-in recipe."""
    folder = tmp_path / "it's my $conf, a=b"
    files = {"recipe/mine": RECIPE, "model/wide": "name: resnet50\n"}
    files["trainer/default"] = "max_epochs: ["  # a different program's; not read
    for name, content in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    return folder


def test_from_overrides_reads_recipe_and_group_by_path(folder, monkeypatch):
    """The overrides contain the absolute path, so they are also valid in a different directory."""
    monkeypatch.setenv("HOME", str(folder.parent))
    config = from_overrides([f"recipe=~/{folder.name}/recipe/mine.yaml"])
    assert (config.model.name, config.optim.lr, config.run.name) == ("resnet50", 0.05, "mine")
    assert (config.schedule.name, config.schedule.warmup_epochs) == ("linear", 0.5)
    assert from_overrides(config.overrides, decided={"optim.lr": 0.5}).optim.lr == 0.5
    other = from_overrides([DATA, f"model={folder}/model/wide.yaml", "optim=adamw", "optim.lr=1"])
    assert (other.model.name, other.optim.name, other.optim.lr) == ("resnet50", "adamw", 1)


@pytest.mark.usefixtures("toy_runs")
def test_run_readable_without_recipe_folder(folder, image_root, tmp_path):
    (folder / "model" / "wide.yaml").write_text("name: resnet_tiny\n")
    run = tmp_path / "run"
    small = [*SMALL_RUN[1:], "train.max_steps=1", f"data.root={image_root}", f"run.dir={run}"]
    config = from_overrides([f"recipe={folder}/recipe/mine.yaml", *small])
    train.train(config)
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == config.overrides
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 0.05
    assert train.train(config)["status"] == "finished"  # the same command again
    shutil.rmtree(folder)
    assert open_trained(run, []).config.model == config.model
    assert from_checkpoint(config_values(config)).model == config.model


CASES = [  # file in the directory, its content, the message
    ("recipe/mine", "optim:\n  lr=0.1", "unknown key; write optim=adamw"),
    ("recipe/mine", "defaults: [{model: resnet51}]", "to select a group in a recipe, write"),
    ("recipe/mine", RECIPE + "log: {every_step: 3}", "unknown key; did you"),
    ("recipe/mine", RECIPE.replace("wide", "wid"), "Could not find 'model/wid'"),
    ("recipe/mine", "# \udce4", "mine.yaml: cannot be read as YAML"),
    ("model/wide", "[1]", "model/wide.yaml: contains no keys; write `key: value` lines"),
]


@pytest.mark.parametrize(("name", "content", "message"), CASES)
def test_cli_reports_errors_in_recipe_files(name, content, message, folder, capsys):
    (folder / f"{name}.yaml").write_text(content, errors="surrogateescape")
    group = name.partition("/")[0]
    assert message in error_message([f"{group}={folder}/{name}.yaml", DATA], capsys)
