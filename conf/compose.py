"""Compose a checked `Config` from YAML groups, a recipe and overrides.

Hydra composes the groups and the recipe. Overrides are read and checked before that
(conf/overrides.py), so that a typo is answered with the nearest name, also after + and ++.
"""

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import CollectionNode, MarkedYAMLError, Node, YAMLError

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
    path_hash,
    show,
)

DEFAULT_RECIPE: str = OmegaConf.load(schema.FOLDER / "config.yaml").defaults[-2].recipe
SECTIONS = {name.split(".")[0] for name in KEYS}
MOST_NODES = 10_000  # values in a YAML file; the longest here has some hundred
# Keys that may take a path from an environment variable. The path is stored with the run.
PATHS = ("data.root", "data.train", "data.val", "model.weights", "checkpoint.resume", "run.dir")
NAME_LENGTH = 100  # maximum length of a run's name; a file name has at most 255 bytes


def load(
    overrides: Sequence[str] = (),
    *,
    runnable: bool = True,
    decided: Mapping[str, Any] | None = None,
) -> Config:
    """Compose and check a config from Hydra overrides such as `recipe=demo` or `optim.lr=0.2`.

    Precedence, from low to high: defaults of the schema, groups, the recipe, typed groups, typed
    keys.

    Args:
        overrides: as typed, perhaps with `--config-dir=DIR`.
        runnable: refuse a config without data.root, which has no default.
        decided: dotted key -> value, which replaces the recipe's. They are not trusted, as in
            `load_stored`.

    Raises:
        UserError: a key, group choice or value that is not allowed.
    """
    config_dir, words = split_config_dir(overrides)
    parsed = [read_override(text, config_dir) for text in words]
    groups = {o.key_or_group: show(o.value()) for o in parsed if o.key_or_group in GROUPS}
    keys = [o for o in parsed if o.key_or_group not in GROUPS]
    recipe = groups.pop("recipe", DEFAULT_RECIPE)
    try:
        planned = copy.deepcopy(_compose(recipe, schema.FOLDER, config_dir))
        file = _content(_file("recipe", recipe, config_dir))
        # Not that of a recipe in its defaults, which is for another training.
        own = OmegaConf.select(file, "expect")
        planned.expect = own and OmegaConf.merge(OmegaConf.structured(schema.Expect), own)
        _put(planned, decided or {})
        if decided and any(o.key_or_group == "data.image_size" for o in keys):
            planned.data.val_size = "${data.image_size}"
        tree = copy.deepcopy(planned)
        for group, choice in groups.items():
            _choose(tree, group, _file(group, choice, config_dir))
        for override in keys:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=False)
        _refuse_resolvers(OmegaConf.to_container(tree))
        changed = changes(planned, tree)
        if tree.run.name is None:
            tree.run.name = run_name(recipe, changed, tree.checkpoint.resume)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise UserError(_explain(error, parsed)) from None
    assert isinstance(config, Config)
    schema.check(config, runnable=runnable)
    for override in keys:
        _check_effect(override, config)
    typed_keys = {o.key_or_group for o in keys}
    config.typed = list(overrides)
    config.recipe = recipe
    config.changed = {k: value for k, value in changed.items() if k not in NOT_OF_THE_RECIPE}
    config.notes = [
        *_replaced_values(file, planned, tree, groups, typed_keys),
        *_kept_values(planned, tree, groups, typed_keys),
        *_doubts(config),
    ]
    return config


