"""The code gives the stored answers: see record.py, also for an intended change."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.equal import batches, configs, searches, verdicts
from tests.equal.record import stored
from tests.processes import needs_extras

pytestmark = needs_extras
CONFIGS = stored("configs")
USUAL, *CASES = stored("verdicts")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The images, and their digest."""
    root = tmp_path_factory.mktemp("drawn")
    return root, batches.draw(root)


@pytest.mark.parametrize("line", stored("batches"), ids=lambda line: line["recipe"])
def test_batches(line: dict[str, Any], drawn: tuple[Path, str]) -> None:
    root, files = drawn
    assert files == line["files"], "other JPEG files have been drawn, perhaps by another Pillow"
    found = batches.of_recipe(line["recipe"], root)
    for split in ("train", "val"):
        pairs = list(zip(found[split], line[split], strict=True))
        assert len(pairs) == batches.BATCHES
        assert not [f"{split} batch {n}" for n, (now, was) in enumerate(pairs) if now != was]


@pytest.mark.parametrize("recipe", [line["recipe"] for line in CONFIGS if "recipe" in line])
def test_configs(recipe: str) -> None:
    wrong = []
    expected = configs.expanded(CONFIGS, recipe)
    assert len(expected) == 60
    for typed, was in expected.items():
        now = configs.compose(recipe, json.loads(typed))
        if was is None or now is None:
            changed = [] if was is now else ["was refused" if was is None else "is refused"]
        else:
            keys = [key for key in was | now if was.get(key) != now.get(key)]
            changed = [f"{key} was {was.get(key, '-')}, is {now.get(key, '-')}" for key in keys]
        wrong += [f"{typed}: {change}" for change in changed]
    assert not wrong, "\n".join([f"recipe={recipe} with", *wrong[:10]])


@pytest.mark.parametrize("line", CASES)
def test_verdicts(line: dict[str, Any]) -> None:
    assert verdicts.answered([USUAL, line]) == [USUAL, line]


@pytest.mark.parametrize("line", stored("searches"), ids=lambda line: line["sweep"])
def test_searches(line: dict[str, Any]) -> None:
    assert searches.answered([line]) == [line]
