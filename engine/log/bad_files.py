"""data.on_error=skip: the training images that cannot be read, and how many may be so."""

from pathlib import Path

from engine.distributed import World
from engine.log.tracker import Tracker
from engine.state import TrainingError
from pipeline.loader import Loader


class BadFiles:
    """Lists each unreadable training image once in bad_files.txt, over all starts of a run.

    Each rank meets its own unreadable images and replaces them (pipeline/worker.py).

    Args:
        loader: of the training images.
        folder: the run directory.
        tracker: writes the file, on rank 0.
        limit: training stops if a larger fraction of the training images is unreadable in one
            start: files may be repaired before the next.

    Attributes:
        listed: path -> reason, of all starts; complete on rank 0.
    """

    def __init__(
        self, loader: Loader, world: World, folder: Path, tracker: Tracker, limit: float
    ) -> None:
        self.world, self.tracker, self.limit = world, tracker, limit
        self.path, self.dataset = folder / "bad_files.txt", loader.dataset
        self.listed: dict[str, str] = {}
        self._own = loader.pool.unreadable
        self._all: dict[int, str] = {}  # of all ranks in this start, as of the last `share`
        self._counted = 0  # of both, when the file was last written
        if world.is_main and self.path.is_file():
            text = self.path.read_text(encoding="utf-8", errors="surrogateescape")
            self.listed = dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)

    @property
    def too_many(self) -> bool:
        """Whether training has to stop, as far as this rank knows."""
        return max(len(self._own), len(self._all)) > self.limit * len(self.dataset)

    def write(self) -> int:
        """Add new ones to bad_files.txt; return the number of its lines."""
        if self._counted != len(self._own) + len(self._all):
            self._counted = len(self._own) + len(self._all)
            for index, message in {**self._all, **self._own}.items():
                path = self.dataset.name(index)
                self.listed.setdefault(path, " ".join(message.removeprefix(f"{path}: ").split()))
            lines = (f"{path}\t{reason}\n" for path, reason in self.listed.items())
            self.tracker.write(self.path.name, "".join(lines))
        return len(self.listed)

    def share(self) -> None:
        """Tell the other ranks, so that rank 0 lists all and the limit is that of all. Collective.

        Raises:
            TrainingError: more than the limit are unreadable; on every rank.
        """
        for found in self.world.all_gather(dict(self._own)):
            self._all.update(found)
        self.write()
        if self.too_many:
            raise TrainingError(
                f"data.max_bad_fraction={self.limit:g}: {len(self._all):,} of "
                f"{len(self.dataset):,} training images cannot be read, for example "
                f"{next(reversed(self._all.values()))}; replace them ({self.path} lists them), or "
                "raise this limit"
            )