def load_stored(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Compose the config of a checkpoint with overrides, for a program that does not train.

    Sizes in augment.val that equal the stored data.val_size follow the key: `data.val_size=288`
    alone is enough.

    Args:
        values: dotted key -> value. They are not trusted: nothing in them is resolved. Unknown keys
            are ignored, and missing ones have their default: another version wrote them.
        overrides: groups and keys, as typed.

    Raises:
        UserError: an override is not allowed, or a stored value is not.
    """
    config_dir, words = split_config_dir(overrides)
    parsed = [read_override(text, config_dir) for text in words]
    tree = OmegaConf.structured(Config)
    try:
        _put(tree, values)
        for override in parsed:
            name, value = override.key_or_group, override.value()
            if name == "recipe":
                raise UserError(
                    f"recipe={value}: the checkpoint holds the whole config; leave it out, or give "
                    "the keys that differ"
                )
            if name in GROUPS:
                _choose(tree, name, _file(name, show(value), config_dir))
            else:
                OmegaConf.update(tree, name, value, merge=True)
        _refuse_resolvers(OmegaConf.to_container(tree))
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise UserError(_explain(error, parsed)) from None
    assert isinstance(config, Config)
    schema.check(config, runnable=False)
    config.typed = list(overrides)
    return config


def complete(config: Config, decided: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the config with values that the program has decided in place of the recipe's.

    Typed groups and keys override them. Other values of the recipe may refer to them. A note states
    each of them.

    Args:
        decided: the reason to print -> dotted key -> value.

    Raises:
        UserError: a value is not allowed.
    """
    together = {name: value for values in decided.values() for name, value in values.items()}
    before = load(config.typed, runnable=False)
    after = load(config.typed, runnable=False, decided=together)
    sections: dict[str, Any] = {}
    for (name, _, old), (_, _, new) in zip(schema.walk(before), schema.walk(after), strict=True):
        section, _, key = name.partition(".")
        if new != old and section != "run":
            whole = sections.get(section, getattr(config, section))
            sections[section] = replace(whole, **{key: new})
    used, notes = config_values(after), []
    for reason, values in decided.items():
        kept = [f"{name}={show(used[name])}" for name in values if used[name] == values[name]]
        notes += [f"{reason}: {', '.join(kept)}"] if kept else []
    completed = replace(config, **sections, notes=[*after.notes, *notes])
    schema.check_sizes(completed)
    return completed


def _put(tree: DictConfig, values: Mapping[str, Any]) -> None:
    """Replace the values of keys. In augment.val, sizes that equal data.val_size follow that key.

    Raises:
        UserError: OmegaConf would resolve a value.
    """
    for name in KEYS:
        if name in values:
            OmegaConf.update(tree, name, _literal(name, values[name]), merge=False)
    if "data.val_size" in values:
        tree.augment.val = _following(tree.augment.val, values["data.val_size"])


def _literal(name: str, value: Any) -> Any:
    """Return a stored value, which OmegaConf must not resolve.

    Raises:
        UserError: OmegaConf would resolve it.
    """
    if "${" in str(value) or "???" in str(value):
        raise UserError(f"{name}={value}: the value in the checkpoint is not allowed; give {name}=")
    return value


def _refuse_resolvers(node: Any, name: str = "") -> None:
    """Refuse `${oc.env:SECRET}` in all keys but PATHS, and other functions of OmegaConf in any key.

    The value would be stored in the clear: in config.yaml, in the event files and in checkpoints.
    `${data.image_size}` and `${now:%H}` are allowed.

    Args:
        node: of the config, with interpolations as written.
        name: the dotted key of the node.

    Raises:
        UserError: names the key.
    """
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_resolvers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):
        for value in node:
            _refuse_resolvers(value, name)
    elif isinstance(node, str) and "${" in node:
        functions = r"now|oc\.env" if name in PATHS else "now"
        allowed = rf"(?<!\\)\$\{{((?:{functions}):[^${{}}]*|[\w.\[\]]*)\}}"
        rest, before = node, ""
        while rest != before:  # an interpolation may be in another
            rest, before = re.sub(allowed, "_", rest), rest
        if "${" in rest:
            what = "only ${key} and ${now:FORMAT} are allowed"
            if "oc.env" in rest:
                what = f"only paths can use environment variables ({', '.join(PATHS)})"
            raise UserError(f"{name}={node}: {what}; write the value itself")


def _following(transforms: Sequence[Any], size: int) -> list[Any]:
    """Replace parameters `size` of this value by a reference to data.val_size."""
    return schema.with_size(transforms, size, "${data.val_size}")


