"""Check the data, the GPUs and the machine before a long training run.

    python scripts/doctor.py data.root=/imagenet
    python scripts/doctor.py data.root=/imagenet --all --ranks 8 --json doctor.json

Accepts train.py's key=value overrides. Lists every file with its size and decodes 2,000 files of
each split, spread over it, or every file with --all. Prints a row for each check: ok, warn or fail,
the result, and the remedy (->). Changes nothing, but compiles the JPEG decoder into the cache as a
run does; a temporary file near run.dir measures the disk. On a GPU, the training step is compiled
and measured, to compare what it needs with what the storage delivers.
Exit status: 0 no check failed, 1 a check failed, 2 wrong arguments.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli

if __name__ == "__main__":
    parser = cli.option_parser(__doc__)
    parser.add_argument("--all", action="store_true", help="decode every file instead of a sample")
    parser.add_argument("--sample", type=int, default=2000, help="files to decode per split (2000)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks to run on this machine (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="doctor.py", purpose=__doc__)
    for wrong, message in (
        (OPTIONS.sample < 1, f"--sample {OPTIONS.sample}: give 1 or more, or --all"),
        (OPTIONS.ranks < 1, f"--ranks {OPTIONS.ranks}: give 1 or more"),
        (
            OPTIONS.json and OPTIONS.json.is_dir(),
            f"--json {OPTIONS.json}: is a folder; give a file",
        ),
        (
            OPTIONS.json and not OPTIONS.json.absolute().parent.is_dir(),
            f"--json {OPTIONS.json}: no such folder; create it",
        ),
        (
            CONFIG.data.source == "folder"
            and isinstance(CONFIG.data.root, str)
            and not os.path.exists(os.path.expanduser(CONFIG.data.root)),
            f"data.root={CONFIG.data.root}: no such folder; needs train/<class>/*, val/<class>/*",
        ),
    ):
        if wrong:
            cli.fail(message, "doctor.py")

import math
import re
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from conf.compose import load
from conf.schema import Config, Data, UserError
from engine import checkpoint
from engine.distributed import World, resolve_device
from engine.extras.finetune import decide
from engine.log.runlog import check_log
from engine.plan import Plan, make_plan
from engine.rundir import RunDirectory, run_identity
from pipeline import decode, machine
from pipeline.augment import Compose
from pipeline.build import Datasets, build_datasets, train_transform, val_transform
from pipeline.class_names import imagenet_names
from pipeline.dataset import SHRUNK_SIDE, FolderDataset
from pipeline.decode import ON_GPU, describe
from pipeline.demo.images import MARKER
from pipeline.index import KINDS, MOST_IGNORED, outdated_cache, stored_as
from pipeline.loader import SLOW_SAMPLE_SECONDS
from pipeline.loader_plan import worker_limit
from pipeline.splits import load_splits, roots_of
from scripts import bench
from scripts.lib import gpus, survey
from scripts.lib.gpus import Ask, Finding
from scripts.lib.survey import Files, Opened, Split, Tell

GIB = 1 << 30
BEGAN = time.time(), time.monotonic()
OPEN_FILES = resource.getrlimit(
    resource.RLIMIT_NOFILE
)  # before pipeline.machine raises the soft limit
NAMED = 10  # files per row on the console
SUSPICIOUS_BYTES = 128  # no image is smaller: such files are always opened
# A disk measurement writes at least PROBE_LEAST, and at most PROBE_BYTES or for PROBE_SECONDS.
PROBE_BYTES = 256 << 20
PROBE_LEAST = 64 << 20
PROBE_SECONDS = 1.5
# A measurement of reading takes READ_SECONDS at most, or READ_FILES files; one of the step, twice
# STEP_SECONDS and the time to compile it.
READ_SECONDS = 2.0
READ_FILES = 2000
STEP_SECONDS = 2.0
# With data.mean and data.std, the pixels should have a mean near 0 and a deviation near 1. ImageNet
# has 0.05 and 1.24 with the usual values, which are means over images of the deviation within an
# image, and 0.19 and 0.56 with 0.5 for both.
LARGEST_MEAN = 0.5
DEVIATIONS = (0.4, 1.5)
# Unusual files: the fraction above which to warn, and the effect on training.
ODD = {
    "CMYK": (0.01, "converted without a colour profile"),
    "grey": (0.2, "three equal channels; slower, decoded by Pillow"),
    "palette": (0.01, "slower, decoded by Pillow"),
    "transparent": (0.01, "slower, decoded by Pillow; the alpha channel is ignored"),
    "16-bit or other": (0.01, "decoded by Pillow; only the upper 8 of 16 bits are used"),
    "misnamed": (0.01, "decoded by content, not by name; formats other than JPEG are slower"),
    "animated": (0.01, "only the first frame is used"),
    "progressive": (0.1, "two to three times slower to decode; the GPU's JPEG engines cannot"),
    "very large": (
        0.01,
        f"over {survey.LARGE / 1e6:g} megapixels: slow, needs memory in every worker",
    ),
    "tiny": (0.01, f"a side under {survey.TINY} px: enlarged"),
    "EXIF rotation": (0.01, "training ignores it"),
}


class NotChecked(Exception):  # noqa: N818 - not an error: an earlier row has the cause
    """The reason why a check was skipped."""


@dataclass(frozen=True)
class Row:
    """A result of a check.

    Attributes:
        status: ok, warn or fail.
        found: The result.
        do: The remedy.
        details: Lines to list, mostly files.
    """

    status: str
    found: str
    do: str = ""
    details: tuple[str, ...] = ()
    check: str = ""


ok, warn, fail = (partial(Row, status) for status in ("ok", "warn", "fail"))


@dataclass
class Case:
    """The input of the checks, and results that later checks use.

    Attributes:
        sample: Number of files to decode per split, or None for all.
        gpus: NVML query function of each GPU that torch sees.
        plan: None if training would refuse to start.
        rough: The plan; if training would refuse it, the plan with one image per rank and step.
    """

    config: Config
    sample: int | None = 2000
    ranks: int = 1
    tell: Tell = lambda text: None
    splits: dict[str, Split] = field(default_factory=dict)
    opened: dict[str, list[Opened]] = field(default_factory=dict)
    gpus: dict[int, Ask] = field(default_factory=dict)
    plan: tuple[Plan, Datasets, World] | None = None
    rough: Plan | None = None

    def both(self) -> tuple[Split, Split]:
        if len(self.splits) < 2 or not all(split.files for split in self.splits.values()):
            raise NotChecked("needs two splits with images, see layout")
        return self.splits["train"], self.splits["val"]

    def planned(self) -> tuple[Plan, Datasets, World]:
        if self.plan is None:
            raise NotChecked("needs the plan, see plan")
        return self.plan

    def how_many(self, name: str) -> str:
        opened, total = len(self.opened[name]), len(self.splits[name].files)
        return f"all {total:,}" if opened == total else f"{opened:,} sampled of {total:,}"


class Listed(FolderDataset):
    """Replaces a split's dataset: has the number of files and their sizes, but no index."""

    operations = 0  # without transforms; in the plan they are some kilobytes

    def __init__(self, files: Files, transform: Compose, seed: int) -> None:
        self.files, self.transform, self.seed = files, transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        return f"{id(self)}"

    def mean_bytes(self) -> float:
        return sum(size for _, size in self.files) / len(self.files)


