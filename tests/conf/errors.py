"""Error messages of the command line, and configs that may need more than the core."""

import pytest

from conf import cli
from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import Config

DATA = "data.root=/nowhere"  # composing does not read the directory


def error_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message for `arguments`, without the program's name."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(arguments, script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.partition(": ")[2].rstrip("\n")


def compose_or_skip(overrides: list[str]) -> Config:
    """Compose a config; skip the test if this copy of the program lacks something that it names."""
    try:
        return from_overrides(overrides)
    except UserError as error:
        if "; correct the name or remove it" in str(error):
            pytest.skip(str(error))
        raise
