"""Limits of this process, for tests of full disks and of too few open files."""

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def soft_limit(kind: int, number: int) -> Iterator[None]:
    """Set a limit of this process, such as resource.RLIMIT_FSIZE, in the `with` block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def file_size_limit(size: int) -> AbstractContextManager[None]:
    """Files of this process cannot grow beyond `size` bytes in the `with` block."""
    return soft_limit(resource.RLIMIT_FSIZE, size)
