"""examples/*.patch: each applies, trains, resumes after a kill, and has its effect.

The commands come from docs/fork.md, reading.md and tasks.md, and run in a copy of the tracked
files. `make test` trains two steps of each; longer tests are slow.
"""

import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

import pytest

from tests.helpers.processes import ROOT, Started, needs_extras, run_command, wait_for
from tests.helpers.results import column, rows, summary_of

pytestmark = needs_extras
OTHER_TREE = ROOT / "tests" / "helpers" / "other_tree.py"
TRAIN_SECONDS = 600  # longer training hangs
Words = list[str]
ON_CPU = ["train.device=cpu", "loader.workers=0", "log.every_steps=1"]
SMALL_BATCH = "loader.batch_size=8"
FEW_IMAGES = [SMALL_BATCH, "data=folder", "data.root=data/demo"]  # not those of the demo


class Example(NamedTuple):
    """Commands in docs/ for a patch, without `git apply` and `python`."""

    patches: Words
    before: list[Words]  # draw images, or train a teacher
    training: Words
    after: list[Words]  # read the run


def read_page(page: str) -> dict[str, Example]:
    """Return the examples on a page of docs/ by patch name."""
    examples = {}
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    for block in re.findall(r"^```sh\n(git apply .*?)^```$", text, re.M | re.S):
        first, *lines = block.splitlines()
        patches = first.split()[2:]
        commands = [shlex.split(line, comments=True)[1:] for line in lines]
        last = max(i for i, words in enumerate(commands) if words[0] == "train.py")
        example = Example(patches, commands[:last], commands[last], commands[last + 1 :])
        examples[Path(patches[-1]).stem] = example
    return examples


CHANGES = read_page("fork.md") | read_page("reading.md")
TASKS = read_page("tasks.md")
EXAMPLES = CHANGES | TASKS


class Fork:
    """A copy of the tracked files with a patch."""

    def __init__(self, tree: Path, root: Path, name: str) -> None:
        self.root, self.example, self.name = root, EXAMPLES[name], name
        shutil.copytree(tree, root, symlinks=True)
        variables = {"GIT_CEILING_DIRECTORIES": str(root.parent)}
        done = run_command(["git", "apply", *self.example.patches], variables, cwd=root)
        assert done.returncode == 0, f"{done.stderr}update the patch"

    def run(self, words: Words, *, status: int = 0) -> str:
        done = run_command([sys.executable, *words], cwd=self.root, seconds=TRAIN_SECONDS)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def check_sources(self, *tool: str) -> None:
        """Run a tool on the files that the patches change."""
        patches = "".join((self.root / patch).read_text() for patch in self.example.patches)
        sources = set(re.findall(r"^\+\+\+ b/(.*\.py)$", patches, re.M))
        self.run(["-m", *tool, *sources])

    def training(self, *overrides: str) -> Words:
        """Return the arguments of the training; the demo's get a few images."""
        words = [*self.example.training, *overrides]
        if self.name in TASKS:
            return words
        if "data=folder" in words:
            return [*words, SMALL_BATCH]
        return [*words, *FEW_IMAGES]

    def train(self, *overrides: str) -> Path:
        """Train; return the run directory."""
        self.run(self.training(*ON_CPU, *overrides))
        return self.newest_run

    @property
    def newest_run(self) -> Path:
        summaries = self.root.glob("runs/*/summary.json")
        return max(summaries, key=lambda path: path.stat().st_mtime_ns).parent


def prepared(tree: Path, root: Path, name: str) -> Fork:
    """Apply a patch and run the commands before its training."""
    skip_without_package(name)
    fork = Fork(tree, root, name)
    for words in fork.example.before:
        fork.run(words)
    return fork


def skip_without_package(name: str) -> None:
    package = {"hugging_face": "datasets", "mlflow": "mlflow"}.get(name)
    if package is not None:
        pytest.importorskip(package, reason=f"needs `pip install {package}`")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, image_root: Path) -> Path:
    """Copy the tracked files, with few images in data/demo."""
    root = tmp_path_factory.mktemp("examples") / "tree"
    for name in filter(None, run_command(["git", "ls-files", "-z"]).stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / "data").mkdir()
    (root / "data" / "demo").symlink_to(image_root)
    return root


def test_examples_have_commands():
    patches = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.patch")}
    assert patches == {patch for example in EXAMPLES.values() for patch in example.patches}


def test_fork_tests_are_collected(tree, tmp_path):
    """The first command in fork.md deletes nothing that other tests import."""
    shutil.copytree(tree, tmp_path / "tree", symlinks=True)
    page = (ROOT / "docs" / "fork.md").read_text()
    first, *_ = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    collect = f"{sys.executable} -m pytest -q --collect-only -p no:cacheprovider"
    done = run_command(["sh", "-euc", f"{first}\n{collect}"], cwd=tmp_path / "tree")
    assert done.returncode == 0, done.stdout + done.stderr


