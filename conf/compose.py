"""Compose a checked `Config` from one ordered list of layers.

From low to high: the defaults of the schema, the groups, the recipe, the values that the program
has decided, typed groups, typed keys. For a checkpoint, its stored values replace groups
and recipe.

Hydra composes groups and recipe. Overrides are read and checked before that (conf/overrides.py), so
that a typo is answered with the nearest name.
"""

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from conf import schema
from conf.overrides import (
    FIELDS,
    GROUPS,
    KEYS,
    allowed_values,
    quoted,
    read_override,
    split_config_dir,
)
from conf.schema import (
    NOT_OF_THE_RECIPE,
    RESULT,
    Config,
    UserError,
    config_values,
    in_effect,
    last_name,
    show,
)

DEFAULT_RECIPE: str = OmegaConf.load(schema.FOLDER / "config.yaml").defaults[-2].recipe
SECTIONS = {name.split(".")[0] for name in KEYS}
# Of a YAML file of the user; the longest here has 1.7 kB and no alias.
LARGEST_FILE, MOST_ALIASES = 100_000, 20
# Keys that may take a path from an environment variable. The path is stored with the run.
PATHS = ("data.root", "data.train", "data.val", "model.weights", "checkpoint.resume", "run.dir")
NAME_LENGTH = 100  # maximum length of a run's name; a file name has at most 255 bytes
Values = Mapping[str, Any]
"""Dotted key -> value."""


def load(
    overrides: Sequence[str] = (),
    *,
    runnable: bool = True,
    stored: Values | None = None,
    decided: Mapping[str, Values] | None = None,
) -> Config:
    """Compose and check a config from Hydra overrides such as `recipe=demo` or `optim.lr=0.2`.

    Args:
        overrides: as typed, perhaps with `--config-dir=DIR`.
        runnable: refuse a config without data.root, which has no default.
        stored: the values in a checkpoint, in place of groups and recipe. Nothing in them is
            resolved. Unknown keys are ignored, and missing ones have their default: another
            version wrote them. In augment.val, sizes that equal data.val_size follow this key.
        decided: values that replace the recipe's, by the reason to print. Other values of the
            recipe may refer to them.

    Raises:
        UserError: a key, group choice or value that is not allowed.
    """
    config_dir, words = split_config_dir(overrides)
    parsed = [read_override(text, config_dir) for text in words]
    groups = {o.key_or_group: show(o.value()) for o in parsed if o.key_or_group in GROUPS}
    keys = [o for o in parsed if o.key_or_group not in GROUPS]
    typed = {o.key_or_group for o in keys}
    recipe = groups.pop("recipe", None)
    try:
        planned = _stored(stored, recipe) if stored is not None else _recipe(recipe, config_dir)
        for values in (decided or {}).values():
            _put(planned, values)
        if decided and "data.image_size" in typed:
            planned.data.val_size = "${data.image_size}"
        tree = copy.deepcopy(planned)
        for group, choice in groups.items():
            _choose(tree, group, _file(group, choice, config_dir))
        for override in keys:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=False)
        changed = _changes(planned, tree)
        if tree.run.name is None and stored is None:
            tree.run.name = _run_name(planned.recipe, changed, tree.checkpoint.resume)
        config = cast(Config, OmegaConf.to_object(tree))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(_explain(error, keys)) from None
    schema.check(config, runnable=runnable and stored is None, complete=decided is not None)
    for override in keys if stored is None else ():
        _check_effect(override, config)
    config.typed = list(overrides)
    config.changed = {k: value for k, value in changed.items() if k not in NOT_OF_THE_RECIPE}
    config.notes = list(_notes(planned, tree, config, groups, typed, decided or {}))
    return config


def _file(group: str, choice: str, config_dir: Path | None) -> Path:
    """The YAML file of a choice, whose name has been checked."""
    own = schema.FOLDER / group / f"{choice}.yaml"
    return own if config_dir is None or own.exists() else config_dir / group / own.name


def _read(path: Path) -> DictConfig:
    """The content of a YAML file; refuse one that is too large, or does not hold keys."""
    try:
        text = path.read_text(encoding="utf-8")
        aliases = sum(isinstance(t, yaml.AliasToken) for t in yaml.scan(text) if "*" in text)
        if len(text) > LARGEST_FILE or aliases > MOST_ALIASES:
            raise UserError(f"{path}: is too long, or has too many aliases (*name); shorten it")
        content = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: is not YAML ({_one_line(error)}); correct it") from None
    if not isinstance(content, DictConfig):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return content


def _stored(values: Values, recipe: str | None) -> DictConfig:
    """The schema and the values in a checkpoint."""
    if recipe is not None:
        raise UserError(f"recipe={recipe}: the checkpoint holds the whole config; leave it out")
    planned = OmegaConf.structured(Config)
    _put(planned, values)
    return planned


