"""What the tests of several scripts share: a run, which is not to be changed, and mistakes."""

from collections.abc import Callable
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


Mistake = Callable[[Callable[[list[str]], object], str], str]


@pytest.fixture
def mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Mistake:
    """Return the line that a mistake in the arguments prints: the status is 2, and no file made."""
    monkeypatch.chdir(tmp_path)

    def mistake(arguments: Callable[[list[str]], object], words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            arguments(words.split())
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and not list(tmp_path.iterdir())
        return said

    return mistake
