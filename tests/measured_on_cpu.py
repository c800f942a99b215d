"""train.py with `loader.workers=auto` measured on a CPU too, for test_auto_workers.py: `measured_on_cpu.py folder overrides...`

Each rank writes to the folder that it begins to measure, and what it has found.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import train
from conf import cli
from pipeline.sizing import autotune, machine, plan


def main(folder: Path, overrides: list[str]) -> int:
    rank = os.environ.get("RANK", "0")
    settle = autotune.settle

    def noted(tuner: autotune.Tuner, *arguments: Any, **options: Any) -> Any:
        (folder / f"measuring-{rank}").touch()
        answer, lines = settle(tuner, *arguments, **options)
        assert answer is not None, lines
        found = {
            "workers": len(tuner.loader.pool.workers),
            "most": tuner.feed.plan.memory.ceiling,
            "answer": asdict(answer),
        }
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
        return answer, lines

    autotune.settle = noted
    plan.why_not_measured, autotune.FEWEST_BATCHES = lambda *_: None, 0
    autotune.MEASURE_SECONDS = 0.3
    machine.cores, machine.threads_per_core, machine.cpu_quota = (
        lambda: 4,
        lambda: 1,
        lambda: math.inf,
    )
    return train.main(cli.load(overrides))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
