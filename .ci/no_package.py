"""The build backend of `pip install .`, which refuses: there is nothing to install."""

import sys
from typing import Any, NoReturn

REFUSAL = (
    "imagenet-trainer is cloned and changed, not installed: run `make env` in the clone, or "
    "`pip install -r requirements.txt` for its dependencies, and then `python train.py`"
)


def refuse(*_: Any, **__: Any) -> NoReturn:
    sys.exit(REFUSAL)


build_wheel = build_editable = build_sdist = refuse
