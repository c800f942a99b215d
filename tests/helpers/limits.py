"""Process limits, for tests of full disks and of too few open files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def soft_limit(kind: int, number: int) -> Iterator[None]:
    """Set a limit for this process, such as resource.RLIMIT_FSIZE, in the `with` block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


file_size_limit = partial(soft_limit, resource.RLIMIT_FSIZE)  # size of each file in bytes
