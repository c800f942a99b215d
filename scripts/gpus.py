"""What NVML says of a GPU, for scripts/doctor.py, and whether it is well.

Every fact is asked for by itself: of what a driver, a virtual machine or an older card does not tell, nothing is said.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipeline.gpu_decode.decoder import has_engines

Ask = Callable[..., Any]
"""ask("PersistenceMode") calls nvmlDeviceGetPersistenceMode for a GPU; None where there is no answer."""
Finding = tuple[str, str, str]
"""ok, warn or fail; what was found; what to do."""

GIB = 1 << 30
MOST_LINKS = 18  # NVLinks of a Hopper or Blackwell
# NVML's bits for what lowers the clocks now; idleness is none.
THROTTLES = {0x2: "clocks set by hand", 0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)",
             0x80: "power brake"}  # fmt: skip


def open_nvml() -> tuple[str, dict[int, Ask]]:
    """The driver's version, and whom to ask about each GPU that torch sees.

    Raises:
        Exception: of pynvml, or it is not installed.
    """
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    asks: dict[int, Ask] = {}
    for i in range(torch.cuda.device_count()):
        # By UUID: NVML numbers all GPUs of the machine, torch those CUDA_VISIBLE_DEVICES leaves.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(i).uuid}".encode())
        asks[i] = partial(_ask, pynvml, handle)
    return driver.decode() if isinstance(driver, bytes) else driver, asks


def _ask(nvml: Any, handle: Any, call: str, *arguments: Any) -> Any:
    try:
        return getattr(nvml, f"nvmlDeviceGet{call}")(handle, *arguments)
    except Exception:
        return None


def card(ask: Ask, i: int) -> Finding:
    """Its memory, and who else is on it; to be asked before this process puts anything there."""
    memory, others = ask("MemoryInfo"), ask("ComputeRunningProcesses") or []
    text = f"{memory.free / GIB:.0f} of {memory.total / GIB:.0f} GiB free" if memory else "memory unknown"
    if others:
        held = sum(process.usedGpuMemory or 0 for process in others) / GIB
        names = ", ".join(str(process.pid) for process in others[:5])
        return ("warn", f"{text}; {len(others)} processes on it hold {held:.1f} GiB: {names}",
                "end them or take another GPU: they take time and memory from training")  # fmt: skip
    if memory and memory.total - memory.free > max(GIB, 0.05 * memory.total):
        return "warn", f"{text}; somebody holds the rest", "another container or user? take another GPU"
    return "ok", f"{text}, nobody on it", ""


def pcie(ask: Ask, i: int) -> Finding | None:
    generation, newest = ask("CurrPcieLinkGeneration"), ask("MaxPcieLinkGeneration")
    width, widest = ask("CurrPcieLinkWidth"), ask("MaxPcieLinkWidth")
    if not width or not widest:
        return None
    idle = " (an idle GPU lowers it)" if generation and newest and generation < newest else ""
    text = f"generation {generation} of {newest}{idle}, x{width} of x{widest}"
    if width < widest:
        return "warn", text, "the link is narrower than it could be, copies take longer: reseat the card, try another slot"
    return "ok", text, ""


def nvlink(ask: Ask, i: int) -> Finding | None:
    states = [state for link in range(MOST_LINKS) if (state := ask("NvLinkState", link)) is not None]
    text = f"{sum(states)} of {len(states)} links are up"
    if not states:
        return None
    if torch.cuda.device_count() > 1 and not all(states):
        return "warn", text, "ranks exchange gradients more slowly: see nvidia-smi nvlink --status"
    return "ok", text, ""


def health(ask: Ask, i: int) -> Finding | None:
    errors, remapping, persistence = ask("TotalEccErrors", 1, 0), ask("RemappedRows"), ask("PersistenceMode")
    _, remapped, pending, failed = remapping or (0, 0, False, False)
    parts = [
        f"{errors} uncorrected memory errors since the driver was loaded" if errors is not None else "",
        f"{remapped} rows remapped" if remapping else "",
        {0: "persistence mode off", 1: "persistence mode on"}.get(persistence, ""),
    ]
    text = ", ".join(filter(None, parts))
    if failed:
        return "fail", f"{text}; a remapping failed", "have this GPU replaced"
    if errors or pending:
        waits = "; a remapping waits for a reset" if pending else ""
        return "warn", f"{text}{waits}", "reset it first: nvidia-smi --gpu-reset"
    faster = "nvidia-smi -pm 1 saves seconds at each start" if persistence == 0 else ""
    return ("ok", text, faster) if text else None


def clocks(ask: Ask, i: int) -> Finding | None:
    now, most, heat = ask("ClockInfo", 1), ask("MaxClockInfo", 1), ask("Temperature", 0)
    limit, usual = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    reasons = ask("CurrentClocksEventReasons") or ask("CurrentClocksThrottleReasons") or 0  # its name before driver 535
    slowed = [text for bit, text in THROTTLES.items() if reasons & bit]
    parts = [
        f"SM at {now} of {most} MHz" if now and most else "",
        f"{heat} C" if heat else "",
        f"power limit {limit / 1000:.0f} of {usual / 1000:.0f} W" if limit and usual else "",
        f"slowed now by {', '.join(slowed)}" if slowed else "",
    ]
    text = ", ".join(filter(None, parts))
    if slowed or (limit and usual and limit < 0.98 * usual):
        return "warn", text, "training will be slower than it could be: see cooling, power supply, nvidia-smi -pl and -rac"
    return ("ok", text, "") if text else None


def jpeg_engines(ask: Ask, i: int) -> Finding:
    if has_engines(torch.device("cuda", i)):
        return "ok", "found", "loader.decoder=hybrid shares the decoding between them and the workers"
    return "ok", "none that nvJPEG can use: the workers decode", ""
