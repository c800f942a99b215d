"""From a JPEG file to a batch on the device. A batch passes, in this order:

1 sampler; 2 dataset (index, containers, splits); 3 decode (region), augment; 4 worker, loader;
5 prefetcher (batch_augment, clock). feed connects them.

A file imports only files that come before it in the list of tests/test_layout.py. Optional parts:
gpu (the GPU's JPEG engines and augmentation), demo (images that the program draws).
"""

from functools import cache
from types import ModuleType


@cache
def gpu_part() -> ModuleType:
    """Return the optional part pipeline.gpu, imported here only; ask `has_part` first."""
    from pipeline import gpu

    return gpu
