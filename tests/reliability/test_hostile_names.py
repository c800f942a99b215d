"""Hostile names, and code in configs: nothing runs, and no program writes outside its folders.

Each case has a folder of its own with a home, a folder for temporary files, a cache, a working
folder and one outside of them. A case is bad if it leaves a file named `canary`, which each payload
tries to make, or changes anything but the run, the data, the named outputs and the cache.
"""

import getpass
import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf import cli
from conf.schema import UserError
from scripts import prepare
from tests.processes import HANGS_SECONDS, ROOT, run_command
from tests.small_run import SMALL

ROW = "hostile names that ran code or wrote outside"
SHELL = "$(touch canary)"
PYTHON = "__import__('os').system('touch canary')"
# Names of classes and files. A name has at most 255 bytes.
NAMES = (
    SHELL,
    "`touch canary`",
    ";touch canary;",
    "|touch canary",
    PYTHON,
    "%s%n{0.__class__.__init__.__globals__}",
    "--help",
    "-rf",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b]0;title\x07",
    "line\nbreak\r\ttab",
    "${oc.env:HOME}",
    "\udcff\udcfe",
    "x" * 251,
)
RECIPE = "# @package _global_\ndefaults:\n  - cifar10\n  - override /data: fake\n  - _self_\n"
# Words of a command line, and the end of the recipe that they name.
CONFIGS = {
    "python tag": (
        "recipe=mine",
        "model:\n  args: !!python/object/apply:os.system ['touch canary']\n",
    ),
    "target": ("recipe=mine", "model:\n  _target_: os.system\n  command: touch canary\n"),
    "secret": ("recipe=mine", "run:\n  name: ${oc.env:SECRET}\n"),
    "typed target": ("+_target_=os.system", ""),
    "typed secret": ("run.name=${oc.env:SECRET}", ""),
    "typed code": (f"run.name={PYTHON}", ""),
}


@dataclass(frozen=True)
class Box:
    """The folders of a case.

    Attributes:
        mine: the folders that may change.
        before: what the others hold.
    """

    root: Path
    mine: tuple[Path, ...]
    before: dict[bytes, tuple[int, ...]]

    @classmethod
    def around(cls, root: Path) -> "Box":
        kernels = f"temporary/torchinductor_{getpass.getuser()}"
        outputs = ("work/runs", "work/evaluation", "work/smaller", "work/prepared")
        mine = (*outputs, "data", "cache", kernels)
        for name in ("home", "temporary", "outside", *mine):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "outside" / "recipe.yaml").write_text("run: {name: outside}\n")
        box = cls(root, tuple(root / name for name in mine), {})
        box.before.update(box.content())
        return box

    def content(self) -> dict[bytes, tuple[int, ...]]:
        """Return size and time of all files and folders that must not change."""
        found = {}
        for folder, folders, files in os.walk(os.fsencode(self.root)):
            folders[:] = [
                f for f in folders if Path(os.fsdecode(folder), os.fsdecode(f)) not in self.mine
            ]
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                info = os.lstat(path)
                times = () if name in folders else (info.st_size, info.st_mtime_ns)
                found[path] = (info.st_mode, *times)
        return found

    def problems(self) -> list[str]:
        """Return the canaries, and what was made, changed or removed outside."""
        after = self.content()
        bad = [
            path for path in after.keys() | self.before if after.get(path) != self.before.get(path)
        ]
        bad += [os.fsencode(path) for path in self.root.rglob("canary")]
        return [os.fsdecode(path) for path in bad]

    def environment(self) -> dict[str, str]:
        folders = {"HOME": "home", "TMPDIR": "temporary", "XDG_CACHE_HOME": "cache"}
        return {
            **{name: str(self.root / folder) for name, folder in folders.items()},
            "SECRET": "hunter2",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """Enter the working folder of a box."""
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for a TMPDIR
        box = Box.around(Path(folder) / "a" / "box")
        for name, value in box.environment().items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.chdir(box.root / "work")
            yield box


def test_box_notices_what_it_should(box: Box) -> None:
    run = box.root / "work" / "runs"
    (run / "config.yaml").touch()
    assert box.problems() == []
    (run / "canary").touch()
    assert box.problems() == [str(run / "canary")]
    (run / "canary").unlink()
    (box.root / "outside" / "recipe.yaml").write_text("changed")
    (box.root / "temporary" / "left").touch()
    assert sorted(map(os.path.basename, box.problems())) == ["left", "recipe.yaml"]


@pytest.mark.parametrize(("word", "end"), CONFIGS.values(), ids=CONFIGS)
def test_config_is_data(word: str, end: str, box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """A config is refused in one line, or holds the words as they are."""
    path = box.root / "data" / "conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE + end)
    words = ["--config-dir=../data/conf", "recipe=mine", word]
    try:
        config = cli.parse(words, script="train.py", purpose="")
    except SystemExit as stop:
        assert stop.code == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("train.py: ")
    else:
        assert "hunter2" not in cli.to_yaml(config)
    assert box.problems() == []


def images(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "train" / "dots").glob("*.jpg"))]


