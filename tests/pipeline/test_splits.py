"""Which images are the splits: data.classes, data.val_fraction, data.val_fold, several roots."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from conf import cli
from conf.schema import Config, Data, UserError
from pipeline.build import build_datasets, build_val
from pipeline.index import Index, load_index
from pipeline.splits import chosen, load_splits
from tests.small_run import SMALL
from tests.stored import as_shards, as_tar, as_zip


def splits(root: object, **keys: object) -> tuple[Index, Index]:
    roots = [str(each) for each in root] if isinstance(root, list) else str(root)
    return load_splits(Data(root=roots, **keys))  # type: ignore[arg-type]


def samples(index: Index) -> list[tuple[str, str]]:
    """(class, name) of every sample."""
    labels = index.labels.array.tolist()
    return [(index.classes[labels[i]], index.name(i)) for i in range(len(index))]


def refusal(root: object, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        splits(root, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config(root: Path, *overrides: str) -> Config:
    return cli.load([*SMALL, f"data.root={root}", *overrides])


@pytest.fixture
def flat(image_root: Path, tmp_path: Path) -> Path:
    """The class folders alone."""
    return Path(shutil.copytree(image_root / "train", tmp_path / "flat"))


# data.classes.


@pytest.mark.parametrize(
    ("classes", "packed"),
    [(["stripes", "checks"], True), (["[cs]*"], False), ("[cs]*", True), ("FILE", False)],
)
def test_some_classes(image_root: Path, tmp_path: Path, classes: object, packed: bool) -> None:
    if classes == "FILE":
        text = "\ufeff# two classes\nstripes a description\r\n\nchecks\n"
        (tmp_path / "some.txt").write_text(text)
        classes = str(tmp_path / "some.txt")
    root = image_root
    if packed:
        root = tmp_path
        as_tar(image_root / "train", tmp_path / "train.tar")
        as_shards(image_root / "val", tmp_path / "val.tar")
    for index, count in zip(splits(root, classes=classes), (12, 5), strict=True):
        assert index.classes == ("checks", "stripes")
        assert samples(index) == [
            (name, f"{name}/{i:02d}.jpg") for name in ("checks", "stripes") for i in range(count)
        ]
        split = image_root / ("train" if count == 12 else "val")
        assert all(index.read(i) == (split / index.name(i)).read_bytes() for i in range(len(index)))


def test_unknown_classes(image_root: Path, tmp_path: Path) -> None:
    refused = refusal(image_root, classes=["checks", "stripe"])
    assert "no class or file stripe: " in refused and "did you mean stripes?" in refused
    assert "there is no class or file some.txt: " in refusal(image_root, classes="some.txt")
    (tmp_path / "some.txt").write_text("\n# nothing\n")
    assert "is empty; write one" in refusal(image_root, classes=str(tmp_path / "some.txt"))
    for wrong in ("3", "[]", "{a: 1}"):
        with pytest.raises(UserError, match=r"data\.classes"):
            build_datasets(config(image_root, f"data.classes={wrong}"))
    one = config(image_root, "data.classes=[dots]")
    with pytest.raises(UserError, match=r"^data\.classes=.*: all images have the class dots; a "):
        build_datasets(one)
    assert len(build_val(one).val) == 5


# data.val_fraction.


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.99])
def test_fraction_of_each_class(flat: Path, fraction: float) -> None:
    train, val = splits(flat, val_fraction=fraction)
    count = min(max(round(12 * fraction), 1), 11)
    assert Counter(train.labels.array.tolist()) == dict.fromkeys(range(3), 12 - count)
    assert Counter(val.labels.array.tolist()) == dict.fromkeys(range(3), count)
    assert sorted([*samples(train), *samples(val)]) == [
        (name, f"{name}/{i:02d}.jpg") for name in train.classes for i in range(12)
    ]
    assert samples(train) == sorted(samples(train)) and samples(val) == sorted(samples(val))
    # As in earlier versions: a run resumes with the same images.
    assert chosen([f"cat/{i}é.jpg" for i in range(500)], 0.01) == [279, 167, 416, 29, 148]


@pytest.mark.parametrize("folds", [2, 5, 12])
def test_folds_are_disjoint_and_cover_all(flat: Path, folds: int) -> None:
    held_out = []
    for fold in range(1, folds + 1):
        train, val = splits(flat, val_fold=f"{fold}/{folds}")
        counts = Counter(val.labels.array.tolist())
        assert set(counts) == {0, 1, 2} and max(counts.values()) - 12 / folds < 1
        assert len(train) + len(val) == 36 and not set(samples(train)) & set(samples(val))
        held_out += samples(val)
    assert sorted(held_out) == samples(load_index(flat, key="data.root"))
    first = splits(flat, val_fraction=1 / folds)[1]
    assert first.fingerprint() == splits(flat, val_fold=f"1/{folds}")[1].fingerprint()
    built = build_datasets(config(flat, f"data.val_fold=2/{folds}")).val
    assert (
        built.fingerprint() == build_val(config(flat, f"data.val_fold=2/{folds}")).val.fingerprint()
    )


def test_too_few_images_for_the_folds(image_root: Path, flat: Path) -> None:
    given = "data.val_fold=2/13"
    assert refusal(flat, val_fold="2/13") == (
        f"{given}: class checks has 12 of the 13 images that it needs; add images, or leave the "
        "class out with data.classes"
    )
    assert refusal(image_root, val_fold="2/13").startswith(f"{given}: there is a validation split")


def test_the_same_images_are_held_out_of_every_storage(
    flat: Path, image_root: Path, tmp_path: Path
) -> None:
    found = [splits(flat, val_fraction=0.25)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "train").symlink_to(image_root / "train")
    as_zip(image_root / "train", tmp_path / "b" / "train.zip")
    shutil.copy(tmp_path / "b" / "train.zip", tmp_path / "images.zip")
    as_tar(image_root / "train", tmp_path / "flat.tar")  # next to the folder
    for root in ("a", "b", "images.zip", "flat"):
        found.append(splits(tmp_path / root, val_fraction=0.25))
    assert len({(train.fingerprint(), val.fingerprint()) for train, val in found}) == 1
    one = build_datasets(config(flat, "data.val_fraction=0.25", "train.seed=1"))
    other = build_val(config(flat, "data.val_fraction=0.25", "train.seed=2"))
    assert one.val.fingerprint() == other.val.fingerprint() != one.train.fingerprint()


def test_nothing_to_hold_out(image_root: Path, flat: Path) -> None:
    as_zip(image_root / "train", flat.parent / "images.zip")
    assert "is one file; write data.val_fraction=0.1" in refusal(flat.parent / "images.zip")
    there = f"data.val_fraction=0.1: there is a validation split, {image_root}/val; leave "
    assert refusal(image_root, val_fraction=0.1).startswith(there)
    for path in sorted((flat / "dots").iterdir())[1:]:
        path.unlink()
    assert "class dots has 1 of the 2 images that it needs; " in refusal(flat, val_fraction=0.1)
    assert len(splits(flat, val_fraction=0.1, classes=["checks", "stripes"])[1]) == 2
    shutil.copytree(image_root / "val", flat / "my_val")
    as_tar(flat, packed := flat.parent / "flat.tar")
    for root in (flat, packed):
        assert "holds my_val, which is a split and not a class" in refusal(root, val_fraction=0.1)
    shutil.move(flat / "checks", flat / "my_train")
    assert "holds dots, my_train, my_val, stripes: put" in refusal(flat)


# Several roots.


def test_roots_are_united(image_root: Path, tmp_path: Path) -> None:
    """The first has both splits, the second a new class and images of the same names."""
    more = tmp_path / "more"
    shutil.copytree(image_root / "train" / "dots", tmp_path / "new" / "dots")
    shutil.copytree(image_root / "train" / "dots", tmp_path / "new" / "a new class")
    more.mkdir()
    as_tar(tmp_path / "new", more / "train.tar")
    shutil.copytree(image_root / "val" / "dots", more / "val" / "a new class")
    train, val = splits([image_root, more])
    assert train.classes == val.classes == ("a new class", "checks", "dots", "stripes")
    assert Counter(train.labels.array.tolist()) == {0: 12, 1: 12, 2: 24, 3: 12}
    assert samples(train)[24:48] == [("dots", f"dots/{i:02d}.jpg") for _ in "ab" for i in range(12)]
    assert [train.path(24), train.path(36)] == [
        f"{image_root}/train/dots/00.jpg",
        f"{more}/train.tar: dots/00.jpg",
    ]
    assert train.read(24) == train.read(36) == (image_root / "train/dots/00.jpg").read_bytes()
    turned = splits([more, image_root])[0]
    assert [turned.path(24), turned.path(36)] == [train.path(36), train.path(24)]


def test_a_root_may_hold_one_split_and_a_link_adds_no_images(
    image_root: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        (tmp_path / f"only {split}").mkdir()
        (tmp_path / f"only {split}" / split).symlink_to(image_root / split)
    (tmp_path / "link").symlink_to(image_root)
    apart = splits([tmp_path / "only val", tmp_path / "only train"])
    linked = splits([image_root, tmp_path / "link"])
    for one, other, whole in zip(apart, linked, splits(image_root), strict=True):
        assert one.fingerprint() == other.fingerprint() == whole.fingerprint()
    assert "dots/train: no such folder; " in refusal([image_root, image_root / "train" / "dots"])
    assert "only train/val: no such folder" in refusal([tmp_path / "only train"] * 2)
    assert "/nowhere: no such folder" in refusal([image_root, "/nowhere"])
    only_test = refusal(image_root, train="test", val="test")  # of evaluate.py data.val=test
    assert only_test.startswith(f"data.val={image_root}/test: no such folder; ")
    assert "or write data.val=FOLDER if it has another name; python scripts/prepare.py" in only_test


def test_roots_on_the_command_line(image_root: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(image_root, tmp_path / "one, two"))
    datasets = build_datasets(config(odd, f"data.root=[{image_root},'{odd}']"))
    assert len(datasets.train) == 72 and len(datasets.val) == 30
    assert len(build_datasets(config(odd)).train) == 36
    with pytest.raises(UserError, match=r"data\.root=.*not allowed; give a folder, or a list"):
        config(image_root, "data.root=[3]")