def test_fork_page_dataset_trains(tree, tmp_path, ranks):
    """The file in docs/fork.md, with the command below it. It is at most as long as claimed."""
    root = shutil.copytree(tree, tmp_path / "tree", symlinks=True)
    page = (ROOT / "docs" / "fork.md").read_text()
    (source,) = re.findall(r"^```python\n# mine\.py.*?\n(.*?)^```$", page, re.M | re.S)
    assert len([line for line in source.splitlines() if line]) <= 12
    (root / "mine.py").write_text(source)
    (command,) = re.findall(r"^python (train\.py .*data\.source=mine:.*)$", page, re.M)
    words = [*command.split(), *ON_CPU, "train.max_steps=2", "log.trackers=[]"]
    ranks.run([sys.executable, str(OTHER_TREE), *words], 1, cwd=root)
    assert summary_of(root / "runs" / "squares")["step"] == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_patch_trains_two_steps(name, tree, tmp_path, ranks):
    fork = Fork(tree, tmp_path / "tree", name)
    fork.check_sources("ruff", "check")
    fork.check_sources("ruff", "format", "--check")
    skip_without_package(name)
    two_steps = [*ON_CPU, "train.max_steps=2", "log.trackers=[]"]
    for words in [*fork.example.before, fork.training()]:
        # In a process that has already imported torch
        short = [*words, *two_steps] if words[0] == "train.py" else words
        ranks.run([sys.executable, str(OTHER_TREE), *short], 1, cwd=fork.root)
    assert summary_of(fork.newest_run)["step"] == 2


# Score that training reaches; - marks scores where lower is better.
SCORES = {
    "multi_label": ("map", 85),
    "regression": ("-mae", 0.15),
    "ordinal": ("-mae", 0.4),
    "segmentation": ("miou", 70),
    "two_views": ("-uniformity", -1.0),
    "points": ("-loss", 0.05),
    "second_input": ("top1", 90),  # 50 without the second input
}
SCORES |= dict.fromkeys(("distillation", "clips", "hugging_face", "channels"), ("top1", 90))


