"""data=table: images with numbers from a CSV file."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.compose import from_overrides
from conf.errors import UserError
from pipeline.batch import Field
from pipeline.build import Datasets, build_datasets
from scripts.evaluate import outputs_of
from scripts.lib.trained import build_val


def load_table(root: Path, *words: str, **splits: str) -> Datasets:
    for name, text in splits.items():
        (root / f"{name}.csv").write_text(text)
        _ = [(root / path).touch() for path in re.findall(r"^\d+.jpg", text, re.MULTILINE)]
    place = ["data=table", f"data.root={root}", "data.image_size=16"]
    return build_datasets(from_overrides([*place, *words]))


def test_a_table_gives_each_image_its_numbers(image_root: Path, tmp_path: Path) -> None:
    a, b = sorted((image_root / "train").glob("dots/*.jpg"))[:2]
    shutil.copy(b, tmp_path / "b.jpg")
    text = f"path,width,height\n{a},1.5,-2\n\nb.jpg,0,3e4\n"
    found = load_table(tmp_path, train=text, val=text)
    dataset = found.train
    assert found.classes == ("width", "height") and dataset.labels is None
    assert dataset.fields["numbers"] == Field(np.float32, (2,))
    assert [dataset.load(0, i)["numbers"].tolist() for i in (0, 1)] == [[1.5, -2], [0, 30000]]
    assert dataset.name(1) == str(tmp_path / "b.jpg")
    assert list(dataset.replacements(0)) == [1]
    # The numbers and the names of the columns are part of the run's identity.
    changed = [text.replace("-2", "2"), text.replace("width", "length")]
    found_prints = {load_table(tmp_path, train=t, val=t).train.fingerprint() for t in changed}
    assert len(found_prints | {dataset.fingerprint()}) == 3


@pytest.mark.parametrize("key", ["data.val_fraction=0.2", "data.val_fold=3/5"])
def test_images_are_held_out_of_one_table(tmp_path: Path, key: str) -> None:
    """Of each number, if it has enough images; training and evaluation agree on them."""
    ranks = "".join(f"{i}.jpg,{i % 4}\n" for i in range(40))
    found = load_table(tmp_path, key, train=f"path,rank\n{ranks}")
    splits: Any = found.train, found.val
    for split, each in zip(splits, (8, 2), strict=True):
        numbers = split.numbers.array[:, 0].astype(int).tolist()
        assert numbers == [int(Path(split.name(i)).stem) % 4 for i in range(len(split))]
        assert np.bincount(numbers).tolist() == 4 * [each]
    config = from_overrides(["data=table", f"data.root={tmp_path / 'train.csv'}", key])
    assert build_val(config).val.fingerprint() == found.val.fingerprint()
    widths = "".join(f"{i}.jpg,{i}.5\n" for i in range(40))
    other = load_table(tmp_path, key, train=f"path,width\n{widths}")
    assert (len(other.train), len(other.val)) == (32, 8)
    with pytest.raises(UserError, match=r"^data\.val_.*: excludes .*/val\.csv; leave out this"):
        load_table(tmp_path, key, val="path,width\n")


@pytest.mark.parametrize(
    ("val", "says"),
    [
        ("path,a\n1.jpg,1\n2.jpg,cat\n", "2.jpg: cat; give 1 finite number"),
        ("path,a\n1.jpg,1e39\n", "1.jpg: 1e39; give 1 finite number"),
        ("path,a,a\n1.jpg,1,1\n", "path,a,a; give each column a name of its own"),
        ("", "write path,NAME,... into the first line"),
        ("path,a\ngone.jpg,1\ngone/b.jpg,2\n", "there is no gone.jpg, nor any other"),
        ("path,b\n1.jpg,1\n", "has the columns ['b'], training has ['a']"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, val: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        load_table(tmp_path, train="path,a\n1.jpg,1\n", val=val)
    with pytest.raises(UserError, match=r"train\.csv: no such file; for one CSV file, give"):
        load_table(tmp_path / "none")
    with pytest.raises(UserError, match=r"^data\.root is missing: give a folder with train\.csv"):
        build_datasets(from_overrides(["data=table"]))


def test_other_columns_than_those_of_the_model_are_refused(tmp_path: Path) -> None:
    config = from_overrides(["data=table", f"data.root={tmp_path}"])
    trained = SimpleNamespace(classes=("a", "b"), num_classes=2, config=config)
    text = "path,b,a\n1.jpg,1,2\n"
    with pytest.raises(UserError, match=r"^data\.val=val: has the columns b, a, .*; give a, b"):
        outputs_of(trained, load_table(tmp_path, train=text, val=text))  # type: ignore[arg-type]
