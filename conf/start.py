"""The start and the end of a process; nothing but the standard library is needed.

if __name__ == "__main__":
    set_up_process()  # before torch is imported; scripts/lib/options.py does it for a script
"""

import atexit
import ctypes
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TextIO

COPIED = ("run ", "evaluate ", "report ", "curves ", "predict ", "files ")  # are not wrapped
# Module -> package that provides it. Without tensorboard a run prints a warning and continues.
PACKAGES = {"hydra": "hydra-core", "PIL": "pillow"}
PACKAGES |= {name: name for name in ("numpy", "omegaconf", "safetensors", "torch", "torchvision")}


def set_up_process() -> None:
    """Check the platform and the packages, and set what torch reads once, at its import.

    When the reader of a pipe has ended (`| head`), the program ends quietly.
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
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    # Until `cli.exit_status`, Ctrl-C ends the process at once, without a traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A path in a message may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    atexit.register(_flush)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        stop_with_parent()
    # Waiting OpenMP threads sleep instead of spinning. With other busy processes on the machine,
    # this makes the demo 6 times as fast.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def stop_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends (Linux only).

    A killed torchrun cannot end its ranks: they would train on, and the next start would find the
    run directory in use.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of prctl(2)


def on_empty_line(handler: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return a signal handler that first erases the line on which a terminal shows ^C."""

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and os.isatty(2) and os.environ.get("RANK", "0") == "0":
            os.write(2, b"\r\33[K")  # `print` may not be called while it runs
        handler(number, frame)

    return handle


@contextmanager
def handle_stops(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` for the signals that stop a training and arrive in the `with` block.

    SIGHUP stays ignored if it was ignored before, as under nohup.
    """
    before = {
        number: signal.signal(number, on_empty_line(handler))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def wrapped(line: str, indent: int = 0, *, stream: TextIO | None = None) -> str:
    """Break a line for a terminal between words, not before a unit; `indent`: of other lines."""
    if not (stream or sys.stdout).isatty():
        return line
    text = re.sub(r" (?=[\d.,]+ %)|(?<=\d) (?=[A-Za-z%]+(?!\w|[.=]\w))", "\0", line)
    width, start = shutil.get_terminal_size().columns, " " * indent
    return textwrap.fill(
        text, width, subsequent_indent=start, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")


def styled(line: str, margin: int = 0, *, stream: TextIO | None = None) -> str:
    """Return a line of a run: for a terminal wrapped, with its label or validation in bold."""
    if not (stream or sys.stdout).isatty():
        return " " * margin + line
    if line[:1].isalpha() and not line.startswith(COPIED):
        line = wrapped(" " * margin + line, margin + 10, stream=stream)[margin:]
    bold = r"^((note|result|resume|verdict|warning) +| .* validation.*)"
    return "\33[K" + " " * margin + re.sub(bold, "\33[1m\\1\33[0m", line)


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def complain(message: str, *, once: bool = False) -> None:
    """Print a message on stderr, in one line unless it is a terminal; `once` per node."""
    if not (once and os.environ.get("LOCAL_RANK", "0") != "0"):
        lines = f"{Path(sys.argv[0]).name}: {message}".splitlines()
        end = "\n" if sys.stderr.isatty() else " "
        print(end.join(wrapped(line, stream=sys.stderr) for line in lines), file=sys.stderr)


def fail(message: str) -> NoReturn:
    """Print a mistake of the user once per node, because all ranks find it; exit with status 2."""
    complain(message, once=True)
    sys.exit(2)


def _flush() -> None:
    """Flush the output at exit; ignore a pipe without a reader and a full disk."""
    try:
        sys.stdout.flush()
    except OSError:  # the pipe has no reader, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
