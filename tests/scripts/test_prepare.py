"""Small datasets in their real formats, smaller images, and resumed runs."""

import errno
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from conf import cli
from conf.errors import UserError
from pipeline.data import decode
from pipeline.data.index import load_index
from scripts import prepare
from scripts.lib.sources import imagenet
from scripts.lib.sources.files import Place, inflated
from scripts.lib.sources.layouts import list_source
from tests.helpers.limits import file_size_limit
from tests.reliability.odd_images import drawn, encoded

# ImageNet class folders whose order differs from their ILSVRC2012_ID order, as in the real kit, and
# a parent synset.
IDS = {1: "n02119789", 2: "n02100735", 3: "n01443537"}
LABELS = {"n01443537": 0, "n02100735": 1, "n02119789": 2}  # name order
PARENT = "n00001740"
VAL = [3, 1, 2, 2, 3, 1]  # ground truth, image i -> ILSVRC2012_ID
Files = Mapping[str, bytes]
Source = Callable[[], Files]
Format = tuple[Source, Files]  # files in SOURCE, and files that are written


def jpeg(number: int) -> bytes:
    return encoded(drawn(), comment=str(number))


def within(folder: str, files: Files) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def nested(*folders: str) -> Files:
    return {f"{folder}/{number}.jpg": jpeg(number) for number, folder in enumerate(folders)}


def renamed(files: Files) -> dict[str, bytes]:
    """Return files whose names include their class's WordNet ID."""
    return {n.replace(".JPEG", f"_{n.split('/')[0]}.jpeg"): data for n, data in files.items()}


FOXES = {"n02119789_2.JPEG": jpeg(2), "n02119789_10.JPEG": jpeg(10)}
SETTERS = {"n02100735_2.JPEG": jpeg(12), "n02100735_10.JPEG": jpeg(20)}
FISH = {"n01443537_2.JPEG": jpeg(22), "n01443537_10.JPEG": jpeg(30)}
TRAIN = within("n02119789", FOXES) | within("n02100735", SETTERS) | within("n01443537", FISH)
FLAT = {f"ILSVRC2012_val_{i:08d}.JPEG": jpeg(100 + i) for i in range(1, len(VAL) + 1)}
VAL_FILES = {f"{IDS[n]}/{name}": data for n, (name, data) in zip(VAL, FLAT.items(), strict=True)}
TINY_VAL = {"n01443537/val_0.JPEG": jpeg(100), "n02119789/val_1.JPEG": jpeg(101)}
EXPECTED = within("train", TRAIN) | within("val", VAL_FILES)
RENAMED = within("train", renamed(TRAIN)) | within("val", renamed(VAL_FILES))
IMAGES = {"a/0.jpg": jpeg(0), "a/1.jpg": jpeg(1), "b/0.jpg": jpeg(0), "b/1.jpg": jpeg(1)}
IMAGE = {"a.jpg": jpeg(1)}
BOTH = within("train", IMAGES) | within("val", IMAGES)


