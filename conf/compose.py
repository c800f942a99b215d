"""Compose a checked `Config` from layers.

From low to high: the defaults of the schema and of conf/config.yaml; the groups and the recipe,
which Hydra merges; the values that the program decides, or those in a checkpoint; typed groups;
typed keys. A mistake is one line with the word or the file, what is allowed and the nearest name.
"""

import copy
import csv
import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.named import module_exists, object_names_in, require_module
from conf.schema import (
    FIELDS,
    FOLDER,
    GROUPS,
    NAMES,
    Config,
    UserError,
    check,
    config_values,
    did_you_mean,
    group_names,
    last_name,
    override_keys,
    result_keys,
    show,
)

SECTIONS = {name.split(".")[0] for name in FIELDS}
NOT_KEYS = {"defaults", "multirun", "expect"}  # what else a YAML file may hold
# Keys with a word as value, mostly a path.
TEXT_KEYS = {name for name, field in FIELDS.items() if field.type in (str, str | None)}
# Keys that may take a path from an environment variable. The path is stored with the run.
PATH_KEYS = ("data.root", "data.train", "data.val", "model.weights", "checkpoint.resume", "run.dir")
# Keys in which `module:name` is not a name of code in this checkout.
NOT_CODE = {*PATH_KEYS, "run.name", "train.class_weights", "model.args", "optim.args"}
# Group -> what to write before a name that is not among the choices of the group.
NAME_KEYS = {"model": "model.name", "data": "data.root", "optim": "optim.lr=0.001 optim.name"}
NAME_LENGTH = 60  # characters of a run's name before its hash
NAMED_FIRST = ("model", "model.name", "data.val_fold")  # keys that come first in the name
NAMED_LAST = {"augment": 1, "loader": 2, "data": 3}  # sections that come last, in this order
SEVERAL = "; `train.py -m` trains once for each of several values"
KeyValues = Mapping[str, Any]
"""Dotted key -> value; an interpolation is text."""


def from_overrides(
    overrides: Sequence[str] = (), *, decided: KeyValues | None = None, varied: Collection[str] = ()
) -> Config:
    """Compose and check a config from the overrides on a command line.

    A typed group of a section with a name (optim, schedule, model) also resets the keys that it
    does not set, because the values of a recipe for one optimiser are wrong for another. In other
    sections the values of the recipe stay: data=fake keeps the image size.

    `decided`: values that replace the recipe's; other values of the recipe may refer to them.
    `varied`: keys and groups that the default run.name has in any case.
    Raises UserError for a key, group choice or value that is not allowed.
    """
    typed = read_overrides(overrides)
    groups = {name: typed.pop(name) for name in GROUPS if name in typed}
    recipe = groups.pop("recipe", None) or _choice_file("recipe", DEFAULT_RECIPE)
    tree = copy.deepcopy(DEFAULTS)
    _set(tree, _recipe(recipe), f"{recipe}: ")
    _set(tree, decided or {}, "the checkpoint or the weights: ")
    before = dotted(tree)
    for group, file in groups.items():
        if f"{group}.name" in FIELDS:
            tree[group] = copy.deepcopy(DEFAULTS[group])
        _set(tree, dotted({group: read_yaml(file)}), f"{file}: ")
    grouped = dotted(tree)
    _set(tree, typed)
    config = _to_config(tree, overrides)
    config.recipe, config.expect = recipe.stem, read_yaml(recipe).get("expect")
    config.changed = _changes(before, tree, config)
    if {"optim", "optim.name", "optim.lr"}.isdisjoint({*typed, *groups, *(decided or {})}):
        config.lr_batch_size = before["loader.batch_size"]
    if config.run.name is None:
        differ = {k.partition(".")[0] for k in config.changed if grouped[k] != before[k]}
        words = {k: show(v) for k, v in config_values(config).items() if k in varied}
        words |= {k: v for k, v in _changes(grouped, tree, config).items() if k in typed}
        words |= {k: file.stem for k, file in groups.items() if k in differ or k in varied}
        tree.run.name = _run_name(recipe.stem, config, words, {"data.root", *varied})
        config.run = cast(Any, OmegaConf.to_object(tree.run))
    return config


