"""Shrunk datasets: same names and labels, exact pixels, and resumable after a kill."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conf import cli
from conf.schema import UserError
from pipeline import decode
from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.dataset import SHRUNK_SIDE, FolderDataset
from pipeline.index import load_index
from scripts import shrink
from scripts.lib import destination
from tests.drawings import draw_image
from tests.processes import descendants, is_running
from tests.stored import as_tar, as_zip

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


def drawn(mode: str = "RGB", *, seed: int = 0) -> Image.Image:
    """Return an image with sides between 128 and 320 px."""
    return draw_image("plaid", np.random.default_rng(seed)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def psnr(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a.convert("RGB"), np.float64) - np.asarray(b.convert("RGB"))
    return float(10 * np.log10(255**2 / max(1e-9, (difference**2).mean())))


def shrunk(
    data: bytes, name: str = "a.JPEG", *, side: int = 96, quality: int = 90
) -> tuple[bytes, str]:
    return shrink.shrink(data, name, side=side, quality=quality, decoder="pillow")


def files(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def images(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(root).items() if "/" in name}


def members(path: Path) -> dict[str, bytes]:
    """Return the files in a tar or zip file."""
    shutil.unpack_archive(path, unpacked := path.with_name(f"{path.name}.unpacked"))
    found = files(unpacked)
    shutil.rmtree(unpacked)
    return found


def command(root: Path, to: Path, *options: str) -> list[str]:
    return [sys.executable, "scripts/shrink.py", f"data.root={root}", "--to", str(to), *options]


def run(root: Path, to: Path, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(root, to, *options), cwd=ROOT, capture_output=True, text=True, timeout=60, **how
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Start shrink.py in its own process group, like a shell."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path, to: Path, *options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(root, to, "--workers", "2", *options),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # waits for it and closes its pipes
            process.kill()


# One image.


@pytest.mark.parametrize(
    "size", [(200, 300), (300, 200), (200, 200), (97, 1000), (1000, 97), (333, 111)]
)
@pytest.mark.parametrize("side", [64, 96])
def test_the_short_side_is_exact_and_the_aspect_ratio_kept(
    size: tuple[int, int], side: int
) -> None:
    made = opened(shrunk(encoded(drawn().resize(size)), side=side)[0])
    assert (made.format, made.mode, min(made.size)) == ("JPEG", "RGB", side)
    assert max(made.size) == pytest.approx(side * max(size) / min(size), abs=1)
    assert (made.width < made.height) == (size[0] < size[1])
    assert "progressive" not in made.info
    assert [layer[1:3] for layer in made.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]  # 4:2:0


def test_pixels_equal_a_resize_and_encode_by_pillow() -> None:
    for seed in range(5):
        data = encoded(drawn(seed=seed), quality=95)
        made = opened(shrunk(data)[0])
        exact = opened(data).resize(made.size, Image.Resampling.BILINEAR)  # Pillow's is antialiased
        at_90 = opened(encoded(exact, quality=90, subsampling="4:2:0"))
        assert psnr(made, at_90) > 40
        assert psnr(made, exact) > psnr(at_90, exact) - 0.1
        assert psnr(opened(shrunk(data, quality=40)[0]), exact) < psnr(made, exact) - 1


def test_validation_does_not_resize_a_shrunk_image_again() -> None:
    data = encoded(drawn())
    resize = Compose(build([{"resize": {"size": 96}}], TRANSFORMS, key="augment.val"))
    made = decode.open_picture(shrunk(data)[0], "pillow")
    before = resize(decode.open_picture(data, "pillow"), None)  # type: ignore[arg-type]
    assert made.size == before.size
    np.testing.assert_array_equal(resize(made, None).pixels(), made.pixels())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(96, 200), (200, 96), (40, 500), (5, 5)])
def test_small_images_are_copied(mode: str, size: tuple[int, int]) -> None:
    data = encoded(drawn(mode).resize(size), quality=70, progressive=True, comment=b"kept")
    assert shrunk(data) == (data, "")


def test_exif_and_profile_are_removed_and_rotation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: viewers rotate by 90 degrees
    image = drawn().resize((300, 200))
    made, odd = shrunk(encoded(image, exif=exif, icc_profile=b"profile" * 20))
    assert opened(made).size == (144, 96)
    assert not odd and not opened(made).getexif() and "icc_profile" not in opened(made).info


@pytest.mark.parametrize("size", [(60, 90), (200, 300)])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("JPEG", "CMYK"),
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
        ("PNG", "I;16"),
        ("GIF", "P"),
        ("WEBP", "RGB"),
        ("BMP", "RGB"),
    ],
)
def test_a_file_named_jpeg_becomes_an_rgb_jpeg(kind: str, mode: str, size: tuple[int, int]) -> None:
    image = drawn("L" if mode == "I;16" else mode).resize(size)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    data = encoded(image, kind)
    made, odd = shrunk(data, "n01/n01_1.JPEG")
    assert odd.startswith(f"{kind} {mode}") and "converted" in odd
    assert (opened(made).format, opened(made).mode) == ("JPEG", "RGB")
    assert min(opened(made).size) == min(96, *size)
    exact = (
        decode.open_picture(data, "pillow")
        .pillow()
        .resize(opened(made).size, Image.Resampling.BILINEAR)
    )
    assert psnr(opened(made), opened(encoded(exact, quality=90, subsampling="4:2:0"))) > 40


def test_grey_images_stay_grey_and_are_not_unusual() -> None:
    made, odd = shrunk(encoded(drawn("L")))
    pixels = np.asarray(opened(made).convert("RGB"))
    assert not odd and (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize(
    ("name", "kind"), [("a.png", "PNG"), ("a.PNG", "JPEG"), ("a.webp", "WEBP"), ("a.gif", "GIF")]
)
def test_files_with_other_names_are_copied(name: str, kind: str) -> None:
    data = encoded(drawn(), kind)
    made, odd = shrunk(data, name)
    assert made == data and "copied" in odd


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
@pytest.mark.parametrize("side", [96, 1000])  # also where it would only be copied
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_file_is_an_error(name: str, side: int, kind: str) -> None:
    data = encoded(drawn(), kind)
    with pytest.raises(Exception, match=r"truncated|broken|Truncated"):
        shrunk(data[: len(data) // 2], name, side=side)


# A dataset.


@pytest.fixture(scope="module")
def source(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """image_root with unusual and unreadable files, a subfolder of a class, and special names."""
    root = shutil.copytree(image_root, tmp_path_factory.mktemp("source") / "imagenet")
    data = encoded(drawn().resize((300, 280)))
    for name, content in {
        "train/dots/cmyk.JPEG": encoded(drawn("CMYK")),
        "train/dots/disguised.JPEG": encoded(drawn(), "PNG"),
        "train/dots/true.png": encoded(drawn(), "PNG"),
        "train/dots/inner/ünder ' score.jpg": data,
        os.fsdecode(b"val/dots/not utf-8 \xff.jpg"): data,
        "train/checks/empty.jpg": b"",
        "train/checks/half.jpg": data[: len(data) // 2],
        "val/checks/text.JPEG": b"<html>404</html>",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    (root / "train" / "dots" / "notes.txt").write_text("not an image")
    return root


ODD = ["train/dots/cmyk.JPEG", "train/dots/disguised.JPEG", "train/dots/true.png"]
BROKEN = ["train/checks/empty.jpg", "train/checks/half.jpg", "val/checks/text.JPEG"]


@pytest.fixture(scope="module")
def done(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    to = tmp_path_factory.mktemp("done") / "new" / "imagenet256"
    return to, run(source, to, "--side", "256")


def test_every_image_is_written_under_its_name(source: Path, done: tuple[Path, Any]) -> None:
    to, _ = done
    before, after = images(source), images(to)
    assert after.keys() == before.keys() - set(BROKEN) - {"train/dots/notes.txt"}
    decoder = decode.resolve("auto")
    for name, data in after.items():
        assert data == shrink.shrink(before[name], name, side=256, quality=90, decoder=decoder)[0]
        assert data == before[name] or min(opened(data).size) <= 256
    assert sum(after[name] == before[name] for name in after) > 10
    assert sum(after[name] != before[name] for name in after) > 5


def test_the_default_side_equals_the_one_in_the_verdict() -> None:
    assert shrink.SIDE == SHRUNK_SIDE


def test_the_report(source: Path, done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    to, process = done
    assert process.returncode == 1, process.stderr
    report = json.loads((to / "shrink.json").read_text())
    after, before = images(to), images(source)
    same = sum(after[name] == before[name] for name in after)
    assert (
        report["images"]
        == len(after) + 3
        == report["copied"] + report["encoded"] + report["unreadable"]
    )
    assert (report["copied"], report["unreadable"], report["odd"]) == (same, 3, 3)
    assert report["bytes_after"] == sum(map(len, after.values()))
    assert report["bytes_before"] == sum(len(before[name]) for name in after)
    assert report["settings"] == {
        "version": 1,
        "source": str(source),
        "splits": ["train", "val"],
        "side": 256,
        "quality": 90,
    }
    assert report["train_with"] == f"python train.py data.root={to}"
    assert report["train_with"] in process.stdout and "images/s" in process.stdout
    assert [line.split("\t")[0] for line in (to / "odd.txt").read_text().splitlines()] == ODD
    listed = dict(line.split("\t") for line in (to / "unreadable.txt").read_text().splitlines())
    assert list(listed) == BROKEN and "truncated" in listed["train/checks/half.jpg"]
    assert all(f"unreadable: {name}: {reason}" in process.stdout for name, reason in listed.items())


def test_a_model_can_be_trained_on_the_copy(source: Path, done: tuple[Path, Any]) -> None:
    to, _ = done
    transform = Compose(
        build(
            [{"resize": {"size": 72}}, {"center_crop": {"size": 64}}], TRANSFORMS, key="augment.val"
        )
    )
    for split in ("train", "val"):
        old, new = (
            FolderDataset(load_index(root / split, key="data.root"), transform)
            for root in (source, to)
        )
        assert new.index.classes == old.index.classes
        labels = {
            os.path.relpath(old.name(i), source): int(old.index.labels.array[i])
            for i in range(len(old))
        }
        for i in range(len(new)):
            pixels, label = new.load(0, i)
            assert pixels.shape == (64, 64, 3)
            assert label == labels[os.path.relpath(new.name(i), to)]


@pytest.mark.slow
def test_a_second_run_only_retries_unreadable_files(
    source: Path, done: tuple[Path, Any], tmp_path: Path
) -> None:
    root, to = (shutil.copytree(folder, tmp_path / folder.name) for folder in (source, done[0]))
    settings = json.loads((to / "shrink.json").read_text())
    settings["settings"]["source"] = str(root)
    (to / "shrink.json").write_text(json.dumps(settings))
    for name in BROKEN:
        shutil.copy(root / "train" / "dots" / "00.jpg", root / name)
    times = {p: p.stat().st_mtime_ns for p in to.rglob("*.*") if p.parent != to}
    process = run(root, to, "--side", "256", "--workers", "1")
    assert process.returncode == 0, process.stderr
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert images(to).keys() == images(root).keys() - {"train/dots/notes.txt"}
    report = json.loads((to / "shrink.json").read_text())
    assert (report["unreadable"], report["done_earlier"], report["odd"]) == (
        0,
        report["images"] - 3,
        3,
    )
    assert not (to / "unreadable.txt").exists()
    for split in ("train", "val"):
        old, new = (load_index(folder / split, key="data.root") for folder in (root, to))
        assert (
            new.fingerprint() == old.fingerprint()
        )  # the same samples: a run can resume with the copy


# Containers.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_containers_hold_the_files_of_the_folders(
    source: Path, done: tuple[Path, Any], tmp_path: Path, kind: str
) -> None:
    root = shutil.copytree(source, tmp_path / "imagenet")
    if kind == "zip":
        (root / os.fsdecode(b"val/dots/not utf-8 \xff.jpg")).unlink()
    to = tmp_path / "to"
    process = run(root, to, "--side", "256", "--format", kind, "--workers", "1")
    assert process.returncode == 1, process.stderr
    assert sorted(os.listdir(to)) == sorted(
        ["odd.txt", "shrink.json", f"train.{kind}", "unreadable.txt", f"val.{kind}"]
    )
    for split in ("train", "val"):
        expected = {
            str(Path(name).relative_to(split)): data
            for name, data in images(done[0]).items()
            if name.startswith(split) and (root / name).exists()
        }
        assert members(to / f"{split}.{kind}") == expected
    first, second = (json.loads((folder / "shrink.json").read_text()) for folder in (done[0], to))
    assert second["images"] == first["images"] - (kind == "zip")
    assert second["settings"]["format"] == kind


@pytest.mark.slow
def test_a_killed_run_that_writes_a_container_can_resume(
    large: Path, tmp_path: Path, start: Start
) -> None:
    to = tmp_path / "to"
    process = start(large, to, "--format", "tar")
    partial = to / "train.tar.partial"
    while not partial.exists() or partial.stat().st_size < 500_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = run(large, to, "--format", "tar")
    assert done.returncode == 0, done.stderr
    report = json.loads((to / "shrink.json").read_text())
    assert report["images"] == 300 and 0 < report["done_earlier"] < 300
    for split in ("train", "val"):
        files = members(to / f"{split}.tar")
        names = {str(p.relative_to(large / split)) for p in (large / split).rglob("*.JPEG")}
        assert files.keys() == names and len(set(files.values())) == 1


def test_a_name_that_a_zip_file_cannot_hold_is_refused(source: Path, tmp_path: Path) -> None:
    config = cli.load([f"data.root={source}"])
    to = tmp_path / "to"
    job = shrink.plan(config.data, "pillow", to, side=256, quality=90, output="zip")
    with pytest.raises(UserError, match=r"^--format zip: the name val/dots/not utf-8 .* rename"):
        shrink.open_destination(job)
    assert not to.exists()


# Interrupted runs.


@pytest.mark.parametrize("killed", ["before", "after"])
def test_an_odd_file_is_listed_even_if_the_run_is_killed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """It is listed before it is written, because an existing file is not examined again."""
    index = load_index(source / "train", key="data.train")
    job = shrink.Job(str(source), str(tmp_path), ("train",), (index,), 256, 90, "pillow")
    (odd,) = (i for i in range(len(index)) if f"train/{index.name(i)}" == ODD[0])
    write = destination.write_whole

    def kill(target: str, data: bytes) -> None:
        if killed == "after":
            write(target, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(destination, "write_whole", kill)
    with pytest.raises(KeyboardInterrupt):
        shrink.shrink_image(job, odd)
    monkeypatch.undo()
    assert (tmp_path / ODD[0]).exists() == (killed == "after")
    shrink.shrink_image(job, odd)  # the same command again
    shrink.write_report(job, shrink.Tally(), seconds=1, workers=1, command="")
    assert [line.split("\t")[0] for line in (tmp_path / "odd.txt").read_text().splitlines()] == ODD[
        :1
    ]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 large images, which take some seconds."""
    root = tmp_path_factory.mktemp("large") / "imagenet"
    data = encoded(drawn().resize((1200, 900)))
    for split, count in (("train", 240), ("val", 60)):
        for label in ("a", "b"):
            (root / split / label).mkdir(parents=True)
            for i in range(count // 2):
                (root / split / label / f"{i:03d}.JPEG").write_bytes(data)
    return root


def await_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_images(process: subprocess.Popen[str], to: Path) -> set[int]:
    """Wait until `process` has written some images; return its descendants."""
    while len(list(to.rglob("*.JPEG"))) < 20:
        assert process.poll() is None
        time.sleep(0.01)
    family = descendants(process.pid)
    assert len(family) >= 3
    return family


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_can_resume(
    large: Path, tmp_path: Path, start: Start
) -> None:
    to = tmp_path / "to"
    process = start(large, to)
    family = await_images(process, to)
    process.kill()
    process.wait()
    await_gone(family)
    finished = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in to.rglob("*.JPEG")}
    assert 20 <= len(finished) < 300
    (to / "train" / "b" / ".unfinished-1.tmp").write_bytes(b"half")  # as left by a killed worker
    cut = min(finished)
    del finished[cut]
    cut.write_bytes(b"")  # as left by a power failure
    process = run(large, to)
    assert process.returncode == 0, process.stderr
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in finished} == finished
    assert not list(to.rglob(".unfinished*"))
    after = images(to)
    assert after.keys() == images(large).keys()
    assert len(set(after.values())) == 1 and opened(after["val/a/000.JPEG"]).size == (
        352 * 1200 // 900,
        352,
    )
    report = json.loads((to / "shrink.json").read_text())
    assert report["done_earlier"] == len(finished) and report["encoded"] == 300
    assert report["bytes_before"] == sum(map(len, images(large).values()))


