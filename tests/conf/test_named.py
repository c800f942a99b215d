"""Names `module:name` in a config: only code of this checkout, and only if it is there."""

import re
import shutil
from pathlib import Path

import pytest

from conf.compose import from_words
from conf.named import ROOT, import_object, split_entry
from tests.helpers.processes import run_python

# What conf/config.yaml of a copy of the program names besides.
DEFAULTS = """
model: {rewrite: "gone.layers:rewrite"}
multirun: gone:main
log: {observers: ["here:One", {"gone.curves:Curves": {every: 3}}, "gone:Two"]}
"""
REWRITE = "model.rewrite=gone.layers:rewrite"
COMPOSE = """
import sys
from conf.compose import from_words
config = from_words(sys.argv[1:])
print(config.model.rewrite, config.log.observers, *config.notes, sep="\\n")
"""


def test_objects_of_this_checkout() -> None:
    """tests/mistakes.csv has other values, which are refused."""
    assert import_object("conf.named:import_object", "model.rewrite") is import_object
    assert split_entry("a:b", "log.observers") == ("a:b", {})
    assert split_entry({"a:b": {"every": 3}}, "log.observers") == ("a:b", {"every": 3})
    assert split_entry({"a:b": None}, "log.observers") == ("a:b", {})


def test_modules_in_paths_are_no_names() -> None:
    config = from_words(["data.root=nfs:images", "run.name=os:system", "data.val=os:system"])
    assert (config.data.root, config.run.dir) == ("nfs:images", "runs/os:system")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "conf", folder / "conf", ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "conf" / "config.yaml"
    config.write_text(re.sub(r"(?m)^(?!defaults:)\w[\s\S]*", "", config.read_text()) + DEFAULTS)
    (folder / "here.py").touch()
    return folder


@pytest.mark.parametrize(
    ("typed", "rewrite", "observers", "left_out"),
    [
        ("data=fake", "None", "['here:One']", "gone.curves:Curves, gone.layers:rewrite, gone:Two"),
        ("data=fake log.observers=[]", "None", "[]", "gone.layers:rewrite"),
    ],
)
def test_a_default_whose_module_is_missing_is_left_out(
    copy: Path, typed: str, rewrite: str, observers: str, left_out: str
) -> None:
    """With one note, which a run prints at its start."""
    done = run_python("-c", COMPOSE, *typed.split(), cwd=copy)
    found = done.stdout.splitlines()
    assert found[:2] == [rewrite, observers] and len(found) == 3, done
    assert found[2].startswith(f"left out, because it is not in this copy: {left_out}")


def test_a_default_that_is_typed_or_of_a_recipe_is_refused(copy: Path) -> None:
    recipe = copy / "conf" / "recipe" / "own.yaml"
    recipe.write_text("# @package _global_\nlog: {observers: [other:One]}\n")
    for typed, name in (
        (REWRITE, f"{REWRITE}: there is no gone/layers.py"),
        ("recipe=own", "log.observers=other:One: there is no other.py"),
    ):
        done = run_python("-c", COMPOSE, "data=fake", typed, cwd=copy)
        assert f"UserError: {name} in {copy}; only its files are run" in done.stderr


def test_the_program_of_several_values_is_found_through_the_config(copy: Path) -> None:
    code = "from conf import cli; cli.parse(['-m', 'optim.lr=1,2'], script='train.py', purpose='')"
    done = run_python("-c", code, cwd=copy)
    assert (
        done.returncode == 2
        and done.stderr.startswith("train.py: -m=")
        and copy.name in done.stderr
    )
    assert "; only its files are run" in done.stderr and done.stderr.count("\n") == 1


def test_a_module_that_is_there_is_not_left_out(copy: Path) -> None:
    (copy / "gone").mkdir()
    (copy / "gone" / "layers.py").touch()
    (copy / "gone" / "curves.py").touch()
    (copy / "gone" / "__init__.py").touch()
    done = run_python("-c", COMPOSE, "data=fake", "model=vit_s16", cwd=copy)
    observers = "['here:One', {'gone.curves:Curves': {'every': 3}}, 'gone:Two']"
    assert done.stdout.splitlines() == ["gone.layers:rewrite", observers]
