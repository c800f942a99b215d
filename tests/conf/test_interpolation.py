"""Interpolations: other keys, the time and paths from the environment; no other function."""

from pathlib import Path

import pytest

from conf import cli
from conf.compose import load
from conf.schema import UserError, config_values

DEMO = "recipe=demo"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("FOLDER", "/images")


def test_paths_may_come_from_the_environment() -> None:
    config = cli.load(
        [DEMO, "data.root=${oc.env:FOLDER}", "run.dir=${oc.env:NONE,/runs}/${now:%Y}"]
    )
    assert config.data.root == "/images"
    assert config.run.dir.startswith("/runs/20")
    roots = cli.load([DEMO, "data.root=[${oc.env:FOLDER},/more]"]).data.root
    assert roots == ["/images", "/more"]


@pytest.mark.parametrize(
    "override",
    [
        "run.name=${oc.env:SECRET}",
        "run.name='${oc.env:SECRET}'",
        "run.name=${oc.env:NONE,${oc.env:SECRET}}",
        "run.name=${now:${oc.env:SECRET}}",
        "run.name=${data.${oc.env:SECRET}}",
        "optim.lr=${oc.env:SECRET}",
        "model.args={drop_path_rate: ${oc.env:SECRET}}",
        "augment.train=[{resize: {size: ${oc.env:SECRET}}}]",
    ],
)
def test_other_values_from_the_environment_are_refused(override: str) -> None:
    """Their values would be stored in config.yaml, event files and checkpoints."""
    values = config_values(cli.load([DEMO]))
    message = r"only \$\{key\} and .* are allowed"
    with pytest.raises(UserError, match=message):
        cli.load([DEMO, override])
    with pytest.raises(UserError, match=message):
        load([override], stored=values)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.decode:'[1]'}",
        "${oc.select:data.root}",
        "${oc.create:{a: 1}}",
        "${oc.deprecated:run.name}",
        "${hydra:runtime.cwd}",
        "${python_version:}",
    ],
)
def test_other_functions_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"^run\.dir=.*: only .* are allowed, .*; write the value"):
        cli.load([DEMO, f"run.dir={value}"])


def test_environment_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe" / "mine.yaml"
    recipe.parent.mkdir()
    head = "# @package _global_\ndefaults:\n  - demo\n  - _self_\n"
    words = [f"--config-dir={tmp_path}", "recipe=mine"]
    recipe.write_text(f"{head}model: {{args: {{name: '${{oc.env:SECRET}}'}}}}\n")
    with pytest.raises(UserError, match=r"^model\.args=\{name: \$\{oc\.env:SECRET\}\}: only "):
        cli.load(words)


def test_references_to_other_keys() -> None:
    config = cli.load([DEMO, "run.name=${train.seed}-${optim.lr}-${data.mean[0]}"])
    assert config.run.name == "0-0.2-0.485"
