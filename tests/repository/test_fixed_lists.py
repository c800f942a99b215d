"""Fixed lists, whose changes are decisions."""

from conf.schema import FIELDS
from tests.helpers.processes import ROOT, run_python


def test_project_size_limits():
    """Each part is within its limit in .ci/size, so additions require removals."""
    done = run_python(ROOT / ".ci" / "size")
    assert done.returncode == 0, f"{done.stdout}reduce the code; a fork deletes this test file"


def test_keys_without_effect_on_result():
    """Other keys affect the result. tests/repository/equal has the list of all keys."""
    found = {name for name, f in FIELDS.items() if not f.metadata["affects_result"]}
    sections = {"checkpoint", "run", "log"}
    assert {name for name in found if name.split(".")[0] not in sections} == {
        *("data.storage", "data.on_device", "data.on_error", "data.max_bad_fraction"),
        "model.channels_last",
        *("model.rewrite", "model.compile", "loader.workers", "loader.timeout_seconds"),
        *("train.deterministic", "train.device"),
        *("train.max_steps", "train.validate_every_epochs", "train.best_by", "train.prepare"),
    }