def check_score(name: str, folder: Path) -> None:
    metric, limit = SCORES[name]
    value = summary_of(folder)["best_" + metric.removeprefix("-")]
    assert value < limit if metric.startswith("-") else value > limit


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_patch_resumes_after_kill(name, tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", name)
    fork.check_sources("mypy", f"--cache-dir={tree.with_name('mypy')}")
    if name == "storage":
        (fork.root / "data" / "demo").unlink()  # only the database is left
    whole = fork.train()
    if name in TASKS:
        check_score(name, whole)
    killed = fork.root / "runs" / "killed"
    words = fork.training(*ON_CPU, f"run.dir={killed}", "checkpoint.every_steps=2")
    with Started([sys.executable, *words], cwd=fork.root, stdout=DEVNULL) as process:
        wait_for("a checkpoint", lambda: [*killed.glob("checkpoints/step-*.pt")], process)
        process.kill()
    assert not (killed / "summary.json").exists()
    assert "resumed at step" in fork.run(words)
    for key in ("step", "params_sha256"):
        assert summary_of(killed)[key] == summary_of(whole)[key]


SAME_WEIGHTS = ("storage", "grad_norm", "grad_cam", "roc", "profiler", "mlflow")  # unchanged
LOGGED = {"grad_norm": "grad_norm", "two_heads": "auxiliary_loss"}
WRITTEN = {"grad_norm": "report.html", "grad_cam": "grad_cam/00*.png", "roc": "curves.html"}
WRITTEN["profiler"] = "profile/steps-1-3.json.gz"


@pytest.fixture(scope="module")
def unchanged(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps of the demo without a patch."""
    root = tmp_path_factory.mktemp("unchanged") / "tree"
    shutil.copytree(tree, root, symlinks=True)
    words = ["train.py", "recipe=demo", *ON_CPU, *FEW_IMAGES, "train.max_steps=4", "run.name=four"]
    run_command([sys.executable, *words], cwd=root).check_returncode()
    return root / "runs" / "four"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_patch_has_effect(name, tree, tmp_path, unchanged):
    fork = prepared(tree, tmp_path / "tree", name)
    folder = fork.train("train.max_steps=4")
    is_same = summary_of(folder)["params_sha256"] == summary_of(unchanged)["params_sha256"]
    assert is_same == (name in SAME_WEIGHTS)
    assert all(row[LOGGED.get(name, "loss")] > 0 for row in rows(folder, "train"))
    if name == "poly_loss":  # starts 2/3 above cross-entropy with three classes
        first, before = (rows(run, "train")[0]["loss"] for run in (folder, unchanged))
        assert 0.3 < first - before < 1
    for words in fork.example.after:
        fork.run([str(folder) if word.startswith("runs/") else word for word in words])
    if name in WRITTEN:
        assert [*fork.root.rglob(WRITTEN[name])]


@pytest.mark.slow
def test_early_stopping_patch_with_two_ranks(tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", "early_stopping")
    words = fork.training(*ON_CPU, "run.name=two")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    fork.run(two)
    folder = fork.root / "runs" / "two"
    steps = summary_of(folder)["step"]
    scores = column(folder, "val", "top1")
    assert scores.index(max(scores)) == len(scores) - 4  # train.patience=3
    assert column(folder, "val", "step")[-1] == steps
    assert summary_of(folder)["history"][0].startswith("stopped early after epoch ")
    assert f"this run finished at step {steps:,}" in fork.run(two)
    fork.run([*two, "train.patience=4"])
    assert summary_of(folder)["step"] > steps
    assert "set schedule=constant" in fork.run([*words, "schedule=cosine"], status=2)


TESTS = [("mlflow", "mlflow"), ("grad_cam", "grad_cam"), ("roc", "roc"), ("regression", "table")]
TESTS += [("segmentation", "masks"), pytest.param("profiler", "profiler", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "tests"), TESTS)
def test_patch_tests_pass(name, tests, tree, tmp_path):
    skip_without_package(name)
    fork = Fork(tree, tmp_path / "tree", name)
    fork.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/extras/test_{tests}.py"])


@pytest.mark.slow
def test_ordinal_patch_exports(tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", "ordinal")
    folder = fork.train("train.max_steps=2")
    fork.run(["scripts/export.py", str(folder), "--to", "safetensors", "--out", "a.safetensors"])
    printed = fork.run(["scripts/predict.py", "a.safetensors", "data/grades/val"])
    assert '"class": "grade' in printed


@pytest.mark.slow
def test_second_input_patch_with_scripts(tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", "second_input")
    folder = str(fork.train())
    for words in (["loader.workers=0"], ["loader.workers=0", "--flip"]):
        assert "top1 100.00 %" in fork.run(["scripts/evaluate.py", folder, *words])
    table = fork.root / "data" / "ages" / "val.csv"
    labels = [line.rpartition(",")[2] for line in table.read_text().splitlines()[1:]]
    for to in ("pt2", "safetensors"):
        fork.run(["scripts/export.py", folder, "--to", to, "--out", f"a.{to}"])
    for path in (folder, "a.safetensors"):
        printed = fork.run(["scripts/predict.py", path, str(table), "--top", "1"])
        found = re.findall(r'"index": (\d)', printed)
        assert found == labels
    output = fork.run(["scripts/predict.py", folder, "data/ages/val"], status=2)
    assert output.splitlines()[-1] == (
        "predict.py: the network also reads age, which image files do not have; "
        "pass a CSV file with the columns path,age"
    )


@pytest.mark.slow
def test_two_views_patch_ranks_and_features(tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", "two_views")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fork.run([*two, *fork.training(*ON_CPU, "run.name=two", "train.max_steps=6")])
    folder = fork.root / "runs" / "two"
    assert all(math.isfinite(row["loss"]) for row in rows(folder, "train"))
    assert rows(folder, "val")[-1]["uniformity"] < 0
    trained = fork.train()
    for split in ("train", "val"):
        printed = fork.run(["scripts/predict.py", str(trained), f"data/patterns/{split}"])
        (fork.root / f"{split}.jsonl").write_text(printed)
    _, *scores = fork.run(["scripts/probe.py", "train.jsonl", "val.jsonl"]).split("top1 ")
    assert [float(text.split()[0]) > 80 for text in scores] == [True, True], scores


@pytest.mark.slow
def test_distillation_patch_rejects_other_classes(tree, tmp_path):
    """The teacher's outputs would be used for different classes."""
    fork = prepared(tree, tmp_path / "tree", "distillation")
    for split in ("train", "val"):
        first = min((fork.root / "data" / "patterns" / split).iterdir())
        first.rename(first.with_name("zebra"))  # last for the student
    output = fork.run(fork.training(*ON_CPU), status=2)
    assert "train.py: train.teacher=" in output and "or their order, differ" in output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_task_patch_trains_in_cuda_graph(name, tree, tmp_path):
    fork = prepared(tree, tmp_path / "tree", name)
    printed = fork.run(fork.training("train.device=cuda", "loader.workers=0"))
    assert "not captured in a CUDA graph" not in printed
    check_score(name, fork.newest_run)
