"""What "equal" means for a change that should change nothing: stored answers.

Each kind is a file of JSON lines, with the answers of the code to the inputs in it:

    batches   SHA-256 of 16 training and validation batches of each recipe, on drawn JPEG files
    configs   values and run name of 60 lists of overrides for each recipe
    verdicts  the cause that limits a run, for measured numbers of its ranks

A refactoring changes none of these files. It may edit the function of each kind that calls the
program, whose docstring begins with "Adapter". An intended change replaces entries, in a commit of
its own that says so: this command asks the code again, and writes the file of a kind.

    python -m tests.repository.equal.record KIND ...

What depends on the arithmetic of a machine is not stored: CONTRIBUTING.md has the command for it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.repository.equal import batches, configs, verdicts

Lines = list[dict[str, Any]]
KINDS: dict[str, Callable[[Lines], Lines]] = {
    "batches": batches.answered,
    "configs": configs.answered,
    "verdicts": verdicts.answered,
}


def path(kind: str) -> Path:
    return Path(__file__).with_name(f"{kind}.jsonl")


def stored(kind: str) -> Lines:
    return [json.loads(line) for line in path(kind).read_text().splitlines()]


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        lines = KINDS[kind](stored(kind))
        path(kind).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
