"""Puts the pieces together: config in, datasets and prefetchers out. Reads top to bottom as the journey of a batch."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from conf.schema import Config, Data, UserError
from pipeline import augment, decode
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.dataset import Dataset, FakeDataset, FolderDataset
from pipeline.demo import CLASSES, MARKER, TRAIN_IMAGES, ensure_demo_dataset
from pipeline.gpu_decode import EngineError, GpuDecoder, has_engines
from pipeline.index import check_splits, load_index
from pipeline.loader import Loader, Pinned, WorkerPool, slots_needed, start_source
from pipeline.prefetcher import Prefetcher
from pipeline.sampler import TrainSampler, ValSampler

ON_GPU = ("gpu", "hybrid")  # decoders that leave files to the GPU
# Tasks a worker has in hand: measured on an H200 (docs/benchmarks.md); loader.workers=auto goes up to MOST_TASKS_IN_HAND.
TASKS_IN_HAND, MOST_TASKS_IN_HAND = 3, 4


@dataclass(frozen=True)
class Datasets:
    """Both splits and what follows from them.

    Attributes:
        train_side, val_side: side of the images after the transforms, pixels.
        train_fingerprint, val_fingerprint: which samples these are, wherever their folders are.
    """

    train: Dataset
    val: Dataset
    classes: tuple[str, ...]
    train_side: int
    val_side: int
    train_fingerprint: str
    val_fingerprint: str


def build_datasets(config: Config) -> Datasets:
    """Build both splits' transforms and sample tables. Writes nothing but the index cache and, for data=demo, the images.

    Raises:
        UserError: a transform, a folder or its content is not as it must be.
    """
    train_transform = augment.Compose(augment.build(config.augment.train, augment.TRANSFORMS, key="augment.train"))
    val_transform = augment.Compose(augment.build(config.augment.val, augment.TRANSFORMS, key="augment.val"))
    augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    train_side, val_side = _side(train_transform, "augment.train"), _side(val_transform, "augment.val")
    data, seed = config.data, config.train.seed
    if data.source == "fake":
        train = FakeDataset(num_samples=data.fake_images, num_classes=data.fake_classes, size=train_side)
        val = FakeDataset(num_samples=data.fake_images // 10, num_classes=data.fake_classes, size=val_side)
        classes = tuple(f"fake{i:04d}" for i in range(data.fake_classes))
        return Datasets(train, val, classes, train_side, val_side, f"{len(train)} fake images", f"{len(val)} fake images")
    root = _root(config)
    if data.source == "demo":
        try:
            ensure_demo_dataset(root)
        except ValueError as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"data.root={root}: {error}") from None
    elif not root.is_dir():
        raise UserError(f"data.root={data.root}: no such folder; it must hold train/<class>/* and val/<class>/*")
    else:
        _check_layout(root, data)
    train_index = load_index(root / data.train, key="data.train")
    val_index = load_index(root / data.val, key="data.val")
    check_splits(train_index, val_index)
    # With gpu and hybrid, the best of these decodes the validation images and what the engines do not take.
    decoder = decode.resolve("auto" if config.loader.decoder in ON_GPU else config.loader.decoder)
    train_files = FolderDataset(train_index, train_transform, decoder=decoder, seed=seed)
    val_files = FolderDataset(val_index, val_transform, decoder=decoder, seed=seed)
    return Datasets(train_files, val_files, train_index.classes, train_side, val_side, train_files.fingerprint(),
                    val_files.fingerprint())  # fmt: skip


def stand_in(config: Config) -> Datasets | None:
    """Fake datasets of the demo's size while it is not drawn: they show what is wrong with a config before 2,500 images are
    drawn for it. Else None.
    """
    if config.data.source != "demo" or os.path.exists(_root(config) / MARKER):
        return None
    data = replace(config.data, source="fake", fake_images=TRAIN_IMAGES, fake_classes=len(CLASSES))
    return build_datasets(replace(config, data=data))


@dataclass(frozen=True)
class Feed:
    """Batches on the device for both splits; one pool of workers serves both.

    Attributes:
        most_workers: what the buffers have room for.
        pinned: the page-locked buffers; None when they are ordinary memory.
    """

    train: Prefetcher
    val: Prefetcher
    val_batches: int
    most_workers: int
    pinned: Pinned | None = None

    @property
    def page_locked(self) -> bool:
        """Whether the buffers are, at this moment: locking may have failed, or been given up."""
        return self.pinned is not None and bool(self.pinned.locked)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Grow the pool to `most_workers` within the `with` block where the engines decode the training images.

        The CPU decoders decode every validation image, and workers that only read files for the engines may be few.
        """
        if self.train.gpu_decoder is None:
            yield
            return
        pool = self.train.loader.pool
        before = len(pool.workers)
        pool.resize(max(before, self.most_workers))
        yield
        pool.resize(before)


