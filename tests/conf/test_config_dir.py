"""--config-dir: recipes and groups in a folder of the user."""

import shutil
from pathlib import Path

import pytest
import yaml

import train
from conf import cli
from conf.compose import load
from conf.schema import config_values
from scripts.lib.trained import open_trained
from tests.conf.refused import DATA, refusal
from tests.small_run import SMALL_RUN

RECIPE = """\
# @package _global_
defaults:
  - cifar10
  - override /data: fake
  - override /model: wide
optim: {lr: 0.05}
train: {epochs: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe, based on one of the program, and a model."""
    folder = tmp_path / "it's my $conf, a=b"
    for name, content in {"recipe/mine": RECIPE, "model/wide": "name: resnet50\n"}.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    (folder / "trainer").mkdir()  # of another program: not read
    (folder / "trainer" / "default.yaml").write_text("max_epochs: [")
    return folder


@pytest.mark.parametrize("option", [["--config-dir", "{}"], ["-cd", "{}"], ["--config-dir=~/{}"]])
def test_recipe_and_group(option: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute path is kept with the overrides: those of a run also work in another folder."""
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    words = [word.format(folder.name) for word in option]
    config = cli.parse(["recipe=mine", *words], script="train.py", purpose="")
    assert (config.model.name, config.optim.lr, config.run.name) == ("resnet50", 0.05, "mine")
    assert (config.schedule.name, config.schedule.warmup_epochs) == ("linear", 0.5)
    assert sorted(config.typed) == sorted([f"--config-dir={folder}", "recipe=mine"])
    other = cli.parse([*words, DATA, "model=wide", "optim.lr=1"], script="train.py", purpose="")
    assert (other.model.name, other.optim.lr) == ("resnet50", 1)
    monkeypatch.chdir("/")
    assert cli.load(config.typed) == config
    assert load(config.typed, decided={"optim.lr": 0.5}).optim.lr == 0.5


@pytest.mark.usefixtures("toy_runs")
def test_a_run_needs_the_folder_only_for_its_command(
    folder: Path, image_root: Path, tmp_path: Path
) -> None:
    (folder / "model" / "wide.yaml").write_text("name: resnet_tiny\n")
    run = tmp_path / "run"
    small = [*SMALL_RUN[1:], "train.max_steps=1", f"data.root={image_root}", f"run.dir={run}"]
    config = cli.load([f"--config-dir={folder}", "recipe=mine", *small])
    train.train(config)
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == config.typed
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 0.05
    assert train.train(config)["status"] == "finished"  # the same command again
    shutil.rmtree(folder)
    assert open_trained(run, []).config.model == config.model
    assert load(stored=config_values(config)).model == config.model


def test_help_and_wrong_folders(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["-cd", str(folder), "--help"], script="train.py", purpose="")
    assert " | mine | " in capsys.readouterr().out
    for words, says in {
        ("--config-dir",): "argument --config-dir: expected one argument",
        ("-cd", str(tmp_path)): f"--config-dir={tmp_path}: has no folder augment or data or loader",
        ("-cd", str(folder), "recipe=min"): "no such recipe; choose one of ",
    }.items():
        assert says in refusal([DATA, *words], capsys)


def test_a_choice_whose_name_is_a_number(folder: Path) -> None:
    (folder / "recipe" / "10.yaml").write_text(RECIPE)
    (folder / "model" / "18.yaml").write_text("name: resnet18\n")
    config = cli.load([f"--config-dir={folder}", "recipe=10", "model=18"])
    assert (config.recipe, config.model.name) == ("10", "resnet18")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("recipe/demo", RECIPE, "recipe/demo.yaml: has the name of a choice of this program"),
        ("recipe/mine", "optim: {lr: 1}", "write `# @package _global_` in its first line"),
        ("recipe/mine", RECIPE + "log: {every_step: 3}", "there is no key log.every_step; did you"),
        (
            "recipe/mine",
            RECIPE + "log: {every_steps: six}",
            "recipe=mine: log.every_steps=six: not",
        ),
        ("recipe/mine", RECIPE.replace("wide", "wid"), "Could not find 'model/wid'"),
        ("recipe/mine", "# @package _global_\n# \udce4", "mine.yaml: cannot be read as YAML"),
        ("recipe/mine", "# @package _global_\ndefaults: foo", "'recipe/mine', defaults must be a"),
        ("model/wide", "model: {name: resnet18}", "wide.yaml: there is no key model.model; "),
        ("model/wide", "a: &a [1]\nb: [" + "*a," * 21 + "]", "has too many aliases (*name)"),
        ("model/wide", "#" * 100_001, "wide.yaml: is too long"),
        ("model/wide", "[1]", "model/wide.yaml: holds no keys; write `key: value` lines"),
    ],
)
def test_mistakes_in_a_file(
    name: str, content: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{name}.yaml").write_text(content, errors="surrogateescape")
    recipe = ["recipe=mine"] if name.startswith("recipe") else []
    assert says in refusal(["-cd", str(folder), *recipe, "model=wide", DATA], capsys)
