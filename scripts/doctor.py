"""Check the data, the config and the disk before a long training run.

    python scripts/doctor.py data.root=/imagenet
    python scripts/doctor.py data.root=/imagenet --all --ranks 8 > doctor.txt

Accepts train.py's key=value overrides. Lists every file and decodes 2,000 random files of each
split, or every file with --all. Prints a row for each check: ok, warn or fail, the result,
the remedy (->), and the files; on a terminal, at most 10 of them. Changes nothing, but fills the
cache as a run does. bench.py measures how fast the storage and the training step are.
Exit status: 0 no check failed, 1 a check failed, 2 wrong arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--all", action="store_true", help="decode every file instead of a sample")
    parser.add_argument("--ranks", type=int, default=1, help="ranks to run on this machine (1)")
    OPTIONS, CONFIG = parser.read_config()

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from conf.schema import RunError, UserError
from pipeline.decode import describe
from scripts.lib import data_checks, machine_checks
from scripts.lib.checks import Case, NotChecked, Row, fail, ok, warn
from scripts.lib.trained import exit_status

SAMPLE = 2000  # files of each split
NAMED = 10  # files per row on a terminal
CHECKS: dict[str, Callable[[Case], Iterator[Row]]] = {  # later ones use earlier results
    "data": data_checks.data,
    "readable": data_checks.readable,
    "odd files": data_checks.odd_files,
    "duplicates": data_checks.duplicates,
    "colours": data_checks.colours,
    "plan": machine_checks.plan,
    "disk": machine_checks.disk,
}


def check(case: Case) -> Iterator[Row]:
    """Run all checks.

    An error that training would raise is a failure; a check that cannot run is only a warning.
    """
    told = set[str]()
    for name, look in CHECKS.items():
        try:
            for row in look(case):
                yield replace(row, check=name)
        except (UserError, RunError) as error:
            yield fail(str(error), "training refuses to start", check=name)
        except NotChecked as reason:
            status = ok if case.datasets else warn
            if str(reason) not in told:
                yield status(f"not checked: {reason}", check=name)
            told.add(str(reason))
        except Exception as error:
            yield warn(f"check failed with an error: {describe(error)}", check=name)


def lines(row: Row) -> Iterator[str]:
    """Format a row, and below it the remedy and the details, on a terminal up to NAMED."""
    width = max(map(len, CHECKS))
    yield f"{row.status:<4}  {row.check:<{width}}  {row.found}"
    most = NAMED if sys.stdout.isatty() else len(row.details)
    below = [f"-> {row.do}"] * bool(row.do) + list(row.details[:most])
    if len(row.details) > most:
        below.append(f"and {len(row.details) - most:,} more: redirect the output to list all")
    yield from (" " * (width + 8) + text for text in below)


def main() -> int:
    counts = Counter[str]()
    for row in check(Case(CONFIG, None if OPTIONS.all else SAMPLE, OPTIONS.ranks)):
        counts[row.status] += 1
        print(*lines(row), sep="\n", flush=True)
    print(", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail")))
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, "doctor.py"))
