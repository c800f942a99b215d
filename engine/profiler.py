"""A profile of some steps: a Chrome trace (open it in ui.perfetto.dev) and the ten costliest operators."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles steps first ... last, 0-based as the sampler counts them; costs nothing outside of them.

    What an error ends is not written.

    Args:
        steps: [first, last], or [] for none.
        folder: where trace and table go; None for a rank that keeps silent.
        device: its kernels are in the profile too.
        say: prints a line.
    """

    def __init__(self, steps: list[int], folder: Path | None, device: torch.device, say: Callable[[str], None]) -> None:
        self.steps, self.folder, self.device, self.say = (steps if folder is not None else []), folder, device, say
        self._profile: Any = None
        self._first = 0

    @property
    def running(self) -> bool:
        return self._profile is not None

    def turns(self, step: int) -> bool:
        """Whether `turn` has something to do before this step."""
        if not self.steps:
            return False
        first, last = self.steps
        return step > last if self.running else first <= step <= last

    def turn(self, step: int) -> None:
        """Begin what is profiled with this step, or end it with the step before; waits for the device."""
        self._finish()
        if self.running:
            self._write(step - 1)
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        self._profile, self._first = profile(activities=activities, acc_events=True), step
        self._profile.start()

    def close(self) -> None:
        """Drop what is being profiled: a profile that still runs when Python ends is a crash."""
        if self.running:
            self._profile.stop()
            self._profile = None

    def _write(self, last: int) -> None:
        self._profile.stop()
        found, self._profile, self.steps = self._profile, None, []
        assert self.folder is not None
        stem = self.folder / f"steps-{self._first}-{last}"
        column = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=column, row_limit=10, max_name_column_width=60)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(f"{stem}.json.gz")
            stem.with_suffix(".txt").write_text(table)
        except (OSError, RuntimeError) as error:
            logger.warning("the profile cannot be written (%s); training goes on", error)
            return
        self.say(f"profile  {stem}.json.gz (open in ui.perfetto.dev) and {stem.name}.txt")

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