def from_checkpoint(stored: KeyValues, overrides: Sequence[str] = ()) -> Config:
    """Compose and check a config from the values in a checkpoint and typed overrides.

    Unknown keys are ignored, and missing ones have their default: another version wrote them. In
    augment.val, sizes equal to data.val_size follow this key. Raises UserError as `from_overrides`.
    """
    typed, values = override_keys(overrides), dict(stored)
    if "recipe" in typed:
        raise UserError("recipe=NAME: the checkpoint holds the whole config; omit it")
    if {"augment.val", "data.val_size"} <= values.keys():
        size = values["data.val_size"]
        values["augment.val"] = with_size(values["augment.val"], size, "${data.val_size}")
    # This version may refuse the stored value of a typed key.
    decided = {k: v for k, v in values.items() if k in FIELDS and k not in typed}
    return from_overrides(overrides, decided=decided)


def with_size(node: Any, size: int, other: Any, name: str = "") -> Any:
    """Return transforms with `other` in place of every parameter `size` of this value."""
    if isinstance(node, Mapping):
        return {key: with_size(inner, size, other, key) for key, inner in node.items()}
    if isinstance(node, Sequence) and not isinstance(node, str):  # also OmegaConf's lists
        return [with_size(inner, size, other, name) for inner in node]
    return other if name == "size" and node == size else node


def _choice_file(group: str, choice: str) -> Path:
    """Return the YAML file of a choice: a name in conf/, or a path that ends in .yaml."""
    path, names = Path(choice).expanduser(), group_names(group)
    if choice in names:
        return FOLDER / group / f"{choice}.yaml"
    if path.suffix == ".yaml" and path.is_file():
        return Path(os.path.abspath(path))
    if path.suffix == ".yaml":
        raise UserError(f"{group}={choice}: there is no such file{did_you_mean(path.stem, names)}")
    if "," in choice:
        raise UserError(f"{group}={choice}: give one{SEVERAL}")
    if answer := _for_flag(group, choice):
        raise UserError(f"{group}={choice}: {answer}")
    word = choice if group == "data" or ":" in choice else choice.lower()
    key = NAME_KEYS.get(group) if word not in names else None
    other = f" For another one write {key}={word}" if key else ""
    near = did_you_mean(choice, names) or f"; give {', '.join(names)} or a file PATH.yaml."
    raise UserError(f"{group}={choice}: no such {group}{near}{other}")


@cache
def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; raise UserError if it does not hold keys."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as YAML ({reason}); correct it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return cast(dict[str, Any], content)


def to_yaml(content: Config | list[str], section: str | None = None) -> str:
    """YAML of a resolved config (`--cfg job`, config.yaml), a section, or a list of overrides."""
    if isinstance(content, list):
        return OmegaConf.to_yaml(OmegaConf.create(content))
    sections = {name: s for name, s in asdict(content).items() if name in SECTIONS}
    return OmegaConf.to_yaml(OmegaConf.create(sections[section] if section else sections))


