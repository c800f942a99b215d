"""data.on_error=skip: the training images that cannot be read, in bad_files.txt, and their limit.

Each rank meets its own unreadable images and replaces them (pipeline/worker.py).
"""

import logging
from functools import partial
from pathlib import Path

from engine.distributed import World
from engine.log.tracker import Tracker
from engine.state import TrainingError
from pipeline.loader import Loader

NAME = "bad_files.txt"

logger = logging.getLogger(__name__)


class BadFiles:
    """Lists each unreadable training image once, over all starts of a run.

    The limit applies to the images of one start, because files may be repaired before the next.

    Args:
        loader: of the training images.
        world: its ranks call `share` together, and the constructor.
        folder: the run directory.
        tracker: writes the file, on rank 0.
        limit: training stops if a larger fraction of the training images is unreadable; None if
            training stops at the first one anyway (data.on_error=raise).

    Attributes:
        listed: path -> reason, of all starts; complete on rank 0.
    """

    def __init__(
        self, loader: Loader, world: World, folder: Path, tracker: Tracker, *, limit: float | None
    ) -> None:
        self.world, self.folder, self.tracker, self.limit = world, folder, tracker, limit
        self.dataset = loader.dataset
        self.listed: dict[str, str] = {}
        self._own = loader.pool.unreadable
        self._all: dict[int, str] = {}  # of all ranks in this start, as of the last `share`
        self._written: set[int] = set()  # those that `listed` has
        self._counted = 0, 0  # of this rank, and of all, when they were last counted
        if limit is not None:
            self.listed = world.broadcast(partial(_read, folder / NAME))

    @property
    def too_many(self) -> bool:
        """Whether training has to stop, as far as this rank knows. Nearly free without new ones."""
        if self.limit is None:
            return False
        if len(self._own) != self._counted[0]:
            self._counted = len(self._own), len(self._own.keys() | self._all.keys())
        return self._counted[1] > self.limit * len(self.dataset)

    def write(self) -> int:
        """Add new ones to bad_files.txt; return the number of its lines."""
        before = len(self.listed)
        new = {i: text for i, text in {**self._all, **self._own}.items() if i not in self._written}
        self._written.update(new)
        for index, message in new.items():
            path = self.dataset.name(index)
            reason = " ".join(message.removeprefix(f"{path}: ").split())
            self.listed.setdefault(path.replace("\n", "\\n").replace("\t", "\\t"), reason)
        if len(self.listed) > before:
            lines = (f"{path}\t{reason}\n" for path, reason in self.listed.items())
            self.tracker.write(NAME, "".join(lines))
        return len(self.listed)

    def share(self) -> None:
        """Tell the other ranks, so that rank 0 lists all and the limit is that of all. Collective.

        Raises:
            TrainingError: more than the limit are unreadable; on every rank.
        """
        if self.limit is None:
            return
        new = {index: text for index, text in dict(self._own).items() if index not in self._all}
        for found in self.world.all_gather(new):
            self._all.update(found)
        self._counted = len(self._own), len(self._all)
        self.write()
        if self.too_many:
            raise TrainingError(
                f"data.max_bad_fraction={self.limit:g}: {len(self._all):,} of "
                f"{len(self.dataset):,} training images cannot be read, for example "
                f"{next(reversed(self._all.values()))}; replace them ({self.folder / NAME} lists "
                "them), or raise this limit"
            )


def _read(path: Path) -> dict[str, str]:
    """Read the list of an earlier start."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s cannot be read (%s); it will be rewritten", path, error)
        return {}
    return dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)
