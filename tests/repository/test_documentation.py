"""README.md and docs/: commands and links are valid, and keys and files exist.

Commands in blocks (```sh), in the text and in benchmarks/ are parsed by the programs, in a
directory with placeholders for the reader's files. Commands for other programs begin with python3.
test_examples.py runs those in docs/fork.md and tasks.md, and after `git apply`.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from conf import cli
from conf.compose import from_overrides
from conf.overrides import read_overrides
from conf.schema import FIELDS, NAMES, SECTIONS, group_names
from scripts.lib import notebook
from tests.helpers.processes import ROOT, needs_extras, run_python

DOCS = ROOT / "docs"
FORK_PAGES = {DOCS / "fork.md", DOCS / "tasks.md"}  # commands run after their changes
PAGES = [ROOT / "README.md", *sorted({*DOCS.glob("*.md")} - FORK_PAGES)]
COMMAND = re.compile(r"(?<![\w/.-])(?:python|torchrun|make|pip|sbatch) [^|;>#\n]*")
ROOT_PATH = re.compile(r"""(?<=[\s="])/(?=(?:imagenet\w*|cifar10|photos|images)\b)""")
RUNS = ("NAME", "pets", "A", "B", "cifar10,optim.lr=0.1", "demo,train.seed=1", "imagenet_rn50_fast")
PLACEHOLDERS = re.compile(r"=\w+\(|\.\.\.|<|=$|CHECKPOINT|VALUE|=mine$")
FOLDERS = "conf|pipeline|models|engine|scripts|tests|docs|examples"
# Files whose names look like keys.
FILES = {"train.py", "augment.py", "loader.py", "train.tar", "train.csv"}


def text_of(page: Path) -> str:
    """Return the page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def inline_of(page: Path) -> list[str]:
    """Return the `code` on a page outside blocks, without code that has a placeholder."""
    code = re.findall(r"`([^`]+)`", text_of(page))
    return [each for each in dict.fromkeys(code) if not PLACEHOLDERS.search(each)]


def commands_of(page: Path) -> list[str]:
    """Return commands from blocks, including those in a loop or a pipe, and from the text."""
    blocks = re.findall(r"^ *```sh\n((?!git apply).*?)^ *```$", page.read_text(), re.M | re.S)
    inline = re.findall(r"^(?:python|torchrun) \S+ \S.*", "\n".join(inline_of(page)), re.M)
    return commands_in("\n".join([*blocks, *inline]))


def commands_in(text: str) -> list[str]:
    """Return each command in lines of a shell once."""
    text = re.sub(r"^#.*", "", text.replace("\\\n", " "), flags=re.M)
    return list(dict.fromkeys(COMMAND.findall(text)))


COMMANDS = {page.name: commands_of(page) for page in PAGES}
NOTEBOOK = (DOCS / "colab.ipynb").read_text().replace("runs/colab", "runs/NAME")
NOTEBOOK = NOTEBOOK.replace("{DATA}", "cifar10").replace("{VAL}", "val")
COMMANDS["colab.ipynb"] = re.findall(r'"!(python [^"\\]*)', NOTEBOOK)
COMMANDS |= {path.name: commands_in(path.read_text()) for path in ROOT.glob("benchmarks/*")}


@pytest.fixture
def reader_dir(tmp_path: Path, image_root: Path, monkeypatch: Any) -> None:
    """Change to a directory with placeholders for a reader's files; data.root may be missing."""
    monkeypatch.setattr(cli, "check_root", lambda config: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # changed by the scripts, like the two below
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    checkpoints = [f"runs/{run}/checkpoints/step-00112590.pt" for run in RUNS]
    for name in [*checkpoints, "resnet50-0676ba61.pth", "lite0.pth", "names.txt"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for name in ("imagenet", "downloads", "cifar10", "images", "photos/val"):
        Path(name).mkdir(parents=True)
    for name in ("photo.jpg", "new_photo.jpg", "photos/a.jpg", "photos/val/b.jpg"):
        shutil.copy(image_root / "val" / "dots" / "00.jpg", name)


def check_train(words: list[str]) -> None:
    """Compose the config like train.py, or a sweep's configs, and print it."""
    cli.parse([*words, "--cfg", "job"], script="train.py", purpose="")


def check_script(path: str, words: list[str], monkeypatch: Any) -> None:
    """Run a script up to the end of the block that reads its arguments."""
    guard = '\nif __name__ == "__main__":\n'
    imports, block, _ = (ROOT / path).read_text().split(guard)
    part = imports + guard + block.partition("\n\n")[0]
    monkeypatch.setattr(sys, "argv", [path, *words])
    # Without onnx, export.py rejects the format immediately.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    names = {"__name__": "__main__", "__file__": str(ROOT / path), "__doc__": path}
    exec(compile(part, str(ROOT / path), "exec"), names)


def check_command(line: str, monkeypatch: Any) -> None:
    """Check a command in the current directory; a page may write its folders as /imagenet."""
    text = re.sub(r"\$\w+", "1", ROOT_PATH.sub(f"{Path.cwd()}/", line))
    match shlex.split(text):
        case ["python", "train.py", *rest]:
            check_train(rest)
        case ["python", script, *rest] if script.startswith("scripts/"):
            check_script(script, rest, monkeypatch)
        case ["torchrun", *rest]:
            options = get_args_parser().parse_args(rest)
            assert options.training_script == "train.py"
            check_train(options.training_script_args)
        case ["sbatch", *rest]:
            check_train(rest[rest.index("scripts/train.sbatch") + 1 :])
        case ["make", *targets]:
            known = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M)
            assert set(targets) <= set(known), targets
        case ["pip", "install", *packages]:
            known = re.findall(r'"([\w\[\]-]+)', (ROOT / "pyproject.toml").read_text())
            assert set(packages) <= {"-r", "requirements.txt", *known}, packages
        case ["python", "-", *_]:
            pass
        case _:
            pytest.fail(f"no check for this command: {line}")


@needs_extras
@pytest.mark.usefixtures("reader_dir")
@pytest.mark.parametrize("page", COMMANDS)
def test_docs_commands_are_valid(page, monkeypatch):
    for line in COMMANDS[page]:
        try:
            check_command(line, monkeypatch)
        except SystemExit as end:
            assert end.code == 0, line


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge generates from the headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted(FORK_PAGES)], ids=lambda page: page.name)
def test_docs_links_files_and_keys_exist(page):
    text = page.read_text().replace("](#", f"]({page.name}#")
    for name, anchor in re.findall(r"\]\((?!https://)([^)\s#]*)#?([^)\s]*)\)", text):
        path = page.parent / name
        assert path.is_file(), f"{page.name}: {name}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {name}#{anchor}"
    code = "\n".join(re.findall(r"`([^`\n]+)`", text))
    files = re.findall(rf"\b(?:{FOLDERS})/[\w/]+\.(?:py|md|yaml|c|patch)\b", code)
    for name in {*files} - {"conf/recipe/mine.yaml"}:
        assert (ROOT / name).exists(), f"{page.name}: {name} not found"
    keys = re.findall(rf"(?<![\w/.])((?:{'|'.join(SECTIONS)})\.[a-z]\w*)(?![\w.(])", code)
    assert {*keys} <= FIELDS.keys() | FILES, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_overrides_are_valid(page):
    """Overrides in `code`, including those followed by options."""
    for code in inline_of(page):
        key, equals, _ = code.strip("'").partition("=")
        if equals and key in NAMES:
            read_overrides(shlex.split(code.partition(" --")[0]))


