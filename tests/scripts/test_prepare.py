"""Datasets as people have them: small ones in the real formats, with real JPEG files."""

import errno
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import Data, UserError
from pipeline.index import load_index
from pipeline.splits import load_splits
from scripts import prepare
from scripts.lib.sources import imagenet, tables
from scripts.lib.sources.layouts import recognise
from scripts.lib.sources.samples import Layout, Place, Sample, read_place, tree_of_folder
from tests.drawings import draw_image

ROOT = Path(__file__).parents[2]
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


def write(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
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


def zipped(path: Path, files: Mapping[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


# A MAT-file of level 5 with the compressed array of structs that meta.mat of the kit contains.


def element(kind: int, data: bytes) -> bytes:
    if 0 < len(data) <= 4:
        return struct.pack("<HH4s", kind, len(data), data)
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(kind: int, shape: tuple[int, int], *parts: bytes, name: str = "") -> bytes:
    flags = element(6, struct.pack("<II", kind, 0))
    named = element(1, name.encode())
    return element(14, flags + element(5, struct.pack("<ii", *shape)) + named + b"".join(parts))


def cell(value: float | str) -> bytes:
    if isinstance(value, str):
        return matrix(4, (1, len(value)), element(4, value.encode("utf-16-le")))
    return matrix(
        6,
        (1, 1),
        element(2, bytes([int(value)])) if value < 256 else element(9, struct.pack("<d", value)),
    )


def meta_mat(ids: Mapping[int, str]) -> bytes:
    names = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images"
    rows: list[list[float | str]] = [[i, w, "words, é", "", 0, 0, 0, 1300] for i, w in ids.items()]
    rows.append([len(ids) + 1, PARENT, "entity", "gloss", len(ids), 1, 9, 0])
    fields = b"".join(name.encode().ljust(32, b"\0") for name in names.split())
    cells = b"".join(cell(value) for row in rows for value in row)
    parts = element(5, struct.pack("<i", 32)), element(1, fields), cells
    array = zlib.compress(matrix(2, (len(rows), 1), *parts, name="synsets"))
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49)
    return header + struct.pack("<II", 15, len(array)) + array


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


def kaggle_inside(root: Path) -> Path:
    """SOURCE is the folder that holds train and val, below that of the labels."""
    return kaggle(root) / "ILSVRC" / "Data" / "CLS-LOC"


def kaggle_zip(root: Path) -> Path:
    root.mkdir()
    return zipped(root / "imagenet-object-localization-challenge.zip", kaggle_files())


def folders(root: Path) -> Path:
    return write(root, {**EXPECTED, "readme.txt": "text", "train/n02119789/notes.md": "text"})


def folders_in_a_tar(root: Path) -> Path:
    members = {f"./imagenet/{name}": data for name, data in EXPECTED.items()}
    return write(root, {"all.tar": tar(members)}) / "all.tar"


def one_tar_in_a_folder(root: Path) -> Path:
    return folders_in_a_tar(root).parent


def a_tar_that_names_a_split(root: Path) -> Path:
    return write(root, {"mydata-train.tar": tar({**EXPECTED, "README.txt": "text"})})


def containers(root: Path) -> Path:
    return write(root, {"train.tar": tar({**TRAIN, "a.txt": "text"}), "val.tar": tar(VAL_FILES)})


def zip_files(root: Path) -> Path:
    root.mkdir()
    for name, files in (("train", TRAIN), ("val", VAL_FILES)):
        zipped(root / f"{name}.zip", files)
    return root


def kaggle_zip_in_a_folder(root: Path) -> Path:
    return kaggle_zip(root).parent


def zip_and_tar(root: Path) -> Path:
    root.mkdir()
    zipped(root / "val.zip", VAL_FILES)
    return write(root, {"train.tar": tar(TRAIN)})


def shards(root: Path) -> Path:
    """WebDataset shards; the labels are numbers in the order of the classes."""
    numbers = {wnid: str(i) for i, wnid in enumerate(sorted(IDS.values()))}
    parts: dict[str, dict[str, bytes | str]] = {}
    for i, (name, data) in enumerate(EXPECTED.items()):
        split, wnid, file = name.split("/")
        key = file.removesuffix(".JPEG") + (f"_{wnid}" if split == "val" else "")
        label = ("cls", numbers[wnid]) if i % 2 else ("json", json.dumps({"label": numbers[wnid]}))
        shard = f"imagenet-{'validation' if split == 'val' else 'train'}-{i % 2:04d}.tar"
        parts.setdefault(shard, {}).update({f"{key}.jpeg": data, f"{key}.{label[0]}": label[1]})
    return write(root, {shard: tar(files) for shard, files in parts.items()})


def lists(root: Path) -> Path:
    """train.csv with a header, val.txt without, and images elsewhere."""
    rows = {"train": "path,label,note\n", "val": ""}
    for name in EXPECTED:
        split, wnid, file = name.split("/")
        comma = "," if split == "train" else " "
        rows[split] += f"all images/{file}{comma}{wnid}{',x' if comma == ',' else ''}\n"
    images = {f"all images/{name.split('/')[2]}": data for name, data in EXPECTED.items()}
    return write(root, {**images, "train.csv": rows["train"], "val.txt": rows["val"]})


def one_list(root: Path) -> Path:
    rows = [f"../images/{n.split('/')[2]}\t{n.split('/')[1]}\t{n.split('/')[0]}" for n in EXPECTED]
    text = "\n".join(["filename\tlabel\tsplit", *rows])
    images = {f"images/{name.split('/')[2]}": data for name, data in EXPECTED.items()}
    return write(root, {**images, "lists/all.tsv": text}) / "lists" / "all.tsv"


SOURCES = {
    source.__name__: source
    for source in (
        official,
        kaggle,
        kaggle_inside,
        kaggle_zip,
        folders,
        folders_in_a_tar,
        one_tar_in_a_folder,
        a_tar_that_names_a_split,
        containers,
        zip_files,
        kaggle_zip_in_a_folder,
        zip_and_tar,
        lists,
        one_list,
    )
}


def laid_out(to: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(to)): p.read_bytes()
        for p in sorted(to.rglob("*"))
        if p.is_file() and p.parent != to
    }


def members(to: Path, kind: str) -> dict[str, bytes]:
    found = {}
    for split in ("train", "val"):
        shutil.unpack_archive(to / f"{split}.{kind}", folder := to / f"unpacked-{split}")
        found |= {
            f"{split}/{p.relative_to(folder)}": p.read_bytes()
            for p in folder.rglob("*")
            if p.is_file()
        }
        shutil.rmtree(folder)
    return found


def run(source: Path, to: Path, *options: str) -> int:
    return prepare.main(prepare.arguments([str(source), "--to", str(to), *options]))


def names(source: Path, **options: Any) -> list[str]:
    return ["/".join(sample[:3]) for sample in recognise(str(source), **options).samples]


@pytest.fixture(autouse=True)
def _stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """main() changes standard output, which pytest replaces."""
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)