# The data.


def layout(case: Case) -> Iterator[Row]:
    data = case.config.data
    roots = roots_of(data)
    places = {"train": os.path.join(roots[0], data.train), "val": os.path.join(roots[0], data.val)}
    stored = [name for place in places.values() for name in stored_as(os.path.abspath(place))]
    chosen = len(roots) > 1 or data.classes is not None or data.val_fraction
    if chosen or any(name.endswith(KINDS) for name in stored):
        yield from indexed_layout(case)
    else:
        yield from folder_layout(case, places)


def folder_layout(case: Case, places: dict[str, str]) -> Iterator[Row]:
    for name, root in places.items():
        try:
            split = case.splits[name] = survey.list_split(root, case.tell)
        except OSError as error:
            yield fail(
                f"data.{name}={root}: {error.strerror}", "give a folder with one folder per class"
            )
            continue
        denied = [path for path, _ in split.denied]
        if empty := [
            c
            for c, files in split.classes.items()
            if not files and not any_within(os.path.join(root, c), denied)
        ]:
            yield fail(
                f"{name}: {len(empty):,} class folders contain no images: {few(empty)}",
                "fill or remove them",
            )
        if split.denied:
            yield fail(
                f"{name}: {len(split.denied):,} entries cannot be read, training refuses to start",
                "give this user permission, or remove them",
                listed(split.denied),
            )
        yield from left_out(name, root, split)
        loose = len(split.loose)
        if not split.classes:
            flat = f", but {loose:,} images" if loose else ""
            yield fail(
                f"{name}: no class folders in {root}{flat}",
                "put the images into one folder per class: scripts/prepare.py SOURCE --to DIR",
            )
        elif loose:
            text = f"{name}: {loose:,} images are outside the class folders and ignored"
            yield warn(f"{text}: {few(split.loose)}", "move them into class folders")
        elif len(split.classes) == 1:
            yield warn(
                f"{name}: a single class, {few(split.classes)}",
                "check that data.root is not one folder too high",
            )
        elif not empty and not denied:
            yield ok(f"{name}: {len(split.files):,} images in {len(split.classes):,} class folders")


