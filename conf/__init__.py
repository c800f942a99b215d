"""What a user may choose. Nothing here imports torch, so a mistake is answered in under a second."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Module -> package that brings it. Without tensorboard a run warns and continues.
PACKAGES = {
    "hydra": "hydra-core",
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "PIL": "pillow",
    "torch": "torch",
    "torchvision": "torchvision",
}


def _refuse_missing_packages() -> None:
    """Leave with status 2 and one line when a package is not installed, as it is outside the virtual environment.

    This runs before any other import of the project, so that no program needs a check of its own.
    """
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if not missing:
        return
    environment = Path(__file__).absolute().parent.parent / ".venv"
    if (environment / "bin" / "activate").exists() and Path(sys.prefix) != environment:
        remedy = f"run `source {os.path.relpath(environment)}/bin/activate` first"
    else:
        remedy = (
            "run `make env` and `source .venv/bin/activate`, or `pip install -r requirements.txt`"
        )
    names = ", ".join(missing[:-1]) + " and " * (len(missing) > 1) + missing[-1]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {names} {'are' if len(missing) > 1 else 'is'} not installed for {sys.executable}; "
              f"{remedy}", file=sys.stderr)  # fmt: skip
    sys.exit(2)


_refuse_missing_packages()
