"""The code gives the stored answers: see record.py, also for an intended change."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema import group_names
from tests.equal import batches, configs
from tests.equal.record import KINDS, stored
from tests.helpers.processes import needs_extras

pytestmark = needs_extras
CONFIGS = stored("configs")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The images, and their digest."""
    root = tmp_path_factory.mktemp("drawn")
    return root, batches.draw(root)


def test_all_recipes_are_stored() -> None:
    for kind in ("batches", "configs"):
        recipes = {line["recipe"] for line in stored(kind) if "recipe" in line}
        assert recipes == {*group_names("recipe")}


@pytest.mark.parametrize("line", stored("batches"), ids=lambda line: line["recipe"])
def test_batches(line: dict[str, Any], drawn: tuple[Path, str]) -> None:
    root, files = drawn
    assert files == line["files"], "other JPEG files have been drawn, perhaps by another Pillow"
    recipe = line["recipe"]
    assert {"recipe": recipe, "files": files, **batches.of_recipe(recipe, root)} == line


@pytest.mark.parametrize("recipe", [line["recipe"] for line in CONFIGS if "recipe" in line])
def test_configs(recipe: str) -> None:
    expected = configs.expanded(CONFIGS, recipe)
    assert len(expected) == 60
    assert {typed: configs.compose(recipe, json.loads(typed)) for typed in expected} == expected


@pytest.mark.parametrize("kind", ["verdicts", "searches"])
def test_verdicts_and_searches(kind: str) -> None:
    assert KINDS[kind](stored(kind)) == stored(kind)