@contextmanager
def open_feed(
    config: Config,
    datasets: Datasets,
    *,
    workers: int,
    decoder: str,
    device: torch.device,
    dtype: torch.dtype,
    channels_last: bool,
    rank: int = 0,
    world_size: int = 1,
    most_workers: int = 0,
) -> Iterator[Feed]:
    """Allocate the batch buffers, start the workers, and end them on exit.

    With `most_workers` there is room for the pool to grow to so many. The CPU decoders decode validation images whatever
    `decoder` is, so that a checkpoint has one accuracy.
    """
    loader = config.loader
    share = loader.batch_size // world_size
    slots = ring_slots(config, share, max(workers, most_workers))
    skip = config.data.on_error == "skip"
    engines = decoder in ON_GPU
    sources = [
        start_source(
            datasets.train,
            batch_size=share,
            size=datasets.train_side,
            slots=slots,
            file_bytes=file_room(datasets.train) if engines else 0,
            skip_unreadable=skip,
        ),
        start_source(datasets.val, batch_size=share, size=datasets.val_side, slots=slots),
    ]
    train_sampler = TrainSampler(num_samples=len(datasets.train), batch_size=loader.batch_size, seed=config.train.seed,
                                 rank=rank, world_size=world_size)  # fmt: skip
    val_sampler = ValSampler(num_samples=len(datasets.val), batch_size=loader.batch_size, rank=rank, world_size=world_size)
    with ExitStack() as stack:
        pinned = None
        if loader.pin_memory and device.type == "cuda":
            arrays = [a for s in sources for a in (s.pixels, s.labels, s.files, s.geometry) if a is not None]
            pinned = stack.enter_context(Pinned(arrays))
        in_hand = TASKS_IN_HAND if loader.prefetch_factor == "auto" else loader.prefetch_factor
        pool = stack.enter_context(
            WorkerPool(sources, workers=workers, prefetch_factor=in_hand,
                       timeout_seconds=loader.timeout_seconds, start_method=loader.start_method)
        )  # fmt: skip
        hold = loader.prefetch_batches + 1
        prefetcher = partial(
            Prefetcher,
            device=device,
            depth=loader.prefetch_batches,
            mean=config.data.mean,
            std=config.data.std,
            dtype=dtype,
            channels_last=channels_last,
        )
        train = prefetcher(
            Loader(pool, 0, train_sampler.samples, hold=hold),
            transforms=augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch"),
            num_classes=len(datasets.classes),
            seed=config.train.seed,
            rank=rank,
            gpu_decoder=GpuDecoder(device, share) if engines else None,
            hybrid=decoder == "hybrid",
        )
        val = prefetcher(Loader(pool, 1, val_sampler.samples, hold=hold))
        stack.callback(train.close)
        stack.callback(val.close)
        yield Feed(train, val, len(val_sampler), max(workers, most_workers), pinned)