@needs_extras
def test_readme_python_runs(tmp_path, monkeypatch, capfd):
    """The code trains, evaluates and predicts; the notebook in docs/ calls the same functions."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("train.epochs=2", "train.max_steps=2"), {})
    out = capfd.readouterr().out
    assert "status    finished after step 2" in out
    assert "'top1': " in out and "'probability': " in out


def test_notebook_train_rereads_recipe_and_interrupts(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook.training, "train", lambda config: {"signal": config.optim.lr})
    for lr in (0.5, 0.001):
        (tmp_path / "mine.yaml").write_text(f"optim: {{lr: {lr}}}\n")
        assert notebook.train(f"recipe={tmp_path / 'mine.yaml'}", "data=fake")["signal"] == lr
    with pytest.raises(KeyboardInterrupt):
        notebook.train("data=fake", "optim.lr=2")  # 2 is SIGINT


@needs_extras
@pytest.mark.parametrize("recipe", group_names("recipe"))
def test_expectation_has_all_facts(recipe):
    from tests.extras.test_expectation import FACTS

    expect = from_overrides([f"recipe={recipe}", "data.root=/data"]).expect
    assert expect is None or (expect.keys() == FACTS.keys() and expect["recipe"] == recipe)


@needs_extras
def test_recipe_table_matches_files():
    """Accuracies and times in docs/ are those in conf/recipe/*.yaml."""
    done = run_python(ROOT / ".ci" / "recipes", "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run .ci/recipes"
