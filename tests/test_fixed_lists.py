"""Lists that are fixed, because a change of them is a decision. A fork deletes this file.

docs/fork.md has the command.
"""

import ast
import re

from conf.schema import KEYS, NOTHING, SPEED, Config, walk
from tests.processes import run_python
from tests.sources import PROGRAM, ROOT, SOURCES, calls, imports, nodes, within


def test_size() -> None:
    """No part has more lines than its limit in .ci/size: what comes in pays with what goes."""
    done = run_python(ROOT / ".ci" / "size")
    advice = "write less, or raise the limit in .ci/size; a fork deletes this file"
    assert done.returncode == 0, f"{done.stdout}{advice}"


def test_measured_values_become_valid_json() -> None:
    """`json.dumps` would write NaN. The modules below store no measured values for other readers.

    They write digests, names and settings, or compare.
    """
    found = {
        name
        for name, path in PROGRAM.items()
        for call in calls(path)
        if ast.unparse(call.func) in {"json.dumps", "json.dump"}
    }
    assert found == {
        "conf.strict_json",
        "engine.heartbeat",
        "models.weights",
        "extras.demo",
        "scripts.export",
    }


def test_environment_variables() -> None:
    """Variables give the rank of this process and the cache folder; none affects the result."""
    read = set()
    for path in PROGRAM.values():
        for node in nodes(path):
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
    read |= set(re.findall(r'_(?:number|host)\(\w+, "(\w+)"', PROGRAM["conf.launch"].read_text()))
    assert read == {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *(f"SLURM_{name}" for name in ("PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID")),
        *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "USE_AGENT_STORE")),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "XDG_CACHE_HOME", "PYTHONPATH"),
    }


KEYS_BY_SECTION = {
    "data": (
        "source root train val val_fraction val_fold image_size val_size on_error max_bad_fraction "
        "exif_orientation on_device mean std repeats fake_images fake_classes"
    ),
    "loader": (
        "batch_size workers decoder pin_memory prefetch_factor prefetch_batches timeout_seconds "
        "start_method"
    ),
    "autotune": "refresh",
    "augment": "train val batch",
    "model": "name weights args rewrite freeze sync_bn channels_last compile",
    "optim": "name args lr momentum nesterov betas eps weight_decay decay_norms clip_norm",
    "schedule": "name warmup_epochs step_epochs step_gamma final_lr",
    "train": (
        "prepare epochs max_steps seed precision deterministic device micro_batch loss "
        "bce_threshold class_weights label_smoothing ema_decay best_by validate_every_epochs"
    ),
    "checkpoint": "every_steps keep resume accept_changes",
    "run": "name dir",
    "log": "every_steps trackers values observers",
}


def test_the_keys() -> None:
    fixed = [f"{part}.{name}" for part, text in KEYS_BY_SECTION.items() for name in text.split()]
    advice = "state what the key affects, describe it in CHANGELOG.md, and add it here"
    assert fixed == KEYS, advice


def test_what_each_key_affects() -> None:
    """The others affect the result."""
    found = {
        what: {n for n, f, _ in walk(Config()) if f.metadata["affects"] == what}
        for what in (NOTHING, SPEED)
    }
    sections = {"checkpoint", "run", "log", "autotune"}
    assert {n for n in found[NOTHING] if n.split(".")[0] not in sections} == {
        *("data.on_error", "data.max_bad_fraction"),
        *("loader.timeout_seconds", "train.max_steps", "train.validate_every_epochs"),
        *("train.best_by", "train.prepare"),
    }
    assert sections <= {n.split(".")[0] for n in found[NOTHING]}
    loader = ("workers", "pin_memory", "prefetch_factor", "prefetch_batches", "start_method")
    assert found[SPEED] == {
        *(f"loader.{name}" for name in loader),
        *("data.on_device", "model.channels_last", "model.rewrite", "model.compile"),
        *("train.deterministic", "train.device"),
    }


# The files of pipeline/ in the order of the journey of a batch: a file imports earlier ones only.
JOURNEY = [
    *("machine", "shared", "containers", "index", "splits", "class_names", "region", "decode"),
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
