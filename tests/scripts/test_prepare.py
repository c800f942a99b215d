"""Datasets as people have them: small ones in the real formats; smaller images; resumed runs."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conf.schema import Data, UserError
from pipeline import decode
from pipeline.index import load_index
from pipeline.splits import load_splits
from scripts import prepare
from scripts.lib.sources import imagenet
from scripts.lib.sources.files import Place, Sample, read_place, tree_of_folder
from scripts.lib.sources.layouts import recognise
from tests.drawings import draw_image
from tests.limits import file_size_limit
from tests.processes import Started, run_command, wait_for
from tests.reliability.odd_images import encoded
from tests.scripts.conftest import Mistake

# Class folders of ImageNet whose order differs from that of their ILSVRC2012_ID, as in the real
# kit, and a synset above them.
IDS = {1: "n02119789", 2: "n02100735", 3: "n01443537"}
PARENT = "n00001740"
VAL = [3, 1, 2, 2, 3, 1]  # the ground truth: image i -> ILSVRC2012_ID
Source = Callable[[Path], Path]


def jpeg(seed: int) -> bytes:
    buffer = io.BytesIO()
    image = draw_image("dots", np.random.default_rng(seed)).resize((40, 30))
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


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


def write(root: Path, files: Mapping[str, bytes | str | None]) -> Path:
    """Write files in a folder; None removes one."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (root / name).unlink()
        else:
            (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def tar(files: Mapping[str, bytes | str], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("name")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT).ljust(1024)


def zipped(path: Path, files: Mapping[str, bytes | str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def meta_mat(ids: Mapping[int, str]) -> bytes:
    """Return a MAT-file: in its compressed table, a character takes one byte or two."""
    rows = [
        f"{i} {wnid} words, é".encode("utf-8" if i % 2 else "utf-16-le") for i, wnid in ids.items()
    ]
    array = zlib.compress(b"\0\x0e".join([*rows, PARENT.encode()]))
    return b"MATLAB 5.0 MAT-file".ljust(128) + struct.pack("<II", 15, len(array)) + array


def devkit(ids: Mapping[int, str] = IDS, truth: list[int] = VAL) -> bytes:
    folder = "ILSVRC2012_devkit_t12/data/"
    lines = "".join(f"{i}\n" for i in truth)
    files = {
        folder + "ILSVRC2012_validation_ground_truth.txt": lines,
        folder + "meta.mat": meta_mat(ids),
    }
    return tar(files, "w:gz")


def official(root: Path) -> Path:
    inner = {
        f"{wnid}.tar": tar({n.split("/")[1]: d for n, d in TRAIN.items() if n.startswith(wnid)})
        for wnid in IDS.values()
    }
    return write(
        root,
        {
            "ILSVRC2012_img_train.tar": tar(inner),
            "ILSVRC2012_img_val.tar": tar(FLAT),
            "ILSVRC2012_devkit_t12.tar.gz": devkit(),
            "ILSVRC2012_img_test_v10102019.tar": tar({"test/1.JPEG": jpeg(1)}),
            "ILSVRC2012_bbox_train_v2.tar.gz": b"unused",
        },
    )


SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{i:08d},{IDS[VAL[i - 1]]} 1 2 3 4 {IDS[VAL[i - 1]]} 5 6 7 8 \n"
    for i in (4, 2, 6, 1, 3, 5)
)


def kaggle_files() -> dict[str, bytes | str]:
    data = "ILSVRC/Data/CLS-LOC/"
    return {
        **{f"{data}train/{name}": content for name, content in TRAIN.items()},
        **{f"{data}val/{name}": content for name, content in FLAT.items()},
        f"{data}test/ILSVRC2012_test_00000001.JPEG": jpeg(999),
        "ILSVRC/ImageSets/CLS-LOC/train_cls.txt": "n01443537/n01443537_2 1\n",
        "LOC_val_solution.csv": SOLUTION,
        "LOC_train_solution.csv": "ImageId,PredictionString\nn01443537_2,n01443537 1 2 3 4\n",
        "LOC_synset_mapping.txt": "n01443537 goldfish\n",
        "LOC_sample_submission.csv": "ImageId,PredictionString\n",
    }


def kaggle(root: Path) -> Path:
    return write(root, kaggle_files())


def kaggle_old_mac(root: Path) -> Path:
    """The lines of the table end with CR."""
    return write(kaggle(root), {"LOC_val_solution.csv": SOLUTION.replace("\n", "\r")})


def kaggle_inside(root: Path) -> Path:
    """SOURCE is the folder that holds train and val, below that of the labels."""
    return kaggle(root) / "ILSVRC" / "Data" / "CLS-LOC"


def kaggle_zip(root: Path) -> Path:
    return zipped(root / "imagenet-object-localization-challenge.zip", kaggle_files())


def folders(root: Path) -> Path:
    return write(root, {**EXPECTED, "readme.txt": "text", "train/n02119789/notes.md": "text"})


def a_tar_that_names_a_split(root: Path) -> Path:
    members = {f"./imagenet/{name}": data for name, data in EXPECTED.items()}
    return write(root, {"mydata-train.tar": tar({**members, "README.txt": "text"})})


def zip_and_tar(root: Path) -> Path:
    zipped(write(root, {"train.tar": tar(TRAIN)}) / "val.zip", VAL_FILES)
    return root


def shards(root: Path) -> Path:
    """WebDataset shards; the labels are numbers in the order of the classes."""
    numbers = {wnid: str(i) for i, wnid in enumerate(sorted(IDS.values()))}
    parts: dict[str, dict[str, bytes | str]] = {}
    for i, (name, data) in enumerate(EXPECTED.items()):
        split, wnid, file = name.split("/")
        key = f"{Path(file).stem}_{wnid}"
        label = ("cls", numbers[wnid]) if i % 2 else ("json", json.dumps({"label": numbers[wnid]}))
        shard = f"imagenet-{'validation' if split == 'val' else 'train'}-{i % 2:04d}.tar"
        parts.setdefault(shard, {}).update({f"{key}.jpeg": data, f"{key}.{label[0]}": label[1]})
    return write(root, {shard: tar(files) for shard, files in parts.items()})


def lists(root: Path) -> Path:
    """train.csv and val.tsv, and images elsewhere."""
    rows = {"train": "note,Path,label\n", "val": "label\timage_id\n"}
    for name in EXPECTED:
        split, wnid, file = name.split("/")
        path = f"all images/{file}"
        rows[split] += f"x,{path},{wnid}\n" if split == "train" else f"{wnid}\t{path}\n"
    images = {f"all images/{name.split('/')[2]}": data for name, data in EXPECTED.items()}
    return write(root, {**images, "train.csv": rows["train"], "val.tsv": rows["val"]})


def one_list(root: Path) -> Path:
    rows = [f"../images/{n.split('/')[2]}\t{n.split('/')[1]}\t{n.split('/')[0]}" for n in EXPECTED]
    text = "\n".join(["filename\tlabel\tsplit", *rows])
    images = {f"images/{name.split('/')[2]}": data for name, data in EXPECTED.items()}
    return write(root, {**images, "lists/all.tsv": text}) / "lists" / "all.tsv"


def tiny_files() -> dict[str, bytes | str]:
    """Tiny ImageNet: validation images in one folder, with a list."""
    top = "tiny-imagenet-200/"
    lines = [f"val_{i}.JPEG\t{IDS[n]}\t0\t32\t44\t62\n" for i, n in enumerate(VAL)]
    return {
        **{f"{top}train/{n.replace('/', '/images/')}": data for n, data in TRAIN.items()},
        **{f"{top}train/{wnid}/{wnid}_boxes.txt": "x.JPEG\t0\t1\t2\t3\n" for wnid in IDS.values()},
        **{f"{top}val/images/val_{i}.JPEG": jpeg(100 + i) for i in range(len(VAL))},
        f"{top}val/val_annotations.txt": "".join(lines),
        f"{top}test/images/test_0.JPEG": jpeg(999),
        f"{top}wnids.txt": "\n".join(IDS.values()),
        f"{top}words.txt": "n00001740\tentity\n",
    }


KAGGLE = [kaggle, kaggle_old_mac, kaggle_inside, kaggle_zip]
SOURCES = [official, *KAGGLE, folders, a_tar_that_names_a_split, zip_and_tar, lists, one_list]


def run(source: Path, to: Path, *options: str) -> int:
    return prepare.main(prepare.arguments([str(source), "--to", str(to), *options]))


def listed(source: Path, **options: Any) -> list[str]:
    return sorted("/".join(sample[:3]) for sample in recognise(str(source), **options)[0])


def written(to: Path, kind: str = "folder") -> dict[str, bytes]:
    """Return the files of both splits, which are in folders or in archives."""
    unpacked = to if kind == "folder" else to / "unpacked"
    for path in to.glob(f"*.{kind}"):
        shutil.unpack_archive(path, unpacked / path.stem)
    files = {p: p.read_bytes() for p in unpacked.glob("*/**/*") if p.is_file()}
    if unpacked != to:
        shutil.rmtree(unpacked)
    return {str(path.relative_to(unpacked)): data for path, data in files.items()}


def report_of(to: Path) -> dict[str, Any]:
    return dict(json.loads((to / "prepare.json").read_text()))


# Every format.


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_format_gives_the_same_folders(tmp_path: Path, source: Source) -> None:
    to = tmp_path / "new" / "to"
    assert run(source(tmp_path / "source"), to) == 0
    assert written(to) == EXPECTED
    assert sorted(os.listdir(to)) == ["prepare.json", "train", "val"]
    report = report_of(to)
    assert (report["classes"], report["images"], report["unreadable"]) == (3, 12, 0)
    assert report["settings"]["images"] == {"train": 6, "val": 6}


def test_numbers_as_labels_keep_their_order(tmp_path: Path) -> None:
    """As strings, 10 comes before 9. Shards may count their keys from 0 each."""
    shard = tar({"9.jpg": jpeg(9), "9.cls": " 9\n", "10.jpg": jpeg(10), "10.cls": " 10\n"})
    names = [f"data-{word}-{i}" for word in ("train", "test") for i in range(2)]
    files = {f"{name}.tar": shard for name in names}
    samples, notes = recognise(str(write(tmp_path / "source", files)))
    assert {"/".join(s[:3]) for s in samples} == {
        f"{'val' if 'test' in name else 'train'}/{label}/{name}_{int(label)}.jpg"
        for name in names
        for label in ("09", "10")
    }
    assert notes == ["The test split is the validation split."]


# Parquet.


def parquet(path: Path, columns: dict[str, Any], metadata: str = "") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table(columns)
    if metadata:
        table = table.replace_schema_metadata({"huggingface": metadata})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)


def with_names(*classes: str, image: str = "image") -> str:
    """Return the metadata of the columns."""
    label = {"names": list(classes), "_type": "ClassLabel"}
    return json.dumps({"info": {"features": {image: {"_type": "Image"}, "label": label}}})


def hugging_face(root: Path) -> Path:
    """imagenet-1k: the names of the files contain WordNet ids, those of the classes do not."""
    wnids = sorted(IDS.values())
    features = with_names("goldfish, Carassius auratus", "English setter", "kit fox")
    for split, word in (("train", "train"), ("val", "validation")):
        rows = [name.split("/") for name in list(EXPECTED)[::-1] if name.startswith(split)]
        images = [
            {"bytes": EXPECTED["/".join(r)], "path": f"{Path(r[2]).stem}_{r[1]}.JPEG"} for r in rows
        ]
        columns = {"image": images, "label": [wnids.index(r[1]) for r in rows]}
        parquet(root / f"data/{word}-00000-of-00001.parquet", columns, features)
    hidden = {"image": [images[0]], "label": [-1]}
    parquet(root / "data/test-00000-of-00001.parquet", hidden, features)
    return write(root, {"README.md": "text", ".cache/huggingface/x.parquet": "no"})


@pytest.mark.parametrize(("source", "ending"), [(shards, "jpeg"), (hugging_face, "JPEG")])
def test_wordnet_ids_in_the_names_are_the_classes(
    tmp_path: Path, source: Source, ending: str
) -> None:
    """Not the numbers, where the names of the images contain these."""
    assert run(source(tmp_path / "source"), tmp_path / "to") == 0
    assert written(tmp_path / "to") == {
        f"{Path(name).parent}/{Path(name).stem}_{Path(name).parent.name}.{ending}": data
        for name, data in EXPECTED.items()
    }


def test_parquet_with_names_of_classes_but_not_of_files(tmp_path: Path) -> None:
    """CIFAR-10: images without a path, a test split, and a column of another name."""
    images = [{"bytes": jpeg(i), "path": None} for i in range(4)]
    features = with_names("tench", "cat/dog", image="img")
    for split in ("train", "test"):
        columns = {"img": images, "label": [1, 0, 0, 1]}
        parquet(tmp_path / "plain_text" / f"{split}-00000-of-00001.parquet", columns, features)
    assert run(tmp_path / "plain_text", tmp_path / "to") == 0
    assert written(tmp_path / "to") == {
        f"{split}/{label}/{word}-00000-of-00001-{row:06d}_image.jpeg": jpeg(row)
        for split, word in (("train", "train"), ("val", "test"))
        for row, label in enumerate(("cat_dog", "tench", "tench", "cat_dog"))
    }


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"train.parquet": b"PAR1"})
    assert refused(tmp_path).endswith("run pip install pyarrow and start again")


