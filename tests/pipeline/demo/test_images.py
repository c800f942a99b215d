"""The demo dataset: its images, and that it appears complete or not at all."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conf.schema import UserError
from pipeline.augment import Compose, RandomResizedCrop
from pipeline.dataset import FolderDataset
from pipeline.demo import images as demo
from pipeline.demo.images import (
    CLASSES,
    SPLITS,
    TEXTURES,
    UndrawnDataset,
    draw_image,
    ensure_demo_dataset,
)
from pipeline.index import load_index
from tests.processes import descendants

SCRIPT = """
import signal
import sys
from pathlib import Path
from pipeline.demo.images import ensure_demo_dataset
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
root, train_images, val_images = sys.argv[1:]
counts = {"train_images": int(train_images), "val_images": int(val_images)}
print(ensure_demo_dataset(Path(root), **counts))
"""


Process = subprocess.Popen[str]
Start = Callable[[Path, int, int], Process]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn") / "demo"
    assert ensure_demo_dataset(root, train_images=40, val_images=20, threads=2)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def images(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(root).items() if name.endswith(".jpg")}


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `ensure_demo_dataset(root, train_images=..., val_images=...)` in another process."""
    processes: list[Process] = []

    def start(root: Path, train_images: int, val_images: int) -> Process:
        command = [sys.executable, "-c", SCRIPT, str(root), str(train_images), str(val_images)]
        processes.append(
            subprocess.Popen(
                command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        with process:  # to wait for it and close its pipe
            process.kill()


def await_first_image(process: Process, root: Path) -> None:
    """Wait until `process` is in the middle of drawing."""
    while not any(root.parent.glob(".*/train/*/*.jpg")):
        assert process.poll() is None
        time.sleep(0.01)
    assert not root.exists()
    assert descendants(process.pid) == set()


def test_images_are_jpeg_files_of_many_sizes_in_class_folders(drawn: Path) -> None:
    assert list(images(drawn)) == sorted(
        f"{split}/{label}/{number:04d}.jpg"
        for split, count in (("train", 4), ("val", 2))
        for label in CLASSES
        for number in range(count)
    )
    sizes = set()
    for path in drawn.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            sizes.add(image.size)
    assert all(128 <= side <= 320 for size in sizes for side in size)
    assert len(sizes) > 50


def test_names_of_the_classes() -> None:
    assert " ".join(CLASSES) == "stripes checks dots rings bricks waves cells grain plaid zigzag"


@pytest.mark.parametrize("label", CLASSES)
def test_texture_uses_its_range(label: str) -> None:
    v, u = np.mgrid[0:8:0.05, -4:4:0.05].astype(np.float32)
    value = TEXTURES[label](u, v, np.random.default_rng(0))
    assert value.dtype == np.float32
    assert value.shape == u.shape
    assert value.min() >= 0
    assert value.max() <= 1
    assert np.ptp(value) > 0.7


def test_drawing_is_a_function_of_the_generator() -> None:
    first, again, other = (
        draw_image("cells", np.random.default_rng(seed)).tobytes() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_same_seed_draws_same_bytes_with_any_number_of_threads(drawn: Path, tmp_path: Path) -> None:
    for threads in (1, 3):
        root = tmp_path / str(threads)
        ensure_demo_dataset(root, train_images=40, val_images=20, threads=threads)
        assert contents(root) == contents(drawn)


def test_an_image_does_not_depend_on_how_many_there_are(drawn: Path, tmp_path: Path) -> None:
    ensure_demo_dataset(tmp_path / "demo", train_images=20, val_images=30, threads=1)
    few, many = images(tmp_path / "demo"), images(drawn)
    common = few.keys() & many.keys()
    assert len(common) == 20 + 20
    assert all(few[name] == many[name] for name in common)


def test_no_two_images_are_equal_whatever_seed_and_split(drawn: Path, tmp_path: Path) -> None:
    ensure_demo_dataset(tmp_path / "demo", train_images=40, val_images=20, seed=1, threads=1)
    both = [*images(drawn).values(), *images(tmp_path / "demo").values()]
    assert len(set(both)) == len(both) == 120


def test_second_call_touches_nothing(drawn: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (drawn.parent, drawn, *drawn.rglob("*"))}

    before = times()
    assert not ensure_demo_dataset(drawn, train_images=40, val_images=20)
    assert times() == before


def test_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "empty", tmp_path / "a" / "b" / "demo"):
        assert ensure_demo_dataset(root, train_images=10, val_images=10, threads=1)
        assert len(images(root)) == 20


@pytest.mark.parametrize("other", [{"seed": 1}, {"train_images": 50}, {"val_images": 10}])
def test_other_parameters_are_refused(drawn: Path, other: dict[str, int]) -> None:
    before = contents(drawn)
    with pytest.raises(ValueError, match=r"delete it or pass another data.root") as error:
        ensure_demo_dataset(drawn, **{"train_images": 40, "val_images": 20} | other)
    assert str(drawn) in str(error.value)
    assert contents(drawn) == before


def test_other_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    (root / "train").mkdir(parents=True)
    (root / "train" / "cat.jpg").write_bytes(b"mine")
    with pytest.raises(ValueError, match=f"data.root={root}: .*pass another data.root"):
        ensure_demo_dataset(root, train_images=10, val_images=10)
    with pytest.raises(ValueError, match=r"cat.jpg: is a file"):
        ensure_demo_dataset(root / "train" / "cat.jpg", train_images=10, val_images=10)
    assert contents(tmp_path) == {"photos/train/cat.jpg": b"mine"}


def test_killed_process_does_not_hinder_the_next(drawn: Path, tmp_path: Path, start: Start) -> None:
    root = tmp_path / "demo"
    process = start(root, 100_000, 0)
    await_first_image(process, root)
    process.kill()
    process.communicate()
    assert not root.exists()
    assert ensure_demo_dataset(root, train_images=40, val_images=20, threads=1)
    assert contents(root) == contents(drawn)
    assert names(tmp_path) == ["demo"]


def test_interrupted_drawing_cleans_up(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "demo", 100_000, 0)
    await_first_image(process, tmp_path / "demo")
    process.send_signal(signal.SIGINT)  # what Ctrl-C sends
    process.communicate()
    assert process.returncode != 0
    assert names(tmp_path) == []


def test_failed_drawing_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, root = demo.draw_image, tmp_path / "demo"

    def full_disk(label: str, rng: np.random.Generator) -> Image.Image:
        if label == "grain":
            raise OSError(errno.ENOSPC, "No space left on device")
        return draw(label, rng)

    monkeypatch.setattr(demo, "draw_image", full_disk)
    with pytest.raises(OSError, match="No space left"):
        ensure_demo_dataset(root, train_images=1000, val_images=20)
    assert names(tmp_path) == []
    with pytest.raises(UserError, match=f"data.root={root}: .*No space left"):
        undrawn(root, "train").prepare()


def undrawn(root: Path, split: str) -> UndrawnDataset:
    return UndrawnDataset(
        root, split, Compose([RandomResizedCrop(size=24)]), decoder="auto", seed=0
    )


@pytest.mark.parametrize("split", SPLITS)
def test_samples_are_known_before_they_are_drawn(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    counts = {"train_images": 40, "val_images": 20}
    monkeypatch.setattr(demo, "TRAIN_IMAGES", 40)
    monkeypatch.setattr(demo, "VAL_IMAGES", 20)
    monkeypatch.setattr(demo, "ensure_demo_dataset", partial(ensure_demo_dataset, **counts))
    dataset, index = undrawn(tmp_path / "demo", split), load_index(drawn / split, key="data.root")
    files = FolderDataset(index, dataset.transform)
    assert dataset.index.classes == index.classes
    assert dataset.index.fingerprint() == index.fingerprint()
    assert (dataset.mean_bytes(), names(tmp_path)) == (0, [])
    assert dataset.fingerprint() != files.fingerprint()  # which covers the sizes of the files
    dataset.prepare()
    assert dataset.fingerprint() == files.fingerprint()
    assert dataset.mean_bytes() == files.mean_bytes() > 0
    for place in range(0, len(index), 7):
        pixels, label = dataset.load(0, place)
        np.testing.assert_array_equal(pixels, files.load(0, place)[0])
        assert label == files.load(0, place)[1]


@pytest.mark.slow
def test_of_processes_that_start_at_once_one_draws(
    drawn: Path, tmp_path: Path, start: Start
) -> None:
    root = tmp_path / "demo"
    processes = [start(root, 40, 20) for _ in range(4)]
    said = [process.communicate()[0].strip() for process in processes]
    assert sorted(said) == ["False", "False", "False", "True"]
    assert contents(root) == contents(drawn)
    assert names(tmp_path) == ["demo"]
