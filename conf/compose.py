"""Compose a checked `Config` from layers.

From low to high: the defaults of the schema; the groups and the recipe, which Hydra merges, or the
values in a checkpoint; the values that the program decides; typed groups; typed keys.
"""

import copy
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import schema
from conf.named import check_there, is_there, names_in
from conf.overrides import SCHEMA, Override, advice, allowed_values, find, read_override, read_yaml
from conf.schema import (
    FIELDS,
    FOLDER,
    GROUPS,
    KEYS,
    RESULT,
    Config,
    UserError,
    affecting,
    config_values,
    last_name,
    missing,
    show,
    with_size,
)

SECTIONS = {name.split(".")[0] for name in KEYS}
OWN = read_yaml(FOLDER / "config.yaml")
DEFAULT_RECIPE: str = next(each["recipe"] for each in OWN.pop("defaults") if "recipe" in each)
MULTIRUN = str(OWN.pop("multirun", None))  # the program behind -m
MISSING = {name for name in names_in(OWN) if not is_there(name)}
# Keys that may take a path from an environment variable. The path is stored with the run.
PATH_KEYS = ("data.root", "data.train", "data.val", "model.weights", "checkpoint.resume", "run.dir")
# Keys that may name code of this checkout as `module:name`, or hold entries that do.
NAMING = ["data.source", "data.on_device", "augment.train", "augment.val", "augment.batch"]
NAMING += ["model.name", "model.rewrite", "optim.name", "train.prepare", "log.observers"]
NAME_LENGTH = 60  # of a run's name, before the hash
NAMED_LAST = ("data", "loader", "augment")  # from the end
Values = Mapping[str, Any]
"""Dotted key -> value; an interpolation is text."""


def load(
    words: Sequence[str] = (), *, runnable: bool = True, decided: Values | None = None
) -> Config:
    """Compose and check a config from the words of a command line.

    Raises UserError for a key, group choice or value that is not allowed.

    Args:
        runnable: refuse a config without data.root, which has no default.
        decided: values that replace the recipe's. Other values of the recipe may refer to them.
    """
    typed = [read_override(word) for word in words]
    recipes = [find("recipe", DEFAULT_RECIPE), *(o.value for o in typed if o.name == "recipe")]
    file = recipes[-1]
    tree = copy.deepcopy(DEFAULTS)
    _set(tree, _offered(_recipe(file)), file)
    _set(tree, decided or {}, "decided")
    planned = _flat(tree)
    swept = _set_typed(tree, typed)
    config = _checked(tree, typed, runnable=runnable)
    absent = ", ".join(sorted(MISSING))
    notes = [f"left out, because it is not in this copy: {absent}"] if MISSING else []
    changed = _changes(planned, tree, config)
    if config.run.name is None:
        tree.run.name = _run_name(file.stem, changed, swept, config)
        config.run = cast(schema.Run, OmegaConf.to_object(tree.run))
    config.expect = read_yaml(file).get("expect")
    config.recipe, config.typed, config.notes = file.stem, list(words), notes
    config.changed = changed
    return config


def load_stored(stored: Values, words: Sequence[str] = ()) -> Config:
    """Compose and check a config from the values in a checkpoint and typed words.

    Unknown keys are ignored, and missing ones have their default: another version wrote them. In
    augment.val, sizes that equal data.val_size follow this key. Raises UserError as `load`.
    """
    typed = [read_override(word) for word in words]
    for override in typed:
        if override.name == "recipe":
            raise UserError(f"{override.text}: the checkpoint holds the whole config; leave it out")
    values = {name: stored[name] for name in KEYS if name in stored}
    if {"augment.val", "data.val_size"} <= values.keys():
        size = values["data.val_size"]
        values["augment.val"] = with_size(values["augment.val"], size, "${data.val_size}")
    tree = copy.deepcopy(DEFAULTS)
    _set(tree, _offered(values), "the checkpoint")
    _set_typed(tree, typed)
    config = _checked(tree, typed, runnable=False)
    config.typed = list(words)
    return config