def _file(group: str, choice: str, config_dir: Path | None) -> Path:
    """The YAML file of a choice, whose name has been checked."""
    own = schema.FOLDER / group / f"{choice}.yaml"
    return own if config_dir is None or own.exists() else config_dir / group / own.name


@cache
def _compose(recipe: str, folder: Path, config_dir: Path | None) -> DictConfig:
    """Merge the defaults of the schema, the groups and the recipe. Callers must copy the result."""
    overrides = [f"recipe={quoted(recipe)}"]  # 10 is a name here
    _refuse_missing(recipe, folder)
    if config_dir is not None:
        for path in _group_files(config_dir):
            _refuse_bomb(path)
        _refuse_missing(recipe, config_dir)
        own = config_dir / "recipe" / f"{recipe}.yaml"
        if own.exists() and "@package _global_" not in _read(own):
            raise UserError(
                f"{own}: is not a recipe; write `# @package _global_` in its first line"
            )
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{config_dir.absolute()}')}]")
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        composed = _hydra(overrides, recipe, [folder, *([config_dir] if config_dir else [])])
    # A YAML file can add keys to the composed tree; this merge refuses keys that the schema lacks.
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))


def _hydra(overrides: list[str], recipe: str, folders: Sequence[Path]) -> DictConfig:
    """Compose, and name the file of which Hydra only says that it cannot use it.

    Raises:
        UserError: a file does not hold a mapping, or its `defaults` are not a list.
    """
    try:
        return compose(config_name="config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        found = re.match(r"In '(\w+)/([^']+)'", str(error))
        if found and found[1] in set(GROUPS) - {"recipe"}:
            for path in (folder / found[1] / f"{found[2]}.yaml" for folder in folders):
                if path.exists() and found[1] in _content(path):
                    raise _not_of_group(path, found[1]) from None
        raise
    except (OSError, ValueError) as error:
        for path in (path for folder in folders for path in _group_files(folder)):
            _content(path)
        raise UserError(f"recipe={recipe}: {_first_line(error)}; correct the file") from None


def _group_files(folder: Path) -> list[Path]:
    """The YAML files of the groups; a folder of the user may hold others."""
    return sorted(path for group in GROUPS for path in (folder / group).glob("*.yaml"))


def _refuse_missing(recipe: str, folder: Path) -> None:
    """Refuse `???` in the recipe or in a group, which Hydra would ignore.

    Raises:
        UserError: names the file and the key; or a file cannot be read.
    """
    for path in _group_files(folder):
        if path.parent.name == "recipe" and path.stem != recipe:
            continue
        if "???" in _read(path):
            for name in sorted(OmegaConf.missing_keys(OmegaConf.load(path))):
                raise UserError(f"{path}: {name}=??? is not allowed; give it a value")


def _refuse_bomb(path: Path) -> None:
    """Refuse a YAML file whose aliases (`*name`) repeat a few lines until they fill the memory.

    Raises:
        UserError: names the file.
    """
    sizes: dict[int, int] = {}  # nodes below a node, which an alias repeats

    def size(node: Node | None) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MOST_NODES  # in case it contains itself
            value = node.value if isinstance(node, CollectionNode) else ()
            pairs = (item if isinstance(item, tuple) else (item,) for item in value)
            sizes[id(node)] = 1 + sum(map(size, chain.from_iterable(pairs)))
        return sizes[id(node)]

    try:
        root = yaml.compose(path.read_bytes(), yaml.SafeLoader)
        if size(root) < MOST_NODES:
            return
    except (OSError, YAMLError):  # explained where the file is used
        return
    except RecursionError:
        pass
    raise UserError(f"{path}: contains over {MOST_NODES:,} values; remove its aliases (*)")