def read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Read the overrides on a command line; `+` and `++` before a key mean nothing.

    A value has Hydra's grammar; a word or a path without quotes or brackets is taken as it is.
    Returns dotted key -> value, and group -> file of its choice; the last of equal ones counts.
    Raises UserError for a key, choice or value that no config allows.
    """
    typed, tried, wrong = dict[str, Any](), copy.deepcopy(DEFAULTS), list[str]()
    words = [*overrides, "", ""]
    for number, text in enumerate(words[:-2]):
        following = words[number + 1].lstrip("=") or words[number + 2]  # of `key = value`
        name, equals, word = text.lstrip("+").partition("=")
        if re.search("[\ud800-\udfff]", text):  # config.yaml could not hold it
            raise UserError(f"{ascii(text)[1:-1]}: is not UTF-8; rename the file, or link to it")
        given = word or re.sub("^-.*|.*=.*", "", following)
        if text.startswith(("-", "~")):
            wrong.append(f"{text}: not an option; {_for_flag(name, given) or _advice(name, given)}")
        elif name and equals and given == word:
            try:
                typed[name] = _value(name, word, tried)
            except UserError as mistake:
                wrong.append(str(mistake))
        elif not wrong or (os.path.isdir(text) and text not in wrong[-1]):  # else a flag's value
            if os.path.isfile(file := f"{text}/overrides.yaml"):
                typed_then = cast(list[str], OmegaConf.to_container(OmegaConf.load(file)))
                raise UserError(f"{text}: is the folder of a run; write {shlex.join(typed_then)}")
            is_path = "/" in text or os.path.exists(text)
            key = "recipe" if text.endswith(".yaml") else "data.root"
            cure = text.replace(":", "=", 1) if name.partition(":")[0] in NAMES else f"{key}={text}"
            meant = f"did you mean {cure}?" if is_path or text not in cure else _advice(name, given)
            wrong.append(f"{text}: write key=value without spaces; {meant}")
    if wrong:
        raise UserError(";\n".join(dict.fromkeys(wrong)))  # a terminal shows one per line
    return typed


def _value(name: str, word: str, tried: DictConfig) -> Any:
    """Read the value of a key, or the file of a group's choice; refuse a mistake with UserError."""
    if name in GROUPS:
        return _choice_file(name, word)
    value: Any = None if word == "null" else word
    if name in FIELDS.keys() - TEXT_KEYS or word[:1] in ("'", '"', "[", "{"):
        # The colon of module:name as a key in braces needs a backslash.
        escaped = word if name in TEXT_KEYS else re.sub(r"(\w):(\w+\s*:)", r"\1\\:\2", word)
        with suppress(HydraException):  # then it is text, which these keys do not take
            override = OverridesParser.create().parse_override(f"{name}={escaped}")
            value = word if override.is_sweep_override() else override.value()
    _set(tried, {name: value})  # before Hydra composes
    return value


def _for_flag(flag: str, value: str) -> str:
    """Return what docs/flags.csv says about a flag of another program or its value, or nothing."""
    path = FOLDER.parent / "docs" / "flags.csv"
    rows = csv.reader(path.read_text("utf-8").splitlines() if path.exists() else [])
    answers = {each: answer for flags, answer in rows for each in flags.split()}
    kind, value = re.sub(r"^\d*\.?\d+$", "NUMBER", value.lower()), value or "..."
    kind = re.sub(r".*\.(pt|pth|safetensors)$", "WEIGHTS", kind)
    found = next((answers[k] for k in (f"{flag}={kind}", flag, flag[:1]) if k in answers), "")
    return found.replace("{lower}", value.lower()).replace("{}", shlex.quote(value))


def _advice(name: str, value: str = "") -> str:
    """Name the key or group meant by an unknown one, such as `lr`, or by a flag and its `value`."""
    if name in NAMES and not value:
        choices = ", ".join(group_names(name)) or FIELDS[name].metadata["check"].says
        return f"{name}=VALUE takes {choices}"
    typed = name.lstrip("-").replace("-", "_").lower()
    section, word = typed.partition(".")[0], typed.rpartition(".")[2]
    lasts = {k: k.rpartition(".")[2] for k in ([typed] if typed in NAMES else NAMES)}
    own = {known: last for known, last in lasts.items() if known.startswith(f"{section}.")}
    near = own if own and word not in lasts.values() else lasts
    close = difflib.get_close_matches(word, near.values(), 1, 0.75)
    meant = [known for known, last in near.items() if last in close]
    if value:
        meant = [f"{k if value in group_names(k) else NAME_KEYS.get(k, k)}={value}" for k in meant]
    guess = f"did you mean {' or '.join(meant)}?" if meant else ""
    listed = f"{section} has {', '.join(own.values())}" if own else "--help lists all keys"
    flag, last = (_for_flag("--" + re.sub("[._]", "-", each), value) for each in (typed, word))
    return flag or guess or last or listed


