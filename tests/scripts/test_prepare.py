"""Datasets as people have them: small ones in the real formats; smaller images; resumed runs."""

import errno
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zlib
from collections import Counter, defaultdict
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
from pipeline import decode
from pipeline.index import load_index
from scripts import prepare
from scripts.lib.sources import imagenet
from scripts.lib.sources.files import Place, inflated
from scripts.lib.sources.layouts import recognise
from tests.helpers.limits import file_size_limit
from tests.reliability.odd_images import drawn, encoded

# Class folders of ImageNet whose order differs from that of their ILSVRC2012_ID, as in the real
# kit, and a synset above them.
IDS = {1: "n02119789", 2: "n02100735", 3: "n01443537"}
PARENT = "n00001740"
VAL = [3, 1, 2, 2, 3, 1]  # the ground truth: image i -> ILSVRC2012_ID
Files = Mapping[str, bytes | str]
Source = Callable[[], Files]
Format = tuple[Source, Mapping[str, bytes]]  # the files of SOURCE, and what is written


def jpeg(number: int) -> bytes:
    return encoded(drawn(), comment=str(number))


TRAIN = {
    f"{wnid}/{wnid}_{i}.JPEG": jpeg(10 * n + i)
    for n, wnid in enumerate(IDS.values())
    for i in (2, 10)
}
FLAT = {f"ILSVRC2012_val_{i:08d}.JPEG": jpeg(100 + i) for i in range(1, len(VAL) + 1)}
VAL_FILES = {f"{IDS[n]}/{name}": data for n, (name, data) in zip(VAL, FLAT.items(), strict=True)}
EXPECTED = {f"train/{name}": data for name, data in TRAIN.items()} | {
    f"val/{name}": data for name, data in VAL_FILES.items()
}
IMAGES = {f"{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(2)}


def write(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def tar(files: Files, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def devkit(ids: Mapping[int, str] = IDS, truth: list[int] = VAL) -> bytes:
    """Return the kit with its MAT-file: in the table, a character takes one byte or two."""
    rows = [
        f"{i} {wnid} words, é".encode("utf-8" if i % 2 else "utf-16-le") for i, wnid in ids.items()
    ]
    table = zlib.compress(b"\0\x0e".join([*rows, PARENT.encode()]))
    meta = b"MATLAB 5.0 MAT-file".ljust(128) + struct.pack("<II", 15, len(table)) + table
    folder, lines = "ILSVRC2012_devkit_t12/data/", "".join(f"{i}\n" for i in truth)
    name = f"{folder}ILSVRC2012_validation_ground_truth.txt"
    return tar({name: lines, f"{folder}meta.mat": meta}, "w:gz")


def official() -> Files:
    inner = {
        f"{wnid}.tar": tar({n.split("/")[1]: d for n, d in TRAIN.items() if n.startswith(wnid)})
        for wnid in IDS.values()
    }
    return {
        "ILSVRC2012_img_train.tar": tar(inner),
        "ILSVRC2012_img_val.tar": tar(FLAT),
        "ILSVRC2012_devkit_t12.tar.gz": devkit(),
        "ILSVRC2012_img_test_v10102019.tar": tar({"test/1.JPEG": jpeg(1)}),
        "ILSVRC2012_bbox_train_v2.tar.gz": b"unused",
    }


def kaggle() -> Files:
    data = "ILSVRC/Data/CLS-LOC/"
    rows = [
        f"ILSVRC2012_val_{i:08d},{IDS[VAL[i - 1]]} 1 2 3 4 {IDS[VAL[i - 1]]} 5 6 7 8 \n"
        for i in (4, 2, 6, 1, 3, 5)
    ]
    return {
        **{f"{data}train/{name}": content for name, content in TRAIN.items()},
        **{f"{data}val/{name}": content for name, content in FLAT.items()},
        f"{data}test/ILSVRC2012_test_00000001.JPEG": jpeg(999),
        "ILSVRC/ImageSets/CLS-LOC/train_cls.txt": "n01443537/n01443537_2 1\n",
        "LOC_val_solution.csv": "".join(["ImageId,PredictionString\n", *rows]),
    }


def tiny() -> Files:
    """Tiny ImageNet: validation images in one folder, with a list."""
    top = "tiny-imagenet-200/"
    lines = [f"{name}\t{IDS[n]}\t0\t32\t44\t62\n" for n, name in zip(VAL, TINY_VAL, strict=True)]
    return {
        **{f"{top}train/{n.replace('/', '/images/')}": data for n, data in TRAIN.items()},
        **{f"{top}train/{wnid}/{wnid}_boxes.txt": "x.JPEG\t0\t1\t2\t3\n" for wnid in IDS.values()},
        **{f"{top}val/images/{name}": data for name, data in TINY_VAL.items()},
        f"{top}val/val_annotations.txt": "".join(lines),
        f"{top}test/images/test_0.JPEG": jpeg(999),
        f"{top}wnids.txt": "\n".join(IDS.values()),
    }


TINY_VAL = {f"val_{i}.JPEG": data for i, data in enumerate(FLAT.values())}


def shards() -> Files:
    """WebDataset shards whose labels are numbers; their keys contain the WordNet ids."""
    parts: dict[str, dict[str, bytes | str]] = defaultdict(dict)
    for path, data in RENAMED.items():
        split, wnid, name = path.replace("val/", "validation/").split("/")
        label = str(sorted(IDS.values()).index(wnid))
        parts[f"imagenet-{split}-0.tar"] |= {name: data, name.replace("jpeg", "cls"): label}
    return {shard: tar(files) for shard, files in parts.items()}


def parquet(columns: dict[str, Any], *classes: str) -> bytes:
    """Return a file as Hugging Face writes it, with the names of the classes in its metadata."""
    table = pytest.importorskip("pyarrow").table(columns)
    from pyarrow import parquet

    if classes:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": classes}}
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(table, buffer := io.BytesIO(), row_group_size=2)
    return buffer.getvalue()


def hugging_face() -> Files:
    """imagenet-1k: the names of the files contain WordNet ids, those of the classes do not."""
    wnids = sorted(IDS.values())
    classes = ("goldfish, Carassius auratus", "English setter", "kit fox")
    files: dict[str, bytes | str] = {"README.md": "text", ".cache/huggingface/x.parquet": "no"}
    for split, word in (("train", "train"), ("val", "validation")):
        rows = [name.split("/") for name in list(EXPECTED)[::-1] if name.startswith(split)]
        images = [
            {"bytes": EXPECTED["/".join(r)], "path": f"{Path(r[2]).stem}_{r[1]}.jpeg"} for r in rows
        ]
        columns = {"image": images, "label": [wnids.index(r[1]) for r in rows]}
        files[f"data/{word}-00000-of-00001.parquet"] = parquet(columns, *classes)
    hidden = {"image": [images[0]], "label": [-1]}
    return {**files, "data/test-00000-of-00001.parquet": parquet(hidden, *classes)}


# CIFAR's archives: the red, green and blue planes of some images, and their labels.
PLANES = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), np.uint8)
CIFAR_LABELS = np.array([1, 0, 0, 1, 1, 0, 1, 0])
CLASSES = ["cat", "frog"]


class Python2(pickle._Pickler):  # type: ignore[name-defined]
    """Pickles text and bytes as Python 2 did, without a difference."""

    def save_string(self, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.write(b"T" + struct.pack("<i", len(data)) + data)

    dispatch = pickle._Pickler.dispatch | {str: save_string, bytes: save_string}  # type: ignore[attr-defined]


def pickled(**content: Any) -> bytes:
    Python2(buffer := io.BytesIO(), 2).dump(content)
    return buffer.getvalue()


def cifar(meta: str, kind: str, batches: Mapping[str, list[int]]) -> Format:
    """Return the unpacked files, and each image as a PPM file of its pixels."""
    files = {"readme.html": b"", meta: pickled(num_vis=3072, **{f"{kind}label_names": CLASSES})}
    expected = {}
    for name, rows in batches.items():
        labels = {"coarse_labels": [19, 7], f"{kind}labels": CIFAR_LABELS[rows].tolist()}
        data = PLANES[rows].reshape(-1, 3072)
        files[name] = pickled(batch_label="training batch 1 of 5", **labels, data=data)
        split = "val" if name.startswith("test") else "train"
        for position, row in enumerate(rows):
            path = f"{split}/{CLASSES[CIFAR_LABELS[row]]}/{name}-{position:05d}.ppm"
            expected[path] = b"P6 32 32 255\n" + PLANES[row].transpose(1, 2, 0).tobytes()
    return (lambda: {f"cifar/{name}": file for name, file in files.items()}), expected


CIFAR_10 = {f"data_batch_{i + 1}": [i] for i in range(5)} | {"test_batch": [5, 6, 7]}
CIFARS = {
    10: cifar("batches.meta", "", CIFAR_10),
    100: cifar("meta", "fine_", {"train": [0, 1, 2, 3, 4], "test": [5, 6, 7]}),
}


def numbered() -> Files:
    """Shards that count their keys from 0 each; as strings, the label 10 comes before 9."""
    ten = json.dumps({"label": 10})
    shard = tar({"9.jpg": jpeg(9), "9.cls": " 9\n", "10.jpg": jpeg(10), "10.json": ten})
    return {f"{name}.tar": shard for name in SHARDS}


SPLITS = {"train": "train", "test": "val"}
SHARDS = {f"data-{word}-{i}": split for word, split in SPLITS.items() for i in range(2)}


def unnamed() -> Files:
    """CIFAR-10 as Parquet: images without a path, a test split, and a column of another name."""
    images = [{"bytes": jpeg(i), "path": None} for i in range(4)]
    file = parquet({"img": images, "label": [1, 0, 0, 1]}, "tench", "cat/dog")
    return {f"plain_text/{split}-00000-of-00001.parquet": file for split in ("train", "test")}


# Members of a tar file that would be written outside the folder of their class.
OUTSIDE = {"../../evil/x.jpg": jpeg(1), "/absolute/x.jpg": jpeg(2), "a/../../b/x.jpg": jpeg(3)}
NOT_UTF8 = f"train/{os.fsdecode(b'caf' + bytes([0xE9]))}/0.jpg"
NOT_READ = ("train/n02119789/1.heic", "train/n02119789/@eaDir/0.jpg", "__MACOSX/val/._0.jpg")
FOLDERS = {**EXPECTED, **dict.fromkeys(NOT_READ, jpeg(0))}
SPLITS_IN_A_TAR = {f"./imagenet/{name}": data for name, data in FOLDERS.items()}


# The classes of WordNet ids in the names of the images.
RENAMED = {
    name.replace(".JPEG", f"_{name.split('/')[1]}.jpeg"): data for name, data in EXPECTED.items()
}
SPLIT_NAMES = {f"{c}/{i}.jpg": jpeg(i) for c in ("train", "bus", "test") for i in range(2)}
BOTH = {f"{split}/{name}": data for split in ("train", "val") for name, data in IMAGES.items()}
FORMATS: dict[str, Format] = {
    "official": (official, EXPECTED),
    "kaggle": (kaggle, EXPECTED),
    "folders": (lambda: {**FOLDERS, "readme.txt": "text"}, EXPECTED),
    "a tar": (lambda: {"x-train.tar": tar(SPLITS_IN_A_TAR)}, EXPECTED),
    "tiny": (
        tiny,
        {name: data for name, data in EXPECTED.items() if name.startswith("train")}
        | {f"val/{IDS[n]}/{name}": TINY_VAL[name] for n, name in zip(VAL, TINY_VAL, strict=True)},
    ),
    "shards": (shards, RENAMED),
    "hugging face": (hugging_face, RENAMED),
    "CIFAR-10": CIFARS[10],
    "CIFAR-100": (lambda: {"cifar.tar.gz": tar(CIFARS[100][0](), "w:gz")}, CIFARS[100][1]),
    "numbers as labels": (
        numbered,
        {
            f"{split}/{label:02d}/{name}_{label}.jpg": jpeg(label)
            for name, split in SHARDS.items()
            for label in (9, 10)
        },
    ),
    "parquet without names": (
        unnamed,
        {
            f"{split}/{label}/plain_text_{word}-00000-of-00001-{row:06d}_image.jpeg": jpeg(row)
            for word, split in SPLITS.items()
            for row, label in enumerate(("cat_dog", "tench", "tench", "cat_dog"))
        },
    ),
    # Classes may have the names of splits.
    "classes": (lambda: SPLIT_NAMES, {f"train/{name}": data for name, data in SPLIT_NAMES.items()}),
    "outside": (
        lambda: {"train.tar": tar({**TRAIN, **OUTSIDE}), "val.tgz": tar(VAL_FILES, "w:gz")},
        EXPECTED | {"train/absolute/x.jpg": jpeg(2)},
    ),
    "test images": (
        lambda: {**BOTH, NOT_UTF8: jpeg(0), "test/1.jpg": jpeg(9), ".x/0.jpg": jpeg(0)},
        BOTH | {NOT_UTF8: jpeg(0)},
    ),
}
LEFT_OUT = "files or folders that are not read: hidden, or of the system (2), .heic (1), such as "
NOTES = {
    "folders": LEFT_OUT,
    "a tar": LEFT_OUT,
    "numbers as labels": "The test split is the validation split.",
    "classes": "There is no validation split; data.val_fraction holds out images for it.",
    "test images": "files or folders that are not read: hidden, or of the system (1), in "
    "no class folder of a split (1), such as ",
}


def run(source: Path, to: Path, *options: str) -> int:
    given = prepare.arguments([str(source), "--to", str(to), *options])
    return cli.exit_status(partial(prepare.prepare_images, given))


def written(to: Path) -> dict[str, bytes]:
    """Return the files of both splits, which are in folders or in tar files."""
    found = {str(p.relative_to(to)): p.read_bytes() for p in to.glob("*/**/*") if p.is_file()}
    for path in to.glob("*.tar"):
        with tarfile.open(path) as archive:
            found |= {f"{path.stem}/{m.name}": archive.extractfile(m).read() for m in archive}
    return found


def report_of(to: Path) -> dict[str, Any]:
    return dict(json.loads((to / "prepare.json").read_text()))


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files, expected = FORMATS[name]
    to = tmp_path / "new" / "to"
    assert run(write(tmp_path / "source", files()), to, "--format", kind) == 0
    assert written(to) == expected and sorted(os.listdir(tmp_path)) == ["new", "source"]
    images = Counter(path.split("/")[0] for path in expected)
    splits = [split if kind == "folder" else f"{split}.tar" for split in images]
    assert sorted(os.listdir(to)) == sorted(["prepare.json", *splits])
    report, classes = report_of(to), {path.split("/")[1] for path in expected}
    assert (report["classes"], report["images"]) == (len(classes), len(expected))
    assert report["settings"]["images"] == images and report["unreadable"] == 0
    said = capsys.readouterr().out
    assert NOTES.get(name, "") in said
    fraction = "" if "val" in images else " data.val_fraction=0.2"
    assert f"train with: python train.py data.root={to}{fraction}\n" in said


def test_the_labels_of_ilsvrc2012_are_known(tmp_path: Path) -> None:
    """A kit with 1,000 classes must give the published labels: another order is refused."""
    first = dict(zip([490, 361, 171, 822, 297], imagenet.FIRST_LABELS.values(), strict=True))
    ids = {i: f"n{i:08d}" for i in range(1, 1001)} | first
    truth = [*first, *(i for i in ids for _ in range(50 - (i in first)))]

    def labels(ids: Mapping[int, str]) -> dict[str, str]:
        write(tmp_path, {KIT: devkit(ids, truth)})
        return imagenet.val_labels(str(tmp_path), {KIT: Place(str(tmp_path / KIT))})

    found = labels(ids)
    assert found["ILSVRC2012_val_00000003.JPEG"] == "n02105855" and len(found) == 50_000
    inflated.cache_clear()
    with pytest.raises(UserError, match=r"these are not the labels of ILSVRC2012\); download"):
        labels(dict(enumerate(sorted(ids.values()), 1)))  # the mistake that people make


def image_and(**columns: Any) -> bytes:
    """Return a Parquet file of one image, with the names of two classes, and other columns."""
    image = [{"bytes": jpeg(1), "path": None}]
    return parquet({"image": image, **columns}, *("a", "b") * ("label" in columns))


# The files, what is changed in them (a file, None without it, or a text and its replacement), and
# what the message says.
KIT, ANNOTATIONS = "ILSVRC2012_devkit_t12.tar.gz", "tiny-imagenet-200/val/val_annotations.txt"
Change = bytes | str | None | tuple[str, str] | Callable[[], bytes]
CIFAR, CIFAR_3, SOLUTIONS = CIFARS[10][0], "cifar/data_batch_3", "LOC_val_solution.csv"
PARTS = {f"part-{n}.tar": tar(SPLITS_IN_A_TAR) for n in range(2)}
WITHOUT_LABEL = {f"{n}.jpg": jpeg(1) for n in "ab"} | {"b.cls": "1"}
NOTHING: Source = dict
WRONG: list[tuple[Source, dict[str, Change], str]] = [
    (NOTHING, {"imagenet.zip": b"PK"}, "holds no images in class folders; give"),
    (NOTHING, {"a/1.jpg": b"", "b.tar": b""}, "has images (a/1.jpg) and tar files (b.tar); give"),
    (NOTHING, {"a.jpg": jpeg(1)}, "holds no images in class folders; give ImageNet's"),
    (NOTHING, {f"train-{n}.tar": tar(IMAGES) for n in range(2)}, "is the name of 2 images"),
    (NOTHING, {**PARTS}, "no tar file has train or val in its name; rename them"),
    (NOTHING, {"train-0.tar": b"", "x.tar": b""}, "x.tar: the name does not contain train or"),
    (NOTHING, {"a/1.tar": tar({}), "b/train.tar": b""}, "several datasets (a, b); give the folder"),
    (NOTHING, {"train.tar": b"no tar"}, "train.tar: cannot be read at byte 0: "),
    (NOTHING, {"all.tar.gz": tar(IMAGES, "w:gz")[:-9]}, "all.tar.gz: is damaged or incomplete"),
    (NOTHING, {"a.tar.gz": zlib.compress(tar(IMAGES)[:700], wbits=31)}, "/a.tar.gz: cannot be "),
    # Shards and Parquet.
    (NOTHING, {"train.tar": tar(WITHOUT_LABEL)}, "train/a.jpg has no label; add train/a.cls"),
    (NOTHING, {"train.tar": tar({"a.jpg": b"", "a.json": "["})}, "a.json: holds no label"),
    (NOTHING, {"train.tar": tar(dict.fromkeys(("a.1.jpg", "a.1.cls", "a.2.jpg"), b""))}, "several"),
    (
        NOTHING,
        {"train.tar": tar({"a.jpg": b"", "a.seg.png": b"", "a.cls": b"1"})},
        "a: has several",
    ),
    (NOTHING, {"a.parquet": lambda: image_and(label=[1])[:-100]}, "a.parquet: is damaged or inco"),
    (NOTHING, {"a.parquet": lambda: image_and(label=[7])}, "a.parquet: is damaged or incomplete ("),
    (
        NOTHING,
        {"a.parquet": lambda: image_and(caption=[""])},
        "image, caption, not one of images and one of labels; w",
    ),
    # CIFAR.
    (CIFAR, {CIFAR_3: None}, "data_batch_3: is damaged or incomplete"),
    (CIFAR, {CIFAR_3: CIFAR()[CIFAR_3][:-1]}, "data_batch_3: is damaged or incomplete ("),
    (CIFAR, {CIFAR_3: pickle.dumps(os.mkdir)}, "(its pickle names posix.mkdir)"),
    # ImageNet, and the tables of Kaggle and of Tiny ImageNet.
    (official, {KIT: None}, "the labels of the validation images are missing"),
    (official, {KIT: devkit()[:150]}, "devkit_t12.tar.gz: is damaged"),
    (official, {KIT: devkit(truth=[3, 1, 2, 2, 3, 3])}, "do not have the same number of"),
    (official, {KIT: devkit(truth=VAL * 2)}, "0007.JPEG is missing (6 in all)"),
    (NOTHING, {"ILSVRC2012_img_train.tar": b""}, "ILSVRC2012_img_val.tar is missing"),
    (kaggle, {SOLUTIONS: ("n02119789 5 6 7 8", "n02100735 5 6 7 8")}, "solution.csv: is damaged"),
    (kaggle, {SOLUTIONS: ("val_00000001,", "val_00000002,")}, "0001.JPEG has no label (1 in all)"),
    (tiny, {ANNOTATIONS: ("val_3.JPEG\t", "val_9.JPEG\t")}, "val_3.JPEG has no label (2 in all)"),
]


@pytest.mark.parametrize(("files", "changes", "message"), WRONG)
def test_what_is_wrong_and_what_to_do(
    tmp_path: Path, files: Source, changes: dict[str, Change], message: str
) -> None:
    content = dict(files())
    for name, change in changes.items():
        if change is None:
            del content[name]
        elif isinstance(change, tuple):
            assert change[0] in str(content[name])
            content[name] = str(content[name]).replace(*change, 1)
        else:
            content[name] = change() if callable(change) else change
    with pytest.raises(UserError) as error:
        recognise(str(write(tmp_path / "source", content)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_wrong_destinations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the source, around it, with other files, another size, and other images."""
    source = write(tmp_path / "source", FOLDERS)
    to = write(tmp_path / "to", {"train/mine.jpg": b"mine"})

    def error(to: Path, *options: str) -> str:
        assert run(source, to, *options) == 2
        return capsys.readouterr().err

    assert all("contain each other; give" in error(source / place) for place in ("train/x", ".."))
    assert written(source) == FOLDERS
    assert error(to).endswith(f"--to {to}: holds train; give a new or an empty folder\n")
    shutil.rmtree(to)
    assert run(source, to) == 0
    assert f"--to {to}: has side None, not 64; give the same" in error(to, "--side", "64")
    write(source, {"val/n02119789/new.jpg": jpeg(1)})
    assert "images {'train': 6, 'val': 6}, not {'train': 6, 'val': 7}" in error(to)
    assert written(to) == EXPECTED


def test_files_are_linked_or_on_another_file_system_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", EXPECTED)

    def links(to: Path) -> set[int]:
        return {p.stat().st_nlink for p in to.rglob("*.JPEG")}

    assert run(source, tmp_path / "linked") == 0 and links(tmp_path / "linked") == {2}
    report = report_of(tmp_path / "linked")
    assert (report["linked"], report["copied"], report["bytes"]) == (12, 0, 0)

    refused = OSError(errno.EXDEV, "Invalid cross-device link")
    monkeypatch.setattr(os, "link", Mock(side_effect=refused))
    assert run(source, tmp_path / "copied") == 0
    assert written(tmp_path / "copied") == EXPECTED and links(tmp_path / "copied") == {1}
    assert report_of(tmp_path / "copied")["bytes"] == sum(map(len, EXPECTED.values()))


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_unreadable_images_are_listed_and_can_be_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The same command keeps what is complete, but no empty files, as a power failure leaves."""
    source, to = write(tmp_path / "source", FOLDERS), tmp_path / "to"
    broken = list(EXPECTED)[:4]
    cut = EXPECTED[broken[1]][:-400]
    for name, data in zip(broken, (b"", cut, b"<html>404", cut + b"\xff\xd9"), strict=True):
        (source / name).write_bytes(data)
    assert run(source, to, "--format", kind) == 1
    assert written(to) == {n: data for n, data in EXPECTED.items() if n not in broken}
    lines = (to / "unreadable.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == sorted(broken)
    assert f"listed in {to}/unreadable.txt" in capsys.readouterr().out
    write(source, FOLDERS)
    done = sorted(to.rglob("*.JPEG"))
    for path in done[:2]:
        path.unlink()
        path.touch()
    assert run(source, to, "--format", kind) == 0
    assert written(to) == EXPECTED and report_of(to)["done_earlier"] == len(done[2:])
    assert not (to / "unreadable.txt").exists()


def test_a_full_disk_ends_the_run_and_the_next_one_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = write(tmp_path / "source", kaggle()), tmp_path / "to"
    with file_size_limit(5_000):
        assert run(source, to, "--format", "tar") == 1
    error = capsys.readouterr().err
    assert "File too large; check the path, its permissions, the disk" in error
    assert error.count("\n") == 1 and not (to / "train.tar").exists()
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
def test_a_smaller_image(kind: str, mode: str, size: tuple[int, int]) -> None:
    """It is resized and encoded as by Pillow."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"  # orientation: viewers rotate by 90 degrees
    data = encoded(drawn(mode).resize(size), kind, exif=exif, icc_profile=b"profile" * 20)
    made = Image.open(io.BytesIO(prepare.reencoded(data, "n01/n01_1.JPEG", 96)))
    short = min(96, *size)
    assert (made.format, made.mode, min(made.size)) == ("JPEG", "RGB", short)
    assert max(made.size) == pytest.approx(short * max(size) / min(size), abs=1)
    assert (made.width < made.height) == (size[0] < size[1])
    assert dict(made.getexif()) == {0x0112: 6} and not {"progressive", "icc_profile"} & {*made.info}
    assert [layer[1:3] for layer in made.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]  # 4:2:0
    exact = Image.fromarray(decode.open_picture(data, "pillow").pixels())
    exact = exact.resize(made.size, Image.Resampling.BILINEAR)  # Pillow's is antialiased
    at_90 = io.BytesIO(encoded(exact.convert("RGB"), quality=90, subsampling="4:2:0"))
    difference = np.asarray(made, np.float64) - np.asarray(Image.open(at_90))
    assert (difference**2).mean() < 6  # levels; a PSNR of 40 dB
    assert prepare.reencoded(data, "a.png", 96) is data  # a file with another name is kept
    for name in ("a.jpg", "a.png"):  # also where the file would only be copied
        with pytest.raises(decode.UnreadableError, match=r"truncated|broken"):
            prepare.reencoded(data[: len(data) // 2], name, 1000)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_dataset_of_smaller_images(image_root: Path, tmp_path: Path, kind: str) -> None:
    """Names, labels and the identity of the samples do not change; a small image is a link."""
    to = tmp_path / "to"
    assert run(image_root, to, "--side", "96", "--format", kind) == 0
    before, after = written(image_root), written(to)
    assert after == {name: prepare.reencoded(data, name, 96) for name, data in before.items()}
    report = report_of(to)
    kept = sum(after[name] == before[name] for name in before)
    assert report["encoded"] == len(before) - kept > 10
    assert report["linked" if kind == "folder" else "copied"] == kept
    for split in ("train", "val"):
        old, new = (load_index(root / split, key="data.root") for root in (image_root, to))
        assert new.digest == old.digest and new.classes == old.classes
