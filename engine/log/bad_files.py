"""data.on_error=skip: the training images that cannot be read, and how many may be so."""

from conf.files import read_text
from conf.schema import Data
from engine.log.tracker import Tracker
from engine.rundir import RunDirectory
from engine.state import TrainingError
from pipeline.ring import Loader


def too_many_unreadable(loader: Loader, data: Data) -> bool:
    """Return whether this rank alone has met more unreadable images than data.max_bad_fraction."""
    return len(loader.pool.unreadable) > data.max_bad_fraction * len(loader.dataset)


class BadFiles:
    """Lists each unreadable training image once in bad_files.txt, over all starts of a run.

    Each rank meets its own unreadable images and replaces them (pipeline/ring.py). Files may be
    repaired before the next start: data.max_bad_fraction limits those of one start. Attribute
    `listed`: path -> reason, of all ranks and starts, as of the last `share`.
    """

    def __init__(self, loader: Loader, run: RunDirectory, tracker: Tracker) -> None:
        self.loader, self.world, self.tracker = loader, run.world, tracker
        self.limit, self.path = run.config.data.max_bad_fraction, run.path / "bad_files.txt"
        self.listed: dict[str, str] = {}
        if self.world.is_main and self.path.is_file():
            text = read_text(self.path, errors="surrogateescape")
            self.listed = dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)

    def share(self) -> None:
        """List those that the ranks have met in this start. Collective.

        Raises TrainingError, on every rank, if more than the limit are unreadable.
        """
        found: dict[int, str] = {}
        for own in self.world.all_gather(dict(self.loader.pool.unreadable)):
            found |= own
        if not found:
            return
        images = len(self.loader.dataset)
        for index, message in found.items():
            path = self.loader.dataset.name(index)
            self.listed.setdefault(path, " ".join(message.removeprefix(f"{path}: ").split()))
        lines = (f"{path}\t{reason}\n" for path, reason in self.listed.items())
        self.tracker.write(self.path.name, "".join(lines))
        if len(found) > self.limit * images:
            raise TrainingError(
                f"data.max_bad_fraction={self.limit:g}: {len(found):,} of {images:,} training "
                f"images cannot be read, for example {next(reversed(found.values()))}; replace "
                f"them ({self.path} lists them), or raise this limit"
            )
