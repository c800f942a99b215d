"""README.md and docs/: commands are valid, links lead somewhere, and keys and flags exist.

The commands of `python`, `torchrun` and others in blocks (```sh) and in the text are checked by the
parsers of the programs, in a folder with stand-ins for the reader's files. Blocks of other programs
are marked with their name, such as ```sh timm. Those of docs/fork.md and docs/tasks.md are run by
tests/test_guides.py.
"""

import ast
import json
import re
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from conf import cli
from conf.overrides import read_override
from conf.schema import KEYS, NAMES
from tests import small_run
from tests.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = ("sh timm", "sh pytorch/examples")
PROGRAMS = r"(?:python|torchrun|make|pip|sbatch) "
IN_A_ROOT = re.compile(r"""(?<=[\s="])/(?=(?:imagenet\w*|cifar10|photos|images)\b)""")
RUNS = ("NAME", "A", "B", "cifar10,optim.lr=0.1", "demo,train.seed=1", "imagenet_rn50_fast")


# Of each fenced block: its page, its language and its text.
BLOCKS = [
    (page, *found)
    for page in PAGES
    for found in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
]
PLACEHOLDERS = re.compile(r"=\w+\(|\.\.\.|<|=$|CHECKPOINT|VALUE|=mine$")


def read_inline(page: Path) -> list[str]:
    """Return the `code` of a page outside blocks, without code that has a placeholder."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    code = re.findall(r"`([^`]+)`", text)
    return [c for c in dict.fromkeys(code) if not PLACEHOLDERS.search(c)]


def commands_in(page: Path) -> list[str]:
    """Return the commands of the blocks, also those in a loop or a pipe, and of the text."""
    blocks = [text for of, language, text in BLOCKS if (of, language) == (page, "sh")]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    lines += [code for code in read_inline(page) if re.match(r"(python|torchrun) \S+ \S", code)]
    found = [re.search(rf"(?<![\w/.-]){PROGRAMS}[^|;>#]*", line) for line in lines]
    return list(dict.fromkeys(match.group().strip() for match in found if match))


OF_FORKS = ("fork.md", "tasks.md")  # their commands run after their changes
COMMANDS = {page: commands_in(page) for page in PAGES if page.name not in OF_FORKS}


@pytest.fixture
def desk(tmp_path: Path, image_root: Path) -> Path:
    """A folder with stand-ins for the files of a reader."""
    desk = tmp_path / "desk"
    checkpoints = [f"runs/{run}/checkpoints/step-00112590.pt" for run in RUNS]
    curves = [f"runs/alarms/curve{number}/config.yaml" for number in range(1, 11)]
    for name in [*checkpoints, *curves, "resnet50-0676ba61.pth", "names.txt", ".venv/bin/activate"]:
        (desk / name).parent.mkdir(parents=True, exist_ok=True)
        (desk / name).touch()
    for name in ("imagenet", "downloads", "cifar10", "images", "photos/val"):
        (desk / name).mkdir(parents=True)
    for name in ("photo.jpg", "new_photo.jpg", "photos/a.jpg", "photos/val/b.jpg"):
        shutil.copy(image_root / "val" / "dots" / "00.jpg", desk / name)
    return desk


# Checks of the arguments of a program.


def check_train(words: list[str]) -> None:
    """Compose the config as train.py does, or those of a sweep."""
    if "-m" in words:
        words = [*words, "--cfg", "job"]
    try:
        cli.parse(words, script="train.py", purpose="")
    except SystemExit as end:
        assert end.code == 0


def check_script(path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script up to the end of the block that reads its arguments."""
    body = ast.parse((ROOT / path).read_text()).body
    guards = [i for i, node in enumerate(body) if isinstance(node, ast.If)]
    assert len(guards) > 1, f"{path} reads its arguments elsewhere"
    part = ast.Module(body[: guards[-2] + 1], type_ignores=[])
    if find_spec("onnx") is None:  # export.py refuses the format at once
        words = ["pt2" if word == "onnx" else word for word in words]
    monkeypatch.setattr(sys, "argv", [path, *words])
    code = compile(part, str(ROOT / path), "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": str(ROOT / path), "__doc__": path})
    except SystemExit as end:
        assert end.code == 0


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(targets), words


