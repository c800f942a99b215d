#!/usr/bin/env python3
"""Benchmark loading from object storage: this program, webdataset, mosaicml-streaming and litdata.

Hardware: 16 cores; the last command also needs one H200. Time: two epochs for each loader.
Needs: an active .venv with s3fs; for the peers webdataset, mosaicml-streaming and litdata. A
machine without a network needs the wheels of these packages and their dependencies.

    B=benchmarks/object_storage.py
    python3 $B pack IMAGES BUCKETS --shards 64
    python3 benchmarks/object_server.py BUCKETS --processes 4 &
    python3 $B this IMAGES BUCKETS --workers 15
    python3 $B this IMAGES BUCKETS --workers 15 --cache /nvme/cache
    python3 $B webdataset IMAGES BUCKETS --workers 15
    python3 $B streaming IMAGES BUCKETS --workers 15 --cache /nvme/streaming
    python3 $B litdata IMAGES BUCKETS --workers 15 --cache /nvme/litdata

IMAGES has train/<class>/ and val/<class>/. Each command prints images/s and requests per image in
two epochs, with crops of --size pixels and no model. For the fraction of a step on a GPU, run:

    export AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b
    python train.py data.root=s3://images/tars train.epochs=2 train.validate_every_epochs=2
"""

import argparse
import io
import os
import random
import sys
import tarfile
import time
import urllib.request
from functools import cache
from multiprocessing import Pool
from pathlib import Path

SERVER = "http://127.0.0.1:9000"
os.environ |= {"AWS_ENDPOINT_URL": SERVER, "S3_ENDPOINT_URL": SERVER, "AWS_REGION": "us-east-1"}
os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def shuffled_files(folder):
    files = sorted(folder.glob("*/*"))
    random.Random(0).shuffle(files)  # webdataset and streaming only shuffle within a buffer
    return files


def pack(options):
    """Write images/tars/train-*.tar and val-00000.tar, images/mds and images/litdata."""
    files = shuffled_files(options.images / "train")
    size = sum(file.stat().st_size for file in files) // options.shards
    for name in options.formats.split(","):
        folder = options.buckets / "images" / name
        folder.mkdir(parents=True)
        write = {"tars": write_tars, "mds": write_mds, "litdata": write_litdata}[name]
        write(files, size, folder)


def write_tars(files, size, folder):
    tars = {"val-00000.tar": shuffled_files(given.images / "val")}
    for number in range(given.shards):
        tars[f"train-{number:05d}.tar"] = files[number :: given.shards]
    with Pool() as pool:
        pool.starmap(write_tar, [(folder / name, content) for name, content in tars.items()])


def write_tar(path, files):
    from scripts.prepare import list_members

    with tarfile.open(path, "w", dereference=True) as tar:  # no hard links
        for file in files:
            tar.add(file, f"{file.parent.name}/{file.stem}.jpg")  # webdataset needs this suffix
    list_members(path)


def write_mds(files, size, folder):
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=size) as writer:
        for file in files:
            writer.write({"image": file.read_bytes(), "label": 0})


def write_litdata(files, size, folder):
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=size)
    for number, file in enumerate(files):
        writer[number] = {"image": file.read_bytes(), "label": 0}
    writer.done()
    writer.merge()


def this(options):
    """Yield the number of images in each batch of this program."""
    from conf.compose import from_overrides
    from engine.distributed import join_world
    from pipeline.data.build import build_datasets
    from pipeline.feed.feed import open_feed

    words = ["data.root=s3://images/tars", f"data.image_size={options.size}", "train.device=cpu"]
    words += [f"loader.workers={options.workers}", f"loader.batch_size={options.batch}"]
    words += ["optim.lr=0.1"]
    if options.cache:
        entry = f"{{cache: {options.cache}, gigabytes: 1000}}"
        words.append(f"data.storage={{extras.object_storage:tars: {entry}}}")
    config = from_overrides(words)
    with join_world("cpu") as world, open_feed(config, build_datasets(config), world) as feed:
        for batch in feed.train.loader.batches(0, 10**9):
            yield len(batch.samples)


