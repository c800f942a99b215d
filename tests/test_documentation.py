"""README.md and docs/: commands are valid, links lead somewhere, and keys and files exist.

The commands in blocks (```sh), in the text and in benchmarks/ are read by the parsers of the
programs, in a folder with stand-ins for the reader's files. Those of other programs begin with
python3. Those of docs/fork.md and tasks.md are run by tests/test_examples.py.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from glob import glob
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from conf import cli
from conf.overrides import read_overrides
from conf.schema import FIELDS, NAMES
from tests.helpers.processes import ROOT, needs_extras

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_FORKS = ("fork.md", "tasks.md")  # their commands run after their changes
COMMAND = re.compile(r"(?<![\w/.-])(?:python|torchrun|make|pip|sbatch) [^|;>#]*")
IN_A_ROOT = re.compile(r"""(?<=[\s="])/(?=(?:imagenet\w*|cifar10|photos|images)\b)""")
RUNS = ("NAME", "pets", "A", "B", "cifar10,optim.lr=0.1", "demo,train.seed=1", "imagenet_rn50_fast")
PLACEHOLDERS = re.compile(r"=\w+\(|\.\.\.|<|=$|CHECKPOINT|VALUE|=mine$")


def text_of(page: Path) -> str:
    """Return the page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def inline_of(page: Path) -> list[str]:
    """Return the `code` of a page outside blocks, without code that has a placeholder."""
    code = re.findall(r"`([^`]+)`", text_of(page))
    return [each for each in dict.fromkeys(code) if not PLACEHOLDERS.search(each)]


def commands_of(page: Path) -> list[str]:
    """Return the commands of the blocks, also those in a loop or a pipe, and of the text."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    inline = [code for code in inline_of(page) if re.match(r"(python|torchrun) \S+ \S", code)]
    return commands_in("\n".join([*blocks, *inline]))


def commands_in(text: str) -> list[str]:
    """Return the commands in lines of a shell, each once."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [COMMAND.search(line) for line in lines if not line.startswith("#")]
    return list(dict.fromkeys(match.group().strip() for match in found if match))


def commands_of_the_notebook() -> list[str]:
    cells = json.loads((ROOT / "docs" / "colab.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    values = {"DATA": "cifar10", "VAL": "val"}
    lines = re.findall(r"^ *!(python .*)$", code.replace("runs/colab", "runs/NAME"), re.M)
    return [line.format(**values) for line in lines]


COMMANDS = {page.name: commands_of(page) for page in PAGES if page.name not in OF_FORKS}
COMMANDS["colab.ipynb"] = commands_of_the_notebook()
COMMANDS |= {path.name: commands_in(path.read_text()) for path in (ROOT / "benchmarks").glob("*")}


@pytest.fixture
def desk(tmp_path: Path, image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with stand-ins for the files of a reader; data.root may be missing."""
    monkeypatch.setattr(cli, "require_root", lambda config: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the scripts change these three
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    checkpoints = [f"runs/{run}/checkpoints/step-00112590.pt" for run in RUNS]
    weights = ("resnet50-0676ba61.pth", "lite0.pth")
    for name in [*checkpoints, *weights, "names.txt", ".venv/bin/activate"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for name in ("imagenet", "downloads", "cifar10", "images", "photos/val"):
        Path(name).mkdir(parents=True)
    for name in ("photo.jpg", "new_photo.jpg", "photos/a.jpg", "photos/val/b.jpg"):
        shutil.copy(image_root / "val" / "dots" / "00.jpg", name)


def check_train(words: list[str]) -> None:
    """Compose the config as train.py does, or those of a sweep."""
    cli.parse([*words, *(["--cfg", "job"] if "-m" in words else [])], script="train.py", purpose="")


def check_script(path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script up to the end of the block that reads its arguments."""
    body = ast.parse((ROOT / path).read_text()).body
    guards = [i for i, node in enumerate(body) if isinstance(node, ast.If)]
    assert len(guards) > 1, f"{path} reads its arguments elsewhere"
    # Without onnx, export.py refuses the format at once.
    words = ["pt2" if w == "onnx" and find_spec(w) is None else w for w in words]
    monkeypatch.setattr(sys, "argv", [path, *words])
    part = ast.Module(body[: guards[-2] + 1], type_ignores=[])
    names = {"__name__": "__main__", "__file__": str(ROOT / path), "__doc__": path}
    exec(compile(part, str(ROOT / path), "exec"), names)


def check_install(words: list[str]) -> None:
    """Every package is one of requirements.txt or of an extra."""
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
    match [name for word in shlex.split(text) for name in sorted(glob(word)) or [word]]:
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
        case ["make", *targets]:
            known = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M)
            assert set(targets) <= set(known), targets
        case ["pip", "install", *rest]:
            check_install(rest)
        case ["python", "-", *_] | ["python"] | ["uv", "sync"]:
            pass
        case _:
            pytest.fail(f"no check for the command: {line}")


@needs_extras
@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_are_valid(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in COMMANDS[page]:
        try:
            check_command(line, monkeypatch)
        except SystemExit as end:
            assert end.code == 0, line


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_keys_and_overrides_exist(page: Path) -> None:
    """Links lead somewhere; files, keys and `key=value` that stand in `code` are valid."""
    for name, anchor in re.findall(r"\]\((?!https://)([^)\s#]*)#?([^)\s]*)\)", page.read_text()):
        path = page.parent / name if name else page
        assert path.is_file(), f"{page.name}: {name}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {name}#{anchor}"

    text = page.read_text()
    sections = "|".join(dict.fromkeys(key.partition(".")[0] for key in FIELDS))
    folders = "conf|pipeline|models|engine|scripts|tests|docs|examples"
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(rf"\b(?:{folders})/[\w/]+\.(?:py|md|yaml|c|patch)\b", code):
            known = (ROOT / name).exists() or name == "conf/recipe/mine.yaml"
            assert known, f"{page.name}: there is no {name}"
        for key in re.findall(rf"(?<![\w/.])((?:{sections})\.[a-z]\w*)(?![\w.(])", code):
            is_file = key.partition(".")[2] in ("py", "json", "sqlite", "tar", "zip", "csv")
            assert is_file or key in FIELDS, f"{page.name}: there is no key {key}"
    for code in inline_of(page) if page.name not in OF_FORKS else ():
        words = shlex.split(code) if "=" in code else []
        for word in words if all(each.partition("=")[0] in NAMES for each in words) else ():
            read_overrides([word])


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It trains, evaluates and predicts; the notebook of docs/ calls the same functions."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("train.epochs=2", "train.max_steps=2"), {})
    out = capfd.readouterr().out
    assert "status    finished after step 2" in out
    assert "'top1': " in out and "'probability': " in out


def test_version_authors_and_address_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, address = project["version"], project["urls"]["Repository"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == (version, str(citation["date-released"]))
    assert (citation["version"], citation["authors"]) == (version, project["authors"])
    assert citation["repository-code"] == address


def test_the_address_of_a_fork(tmp_path: Path) -> None:
    """It is replaced in every file that names it, and again by the next one."""
    names = ["pyproject.toml", "CITATION.cff", "docs/colab.ipynb"]
    names += [".github/ISSUE_TEMPLATE/idea.yml", ".github/ISSUE_TEMPLATE/problem.yml"]
    for name in (".ci/address", "README.md", *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    old, new = project["urls"]["Repository"], "https://github.com/me/my-fork"
    subprocess.run([tmp_path / ".ci/address", "https://example.org/a/b"], check=True)
    subprocess.run([tmp_path / ".ci/address", f"{new}.git"], check=True)
    for name in names:
        before = (ROOT / name).read_text()
        assert old in before
        assert (tmp_path / name).read_text() == before.replace(old, new)
    assert subprocess.run([tmp_path / ".ci/address", "me/my fork"]).returncode == 2


def test_the_lock_of_extras() -> None:
    """It pins the packages of its groups, and none that `make env` installs anyway."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    extras = pins("requirements-extras.lock")
    words = groups["timm"] + groups["onnx"]
    assert {word.partition(">=")[0] for word in words} <= extras
    others = pins("requirements.lock") | pins("requirements-dev.lock")
    assert extras.isdisjoint(others | pins("requirements-cuda.lock"))


def pins(lock: str) -> set[str]:
    return set(re.findall("^([a-z].*?)==", (ROOT / lock).read_text(), re.M))
