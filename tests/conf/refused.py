"""The answer of the command line to a mistake."""

import pytest

from conf import cli

DATA = "data.root=/nowhere"  # composing does not read it


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error message for `arguments`, without `train.py: `."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(arguments, script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith("train.py: ") and "Traceback" not in err
    return err.removeprefix("train.py: ").rstrip("\n")