def _set(tree: DictConfig, values: KeyValues, origin: str = "") -> None:
    """Set keys in place; `origin`: where the values are from, for the message of a mistake."""
    for name, value in values.items():
        shown = f"{origin}{name}={show(value)}"
        if name not in FIELDS:
            cure = f"write `{name}: {{KEY: {show(value)}}}`" if origin and name in SECTIONS else ""
            cure = cure or _advice(name, show(value)).replace("=", ": " if origin else "=")
            raise UserError(f"{shown}: there is no key {name}; {cure}")
        section, _, last = name.partition(".")
        allowed = FIELDS[name].metadata["check"]
        try:
            OmegaConf.update(tree, name, value, merge=False)
            converted = cast(Any, OmegaConf.to_container(tree[section]))[last]
            if "${" in str(converted) or allowed.allows(converted):  # ${...} is checked at the end
                continue
        except OmegaConfBaseException:
            pass
        word = value if isinstance(value, str) else ""
        more = SEVERAL if "," in word else f"; {_for_flag(name, word)}".rstrip("; ")
        if word[:1] in ("[", "{") and word[-1] not in "]}":
            more = "; a space needs quotes around the word"
        raise UserError(f"{shown}: not allowed; give {allowed.says}{more}")


@cache
def _recipe(file: Path) -> dict[str, Any]:
    """Return the groups and the recipe, merged by Hydra: dotted key -> value.

    A recipe may be based on recipes of this program and on files next to its folder.
    """
    ConfigStore.instance().store("chosen", read_yaml(file), group="recipe", package="_global_")
    folder = QuotedString(f"file://{file.parent.parent}", Quote.single).with_quotes()
    with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
        try:
            composed = compose("config", ["recipe=chosen", f"hydra.searchpath=[{folder}]"])
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            reason = " ".join(str(error).splitlines()[:2]).strip()
            reason = re.sub(r"^In .* 'recipe/(\w+)/(.*?)'.*", r"write `- override /\1: \2`", reason)
            reason = reason.replace("use 'override ", "use 'override /")  # a recipe is in a group
            raise UserError(f"{file}: {reason}; correct it") from None
    return dotted(composed)