def _recipe(name: str | None, config_dir: Path | None) -> DictConfig:
    """The schema, the groups and a recipe, merged.

    `expect` is that of the recipe's own file: that of a recipe in its defaults is for another
    training.
    """
    for path in (config_dir / g for g in GROUPS) if config_dir else ():
        for file in path.glob("*.yaml"):
            _read(file)  # Hydra would not name a file that is wrong
    recipe = name or DEFAULT_RECIPE
    file = _file("recipe", recipe, config_dir)
    content = _read(file)
    if "@package _global_" not in file.read_text(encoding="utf-8"):
        raise UserError(f"{file}: is not a recipe; write `# @package _global_` in its first line")
    planned = copy.deepcopy(_compose(recipe, schema.FOLDER, config_dir))
    planned.expect = content.get("expect")
    planned.recipe = recipe
    return planned


@cache
def _compose(recipe: str, folder: Path, config_dir: Path | None) -> DictConfig:
    """Let Hydra merge groups and recipe. Callers must copy the result."""
    overrides = [f"recipe={quoted(recipe)}"]  # 10 is a name here
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{config_dir.absolute()}')}]")
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        try:
            composed = compose(config_name="config", overrides=overrides)
        except ValueError as error:  # `defaults` that are not a list
            raise UserError(f"recipe={recipe}: {_one_line(error)}; correct the file") from None
    # A YAML file can add keys to the composed tree; this merge refuses keys that the schema lacks.
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))


def _put(tree: DictConfig, values: Values) -> None:
    """Replace the values of keys, which OmegaConf must not resolve: they may be of a checkpoint."""
    for name in values.keys() & FIELDS.keys():
        if "${" in str(values[name]):
            raise UserError(f"{name}={values[name]}: not allowed in a checkpoint; give {name}=")
        OmegaConf.update(tree, name, values[name], merge=False)
    if "data.val_size" in values:
        size = values["data.val_size"]
        tree.augment.val = schema.with_size(tree.augment.val, size, "${data.val_size}")


def _choose(tree: DictConfig, group: str, file: Path) -> None:
    """Merge a typed group into the tree, above the recipe.

    A section with a name (optim, schedule, model) is replaced as a whole, because the values of a
    recipe for one optimiser are wrong for another. In other sections the values of the recipe stay
    unless the group sets them: data=fake keeps the image size.
    """
    named = f"{group}.name" in FIELDS
    section = OmegaConf.structured(OmegaConf.get_type(tree[group])) if named else tree[group]
    try:
        tree[group] = OmegaConf.merge(section, _read(file))
    except OmegaConfBaseException as error:
        raise UserError(f"{file}: {_one_line(error)}; write only keys of {group}") from None


def _changes(planned: DictConfig, tree: DictConfig) -> dict[str, str]:
    """Return the keys that affect the result and differ from the recipe, key -> normalised value.

    Refuse `${oc.env:NAME}` in all keys but PATHS, and other functions but `${now:FORMAT}`: an
    environment variable must not change the training, and its value would be stored.

    Args:
        planned: the composed recipe with unresolved interpolations.
        tree: the same after typed groups and keys.
    """
    before, now = _flat(planned), _flat(tree)
    for name, value in now.items():
        functions = set(re.findall(r"\$\{([\w.]+):", str(value))) - {"now"}
        if functions - {"oc.env" if name in PATHS else "now"}:
            raise UserError(
                f"{name}={show(value)}: only ${{key}} and ${{now:FORMAT}} are allowed, and in "
                f"paths ({', '.join(PATHS)}) also ${{oc.env:NAME}}; write the value itself"
            )
    values, changed = _flat(tree, resolve=True), {}
    for name, f in FIELDS.items():
        if f.metadata["affects"] & RESULT and before[name] != now[name] and in_effect(tree, f):
            alike = f.metadata["alike"]
            if alike(values[name]) != alike(_in_tree(before[name], name, tree)):
                changed[name] = show(alike(values[name]))
    return changed


def _in_tree(expression: Any, name: str, tree: DictConfig) -> Any:
    """The value that the recipe's expression for a key would have in this tree.

    That of data.val_size, ${data.image_size}, is 64 after data.image_size=64.
    """
    if "${" not in str(expression):
        return expression
    trial = copy.deepcopy(tree)
    OmegaConf.update(trial, name, expression, merge=False)
    try:
        return _flat(trial, resolve=True)[name]
    except InterpolationResolutionError:  # the two keys now refer to each other
        return None


