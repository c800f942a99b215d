"""The code gives the stored answers. See record.py about intended changes."""

import json
from pathlib import Path

import pytest

from conf.schema import group_names
from engine.log.verdict import REMEDIES
from tests.helpers.processes import needs_extras
from tests.repository.equal import batches, configs
from tests.repository.equal.record import KINDS, stored

pytestmark = needs_extras
CONFIGS = stored("configs")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Draw the images; return their root and digest."""
    root = tmp_path_factory.mktemp("drawn")
    return root, batches.draw(root)


@pytest.mark.parametrize("recipe", group_names("recipe"))
def test_batches_equal_stored(recipe, drawn):
    root, files = drawn
    (line,) = (line for line in stored("batches") if line["recipe"] == recipe)
    assert files == line["files"], "different JPEG files were drawn; check the version of Pillow"
    assert {"recipe": recipe, "files": files, **batches.recipe_digests(recipe, root)} == line


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
)
@pytest.mark.parametrize(("number", "recipe"), [*enumerate(group_names("recipe"))])
def test_configs_equal_stored(number, recipe, part):
    """Test a tenth of the lists of overrides, a different one for each recipe."""
    expected = configs.expanded(CONFIGS, recipe)
    assert len(expected) == 59
    for typed in [*expected][(number + part) % 10 :: 10]:
        assert configs.compose(recipe, json.loads(typed)) == expected[typed], typed


def test_verdicts_equal_stored():
    assert KINDS["verdicts"](stored("verdicts")) == stored("verdicts")


def test_remedies_cover_all_causes_but_two():
    causes = {case["cause"] for case in stored("verdicts")[1:]}
    assert causes - REMEDIES.keys() == {"input-bound by transfer from the workers", "compute-bound"}