def check_pip(words: list[str]) -> None:
    """Every package is one of requirements.txt or of an extra."""
    assert words.pop(0) == "install"
    if words[0] == "-r":
        assert (ROOT / words[1]).is_file() and len(words) == 2
    else:
        known = re.findall(r'"([\w\[\]-]+)', (ROOT / "pyproject.toml").read_text())
        assert set(words) <= set(known), words


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command in the current folder, whose folders a page may write as /imagenet."""
    text = IN_A_ROOT.sub(f"{Path.cwd()}/", re.sub("^uv run ", "python ", line))
    # What a function passes on, a variable, and a range of numbers.
    for pattern, value in ((r'"?\$\{@.*?\}"?', ""), (r"\$\w+", "1"), (r"\{\d+\.\.\d+\}", "*")):
        text = re.sub(pattern, value, text)
    words = [name for word in shlex.split(text) for name in sorted(glob(word)) or [word]]
    match words:
        case ["python", "train.py", *rest]:
            check_train(rest)
        case ["python", script, *rest] if script.startswith("scripts/"):
            check_script(script, rest, monkeypatch)
        case ["python", "-m", module, *rest]:
            check_script(f"{module.replace('.', '/')}.py", rest, monkeypatch)
        case ["torchrun", *rest]:
            options = get_args_parser().parse_args(rest)
            assert options.training_script == "train.py"
            check_train(options.training_script_args)
        case ["sbatch", *rest]:
            check_train(rest[rest.index("scripts/train.sbatch") + 1 :])
        case ["make" | "pip" as program, *rest]:
            {"make": check_make, "pip": check_pip}[program](rest)
        case ["python", "-", *_] | ["python"] | ["uv", "sync"]:
            pass
        case _:
            pytest.fail(f"no check for the command: {line}")


@pytest.fixture
def _undo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what scripts change at their start."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_undo")
def test_commands_of_the_notebook_are_valid(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((ROOT / "docs" / "colab.ipynb").read_text())["cells"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    monkeypatch.chdir(desk)
    values = {"DATA": "cifar10", "VAL": "val", "OPTIONS": "", "images": "photo.jpg"}
    commands = re.findall(r"^ *!(python .*)$", code.replace("runs/colab", "runs/NAME"), re.M)
    assert len(commands) == 4 and not any(cell.get("outputs") for cell in cells)
    for command in commands:
        check_command(command.format(**values), monkeypatch)


@pytest.mark.usefixtures("_undo")
@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_commands_are_valid(page: Path, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    for line in COMMANDS[page]:
        check_command(line, monkeypatch)


def test_every_block_has_a_language() -> None:
    """Commands are not hidden in blocks of output, and other programs are named."""
    for page, language, text in BLOCKS:
        assert language in ("sh", "text", "diff", *OTHERS), (page, text)
        hidden = re.search(r"^(python|torchrun|make|pip) ", text, re.M)
        assert language != "text" or not hidden, (page, text)


# Commands that run.


@pytest.fixture(scope="module")
def finished(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run.run(image_root, folder)
    return folder


def scripts_for_runs() -> list[str]:
    """Return the commands that call one of the scripts for a run."""
    lines = [line for lines in COMMANDS.values() for line in lines]
    pattern = r"python scripts/(evaluate|predict|report|export)\.py runs/(NAME|A)\b(?! data.val)"
    return [line for line in dict.fromkeys(lines) if re.match(pattern, line)]


@pytest.mark.slow
@pytest.mark.usefixtures("_undo")
@pytest.mark.parametrize("line", scripts_for_runs())
def test_commands_run(
    line: str, desk: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with every run replaced by a small one."""
    if "--to onnx" in line:
        pytest.importorskip("onnxruntime")
    _, script, *words = line.replace(" - ", " photo.jpg ").split()
    for run in RUNS:
        shutil.rmtree(desk / "runs" / run)
        (desk / "runs" / run).symlink_to(finished)
    if not script.endswith("report.py"):
        words += ["train.device=cpu", "loader.workers=0"]
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code


# Links, names of files, keys and flags.


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge makes of the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_files_keys_and_overrides_exist(page: Path) -> None:
    """Links lead somewhere; files, keys and `key=value` that stand in `code` are valid."""
    for name, anchor in re.findall(r"\]\((?!https://)([^)\s#]*)#?([^)\s]*)\)", page.read_text()):
        path = page.parent / name if name else page
        assert path.is_file(), f"{page.name}: {name}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {name}#{anchor}"

    text = re.sub(r"^```diff.*?^```$", "", page.read_text(), flags=re.M | re.S)
    sections = "|".join(dict.fromkeys(key.partition(".")[0] for key in KEYS))
    folders = "conf|pipeline|models|engine|scripts|tests|docs"
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(rf"\b(?:{folders})/[\w/]+\.(?:py|md|yaml|c)\b", code):
            known = (ROOT / name).exists() or name == "conf/recipe/mine.yaml"
            assert known, f"{page.name}: there is no {name}"
        for key in re.findall(rf"(?<![\w/.])((?:{sections})\.[a-z]\w*)(?![\w.(])", code):
            is_file = key.partition(".")[2] in ("py", "json", "sqlite", "tar", "zip", "csv")
            assert is_file or key in KEYS, f"{page.name}: there is no key {key}"

    for code in read_inline(page):
        words = shlex.split(code) if "=" in code and page.name not in OF_FORKS else []
        if words and all(word.partition("=")[0] in NAMES for word in words):
            for word in words:
                read_override(word)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda p: p.name)
def test_every_page_says_what_it_answers_and_is_listed(page: Path) -> None:
    assert page.read_text().split("\n\n")[1].startswith("This page answers"), page.name
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()
