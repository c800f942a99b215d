#!/usr/bin/env python3
"""Train ResNet-50 on batches from ffcv, DALI and webdataset, for the table of other trainers.

Hardware: one H200 with 16 cores; torch 2.11. Time: 15 to 60 s for each file or set of tars, and one
to two minutes for each training. Needs: torchvision, psutil and nvidia-ml-py; for their rows ffcv
(commit 3a12966, with cupy and pytorch_pfn_extras), nvidia-dali-cuda130 2.4 or webdataset 1.0.

    B=benchmarks/peers_loaders.py
    python3 $B write half-500 IMAGES/train half-500.beton
    python3 $B train ffcv half-500.beton
    python3 $B train dali-cpu IMAGES/train
    python3 $B train dali-mixed IMAGES/train
    python3 $B write tars IMAGES/train tars
    python3 $B train webdataset tars

Formats of ffcv: `half-500` is the one that ffcv-imagenet recommends for ResNet-50: an image size of
at most 500 px, half of the images as JPEGs of quality 90, and the others as pixels. `jpeg-500` has
JPEGs only, `jpeg` has them in full size, and `as-is` has the bytes of the files.

The same: crops of 8-100 % of the area to 224 px, flips, normalization, batches of --batch images,
torchvision's ResNet-50 in channels_last with plain layers under torch.compile, and SGD. Different:
ffcv and DALI normalize in their own kernels on the GPU and return fp16. Files that fit into memory
are read from the page cache.

`train` measures the loader alone (`load`), then the step on a batch that stays on the GPU (`step`)
and on batches of the loader (`fed`), in turns, so both are equally hot. Each row is a median over
windows of --window steps, without compilation and warm-up, with the CPU time of all processes per
image and the GPU's temperature and SM clock.
"""

import argparse
import os
import random
import tarfile
import time
from functools import partial
from itertools import islice, repeat
from multiprocessing import Pool, active_children
from pathlib import Path
from statistics import median

import psutil
import torch
from torchvision.models import resnet50

MEAN = (123.675, 116.28, 103.53)  # levels are 0 to 255
STD = (58.395, 57.12, 57.375)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SKIPPED_STEPS = 10  # before the first window of a turn; batches in a queue are free
SHARDS = 64
SHUFFLED = 1000  # images in webdataset's buffer


def list_images(folder):
    """Return the path and the class index of each image in folder/<class>/."""
    classes = sorted(folder.iterdir())
    return [(path, label) for label, name in enumerate(classes) for path in sorted(name.iterdir())]


def shuffled(images):
    """DALI and webdataset only shuffle within a buffer, so it would hold a few classes."""
    return random.Random(0).sample(images, len(images))


