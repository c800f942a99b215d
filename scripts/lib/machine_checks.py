"""The checks of scripts/doctor.py on the GPUs, the cores, the memory and the disks."""

import math
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import train
from engine.compute import choose_compute
from engine.distributed import World, resolve_device
from engine.log.telemetry import SLOWDOWNS, find_gpu
from engine.losses import build_criterion, class_weights
from engine.schedule import make_schedule, setup_notes
from pipeline import decode, machine
from pipeline.build import build_datasets
from pipeline.containers import Container
from pipeline.decode import DECODERS, describe
from pipeline.index import Index
from scripts import bench
from scripts.lib.checks import Case, NotChecked, Row, fail, few, ok, sample, warn
from scripts.lib.progress import in_threads

GIB = 1 << 30
NCCL_BYTES = 256 << 20  # of /dev/shm, for several ranks
PROBE_BYTES = 64 << 20  # to measure the speed of the disk
NVLINKS = 18  # of a Hopper or Blackwell GPU
# A measurement of reading takes READ_SECONDS at most, or READ_FILES files; one of the step, twice
# STEP_SECONDS and the time to compile it.
READ_SECONDS = 2.0
READ_FILES = 2000
MEMORY = Path("/proc/meminfo")
STEP_SECONDS = 2.0


def gpu(case: Case) -> Iterator[Row]:
    """Compare driver and PyTorch, and check each GPU; before this process uses one."""
    choice = case.config.train.device
    if choice not in ("auto", "cpu", "cuda"):
        raise NotChecked(f"train.device={choice} was not tested")
    if not torch.cuda.is_available():
        why = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        text = f"training will run on the CPU: torch {torch.__version__} {why}"
        if os.path.exists("/proc/driver/nvidia/version"):
            text += " although there is an NVIDIA driver"
        cure = "sufficient for a small run; otherwise install a driver and PyTorch with CUDA"
        yield fail(text, cure) if choice == "cuda" else warn(text, cure)
        return
    count, used = torch.cuda.device_count(), 0 if choice == "cpu" else case.ranks
    names = Counter(torch.cuda.get_device_properties(i).name for i in range(count))
    text = f"{few(f'{n} {name}' for name, n in names.items())}, {used} used"
    text += f"; torch {torch.__version__}"
    cure = f"torchrun --nproc-per-node {count} train.py uses all: check with --ranks {count}"
    yield warn(text, cure if used else "remove train.device") if used < count else ok(text)
    try:
        gpus = [find_gpu(torch.device("cuda", i)) for i in range(count)]
    except Exception as error:
        text = f"the GPUs cannot be checked: NVML is not available ({describe(error)})"
        yield warn(text, "pip install nvidia-ml-py")
        return
    alike: dict[Row, list[int]] = defaultdict(list)  # finding -> GPUs
    for i, (nvml, handle) in enumerate(gpus):
        for row in gpu_rows(nvml, handle):
            alike[row].append(i)
    for row, numbers in alike.items():
        yield replace(row, found=f"GPU {', '.join(map(str, numbers))}: {row.found}")


def gpu_rows(nvml: Any, gpu: Any) -> list[Row]:
    """Return what is wrong with a GPU, or that it is in order."""

    def get(call: str, *arguments: Any) -> Any:
        with suppress(Exception):  # its driver or kind does not report it
            return getattr(nvml, f"nvmlDeviceGet{call}")(gpu, *arguments)
        return None

    found = []
    others, memory = get("ComputeRunningProcesses") or [], get("MemoryInfo")
    used = memory.total - memory.free if memory else 0
    if others or (memory and used > max(GIB, 0.05 * memory.total)):
        text = f"{used / GIB:.1f} GiB are in use by {len(others)} other processes"
        text += f" ({few(process.pid for process in others)})" if others else " or containers"
        found.append(warn(text, "end them or use another GPU: they slow down training"))
    width, widest = get("CurrPcieLinkWidth"), get("MaxPcieLinkWidth")
    if width and widest and width < widest:
        cure = "copies are slower on a narrow link: reseat the card or try another slot"
        found.append(warn(f"PCIe x{width} of x{widest}", cure))
    links = [get("NvLinkState", link) for link in range(NVLINKS)]
    if torch.cuda.device_count() > 1 and 0 in links:
        text = f"{links.count(0)} of {len(links) - links.count(None)} NVLinks are not active"
        found.append(warn(text, "the all-reduce is slower: see nvidia-smi nvlink --status"))
    mask = get("CurrentClocksThrottleReasons") or 0  # this name exists in old and new drivers
    reasons = [reason for bit, reason in SLOWDOWNS.items() if mask & bit]
    limit, default = get("EnforcedPowerLimit"), get("PowerManagementDefaultLimit")
    if limit and default and limit < 0.98 * default:
        reasons.append(f"a power limit of {limit / 1000:.0f} of {default / 1000:.0f} W")
    if reasons:
        cure = "training is slower: check cooling, power supply, nvidia-smi -pl and -rac"
        found.append(warn(f"clocks reduced by {', '.join(reasons)}", cure))
    return found or [ok("memory, links and clocks are in order")]


def plan(case: Case) -> Iterator[Row]:
    """Build the parts of the training, as far as they need no ranks."""
    device = resolve_device(case.config.train.device, 0, case.ranks)
    config = case.config = train.resolve_config(case.config, World(0, 1, 0, 1, device))
    if case.datasets is None:
        raise NotChecked("needs the data, see data")
    # Again, with loader.decoder, which depends on the device, and what train.prepare has changed.
    datasets, world = build_datasets(config, device), World(0, case.ranks, 0, case.ranks, device)
    build_criterion(config.train, class_weights(config.train, datasets))
    schedule = make_schedule(config, len(datasets.train), world)
    case.compute = choose_compute(config, datasets, device, schedule.stop_step)
    yield from (warn(n, "training still starts") for n in setup_notes(config, datasets, world))
    yield ok(
        f"{config.model.name}, {case.compute.parameters / 1e6:.2f} M parameters, "
        f"{len(datasets.classes):,} classes; {schedule.stop_step:,} steps of {schedule.batch_size} "
        f"images of {datasets.train_size} px on {case.compute.name}"
    )


