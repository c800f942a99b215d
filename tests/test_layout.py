"""The structure of the program: directions of imports, banned calls, and the list of keys."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.overrides import KEYS

ROOT = Path(__file__).parents[1]
# package -> modules of this project that it may import, in addition to itself
ALLOWED = {
    "conf": [],
    "pipeline": ["conf.schema", "conf.files", "conf.packages", "conf.rooms"],
    "models": ["conf.schema", "conf.files", "conf.packages", "conf.rooms"],
    "engine": [
        *("conf.schema", "conf.files", "conf.launch", "conf.rooms"),
        *("conf.signals", "conf.strict_json"),
        *("pipeline", "models"),
    ],
    "train": ["conf", "pipeline", "models", "engine"],
    "scripts": ["conf", "pipeline", "models", "engine", "train"],
    "tests": ["conf", "pipeline", "models", "engine", "train", "scripts"],
}


def sources() -> dict[str, Path]:
    """Dotted name -> file, for every module of the project."""
    files = [
        ROOT / "train.py",
        *(p for package in ALLOWED for p in sorted((ROOT / package).rglob("*.py"))),
    ]
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in files
    }


SOURCES = sources()
PROGRAM = {name: path for name, path in SOURCES.items() if not name.startswith("tests.")}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b, because b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_all_modules_are_found() -> None:
    expected = {"train", "conf.schema", "conf.cli", "pipeline.loader", "models.zoo", "engine.state"}
    assert expected <= set(PROGRAM)
    outside = [p for p in ROOT.glob("*.py") if p.name != "train.py"]
    assert outside == []


@pytest.mark.parametrize("name", SOURCES)
def test_imports_have_one_direction(name: str) -> None:
    package = name.split(".")[0]
    for imported in imports(SOURCES[name]):
        if imported.split(".")[0] in ALLOWED:
            assert within(imported, [package, *ALLOWED[package]]), f"{name} imports {imported}"


def test_no_circular_imports() -> None:
    modules = {
        name: list(imports(path)) for name, path in SOURCES.items() if path.name != "__init__.py"
    }
    graph = {
        name: {
            other
            for other in modules
            if other != name and any(within(i, [other]) for i in imported)
        }
        for name, imported in modules.items()
    }
    while graph:
        leaves = {name for name, found in graph.items() if not found & graph.keys()}
        assert leaves, f"circular imports: {sorted(graph)}"
        graph = {name: found for name, found in graph.items() if name not in leaves}


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules of a new interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_conf_works_without_torch() -> None:
    loaded = loaded_by(
        "from conf import cli; cli.load(['recipe=demo']); cli.help_text('train.py', '')"
    )
    assert {"conf", "hydra"} <= loaded
    assert loaded.isdisjoint(
        {"torch", "torchvision", "numpy", "PIL", "pipeline", "models", "engine"}
    )


def test_slow_and_optional_packages_are_imported_when_used() -> None:
    loaded = loaded_by("import train")
    assert {"torch", "pipeline", "models", "engine"} <= loaded
    loaded -= loaded_by("import torch")  # a build for CUDA imports pynvml
    assert loaded.isdisjoint(
        {"torchvision", "tensorboard", "timm", "pynvml", "simplejpeg", "onnx", "matplotlib"}
    )


def test_workers_do_not_import_the_models() -> None:
    assert loaded_by("import pipeline.worker").isdisjoint(
        {"torchvision", "models", "engine", "tensorboard", "hydra"}
    )


@pytest.mark.parametrize("name", SOURCES)
def test_modules_have_specific_names(name: str) -> None:
    parts = {word for part in name.split(".") for word in part.removeprefix("test_").split("_")}
    assert parts.isdisjoint(
        {"utils", "util", "utilities", "helpers", "helper", "common", "misc", "tools"}
    )


@pytest.mark.parametrize("name", PROGRAM)
def test_no_code_from_a_config_or_a_file_is_executed(name: str) -> None:
    banned = {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "runpy",
        "hydra.utils",
    }
    assert not [i for i in imports(PROGRAM[name]) if within(i, list(banned))]
    for call in calls(PROGRAM[name]):
        called = ast.unparse(call.func)
        assert called not in {
            "eval",
            "exec",
            "compile",
            "__import__",
            "importlib.import_module",
            "os.system",
        }
        options = {k.arg: ast.unparse(k.value) for k in call.keywords}
        if called == "torch.load":
            assert options.get("weights_only") == "True", f"{name}, line {call.lineno}"
        if called in {"np.load", "numpy.load"}:
            assert options.get("allow_pickle") == "False", f"{name}, line {call.lineno}"
        assert options.get("shell", "False") == "False", f"{name}, line {call.lineno}"


def test_measured_values_become_valid_json() -> None:
    """`json.dumps` would write NaN. The modules below store no measured values for other readers.

    They write digests, names, settings, and the cache of loader.workers=auto.
    """
    found = {
        name
        for name, path in PROGRAM.items()
        for call in calls(path)
        if ast.unparse(call.func) in {"json.dumps", "json.dump"}
    }
    assert found == {
        "conf.strict_json",
        "engine.compile_cache",
        "engine.heartbeat",
        "engine.tune.autotune",
        "pipeline.demo.images",
        "scripts.export",
    }


def test_no_config_file_names_code() -> None:
    files = list((ROOT / "conf").rglob("*.yaml"))
    assert len(files) > 20
    assert not [p for p in files if "_target_" in p.read_text() or "${oc." in p.read_text()]


def test_environment_variables() -> None:
    """Variables give the rank of this process and the cache folder; none affects the result."""
    read = set()
    for path in PROGRAM.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "os.environ.get",
                "os.getenv",
            }:
                read.add(ast.literal_eval(node.args[0]))
            elif (
                isinstance(node, ast.Subscript)
                and ast.unparse(node.value) == "os.environ"
                and isinstance(node.ctx, ast.Load)
            ):
                read.add(ast.literal_eval(node.slice))
    assert read == {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "TORCHELASTIC_RUN_ID",
        "XDG_CACHE_HOME",
        "PYTHONPATH",  # of the jobs of a sweep
    }


def test_the_keys() -> None:
    """The list is fixed, because a new key is a decision."""
    known = [
        "data.source",
        "data.root",
        "data.train",
        "data.val",
        "data.classes",
        "data.val_fraction",
        "data.image_size",
        "data.sizes",
        "data.val_size",
        "data.on_error",
        "data.max_bad_fraction",
        "data.max_pixels",
        "data.mean",
        "data.std",
        "data.repeats",
        "data.fake_images",
        "data.fake_classes",
        "loader.batch_size",
        "loader.workers",
        "loader.decoder",
        "loader.pin_memory",
        "loader.prefetch_factor",
        "loader.prefetch_batches",
        "loader.timeout_seconds",
        "loader.start_method",
        "autotune.refresh",
        "augment.train",
        "augment.val",
        "augment.batch",
        "model.name",
        "model.weights",
        "model.args",
        "model.freeze",
        "model.sync_bn",
        "model.channels_last",
        "model.compile",
        "optim.name",
        "optim.lr",
        "optim.momentum",
        "optim.nesterov",
        "optim.betas",
        "optim.eps",
        "optim.weight_decay",
        "optim.decay_norms",
        "optim.layer_decay",
        "optim.clip_norm",
        "schedule.name",
        "schedule.warmup_epochs",
        "schedule.step_epochs",
        "schedule.step_gamma",
        "schedule.final_lr",
        "train.epochs",
        "train.max_steps",
        "train.seed",
        "train.precision",
        "train.deterministic",
        "train.device",
        "train.accumulate",
        "train.loss",
        "train.bce_threshold",
        "train.class_weights",
        "train.label_smoothing",
        "train.ema_decay",
        "train.validate_every_epochs",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "checkpoint.resume",
        "checkpoint.accept_changes",
        "run.name",
        "run.dir",
        "log.every_steps",
        "log.trackers",
        "profile.steps",
    ]
    advice = (
        "a new key is a decision: state what it affects, describe it in CHANGELOG.md, add it here"
    )
    assert known == KEYS, advice