def test_damaged_and_unclear_parquet(tmp_path: Path) -> None:
    source = hugging_face(tmp_path / "source")
    path = next(source.rglob("train*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert f"{path}: is damaged or incomplete (" in refused(source)
    path.write_bytes(whole)
    image = [{"bytes": b"", "path": None}]
    parquet(source / "320px" / "train-0.parquet", {"image": image, "label": [0]})
    assert "several datasets (320px, data); give the folder of" in refused(source)
    parquet(tmp_path / "x.parquet", {"image": image, "caption": ["a"]})
    assert "has 0 columns of labels in image, caption; write" in refused(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        (0, "{"),
        (0, "[" * 100_000),
        (0, '{"info": {"features": {"label": 3}}}'),
        (7, with_names("a", "b")),
        ("a", with_names("a", "b")),
    ],
)
def test_odd_metadata_of_parquet(tmp_path: Path, label: int | str, metadata: str) -> None:
    image = [{"bytes": jpeg(1), "path": None}] * 2
    parquet(tmp_path / "a.parquet", {"image": image, "label": [label] * 2}, metadata)
    assert "a.parquet: is damaged or incomplete (" in refused(tmp_path / "a.parquet")


# A split.


def classes_only(root: Path, counts: Mapping[str, int], inner: str = "") -> Path:
    return write(
        root, {f"{c}/{inner}{i:02d}.jpg": jpeg(i) for c, n in counts.items() for i in range(n)}
    )


@pytest.mark.parametrize("inner", ["", "images/"])
def test_the_split_is_that_of_data_val_fraction(tmp_path: Path, inner: str) -> None:
    first = "a" if inner else "train set"
    source = classes_only(tmp_path / "source", {first: 2, "b": 20, "c": 35}, inner)
    assert run(source, tmp_path / "to", "--val-fraction", "0.2") == 0
    _, prepared = load_splits(Data(root=str(tmp_path / "to")))
    _, held_out = load_splits(Data(root=str(source), val_fraction=0.2))
    assert inner or prepared.fingerprint() == held_out.fingerprint()
    names = [held_out.name(i).replace(inner, "") for i in range(1 + 4 + 7)]
    assert [prepared.name(i) for i in range(len(prepared))] == names
    assert sum(name.startswith("val") for name in listed(source)) == 1 + 2 + 4
    message = refused(tmp_path / "to", val_fraction=0.1)
    assert message.endswith("has a validation split; leave out --val-fraction")


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    source = classes_only(tmp_path, {"train": 4, "bus": 4, "test": 4})
    write(source, {"train-labels.csv": "path,label\n"})  # is no list
    assert {name.split("/")[1] for name in listed(source)} == {"train", "bus", "test"}


def test_test_images_without_classes_are_left_out(tmp_path: Path) -> None:
    files = {f"train/{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(2)}
    samples, notes = recognise(str(write(tmp_path, {**files, "test/1.jpg": jpeg(9)})))
    assert len(samples) == 4 and {s.split for s in samples} == {"train", "val"}
    assert notes == [
        "Images without a split or a class were left out: 1.",
        "10% of the images of each class became the validation split.",
    ]


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "sorted"])
def test_tiny_imagenet(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "RECIPES", {(len(IDS), len(TRAIN)): "mine"})
    files = tiny_files()
    if kind == "sorted":  # by one of the scripts for it
        for i, number in enumerate(VAL):
            image = files.pop(f"tiny-imagenet-200/val/images/val_{i}.JPEG")
            files[f"tiny-imagenet-200/val/{IDS[number]}/val_{i}.JPEG"] = image
    if kind == "zip":
        source = zipped(tmp_path / "tiny-imagenet-200.zip", files)
    else:
        files = {"tiny-imagenet-200.tar": tar(files)} if kind == "tar" else files
        source = write(tmp_path / "in", files) / next(iter(files)).split("/")[0]
    assert run(source, tmp_path / "to") == 0
    expected = {f"train/{name}": data for name, data in TRAIN.items()}
    for i, number in enumerate(VAL):
        expected[f"val/{IDS[number]}/val_{i}.JPEG"] = jpeg(100 + i)
    assert written(tmp_path / "to") == expected
    assert '"python train.py recipe=mine data' in (tmp_path / "to" / "prepare.json").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("val_3.JPEG\t", "val_9.JPEG\t", "validation image val_3.JPEG has no label (2 in all)"),
        ("\t", " ", "val_annotations.txt: is damaged or incomplete"),
        ("n02119789", "n00000000", "only val has images of n00000000, train has none"),
    ],
)
def test_wrong_annotations_of_tiny_imagenet(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    files = tiny_files()
    name = "tiny-imagenet-200/val/val_annotations.txt"
    files[name] = str(files[name]).replace(old, new)
    assert message in refused(write(tmp_path, files))


# CIFAR's archives: the red, green and blue planes of some images, and their labels.


PLANES = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), np.uint8)
CIFAR_LABELS = [1, 0, 0, 1, 1, 0, 1, 0]
CLASSES = ["cat", "frog"]
CIFAR_10 = {f"data_batch_{i + 1}": [i] for i in range(5)} | {"test_batch": [5, 6, 7]}
CIFAR_100 = {"train": [0, 1, 2, 3, 4], "test": [5, 6, 7]}


