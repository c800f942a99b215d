"""Build backend for `pip install .`, which always fails because there is nothing to install."""

import sys
from typing import Any, NoReturn

MESSAGE = (
    "imagenet-trainer is cloned and edited, not installed; run `make env` in the clone, or "
    "`pip install -r requirements.txt` for its dependencies, and then `python train.py`"
)


def fail(*_: Any, **__: Any) -> NoReturn:
    sys.exit(MESSAGE)


build_wheel = build_editable = build_sdist = fail
