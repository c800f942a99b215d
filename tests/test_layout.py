"""Program structure: import directions, core and extras, and banned calls."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.processes import ROOT, run_python

# Part -> parts that it may import, in addition to itself.
LOW = ("conf.errors", "conf.schema", "conf.named", "conf.start", "conf.terminal")
PARTS = ("conf", "pipeline", "models", "engine")
ALLOWED: dict[str, tuple[str, ...]] = {
    "conf": (),
    "pipeline": LOW,
    "models": LOW,
    "engine": (*LOW, "conf.compose", "pipeline", "models"),
    "train": PARTS,
    "scripts": (*PARTS, "train"),
    "extras": (*PARTS, "train", "scripts"),
    "tests": (*PARTS, "train", "scripts"),
    "tests.extras": (*PARTS, "train", "scripts", "extras", "tests"),
}
FILES = [ROOT / "train.py", *(p for part in ALLOWED for p in sorted((ROOT / part).rglob("*.py")))]
# Dotted name -> file, for every module of the project.
SOURCES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES
}
PROGRAM = {name: path for name, path in SOURCES.items() if not name.startswith("tests.")}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> list[str]:
    """Return dotted names that a file imports; for `from a import b`, a.b, as b may be a module."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def within(name: str, parts: tuple[str, ...] | list[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def test_imports_have_one_direction():
    """Also, pipeline.data never imports pipeline.feed; in the engine only tune.py imports
    engine.log; and no extra imports a different extra.
    """
    for name, path in SOURCES.items():
        part = "tests.extras" if name.startswith("tests.extras.") else name.split(".")[0]
        own = ".".join(name.split(".")[:2]) if part == "extras" else part
        for imported in imports(path):
            if imported.split(".")[0] in ALLOWED:
                assert within(imported, (own, *ALLOWED[part])), f"{name} imports {imported}"
            if within(name, ["pipeline.data"]):
                assert not within(imported, ["pipeline.feed"]), f"{name} imports {imported}"
            if part == "engine" and within(imported, ["engine.log"]):
                assert within(name, ["engine.log", "engine.tune"]), f"{name} imports {imported}"


def test_slow_packages_are_imported_lazily():
    """These packages take seconds to import. tests/conf/test_cli.py tests the imports of --help."""
    slow = {"torchvision", "tensorboard", "timm", "onnx", "matplotlib"}
    code = "import sys\nbefore = set()"
    for module in ("torch", "pipeline.feed.loader", "train"):  # torch with CUDA imports pynvml
        code += f"\nimport {module}\nnow = {{name.split('.')[0] for name in sys.modules}}"
        code += "\nprint('>', *(now - before))\nbefore = now"
    printed = run_python("-c", code).stdout
    torch, worker, program = (set(line.split()) for line in printed.splitlines() if ">" in line)
    assert "pipeline" in worker
    assert {"models", "engine"} <= program
    assert (torch | worker | program).isdisjoint(slow)
    assert "pynvml" not in worker | program
    assert worker.isdisjoint({"models", "engine", "hydra"})


# Only conf.named may load code from this checkout; see tests/mistakes.csv. The unpickler in
# cifar.py creates only arrays; see tests/scripts/test_prepare.py. shared.py unpickles data that the
# training process has pickled in memory for its own workers.
EXECUTING = ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "runpy"]
BANNED = {"eval", "exec", "compile", "__import__", "importlib.import_module", "os.system"}
REQUIRED = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
REQUIRED |= {"numpy.load": "allow_pickle=False"}


def test_program_does_not_execute_loaded_code():
    found = set()
    for name in PROGRAM.keys() - {"conf.named"}:
        for imported in imports(PROGRAM[name]):
            if within(imported, [*EXECUTING, "hydra.utils"]):
                found.add((name, imported))
        for call in calls(PROGRAM[name]):
            called, text = ast.unparse(call.func), ast.unparse(call)
            assert called not in BANNED, f"{name}, line {call.lineno}"
            assert "shell=" not in text, f"{name}, line {call.lineno}"
            assert REQUIRED.get(called, "") in text, f"{name}, line {call.lineno}"
    assert found == {("scripts.lib.sources.cifar", "pickle"), ("pipeline.data.shared", "pickle")}
    texts = [path.read_text() for path in (ROOT / "conf").rglob("*.yaml")]
    assert len(texts) > 20
    assert "_target_" not in "".join(texts)
    assert "${oc." not in "".join(texts)
