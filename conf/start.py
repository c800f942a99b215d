"""The start of a program, before torch is imported: environment, packages, command line.

    if __name__ == "__main__":
        CONFIG = start(__doc__)  # a script with options makes a scripts.lib.options.Parser

Only the standard library is imported here, because any other package may be missing.
"""

import atexit
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from conf.files import described
from conf.launch import complain, fail, stop_with_parent
from conf.schema import Config

# Module -> package that provides it. Without tensorboard a run prints a warning and continues.
PACKAGES = {"hydra": "hydra-core", "PIL": "pillow"}
PACKAGES |= {name: name for name in ("numpy", "omegaconf", "safetensors", "torch", "torchvision")}


def start(doc: str | None) -> Config:
    """Set up the process of train.py and return the config of its command line.

    Raises SystemExit after --help, --cfg job, -m or a mistake. `doc`: the docstring of the
    program, whose first line --help prints; None with `python -OO`.
    """
    set_up_process()
    from conf import cli  # Hydra may be missing

    script = Path(sys.argv[0]).name
    return cli.parse(sys.argv[1:], script=script, purpose=doc or "")


def set_up_process() -> None:
    """Check the platform and the packages, and set what torch reads once, at its import.

    After Ctrl-C, and when the reader of a pipe has ended (`| head`), the program ends quietly.
    """
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if sys.platform == "win32":  # no fork, no file locks of fcntl and no SIGUSR1
        fail(
            "Windows is not supported; run `wsl --install` in PowerShell and restart: then clone "
            "and run this program in that Linux (WSL 2), which sees the GPU"
        )
    if missing:
        fail(
            f"{', '.join(missing)}: not installed for {sys.executable}; run `make env` and `source "
            ".venv/bin/activate`, or `pip install -r requirements.txt`"
        )
    # A path in a message may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.excepthook = _report
    atexit.register(_flush)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        stop_with_parent()
    # Waiting OpenMP threads sleep instead of spinning. With other busy processes on the machine,
    # this makes the demo 6 times as fast.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error: one of the system as one line, another one with its traceback."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        complain(described(error))
    elif not issubclass(kind, (BrokenPipeError, KeyboardInterrupt)):
        sys.__excepthook__(kind, error, trace)


def _flush() -> None:
    """Flush the output at exit; nothing is lost that the reader of a broken pipe still wants."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