def decode(data, size):
    """Decode, crop and flip like this program, to compare only the loaders; or with torchvision."""
    if given.torchvision:
        from PIL import Image

        return torchvision_transforms(size)(Image.open(io.BytesIO(data)).convert("RGB"))
    import torch

    from pipeline.data.decode import open_picture

    picture = own_transforms(size)(open_picture(data, "region"), random)
    return torch.tensor(picture.pixels())


@cache
def torchvision_transforms(size):
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.ToImage()])


@cache
def own_transforms(size):
    from pipeline.data.augment import Compose, HorizontalFlip, RandomResizedCrop

    return Compose([RandomResizedCrop(size=size), HorizontalFlip()])


def sizes_of(dataset, options):
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, persistent_workers=True
    )
    while True:
        for images, _ in loader:
            yield len(images)


def webdataset(options):
    import webdataset as wds

    if options.cache:
        Path(options.cache).mkdir(parents=True)
    urls = f"{SERVER}/images/tars/train-{{00000..{options.shards - 1:05d}}}.tar"
    dataset = wds.WebDataset(
        f"pipe:curl -s {urls}", shardshuffle=options.shards, nodesplitter=wds.split_by_node,
        cache_dir=options.cache or None,
    )  # fmt: skip
    dataset = dataset.shuffle(1000).map(lambda sample: (decode(sample["jpg"], options.size), 0))
    return sizes_of(dataset, options)


def streaming(options):
    from streaming import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index):
            return decode(super().__getitem__(index)["image"], options.size), 0

    remote, local = "s3://images/mds", options.cache or "/tmp/streaming"
    # Otherwise it would create a client here, and the forked workers would share its connection.
    Path(local).mkdir(parents=True)
    urllib.request.urlretrieve(f"{SERVER}/images/mds/index.json", f"{local}/index.json")
    dataset = Images(remote=remote, local=local, shuffle=True, batch_size=options.batch)
    return sizes_of(dataset, options)


def litdata(options):
    from litdata import StreamingDataset
    from litdata.streaming.downloader import _OBSTORE_CLIENT_OPTIONS as OPTIONS

    OPTIONS["allow_http"] = True  # not settable in storage_options; forked workers inherit it

    class Images(StreamingDataset):
        def __getitem__(self, index):
            return decode(bytes(super().__getitem__(index)["image"]), options.size), 0

    client = {"endpoint_url": SERVER, "region_name": "us-east-1"}
    dataset = Images(
        "s3://images/litdata", cache_dir=options.cache or "/tmp/litdata", shuffle=True,
        drop_last=False, max_cache_size="1000GB", storage_options=client,
    )  # fmt: skip
    return sizes_of(dataset, options)


LOADERS = {"this": this, "webdataset": webdataset, "streaming": streaming, "litdata": litdata}


def measure(options):
    """Print images/s and requests per image for each epoch, excluding the startup."""
    count = sum(1 for _ in (options.images / "train").glob("*/*"))
    began = time.perf_counter()
    sizes = LOADERS[options.what](options)
    done = next(sizes)
    print(f"{options.what}: first batch after {time.perf_counter() - began:.1f} s", flush=True)
    for epoch in range(1, options.epochs + 1):
        began = time.perf_counter()
        before = requests()
        first = done
        while done < epoch * count:
            done += next(sizes)
        rate = (done - first) / (time.perf_counter() - began)
        each = (requests() - before) / count
        print(f"{options.what}: epoch {epoch} {rate:,.0f} images/s, {each:.3f} requests each")


def requests():
    return int(urllib.request.urlopen(f"{SERVER}/requests").read())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("pack", *LOADERS))
    parser.add_argument("images", type=Path)
    parser.add_argument("buckets", type=Path)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cache", default="")
    parser.add_argument("--formats", default="tars,mds,litdata", help="formats that pack writes")
    parser.add_argument("--torchvision", action="store_true", help="decode like the peers")
    given = parser.parse_args()
    if given.what == "pack":
        pack(given)
    else:
        measure(given)
    os._exit(0)  # the loaders would not exit