def string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode() + b"q\x00"


def pickled(rows: list[int], key: str = "labels") -> bytes:
    """Return a batch as Python 2 pickled it, with the opcodes of the real files."""
    labels = b"".join(b"K" + bytes([CIFAR_LABELS[row]]) for row in rows)
    return b"".join(
        [
            b"\x80\x02}q\x01(" + string("batch_label") + string("training batch 1 of 5"),
            string("coarse_labels") + b"]q\x04(K\x13K\x07e" if key != "labels" else b"",
            string(key) + b"]q\x04(" + labels + b"e",
            string("data") + b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85" + string("b") + b"\x87Rq\x09(K\x01K" + bytes([len(rows)]),
            b"M\x00\x0c\x86cnumpy\ndtype\nq\x0a" + string("u1") + b"K\x00K\x01\x87Rq\x0b(K\x03",
            string("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
            struct.pack("<i", 3072 * len(rows)) + PLANES[rows].tobytes() + b"tb",
            string("filenames") + b"]q\x0c(" + string("frog_s_01.png") * len(rows) + b"eu.",
        ]
    )


def pickled_names(key: str) -> bytes:
    start = b"\x80\x02}q\x01(" + string("num_vis") + b"M\x00\x0c" + string(key) + b"]q\x02("
    return start + b"".join(map(string, CLASSES)) + b"eu."


def binary(rows: list[int], before: bytes = b"") -> bytes:
    return b"".join(before + bytes([CIFAR_LABELS[row]]) + PLANES[row].tobytes() for row in rows)


TEXT = "\n".join([*CLASSES, "", ""])
PYTHON_10 = {"batches.meta": pickled_names("label_names")} | {
    name: pickled(rows) for name, rows in CIFAR_10.items()
}
BINARY_10 = {"batches.meta.txt": TEXT} | {f"{n}.bin": binary(r) for n, r in CIFAR_10.items()}
PYTHON_100 = {"meta": pickled_names("fine_label_names")} | {
    name: pickled(rows, "fine_labels") for name, rows in CIFAR_100.items()
}
BINARY_100 = {"fine_label_names.txt": TEXT} | {
    f"{name}.bin": binary(rows, b"\x13") for name, rows in CIFAR_100.items()
}


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize(
    ("files", "rows"),
    [
        (PYTHON_10, CIFAR_10),
        (BINARY_10, CIFAR_10),
        (PYTHON_100, CIFAR_100),
        (BINARY_100, CIFAR_100),
    ],
)
def test_cifar(
    tmp_path: Path, files: dict[str, bytes | str], rows: dict[str, list[int]], archive: bool
) -> None:
    files = {f"cifar/{name}": content for name, content in {**files, "readme.html": ""}.items()}
    source = write(tmp_path / "in", {"cifar.tar.gz": tar(files, "w:gz")} if archive else files)
    assert run(source, tmp_path / "to") == 0
    expected = {
        f"{split}/{CLASSES[CIFAR_LABELS[row]]}/{name}-{position:05d}.ppm": PLANES[row]
        for name, batch in rows.items()
        for split in ["val" if name.startswith("test") else "train"]
        for position, row in enumerate(batch)
    }
    found = {n: decode.open_picture(d, "pillow") for n, d in written(tmp_path / "to").items()}
    assert found.keys() == expected.keys()
    for name, planes in expected.items():
        assert np.array_equal(found[name].pixels(), planes.transpose(1, 2, 0))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"data_batch_3": None}, "data_batch_3 is missing; download or copy it again"),
        ({"data_batch_3": pickled([2])[:-1]}, "data_batch_3: is damaged or incomplete ("),
        ({"data_batch_3": pickle.dumps(Evil(), 2)}, "(its pickle holds GLOBAL posix mkdir)"),
        ({"data_batch_3": pickle.dumps(Evil(), 4)}, "(its pickle holds STACK_GLOBAL None)"),
        ({"data_batch_3": pickled([2], "x")}, "(3,072 bytes for 0 images)"),
        ({"data_batch_3": pickled([2]).replace(b"(K\0e", b"(K\0K\0e")}, "bytes for 2 images)"),
        (
            {"data_batch_3": pickled([2]).replace(b"\x89T", b"\x88T")},
            "(its pickle holds NEWTRUE None)",
        ),
        ({"batches.meta": pickled_names("x")}, "batches.meta: is damaged or incomplete (no names"),
        (BINARY_10, "holds several versions of CIFAR (., .); give one of them"),
    ],
)
def test_damaged_pickles_of_cifar(
    tmp_path: Path, files: dict[str, bytes | str | None], message: str
) -> None:
    assert message in refused(write(write(tmp_path, PYTHON_10), files))
    assert not Path("evil").exists()


