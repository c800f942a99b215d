"""A profile of some steps: a Chrome trace for ui.perfetto.dev, and the ten costliest operators.

    python train.py data.root=/imagenet \
        'log.observers=[{extras.profiler:Profiler: {first: 100, last: 110}}]'
"""

from typing import Any

import torch
from torch.profiler import profile

from conf.errors import UserError
from engine.files import replace_file
from engine.log.observer import ObservedRun, Observer
from pipeline.batch import Batch


class Profiler(Observer):
    """Profiles the steps from `first` to `last`, counted from 0. Other steps cost nothing.

    After a resume, the profile may begin with a later step. The end of the run ends it; one that an
    error interrupts is not written.
    """

    def __init__(self, log: ObservedRun, *, first: int = 100, last: int = 110) -> None:
        steps = log.schedule.stop_step
        if not 0 <= first <= last or first >= steps:
            raise UserError(
                f"log.observers: {__name__}:Profiler: first={first}, last={last}",
                f"the run has the steps 0 to {steps - 1:,}",
                "give two of them, the first not after the last",
            )
        self.log = log
        self.first = first
        self.last = min(last, steps - 1)
        self._profile: Any = None

    def begin_step(self, batch: Batch) -> None:
        if self._profile is None and self.first <= batch.step <= self.last:
            self.first = batch.step
            torch.get_device_module(self.log.world.device).synchronize()
            self._profile = profile(acc_events=True)  # of the CPU, and of a GPU if there is one
            self._profile.start()
            self.log.feed.train.clock.skip()

    def end_step(self, step: int) -> None:
        if self._profile is not None and step > self.last:
            with self.log.feed.train.clock.pause():
                self._write()

    def close(self) -> None:
        """End a running profile: one that still runs when Python exits crashes the process."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self) -> None:
        profiled = self._profile
        self.close()
        path = self.log.path / "profile" / f"steps-{self.first}-{self.last}.json.gz"
        path.parent.mkdir(exist_ok=True)
        device = self.log.world.device.type  # cpu or cuda
        costliest = {"sort_by": f"self_{device}_time_total", "row_limit": 10}
        table = profiled.key_averages().table(max_name_column_width=60, **costliest)
        profiled.export_chrome_trace(str(path))
        replace_file(path.with_name(path.name.replace(".json.gz", ".txt")), table)
        self.log.tracker.print(f"profile   {path} (open in ui.perfetto.dev) and a table, .txt")
