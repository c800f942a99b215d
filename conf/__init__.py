"""The configuration. It imports no torch, so that a mistake is answered in under a second."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from conf import streams

# Module -> package that provides it. Without tensorboard a run prints a warning and continues.
PACKAGES = {
    "hydra": "hydra-core",
    "numpy": "numpy",
    "omegaconf": "omegaconf",
    "PIL": "pillow",
    "torch": "torch",
    "torchvision": "torchvision",
}


def _fail(message: str) -> None:
    """Exit with status 2. Of the processes of a node, the first one prints the message."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def _refuse_windows() -> None:
    """Exit if this is Windows: it has no fork, no file locks of fcntl and no SIGUSR1."""
    if sys.platform == "win32":
        _fail("Windows is not supported; use WSL 2 (`wsl --install`), which runs Linux programs")


def _refuse_missing_packages() -> None:
    """Exit if a package is missing, usually outside the environment."""
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
    _fail(f"{', '.join(missing)}: not installed for {sys.executable}; {remedy}")


# Before any other import of the project, so that no script needs checks of its own.
streams.make_unbreakable()
_refuse_windows()
_refuse_missing_packages()