def run_script(box: Box, script: str, *words: str, status: int = 0) -> str:
    """Run a program in the working folder; return what it printed."""
    done = run_command(
        [sys.executable, ROOT / script, *words],
        box.environment(),
        cwd=box.root / "work",
        errors="surrogateescape",
        seconds=5 * HANGS_SECONDS,  # doctor.py measures the disk, the decoder and the step
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said, said
    return said


@pytest.mark.slow
def test_names_of_classes_and_files_are_data(
    box: Box, image_root: Path, figure: Callable[[str, int, int], None]
) -> None:
    """Train, evaluate, predict, compare, check and convert images with all these names."""
    data = box.root / "data" / "images"
    for split in ("train", "val"):
        for name in NAMES:
            (data / split / name).mkdir(parents=True)
            for number, content in enumerate(images(image_root)[:3]):
                (data / split / name / f"{name[:240]}{number}.jpg").write_bytes(content)
    run = Path("runs") / SHELL
    small = [*SMALL, f"data.root={data}", "train.epochs=1", "loader.workers=1"]
    run_script(box, "train.py", *small, f"run.name={SHELL}", "log.every_steps=1")
    run_script(box, "scripts/evaluate.py", str(run))
    run_script(box, "scripts/predict.py", str(run), str(data / "val"))
    run_script(box, "scripts/report.py", str(run), "--out", "runs/report.html")
    page = (box.root / "work/runs/report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page
    run_script(box, "scripts/doctor.py", f"data.root={data}", "--all", status=1)
    run_script(box, "scripts/prepare.py", str(data), "--to", "smaller", "--side", "32")
    run_script(box, "scripts/prepare.py", str(data), "--to", "prepared", "--format", "tar")
    problems = box.problems()
    figure(ROW, len(NAMES) if problems else 0, len(NAMES))
    assert problems == []


def as_tar(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name) if isinstance(content, bytes) else content
            info.name = name
            data = content if isinstance(content, bytes) else b""
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def sources(box: Box, image: bytes) -> Iterator[Path]:
    """Yield datasets for prepare.py whose members lead out of it."""
    good = {f"train/{name}/{i}.jpg": image for name in ("dots", "lines") for i in range(4)}
    out = box.root / "outside" / "canary"
    place = box.root / "data"
    for number, name in enumerate(
        (
            "../../../outside/canary",
            f"{out}",
            "train/../../../outside/canary/a.jpg",
            "train/../a.jpg",
        )
    ):
        yield as_tar(place / f"{number}.tar", {**good, name: image})
    links = {"symlink": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}
    devices = {"device": tarfile.CHRTYPE, "FIFO": tarfile.FIFOTYPE}
    for name, kind in {**links, **devices}.items():
        member = special(kind, "../../../outside/recipe.yaml")
        yield as_tar(place / f"{name}.tar", {**good, "train/dots/a.jpg": member})


@pytest.mark.slow
def test_members_of_archives_stay_inside(
    box: Box, image_root: Path, figure: Callable[[str, int, int], None]
) -> None:
    image, bad, count, refused = images(image_root)[0], [], 0, 0
    for source in sources(box, image):
        box.before.update(box.content())
        for output in ("folder", "tar"):
            words = [str(source), "--to", "prepared", "--format", output]
            try:
                prepare.run(prepare.arguments(words))
            except UserError:
                refused += 1
            stray = [p for p in box.root.rglob("*") if "canary" in p.parts[len(box.root.parts) :]]
            bad += [source.name] if box.problems() or stray else []
            shutil.rmtree("prepared")
            os.mkdir("prepared")
        count += 1
    figure(ROW, len(set(bad)), count)
    assert bad == [] and refused < count
