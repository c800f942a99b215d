"""train.py that also measures loader.workers=auto on a CPU, for test_auto_workers.py.

Usage: `measured_on_cpu.py folder overrides...`. In the folder, each rank creates a file when it
begins to measure, and writes its results. The mode in the variable CHOOSES is found to be the
fastest.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import train
from conf import cli
from conf.launch import stop_with_parent
from engine.tune.tune import Tuner
from tests.engine.tune.tuning import choose, measure_on_cpu


def main(folder: Path, overrides: list[str]) -> int:
    rank = os.environ.get("RANK", "0")
    measure = Tuner.measure

    def recorded(tuner: Tuner) -> dict[str, Any]:
        (folder / f"measuring-{rank}").touch()
        answer = measure(tuner)
        workers, most = tuner.feed.train.loader.pool.active, tuner.feed.most
        found = {"workers": workers, "most": most, "answer": answer}
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
        return answer

    Tuner.measure = recorded  # type: ignore[method-assign]
    measure_on_cpu(setattr, seconds=1.0)  # several ranks share the cores
    if "CHOOSES" in os.environ:
        choose(setattr, os.environ["CHOOSES"])
    return train.main(cli.load(overrides))


if __name__ == "__main__":
    stop_with_parent()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