def write(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def tar(files: Files, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def devkit(ids: Mapping[int, str] = IDS, truth: list[int] = VAL) -> bytes:
    """Return the kit with its MAT-file, whose table has one or two bytes per character."""
    rows = [f"{i} {wnid} words, é".encode("utf-16-le") for i, wnid in ids.items()]
    rows[1] = rows[1].decode("utf-16-le").encode()
    table = zlib.compress(b"\0\x0e".join([*rows, PARENT.encode()]))
    meta = b"MATLAB 5.0 MAT-file".ljust(128) + struct.pack("<II", 15, len(table)) + table
    labels = "\n".join(map(str, truth)).encode()
    files = {"ILSVRC2012_validation_ground_truth.txt": labels, "meta.mat": meta}
    return tar(within("ILSVRC2012_devkit_t12/data", files), "w:gz")


def official() -> Files:
    inner = {"n02119789.tar": tar(FOXES), "n02100735.tar": tar(SETTERS), "n01443537.tar": tar(FISH)}
    return {
        "ILSVRC2012_img_train.tar": tar(inner),
        "ILSVRC2012_img_val.tar": tar(FLAT),
        "ILSVRC2012_devkit_t12.tar.gz": devkit(),
        "ILSVRC2012_img_test_v10102019.tar": tar({"test/1.JPEG": jpeg(1)}),
        "ILSVRC2012_bbox_train_v2.tar.gz": b"unused",
    }


def kaggle() -> Files:
    data = "ILSVRC/Data/CLS-LOC"
    rows = [
        f"ILSVRC2012_val_{i:08d},{IDS[VAL[i - 1]]} 1 2 3 4 {IDS[VAL[i - 1]]} 5 6 7 8 \n"
        for i in (4, 2, 6, 1, 3, 5)
    ]
    return {
        **within(f"{data}/train", TRAIN),
        **within(f"{data}/val", FLAT),
        f"{data}/test/ILSVRC2012_test_00000001.JPEG": jpeg(999),
        "ILSVRC/ImageSets/CLS-LOC/train_cls.txt": b"n01443537/n01443537_2 1\n",
        "LOC_val_solution.csv": "".join(["ImageId,PredictionString\n", *rows]).encode(),
    }


def tiny() -> Files:
    """Return Tiny ImageNet, with validation images in one folder and a list."""
    files = {
        **within("train/n02119789/images", FOXES),
        **within("train/n02100735/images", SETTERS),
        **within("train/n01443537/images", FISH),
        "train/n02119789/n02119789_boxes.txt": b"x.JPEG\t0\t1\t2\t3\n",
        "val/images/val_0.JPEG": jpeg(100),
        "val/images/val_1.JPEG": jpeg(101),
        "val/val_annotations.txt": b"val_0.JPEG\tn01443537\t0\t32\t44\t62\n"
        b"val_1.JPEG\tn02119789\t0\t32\t44\t62\n",
        "test/images/test_0.JPEG": jpeg(999),
        "wnids.txt": b"n02119789\nn02100735\nn01443537",
    }
    return within("tiny-imagenet-200", files)


def shard(files: Files) -> bytes:
    """Return a WebDataset shard with numeric labels; its keys contain the WordNet IDs."""
    members = {}
    for path, data in renamed(files).items():
        wnid, name = path.split("/")
        members[name] = data
        members[name.replace("jpeg", "cls")] = str(LABELS[wnid]).encode()
    return tar(members)


def shards() -> Files:
    return {"imagenet-train-0.tar": shard(TRAIN), "imagenet-validation-0.tar": shard(VAL_FILES)}


def parquet(columns: dict[str, Any], *classes: str) -> bytes:
    """Return a file as written by Hugging Face, with the class names in its metadata."""
    table = pytest.importorskip("pyarrow").table(columns)
    if classes:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": classes}}
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})
    pytest.importorskip("pyarrow.parquet").write_table(table, buffer := io.BytesIO(), 2)
    return buffer.getvalue()


def imagenet_1k(files: Files) -> bytes:
    """Return a split whose file names contain WordNet IDs, but whose class names do not."""
    images, labels = [], []
    for path, data in renamed(files).items():
        wnid, name = path.split("/")
        images.append({"bytes": data, "path": name})
        labels.append(LABELS[wnid])
    columns = {"image": images, "label": labels}
    return parquet(columns, "goldfish, Carassius auratus", "English setter", "kit fox")


def hugging_face() -> Files:
    return {
        "README.md": b"text",
        ".cache/huggingface/x.parquet": b"no",
        "data/train-00000-of-00001.parquet": imagenet_1k(TRAIN),
        "data/validation-00000-of-00001.parquet": imagenet_1k(VAL_FILES),
        "data/test-00000-of-00001.parquet": one_image("goldfish", "fox", label=[-1]),
    }


# CIFAR archives: red, green and blue planes of some images, and their labels.
PLANES = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), np.uint8)
CIFAR_LABELS = np.array([1, 0, 0, 1, 1, 0, 1, 0])
CLASSES = ["cat", "frog"]


