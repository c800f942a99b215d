"""The pipeline's view of the ranks; it does not import torch.distributed."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """The ranks of a run, as `engine.distributed.World` implements them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_size(self) -> int:
        """Ranks on this node."""

    @property
    def device(self) -> torch.device: ...

    def agree(self, decide: Callable[[], Any]) -> Any:
        """Rank 0 decides; every rank gets its answer or raises its error. Collective."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of the ranks. Collective."""

    def of_node(self, values: list[Any]) -> list[Any]:
        """Of one value per rank, those of the ranks of this node."""
