"""GPU checks through NVML for scripts/doctor.py.

Each value is queried separately: values that a driver, a virtual machine or an older GPU does not
report are left out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.log.telemetry import SLOWDOWNS
from pipeline.loader_plan import why_no_engines

Ask = Callable[..., Any]
"""ask("PersistenceMode") calls nvmlDeviceGetPersistenceMode for a GPU; None if the query fails."""
Finding = tuple[str, str, str]
"""Status (ok, warn or fail), result, remedy."""

GIB = 1 << 30
MOST_LINKS = 18  # NVLinks of a Hopper or Blackwell GPU
# During training, clocks that a user has set are not a slowdown; before it, they are worth knowing.
CLOCK_LIMITS = [(0x002, "user", "application clocks set by a user"), *SLOWDOWNS]


def open_nvml() -> tuple[str, dict[int, Ask]]:
    """Return the driver version and a query function for each GPU that torch sees.

    Raises:
        Exception: pynvml is not installed or NVML fails.
    """
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    asks: dict[int, Ask] = {}
    for i in range(torch.cuda.device_count()):
        # By UUID: NVML counts all GPUs of the machine, torch those in CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(i).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        asks[i] = partial(_ask, pynvml, handle)
    return driver.decode() if isinstance(driver, bytes) else driver, asks


def _ask(nvml: Any, handle: Any, call: str, *arguments: Any) -> Any:
    try:
        return getattr(nvml, f"nvmlDeviceGet{call}")(handle, *arguments)
    except Exception:
        return None


def card(ask: Ask, i: int) -> Finding:
    """Check free memory and other processes; call it before this process uses the GPU."""
    memory, others = ask("MemoryInfo"), ask("ComputeRunningProcesses") or []
    text = (
        f"{memory.free / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
        if memory
        else "memory unknown"
    )
    if others:
        held = sum(process.usedGpuMemory or 0 for process in others) / GIB
        names = ", ".join(str(process.pid) for process in others[:5])
        return (
            "warn",
            f"{text}; {len(others)} other processes use {held:.1f} GiB: {names}",
            "end these processes or use another GPU: they slow down training",
        )
    if memory and memory.total - memory.free > max(GIB, 0.05 * memory.total):
        remedy = "check other containers and users, or use another GPU"
        return "warn", f"{text}; an unknown process uses the rest", remedy
    return "ok", f"{text}, no other processes", ""


def pcie(ask: Ask, i: int) -> Finding | None:
    generation, newest = ask("CurrPcieLinkGeneration"), ask("MaxPcieLinkGeneration")
    width, widest = ask("CurrPcieLinkWidth"), ask("MaxPcieLinkWidth")
    if not width or not widest:
        return None
    idle = " (reduced while idle)" if generation and newest and generation < newest else ""
    text = f"generation {generation} of {newest}{idle}, x{width} of x{widest}"
    if width < widest:
        return (
            "warn",
            text,
            "copies are slower on a narrow link: reseat the card or try another slot",
        )
    return "ok", text, ""


def nvlink(ask: Ask, i: int) -> Finding | None:
    states = [
        state for link in range(MOST_LINKS) if (state := ask("NvLinkState", link)) is not None
    ]
    text = f"{sum(states)} of {len(states)} links are active"
    if not states:
        return None
    if torch.cuda.device_count() > 1 and not all(states):
        return "warn", text, "the gradient all-reduce is slower: see nvidia-smi nvlink --status"
    return "ok", text, ""


def health(ask: Ask, i: int) -> Finding | None:
    errors, remapping, persistence = (
        ask("TotalEccErrors", 1, 0),
        ask("RemappedRows"),
        ask("PersistenceMode"),
    )
    _, remapped, pending, failed = remapping or (0, 0, False, False)
    parts = [
        "" if errors is None else f"{errors} uncorrected ECC errors since the driver was loaded",
        f"{remapped} rows remapped" if remapping else "",
        {0: "persistence mode off", 1: "persistence mode on"}.get(persistence, ""),
    ]
    text = ", ".join(filter(None, parts))
    if failed:
        return "fail", f"{text}; row remapping failed", "replace this GPU"
    if errors or pending:
        reset = "; row remapping pending until a reset" if pending else ""
        return "warn", f"{text}{reset}", "reset the GPU first: nvidia-smi --gpu-reset"
    faster = "nvidia-smi -pm 1 makes each start seconds faster" if persistence == 0 else ""
    return ("ok", text, faster) if text else None


def clocks(ask: Ask, i: int) -> Finding | None:
    now, most = ask("ClockInfo", 1), ask("MaxClockInfo", 1)
    temperature = ask("Temperature", 0)
    limit, default = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    # Drivers before 535 know the second name only.
    mask = ask("CurrentClocksEventReasons") or ask("CurrentClocksThrottleReasons") or 0
    reasons = [reason for bit, _, reason in CLOCK_LIMITS if mask & bit]
    parts = [
        f"SM at {now} of {most} MHz" if now and most else "",
        f"{temperature} °C" if temperature else "",
        f"power limit {limit / 1000:.0f} of {default / 1000:.0f} W" if limit and default else "",
        f"clocks reduced by {', '.join(reasons)}" if reasons else "",
    ]
    text = ", ".join(filter(None, parts))
    if reasons or (limit and default and limit < 0.98 * default):
        return (
            "warn",
            text,
            "training is slower: check cooling, power supply, nvidia-smi -pl and -rac",
        )
    return ("ok", text, "") if text else None


def jpeg_engines(ask: Ask, i: int) -> Finding:
    if why_no_engines(torch.device("cuda", i)) is None:
        return (
            "ok",
            "available",
            "loader.decoder=hybrid splits decoding between them and the workers",
        )
    return "ok", "not available to nvJPEG: the workers decode", ""