def ring_slots(config: Config, batch_size: int, workers: int) -> int:
    """Batches in each ring of buffers, for the most tasks the workers may have in hand."""
    in_hand = MOST_TASKS_IN_HAND if config.loader.prefetch_factor == "auto" else config.loader.prefetch_factor
    return slots_needed(batch_size=batch_size, workers=workers, prefetch_factor=in_hand,
                        prefetch_batches=config.loader.prefetch_batches)  # fmt: skip


def pixels_of(decoder: str) -> str:
    """Whose pixels a decoder gives: cpu for all that run there, which agree bit for bit; gpu and hybrid are their own."""
    return decoder if decoder in ON_GPU else "cpu"


def choose_decoder(config: Config, device: torch.device, stored_pixels: str = "cpu") -> str:
    """What loader.decoder stands for on this machine.

    Args:
        stored_pixels: of the checkpoint to resume; auto keeps to them.

    Raises:
        UserError: it is not installed, or there are no engines for gpu and hybrid.
    """
    name = config.loader.decoder
    if config.data.source == "fake":
        return "none"
    if name == "auto" and stored_pixels in ON_GPU and has_engines(device):  # without them, the identity is another
        name = stored_pixels
    if name not in ON_GPU:
        return decode.resolve(name)
    if name == "hybrid" and config.train.deterministic:
        raise UserError("loader.decoder=hybrid: shares each batch by measured speed, so its bits differ from run to run; "
                        "give another decoder with train.deterministic=true")  # fmt: skip
    try:
        if device.type != "cuda":
            raise EngineError("training runs on the CPU")
        GpuDecoder(device, 1)
    except EngineError as error:
        raise UserError(f"loader.decoder={name}: needs an NVIDIA GPU with JPEG engines and nvJPEG: {error}; use auto") from None
    return name


def file_room(dataset: Dataset) -> int:
    """Bytes a row gets for its file. A task's rows share theirs: half as much again as the mean is nearly always enough."""
    return max(1 << 15, int(1.5 * dataset.mean_bytes()))


def _root(config: Config) -> Path:
    return Path(config.data.root or "").expanduser()


def _check_layout(root: Path, data: Data) -> None:
    """Refuse a folder that does not hold both splits, and name the one that does when it is near.

    Raises:
        UserError: names what the folder holds instead.
    """
    splits = (data.train, data.val)
    here, parent = f"data.root={data.root}", Path(os.path.abspath(root)).parent

    def holds_splits(folder: Path) -> bool:
        return all(os.path.isdir(folder / split) for split in splits)

    if holds_splits(root):
        return
    if holds_splits(parent) and any((parent / split).samefile(root) for split in splits):
        raise UserError(f"{here}: is one split; write data.root={parent}, the folder that holds {data.train} and {data.val}")
    try:
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{here}: cannot be read ({error}); check its permissions and the file system") from None
    if any(os.path.isdir(root / split) for split in splits):
        others = [name for name in folders if name not in splits]
        key, split = ("data.val", data.val) if os.path.isdir(root / data.train) else ("data.train", data.train)
        hint = f"did you mean {key}={others[0]}?" if len(others) == 1 else f"give {key}=FOLDER with one folder per class"
        raise UserError(f"{key}={root / split}: no such folder; {hint}")
    if not folders:
        raise UserError(f"{here}: holds no folders; it must hold train/<class>/* and val/<class>/*")
    for pattern in ("*", "*/*", "*/*/*"):  # Kaggle's archive has them in ILSVRC/Data/CLS-LOC
        if inner := next(filter(holds_splits, islice(root.glob(pattern), 1000)), None):
            raise UserError(f"{here}: holds no {data.train} and no {data.val}; write data.root={inner}")
    raise UserError(f"{here}: holds no {data.train} and no {data.val}, but folders such as {folders[0]}; "
                    f"put the class folders into {data.train} and {data.val} inside it")  # fmt: skip


def _side(transform: augment.Compose, key: str) -> int:
    if transform.side is None:
        raise UserError(
            f"{key}: the list does not end in images of one size; add random_resized_crop or center_crop: {{size: 224}}"
        )
    return transform.side