def write(options):
    """Write the images into options.target, and print its bytes and the time per image."""
    images = list_images(options.source)
    prepare = prepare_tars if options.what == "tars" else prepare_beton
    work = prepare(images, options)
    began, before = time.perf_counter(), os.times()
    work()
    seconds = time.perf_counter() - began
    for process in active_children():
        process.join()  # os.times only counts processes that were joined
    used = [now - then for now, then in zip(os.times(), before, strict=True)]
    files = [path for path in (options.target, *options.target.glob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    source = sum(path.stat().st_size for path, _ in images)
    print(
        f"write {options.what}: {len(images):,} images in {seconds:.1f} s, "
        f"{1000 * sum(used[:4]) / len(images):.2f} CPU ms each; {size / 1e9:.3f} GB, "
        f"{size / len(images) / 1000:.1f} kB each, {size / source:.2f} of the files",
        flush=True,
    )


def prepare_beton(images, options):
    """Return a function that writes the images. Importing ffcv takes seconds that do not count."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class UnchangedJPEG(RGBImageField):
        """Store the bytes of a file; RGBImageField encodes every image again."""

        def encode(self, destination, image, malloc):
            content = np.fromfile(image.filename, np.uint8)
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["width"], destination["height"] = image.size
            destination["data_ptr"], storage = malloc(content.nbytes)
            storage[:] = content

    class Images:
        """Open images; only UnchangedJPEG leaves their pixels unread."""

        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            path, label = images[index]
            image = Image.open(path)
            return (image if options.what == "as-is" else image.convert("RGB")), label

    field = {
        "half-500": RGBImageField("proportion", max_resolution=500, compress_probability=0.5),
        "jpeg-500": RGBImageField("jpg", max_resolution=500),
        "jpeg": RGBImageField("jpg"),
        "as-is": UnchangedJPEG(),
    }[options.what]
    fields = {"image": field, "label": IntField()}
    writer = DatasetWriter(str(options.target), fields, num_workers=options.workers)
    return partial(writer.from_indexed_dataset, Images())


def prepare_tars(images, options):
    options.target.mkdir()
    images = shuffled(images)
    shards = [images[first::SHARDS] for first in range(SHARDS)]
    names = [options.target / f"train-{number:05d}.tar" for number in range(SHARDS)]
    return partial(write_all, list(zip(names, shards, strict=True)), options.workers)


def write_all(tars, workers):
    pool = Pool(workers)
    pool.starmap(write_tar, tars)
    pool.close()


def write_tar(name, images):
    with tarfile.open(name, "w", dereference=True) as tar:  # no hard links
        for number, (path, label) in enumerate(images):
            tar.add(path, f"{number:06d}-{label}.jpg")


def ffcv_batches(options):
    """Yield images, fp16 in channels_last, and labels. A long epoch repeats the images."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.reader import Reader
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToDevice,
        ToTensor,
        ToTorchImage,
    )

    fields = {"image": RGBImageField, "label": IntField}  # as-is has no type
    to_device = ToDevice(torch.device(options.device), non_blocking=True)
    decode = RandomResizedCropRGBImageDecoder((options.size, options.size))
    image = [decode, RandomHorizontalFlip(), ToTensor(), to_device, ToTorchImage()]
    if not options.normalize_in_step:
        image.append(NormalizeImage(np.array(MEAN), np.array(STD), np.float16))
    count = Reader(str(options.source), fields).num_samples
    images_per_epoch = options.batch * options.steps_per_epoch
    loader = Loader(
        str(options.source),
        batch_size=options.batch,
        num_workers=options.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.resize(np.arange(count, dtype="uint64"), images_per_epoch),
        pipelines={
            "image": image,
            "label": [IntDecoder(), ToTensor(), Squeeze(), to_device],
        },
        custom_fields=fields,
    )
    while True:
        yield from loader


def dali_batches(options):
    """Yield images, fp16 in channels_last, and labels; as in DALI's ResNet-50 example."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    decoder = options.what.removeprefix("dali-")
    mixed = {
        "hw_decoder_load": 0.65,
        "preallocate_width_hint": 5980,
        "preallocate_height_hint": 6430,
    }
    files, labels = zip(*shuffled(list_images(options.source)), strict=True)

    @pipeline_def(batch_size=options.batch, num_threads=options.workers, device_id=0)
    def crops():
        jpegs, classes = fn.readers.file(
            files=list(map(str, files)), labels=list(labels), random_shuffle=True, name="Reader"
        )
        images = fn.decoders.image_random_crop(
            jpegs,
            device=decoder,
            output_type=types.RGB,
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[0.08, 1.0],
            num_attempts=100,
            **(mixed if decoder == "mixed" else {}),
        )
        images = fn.resize(
            images,
            resize_x=options.size,
            resize_y=options.size,
            interp_type=types.INTERP_TRIANGULAR,
        )
        images = fn.crop_mirror_normalize(
            images.gpu(),
            dtype=types.FLOAT16,
            output_layout="HWC",
            mean=list(MEAN),
            std=list(STD),
            mirror=fn.random.coin_flip(probability=0.5),
        )
        return images, classes.gpu()

    loader = DALIClassificationIterator(crops(), reader_name="Reader", auto_reset=True)
    while True:
        for (batch,) in loader:
            yield batch["data"].permute(0, 3, 1, 2), batch["label"].squeeze(1).long()


def webdataset_batches(options):
    """Yield images, uint8 in channels_last, and labels from workers that use torchvision."""
    import webdataset as wds
    from torchvision.transforms import v2

    crop = v2.Compose(
        [v2.RandomResizedCrop(options.size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    tars = sorted(map(str, options.source.glob("*.tar")))
    samples = wds.WebDataset(tars, resampled=True, shardshuffle=False).shuffle(SHUFFLED)
    samples = samples.decode("pil").to_tuple("jpg", "__key__")
    samples = samples.map_tuple(crop, lambda key: int(key.rpartition("-")[2]))
    loader = wds.WebLoader(
        samples.batched(options.batch, partial=False),
        batch_size=None,
        num_workers=options.workers,
        pin_memory=options.device == "cuda",
        prefetch_factor=4,
    )
    for images, labels in loader:
        images = images.to(options.device, non_blocking=True)
        labels = torch.as_tensor(labels).to(options.device, non_blocking=True)
        yield images.to(memory_format=torch.channels_last), labels


LOADERS = {
    "ffcv": ffcv_batches,
    "dali-cpu": dali_batches,
    "dali-mixed": dali_batches,
    "webdataset": webdataset_batches,
}


class Step:
    """Train a new ResNet-50 on each batch that it is called with."""

    def __init__(self, options, precision):
        self.dtype = PRECISIONS[precision]
        self.device = options.device
        self.model = resnet50().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4
        )
        self.scaler = torch.amp.GradScaler(self.device, enabled=precision == "fp16")
        self.mean = torch.tensor(MEAN, device=self.device).view(3, 1, 1)
        self.std = torch.tensor(STD, device=self.device).view(3, 1, 1)
        self.loss = torch.compile(self.compute_loss)

    def compute_loss(self, images, labels):
        if images.dtype == torch.uint8:
            images = (images - self.mean) / self.std
        with torch.autocast(self.device, self.dtype):
            logits = self.model(images)
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    def __call__(self, images, labels):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(images, labels)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def cpu_seconds():
    """Return the CPU time of this process and of those that it started."""
    process = psutil.Process()
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def heat():
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.temperature()} °C, {torch.cuda.clock_rate():,} MHz"


def measure(batches, work, options):
    """Yield images/s and CPU ms per image in each window."""
    synchronize = torch.get_device_module(options.device).synchronize
    for images, labels in islice(batches, SKIPPED_STEPS):
        work(images, labels)
    for _ in range(options.windows):
        synchronize()
        began, cpu = time.perf_counter(), cpu_seconds()
        for images, labels in islice(batches, options.window):
            work(images, labels)
        state = heat()  # before the GPU is idle
        synchronize()
        count = options.batch * options.window
        cpu_ms = 1000 * (cpu_seconds() - cpu) / count
        yield count / (time.perf_counter() - began), cpu_ms, state


def report(name, windows):
    rates, cpu, states = zip(*windows, strict=True)
    print(
        f"{name}: {median(rates):,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f}), "
        f"{median(cpu):.3f} CPU ms per image, {states[-1]}",
        flush=True,
    )
    return median(rates)


def train(options):
    began = time.perf_counter()
    batches = LOADERS[options.what](options)
    kept = [tensor.clone() for tensor in next(batches)]  # ffcv reuses its memory
    name = f"{options.what} {options.source.stem}"
    print(f"{name}: {kept[0].dtype} after {time.perf_counter() - began:.1f} s", flush=True)
    report(f"{name} load", measure(batches, lambda images, labels: None, options))
    for precision in options.precision:
        step = Step(options, precision)
        began = time.perf_counter()
        step(*kept)
        print(f"{name} {precision}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        alone, fed = [], []
        for _ in range(options.turns):
            alone += measure(repeat(kept), step, options)
            fed += measure(batches, step, options)
        rate = report(f"{name} {precision} step", alone)
        fraction = report(f"{name} {precision} fed ", fed) / rate
        print(f"{name} {precision}: fraction {fraction:.3f}", flush=True)


COMMANDS = {"write": write, "train": train}
FORMATS = ("half-500", "jpeg-500", "jpeg", "as-is", "tars")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("what", choices=(*FORMATS, *LOADERS), help="format to write, or loader")
    parser.add_argument("source", type=Path, help="class folders, a .beton file, or tars")
    parser.add_argument("target", type=Path, nargs="?", help="file or new folder to write")
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=["bf16", "fp16"])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--turns", type=int, default=2, help="of step and fed, in turns")
    parser.add_argument("--windows", type=int, default=4, help="in each turn")
    parser.add_argument("--window", type=int, default=25, help="steps per window")
    parser.add_argument("--steps-per-epoch", type=int, default=5004, help="ffcv: as in ImageNet")
    parser.add_argument(
        "--normalize-in-step", action="store_true", help="ffcv: not in its kernel, which needs cupy"
    )
    given = parser.parse_args()
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    COMMANDS[given.command](given)
    os._exit(0)  # the loaders' threads and processes would run on
