"""Errors of the system are one line, with the place in this program."""

import pytest

from conf.files import described
from tests.sources import ROOT


def test_the_place_of_an_error_is_not_in_a_library() -> None:
    """`make env` installs the libraries below the program's folder."""
    library = compile("open('nowhere')", str(ROOT / ".venv/lib/site-packages/library.py"), "exec")
    with pytest.raises(OSError) as caught:
        exec(library)
    assert "(tests/conf/test_files.py:" in described(caught.value)
