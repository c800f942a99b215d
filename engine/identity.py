"""What identifies a run: everything that affects its result. A resumed run must have the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.named import is_name
from conf.schema import (
    CHOOSE_SAMPLES,
    FIELDS,
    RESULT,
    Config,
    UserError,
    affecting,
    config_values,
    show,
)
from engine import checkpoint
from engine.plan import Plan
from pipeline.build import Datasets

# Tensor shapes or step numbers depend on these: no checkpoint can resume with other values.
FIXED = (
    "model.name",
    "classes",
    "parameters",
    "optim.name",
    "optim.decay_norms",
    "optim.args",
    "model.freeze",
    "loader.batch_size",
)
WEIGHTS = ("model.weights",)  # keys that name a file, whose content counts
UNUSED = "unused"  # shown for a key that another key disables, as optim.betas with optim.name=sgd
# Keys that decide what a validation measures. If one changes, earlier results are not comparable.
VALIDATED_ON = {
    *("data.val", "data.val_size", "data.mean", "data.std", "augment.val"),
    "data.exif_orientation",
}


def run_identity(config: Config, datasets: Datasets, plan: Plan) -> dict[str, Any]:
    """Return everything that affects the result, name -> value.

    Some keys are replaced by what follows from them: the folders of the images, which may move, by
    a fingerprint of the samples; the decoder by the mode of the dataset; and a file of weights by a
    hash of its content.
    """
    replaced = (*CHOOSE_SAMPLES, "loader.decoder")
    keys = {name: v for name, v in affecting(config, RESULT).items() if name not in replaced}
    # An optimiser or a dataset that moves to another module stays the same.
    alike = {name: FIELDS[name].metadata["alike"] for name in keys}
    keys |= {name: alike[name](value) for name, value in keys.items() if is_name(value)}
    for name in WEIGHTS:
        if keys[name] not in (None, "pretrained"):
            digest = checkpoint.sha256(checkpoint.find(Path(keys[name])))
            keys[name] = f"SHA-256 {digest[:16]}"
    if config.train.deterministic:  # eager and compiled steps round differently
        keys["model.compile"] = plan.compile
    return {
        "data.train": datasets.train.fingerprint(),
        "data.val": datasets.val.fingerprint(),
        **keys,
        "classes": plan.num_classes,
        "parameters": plan.parameters,
        "train.precision": plan.precision,
        "pixels": plan.modes[0],
        "fitted_batch": plan.fitted_batch,
    }


def _value(identity: Mapping[str, Any], name: str) -> Any:
    """Return a value; None also for an empty list or mapping, and for a key that is missing."""
    value = identity.get(name)
    return None if isinstance(value, list | dict) and not value else value


def accepted_changes(
    path: Path, content: dict[str, Any], identity: dict[str, Any], *, accept: bool, stop_step: int
) -> dict[str, str]:
    """Return how a checkpoint's identity differs from that of this start, name -> sentence.

    Raises UserError for changes that are not accepted, and at `stop_step`, where training ends:
    they would have no effect.
    """
    # A key that the program did not have then had the effect of its default.
    defaults = config_values(Config())
    added = (defaults.keys() & identity.keys()) - content["config"].keys()
    stored = {**{name: defaults[name] for name in added}, **content["identity"]}
    now = dict(identity)
    if "model.compile" not in stored or "model.compile" not in now:
        # Only with train.deterministic=true is it part of the identity, and that may be switched.
        stored.pop("model.compile", None)
        now.pop("model.compile", None)
    changes = {}
    for name in {**now, **stored}:
        if _value(stored, name) != _value(now, name):
            before, after = show(stored.get(name, UNUSED)), show(now.get(name, UNUSED))
            changes[name] = f"{name} was {before}, is {after}"
    fixed = [name for name in changes if name in FIXED]
    ended = content["step"] >= stop_step
    if not changes or (accept and not fixed and not ended):
        return changes
    remedy = (
        "give run.name=NAME to train in another directory, or start over in this one with "
        "checkpoint.resume=never (this moves the old run aside)"
    )
    if fixed:
        reason = f"{fixed[0]} cannot change within a run"
    elif accept:
        reason = f"training has ended at step {content['step']:,}: they would have no effect"
    else:
        reason = "these changes affect the result"
        remedy += ", or continue from this checkpoint with checkpoint.accept_changes=true"
    raise UserError(f"cannot resume {path}: {'; '.join(changes.values())}; {reason}: {remedy}")
