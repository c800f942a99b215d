"""The structure of the program: directions of imports, core and extras, and banned calls."""

import ast
import re

from tests.processes import run_python
from tests.sources import PROGRAM, ROOT, SOURCES, calls, imports, within

# Part -> parts of this project that it may import, in addition to itself.
LOW = ("conf.schema", "conf.files", "conf.named", "conf.packages")
ALLOWED: dict[str, tuple[str, ...]] = {
    "conf": (),
    "pipeline": LOW,
    "models": LOW,
    "engine": (
        *LOW,
        "conf.compose",
        "pipeline",
        "models",
    ),
    "train": ("conf", "pipeline", "models", "engine"),
    "scripts": ("conf", "pipeline", "models", "engine", "train"),
    "extras": ("conf", "pipeline", "models", "engine", "train", "scripts"),
    "tests": ("conf", "pipeline", "models", "engine", "train", "scripts", "extras"),
}
# Names of extras that are also words of the core, such as the demo of the README.
WORDS = {"demo", "kernels", "metrics", "pictures", "progressive", "table"}


def test_imports_have_one_direction() -> None:
    assert [p.name for p in ROOT.glob("*.py")] == ["train.py"]
    for name, path in SOURCES.items():
        part = name.split(".")[0]
        for imported in imports(path):
            if imported.split(".")[0] in ALLOWED:
                assert within(imported, (part, *ALLOWED[part])), f"{name} imports {imported}"


def test_core_of_the_engine_does_not_know_its_observers() -> None:
    for name, path in SOURCES.items():
        if name.startswith("engine.") and not within(name, ["engine.log", "engine.tune"]):
            wrong = [i for i in imports(path) if within(i, ["engine.log", "engine.tune"])]
            assert not wrong, f"{name} imports {wrong}"


def test_the_core_does_not_know_the_extras() -> None:
    """An extra is reached by a name in YAML, and does not need another one."""
    names = {name.split(".")[1] for name in SOURCES if name.startswith("extras.")}
    core = [path for name, path in SOURCES.items() if name.split(".")[0] not in ("extras", "tests")]
    core = [*core, *(ROOT / "pipeline").glob("*.c")]
    unknown = re.compile(rf"\b(extras|{'|'.join(sorted(names - WORDS) or ['extras'])})\b")
    for path in core:
        if path.relative_to(ROOT).parts[0] != "scripts":
            assert not unknown.findall(path.read_text()), path
    for name, path in SOURCES.items():
        if name.startswith("tests.") and not name.startswith("tests.extras"):
            assert not [i for i in imports(path) if within(i, ["extras"])], name
        elif name.startswith("extras."):
            own = ".".join(name.split(".")[:2])
            others = [i for i in imports(path) if within(i, ["extras"])]
            assert all(within(i, [own]) for i in others), f"{name} imports {others}"


def test_no_circular_imports() -> None:
    modules = {name: imports(path) for name, path in SOURCES.items() if path.name != "__init__.py"}
    graph = {
        name: {o for o in modules if o != name and any(within(i, [o]) for i in imported)}
        for name, imported in modules.items()
    }
    while graph:
        leaves = {name for name, found in graph.items() if not found & graph.keys()}
        assert leaves, f"circular imports: {sorted(graph)}"
        graph = {name: found for name, found in graph.items() if name not in leaves}


# The files of pipeline/ in the order of the journey of a batch: a file imports earlier ones only.
JOURNEY = [
    *(
        "machine",
        "shared",
        "listing",
        "containers",
        "index",
        "splits",
        "class_names",
        "region",
        "decode",
    ),
    *("parameters", "torchvision_transforms", "augment", "batch", "batch_augment"),
    *("dataset", "build"),
    *("sampler", "clock", "ring", "prefetcher", "feed"),
]


def test_pipeline_is_read_in_one_direction() -> None:
    found = {name.split(".")[1] for name in SOURCES if name.startswith("pipeline.")}
    assert found - {"gpu"} == set(JOURNEY)
    for place, name in enumerate(JOURNEY):
        later = [f"pipeline.{other}" for other in JOURNEY[place + 1 :]]
        wrong = [i for i in imports(SOURCES[f"pipeline.{name}"]) if within(i, later)]
        assert not wrong, f"pipeline.{name} imports {wrong}"