# Every format.


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_format_gives_the_same_folders(tmp_path: Path, source: Source) -> None:
    to = tmp_path / "new" / "to"
    assert run(source(tmp_path / "source"), to) == 0
    assert laid_out(to) == EXPECTED
    assert sorted(os.listdir(to)) == ["prepare.json", "train", "val"]
    report = json.loads((to / "prepare.json").read_text())
    assert (report["classes"], report["images"], report["unreadable"]) == (3, 12, 0)
    assert report["settings"]["images"] == {"train": 6, "val": 6}
    index = load_index(to / "train", key="data.root")
    assert index.classes == tuple(sorted(IDS.values()))


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("source", [official, kaggle_zip, lists])
def test_containers(tmp_path: Path, source: Source, kind: str) -> None:
    to = tmp_path / "to"
    assert run(source(tmp_path / "source"), to, "--format", kind) == 0
    assert sorted(os.listdir(to)) == sorted([f"train.{kind}", "prepare.json", f"val.{kind}"])
    assert members(to, kind) == EXPECTED
    same = write(tmp_path / "folders", EXPECTED)
    first, second = (load_index(root / "train", key="data.root") for root in (to, same))
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_order_is_by_split_class_and_name(tmp_path: Path, source: Source) -> None:
    assert names(source(tmp_path / "source")) == sorted(EXPECTED)


def test_webdataset_shards(tmp_path: Path) -> None:
    """The names are the keys; wherever these contain WordNet ids, they replace the numbers."""
    to = tmp_path / "to"
    assert run(shards(tmp_path / "source"), to) == 0
    expected = {}
    for name, data in EXPECTED.items():
        split, wnid, file = name.split("/")
        suffix = f"_{wnid}" if split == "val" else ""
        expected[f"{split}/{wnid}/{file.removesuffix('.JPEG')}{suffix}.jpeg"] = data
    assert laid_out(to) == expected


def test_numbers_as_labels_keep_their_order(tmp_path: Path) -> None:
    """As strings, 10 comes before 9. Shards may count their keys from 0 each."""
    parts = {
        f"data-{split}-{shard}.tar": tar(
            {
                f"{i}.{e}": jpeg(i) if e == "jpg" else f" {i}\n"
                for i in (9, 10)
                for e in ("jpg", "cls")
            }
        )
        for split in ("train", "test")
        for shard in range(2)
    }
    layout = recognise(str(write(tmp_path / "source", parts)))
    assert ["/".join(s[:3]) for s in layout.samples] == [
        f"{split}/{label}/data-{word}-{shard}_{int(label)}.jpg"
        for split, word in (("train", "train"), ("val", "test"))
        for label in ("09", "10")
        for shard in range(2)
    ]
    assert layout.notes == ["The test split is the validation split."]


def test_a_text_label_is_a_class(tmp_path: Path) -> None:
    files = {
        f"{i}.{e}": jpeg(i) if e == "png" else "a/b" * (i % 2) + "cat"
        for i in range(4)
        for e in ("png", "txt")
    }
    write(tmp_path, {"train.tar": tar(files), "val.tar": tar(files)})
    labels = {sample.label for sample in recognise(str(tmp_path)).samples}
    assert labels == {"cat", "a_bcat"}


