"""A profile of some steps: a Chrome trace for ui.perfetto.dev, and the ten costliest operators."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps first ... last, numbered from 0. Other steps cost nothing.

    A profile that an error interrupts is not written.

    Args:
        steps: [first, last].
        folder: where trace and table go.
        device: its kernels are in the profile as well.
        say: prints a line.
    """

    def __init__(
        self, steps: list[int], folder: Path, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.steps, self.folder, self.say = steps, folder, say
        self.on_gpu = device.type == "cuda"
        self._profile: Any = None
        self._first = 0
        self._done = False

    @property
    def running(self) -> bool:
        return self._profile is not None

    def starts(self, step: int) -> bool:
        """Return whether the profile starts with this step; after a resume, with a later one."""
        first, last = self.steps
        return not self.running and not self._done and first <= step <= last

    def ends(self, steps: int, *, last: int) -> bool:
        """Return whether the profile ends after so many steps, of which `last` is the last."""
        return self.running and (steps > self.steps[1] or steps == last)

    def start(self, step: int) -> None:
        """Start the profile with this step; waits for the device."""
        self._first = step
        if self.on_gpu:
            torch.cuda.synchronize()
        gpu = [ProfilerActivity.CUDA] if self.on_gpu else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
        self._profile.start()

    def stop(self, steps: int) -> None:
        """End the profile after this number of steps and write it; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        found = self._profile
        self.close()
        path = self.folder / f"steps-{self._first}-{steps - 1}.json.gz"
        column = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=column, row_limit=10, max_name_column_width=60)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))
            path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table)
        except (OSError, RuntimeError) as error:
            logger.warning("the profile cannot be written (%s); training continues", error)
            return
        self.say(f"profile  {path} (open in ui.perfetto.dev) and a table, .txt")

    def close(self) -> None:
        """End a running profile: one that still runs when Python exits crashes the process."""
        if self.running:
            self._profile.stop()
            self._profile, self._done = None, True
