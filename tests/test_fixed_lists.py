"""Lists that are fixed, because a change of them is a decision. A fork may edit this file."""

import ast
import subprocess
import sys

from conf.overrides import KEYS
from tests.test_layout import PROGRAM, ROOT, calls, tree


def test_size() -> None:
    """No room has more lines than its limit in .ci/size: what comes in pays with what goes."""
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "size"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


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


def test_environment_variables() -> None:
    """Variables give the rank of this process and the cache folder; none affects the result."""
    read = set()
    for path in PROGRAM.values():
        for node in ast.walk(tree(path)):
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
        *("XDG_CACHE_HOME", "PYTHONPATH"),
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