def dotted(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return section -> key -> value as dotted key -> value; interpolations as written."""
    if isinstance(content, DictConfig):
        content = cast(dict[str, Any], OmegaConf.to_container(content))
    keys: dict[str, Any] = {}
    for section, values in content.items():
        if isinstance(values, dict) and section not in NOT_KEYS:
            keys |= {f"{section}.{key}": value for key, value in values.items()}
        elif section not in NOT_KEYS:  # a mistake
            keys[section] = values
    return keys


def _to_config(tree: DictConfig, overrides: Sequence[str]) -> Config:
    """Turn a tree into a Config: leave out missing code, shorten a long warm-up, and check it.

    An environment variable must not change the training, and its value would be stored: only paths
    may have functions such as `${oc.env:NAME}`, and all keys `${now:FORMAT}`.
    """
    typed, values, left_out = override_keys(overrides), dotted(tree), set[str]()
    for key, value in values.items():
        if key not in PATH_KEYS and re.search(r"\$\{(?!now:)[\w.]+:", str(value)):
            allowed = "only ${key} and ${now:FORMAT} are allowed; write the value itself"
            raise UserError(f"{key}={show(value)}: {allowed}")
        absent = {n for n in object_names_in(value) if key not in NOT_CODE and not module_exists(n)}
        for name in sorted(absent if key in typed else absent - DEFAULT_NAMES):
            require_module(name, key)
        if absent:
            entries = value if isinstance(value, list) else []
            rest = [entry for entry in entries if not object_names_in(entry) & absent]
            OmegaConf.update(tree, key, rest if entries else None)
            left_out |= absent
    try:
        config = cast(Config, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        key = ".".join(re.split(r"[.\[]", error.full_key or "")[:2])
        raise UserError(f"{key}={show(values.get(key))}: {str(error).splitlines()[0]}") from None
    config.overrides = list(overrides)
    epochs, warmup = config.train.epochs, config.schedule.warmup_epochs
    if "schedule.warmup_epochs" not in typed and warmup > epochs / 2:
        config.schedule.warmup_epochs = tenth = epochs / 10
        config.notes = [f"warm-up shortened from {warmup:g} to {tenth:g} epochs"]
        if config.optim.clip_norm is None and "optim.clip_norm" not in typed:
            config.optim.clip_norm = 1.0  # without it, CIFAR-10's loss grows from 3 to 100
            config.notes += ["gradients are clipped to a norm of 1, because of the short warm-up"]
    check(config)
    config.notes += [f"left out, because it is not in this copy: {n}" for n in sorted(left_out)]
    return config


def _changes(before: KeyValues, tree: DictConfig, config: Config) -> dict[str, str]:
    """Return the keys that affect the result and differ from the recipe, key -> normalised value.

    `before`: the values of the recipe. An expression among them has its value in the new tree: that
    of data.val_size, ${data.image_size}, is 64 after data.image_size=64.
    """
    resolved = OmegaConf.create(dict(before), parent=tree)
    recipe = cast(dict[str, Any], OmegaConf.to_container(resolved, resolve=True))
    changed = {}
    for name, value in result_keys(config).items():
        short = FIELDS[name].metadata["short"]
        if short(value) != short(recipe[name]):
            changed[name] = show(short(value))
    return changed


def _run_name(recipe: str, config: Config, words: Mapping[str, str], kept: Collection[str]) -> str:
    """Return the default run.name: the recipe, and `words`, what is typed that affects the result.

    Such as `cifar10,optim=adamw,optim.lr=0.3,data.root=photos`. With the default recipe, which says
    nothing about own images, it begins with the model. A fold comes first; augment, loader and data
    come last. A path is shortened to its last part; the run's identity tells two folders of one
    name apart. Characters that are unsafe in a file name are replaced, and parts beyond NAME_LENGTH
    left out, except `kept`. Then a hash follows, so that two commands have the same name only for
    the same training.
    """
    values = dict(words)
    if config.checkpoint.resume not in ("auto", "never"):  # starts from another run's weights
        values["checkpoint.resume"] = str(last_name(config.checkpoint.resume))
    if recipe == DEFAULT_RECIPE:
        recipe = values.pop("model", "") or values.pop("model.name", config.model.name)
    order = sorted((*GROUPS, *FIELDS), key=lambda key: NAMED_LAST.get(key.partition(".")[0], 0))
    keys = [key for key in dict.fromkeys((*NAMED_FIRST, *order)) if key in values]
    full = [recipe, *(f"{key}={values[key]}" for key in keys)]
    safe = (re.sub(r"[^\w.+=-]+", "-", part, flags=re.ASCII).strip("-") for part in full)
    name, *rest = (p.replace("=-", "=")[:NAME_LENGTH] for p in safe)  # [0.9,0.95] as 0.9-0.95
    for key, part in zip(keys, rest, strict=True):
        if len(f"{name},{part}") <= NAME_LENGTH or key in kept:
            name += f",{part}"
    whole = ",".join(full)
    return name if name == whole else f"{name},{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


BASE_YAML = read_yaml(FOLDER / "config.yaml")
DEFAULT_RECIPE: str = next(each["recipe"] for each in BASE_YAML["defaults"] if "recipe" in each)
DEFAULT_NAMES = object_names_in(list(dotted(BASE_YAML).values()))  # code that a fork may lack
DEFAULTS: DictConfig = OmegaConf.structured(Config)
_set(DEFAULTS, dotted(BASE_YAML), "conf/config.yaml: ")
