"""Stored answers of the program, a file per kind, which define "equal" for refactorings.

A refactoring changes none of these files. It may edit each kind's function that calls the program,
whose docstring begins with "Adapter". An intended change rewrites a kind's file in a separate
commit that says so::

    python -m tests.repository.equal.record KIND ...
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.repository.equal import batches, configs, verdicts

Lines = list[dict[str, Any]]
KINDS: dict[str, Callable[[Lines], Lines]] = {
    "batches": batches.current_answers,
    "configs": configs.current_answers,
    "verdicts": verdicts.current_answers,
}


def path(kind: str) -> Path:
    return Path(__file__).with_name(f"{kind}.jsonl")


def stored(kind: str) -> Lines:
    return [json.loads(line) for line in path(kind).read_text().splitlines()]


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        lines = KINDS[kind](stored(kind))
        path(kind).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