def test_a_truncated_file_of_cifar_and_a_zip_file(tmp_path: Path) -> None:
    source = write(tmp_path, {**BINARY_10, "test_batch.bin": binary([5, 6])[:-1]})
    message = "test_batch.bin: is damaged or incomplete (6,145 bytes for 2 images); download or"
    assert message in refused(source)
    assert "unpack it and give the folder" in refused(zipped(tmp_path / "cifar.zip", BINARY_10))


# Labels of the validation images.


def test_the_labels_of_ilsvrc2012_are_known(tmp_path: Path) -> None:
    """A kit with 1,000 classes must give the published labels: another order is refused."""
    others = iter(f"n{i:08d}" for i in range(2, 2000))
    ids = {i: next(others) for i in range(1, 1001)}
    first = dict(zip([490, 361, 171, 822, 297], imagenet.FIRST_LABELS, strict=True))
    ids |= first
    truth = [*first, *(i for i in ids for _ in range(50 - (i in first)))]
    kit = write(tmp_path, {"ILSVRC2012_devkit_t12.tar.gz": devkit(ids, truth)})
    labels = imagenet.val_labels(str(kit), {})
    assert labels["ILSVRC2012_val_00000003.JPEG"] == "n02105855" and len(labels) == 50_000
    by_wnid = dict(enumerate(sorted(ids.values()), 1))  # the mistake that people make
    write(kit, {"ILSVRC2012_devkit_t12.tar.gz": devkit(by_wnid, truth)})
    with pytest.raises(UserError, match=r"these are not the labels of ILSVRC2012\); download"):
        imagenet.val_labels(str(kit), {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ILSVRC2012_devkit_t12.tar.gz": None}, "the labels of the validation images are missing"),
        ({"ILSVRC2012_img_val.tar": None}, "ILSVRC2012_img_val.tar is missing"),
        ({"ILSVRC2012_devkit_t12.tar.gz": devkit()[:150]}, "devkit_t12.tar.gz: is damaged"),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": gzip.compress(3000 * header(b"L", 1))},
            "devkit_t12.tar.gz: is damaged",
        ),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": devkit(truth=[3, 1, 2, 2, 3, 3])},
            "the classes do not have the same number of validation images",
        ),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": devkit(truth=VAL * 2)},
            "validation image ILSVRC2012_val_00000007.JPEG is missing (6 in all)",
        ),
        ({"ILSVRC2012_img_val.tar": tar(FLAT)[: 512 * 3]}, "img_val.tar: is damaged or incomplete"),
    ],
)
def test_incomplete_official_files(
    tmp_path: Path, files: dict[str, bytes | None], message: str
) -> None:
    assert message in refused(write(official(tmp_path / "source"), files))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ImageId,PredictionString\n", ""),
        ("n02119789 5 6 7 8", "n02100735 5 6 7 8"),
        ("n02119789 1 2 3 4 n02119789", "fox 1 2 3 4 fox"),
        ("ILSVRC2012_val_00000001,", "ILSVRC2012_val_00000002,"),
        ("n02119789 5 6 7 8", f"n02119789 {'5' * 200_000}"),
    ],
)
def test_a_damaged_solution(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOLUTION
    write(kaggle(tmp_path), {"LOC_val_solution.csv": SOLUTION.replace(old, new, 1)})
    assert "LOC_val_solution.csv: is damaged or incomplete (" in refused(tmp_path)


# Resumed runs.


def links(to: Path) -> set[int]:
    return {p.stat().st_nlink for p in to.rglob("*.JPEG")}


def test_files_are_linked_or_on_another_file_system_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = kaggle(tmp_path / "source")
    assert run(source, tmp_path / "linked") == 0
    assert links(tmp_path / "linked") == {2}
    report = report_of(tmp_path / "linked")
    assert (report["linked"], report["copied"], report["bytes"]) == (12, 0, 0)

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert run(source, tmp_path / "copied") == 0
    assert written(tmp_path / "copied") == EXPECTED and links(tmp_path / "copied") == {1}
    assert report_of(tmp_path / "copied")["bytes"] == sum(map(len, EXPECTED.values()))


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    """Files are missing, empty as after a power failure, or unfinished."""
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    assert run(source, to) == 0
    for number, path in enumerate(sorted(to.rglob("*.JPEG"))[:5]):
        path.unlink()
        if number % 2:
            path.write_bytes(b"")
    (to / "train" / "n02119789" / ".unfinished-1.tmp").write_bytes(b"half")
    assert run(source, to) == 0
    assert {n: d for n, d in written(to).items() if "unfinished" not in n} == EXPECTED
    assert report_of(to)["done_earlier"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--format", "tar", "--side", "24")])
def test_a_killed_process_resumes(tmp_path: Path, options: tuple[str, ...]) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    data = jpeg(0) + bytes(900)
    files = {f"train/{i % 7}/{i:05d}.jpg": data for i in range(8_000)}
    files |= {f"val/{i}/0.jpg": data for i in range(7)}
    write(source, {"all.tar": tar(files)})
    command = [sys.executable, "scripts/prepare.py", source, "--to", to, *options]
    with Started(command) as process:
        written_bytes = lambda: sum(p.stat().st_size for p in to.rglob("[!.]*.*"))  # noqa: E731
        wait_for("500 kB", lambda: written_bytes() >= 500_000, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    if "--side" in options:
        data = prepare.reencoded(data, "a.jpg", 24)
    assert written(to, options[1] if options else "folder") == dict.fromkeys(files, data)
    assert bool(options) == (report_of(to)["done_earlier"] == 0)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_unreadable_images_are_listed_and_can_be_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    broken = list(EXPECTED)[:3]
    for name, data in zip(broken, (b"", EXPECTED[broken[1]][:-400], b"<html>404"), strict=True):
        (source / name).write_bytes(data)
    assert run(source, to, "--format", kind) == 1
    assert written(to, kind) == {n: data for n, data in EXPECTED.items() if n not in broken}
    lines = (to / "unreadable.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == sorted(broken)
    assert lines[1].startswith(f"{sorted(broken)[1]}\t")
    assert f"listed in {to}/unreadable.txt" in capsys.readouterr().out
    folders(source)
    assert run(source, to, "--format", kind) == 0
    assert written(to, kind) == EXPECTED
    assert not (to / "unreadable.txt").exists()


def in_zip(path: Path, change: Callable[[zipfile.ZipInfo], Any], data: bytes = jpeg(1)) -> Path:
    """Write a zip file with four images, and change the entry of a/0.jpg in its directory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"):
            archive.writestr(name, data if name == "a/0.jpg" else jpeg(2))
        change(archive.filelist[0])
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("file_size", 2**30, "has 1,073,741,824 bytes, more than 536,870,912"),
        ("file_size", 10, "Bad CRC-32"),
        ("flag_bits", 1, "is encrypted, password required"),
        ("compress_type", zipfile.ZIP_LZMA, "0.jpg: "),
        ("compress_type", 99, "compression method is not supported"),
    ],
)
def test_damaged_members_of_a_zip_file(tmp_path: Path, key: str, value: int, message: str) -> None:
    source = in_zip(tmp_path / "all.zip", lambda info: setattr(info, key, value))
    assert run(source, tmp_path / "to") == 1
    (line,) = (tmp_path / "to" / "unreadable.txt").read_text().splitlines()
    assert "a/0.jpg\tOSError: " in line and message in line


def test_a_member_is_inflated_up_to_its_size(tmp_path: Path) -> None:
    path = in_zip(tmp_path / "a.zip", lambda info: setattr(info, "file_size", 10), bytes(2**26))
    tracemalloc.start()
    with pytest.raises(OSError, match="Bad CRC-32"):
        read_place(Place(str(path), 0, 10, "a/0.jpg"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_few_large_images_are_in_memory() -> None:
    places = [Place("a.tar", 0, size) for size in [400 << 20] * 3 + [1000] * 300]
    samples = [Sample("train", "a", str(i), place) for i, place in enumerate(places)]
    with ThreadPoolExecutor(1) as pool:
        found = list(prepare.parts(samples, pool))
    assert [s for part in found for s in part] == samples
    assert [len(part) for part in found[:2]] == [1, 1] and len(found) == 4


def test_a_full_disk_ends_the_run_and_the_next_one_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = official(tmp_path / "source"), tmp_path / "to"
    with file_size_limit(5_000):
        assert run(source, to, "--format", "tar") == 1
    error = capsys.readouterr().err
    assert error.endswith("File too large; run the same command again to resume\n")
    assert not (to / "train.tar").exists()
    assert run(source, to, "--format", "tar") == 0
    assert written(to, "tar") == EXPECTED


# Smaller images.


def drawn(mode: str = "RGB", *, seed: int = 0) -> Image.Image:
    """Return an image with sides between 128 and 320 px."""
    return draw_image("plaid", np.random.default_rng(seed)).convert(mode)


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def smaller(data: bytes, name: str = "a.JPEG", side: int = 96) -> bytes:
    return prepare.reencoded(data, name, side)


def psnr(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a.convert("RGB"), np.float64) - np.asarray(b.convert("RGB"))
    return float(10 * np.log10(255**2 / max(1e-9, (difference**2).mean())))


@pytest.mark.parametrize("size", [(200, 300), (1000, 97)])
def test_the_short_side_is_exact_and_the_aspect_ratio_kept(size: tuple[int, int]) -> None:
    side = 64
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"  # orientation: viewers rotate by 90 degrees
    image = drawn().resize(size)
    made = opened(smaller(encoded(image, exif=exif, icc_profile=b"profile" * 20), side=side))
    assert (made.format, made.mode, min(made.size)) == ("JPEG", "RGB", side)
    assert max(made.size) == pytest.approx(side * max(size) / min(size), abs=1)
    assert (made.width < made.height) == (size[0] < size[1])
    assert "progressive" not in made.info
    assert dict(made.getexif()) == {0x0112: 6} and "icc_profile" not in made.info
    assert [layer[1:3] for layer in made.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]  # 4:2:0


def test_pixels_equal_a_resize_and_encode_by_pillow() -> None:
    for seed in range(5):
        data = encoded(drawn(seed=seed), quality=95)
        made = opened(smaller(data))
        exact = opened(data).resize(made.size, Image.Resampling.BILINEAR)  # Pillow's is antialiased
        at_90 = opened(encoded(exact, quality=90, subsampling="4:2:0"))
        assert psnr(made, at_90) > 40 and psnr(made, exact) > psnr(at_90, exact) - 0.1
    assert "exif" not in opened(smaller(encoded(drawn()))).info
    grey = np.asarray(opened(smaller(encoded(drawn("L")))).convert("RGB"))
    assert (grey == grey[..., :1]).all()


@pytest.mark.parametrize("size", [(60, 90), (200, 300)])
@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "CMYK"), ("PNG", "RGBA")])
def test_a_file_named_jpeg_becomes_an_rgb_jpeg(kind: str, mode: str, size: tuple[int, int]) -> None:
    data = encoded(drawn(mode).resize(size), kind)
    result = opened(smaller(data, "n01/n01_1.JPEG"))
    assert (result.format, result.mode, min(result.size)) == ("JPEG", "RGB", min(96, *size))
    exact = decode.open_picture(data, "pillow").pillow()
    exact = exact.resize(result.size, Image.Resampling.BILINEAR)
    assert psnr(result, opened(encoded(exact, quality=90, subsampling="4:2:0"))) > 40
    assert smaller(data, "a.png") is data  # a file with another name is kept


@pytest.mark.parametrize("side", [96, 1000])  # also where it would only be copied
def test_a_truncated_file_is_an_error(side: int) -> None:
    for name, kind in (("a.jpg", "JPEG"), ("a.png", "PNG")):
        data = encoded(drawn(), kind)
        with pytest.raises(Exception, match=r"truncated|broken|Truncated"):
            smaller(data[: len(data) // 2], name, side=side)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_dataset_of_smaller_images(image_root: Path, tmp_path: Path, kind: str) -> None:
    """Names, labels and the identity of the samples do not change; a small image is a link."""
    to = tmp_path / "to"
    assert run(image_root, to, "--side", "96", "--format", kind) == 0
    before = written(image_root)
    after = written(to, kind)
    assert after == {name: smaller(data, name) for name, data in before.items()}
    report = report_of(to)
    kept = sum(after[name] == before[name] for name in before)
    assert report["encoded"] == len(before) - kept > 10
    assert report["linked" if kind == "folder" else "copied"] == kept
    for split in ("train", "val"):
        old, new = (load_index(root / split, key="data.root") for root in (image_root, to))
        assert new.fingerprint() == old.fingerprint() and new.classes == old.classes


# Refused input.


def refused(source: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        recognise(str(source), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.md": "text"}, "holds no images; give ImageNet's"),
        ({"imagenet.zip": b"PK"}, "imagenet.zip: is damaged or incomplete"),
        ({"a/1.jpg": b"", "b.tar": b""}, "holds images (a/1.jpg) and tar files (b.tar); give one"),
        ({"a.jpg": jpeg(1), "b/b.jpg": jpeg(1)}, "a.jpg is not in a class folder"),
        ({"a/1.jpg": jpeg(1), "a/2.jpg": jpeg(1)}, "all images have the class a; a classifier"),
        ({"a/1.jpg": jpeg(1), "b/1.jpg": jpeg(1)}, "class a has one image"),
        (
            {"train/a/1.jpg": jpeg(1), "train/b/1.jpg": jpeg(1), "val/a/1.jpg": jpeg(1)},
            "only train has images of b, val has none",
        ),
        (
            {f"{s}/{c}/{i}.jpg": b"" for s in ("train", "my-val") for c in "ab" for i in range(2)},
            "my-val/ holds folders and looks like a split; put train/ and val/ into one folder",
        ),
        (
            {
                f"part-{n}.tar": tar(
                    {f"{s}/{n}": d for s in ("train", "val") for n, d in IMAGES.items()}
                )
                for n in range(2)
            },
            "the names of the tar files do not contain train or val; rename them",
        ),
        (
            {f"train-{n}.tar": tar(IMAGES) for n in range(2)} | {"val.tar": tar(IMAGES)},
            "is the name of 2 images",
        ),
        ({"train.csv": "x.jpg,a\n"}, "train.csv: the first line does not name the columns"),
        ({"train.csv": "file,cls\nx.jpg,a\n"}, "line 2: no such file "),
        ({"train.csv": f"file,cls\n{'x' * 200_000},a\n"}, "line 2: field larger than field limit"),
        ({"train.tar": tar({f"{'é' * 128}/{i}.jpg": b"" for i in range(2)})}, "name of 256 bytes"),
        ({"train.csv": "file,cls\nx.jpg,\n"}, "line 2: is not a path and a label"),
        ({"train.csv": "file,cls\nx.jpg,a\nx.jpg,b\n", "x.jpg": b""}, "line 3: names x.jpg again"),
        (
            {"train.tar": tar({f"{n}.jpg": jpeg(1) for n in "ab"} | {"b.cls": "1"})},
            "train/a.jpg has no label; add train/a.cls",
        ),
        ({"train.tar": tar({"a.jpg": b"", "a.json": "[" * 10**5})}, "a.json contains no label"),
        ({"all.tar.gz": tar(IMAGES, "w:gz")[:-9]}, "all.tar.gz: is damaged or incomplete"),
        ({"all.tgz": gzip.compress(bytes(2**20))}, "all.tgz: is compressed and large; run gunzip"),
        ({"train.tar": b"no tar"}, "is damaged or incomplete"),
        ({"train-0.tar": b"", "more.tar": b""}, "more.tar: the name does not contain train or"),
        (
            {"a/1.tar": tar({}), "b/train.tar": tar({})},
            "several datasets (a, b); give the folder of one",
        ),
        (
            {"train.tsv": "file\tlabel\tsplit\nx.jpg\ta\tother", "x.jpg": jpeg(1)},
            "line 2: the split is not train, val or test",
        ),
    ],
)
def test_what_is_wrong_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes | str], message: str
) -> None:
    monkeypatch.setattr("scripts.lib.sources.files.LARGEST_INFLATED", 2**19)
    assert message in refused(write(tmp_path / "source", files))


def test_members_outside_the_class_folders_are_not_written(tmp_path: Path) -> None:
    evil = {"../../evil/x.jpg": jpeg(1), "/absolute/x.jpg": jpeg(2), "a/../../b/x.jpg": jpeg(3)}
    write(tmp_path / "tar", {"train.tar": tar({**TRAIN, **evil})})
    write(tmp_path / "tar", {"val.tar": tar({**VAL_FILES, "absolute/y.jpg": jpeg(2)})})
    expected = EXPECTED | {"train/absolute/x.jpg": jpeg(2), "val/absolute/y.jpg": jpeg(2)}
    assert run(tmp_path / "tar", tmp_path / "to") == 0
    assert written(tmp_path / "to") == expected
    zipped(
        tmp_path / "zip" / "all.zip",
        {**EXPECTED, **{f"train/a/../../{n}": d for n, d in evil.items()}},
    )
    assert run(tmp_path / "zip", tmp_path / "to2") == 0
    assert {n: d for n, d in written(tmp_path / "to2").items() if n in EXPECTED} == EXPECTED
    assert sorted(os.listdir(tmp_path)) == ["tar", "to", "to2", "zip"]


def test_class_names_need_not_be_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    files = {f"{name}/{i}.jpg": jpeg(i) for i in range(2)}
    source = write(tmp_path / "source", {**IMAGES, **files})
    for kind in ("folder", "tar"):
        assert run(source, tmp_path / kind, "--format", kind) == 0
        assert {n.split("/")[1] for n in written(tmp_path / kind, kind)} == {"a", "b", name}


def test_only_files_are_listed(tmp_path: Path) -> None:
    """Opening a FIFO would wait for ever. A broken link is listed: its image is missing."""
    source = write(tmp_path, IMAGES)
    os.mkfifo(source / "a" / "fifo.jpg")
    (source / "a" / "link to a fifo.jpg").symlink_to("fifo.jpg")
    (source / "a" / "broken.jpg").symlink_to("none")
    (source / "c").symlink_to("b")
    (source / "loop").symlink_to(".")
    found = list(tree_of_folder(str(source)))
    assert len(found) == 5 and "a/broken.jpg" in found
    assert not any("fifo" in name or "loop" in name for name in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("in", "the following arguments are required: --to"),
        ("in --to out --side 3", "--side 3: give 8 to 8192"),
        ("in --to out --val-fraction 1", "--val-fraction 1.0: give a number between 0 and 1"),
        ("in --to out --fromat tar", "unrecognized arguments: --fromat tar"),
    ],
)
def test_wrong_arguments(words: str, message: str, mistake: Mistake) -> None:
    assert mistake(prepare.arguments, words).endswith(f": {message}\n")


@pytest.mark.parametrize("place", [".", "new", "train/x", ".."])
def test_a_destination_in_the_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    source = folders(tmp_path / "source")
    assert run(source, source / place) == 2
    assert "contain each other; give another folder" in capsys.readouterr().err
    assert written(source).keys() == EXPECTED.keys() | {"train/n02119789/notes.md"}


def test_another_use_of_a_destination_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other files, other images and another size."""
    source, to = folders(tmp_path / "source"), write(tmp_path / "to", {"train/mine.jpg": b"mine"})

    def error(*options: str) -> str:
        assert run(source, to, *options) == 2
        return capsys.readouterr().err

    assert error() == (
        f"prepare.py: --to {to}: contains other files (train); give a new or an empty folder\n"
    )
    shutil.rmtree(to)
    assert run(source, to) == 0
    assert "started with other settings (side None, not 64); give the same" in error("--side", "64")
    write(source, {"val/n02119789/new.jpg": jpeg(1)})
    assert "images {'train': 6, 'val': 6}, not {'train': 6, 'val': 7}" in error()
    assert written(to) == EXPECTED


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"settings": 3}', b"[" * 100_000, bytes(2 << 20)],
    ids=["empty", "bytes", "list", "settings", "nested", "large"],
)
def test_a_damaged_marker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    to.mkdir()
    (to / "prepare.json").write_bytes(content)
    assert run(source, to) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"prepare.py: --to {to}: prepare.json ") and said.count("\n") == 1
    assert said.endswith("; remove the folder or give another\n") and len(os.listdir(to)) == 1


@pytest.mark.parametrize("place", ["train", "val/n02119789", "train/n02119789/more"])
def test_nothing_is_written_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """A folder that was replaced since the destination was started; also of a nested name."""
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    write(source, {"train/n02119789/more/x.jpg": jpeg(1)})
    assert run(source, to) == 0
    shutil.rmtree(to / place)
    (other := tmp_path / "other").mkdir()
    (to / place).symlink_to(other)
    assert run(source, to) == 2
    assert f"--to {to}: {to / place} is a link; remove it" in capsys.readouterr().err
    assert not os.listdir(other)


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_an_unfinished_file_is_not_written_through_a_link(tmp_path: Path, kind: str) -> None:
    source, to, other = folders(tmp_path / "source"), tmp_path / "to", tmp_path / "other"
    assert run(source, to, "--format", kind, "--side", "8") == 0
    names = ["train.tar"] if kind == "tar" else [n for n in EXPECTED if n.startswith("train")]
    for name in names:
        target = to / name
        target.unlink()
        digest = hashlib.sha256(target.name.encode()).hexdigest()[:16]
        ending = f".unfinished-{digest}.tmp" if kind == "folder" else f"{target.name}.partial"
        target.with_name(ending).symlink_to(other)
    assert run(source, to, "--format", kind, "--side", "8") == 0
    assert not other.exists() and all((to / name).is_file() for name in names)
