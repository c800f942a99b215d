"""--config-dir: recipes and groups in a folder of the user."""

import shutil
from pathlib import Path

import pytest
import yaml

import train
from conf import cli
from conf.compose import load
from conf.schema import UserError, config_values, group_names
from scripts.lib.trained import open_trained
from tests.conf.test_cli import DATA, refusal
from tests.small_run import SMALL_RUN

RECIPE = """\
# @package _global_
defaults:
  - demo
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
    return folder


def test_recipe_and_group(folder: Path) -> None:
    config = cli.load([f"--config-dir={folder}", "recipe=mine"])
    assert (config.model.name, config.optim.lr, config.run.name) == ("resnet50", 0.05, "mine")
    assert config.schedule == cli.load(["recipe=demo"]).schedule
    other = cli.load([f"--config-dir={folder}", DATA, "model=wide", "optim.lr=1"])
    assert (other.model.name, other.optim.lr) == ("resnet50", 1)


@pytest.mark.parametrize("option", [["--config-dir", "{}"], ["-cd", "{}"], ["--config-dir={}"]])
def test_the_folder_is_kept_with_the_overrides(
    option: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absolute path: the overrides of a run also work in another folder."""
    monkeypatch.chdir(folder.parent)
    words = [word.format(folder.name) for word in option]
    config = cli.parse(["recipe=mine", *words], script="train.py", purpose="")
    assert sorted(config.typed) == sorted([f"--config-dir={folder}", "recipe=mine"])
    monkeypatch.chdir("/")
    assert cli.load(config.typed) == config


def test_the_config_is_complete_without_the_folder(folder: Path) -> None:
    """So evaluation and prediction do not need the folder."""
    config = cli.load([f"--config-dir={folder}", "recipe=mine"])
    shutil.rmtree(folder)
    assert load(stored=config_values(config)).model == config.model


@pytest.mark.usefixtures("whole_runs")
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
    assert open_trained(run, []).config.optim.lr == 0.05


def test_values_that_the_program_decides(folder: Path) -> None:
    config = cli.load([f"--config-dir={folder}", "recipe=mine"])
    assert load(config.typed, decided={"because": {"optim.lr": 0.5}}).optim.lr == 0.5


def test_in_the_scripts_with_paths(folder: Path, tmp_path: Path) -> None:
    """The folder exists, but is not a path to a checkpoint."""
    checkpoint = tmp_path / "a.pth"
    checkpoint.touch()
    words = ["--config-dir", str(folder), str(checkpoint), "model=wide"]
    paths, overrides = cli.split_paths(words, what="a file")
    assert paths == [str(checkpoint)]
    assert load(overrides, stored={}).model.name == "resnet50"


def test_help_lists_the_choices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["-cd", str(folder), "--help"], script="train.py", purpose="")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    line = next(line for line in out.splitlines() if line.startswith("  recipe="))
    assert line.split("=")[1].replace("|", " ").split() == group_names("recipe", folder)
    assert "mine" in line


def test_wrong_folders(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words, says in {
        ("--config-dir",): "argument -cd/--config-dir: expected one argument",
        ("-cd", "/nowhere"): "--config-dir=/nowhere: has no folder augment or data or loader",
        ("-cd", str(tmp_path / "empty")): "has no folder augment or data or loader",
        ("-cd", str(folder), "recipe=min"): "no such recipe; choose one of ",
    }.items():
        assert says in refusal([DATA, *words], capsys)


def test_a_folder_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands ~ behind an equals sign."""
    monkeypatch.setenv("HOME", str(folder.parent))
    for word in ("--config-dir", "-cd"):
        typed = [f"{word}=~/{folder.name}", "recipe=mine"]
        assert cli.parse(typed, script="train.py", purpose="").recipe == "mine"
    assert cli.load([f"--config-dir=~/{folder.name}", "recipe=mine"]).recipe == "mine"


def test_files_outside_the_groups_are_not_read(folder: Path) -> None:
    (folder / "trainer").mkdir()
    (folder / "trainer" / "default.yaml").write_text("max_epochs: ???")
    (folder / "notes.yaml").write_bytes(b"\xe4")
    assert cli.load([f"--config-dir={folder}", "recipe=mine"]).recipe == "mine"


def test_a_choice_whose_name_is_a_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "recipe" / "10.yaml").write_text(RECIPE)
    (folder / "model" / "18.yaml").write_text("name: resnet18\n")
    config = cli.load([f"--config-dir={folder}", "recipe=10", "model=18"])
    assert (config.recipe, config.model.name) == ("10", "resnet18")
    assert load([f"--config-dir={folder}", "model=18"], stored={}).model.name == "resnet18"
    assert "recipe=11: no such recipe" in refusal(["-cd", str(folder), "recipe=11"], capsys)


def test_a_group_of_the_recipe_that_is_written_wrongly(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra does not name the file."""
    (folder / "model" / "wide.yaml").write_text("3")
    line = refusal(["-cd", str(folder), "recipe=mine"], capsys)
    assert line.startswith(f"{folder}/model/wide.yaml: is not YAML (Invalid loaded object")
    (folder / "model" / "wide.yaml").write_text("model: {name: resnet18}")
    line = refusal(["-cd", str(folder), "recipe=mine"], capsys)
    assert line.startswith("In 'model/wide': model.model: Key 'model' not in 'Model'")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("recipe/demo", RECIPE, "recipe/demo.yaml: has the name of a choice of this program"),
        ("recipe/mine", "optim: {lr: 1}", "write `# @package _global_` in its first line"),
        ("recipe/mine", RECIPE + "train.epochs: 3", "recipe/mine"),
        ("recipe/mine", RECIPE + "log: {every_step: 3}", "Key 'every_step' not in 'Log'"),
        ("recipe/mine", RECIPE + "log: {every_steps: ???", "mine.yaml: is not YAML (while"),
        ("recipe/mine", RECIPE.replace("wide", "wid"), "Could not find 'model/wid'"),
        ("recipe/mine", "# @package _global_\n# \udce4", "mine.yaml: is not YAML ('utf-8' codec"),
        ("recipe/mine", "# @package _global_\ndefaults: foo", "'recipe/mine', defaults must be a"),
        ("recipe/mine", "# @package _global_\n3", "recipe/mine.yaml: is not YAML (Invalid loaded"),
        ("model/wide", "model: {name: resnet18}", "wide.yaml: Key 'model' not in 'Model'; write "),
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
    if name.startswith("model"):
        with pytest.raises(UserError) as error:
            load([f"--config-dir={folder}", "model=wide"], stored={})
        assert says in str(error.value)