def _set_typed(tree: DictConfig, typed: Sequence[Override]) -> set[str]:
    """Set the typed groups in place, then the typed keys; return the keys with another value.

    A group of a section with a name (optim, schedule, model) also resets the keys that it does not
    set, because the values of a recipe for one optimiser are wrong for another. In other sections
    the values of the recipe stay: data=fake keeps the image size.
    """
    for group, file in {o.name: o.value for o in typed if o.name in GROUPS}.items():
        if group != "recipe":
            if f"{group}.name" in FIELDS:
                tree[group] = copy.deepcopy(DEFAULTS[group])
            _set(tree, _dotted({group: read_yaml(file)}), file)
    grouped = _flat(tree)
    for override in typed:
        if override.name in FIELDS:
            _set(tree, {override.name: override.value}, override.text)
    return {o.name for o in typed if o.name in FIELDS and grouped[o.name] != o.value}


def _dotted(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return section -> key -> value as dotted key -> value."""
    found: dict[str, Any] = {}
    for section, values in content.items():
        if isinstance(values, dict):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:  # a mistake
            found[section] = values
    return found


def _offered(values: Values) -> dict[str, Any]:
    """Leave out the names of conf/config.yaml whose module is not in this checkout."""

    def offered(value: Any) -> Any:
        if isinstance(value, list):
            return [each for each in value if not MISSING & names_in(each)]
        return None if MISSING & names_in(value) else value

    return {name: offered(value) for name, value in values.items()}


def _set(tree: DictConfig, values: Values, origin: Path | str) -> None:
    """Set keys in place; `origin`: where the values are from, for the message of a mistake."""
    for name, value in values.items():
        try:
            OmegaConf.update(tree, name, value, merge=False)
        except OmegaConfBaseException:
            if name not in FIELDS:
                raise UserError(f"{origin}: there is no key {name}; {advice(name)}") from None
            wrong = f"{name}={show(value)}: not allowed; give {allowed_values(name)}"
            raise UserError(f"{origin}: {wrong}") from None


def _checked(tree: DictConfig, typed: Sequence[Override], *, runnable: bool) -> Config:
    """Return a tree as a Config; raise UserError for a value that is not allowed.

    An environment variable must not change the training, and its value would be stored: only paths
    may have functions such as `${oc.env:NAME}`, and all keys `${now:FORMAT}`.
    """
    for key, value in _flat(tree).items():
        if key not in PATH_KEYS and re.search(r"\$\{(?!now:)[\w.]+:", str(value)):
            allowed = "only ${key} and ${now:FORMAT} are allowed; write the value itself"
            raise UserError(f"{key}={show(value)}: {allowed}")
        for name in sorted(names_in(value)) if key in NAMING else []:
            check_there(name, key)
    try:
        config = cast(Config, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        key = ".".join(re.split(r"[.\[]", error.full_key or "")[:2])
        text = {o.name: o.text for o in typed}.get(key, key)
        raise UserError(f"{text}: {str(error).splitlines()[0]}") from None
    schema.check(config, runnable=runnable)
    for override in typed:
        if override.name in FIELDS:
            _check_effect(override, config)
    return config


@cache
def _recipe(file: Path) -> dict[str, Any]:
    """The groups and the recipe, which Hydra merges: dotted key -> value.

    A recipe that is a file may be based on recipes of this program and on files next to its folder.
    """
    name, overrides = file.stem, []
    if file.parent != FOLDER / "recipe":
        name, path = "of_a_file", QuotedString(f"file://{file.parents[1]}", Quote.single)
        overrides = [f"hydra.searchpath=[{path.with_quotes()}]"]
        ConfigStore.instance().store(name, read_yaml(file), group="recipe", package="_global_")
    with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
        try:
            composed = compose("config", [f"recipe={name}", *overrides])
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            reason = " ".join(str(error).splitlines()[:2]).strip()
            raise UserError(f"{file}: {reason}; correct it") from None
    content = cast(dict[str, Any], OmegaConf.to_container(composed))
    # `expect` may also be of a recipe in its defaults, which is another training.
    return _dotted({k: value for k, value in content.items() if k not in ("multirun", "expect")})


def _flat(tree: DictConfig) -> dict[str, Any]:
    """Dotted key -> value, for every key; interpolations as written."""
    return _dotted(cast(dict[str, Any], OmegaConf.to_container(tree)))


def _changes(planned: Values, tree: DictConfig, config: Config) -> dict[str, str]:
    """Return the keys that affect the result and differ from the recipe, key -> normalised value.

    An expression of the recipe, `planned`, has its value in the new tree: that of data.val_size,
    ${data.image_size}, is 64 after data.image_size=64.
    """
    before = OmegaConf.create(dict(planned), parent=tree)
    recipe = cast(dict[str, Any], OmegaConf.to_container(before, resolve=True))
    changed = {}
    for name, value in affecting(config, RESULT).items():
        alike = FIELDS[name].metadata["alike"]
        if alike(value) != alike(recipe[name]):
            changed[name] = show(alike(value))
    return changed


def _run_name(
    recipe: str, changed: Mapping[str, str], swept: Collection[str], config: Config
) -> str:
    """The default run.name: the recipe, and the keys that affect the result and differ from it.

    Such as `cifar10,optim.lr=0.3,data.root=photos`. Of the default recipe, which says nothing about
    own images, the model is named. Typed keys, in which runs are to differ, come before keys that a
    group sets, and those of the input are last. Of a path, the name has the last part; the run's
    identity tells two folders of one name apart. Characters that are unsafe in a file name are
    replaced, and parts beyond NAME_LENGTH left out. Then a hash follows, so that two commands have
    the same name only for the same training.
    """
    parts = dict(changed)
    if config.checkpoint.resume not in ("auto", "never"):  # starts from another run's weights
        parts["checkpoint.resume"] = str(last_name(config.checkpoint.resume))
    if recipe == DEFAULT_RECIPE:
        recipe = parts.pop("model.name", config.model.name)

    def rank(key: str) -> list[bool]:
        of_input = [key.startswith(f"{section}.") for section in NAMED_LAST]
        return [key != "model.name", key not in swept, *of_input]

    full = [recipe, *(f"{key}={parts[key]}" for key in sorted(parts, key=rank))]
    safe = (re.sub(r"[^\w.+=-]+", "-", part, flags=re.ASCII).strip("-") for part in full)
    first, *rest = (part.replace("=-", "=") for part in safe)  # [0.9,0.95] as 0.9-0.95
    name = first[:NAME_LENGTH]
    for part in rest:
        name += f",{part}" if len(f"{name},{part}") <= NAME_LENGTH else ""
    whole = ",".join(full)
    return name if name == whole else f"{name},{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _check_effect(override: Override, config: Config) -> None:
    """Refuse a typed key that has no effect in this config, and name the key that disables it."""
    values, when = config_values(config), missing(config, override.name)
    if not when:
        return
    because = " and ".join(f"{other}={show(values[other])}" for other in when)
    groups = {other.removesuffix(".name"): allowed for other, allowed in when.items()}
    needed = " and ".join(f"{k}={' or '.join(map(show, allowed))}" for k, allowed in groups.items())
    raise UserError(
        f"{override.text}: has no effect with {because}; give {needed}, or leave it out"
    )


def to_yaml(content: Config | list[str], section: str | None = None) -> str:
    """YAML of a resolved config (`--cfg job`, config.yaml), a section, or a list of overrides."""
    if isinstance(content, list):
        return OmegaConf.to_yaml(OmegaConf.create(content))
    sections = {name: s for name, s in asdict(content).items() if name in SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(sections[section] if section else sections))


DEFAULTS = copy.deepcopy(SCHEMA)
_set(DEFAULTS, _offered(_dotted(OWN)), FOLDER / "config.yaml")