def _read(path: Path) -> str:
    """The content of a YAML file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{path}: cannot be read: {reason}; correct or remove it") from None


def _content(path: Path) -> DictConfig:
    """The content of a YAML file.

    Raises:
        UserError: it cannot be read, or is not a mapping.
    """
    _read(path)
    try:
        content = OmegaConf.load(path)
    except MarkedYAMLError:
        raise
    except (OSError, YAMLError):  # a single number; a control character
        content = None
    if not isinstance(content, DictConfig):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return content


def _not_of_group(file: Path, group: str) -> UserError:
    return UserError(
        f"{file}: is not a file of the group {group}; write the keys of {group} without "
        f"`{group}:`, without `defaults` and without `@package`"
    )


def _choose(tree: DictConfig, group: str, file: Path) -> None:
    """Merge a typed group into the tree, above the recipe.

    A section with a name (optim, schedule, model) is replaced as a whole, because the values of a
    recipe for one optimiser are wrong for another. In other sections the values of the recipe stay
    unless the group sets them: data=fake keeps the image size.

    Raises:
        UserError: the file is written like a recipe.
    """
    content = _content(file)
    if {"defaults", group} & set(content) or "@package _global_" in _read(file):
        raise _not_of_group(file, group)
    named = f"{group}.name" in FIELDS
    section = OmegaConf.structured(OmegaConf.get_type(tree[group])) if named else tree[group]
    tree[group] = OmegaConf.merge(section, content)


def _replaced_values(
    recipe: Any,
    planned: DictConfig,
    tree: DictConfig,
    groups: Mapping[str, str],
    typed_keys: set[str],
) -> list[str]:
    """One note for each typed group that replaces values of the recipe, the content of its file."""
    before, now = _flat(planned, resolve=True), _flat(tree, resolve=True)
    notes = []
    for group, choice in groups.items():
        if f"{group}.name" not in FIELDS:
            continue
        names = [f"{group}.{key}" for key in OmegaConf.select(recipe, group) or {}]
        changed = [
            f"{name} {show(before[name])} -> {show(now[name])}"
            for name in names
            if before[name] != now[name] and name not in typed_keys
        ]
        if changed:
            notes.append(f"{group}={choice} replaces values of the recipe: {', '.join(changed)}")
    return notes


def _kept_values(
    planned: DictConfig, tree: DictConfig, groups: Mapping[str, str], typed_keys: set[str]
) -> list[str]:
    """A note if optim.name was typed and values of the recipe's optimiser are still used."""
    if "optim.name" not in typed_keys or "optim" in groups or tree.optim.name == planned.optim.name:
        return []
    kept = [
        f"optim.{key}={show(tree.optim[key])}"
        for key in ("lr", "weight_decay")
        if f"optim.{key}" not in typed_keys
    ]
    note = (
        f"optim.name={tree.optim.name} keeps {', '.join(kept)} of {planned.optim.name}; "
        f"write optim={tree.optim.name} to use its own defaults"
    )
    return [note] if kept else []


def _doubts(config: Config) -> list[str]:
    """Notes about values that are allowed but probably a mistake."""
    transformer = re.search(r"vit|swin|[bd]eit|former|eva0|cait|mixer", config.model.name)
    note = (
        f"model.name={config.model.name} with optim.name=sgd: transformers train poorly with SGD; "
        "try the optimiser and the schedule of recipe=imagenet_vit_s16"
    )
    scratch = config.optim.name == "sgd" and config.model.weights is None
    return [note] if transformer and scratch else []


def changes(planned: DictConfig, tree: DictConfig) -> dict[str, str]:
    """Return the keys that affect the result and differ from the recipe, key -> normalised value.

    Args:
        planned: the composed recipe with unresolved interpolations.
        tree: the same after typed groups and keys.
    """
    before, now, values = _flat(planned), _flat(tree), _flat(tree, resolve=True)
    return {
        name: show(f.metadata["alike"](values[name]))
        for name, f in FIELDS.items()
        if f.metadata["affects"] & RESULT
        and before[name] != now[name]
        and in_effect(tree, f)
        and not _same_value(name, before[name], values[name], tree)
    }


