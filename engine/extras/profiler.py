"""A profile of some steps: a Chrome trace for ui.perfetto.dev, and the ten costliest operators."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from engine.log.tracker import Tracker
from engine.plan import Plan

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps of profile.steps. Other steps cost nothing.

    A profile that an error interrupts is not written. The end of the run ends it.
    """

    def __init__(self, plan: Plan, folder: Path, tracker: Tracker) -> None:
        self.first, last = plan.config.profile.steps
        self.last = min(last, plan.stop_step - 1)
        self.folder, self.tracker = folder, tracker
        self.on_gpu = plan.device_type == "cuda"
        self._profile: Any = None

    def starts(self, step: int) -> bool:
        """Return whether the profile starts with this step; after a resume, with a later one."""
        return self._profile is None and self.first <= step <= self.last

    def ends(self, steps: int) -> bool:
        """Return whether the profile ends after so many steps."""
        return self._profile is not None and steps > self.last

    def start(self, step: int) -> None:
        """Start the profile with this step; waits for the device."""
        self.first = step
        if self.on_gpu:
            torch.cuda.synchronize()
        self._profile = profile(acc_events=True)  # of the CPU, and of a GPU if there is one
        self._profile.start()

    def stop(self) -> None:
        """End the profile and write it; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        found = self._profile
        self.close()
        path = self.folder / f"steps-{self.first}-{self.last}.json.gz"
        column = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=column, row_limit=10, max_name_column_width=60)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))
            path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table)
        except (OSError, RuntimeError) as error:
            logger.warning("the profile cannot be written (%s); training continues", error)
            return
        self.tracker.print(f"profile  {path} (open in ui.perfetto.dev) and a table, .txt")

    def close(self) -> None:
        """End a running profile: one that still runs when Python exits crashes the process."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
