"""A run that the tests of several scripts share, and do not change."""

from pathlib import Path

import pytest

from tests import small_run


@pytest.fixture(scope="session")
def folder(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps with a moving average, whose name contains `=`."""
    folder = tmp_path_factory.mktemp("runs") / "small,optim.lr=0.05"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        small_run.run(image_root, folder, "train.ema_decay=0.9", "optim.lr=0.05")
    return folder