def left_out(name: str, root: str, split: Split) -> Iterator[Row]:
    """Report images that training does not see."""
    if split.skipped:
        total = len(split.skipped) + len(split.files)
        refused = len(split.skipped) > MOST_IGNORED * total
        yield (fail if refused else warn)(
            f"{name}: {len(split.skipped):,} of {total:,} images are not regular files, "
            + ("training refuses to start" if refused else "training leaves them out"),
            "restore or remove them",
            listed(split.skipped),
        )
    if cache := outdated_cache(root, [path for path, _ in split.files]):
        yield fail(
            f"{name}: the cached list of images is out of date, although the modification times "
            "of the folders have not changed",
            f"delete {cache}",
        )


def indexed_layout(case: Case) -> Iterator[Row]:
    """List what training would use, if it is not all that two folders hold."""
    case.tell("listing the images")
    indexes = load_splits(case.config.data)
    for name, index in zip(("train", "val"), indexes, strict=True):
        case.splits[name] = survey.list_index(index)
        text = f"{name}: {len(index):,} images in {len(index.classes):,} classes of {index.root}"
        yield ok(text)


def any_within(folder: str, paths: Iterable[str]) -> bool:
    """Return whether one of the paths is the folder or is inside it."""
    return any(os.path.commonpath([folder, path]) == folder for path in paths)


def classes(case: Case) -> Iterator[Row]:
    here, there = (set(split.classes) for split in case.both())
    for mine, others, name, other in ((here, there, "train", "val"), (there, here, "val", "train")):
        if extra := sorted(mine - others):
            nearly = {each.casefold(): each for each in others - mine}
            alike = [
                f"{each} is {nearly[each.casefold()]}"
                for each in extra
                if each.casefold() in nearly
            ]
            cure = "use the same class names in both splits"
            if alike:
                cure += f"; {few(alike)} there: names are case-sensitive"
            yield fail(
                f"{len(extra):,} of {name}'s {len(mine):,} are not in {other}: {few(extra)}", cure
            )
    if here == there:
        yield ok(f"the same {len(here):,} in both splits")


def class_order(case: Case) -> Iterator[Row]:
    names = list(case.both()[0].classes)
    ids = [name for name in names if re.fullmatch(r"n\d{8}", name)]
    span = f"{names[0]} to {names[-1]}"
    if names == list(imagenet_names()):
        yield ok(f"the 1,000 of ImageNet-1k in order, {span}: labels match published weights")
    elif ids:
        strange = (
            f"; not IDs: {few(sorted(set(names) - set(ids)))}" if len(ids) < len(names) else ""
        )
        head = "would predict wrong classes" if len(names) == 1000 else "is replaced by a new one"
        text = f"{len(ids):,} WordNet IDs, {span}{strange}"
        yield warn(
            f"{text}: not the 1,000 of ImageNet-1k, n01440764 to n15075141",
            f"add missing classes, if any; label i is the i-th class, and a pretrained head {head}",
        )
    elif all(name.isdecimal() for name in names) and names != sorted(names, key=int):
        yield warn(
            f"numbers sorted as text: {few(names)}",
            "label 2 is not folder 2: pad the names with zeros",
        )
    else:
        yield ok(f"by name, {span}: label i is the i-th class")


def readable(case: Case) -> Iterator[Row]:
    chosen = {name: choose(case, split.files) for name, split in case.splits.items()}
    if not any(chosen.values()):
        raise NotChecked("needs images, see layout")
    found = survey.examine_all(
        [path for paths in chosen.values() for path in paths],
        decoder=decode.resolve("auto"),
        workers=usable_cores(),
        tell=case.tell,
        max_pixels=case.config.data.max_pixels,
    )
    by_path = {opened.path: opened for opened in found}
    for name, paths in chosen.items():
        case.opened[name] = [by_path[path] for path in paths]
        bad = [(o.path, o.problem) for o in case.opened[name] if o.problem]
        data = case.config.data
        skips = name == "train" and data.on_error == "skip"
        skips = skips and len(bad) <= data.max_bad_fraction * len(paths)
        if bad:
            cure = "replace or remove them"
            if name == "train":
                cure += ", or set data.on_error=skip"
            if len(paths) < len(case.splits[name].files):
                cure += "; --all finds all of them"
            yield (warn if skips else fail)(
                f"{name}: {len(bad):,} of {case.how_many(name)} cannot be read", cure, listed(bad)
            )
        elif paths:
            yield ok(f"{name}: {case.how_many(name)} decoded without errors")
        if late := slowest((o.path, o.seconds) for o in case.opened[name]):
            how_long = f"took over {SLOW_SAMPLE_SECONDS:g} s to read"
            yield warn(
                f"{name}: {len(late):,} of {case.how_many(name)} {how_long}",
                "copy them again or to another disk, or check the storage",
                late,
            )


