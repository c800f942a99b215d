"""Read one word of a command line, `key=value` or `group=choice`, and the YAML file of a choice.

A mistake is one line with the word, what is allowed and the nearest name.
"""

import copy
import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple, cast, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from conf.schema import (
    FIELDS,
    FOLDER,
    GROUPS,
    NAMES,
    Config,
    UserError,
    did_you_mean,
    group_names,
)

# Keys with a word as value, mostly a path.
WORDS = {name for name, field in FIELDS.items() if field.type in (str, str | None)}
SCHEMA: DictConfig = OmegaConf.structured(Config)
FLAGS = "docs/from-other-trainers.md has the keys for the flags of other trainers"
OTHER = {"model": "model.name", "data": "data.root"}  # keys that take more than the group's choices


class Override(NamedTuple):
    """A word of the command line."""

    text: str  # as typed, for messages
    name: str  # of a key or a group
    value: Any  # of the key, or the file of a group's choice


def read_override(text: str) -> Override:
    """Read a word as typed; raise UserError if its key, choice or value is not allowed.

    `+` and `++` before the key mean nothing.
    """
    name, equals, typed = text.lstrip("+").partition("=")
    if re.search("[\ud800-\udfff]", text):  # config.yaml could not hold it
        shown = ascii(text)[1:-1]
        raise UserError(f"{shown}: is not UTF-8; rename the file, or use a symbolic link to it")
    if text.startswith("-"):
        raise UserError(f"{text}: not an option; {advice(name.lstrip('-'))}; {FLAGS}")
    if not equals:
        raise UserError(f"{text}: is not key=value, as data.root=/images is; {advice(name)}")
    if name not in NAMES:
        raise UserError(f"{text}: there is no key {name}; {advice(name)}")
    if name in GROUPS:
        return Override(text, name, find(name, typed))
    try:
        return Override(text, name, _value(name, typed))
    except (HydraException, OmegaConfBaseException):
        several = "; `train.py -m` trains once for each of several values"
        more = several if re.match(r"[^\[{(]+,", typed) else ""
        raise UserError(f"{text}: not allowed; give {allowed_values(name)}{more}") from None


def advice(name: str) -> str:
    """Name the key or group that is meant by an unknown one, such as `lr` of another trainer."""
    lasts: dict[str, list[str]] = {}
    for known in NAMES:
        lasts.setdefault(known.rpartition(".")[2], []).append(known)
    word = name.rpartition(".")[2].replace("-", "_").lower()
    close = difflib.get_close_matches(word, lasts, 1, 0.7)
    return f"did you mean {' or '.join(lasts[close[0]])}?" if close else "--help lists all keys"


def find(group: str, choice: str) -> Path:
    """Return the YAML file of a choice: a name in conf/, or a path that ends in .yaml."""
    path, names = Path(choice).expanduser(), group_names(group)
    if choice in names:
        return FOLDER / group / f"{choice}.yaml"
    if path.suffix == ".yaml" and path.is_file():
        return path.absolute()
    more = did_you_mean(choice, names)
    if group in OTHER:
        more = f"; for another one write {OTHER[group]}={choice}"
    files = f"{', '.join(names)}, or a file PATH.yaml"
    raise UserError(f"{group}={choice}: no such {group}; choose one of {files}{more}")


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


def allowed_values(name: str) -> str:
    """The values that a key accepts, from its check if it has one, else from its type."""
    kind: Any = FIELDS[name].type
    if says := FIELDS[name].metadata["check"].says:
        return says.replace("a number", "a whole number", 1) if kind in (int, int | None) else says
    if get_origin(kind) is list:
        return "a list, in brackets"
    return "true or false" if kind is bool else "a name or a path"


def _value(name: str, typed: str) -> Any:
    """Return a value in Hydra's grammar; a word without quotes or brackets is taken as it is.

    Raises HydraException or OmegaConfBaseException if the key does not take it.
    """
    value: Any = None if typed == "null" else typed
    if name not in WORDS or typed[:1] in ("'", '"', "[", "{"):
        # The colon of module:name as a key in braces needs a backslash.
        text = typed if name in WORDS else re.sub(r"(\w):(\w+\s*:)", r"\1\\:\2", typed)
        override = OverridesParser.create().parse_override(f"{name}={text}")
        value = typed if override.is_sweep_override() else override.value()
    if "${" not in str(value):  # else composing resolves it
        section, _, last = name.partition(".")
        tree = copy.deepcopy(SCHEMA[section])
        OmegaConf.update(tree, last, value)
        found = cast(dict[str, Any], OmegaConf.to_container(tree))[last]
        if not FIELDS[name].metadata["check"].allows(found):
            raise ValidationError
    return value