def test_a_list_is_called_as_a_split(tmp_path: Path) -> None:
    """Other text files that name a split do not hide the class folders."""
    source = classes_only(tmp_path, {"cat": 2, "dog": 2})
    write(source, {"train_notes.txt": "text", "train-labels.csv": "path,label\n"})
    assert recognise(str(source)).kind == "class folders"


def with_links(files: dict[str, bytes], links: dict[str, tuple[bytes, str]]) -> bytes:
    """Return a tar file: name -> kind of a link and where it leads."""
    buffer = io.BytesIO(tar(files))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        for name, (kind, target) in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return buffer.getvalue()


def test_links_in_tar_files_are_images(tmp_path: Path) -> None:
    first = next(iter(TRAIN))
    links = {
        "n02119789/hard.JPEG": (tarfile.LNKTYPE, first),
        "n02119789/soft.JPEG": (tarfile.SYMTYPE, f"../{first}"),
    }
    write(tmp_path, {"train.tar": with_links(TRAIN, links), "val.tar": tar(VAL_FILES)})
    assert run(tmp_path, tmp_path.with_name("to")) == 0
    linked = {f"train/{name}": TRAIN[first] for name in links}
    assert laid_out(tmp_path.with_name("to")) == EXPECTED | linked


def test_links_in_the_official_tar_files_are_images(tmp_path: Path) -> None:
    """The tar file of a class starts inside that of all classes."""
    source = official(tmp_path)
    inner = {
        f"{wnid}.tar": with_links(
            {f"{wnid}_1.JPEG": jpeg(n)}, {f"{wnid}_2.JPEG": (tarfile.LNKTYPE, f"{wnid}_1.JPEG")}
        )
        for n, wnid in enumerate(IDS.values())
    }
    write(source, {"ILSVRC2012_img_train.tar": tar(inner)})
    layout = recognise(str(source))
    found = {(s.label, s.name): read_place(s.place) for s in layout.samples if s.split == "train"}
    assert found == {
        (wnid, f"{wnid}_{i}.JPEG"): jpeg(n) for n, wnid in enumerate(IDS.values()) for i in (1, 2)
    }


def test_a_link_out_of_a_tar_file_is_refused(tmp_path: Path) -> None:
    links = {"a/x.jpg": (tarfile.SYMTYPE, "/data/x.jpg")}
    write(tmp_path, {"all.tar": with_links(IMAGES, links)})
    message = "a/x.jpg is a link to /data/x.jpg, which is not in it; pack it again with tar --deref"
    assert f"all.tar: {message}" in refused(tmp_path)


# Parquet.