def odd_files(case: Case) -> Iterator[Row]:
    opened = [o for found in case.opened.values() for o in found if not o.problem]
    if not opened:
        raise NotChecked("needs readable files, see readable")
    counts = Counter(kind for o in opened for kind in o.odd)
    details = tuple(
        f"{count:,} {kind}: {ODD[kind][1]}: "
        + few((f"{o.path} ({o.about})" for o in opened if kind in o.odd), 2)
        for kind, count in counts.most_common()
    )
    text = f"of {len(opened):,} images: " + (
        ", ".join(f"{n:,} {kind}" for kind, n in counts.most_common()) or "none"
    )
    if any(count > ODD[kind][0] * len(opened) for kind, count in counts.items()):
        yield warn(
            text,
            "training accepts them; scripts/prepare.py --side 352 converts them to RGB JPEGs",
            details,
        )
    else:
        yield ok(text, details=details)


def duplicates(case: Case) -> Iterator[Row]:
    train_split, val_split = case.both()
    if "val" not in case.opened:
        raise NotChecked("needs opened files, see readable")
    sampled = {o.path for o in case.opened["val"]}
    val = [file for file in val_split.files if file[0] in sampled]
    pairs = survey.find_duplicates(val, train_split.files, case.tell)
    text = (
        f"{len(pairs):,} of {case.how_many('val')} validation images are byte-for-byte copies of "
        f"training images (compared with all {len(train_split.files):,})"
    )
    details = tuple(f"{a} = {b}" for a, b in pairs)
    elsewhere = sum(val_split.class_of[a] != train_split.class_of[b] for a, b in pairs)
    cure = "remove them from one split: they distort the accuracy by up to their fraction"
    if elsewhere:
        text += f"; {elsewhere:,} of them in another class"
        cure += "; those in another class have a wrong label in one split"
    if 2 * len(pairs) > len(val):
        yield fail(text, "validation accuracy would be meaningless: give another data.val", details)
    elif pairs:
        yield warn(text, cure, details)
    else:
        yield ok(text)


def sizes(case: Case) -> Iterator[Row]:
    case.both()
    trained = case.config.data.image_size
    side = SHRUNK_SIDE * trained // 224
    for name, split in case.splits.items():
        total = sum(size for _, size in split.files)
        by_count = sorted((len(files), c) for c, files in split.classes.items() if files)
        (least, small), (most, large) = by_count[0], by_count[-1]
        sides = [min(o.size) for o in case.opened.get(name, []) if not o.problem]
        low, middle, high = np.percentile(sides or [0], [10, 50, 90]).tolist()
        text = (
            f"{name}: {len(split.files):,} images, {total / 1e9:,.2f} GB, "
            f"mean {total / len(split.files) / 1e3:,.0f} kB; "
            f"short side: median {middle:.0f} px, 80 % in {low:.0f} to {high:.0f}; "
            f"classes of {least:,} ({small}) to {most:,} ({large})"
        )
        areas = np.square(sides or [1])
        gain = areas.mean() / np.minimum(areas, side**2).mean()
        if most > 10 * least:
            yield warn(
                f"{text}, {most / least:,.0f} times as many",
                "large classes dominate loss and accuracy: add images to small classes",
            )
        elif 0 < 2 * middle < trained:
            yield ok(
                text, f"small compared with the {trained} px of training: lower data.image_size"
            )
        elif gain > 1.3:
            yield ok(text, f"scripts/prepare.py --side {side} reduces decoding {gain:.1f} times")
        else:
            yield ok(text)


def colours(case: Case) -> Iterator[Row]:
    data = case.config.data
    good = [o for o in case.opened.get("train", []) if not o.problem]
    if not good:
        raise NotChecked("needs readable training images, see readable")
    mean = np.mean([o.mean for o in good], axis=0)
    std = np.sqrt(np.maximum(0, np.mean([o.square for o in good], axis=0) - mean**2))
    measured = (
        f"data.mean=[{','.join(f'{v:.3f}' for v in mean)}] "
        f"data.std=[{','.join(f'{max(v, 0.001):.3f}' for v in std)}]"
    )
    inputs = (mean - data.mean) / data.std, std / data.std
    text = (
        f"measured {measured} ({case.how_many('train')} training images); with the configured "
        f"values, the input has a mean of {', '.join(f'{v:.2f}' for v in inputs[0])} and a "
        f"deviation of {', '.join(f'{v:.2f}' for v in inputs[1])}"
    )
    low, high = DEVIATIONS
    far = (abs(inputs[0]) > LARGEST_MEAN).any() or ((inputs[1] < low) | (inputs[1] > high)).any()
    if not far:
        yield ok(text)
    elif case.config.model.weights is not None:
        yield ok(f"{text}: far from 0 and 1, but the values must be those of model.weights")
    else:
        yield warn(
            f"{text}; the mean should be within {LARGEST_MEAN:g} of 0 and the deviation between "
            f"{low:g} and {high:g}",
            f"set {measured}, unless the configured values are intended",
        )


