"""From a JPEG file to a batch on the device. Read the files in the order of the path of a batch:

index (containers, splits) -> decode (region) -> augment -> dataset -> sampler -> loader, worker ->
prefetcher (clock, batch_augment); feed puts them together.

A file imports only files before it. Optional rooms: gpu (the GPU's JPEG engines and augmentation),
demo (images that the program draws).
"""

from functools import cache
from types import ModuleType


@cache
def gpu_room() -> ModuleType:
    """Return the optional room pipeline.gpu, imported here only; ask `has_room` first."""
    from pipeline import gpu

    return gpu