def parquet(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table(columns)
    if features:
        stored = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": stored})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)


def label_feature(*classes: str) -> dict[str, Any]:
    return {
        "image": {"_type": "Image"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
    }


def hugging_face(root: Path) -> Path:
    """imagenet-1k: the names of the files contain WordNet ids, those of the classes do not."""
    wnids = sorted(IDS.values())
    order = list(EXPECTED)[::-1]
    features = label_feature("goldfish, Carassius auratus", "English setter", "kit fox")
    for split, word in (("train", "train"), ("val", "validation")):
        rows = [name.split("/") for name in order if name.startswith(split)]
        images = [
            {"bytes": EXPECTED["/".join(r)], "path": f"{Path(r[2]).stem}_{r[1]}.JPEG"} for r in rows
        ]
        labels = [wnids.index(r[1]) for r in rows]
        parquet(
            root / f"data/{word}-00000-of-00001.parquet",
            {"image": images, "label": labels},
            features,
        )
    hidden = {"image": [images[0]], "label": [-1]}
    parquet(root / "data/test-00000-of-00001.parquet", hidden, features)
    return write(root, {"README.md": "text", ".cache/huggingface/x.parquet": "no"})


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_parquet_of_hugging_face(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pyarrow")
    to = tmp_path / "to"
    assert run(hugging_face(tmp_path / "source"), to, "--format", kind) == 0
    found = laid_out(to) if kind == "folder" else members(to, kind)
    assert found == {
        f"{Path(name).parent}/{Path(name).stem}_{Path(name).parent.name}.JPEG": data
        for name, data in EXPECTED.items()
    }


def test_parquet_with_names_of_classes_but_not_of_files(tmp_path: Path) -> None:
    """CIFAR-10: images without a path, a test split, and a column of another name."""
    images = [{"bytes": jpeg(i), "path": None} for i in range(4)]
    features = {"img": {"_type": "Image"}, "label": label_feature("tench", "cat/dog")["label"]}
    for split in ("train", "test"):
        columns = {"img": images, "label": [1, 0, 0, 1]}
        parquet(tmp_path / "plain_text" / f"{split}-00000-of-00001.parquet", columns, features)
    to = tmp_path / "to"
    assert run(tmp_path / "plain_text", to) == 0
    assert laid_out(to) == {
        f"{split}/{label}/{word}-00000-of-00001-{row:06d}_image.jpeg": jpeg(row)
        for split, word in (("train", "train"), ("val", "test"))
        for row, label in enumerate(("cat_dog", "tench", "tench", "cat_dog"))
    }


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"train.parquet": b"PAR1"})
    with pytest.raises(UserError, match=r"run pip install pyarrow and start again$"):
        recognise(str(tmp_path))


def test_damaged_and_unclear_parquet(tmp_path: Path) -> None:
    source = hugging_face(tmp_path / "source")
    path = next(source.rglob("train*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=rf"^{path}: is damaged or incomplete \("):
        recognise(str(source))
    path.write_bytes(whole)
    parquet(source / "320px" / "train-0.parquet", {"image": [b""], "label": [0]})
    with pytest.raises(UserError, match=r"several datasets \(320px, data\); give the folder of"):
        recognise(str(source))
    parquet(tmp_path / "x.parquet", {"image": [b""], "caption": ["a"]})
    with pytest.raises(UserError, match=r"no column of labels, only image, caption; write files"):
        recognise(str(tmp_path / "x.parquet"))


# A split.


def classes_only(root: Path, counts: Mapping[str, int]) -> Path:
    return write(root, {f"{c}/{i:02d}.jpg": jpeg(i) for c, n in counts.items() for i in range(n)})


def test_a_split_is_stratified_and_seeded(tmp_path: Path) -> None:
    source = classes_only(tmp_path / "source", {"train set": 2, "b": 20, "c": 35})
    layout = recognise(str(source), val_fraction=0.2)
    count = {
        (split, label): sum(s.split == split and s.label == label for s in layout.samples)
        for split in ("train", "val")
        for label in ("train set", "b", "c")
    }
    assert list(count.values()) == [1, 16, 28, 1, 4, 7]
    assert recognise(str(source), val_fraction=0.2) == layout
    assert recognise(str(source), val_fraction=0.2, seed=1).samples != layout.samples
    shutil.rmtree(source / "c")  # the other classes keep their split
    assert recognise(str(source), val_fraction=0.2).samples == [
        sample for sample in layout.samples if sample.label != "c"
    ]
    assert sum(name.startswith("val") for name in names(source)) == 1 + 2


def test_the_split_is_that_of_data_val_fraction(tmp_path: Path) -> None:
    source = classes_only(tmp_path / "source", {"a": 12, "b": 20})
    assert run(source, tmp_path / "to", "--val-fraction", "0.25") == 0
    _, prepared = load_splits(Data(root=str(tmp_path / "to")))
    _, held_out = load_splits(Data(root=str(source), val_fraction=0.25))
    assert prepared.fingerprint() == held_out.fingerprint()


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    source = classes_only(tmp_path / "source", {"train": 4, "bus": 4, "test": 4})
    labels = {sample.label for sample in recognise(str(source)).samples}
    assert labels == {"train", "bus", "test"}


def test_test_images_without_classes_are_left_out(tmp_path: Path) -> None:
    files = {f"train/{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(2)}
    layout = recognise(str(write(tmp_path, {**files, "test/1.jpg": jpeg(9)})))
    assert len(layout.samples) == 4 and {s.split for s in layout.samples} == {"train", "val"}
    assert (
        layout.notes[0]
        == "Images outside train/<class>/, val/<class>/ and test/<class>/ were left out: 1."
    )


def test_the_split_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = classes_only(tmp_path / "source", {"a": 10, "b": 10})
    assert run(source, tmp_path / "to", "--seed", "3") == 0
    note = "10% of the images of each class became the validation split (seed 3)."
    assert note in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run(source, tmp_path / "to", "--seed", "4")
    assert "started with other settings" in capsys.readouterr().err


# Labels of the validation images.


def labels_of(folder: Path) -> dict[str, str]:
    return imagenet.flat_labels(str(folder), tree_of_folder(str(folder)))


def test_the_labels_of_ilsvrc2012_are_known(tmp_path: Path) -> None:
    """A kit with 1,000 classes must give the published labels: another order is refused."""
    others = iter(f"n{i:08d}" for i in range(2, 2000))
    ids = {i: next(others) for i in range(1, 1001)}
    first = dict(zip([490, 361, 171, 822, 297], imagenet.FIRST_LABELS, strict=True))
    ids |= first
    truth = [*first, *(i for i in ids for _ in range(50 - (i in first)))]
    kit = write(tmp_path, {"ILSVRC2012_devkit_t12.tar.gz": devkit(ids, truth)})
    labels = labels_of(kit)
    assert labels["ILSVRC2012_val_00000003.JPEG"] == "n02105855" and len(labels) == 50_000
    by_wnid = dict(enumerate(sorted(ids.values()), 1))  # the mistake that people make
    write(kit, {"ILSVRC2012_devkit_t12.tar.gz": devkit(by_wnid, truth)})
    with pytest.raises(UserError, match=r"these are not the labels of ILSVRC2012\); download"):
        labels_of(kit)


def test_two_sources_of_labels_must_agree(tmp_path: Path) -> None:
    source = official(tmp_path)
    write(source, {"LOC_val_solution.csv": SOLUTION})
    assert names(source) == sorted(EXPECTED)
    lines = SOLUTION.splitlines(keepends=True)
    wrong = "".join([lines[0], lines[1].replace(IDS[2], IDS[1]), *lines[2:]])
    write(source, {"LOC_val_solution.csv": wrong})
    with pytest.raises(UserError, match=r"contain different labels; remove the wrong file$"):
        recognise(str(source))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ILSVRC2012_devkit_t12.tar.gz": None}, "the labels of the validation images are missing"),
        ({"ILSVRC2012_img_val.tar": None}, r"ILSVRC2012_img_val\.tar is missing"),
        ({"ILSVRC2012_devkit_t12.tar.gz": devkit()[:300]}, r"devkit_t12\.tar\.gz: is damaged"),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": devkit(truth=[3, 1, 2, 2, 3, 3])},
            "the classes do not have the same number of validation images",
        ),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": devkit(truth=VAL * 2)},
            r"validation image ILSVRC2012_val_00000007\.JPEG and 5 more is missing",
        ),
        (
            {"ILSVRC2012_devkit_t12.tar.gz": devkit({**IDS, 3: "n01443538"})},
            "only train has images of n01443537, val has none",
        ),
        (
            {"ILSVRC2012_img_val.tar": tar({**FLAT, "ILSVRC2012_val_00000007.JPEG": jpeg(7)})},
            r"validation image ILSVRC2012_val_00000007\.JPEG has no label",
        ),
        (
            {"ILSVRC2012_img_val.tar": tar(FLAT)[: 512 * 3]},
            r"ILSVRC2012_img_val\.tar: is damaged or incomplete",
        ),
    ],
)
def test_incomplete_official_files(
    tmp_path: Path, files: dict[str, bytes | None], message: str
) -> None:
    source = official(tmp_path / "source")
    for name, data in files.items():
        (source / name).unlink()
        if data:
            write(source, {name: data})
    with pytest.raises(UserError, match=message):
        recognise(str(source))


@pytest.mark.parametrize("kept", [0, 300, 5_000, 0.5, 0.9, -512, -2048])
def test_a_cut_training_tar_is_named(tmp_path: Path, kept: float) -> None:
    source = official(tmp_path / "source")
    path = source / "ILSVRC2012_img_train.tar"
    data = path.read_bytes().rstrip(b"\0") + bytes(2048)
    path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    if kept != -512:  # the second of the two blocks that end a tar file does not matter
        with pytest.raises(UserError, match=rf"^{path}: "):
            recognise(str(source))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ImageId,PredictionString\n", ""),
        ("n02119789 5 6 7 8", "n02100735 5 6 7 8"),
        ("n02119789 1 2 3 4 n02119789", "fox 1 2 3 4 fox"),
        ("ILSVRC2012_val_00000001,", "ILSVRC2012_val_00000002,"),
    ],
)
def test_a_damaged_solution(tmp_path: Path, old: str, new: str) -> None:
    source = kaggle(tmp_path)
    assert old in SOLUTION
    write(source, {"LOC_val_solution.csv": SOLUTION.replace(old, new, 1)})
    with pytest.raises(UserError, match=r"LOC_val_solution\.csv: is damaged or incomplete \("):
        recognise(str(source))