# GPUs.


def gpu(case: Case) -> Iterator[Row]:
    choice = case.config.train.device
    if not torch.cuda.is_available():
        why = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        driver = (
            " although there is an NVIDIA driver"
            if os.path.exists("/proc/driver/nvidia/version")
            else ""
        )
        text = f"training will run on the CPU: torch {torch.__version__} {why}{driver}"
        cure = "sufficient for a small run; otherwise install a driver and PyTorch with CUDA"
        yield fail(text, cure) if choice == "cuda" else warn(text, cure)
        return
    count, used = torch.cuda.device_count(), 0 if choice == "cpu" else case.ranks
    driver, answers = "unknown", None
    try:
        driver, case.gpus = gpus.open_nvml()
    except Exception as error:
        case.gpus = dict.fromkeys(range(count), lambda *call: None)
        text = f"most GPU checks skipped: NVML is not available ({describe(error)})"
        answers = warn(text, "pip install nvidia-ml-py")
    names = Counter(torch.cuda.get_device_properties(i).name for i in range(count))
    text = (
        f"{few(f'{n} {name}' for name, n in names.items())}, {used} used; "
        f"driver {driver}, PyTorch for CUDA {torch.version.cuda}"
    )
    cure = "remove train.device"
    if used:
        cure = f"torchrun --nproc-per-node {count} train.py uses all: check with --ranks {count}"
    yield warn(text, cure) if used < count else ok(text)
    yield from [answers] if answers else each_gpu(gpus.card, case)


def each_gpu(look: Callable[[Ask, int], Finding | None], case: Case) -> Iterator[Row]:
    """Run a check on each GPU; yield one row for all GPUs with the same result."""
    found = {i: look(ask, i) for i, ask in case.gpus.items()}
    for same in dict.fromkeys(filter(None, found.values())):
        status, text, do = same
        yield Row(
            status,
            f"GPU {', '.join(str(i) for i, other in found.items() if other == same)}: {text}",
            do,
        )


# The machine.


def plan(case: Case) -> Iterator[Row]:
    config = case.config
    if config.adapt:
        files = case.both()[0].files if has_files(config.data) else build_datasets(config).train
        config = case.config = load(
            config.typed, decided=decide(config, len(files), case.ranks), runnable=False
        )
    world = World(0, case.ranks, 0, case.ranks, resolve_device(config.train.device, 0, case.ranks))
    if has_files(config.data):  # datasets of the same length, without an index and its cache
        train_split, val_split = case.both()
        data = replace(config.data, source="fake", fake_classes=len(train_split.classes))
        datasets = build_datasets(replace(config, data=data))
        seed = config.train.seed
        datasets = replace(
            datasets,
            train=Listed(train_split.files, train_transform(config)[0], seed),
            val=Listed(val_split.files, val_transform(config)[0], seed),
        )
    else:
        datasets = build_datasets(config)
    try:
        made = case.rough = make_plan(config, datasets, world)
    except UserError:
        smallest = replace(config, loader=replace(config.loader, batch_size=case.ranks))
        with suppress(UserError):  # later checks need it if the batch or its memory is the problem
            case.rough = make_plan(smallest, datasets, world)
        raise
    case.plan = made, datasets, world
    yield from (
        warn(note, "training still starts") for note in made.notes if note not in config.notes
    )
    model = f"{config.model.name}, {made.parameters / 1e6:.2f} M parameters"
    batch = f"{made.batch_size} images of {made.image_size} px on {made.device}"
    steps = f"{made.stop_step:,} steps of {batch}"
    yield ok(f"{model}, {made.num_classes:,} classes; {steps}")


def cores(case: Case) -> Iterator[Row]:
    usable, online, quota = machine.cores(), os.cpu_count() or 1, machine.cpu_quota()
    physical = usable // machine.threads_per_core()
    text = f"{usable} of {online} hardware threads by affinity ({physical} physical cores), " + (
        "no CPU quota" if quota == math.inf else f"a CPU quota of {quota:g}"
    )
    if min(usable, quota) < 2 * case.ranks:
        yield warn(
            f"{text}: under two for each rank",
            "the training process and its workers would share cores: give more cores",
        )
    elif usable < online or quota < usable:
        yield warn(
            text,
            "if unintended, check taskset, the container's --cpus, the scheduler's --cpus-per-task",
        )
    else:
        yield ok(text)


