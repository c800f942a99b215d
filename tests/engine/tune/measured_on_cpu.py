"""train.py that also measures loader.workers=auto on a CPU, for test_auto_workers.py.

Usage: `measured_on_cpu.py folder overrides...`. In the folder, each rank creates a file when it
begins to measure, and writes its results. With the variable CHOOSES, stand-ins for JPEG engines are
always compared with the CPU decoder, and that decoder is found to be the fastest.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import train
from conf import cli
from conf.launch import exit_with, stop_with_parent
from engine.tune import autotune, search
from pipeline import gpu, machine
from pipeline import loader_plan as plan
from tests.engines import PillowEngines


def main(folder: Path, overrides: list[str]) -> int:
    rank = os.environ.get("RANK", "0")
    find_result = autotune.Tuner.find_result

    def recorded(tuner: autotune.Tuner) -> Any:
        (folder / f"measuring-{rank}").touch()
        answer, lines = find_result(tuner)
        assert answer is not None, lines
        found = {
            "workers": tuner.loader.pool.active,
            "most": tuner.feed.plan.ceiling,
            "answer": asdict(answer),
        }
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
        return answer, lines

    autotune.Tuner.find_result = recorded  # type: ignore[method-assign]
    plan.why_not_measured = lambda *_: ""
    autotune.FEWEST_BATCHES = 0
    autotune.MEASURE_SECONDS = 0.3
    # Also on a busy machine, where steps are slow.
    autotune.FEWEST_STEPS, autotune.LATE_SECONDS = 1, math.inf
    machine.cores = lambda: 4
    machine.threads_per_core = lambda: 1
    machine.cpu_quota = lambda: math.inf
    if "CHOOSES" in os.environ:
        choose = plan.choose_decoders
        cuda = torch.device("cuda")
        plan.choose_decoders = lambda a, b, _, *more: choose(a, b, cuda, *more)
        plan.why_no_engines = lambda device: None
        gpu.GpuDecoder = PillowEngines
        chosen = os.environ["CHOOSES"]
        autotune.is_enough = search.is_enough = lambda trials: False
        search.could_win = lambda *_: True
        autotune.best_setting = lambda trials: (chosen, min(trials[chosen]))
    return train.main(cli.load(overrides))


if __name__ == "__main__":
    stop_with_parent()
    exit_with(partial(main, Path(sys.argv[1]), sys.argv[2:]))