class Python2(pickle._Pickler):
    """Pickles text and bytes like Python 2, which does not distinguish them."""

    def save_string(self, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.write(b"T" + struct.pack("<i", len(data)) + data)

    dispatch = pickle._Pickler.dispatch | {str: save_string, bytes: save_string}


def pickled(**content: Any) -> bytes:
    Python2(buffer := io.BytesIO(), 2).dump(content)
    return buffer.getvalue()


def cifar(meta: str, kind: str, batches: Mapping[str, list[int]]) -> tuple[Files, Files]:
    """Return the unpacked files, and each image as PPM; `batches` maps split/file to images."""
    files = {"readme.html": b"", meta: pickled(num_vis=3072, **{f"{kind}label_names": CLASSES})}
    expected = {}
    for path, rows in batches.items():
        split, name = path.split("/")
        labels = {"coarse_labels": [19, 7], f"{kind}labels": CIFAR_LABELS[rows].tolist()}
        data = PLANES[rows].reshape(-1, 3072)
        files[name] = pickled(batch_label="training batch 1 of 5", **labels, data=data)
        for position, row in enumerate(rows):
            image = f"{split}/{CLASSES[CIFAR_LABELS[row]]}/{name}-{position:05d}.ppm"
            expected[image] = b"P6 32 32 255\n" + PLANES[row].transpose(1, 2, 0).tobytes()
    return within("cifar", files), expected


BATCHES = {f"train/data_batch_{i + 1}": [i] for i in range(5)} | {"val/test_batch": [5, 6, 7]}
CIFAR_10, PPM_10 = cifar("batches.meta", "", BATCHES)
CIFAR_100, PPM_100 = cifar("meta", "fine_", {"train/train": [0, 1, 2, 3, 4], "val/test": [5, 6, 7]})
# A shard that counts keys from 0, like other shards. As strings, label 10 precedes 9.
TEN = {"10.jpg": jpeg(10), "10.json": b'{"label": 10}'}
COUNTED = tar({"9.jpg": jpeg(9), "9.cls": b" 9\n", **TEN})


def unnamed() -> Files:
    """Return CIFAR-10 as Parquet, with images without a path in a column with a different name."""
    images = [{"bytes": jpeg(i), "path": None} for i in range(4)]
    columns = {"img": images, "label": [1, 0, 0, 1]}
    return {"plain_text/train-00000-of-00001.parquet": parquet(columns, "tench", "cat/dog")}


# Tar members that would be written outside their class folder.
OUTSIDE = {"../../evil/x.jpg": jpeg(1), "/absolute/x.jpg": jpeg(2), "a/../../b/x.jpg": jpeg(3)}
NOT_UTF8 = f"train/{os.fsdecode(b'caf' + bytes([0xE9]))}/0.jpg"
NOT_READ = ("train/n02119789/1.heic", "train/n02119789/@eaDir/0.jpg", "__MACOSX/val/._0.jpg")
FOLDERS = {**EXPECTED, **dict.fromkeys(NOT_READ, jpeg(0))}
SPLITS_IN_A_TAR = tar(within("./imagenet", FOLDERS))
SPLIT_NAMES = {"train/0.jpg": jpeg(0), "bus/0.jpg": jpeg(1), "test/0.jpg": jpeg(2)}
FORMATS: dict[str, Format] = {
    "official": (official, EXPECTED),
    "kaggle": (kaggle, EXPECTED),
    "folders": (lambda: {**FOLDERS, "readme.txt": b"text"}, EXPECTED),
    "tar": (lambda: {"x-train.tar": SPLITS_IN_A_TAR}, EXPECTED),
    "tiny": (tiny, within("train", TRAIN) | within("val", TINY_VAL)),
    "shards": (shards, RENAMED),
    "hugging face": (hugging_face, RENAMED),
    "CIFAR-10": (lambda: CIFAR_10, PPM_10),
    "CIFAR-100": (lambda: {"cifar.tar.gz": tar(CIFAR_100, "w:gz")}, PPM_100),
    "numeric labels": (
        lambda: dict.fromkeys(["data-train-0.tar", "data-train-1.tar", "data-test-0.tar"], COUNTED),
        {
            "train/09/data-train-0_9.jpg": jpeg(9),
            "train/10/data-train-0_10.jpg": jpeg(10),
            "train/09/data-train-1_9.jpg": jpeg(9),
            "train/10/data-train-1_10.jpg": jpeg(10),
            "val/09/9.jpg": jpeg(9),
            "val/10/10.jpg": jpeg(10),
        },
    ),
    "parquet without names": (
        unnamed,
        {
            "train/cat_dog/plain_text_train-00000-of-00001-000000_image.jpeg": jpeg(0),
            "train/tench/plain_text_train-00000-of-00001-000001_image.jpeg": jpeg(1),
            "train/tench/plain_text_train-00000-of-00001-000002_image.jpeg": jpeg(2),
            "train/cat_dog/plain_text_train-00000-of-00001-000003_image.jpeg": jpeg(3),
        },
    ),
    "1 and 01": (
        lambda: {"train.tar": tar({**IMAGE, "a.cls": b"1", "b.jpg": jpeg(2), "b.cls": b"01"})},
        {"train/1/a.jpg": IMAGE["a.jpg"], "train/01/b.jpg": jpeg(2)},
    ),
    "words in splits": (lambda: within("Training_set", IMAGES) | within("val2017", IMAGES), BOTH),
    # Classes may have the names of splits.
    "classes": (lambda: SPLIT_NAMES, within("train", SPLIT_NAMES)),
    "outside": (
        lambda: {"train.tar": tar({**TRAIN, **OUTSIDE}), "val.tgz": tar(VAL_FILES, "w:gz")},
        EXPECTED | {"train/absolute/x.jpg": jpeg(2)},
    ),
    "subfolders": (
        lambda: nested("train/a/x", "train/b", "val/a/x", "val/b", "val/b/y"),
        nested("train/a/x", "train/b", "val/a/x", "val/b", "val/b/y"),
    ),
    "around": (lambda: {**within("x/y", IMAGES), "x/y/0.jpg": jpeg(1)}, within("train", IMAGES)),
    "only val": (lambda: within("x/val", IMAGES), within("val", IMAGES)),
    "val and test": (lambda: within("val", IMAGES) | within("test", IMAGES), within("val", IMAGES)),
    "test images": (
        lambda: {**BOTH, NOT_UTF8: jpeg(0), "test/1.jpg": jpeg(9), ".x/0.jpg": jpeg(0)},
        BOTH | {NOT_UTF8: jpeg(0)},
    ),
}
SKIPPED = "ignored files or folders: hidden or system (2), .heic (1), such as "
NOTES = {
    "folders": SKIPPED,
    "tar": SKIPPED,
    "hugging face": "hidden or system (1), without labels (1), such as ",
    "subfolders": "3 images are in folders in class folders, such as train/a/x; these",
    "around": "not in a class folder of a split (1), such as 0.jpg",
    "val and test": "The test split was skipped.",
    "numeric labels": "The test split became the validation split.",
    "parquet without names": " data.val_fraction=0.2\n",
    "1 and 01": " data.val_fraction=0.2\n",
    "classes": " data.val_fraction=0.2\n",
    "test images": "ignored files or folders: hidden or system (1), not in a class folder of "
    "a split (1), such as ",
}


def run(source: Path, to: Path, *options: str) -> int:
    given = prepare.arguments([str(source), "--to", str(to), *options])
    return cli.run_main(partial(prepare.prepare_images, given))


def written(to: Path) -> dict[str, bytes]:
    """Return the files of both splits, stored as folders or tar files."""
    found = {str(p.relative_to(to)): p.read_bytes() for p in to.glob("*/**/*") if p.is_file()}
    for path in to.glob("*.tar"):
        with tarfile.open(path) as archive:
            found |= {f"{path.stem}/{m.name}": archive.extractfile(m).read() for m in archive}
    return found


def report_of(to: Path) -> dict[str, Any]:
    return dict(json.loads((to / "prepare.json").read_text()))


@pytest.mark.parametrize(("kind", "endings"), [("folder", [""]), ("tar", [".tar", ".tar.json"])])
@pytest.mark.parametrize("name", FORMATS)
def test_prepare_every_format(tmp_path, name, kind, endings, capsys):
    files, expected = FORMATS[name]
    to = tmp_path / "new" / "to"
    assert run(write(tmp_path / "source", files()), to, "--format", kind) == 0
    assert written(to) == expected
    assert sorted(os.listdir(tmp_path)) == ["new", "source"]
    images = Counter(path.split("/")[0] for path in expected)
    splits = [f"{split}{ending}" for split in images for ending in endings]
    assert sorted(os.listdir(to)) == sorted(["prepare.json", *splits])
    report, classes = report_of(to), {path.split("/")[1] for path in expected}
    assert (report["classes"], report["images"]) == (len(classes), len(expected))
    assert (report["settings"]["images"], report["unreadable"]) == (images, 0)
    said = capsys.readouterr().out
    command = f"train with: python train.py data.root={to}"
    assert command in said
    assert NOTES.get(name, f"{command}\n") in said


def test_val_labels_of_ilsvrc2012(tmp_path):
    """A kit with 1,000 classes must have the published labels; a different order is rejected."""
    first = dict(zip([490, 361, 171, 822, 297], imagenet.FIRST_LABELS.values(), strict=True))
    ids = {i: f"n{i:08d}" for i in range(1, 1001)} | first
    truth = 50 * list(first | ids)

    def labels(ids):
        write(tmp_path, {KIT: devkit(ids, truth)})
        return imagenet.val_labels(str(tmp_path), {KIT: Place(str(tmp_path / KIT))})

    found = labels(ids)
    assert found["ILSVRC2012_val_00000003.JPEG"] == "n02105855" and len(found) == 50_000
    inflated.cache_clear()
    with pytest.raises(UserError, match=r"these are not the labels of ILSVRC2012\); download"):
        labels(dict(enumerate(sorted(ids.values()), 1)))  # a common error


def changed(files: Files, name: str, old: bytes, new: bytes) -> Files:
    assert old in files[name]
    return {**files, name: files[name].replace(old, new, 1)}


def one_image(*classes: str, **columns: Any) -> bytes:
    return parquet({"image": [{"bytes": jpeg(1), "path": None}], **columns}, *classes)


def two_images(labels: list[int | None]) -> bytes:
    return parquet({"image": 2 * [{"bytes": jpeg(1), "path": None}], "label": labels}, "a", "b")


KIT = "ILSVRC2012_devkit_t12.tar.gz"
ANNOTATIONS = "tiny-imagenet-200/val/val_annotations.txt"
CIFAR_3, SOLUTIONS = "cifar/data_batch_3", "LOC_val_solution.csv"
ONE_BATCH, _ = cifar("batches.meta", "", {"train/data_batch_1": [0], "val/test_batch": [5]})
INNER = tar({"n02119789.tar": tar(FOXES)})
NO_KIT = {"ILSVRC2012_img_train.tar": INNER, "ILSVRC2012_img_val.tar": tar(FLAT)}
GIVEN_TWICE = {"train-0.tar": tar(IMAGES), "train-1.tar": tar(IMAGES)}
NO_SPLIT = {"part-0.tar": SPLITS_IN_A_TAR, "part-1.tar": SPLITS_IN_A_TAR}
WITHOUT_LABEL = {**IMAGE, "b.jpg": jpeg(1), "b.cls": b"1"}


def labeled(label: int) -> bytes:
    """Return a CIFAR batch of one image."""
    return pickled(labels=[label], data=PLANES[[0]].reshape(-1, 3072))


def shard_of(label: bytes, ending: str = "cls") -> Files:
    return {"train.tar": tar({"a.jpg": jpeg(1), f"a.{ending}": label})}


WRONG: list[tuple[Source, str]] = [
    (lambda: {"imagenet.zip": b"PK"}, "no images in class folders; pass"),
    (lambda: {"a/1.jpg": b"", "b.tar": b""}, "both images (a/1.jpg) and tar files (b.tar); pass"),
    (lambda: GIVEN_TWICE, "2 images would become "),
    (lambda: {"cat/1.jpg": b"", "cat /2.jpg": b""}, "2 classes would become cat; rename one"),
    (lambda: NO_SPLIT, "no tar file name contains train or val; rename them"),
    (lambda: {"train-0.tar": b"", "x.tar": b""}, "x.tar: the name contains neither train nor"),
    (lambda: {"a/1.tar": tar({}), "b/train.tar": b""}, "several datasets (a, b); pass one"),
    (lambda: {"train.tar": b"no tar"}, "train.tar: cannot be read at byte 0: "),
    (lambda: {"all.tar.gz": tar(IMAGES, "w:gz")[:-9]}, "all.tar.gz: damaged or incomplete"),
    (lambda: {"train.tar": tar(WITHOUT_LABEL)}, "train/a.jpg has no label; add train/a.cls"),
    (lambda: {"train.tar": tar({"a.jpg": b"", "a.json": b"["})}, "a.json: has no label"),
    (lambda: {"train.tar": tar({**WITHOUT_LABEL, "a.json": b'{"label": null}'})}, "a.jpg has no "),
    (lambda: {"a.tar": tar({"1.jpg": b"", "1.txt": b"a cat"})}, "a.tar: 1.txt: a caption is not a"),
    (lambda: {"train.tar": tar(dict.fromkeys(("a.1.jpg", "a.1.cls", "a.2.jpg"), b""))}, "several"),
    (lambda: {"a.parquet": one_image("a", "b", label=[1])[:-100]}, "a.parquet: damaged or inc"),
    (lambda: {"a.parquet": one_image(caption=[""])}, "image, caption; expected one with images"),
    (lambda: ONE_BATCH, "data_batch_2: damaged or incomplete"),
    (lambda: {**CIFAR_10, CIFAR_3: pickle.dumps(os.mkdir)}, "(its pickle names posix.mkdir)"),
    (lambda: NO_KIT, "the validation labels are missing"),
    (lambda: {**official(), KIT: devkit()[:150]}, "devkit_t12.tar.gz: damaged"),
    (lambda: {**official(), KIT: devkit(truth=[3, 1, 2, 2, 3, 3])}, "n images differs between"),
    (lambda: {**official(), KIT: devkit(truth=VAL * 2)}, "0007.JPEG is missing (6 in total)"),
    (lambda: changed(kaggle(), SOLUTIONS, b"n02119789 5 6", b"n02100735 5 6"), ".csv: damaged"),
    (lambda: changed(tiny(), ANNOTATIONS, b"val_1.J", b"val_9.J"), "1.JPEG has no label (2 in "),
    (lambda: changed(tiny(), ANNOTATIONS, b"val_1.J", b"val_0.J"), "val_0.JPEG is n02119789 and "),
    (lambda: changed(tiny(), ANNOTATIONS, b"n0211", b"n0311"), "n03119789, which has no training"),
    (lambda: changed(kaggle(), SOLUTIONS, b"000004,n", b"000005,n"), "000005.JPEG is n0"),
    (lambda: {**official(), KIT: devkit(truth=[0, 1, 2, 2, 0, 1])}, "devkit_t12.tar.gz: damaged"),
    (lambda: {"a.parquet": one_image("a", "b", label=[-2])}, "row 0: label '-2'; expected an int"),
    (lambda: {"a.parquet": one_image("a", "b", label=[2])}, "row 0: label '2'; expected an int"),
    (lambda: {"a.parquet": one_image("a", "a", label=[0])}, "several classes have the name a; "),
    (lambda: {"a.parquet": one_image(label=[-2])}, "row 0: label '-2'; expected a number >= 0"),
    (lambda: {"a.parquet": one_image(label=[1.5])}, "row 0: label '1.5'; expected a number >= 0"),
    (lambda: {**CIFAR_10, CIFAR_3: labeled(-1)}, "data_batch_3: image 0: label '-1'; expected an"),
    (lambda: shard_of(b"1" * 5000), "label '111111"),
    (lambda: shard_of(b"-1"), "train.tar: a.cls: label '-1'; expected a number >= 0 or a cl"),
    (lambda: shard_of(b'{"label": "\\ud800"}', "json"), "a.json: label '"),
    (lambda: shard_of(b'{"label": [1]}', "json"), "a.json: label '[1]'; expected a number"),
    (lambda: shard_of(b"[" * 100_000, "json"), "a.json: has no label"),
    (lambda: {"a.parquet": two_images([1, -1])}, "row 1: label '-1'; expected an integer from 0"),
    (lambda: {"a.parquet": two_images([None, 1])}, "row 0: label 'None'; expected an integer"),
    (lambda: {"a.parquet": two_images([-1, None])}, "without labels (1), such as "),
    (lambda: nested("cat/train", "cat/val", "dog/train"), "the folders train, val are not above"),
    (lambda: nested("1/train/a", "1/val/a", "2/train/a"), "the folders train, val are not above"),
    (lambda: nested("images/train/a", "images/val/a", "docs"), "train, val are not above"),
    (lambda: nested("train", "val", "test"), "the folders test, train, val are not above class fo"),
]


@pytest.mark.parametrize(("files", "message"), WRONG)
def test_layouts_report_errors(tmp_path, files, message):
    source = write(tmp_path / "source", files())
    with pytest.raises(UserError) as error:
        list_source(str(source))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_prepare_rejects_destinations(tmp_path, capsys):
    """Folders in or around the source, with other files, size or images, or in use."""
    source = write(tmp_path / "source", FOLDERS)
    to = write(tmp_path / "to", {"train/mine.jpg": b"mine"})

    def error(to, *options):
        assert run(source, to, *options) == 2
        return capsys.readouterr().err

    assert "must be neither inside nor above SOURCE " in error(source / "train/x")
    assert "must be neither inside nor above SOURCE " in error(source / "..")
    assert written(source) == FOLDERS
    assert error(to).endswith(f"--to {to}: contains train; choose a new or empty folder\n")
    shutil.rmtree(to)
    assert run(source, to) == 0
    assert f"--to {to}: has side None, not 64; use the same" in error(to, "--side", "64")
    write(source, {"val/n02119789/new.jpg": jpeg(1)})
    assert "images {'train': 6, 'val': 6}, not {'train': 6, 'val': 7}" in error(to)
    (source / "val/n02119789/new.jpg").rename(source / "val/n02100735/new.jpg")
    assert run(source, tmp_path / "moved") == 0
    (source / "val/n02100735/new.jpg").rename(source / "val/n02119789/new.jpg")
    assert "moved: has list of images, CRC-32 " in error(tmp_path / "moved")
    with prepare.locked(to):
        assert f"--to {to}: in use by a process; wait until it ends" in error(to)
    assert written(to) == EXPECTED


@pytest.mark.parametrize("pack", [dict, lambda files: {"ds.tar": tar(files)}], ids=["files", "tar"])
@pytest.mark.parametrize("outer", ["", "ds/"])
@pytest.mark.parametrize("loose", ["stray.jpg", "train/stray.jpg", "val/stray.jpg"])
def test_prepare_skips_image_beside_splits(tmp_path, capsys, pack, outer, loose):
    """Such an image never makes validation images training images."""
    files = {outer + path: data for path, data in {**BOTH, loose: jpeg(5)}.items()}
    source = write(tmp_path / "source", pack(files))
    assert run(source, tmp_path / "to") == 0
    assert written(tmp_path / "to") == BOTH
    assert "not in a class folder of a split (1), such as " in capsys.readouterr().out


@pytest.mark.parametrize("side", [(), ("--side", "16")])
def test_prepare_writes_names_of_255_bytes(tmp_path, side):
    names = {f"{split}/{name}/{'x' * 251}.jpg" for split in ("train", "val") for name in "ab"}
    source = write(tmp_path / "source", {name: jpeg(1) for name in names})
    assert run(source, tmp_path / "to", *side) == 0
    assert written(tmp_path / "to").keys() == names


DAMAGED = [b"", b"{", b"[]", b"null", b"3", b"{}", b'{"settings": 3}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: str(content[:20]))
def test_prepare_rejects_damaged_marker(tmp_path, capsys, content):
    source = write(tmp_path / "source", BOTH)
    write(tmp_path / "to", {"prepare.json": content})
    assert run(source, tmp_path / "to") == 2
    assert "to: its prepare.json is damaged; remove the folder, or " in capsys.readouterr().err


def test_prepare_links_or_copies_files(tmp_path, monkeypatch):
    """Files are copied to a different file system."""
    source = write(tmp_path / "source", EXPECTED)

    def links(to):
        return {p.stat().st_nlink for p in to.rglob("*.JPEG")}

    assert run(source, tmp_path / "linked") == 0
    assert links(tmp_path / "linked") == {2}
    report = report_of(tmp_path / "linked")
    assert (report["linked"], report["copied"], report["bytes"]) == (12, 0, 0)

    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "cross-device link")))
    assert run(source, tmp_path / "copied") == 0
    assert written(tmp_path / "copied") == EXPECTED
    assert links(tmp_path / "copied") == {1}
    assert report_of(tmp_path / "copied")["bytes"] == sum(map(len, EXPECTED.values()))


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_prepare_lists_unreadable_images(tmp_path, capsys, kind):
    """The same command keeps complete files that are not older than the source."""
    source, to = write(tmp_path / "source", FOLDERS), tmp_path / "to"
    broken = list(EXPECTED)[:4]
    cut = EXPECTED[broken[1]][:-400]
    for name, data in zip(broken, (b"", cut, b"<html>404", cut + b"\xff\xd9"), strict=True):
        (source / name).write_bytes(data)
    assert run(source, to, "--format", kind) == 1
    assert written(to) == dict([*EXPECTED.items()][4:])
    lines = (to / "unreadable.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == sorted(broken)
    assert f"listed in {to}/unreadable.txt" in capsys.readouterr().out
    write(source, FOLDERS)
    done = sorted(to.rglob("*.JPEG"))
    for path in done[:3]:
        path.unlink()
        path.touch()  # like a power failure
    for path in done[2:3]:  # the source was replaced since
        path.write_bytes(jpeg(7))
        os.utime(path, (0, 0))
    assert run(source, to, "--format", kind) == 0
    assert written(to) == EXPECTED
    assert report_of(to)["done_earlier"] == len(done[3:])
    assert not (to / "unreadable.txt").exists()


def test_prepare_continues_after_full_disk(tmp_path, capsys):
    source, to = write(tmp_path / "source", kaggle()), tmp_path / "to"
    with file_size_limit(5_000):
        assert run(source, to, "--format", "tar") == 1
    error = capsys.readouterr().err
    assert "File too large; check the path, its permissions, the disk" in error
    assert error.count("\n") == 1
    assert not (to / "train.tar").exists()
    assert run(source, to, "--format", "tar") == 0
    assert written(to) == EXPECTED


@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [
        ("JPEG", "RGB", (1000, 97)),
        ("JPEG", "L", (200, 300)),
        ("JPEG", "CMYK", (60, 90)),
        ("PNG", "RGBA", (300, 200)),
    ],
)
def test_reencode(kind, mode, size):
    """The image is resized and encoded as by Pillow."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"  # orientation, viewers rotate by 90 degrees
    data = encoded(drawn(mode).resize(size), kind, exif=exif, icc_profile=b"profile" * 20)
    made = Image.open(io.BytesIO(prepare.reencode(data, "n01/n01_1.JPEG", 96)))
    short = min(96, *size)
    assert (made.format, made.mode, min(made.size)) == ("JPEG", "RGB", short)
    assert max(made.size) == pytest.approx(short * max(size) / min(size), abs=1)
    assert (made.width < made.height) == (size[0] < size[1])
    assert dict(made.getexif()) == {0x0112: 6}
    assert not {"progressive", "icc_profile"} & {*made.info}
    assert [layer[1:3] for layer in made.layer] == [(2, 2), (1, 1), (1, 1)]  # 4:2:0
    exact = Image.fromarray(decode.open_picture(data, "pillow").pixels())
    exact = exact.resize(made.size, Image.Resampling.BILINEAR)  # Pillow's is antialiased
    at_90 = io.BytesIO(encoded(exact.convert("RGB"), quality=90, subsampling="4:2:0"))
    difference = np.asarray(made, np.float64) - np.asarray(Image.open(at_90))
    assert (difference**2).mean() < 6  # levels; a PSNR of 40 dB
    assert prepare.reencode(data, "a.png", 96) is data  # a file with another name is kept
    with pytest.raises(decode.UnreadableError, match=r"runcated|broken"):
        prepare.reencode(data[: len(data) // 2], "a.png", 1000)  # it would only be copied


@pytest.mark.parametrize(("kind", "counter"), [("folder", "linked"), ("tar", "copied")])
def test_prepare_smaller_images(image_root, tmp_path, kind, counter):
    """Names, labels and sample identity do not change; a small image is a link."""
    to = tmp_path / "to"
    assert run(image_root, to, "--side", "96", "--format", kind) == 0
    before, after = written(image_root), written(to)
    assert after == {name: prepare.reencode(data, name, 96) for name, data in before.items()}
    report = report_of(to)
    kept = sum(after[name] == before[name] for name in before)
    assert report["encoded"] == len(before) - kept > 10
    assert report[counter] == kept
    for split in ("train", "val"):
        old = load_index(image_root / split, key="data.root")
        assert load_index(to / split, key="data.root").digest == old.digest