def loaded_by(*statements: str) -> list[set[str]]:
    """Return the top-level modules that each statement loads, one after the other."""
    code = "import sys\nbefore = set()"
    for statement in statements:
        code += f"\n{statement}\nnow = {{name.split('.')[0] for name in sys.modules}}"
        code += "\nprint('>', *(now - before))\nbefore = now"
    lines = [line for line in run_python("-c", code).stdout.splitlines() if line.startswith(">")]
    return [set(line.split()) for line in lines]


def test_slow_packages_are_imported_when_used() -> None:
    """torch takes seconds: --help and a mistake are answered without it."""
    slow = {"torchvision", "tensorboard", "timm", "onnx", "matplotlib"}
    (conf,) = loaded_by(
        "from conf import cli; cli.load(['data=fake']); cli.help_text('train.py', '')"
    )
    assert {"conf", "hydra"} <= conf
    assert conf.isdisjoint({"torch", "numpy", "PIL", "pipeline", "models", "engine", *slow})
    torch, worker, program = loaded_by(
        "import torch",  # a build for CUDA imports pynvml
        "import pipeline.ring",
        "import train",
    )
    assert "pipeline" in worker and {"models", "engine"} <= program
    assert (torch | worker | program).isdisjoint(slow) and "pynvml" not in worker | program
    assert worker.isdisjoint({"models", "engine", "hydra"})


def test_quick_tests_start_no_process_but_take_a_step() -> None:
    """`make quick` finds them by what they import and call."""
    rules = re.findall(r"-e '(.*?)'", (ROOT / "Makefile").read_text().replace("$$", "$"))
    left_out = re.compile("|".join(rules), re.MULTILINE)
    quick = {n for n, p in SOURCES.items() if "test_" in n and not left_out.search(p.read_text())}
    assert {"tests.test_train_step", "tests.engine.test_loss_scale"} <= quick
    slow = ["tests.processes", "train.train"]
    assert not [n for n in quick if any(within(i, slow) for i in imports(SOURCES[n]))]
    assert not {"tests.test_train", "tests.test_layout", "tests.scripts.test_doctor"} & quick


def test_only_one_module_starts_processes() -> None:
    """Of the tests: tests/processes.py kills what is left of them."""
    named = {"PIPE", "STDOUT", "DEVNULL", "CompletedProcess", "TimeoutExpired"}
    command = "tests.equal.compare"  # of `make equal`
    for name in SOURCES.keys() - PROGRAM.keys() - {"tests.processes", command}:
        found = {i for i in imports(SOURCES[name]) if within(i, ["subprocess", "os.fork"])}
        assert found <= {f"subprocess.{each}" for each in named}, name


def test_no_code_from_a_config_or_a_file_is_executed() -> None:
    modules = ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "runpy"]
    banned = {"eval", "exec", "compile", "__import__", "importlib.import_module", "os.system"}
    required = {
        "torch.load": ("weights_only", "True"),
        "np.load": ("allow_pickle", "False"),
        "numpy.load": ("allow_pickle", "False"),
    }
    for name, path in PROGRAM.items():
        if name == "conf.named":  # the door to code of this checkout; see tests/conf/test_named.py
            continue
        found = {i for i in imports(path) if within(i, [*modules, "hydra.utils"])}
        # Its unpickler makes nothing but arrays; see tests/scripts/test_prepare.py.
        assert found <= ({"pickle"} if name == "scripts.lib.sources.cifar" else set()), name
        for call in calls(path):
            called, where = ast.unparse(call.func), f"{name}, line {call.lineno}"
            options = {k.arg: ast.unparse(k.value) for k in call.keywords}
            door = (name, called) == ("conf.named", "importlib.import_module")
            assert door or called not in banned, where
            assert options.get("shell", "False") == "False", where
            if called in required:
                option, value = required[called]
                assert options.get(option) == value, where
    files = list((ROOT / "conf").rglob("*.yaml"))
    assert len(files) > 20
    assert not [p for p in files if "_target_" in p.read_text() or "${oc." in p.read_text()]