def _run_name(recipe: str, changed: Mapping[str, str], resume: str) -> str:
    """The default run.name: the recipe, and the keys that affect the result and differ from it.

    Two commands with the same recipe get the same name if they train the same thing. Of a path, the
    name has the last part; the run's identity tells two folders of one name apart.

    Returns:
        A name such as `imagenet_rn50,optim.lr=0.3`. Parts beyond NAME_LENGTH are left out, and
        characters that are unsafe in a file name are replaced; in both cases a hash of the full
        name is appended.
    """
    parts = dict(changed)
    if resume not in ("auto", "never"):  # the run starts from another run's weights
        parts["checkpoint.resume"] = str(last_name(resume))
    full = short = recipe
    for name, value in parts.items():
        full += f",{name}={value}"
        safe = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-")
        if len(f"{short},{name}={safe}") <= NAME_LENGTH:
            short += f",{name}={safe}"
    return full if full == short else f"{short},{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _flat(tree: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Dotted key -> value, for every key; interpolations as written, or resolved."""
    nested = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=resolve))
    return {name: nested[name.split(".")[0]][name.split(".")[1]] for name in KEYS}


def _check_effect(override: Override, config: Config) -> None:
    """Refuse a typed key that has no effect in this config, and name the key that disables it."""
    f = FIELDS[override.key_or_group]
    if in_effect(config, f):
        return
    values, when = config_values(config), f.metadata["when"]
    because = " and ".join(f"{key}={show(values[key])}" for key in when)
    needed = " and ".join(f"{key}={' or '.join(allowed)}" for key, allowed in when.items())
    raise UserError(
        f"{override.input_line}: has no effect with {because}; give {needed}, or leave it out"
    )


def _notes(
    planned: DictConfig,
    tree: DictConfig,
    config: Config,
    groups: Mapping[str, str],
    typed: set[str],
    decided: Mapping[str, Values],
) -> Iterator[str]:
    """Yield what to print at the start: values that a group replaces, and doubtful ones."""
    before, now = _flat(planned, resolve=True), _flat(tree, resolve=True)
    for group in groups.keys() & {"optim", "schedule"}:
        changed = [
            f"{name} {show(before[name])} -> {show(now[name])}"
            for name in KEYS
            if name.startswith(f"{group}.") and not name.endswith(".name")
            if name not in typed and before[name] != now[name]
        ]
        if changed:
            yield f"{group}={groups[group]} replaces values of the recipe: {', '.join(changed)}"
    other = "optim" not in groups and now["optim.name"] != before["optim.name"]
    kept = [name for name in ("optim.lr", "optim.weight_decay") if name not in typed]
    if other and kept:
        values = ", ".join(f"{name}={show(now[name])}" for name in kept)
        yield (
            f"optim.name={config.optim.name} keeps {values} of {before['optim.name']}; write "
            f"optim={config.optim.name} to use its own defaults"
        )
    transformer = re.search(r"vit|swin|[bd]eit|former|eva0|cait|mixer", config.model.name)
    if transformer and config.optim.name == "sgd" and config.model.weights is None:
        yield (
            f"model.name={config.model.name} with optim.name=sgd: transformers train poorly with "
            "SGD; try the optimiser and the schedule of recipe=imagenet_vit_s16"
        )
    for reason, own in decided.items():
        used = [f"{name}={show(now[name])}" for name in own if now[name] == own[name]]
        if used:
            yield f"{reason}: {', '.join(used)}"


def to_yaml(content: Config | list[str], section: str | None = None) -> str:
    """YAML of a resolved config (`--cfg job`, config.yaml), a section, or a list of overrides."""
    if isinstance(content, list):
        return OmegaConf.to_yaml(OmegaConf.create(content))
    sections = {name: s for name, s in asdict(content).items() if name in SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(sections[section] if section else sections))


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """Rewrite an error of Hydra, OmegaConf or PyYAML as `key=value: what is wrong; what to do`."""
    cause: BaseException = error
    while isinstance(cause.__cause__, (HydraException, OmegaConfBaseException)):
        cause = cause.__cause__
    name = getattr(cause, "full_key", None) or ""
    base = name.split("[")[0]
    # The type of each override has been checked; an error found here is in the last one of a key.
    typed = [o.input_line for o in overrides if o.key_or_group == base]
    message = ": ".join(filter(None, (typed[-1] if typed else name, _one_line(cause))))
    return f"{message}; give {allowed_values(base)}" if base in FIELDS else message


def _one_line(error: BaseException) -> str:
    """The message of an error in one line; Hydra's and OmegaConf's say more in the next ones."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, yaml.YAMLError):
        return " ".join(" ".join(lines).split())
    if lines[0].endswith("raised while composing config:"):  # an error in a YAML file
        key = re.search(r"full_key: (\S+)", str(error))
        return ": ".join(filter(None, (lines[0].split(":")[0], key and key[1], lines[1])))
    return lines[0]