def free_memory() -> int:
    """Bytes that can be allocated without swapping; without /proc, half of the RAM."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def cores(case: Case) -> Iterator[Row]:
    usable, online, quota = machine.cores(), os.cpu_count() or 1, machine.cpu_quota()
    text = f"{usable} of {online} hardware threads by affinity, "
    text += "no CPU quota" if quota == math.inf else f"a CPU quota of {quota:g}"
    if min(usable, quota) < 2 * case.ranks:
        cure = "the training process and its workers would share cores: give more cores"
        yield warn(f"{text}: under two for each rank", cure)
    elif usable < online or quota < usable:
        cure = "if unintended, check taskset, the container's --cpus, Slurm's --cpus-per-task"
        yield warn(text, cure)
    else:
        yield ok(text)
    have, chosen = decode.installed(), case.config.loader.decoder
    best = decode.resolve(chosen) if chosen in DECODERS else have[0]
    text = f"loader.decoder={chosen}: on the CPU {best}; installed: {', '.join(have)}"
    cure = "install a C compiler (loader.decoder=region says what is missing): it is faster"
    yield ok(text) if best == next(iter(decode.DECODERS)) else warn(text, cure)


def memory(case: Case) -> Iterator[Row]:
    yield ok(f"{free_memory() / GIB:.1f} GiB are free, also for batch buffers and workers")
    if case.ranks > 1 and os.path.exists("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        text = f"{free / GIB:.2f} GiB of /dev/shm are free, which NCCL uses"
        yield warn(text, "start the container with --ipc=host") if free < NCCL_BYTES else ok(text)


def disk(case: Case) -> Iterator[Row]:
    """Compare the disk of run.dir with the checkpoints that it has to take."""
    path = Path(case.config.run.dir).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            written = file.write(os.urandom(PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        cure = "give a run.dir with free space and write permission"
        yield fail(f"{folder}: cannot be written: {error.strerror}", cure)
        return
    rate = written / (time.perf_counter() - began)
    # At most, in float32: the weights, their moving average and two moments of the optimiser.
    free, size = shutil.disk_usage(folder).free, 4 * 4 * case.planned().parameters
    number = case.config.checkpoint.keep + 2  # the best, and the one being written
    text = (
        f"{folder}: {free / 1e9:,.1f} GB free, {rate / 1e6:,.0f} MB/s with fsync; {number} "
        f"checkpoints of at most {size / 1e9:.3f} GB, {size / rate:.1f} s each"
    )
    missing = number * size - free
    if missing > 0:
        yield fail(text, f"free {missing / 1e9:,.1f} GB more, or lower checkpoint.keep")
    elif free < 2 * number * size or size / rate > 30:
        cure = "free space, use a faster disk or raise checkpoint.every_steps"
        yield warn(f"{text}: training may wait for them", cure)
    else:
        yield ok(text)


def storage(case: Case) -> Iterator[Row]:
    """Compare the bytes/s that the GPUs need with those that the storage delivers."""
    index, compute = case.splits()["train"], case.planned()
    workers, cores = case.config.loader.workers, machine.cores_for_workers(case.ranks)
    threads = max(1, cores if workers == "auto" else workers) * case.ranks
    rows = sample(len(index), READ_FILES, start=READ_FILES)
    rate, each = read_rate(index, rows, threads)
    reads = f"reads {rate / 1e6:,.0f} MB/s ({threads} files at a time)"
    if compute.device.type == "cpu":
        yield ok(f"{reads}; not compared with the step, as training runs on the CPU")
        return
    config, batch = case.config, max(1, case.config.loader.batch_size // case.ranks)
    fake = replace(
        config,
        loader=replace(config.loader, batch_size=batch),
        data=replace(config.data, source="fake"),
        train=replace(config.train, prepare=None),
    )
    (step,) = bench.run(fake, only=("step",), seconds=STEP_SECONDS)
    needed = step.rate * case.ranks
    text = (
        f"{case.config.model.name} needs {needed:,.0f} img/s x {each / 1e3:,.0f} kB = "
        f"{needed * each / 1e6:,.0f} MB/s; storage {reads}"
    )
    if rate >= needed * each:
        yield ok(text)
        return
    fits = len(index) * each < free_memory()
    when = "in the first epoch; later ones read the page cache" if fits else "in every epoch"
    cure = "copy the images to a local disk, or make them smaller with scripts/prepare.py --side"
    yield warn(f"{text}: the GPU waits {when}", cure)


def read_rate(index: Index, rows: list[int], threads: int) -> tuple[float, float]:
    """Measure reading whole files in threads, without the page cache where the system can.

    Returns:
        Bytes/s, and the mean bytes of a file.
    """
    began = time.perf_counter()

    def read(row: int) -> int:
        if time.perf_counter() - began > READ_SECONDS:
            return 0
        source, start, length = index.place(row)
        path = source.path if isinstance(source, Container) else index.path(row)
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
            return len(os.pread(file.fileno(), length or os.fstat(file.fileno()).st_size, start))
        return 0

    lengths = [length for length in in_threads(threads, read, rows) if length]
    return sum(lengths) / (time.perf_counter() - began), sum(lengths) / max(1, len(lengths))
