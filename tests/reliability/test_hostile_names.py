"""Hostile configs and names: nothing in them runs, and no program writes outside its folders.

Each case has a folder of its own with a home, a folder for temporary files, a cache, a working
folder and one outside of them. A case is bad if it leaves a file named `canary`, which each payload
tries to make, or changes anything but the run, the data, the named outputs and the cache.
"""

import getpass
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf import cli
from conf.schema import UserError
from scripts import prepare
from tests.processes import HANGS_SECONDS
from tests.small_run import SMALL

ROOT = Path(__file__).parents[2]
ROW = "hostile configs and names that ran code or wrote outside"
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
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPE = "# @package _global_\ndefaults:\n  - demo\n  - _self_\n"
APPLY = "!!python/object/apply:os.system ['touch canary']"
# The content of a recipe.
RECIPES = {
    "python tag": f"model:\n  args: {APPLY}\n",
    "python tag as a key": f"? {APPLY}\n: 1\n",
    "python name": "model:\n  name: !!python/name:os.system\n",
    "python module": "model:\n  name: !!python/module:os\n",
    "python new": "model:\n  args: !!python/object/new:subprocess.Popen [['touch', 'canary']]\n",
    "target": "_target_: os.system\n",
    "target of a section": "model:\n  _target_: os.system\n  command: touch canary\n",
    "class of a section": "model:\n  __class__: os\n",
    "bomb": BOMB,
    "bomb in a key": "model:\n  args:\n" + "".join(f"    {line}\n" for line in BOMB.splitlines()),
    "alias of itself": "model: &a\n  args: *a\n",
    "deep": "model: " + "[" * 5000,
    "defaults lead out": "defaults:\n  - ../../outside/recipe\n",
    "defaults of Hydra": "defaults:\n  - /hydra/launcher: joblib\n",
    "secret": "run:\n  name: ${oc.env:SECRET}\n",
    "secret in a list": "data:\n  classes: ['${oc.env:SECRET}']\n",
    "name with a line break": 'run:\n  name: "a\\nb"\n',
}
# Words of a command line.
WORDS = (
    "+_target_=os.system",
    "++model._target_=os.system",
    "hydra/launcher=joblib",
    "hydra.run.dir=../../outside",
    "recipe=../../outside/recipe",
    "run.name=../../outside/run",
    "run.name=${oc.env:SECRET}",
    "run.name='\\${oc.env:SECRET}'",
    "run.name=${oc.decode:${oc.env:SECRET}}",
    "optim.lr=${oc.${data.train}:SECRET}",
    "model.args.__class__=os",
    "run.dir=a\x00b",
    "model.name=os.system",
    "--config-dir=../../outside",
    f"model.weights={SHELL}",
    "model.weights=https://localhost:9/canary.pt",
    f"run.name={PYTHON}",
)


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


def config_cases() -> Iterator[tuple[str, list[str], str]]:
    """Yield name, words of the command line, and content of the recipe `mine`."""
    for name, content in RECIPES.items():
        head = "# @package _global_\n" if content.startswith("defaults") else RECIPE
        yield name, ["--config-dir=../data/conf", "recipe=mine"], head + content
    for word in WORDS:
        yield word, ["recipe=demo", word], RECIPE


def compose(box: Box, words: list[str], recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compose a config: it is refused in one line, or holds the words as they are."""
    path = box.root / "data" / "conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe)
    try:
        config = cli.parse(words, script="train.py", purpose="")
    except SystemExit as stop:
        assert stop.code == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("train.py: ")
    else:
        text = cli.to_yaml(config)
        assert "hunter2" not in text
        assert words[-1].partition("=")[2].strip("'") in text


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


SHORT = {"python tag", "bomb", "deep", "target", "secret", "+_target_=os.system", "run.dir=a\x00b"}


@pytest.mark.parametrize("case", [c for c in config_cases() if c[0] in SHORT], ids=lambda c: c[0])
def test_config_is_data(
    case: tuple[str, list[str], str], box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    compose(box, case[1], case[2], capsys)
    assert box.problems() == []


@pytest.mark.slow
def test_configs_are_data(
    box: Box, capsys: pytest.CaptureFixture[str], figure: Callable[[str, int, int], None]
) -> None:
    cases = list(config_cases())
    bad = []
    for name, words, recipe in cases:
        compose(box, words, recipe, capsys)
        bad += [name] if box.problems() else []
    figure(ROW, len(bad), len(cases))
    assert bad == []


def images(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "train" / "dots").glob("*.jpg"))]


def run_script(box: Box, script: str, *words: str, status: int = 0) -> str:
    """Run a program in the working folder; return what it printed.

    The console must not receive the escape sequences of a name.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=box.root / "work",
        env={**os.environ, **box.environment()},
        capture_output=True,
        timeout=5 * HANGS_SECONDS,  # doctor.py measures the disk, the decoder and the step
        check=False,
    )
    said = os.fsdecode(done.stdout + done.stderr)
    assert done.returncode == status, said
    assert "Traceback" not in said and "\x1b[31m" not in said and "\x07" not in said, said
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


def as_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
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
        yield as_zip(place / f"{number}.zip", {**good, name: image})
    links = {"symlink": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}
    devices = {"device": tarfile.CHRTYPE, "FIFO": tarfile.FIFOTYPE}
    for name, kind in {**links, **devices}.items():
        member = special(kind, "../../../outside/recipe.yaml")
        yield as_tar(place / f"{name}.tar", {**good, "train/dots/a.jpg": member})
    (place / "dots").mkdir()
    for i in range(4):
        (place / "dots" / f"{i}.jpg").write_bytes(image)
    for i, label in enumerate(("../../../outside/canary", str(out))):
        rows = [f"dots/{n}.jpg,{'dots' if n % 2 else label}" for n in range(4)]
        (place / f"{i}.csv").write_text("\n".join(["path,label", *rows]) + "\n")
        yield place / f"{i}.csv"


@pytest.mark.slow
def test_members_of_archives_and_rows_of_lists_stay_inside(
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