# Resumed runs.


def links(to: Path) -> dict[str, int]:
    return {str(p.relative_to(to)): p.stat().st_nlink for p in to.rglob("*.JPEG")}


def test_files_are_linked_and_not_copied(tmp_path: Path) -> None:
    source, to = kaggle(tmp_path / "source"), tmp_path / "to"
    assert run(source, to) == 0
    assert set(links(to).values()) == {2}
    report = json.loads((to / "prepare.json").read_text())
    assert (report["linked"], report["copied"], report["bytes_copied"]) == (12, 0, 0)


def test_files_are_copied_to_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    source, to = kaggle(tmp_path / "source"), tmp_path / "to"
    assert run(source, to) == 0
    assert laid_out(to) == EXPECTED and set(links(to).values()) == {1}
    report = json.loads((to / "prepare.json").read_text())
    assert report["bytes_copied"] == sum(map(len, EXPECTED.values()))


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
@pytest.mark.parametrize("source", [official, folders])
def test_a_run_that_was_killed_at_any_image_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, kind: str
) -> None:
    original = prepare.count
    where = source(tmp_path / "source")
    for killed_at in (0, 5, 11):
        done = 0

        def kill(*arguments: Any, killed_at: int = killed_at) -> None:
            nonlocal done
            done += 1
            if done > killed_at:
                raise SystemExit  # nothing is cleaned up on purpose
            original(*arguments)

        to = tmp_path / f"to{killed_at}"
        monkeypatch.setattr(prepare, "count", kill)
        with pytest.raises(SystemExit):
            run(where, to, "--format", kind)
        monkeypatch.setattr(prepare, "count", original)
        if kind == "folder":
            first = min(to.rglob("*.JPEG"))
            first.unlink()
            first.write_bytes(b"")  # as left by a power failure
            (first.parent / ".unfinished-1-1.tmp").write_bytes(b"half")
        assert run(where, to, "--format", kind) == 0
        assert (laid_out(to) if kind == "folder" else members(to, kind)) == EXPECTED
        report = json.loads((to / "prepare.json").read_text())
        assert report["done_earlier"] >= killed_at - (kind == "folder")
        assert run(where, to, "--format", kind) == 0
        assert json.loads((to / "prepare.json").read_text())["done_earlier"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_a_killed_process_resumes(tmp_path: Path, kind: str) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    data = jpeg(0) + bytes(900)
    files = {f"train/{i % 7}/{i:05d}.jpg": data for i in range(8_000)}
    files |= {f"val/{i}/0.jpg": data for i in range(7)}
    write(source, {"train.tar": tar({n[6:]: d for n, d in files.items() if n[0] == "t"})})
    write(source, {"val.tar": tar({n[4:]: d for n, d in files.items() if n[0] == "v"})})
    command = [sys.executable, "scripts/prepare.py", source, "--to", to, "--format", kind]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and len(list(to.rglob("*"))) < (500 if kind == "folder" else 2):
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (laid_out(to) if kind == "folder" else members(to, kind)) == files
    assert 0 < json.loads((to / "prepare.json").read_text())["done_earlier"] < 8_007


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_unreadable_images_are_listed_and_can_be_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    broken = list(EXPECTED)[:3]
    for name, data in zip(broken, (b"", EXPECTED[broken[1]][:-400], b"<html>404"), strict=True):
        (source / name).write_bytes(data)
    assert run(source, to, "--format", kind) == 1
    expected = {name: data for name, data in EXPECTED.items() if name not in broken}
    assert (laid_out(to) if kind == "folder" else members(to, kind)) == expected
    listed = (to / "unreadable.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == sorted(broken)
    assert f"unreadable: {broken[1]}: OSError: " in capsys.readouterr().out
    folders(source)
    assert run(source, to, "--format", kind) == 0
    assert (laid_out(to) if kind == "folder" else members(to, kind)) == EXPECTED
    assert not (to / "unreadable.txt").exists()


def test_a_full_disk_ends_the_run_and_the_next_one_continues(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file_size_limit: Callable[[int], Any],
) -> None:
    source, to = official(tmp_path / "source"), tmp_path / "to"
    with file_size_limit(5_000):
        assert run(source, to, "--format", "tar") == 1
    error = capsys.readouterr().err
    assert error.endswith("File too large; run the same command again to resume\n")
    assert not (to / "train.tar").exists()
    assert run(source, to, "--format", "tar") == 0
    assert members(to, "tar") == EXPECTED


# Refused input.


def refused(source: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        recognise(str(source), **options)
    assert "\n" not in str(error.value) and str(source) in str(error.value)
    return str(error.value)


def test_several_formats_are_named(tmp_path: Path) -> None:
    source = containers(official(tmp_path))
    message = refused(source)
    assert (
        "ImageNet's official tar files (ILSVRC2012_img_train.tar) and tar files (train.tar)"
        in message
    )
    source = lists(folders(tmp_path / "two"))
    assert "holds lists (train.csv) and class folders (train/" in refused(source)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "not a dataset that prepare.py knows; give ImageNet's"),
        ({"imagenet.zip": b"PK"}, r"imagenet\.zip: is damaged or incomplete"),
        ({"a.tar": tar({"train.parquet": b"PAR1"})}, "contains train.parquet; unpack it and give"),
        ({"notes.md": "text"}, "not a dataset that prepare.py knows"),
        ({"a.jpg": jpeg(1), "b/b.jpg": jpeg(1)}, "a.jpg is not in a class folder"),
        ({"a/1.jpg": jpeg(1), "a/2.jpg": jpeg(1)}, "all images have the class a; a classifier"),
        ({"a/1.jpg": jpeg(1), "b/1.jpg": jpeg(1)}, "class a has one image"),
        (
            {"train/a/1.jpg": jpeg(1), "train/b/1.jpg": jpeg(1), "val/a/1.jpg": jpeg(1)},
            "only train has images of b, val has none",
        ),
        (
            {"train/a/1.jpg": jpeg(1), "val/images/1.jpg": jpeg(1)},
            "only train has images of a, val has none",
        ),
        (
            {"train/a/1.jpg": jpeg(1), "train/b/1.jpg": jpeg(1), "val/1.jpg": jpeg(1)},
            "1.jpg is not in a class folder; move it into one",
        ),
        (
            {"val/a/1.jpg": jpeg(1), "val/b/1.jpg": jpeg(1), "test/a/1.jpg": jpeg(1)},
            "there is no training split, only ",
        ),
        ({"train.csv": "x.jpg,a\n"}, "line 1: .*x.jpg: no such file"),
        ({"train.csv": "x.jpg\n"}, "line 1 is not a path and a label"),
        ({"train.csv": "x.jpg,a\nx.jpg,b\n", "x.jpg": jpeg(1)}, "lines 1 and 2 are about the"),
        ({"val.tar": tar({"a.jpg": jpeg(1), "a.cls": "1"})}, "no training split, only val"),
        (
            {"train.tar": tar({f"{n}.jpg": jpeg(1) for n in "ab"} | {"b.cls": "1"})},
            "a has no label; add a.cls",
        ),
        ({"train.tar": tar({"a.jpg": jpeg(1), "a.json": "{}"})}, "a.json contains no label"),
        ({"train.tar.gz": tar({"a/a.jpg": jpeg(1)}, "w:gz")}, "is compressed; run gunzip"),
        ({"train.tar": b"no tar"}, "is damaged or incomplete"),
        ({"train-0.tar": b"", "more.tar": b""}, "more.tar: the name does not contain train or"),
        (
            {"a/1.tar": tar({}), "b/train.tar": tar({})},
            r"several datasets \(a, b\); give the folder of one",
        ),
        (
            {"train.tsv": "file\tlabel\tsplit\nx.jpg\ta\tother", "x.jpg": jpeg(1)},
            "line 2: the split is not train, val or test",
        ),
    ],
)
def test_what_is_wrong_and_what_to_do(
    tmp_path: Path, files: dict[str, bytes | str], message: str
) -> None:
    source = write(tmp_path / "source", files)
    source.mkdir(exist_ok=True)
    with pytest.raises(UserError, match=message):
        recognise(str(source))


