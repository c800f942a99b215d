"""The structure of the program: directions of imports, core and extras, and banned calls."""

import ast
import re

from tests.helpers.processes import run_python
from tests.helpers.sources import PROGRAM, ROOT, SOURCES, calls, imports, within

# Part -> what it may import, in addition to itself.
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
# Names of extras that are also words of the core, such as the demo of the README.
WORDS = {"demo", "kernels", "metrics", "pictures", "progressive", "table"}


def test_imports_have_one_direction() -> None:
    """Also, of the engine only tune.py imports engine.log, and no extra imports another one."""
    for name, path in SOURCES.items():
        part = "tests.extras" if name.startswith("tests.extras.") else name.split(".")[0]
        own = ".".join(name.split(".")[:2]) if part == "extras" else part
        for imported in imports(path):
            if imported.split(".")[0] in ALLOWED:
                assert within(imported, (own, *ALLOWED[part])), f"{name} imports {imported}"
            if part == "engine" and within(imported, ["engine.log"]):
                assert within(name, ["engine.log", "engine.tune"]), f"{name} imports {imported}"


def test_the_core_does_not_know_the_extras() -> None:
    """An extra is reached by a name in YAML."""
    names = {name.split(".")[1] for name in SOURCES if name.startswith("extras.")}
    unknown = re.compile(rf"\b({'|'.join(sorted({'extras', *names} - WORDS))})\b")
    files = [ROOT / "train.py"]
    files += [p for part in PARTS for kind in ("py", "c") for p in (ROOT / part).rglob(f"*.{kind}")]
    assert not {path: found for path in files if (found := unknown.findall(path.read_text()))}


def test_slow_packages_are_imported_when_used() -> None:
    """They take seconds. tests/conf/test_cli.py has what --help imports."""
    slow = {"torchvision", "tensorboard", "timm", "onnx", "matplotlib"}
    code = "import sys\nbefore = set()"
    for module in ("torch", "pipeline.loader", "train"):  # torch for CUDA imports pynvml
        code += f"\nimport {module}\nnow = {{name.split('.')[0] for name in sys.modules}}"
        code += "\nprint('>', *(now - before))\nbefore = now"
    lines = [line for line in run_python("-c", code).stdout.splitlines() if line.startswith(">")]
    torch, worker, program = (set(line.split()) for line in lines)
    assert "pipeline" in worker
    assert {"models", "engine"} <= program
    assert (torch | worker | program).isdisjoint(slow)
    assert "pynvml" not in worker | program
    assert worker.isdisjoint({"models", "engine", "hydra"})


def test_no_code_from_a_config_or_a_file_is_executed() -> None:
    modules = ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "runpy"]
    banned = {"eval", "exec", "compile", "__import__", "importlib.import_module", "os.system"}
    required = {
        "torch.load": ("weights_only", "True"),
        "np.load": ("allow_pickle", "False"),
        "numpy.load": ("allow_pickle", "False"),
    }
    for name, path in PROGRAM.items():
        if name == "conf.named":  # the door to code of this checkout; see tests/mistakes.csv
            continue
        found = {i for i in imports(path) if within(i, [*modules, "hydra.utils"])}
        # Its unpickler makes nothing but arrays; see tests/scripts/test_prepare.py.
        assert found <= ({"pickle"} if name == "scripts.lib.sources.cifar" else set()), name
        for call in calls(path):
            called, where = ast.unparse(call.func), f"{name}, line {call.lineno}"
            options = {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert called not in banned, where
            assert options.get("shell", "False") == "False", where
            if called in required:
                option, value = required[called]
                assert options.get(option) == value, where
    files = list((ROOT / "conf").rglob("*.yaml"))
    assert len(files) > 20
    assert not [p for p in files if "_target_" in p.read_text() or "${oc." in p.read_text()]