@pytest.mark.slow
def test_ctrl_c_ends_promptly(large: Path, tmp_path: Path, start: Start) -> None:
    process = start(large, tmp_path / "to")
    family = await_images(process, tmp_path / "to")
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert len(images(tmp_path / "to")) < 300  # it did not finish its work first
    assert (process.returncode, output) == (130, "")
    assert (
        errors.splitlines()[-1] == "shrink.py: interrupted; run the same command again to resume"
        and "Trace" not in errors
    )
    await_gone(family)
    assert not list((tmp_path / "to").rglob(".unfinished*"))
    assert all(
        opened(data).size == (352 * 1200 // 900, 352)
        for name, data in images(tmp_path / "to").items()
    )


@pytest.mark.slow
def test_a_dead_worker_is_a_one_line_error(large: Path, tmp_path: Path, start: Start) -> None:
    process = start(large, tmp_path / "to")
    family = await_images(process, tmp_path / "to")
    workers = {worker for helper in family for worker in descendants(helper)}
    os.kill(min(workers), signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert (
        errors.splitlines()[-1].startswith("shrink.py: worker died (exit status -9")
        and "Trace" not in errors
    )
    await_gone(family)


@pytest.mark.slow
def test_a_write_error_is_a_one_line_error(large: Path, tmp_path: Path) -> None:
    limits = (5000, resource.RLIM_INFINITY)  # maximum file size, bytes
    process = run(
        large, tmp_path / "to", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    )
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert (
        last
        == "shrink.py: OSError: [Errno 27] File too large; run the same command again to resume"
    )
    assert not images(tmp_path / "to")


# Refused input.


def planned(root: Path, to: Path, *overrides: str, side: int = 256) -> shrink.Job:
    config = cli.load([f"data.root={root}", *overrides])
    return shrink.plan(config.data, config.loader.decoder, to, side=side, quality=90)


def test_larger_images_than_max_pixels(source: Path, tmp_path: Path) -> None:
    """The limit is that of training, so that shrinking can help."""
    for most, readable in ((100, False), (10**6, True)):
        job = planned(source, tmp_path / str(most), f"data.max_pixels={most}", side=8)
        shrink.open_destination(job).close()
        tally, _ = shrink.shrink_image(job, 0)
        assert (not tally.unreadable) == readable
        assert readable or f"data.max_pixels={most}; make" in tally.unreadable[0][1]


def test_a_full_disk_error_reports_the_sizes(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    line = destination.cannot_write(error, str(tmp_path), left=26, mean=1e6)
    assert (
        line.startswith(f"{tmp_path}: No space left on device: about 0.026 GB needed, ")
        and "GB free" in line
    )


@pytest.mark.parametrize("present", ["file.txt", "train/a/a.jpg", ".hidden"])
def test_a_folder_with_other_files_is_refused_and_not_changed(
    source: Path, tmp_path: Path, present: str
) -> None:
    (tmp_path / present).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / present).write_bytes(b"mine")
    with pytest.raises(
        UserError, match=r"^--to .*: contains other files \(.*\); give a new or an empty folder$"
    ):
        shrink.open_destination(planned(source, tmp_path))
    assert files(tmp_path) == {present: b"mine"}


def test_other_settings_or_another_source_are_refused(
    source: Path, large: Path, tmp_path: Path
) -> None:
    shrink.open_destination(planned(source, tmp_path)).close()
    shrink.open_destination(planned(source, tmp_path)).close()
    before = files(tmp_path)
    with pytest.raises(
        UserError,
        match=r"other settings \(side 256, not 128\); give the same options or another folder$",
    ):
        shrink.open_destination(planned(source, tmp_path, side=128))
    with pytest.raises(
        UserError, match=f"started with other settings \\(source {source}, not {large}\\)"
    ):
        shrink.open_destination(planned(large, tmp_path))
    assert files(tmp_path) == before
    (tmp_path / "shrink.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read shrink\.json"):
        shrink.open_destination(planned(source, tmp_path))


def test_a_run_killed_before_its_first_line_starts_again(source: Path, tmp_path: Path) -> None:
    (tmp_path / "shrink.json").touch()
    (tmp_path / "lost+found").mkdir()  # a new file system has one
    shrink.open_destination(planned(source, tmp_path)).close()
    assert (tmp_path / "train" / "dots").is_dir()


def test_a_concurrent_run_is_refused(source: Path, tmp_path: Path) -> None:
    with shrink.open_destination(planned(source, tmp_path)):
        with pytest.raises(UserError, match=r"another shrink\.py is writing there"):
            shrink.open_destination(planned(source, tmp_path))


@pytest.mark.parametrize("place", [".", "new", "train", "val/dots/x", "../imagenet", "link/x"])
def test_a_destination_in_the_dataset_is_refused(source: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(source / "val")
    to = tmp_path / place if place.startswith("link") else source / place
    before = files(source)
    with pytest.raises(UserError, match=r"inside the dataset .*; give another folder$"):
        planned(source, to)
    assert files(source) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.root=/nowhere"], "data.train=/nowhere/train: no such folder"),
        (["data.val=/elsewhere"], "data.val=/elsewhere: not under data.root="),
        (["data=fake"], "data=fake: has no folder to shrink"),
    ],
)
def test_an_invalid_source(
    source: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        planned(source, tmp_path / "to", *overrides)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--side", "3"],
        ["--quality", "0"],
        ["--workers", "0"],
        ["--format", "rar"],
        ["--sides", "3"],
        ["data.rot=3"],
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    source: Path, tmp_path: Path, options: list[str]
) -> None:
    process = run(source, tmp_path / "to", *options)
    assert (process.returncode, process.stdout) == (2, "")
    assert len(process.stderr.splitlines()) == 1 and process.stderr.startswith(
        f"shrink.py: {options[0]}"
    )
    assert not (tmp_path / "to").exists()


@pytest.mark.slow
def test_a_refused_destination_is_one_line_and_status_2(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    for to in (tmp_path, tmp_path / "mine"):
        process = run(source, to)
        assert (process.returncode, process.stdout) == (2, "")
        assert len(process.stderr.splitlines()) == 1 and process.stderr.startswith(
            f"shrink.py: --to {to}: "
        )
    assert list(files(tmp_path)) == ["mine"]


@pytest.mark.slow
def test_containers_are_shrunk_to_the_same_folders(image_root: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    as_tar(image_root / "train", tmp_path / "root" / "train.tar")
    as_zip(image_root / "val", tmp_path / "root" / "val.zip")
    for root, to in ((tmp_path / "root", "to"), (image_root, "expected")):
        done = run(root, tmp_path / to, "--side", "96")
        assert done.returncode == 0, done.stderr
    assert images(tmp_path / "to") == images(tmp_path / "expected")


def test_class_folders_without_a_split_become_one_container(
    image_root: Path, tmp_path: Path
) -> None:
    config = cli.load([f"data.root={image_root / 'train'}", "data.val_fraction=0.2"])
    job = shrink.plan(config.data, "pillow", tmp_path, side=96, quality=90, output="zip")
    (container,) = shrink.open_containers(job)
    container.add("dots/1.jpg", b"data")
    container.finish()
    assert os.listdir(tmp_path) == ["train.zip"]


def test_one_folder_for_both_splits_is_written_once(image_root: Path, tmp_path: Path) -> None:
    """Two writers of one container would damage it."""
    job = planned(image_root, tmp_path / "to", "data.val=train")
    assert job.folders == ("train",) and len(job.indexes) == 1
    root = tmp_path / "root"
    root.mkdir()
    as_zip(image_root / "train", root / "all.zip")
    as_tar(image_root / "val", root / "all.tar")
    with pytest.raises(UserError, match=r"data\.val=all\.tar: its copy would have the name of"):
        planned(root, tmp_path / "to", "data.train=all.zip", "data.val=all.tar")


def test_root_without_a_validation_split(image_root: Path, tmp_path: Path) -> None:
    (tmp_path / "zip").mkdir()
    as_zip(image_root / "train", tmp_path / "zip" / "train.zip")
    for root, folder in ((image_root / "train", "."), (tmp_path / "zip", "train")):
        config = cli.load([f"data.root={root}", "data.val_fraction=0.2"])
        job = shrink.plan(config.data, "pillow", tmp_path / "to", side=96, quality=90)
        assert job.folders == (folder,) and job.images() == 36


def test_what_shrink_does_not_read(image_root: Path, tmp_path: Path) -> None:
    """The paths in a list may lead anywhere, also above the destination."""
    (tmp_path / "root").mkdir()
    for split in ("train", "val"):
        as_tar(image_root / split, tmp_path / "root" / f"{split}.tar")
    (tmp_path / "root" / "list.csv").write_text(f"{image_root}/val/dots/00.jpg,dots\n")
    config = cli.load([f"data.root={tmp_path / 'root'}", "data.val=list.csv"])
    with pytest.raises(UserError, match=r"^data.val=list.csv: is a list; give a folder"):
        shrink.plan(config.data, "pillow", tmp_path / "to", side=96, quality=90)
    config = cli.load([f"data.root=[{image_root},{tmp_path / 'root'}]"])
    with pytest.raises(UserError, match="shrink one folder at a time"):
        shrink.plan(config.data, "pillow", tmp_path / "to", side=96, quality=90)