def workers(case: Case) -> Iterator[Row]:
    if case.rough is None:
        raise NotChecked("needs the plan, see plan")
    made = case.rough
    limit = worker_limit()
    soft, hard = OPEN_FILES
    allowed = f"{soft:,} open files (up to {hard:,}) allow {limit:,}"
    text = f"{made.loader.workers} ({made.loader.reason}); {allowed}"
    if limit < usable_cores() // case.ranks:
        yield warn(text, "raise ulimit -n: fewer workers than cores")
    elif made.loader.workers > made.loader.cores + 1:  # on a CPU, one more can be faster
        yield warn(
            f"{text}; the cores suffice for {made.loader.cores}",
            "use loader.workers=auto, unless storage is slow",
        )
    else:
        yield ok(text)


def memory(case: Case) -> Iterator[Row]:
    made, _, _ = case.planned()
    plan = made.loader
    line = plan.lines()[1].removeprefix("memory").strip()
    if plan.buffer_bytes + plan.worker_bytes > 0.8 * plan.free_bytes:
        yield warn(
            line,
            "little left for page cache and model: lower loader.batch_size or loader.workers",
        )
    else:
        yield ok(line)


def shared_memory(case: Case) -> Iterator[Row]:
    try:
        usage = shutil.disk_usage("/dev/shm")
        found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    except FileNotFoundError:
        found = "this system has none"
    yield ok(f"{found}; the loader does not use it")


def run_directory(case: Case) -> Iterator[Row]:
    check_log(case.config)
    resume = case.config.checkpoint.resume
    run = RunDirectory(case.config, World(0, 1, 0, 1, torch.device("cpu")))
    path = run.path
    _, stored = run.stored()
    kept = checkpoint.files(path / "checkpoints")
    if stored and case.plan is not None:  # the plan's datasets have no fingerprint of the files
        made, datasets, _ = case.plan
        identity = run_identity(case.config, datasets, made)
        before, now = (
            {
                key: value
                for key, value in values.items()
                if key not in ("data.train", "data.val", "pixels", "model.compile")
            }
            for values in (stored, identity)
        )
        checkpoint.compare(before, now, path, accept_changes=case.config.checkpoint.accept_changes)
    if resume == "never" or not kept:
        yield ok(f"{path}: " + ("the existing run will be renamed" if kept else "new"))
    else:
        yield ok(
            f"{path}: contains a run up to {kept[-1].stem}",
            "the same command resumes it; for a new run, give another run.name",
        )