def test_a_fraction_for_data_with_a_validation_split(tmp_path: Path) -> None:
    message = refused(folders(tmp_path), val_fraction=0.1)
    assert message.endswith("has a validation split; leave out --val-fraction")


def test_a_member_outside_the_class_folders_is_not_written(tmp_path: Path) -> None:
    evil = {"../../evil/x.jpg": jpeg(1), "/absolute/x.jpg": jpeg(2), "a/../../b/x.jpg": jpeg(3)}
    write(
        tmp_path / "source",
        {
            "train.tar": tar({**TRAIN, **evil}),
            "val.tar": tar({**VAL_FILES, "absolute/y.jpg": jpeg(2)}),
        },
    )
    assert run(tmp_path / "source", tmp_path / "to") == 0
    expected = EXPECTED | {"train/absolute/x.jpg": jpeg(2), "val/absolute/y.jpg": jpeg(2)}
    assert laid_out(tmp_path / "to") == expected
    assert sorted(os.listdir(tmp_path)) == ["source", "to"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (("train_images", "val_images"), "train_images/ holds folders and looks like a split"),
        (("train", "my-val"), "my-val/ holds folders and looks like a split; rename it to train/"),
    ],
)
def test_splits_do_not_become_classes(
    tmp_path: Path, splits: tuple[str, ...], message: str
) -> None:
    files = {f"{split}/{name}": data for split in splits for name, data in IMAGES.items()}
    assert message in refused(write(tmp_path / "folder", files))
    write(tmp_path / "tar", {"photos.tar": tar(files)})
    assert message in refused(tmp_path / "tar")