def run_name(recipe: str, changed: Mapping[str, str], resume: str) -> str:
    """The default run.name: the recipe, and the keys that affect the result and differ from it.

    Two commands with the same recipe get the same name if and only if they train the same thing.

    Args:
        recipe: name of the recipe.
        changed: see `changes`.
        resume: checkpoint.resume.

    Returns:
        A name such as `imagenet_rn50,optim.lr=0.3`. Parts beyond NAME_LENGTH are left out, and
        characters that are unsafe in a file name are replaced; in both cases a hash of the full
        name is appended.
    """
    full = recipe + "".join(f",{name}={value}" for name, value in changed.items())
    short = recipe
    for name, value in changed.items():
        safe = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-")
        if len(f"{short},{name}={safe}") <= NAME_LENGTH:
            short += f",{name}={safe}"
    if resume not in ("auto", "never"):  # the run starts from another run's weights
        part = f",checkpoint.resume={path_hash(resume)}"
        full += part
        short += part
    return full if full == short else f"{short},{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _same_value(name: str, expression: Any, value: Any, tree: DictConfig) -> bool:
    """Whether a key's value equals the recipe's expression for it, evaluated in this tree.

    data.val_size=224 equals ${data.image_size} if data.image_size is 224.
    """
    alike = FIELDS[name].metadata["alike"]
    if "${" not in str(expression):  # the common case needs no copy of the tree
        return bool(alike(value) == alike(expression))
    trial = copy.deepcopy(tree)
    OmegaConf.update(trial, name, expression, merge=False)
    try:
        return bool(alike(value) == alike(_flat(trial, resolve=True)[name]))
    except InterpolationResolutionError:  # the two keys now refer to each other
        return False


def _flat(tree: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Dotted key -> value, for every key; interpolations as written, or resolved."""
    nested = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=resolve))
    return {name: nested[name.split(".")[0]][name.split(".")[1]] for name in KEYS}


def _check_effect(override: Override, config: Config) -> None:
    """Refuse a typed key that has no effect in this config.

    Raises:
        UserError: names the key that disables it.
    """
    f = FIELDS[override.key_or_group]
    if in_effect(config, f):
        return
    values = config_values(config)
    when = f.metadata["when"]
    because = " and ".join(f"{key}={show(values[key])}" for key in when)
    needed = " and ".join(f"{key}={' or '.join(allowed)}" for key, allowed in when.items())
    raise UserError(
        f"{override.input_line}: has no effect with {because}; give {needed}, or leave it out"
    )


def to_yaml(content: Config | list[str], section: str | None = None) -> str:
    """YAML of a resolved config (`--cfg job`, config.yaml), a section, or a list of overrides."""
    if isinstance(content, list):
        return OmegaConf.to_yaml(OmegaConf.create(content))
    sections = {name: s for name, s in asdict(content).items() if name in SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(sections[section] if section else sections))


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """Rewrite an error of Hydra, OmegaConf or PyYAML as `key=value: what is wrong; what to do`."""
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        place = f"{mark.name}: line {mark.line + 1}" if mark else "config"
        return f"{place}: is not YAML ({error.problem}); correct it"
    cause: BaseException = error
    while isinstance(cause.__cause__, (HydraException, OmegaConfBaseException)):
        cause = cause.__cause__
    name = getattr(cause, "full_key", None) or ""
    base = name.split("[")[0]
    # The type of each override has been checked; an error found here is in the last one of a key.
    lines = (o.input_line for o in reversed(overrides) if o.key_or_group == base)
    typed = next(filter(None, lines), None)
    message = f"{typed or name or 'config'}: {_first_line(cause)}"
    return f"{message}; give {allowed_values(base)}" if base in FIELDS else message


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith("raised while composing config:"):
        # An error in a YAML file: the cause and the key are on the lines below.
        key = next((n.strip() for n in lines if n.strip().startswith("full_key: ")), "")
        place = f"{key.removeprefix('full_key: ')}: " if key else ""
        return f"{lines[0].split(':')[0]}: {place}{lines[1]}"
    return lines[0]