def disk(case: Case) -> Iterator[Row]:
    path = Path(case.config.run.dir).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    try:
        rate, written = write_rate(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield fail(
            f"{folder}: cannot be written: {error.strerror}",
            "give a run.dir with free space and write permission",
        )
        return
    speed = f"{rate / 1e6:,.0f} MB/s ({written >> 20} MiB written with fsync)"
    text = f"{folder}: {free / 1e9:,.1f} GB free, {speed}"
    if case.rough is None:
        yield ok(text, "the size of the checkpoints is unknown, see plan")
        return
    size = case.rough.state_bytes
    number = case.config.checkpoint.keep + 2  # the best, and the one being written
    text += f"; {number} checkpoints of {size / 1e9:.3f} GB, {size / rate:.1f} s each"
    if free < number * size:
        missing = f"{(number * size - free) / 1e9:,.1f} GB"
        yield fail(text, f"free {missing} more, or lower checkpoint.keep")
    elif free < 2 * number * size or size / rate > 30:
        yield warn(
            text,
            "a thread writes checkpoints, and training waits for it before the next one and at the "
            "end: free space, use a faster disk or raise checkpoint.every_steps",
        )
    else:
        yield ok(text)


def storage(case: Case) -> Iterator[Row]:
    """Compare the bytes/s that the GPUs need with those that the storage delivers."""
    if not has_files(case.config.data):
        return
    made, _, world = case.planned()
    files = case.splits["train"].files
    threads = max(1, made.loader.workers) * case.ranks
    rate, count, late = read_rate(files, threads, case.config.train.seed)
    reads = f"reads {rate / 1e6:,.0f} MB/s ({count:,} files, {threads} at a time)"
    if late:
        reads += f", {len(late):,} of them took over {SLOW_SAMPLE_SECONDS:g} s"
    if world.device.type == "cpu":
        text = f"{reads}; not compared with the step, as training runs on the CPU"
        yield ok(text, details=late)
        return
    case.tell("measuring the training step")
    row = compare_storage(case, made, step_rate(case.config, case.ranks), rate, reads)
    yield replace(row, details=late)


def compare_storage(case: Case, made: Plan, step: float, rate: float, reads: str) -> Row:
    """Return the row.

    Args:
        step: Images/s of the step on one GPU.
        rate: Bytes/s from storage.
        reads: The measurement of reading in words.
    """
    total = sum(size for _, size in case.splits["train"].files)
    each = total / len(case.splits["train"].files)
    need = step * case.ranks * each
    gpus_used = "1 GPU" if case.ranks == 1 else f"{case.ranks} GPUs"
    text = (
        f"{made.config.model.name} on {gpus_used} needs {step * case.ranks:,.0f} img/s x "
        f"{each / 1e3:,.0f} kB = {need / 1e6:,.0f} MB/s; storage {reads}"
    )
    if rate >= need:
        return ok(text)
    fits = total < made.loader.free_bytes
    when = "in the first epoch; later ones read the page cache" if fits else "in every epoch"
    return warn(
        f"{text}: the GPU waits {when}",
        "copy the images to a local disk, or make them smaller with scripts/prepare.py --side 352",
    )


def decoder(case: Case) -> Iterator[Row]:
    have, chosen = decode.installed(), case.config.loader.decoder
    best = have[0] if chosen in ("auto", *ON_GPU) else decode.resolve(chosen)
    text = f"loader.decoder={chosen}: on the CPU {best}; installed: {', '.join(have)}"
    region = "install a C compiler (loader.decoder=region says what is missing): region decode is"
    cures = {
        "simplejpeg": f"{region} a quarter faster",
        "pillow": f"{region} about 1.4 times as fast; simplejpeg (pip), 1.2 times",
    }
    yield warn(text, cures[best]) if best in cures else ok(text)


def clock(case: Case) -> Iterator[Row]:
    wall, steady = time.time() - BEGAN[0], time.monotonic() - BEGAN[1]
    drift = f"{1e3 * abs(wall - steady):.1f} ms off the monotonic clock in {steady:.0f} s"
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {drift}"
    if abs(wall - steady) > 0.05 + 0.001 * steady:
        yield warn(text, "the wall clock jumps or drifts, logged times will be wrong: check NTP")
    elif not 2025 <= time.localtime().tm_year <= 2100:
        yield warn(text, "set the clock: file times and logs depend on it")
    else:
        yield ok(text)


# The order matters: later checks use earlier results, and the GPU check must run before this
# process uses a GPU.
ON_FILES: dict[str, Callable[[Case], Iterator[Row]]] = {
    "layout": layout,
    "classes": classes,
    "class order": class_order,
    "readable": readable,
    "odd files": odd_files,
    "duplicates": duplicates,
    "sizes": sizes,
    "colours": colours,
}
ON_MACHINE: dict[str, Callable[[Case], Iterator[Row]]] = {
    "GPU": gpu,
    "PCIe": partial(each_gpu, gpus.pcie),
    "NVLink": partial(each_gpu, gpus.nvlink),
    "GPU health": partial(each_gpu, gpus.health),
    "GPU clocks": partial(each_gpu, gpus.clocks),
    "JPEG engines": partial(each_gpu, gpus.jpeg_engines),
    "plan": plan,
    "cores": cores,
    "workers": workers,
    "memory": memory,
    "/dev/shm": shared_memory,
    "run.dir": run_directory,
    "disk": disk,
    "storage": storage,
    "decoder": decoder,
    "clock": clock,
}


def check(case: Case) -> Iterator[Row]:
    """Run all checks.

    An error that training would raise is a failure; a check that cannot run is only a warning.
    """
    checks = ON_MACHINE
    if has_files(case.config.data):
        checks = ON_FILES | ON_MACHINE
    else:
        yield ok(f"data={case.config.data.source}: no files to check yet", check="layout")
    for name, make in checks.items():
        try:
            for row in make(case):
                yield replace(row, check=name)
        except UserError as error:
            yield fail(str(error), "training refuses to start", check=name)
        except NotChecked as reason:
            yield warn(f"not checked: {reason}", check=name)
        except Exception as error:
            yield warn(f"check failed with an error: {describe(error)}", check=name)


def has_files(data: Data) -> bool:
    """Return whether there are files: never with data=fake, with data=demo once it is drawn."""
    marker = os.path.join(roots_of(data)[0], MARKER)
    return data.source == "folder" or (data.source == "demo" and os.path.exists(marker))


def choose(case: Case, files: Files) -> list[str]:
    """Choose the files to decode: a sample, and all files that cannot be images by name or size.

    Finder creates ._a.jpg next to a.jpg.
    """
    if case.sample is None:
        return [path for path, _ in files]
    chosen = {files[i][0] for i in survey.spread(len(files), case.sample, case.config.train.seed)}
    for path, size in files:
        if size < SUSPICIOUS_BYTES or os.path.basename(path).startswith("._"):
            chosen.add(path)
    return sorted(chosen)


def usable_cores() -> int:
    return max(1, math.floor(min(machine.cores(), machine.cpu_quota())))


def write_rate(folder: Path) -> tuple[float, int]:
    """Measure bytes/s to storage with a temporary file without a name.

    On some file systems, such as NFS, the file has a name for an instant.

    Returns:
        Bytes/s, and the bytes written.

    Raises:
        OSError: The file cannot be written.
    """
    block = os.urandom(4 << 20)
    written = 0
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < PROBE_LEAST or (
            written < PROBE_BYTES and time.perf_counter() - began < PROBE_SECONDS
        ):
            written += file.write(block)
        os.fsync(file.fileno())
        return written / (time.perf_counter() - began), written


def slowest(files: Iterable[tuple[str, float]]) -> tuple[str, ...]:
    """List the files whose reading took over SLOW_SAMPLE_SECONDS, the slowest first."""
    slow = sorted((f for f in files if f[1] > SLOW_SAMPLE_SECONDS), key=lambda f: -f[1])
    return tuple(f"{path}: {seconds:.1f} s" for path, seconds in slow)


def read_rate(files: Files, threads: int, seed: int) -> tuple[float, int, tuple[str, ...]]:
    """Measure bytes/s from storage: read whole files, spread over the split, in threads.

    Where the system can, copies in the page cache are dropped first.

    Returns:
        Bytes/s, the number of files that were read, and the slow ones of them.
    """
    paths = [files[i][0] for i in survey.spread(len(files), READ_FILES, seed + 1)]
    began = time.perf_counter()
    seconds: dict[str, float] = {}

    def read(path: str) -> int:
        if time.perf_counter() - began > READ_SECONDS:
            return 0
        name, start, length = path, 0, 0
        if isinstance(path, survey.Member):
            name, start, length = path.container.path, path.start, path.length
        opened = time.perf_counter()
        with suppress(OSError), open(name, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
            data = os.pread(file.fileno(), length or os.fstat(file.fileno()).st_size, start)
            seconds[path] = time.perf_counter() - opened
            return len(data)
        return 0

    with ThreadPoolExecutor(threads) as pool:
        lengths = list(pool.map(read, paths))
    rate = sum(lengths) / (time.perf_counter() - began)
    return rate, sum(map(bool, lengths)), slowest(seconds.items())


def step_rate(config: Config, ranks: int) -> float:
    """Measure images/s of the training step on one device, with batches that stay there."""
    share = replace(config.loader, batch_size=max(1, config.loader.batch_size // ranks))
    data = replace(config.data, source="fake")
    (step,) = bench.run(
        replace(config, data=data, loader=share), only=("step",), seconds=STEP_SECONDS
    )
    return step.rate


def few(names: Iterable[Any], count: int = 5) -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def listed(items: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{path}: {' '.join(reason.split())}" for path, reason in items)


def lines(row: Row) -> Iterator[str]:
    """Format a row for the console: the remedy and up to NAMED details are indented below it."""
    width = max(map(len, ON_FILES | ON_MACHINE))
    yield f"{row.status:<4}  {row.check:<{width}}  {row.found}"
    indent = " " * (width + 8)
    if row.do:
        yield f"{indent}-> {row.do}"
    yield from (f"{indent}{detail}" for detail in row.details[:NAMED])
    if len(row.details) > NAMED:
        yield f"{indent}and {len(row.details) - NAMED:,} more: --json FILE lists all"


def main() -> int:
    # A file name may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    terminal = sys.stderr.isatty()
    rows: list[Row] = []
    shown = 0.0

    clear = "\r\x1b[K" if terminal else ""

    def tell(text: str) -> None:
        nonlocal shown
        if terminal and time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            print(f"\r{text[:120]}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        for row in check(
            Case(CONFIG, None if OPTIONS.all else OPTIONS.sample, OPTIONS.ranks, tell)
        ):
            rows.append(row)
            print(clear, end="", file=sys.stderr, flush=True)
            print("\n".join(map(cli.printable, lines(row))), flush=True)
    except KeyboardInterrupt:
        print(f"{clear}doctor.py: interrupted", file=sys.stderr)
        return 130
    counts = Counter(row.status for row in rows)
    print(", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail")))
    if OPTIONS.json:
        content = {
            "counts": counts,
            "rows": [asdict(row) for row in rows],
            "made_by": checkpoint.provenance(),
        }
        try:
            checkpoint.write_json(OPTIONS.json, content)
        except OSError as error:
            cli.complain(f"--json {OPTIONS.json}: cannot be written: {error.strerror}", "doctor.py")
            return 1
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