def test_splits_in_several_files_do_not_become_classes(tmp_path: Path) -> None:
    files = tar({f"{split}/{n}": d for split in ("train", "val") for n, d in IMAGES.items()})
    write(tmp_path, {"part-0.tar": files, "part-1.tar": files})
    assert "part-0.tar: holds the split train/, but not all splits; put train/" in refused(tmp_path)


def test_an_encrypted_zip_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zipped(tmp_path / "all.zip", IMAGES)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1  # the flags of the first member
    path.write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        run(path, tmp_path / "to")
    message = "a/0.jpg is encrypted; unpack the file with its password and give the folder"
    assert capsys.readouterr().err == f"prepare.py: {path}: {message}\n"
    assert os.listdir(tmp_path) == ["all.zip"]


def test_a_zip_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "all.zip", IMAGES)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 6] = 248  # the version that is needed to extract
    path.write_bytes(data)
    assert "is damaged or incomplete (zip file version 24.8)" in refused(path)


@pytest.mark.parametrize("header", ["path,width,label", "label,path", "split,class,x,file_name"])
def test_a_header_names_the_columns(tmp_path: Path, header: str) -> None:
    values = {"width": "3", "x": "", "split": "train"}
    rows = [
        ",".join(
            name if column in ("path", "file_name") else values.get(column, name[0])
            for column in header.split(",")
        )
        for name in IMAGES
    ]
    write(tmp_path, {**IMAGES, "list.csv": "\n".join([header, *rows])})
    layout = tables.read_list(str(tmp_path / "list.csv"), "train")
    assert ["/".join((sample.label, sample.name)) for sample in layout] == [
        f"{name[0]}/{name}" for name in IMAGES
    ]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("path,width", "list.csv: line 1 names no column of labels; write path,label"),
        ("img,label", "list.csv: line 1 names no column of paths; write path,label"),
        ("path,label,class", "line 1 names several columns of labels (label, class); keep one"),
        ("image_id,label,path", "line 1 names several columns of paths (image_id, path); keep one"),
    ],
)
def test_an_unclear_header_is_refused(tmp_path: Path, header: str, message: str) -> None:
    write(tmp_path, {**IMAGES, "list.csv": f"{header}\na/0.jpg,a\nb/0.jpg,b\n"})
    assert message in refused(tmp_path / "list.csv")


def test_the_label_of_a_list_may_be_the_word_image(tmp_path: Path) -> None:
    write(tmp_path, {**IMAGES, "list.csv": "a/0.jpg,image\na/1.jpg,image\n"})
    samples = tables.read_list(str(tmp_path / "list.csv"), "train")
    assert [sample.label for sample in samples] == ["image", "image"]


