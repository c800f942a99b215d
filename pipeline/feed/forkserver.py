"""Startup of worker processes, using only the standard library.

train.py calls `start_forkserver` before importing torch, so that both processes import it at once.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

from conf.errors import LoaderError, describe, reached_limit

# On macOS, importing a library may start threads, and a process with threads must not fork.
# Elsewhere, a worker forked from a server that has done the imports starts faster.
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# Ctrl-C and a scheduler's signals reach the whole process group. The training process handles them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def start_forkserver(workers: int | str) -> None:
    """Start the forkserver if loader.workers need it. Its imports continue in the background."""
    if START_METHOD == "forkserver" and workers != 0:
        # If this fails, the first worker tries again and raises the error.
        with suppress(LoaderError), starting_children():
            forkserver.ensure_running()


@contextmanager
def starting_children() -> Iterator[None]:
    """Block the signals that workers ignore while child processes start.

    The forkserver and the resource tracker keep them blocked. The children do not import the main
    script, which imports torchvision and Hydra. Raises LoaderError if a process cannot start.
    """
    multiprocessing.set_forkserver_preload(["pipeline.feed.worker"])  # once for all workers
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    main.__file__ = None
    main.__spec__ = None
    # Python 3.11 does not pass the program's module path to the forkserver.
    python_path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)  # The tracker unblocks some.
        yield
    except (OSError, EOFError) as error:
        reason = reached_limit(error) or describe(error)
        raise LoaderError(f"cannot start a loader worker: {reason}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ["PYTHONPATH"] = python_path  # "" is equivalent to an unset variable
        main.__file__ = file
        main.__spec__ = spec