def test_labels_that_are_the_same_number_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {**IMAGES, "list.csv": "a/0.jpg,3\na/1.jpg,03\nb/0.jpg,4\n"})
    assert "the labels 3 and 03 are the same number; write one" in refused(tmp_path / "list.csv")


@pytest.mark.parametrize("name", [f"{'é' * 128}/0.jpg", f"a/{'x' * 252}.jpg"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    files = {**IMAGES, name: jpeg(1), f"{Path(name).parent}/1.jpg": jpeg(2)}
    assert " has more than 255 bytes; make it shorter" in refused(zipped(tmp_path / "x.zip", files))


def test_class_names_need_not_be_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    files = {f"{name}/{i}.jpg": jpeg(i) for i in range(2)}
    layout = recognise(str(write(tmp_path, {**IMAGES, **files})))
    assert {sample.label for sample in layout.samples} == {"a", "b", name}


def test_only_files_are_listed(tmp_path: Path) -> None:
    """Opening a FIFO would wait for ever. A broken link is listed: its image is missing."""
    source = write(tmp_path, IMAGES)
    os.mkfifo(source / "a" / "fifo.jpg")
    (source / "a" / "link to a fifo.jpg").symlink_to("fifo.jpg")
    (source / "a" / "broken.jpg").symlink_to("none")
    (source / "c").symlink_to("b")
    (source / "loop").symlink_to(".")
    assert list(tree_of_folder(str(source))) == [
        "a/0.jpg",
        "a/1.jpg",
        "a/broken.jpg",
        *list(IMAGES)[2:],
    ]


def test_a_zip_member_cannot_leave_the_destination(tmp_path: Path) -> None:
    files = {
        f"{split}/{c}/{i}.jpg": jpeg(i)
        for split in ("train", "val")
        for c in "ab"
        for i in range(2)
    }
    outside = tmp_path / "outside"
    evil = {f"train/a/{outside}/x.jpg": jpeg(2), f"train/a/../../../{outside}/y.jpg": jpeg(3)}
    source = zipped(tmp_path / "all.zip", {f"./{n}": d for n, d in files.items()} | evil)
    to = tmp_path / "to"
    assert run(source, to) == 0
    assert laid_out(to) == files | {f"train/a/{outside.relative_to('/')}/x.jpg": jpeg(2)}
    assert not outside.exists()


@pytest.mark.parametrize("name", ["../x.jpg", "a/../../x.jpg", "/tmp/x.jpg"])
def test_no_image_is_written_outside_its_class_folder(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, {"x.jpg": jpeg(1)}) / "x.jpg"
    sample = Sample("train", "a", name, Place(str(source)))
    layout = Layout("test", [sample], read_place)
    made = prepare.make_folder_image(layout, str(tmp_path / "to"), sample)
    assert made.problem == "its name leads out of its class folder; rename it"
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["{s}"],
        ["{s}", "--to"],
        ["{s}", "--to", "{to}", "--format", "rar"],
        ["{s}", "--to", "{to}", "--val-fraction", "1"],
        ["{s}", "--to", "{to}", "--val-fraction", "many"],
        ["{s}", "--to", "{to}", "--fromat", "tar"],
        ["{s}", "{s}", "--to", "{to}"],
    ],
)
def test_wrong_arguments(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+[:;] [^\n]+$"):
        prepare.arguments([w.format(s=tmp_path, to=tmp_path / "to") for w in words])


@pytest.mark.parametrize("place", [".", "new", "train/x", ".."])
def test_a_destination_in_the_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    source = folders(tmp_path / "source")
    with pytest.raises(SystemExit, match="2"):
        run(source, source / place)
    assert "contain each other; give another folder" in capsys.readouterr().err
    assert laid_out(source).keys() == EXPECTED.keys() | {"train/n02119789/notes.md"}


def test_a_destination_with_other_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = folders(tmp_path / "source"), write(tmp_path / "to", {"train/mine.jpg": b"mine"})
    with pytest.raises(SystemExit, match="2"):
        run(source, to)
    assert capsys.readouterr().err == (
        f"prepare.py: --to {to}: contains other files (train); give a new or an empty folder\n"
    )
    assert laid_out(to) == {"train/mine.jpg": b"mine"}


def test_another_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, to = folders(tmp_path / "source"), tmp_path / "to"
    assert run(source, to) == 0
    write(source, {"val/n02119789/new.jpg": jpeg(1)})
    with pytest.raises(SystemExit, match="2"):
        run(source, to)
    error = capsys.readouterr().err
    assert "images {'train': 6, 'val': 6}, not {'train': 6, 'val': 7}" in error
    assert laid_out(to) == EXPECTED


def test_the_command_line(tmp_path: Path) -> None:
    """As a user types it, and with a mistake."""
    command = [sys.executable, "scripts/prepare.py", tmp_path / "none", "--to", tmp_path / "to"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "no such file or folder; give" in done.stderr
    assert not (tmp_path / "to").exists()
    command[2] = folders(tmp_path / "source")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"train with: python train.py data.root={tmp_path / 'to'}" in done.stdout
    assert laid_out(tmp_path / "to") == EXPECTED
