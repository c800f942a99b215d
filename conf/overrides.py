"""Read and check one override: `key=value` or `group=choice`, in Hydra's grammar.

Each mistake gets one line that says what to write instead. `--config-dir=DIR` among the overrides
names a folder with more choices: it belongs to them, because they may mean nothing without it.
"""

import contextlib
import copy
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.files import read_text
from conf.hints import advice
from conf.schema import (
    FIELDS,
    GROUPS,
    KEYS,
    NAMES,
    Config,
    UserError,
    did_you_mean,
    group_names,
    show,
)

# Keys with words or lists of words as values, mostly paths.
WORDS = {name for name, field in FIELDS.items() if field.type in (str, str | None)}
CONFIG_DIR = "--config-dir="
DEFAULTS: DictConfig = OmegaConf.structured(Config)
# Of a YAML file of the user; the longest here has 1.7 kB and no alias.
LARGEST_FILE, MOST_ALIASES = 100_000, 20


def split_config_dir(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the folder of `--config-dir=DIR`, None without one, and the overrides.

    Raises UserError if a YAML file in the folder is not allowed.
    """
    given = [word for word in words if word.startswith(CONFIG_DIR)]
    overrides = [word for word in words if word not in given]
    if not given:
        return None, overrides
    folder = Path(given[-1].removeprefix(CONFIG_DIR)).expanduser()
    if not any((folder / group).is_dir() for group in GROUPS):
        raise UserError(f"{given[-1]}: has no folder {' or '.join(GROUPS)}; put YAML files there")
    for group in GROUPS:
        for path in (folder / group).glob("*.yaml"):
            if path.stem in group_names(group):
                raise UserError(f"{path}: has the name of a choice of this program; rename it")
            read_yaml(path)
    return folder, overrides


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; UserError if it is too large, or does not hold keys."""
    try:
        text = read_text(path)
        tokens = yaml.scan(text) if "*" in text else ()
        aliases = sum(isinstance(token, yaml.AliasToken) for token in tokens)
        if len(text) > LARGEST_FILE or aliases > MOST_ALIASES:
            raise UserError(f"{path}: is too long, or has too many aliases (*name); shorten it")
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as YAML ({reason}); correct it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return cast(dict[str, Any], content)


def read_override(text: str, config_dir: Path | None = None) -> Override:
    """Parse an override as typed; raise UserError if its key or its value is not allowed.

    `+` and `++` before the key mean nothing. `config_dir`: a folder with more choices of groups.
    """
    if re.search(r"[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]", text):
        raise UserError(f"{text}: is not text; rename the file, or use a symbolic link to it")
    name, _, value = text.lstrip("+").partition("=")
    if name not in NAMES:
        raise UserError(f"{text}: there is no key {name or text}; {advice(name, value or 'VALUE')}")
    try:
        override = OverridesParser.create().parse_override(_with_quotes(name, value))
    except HydraException:
        quotes = "put special characters in quotes: 'run.name=\"a, b\"'"
        remedy = quotes if name in WORDS or name in GROUPS else f"give {allowed_values(name)}"
        raise UserError(f"{text}: cannot be read as key=value; {remedy}") from None
    is_list = name in KEYS and get_origin(FIELDS[name].type) is list
    if override.is_sweep_override() and not is_list:
        raise UserError(f"{text}: has several values; `train.py -m` trains once for each")
    if name in GROUPS:
        _check_choice(text, name, override.value(), config_dir)
    elif override.is_sweep_override() or not _allows(name, override.value()):
        raise UserError(f"{text}: not allowed; give {allowed_values(name)}")
    return override


def quoted(value: str) -> str:
    """Put a value in quotes, in Hydra's grammar."""
    return QuotedString(value, Quote.single).with_quotes()


def _with_quotes(name: str, value: str) -> str:
    """Return the override, in quotes if Hydra's grammar would not take the value literally."""
    text = f"{name}={value}"
    if name not in WORDS:
        return re.sub(r"(\w):(\w+\s*:)", r"\1\\:\2", text)  # module:name as a key in braces
    if not value:
        return text
    with contextlib.suppress(HydraException):
        parsed = OverridesParser.create().parse_override(text)
        is_word = not isinstance(parsed.value(), (bool, int, float))  # 1.10 would become 1.1
        is_path = "/" in value and name not in ("model.name", "data.val_fold")
        if is_word and not (is_path and parsed.is_sweep_override()):
            return text
    return f"{name}={quoted(value)}"


def _check_choice(text: str, group: str, choice: Any, config_dir: Path | None) -> None:
    choices = group_names(group, config_dir)
    if isinstance(choice, (str, int)) and show(choice) in choices:  # 10.yaml is allowed
        return
    word = str(choice).lower()
    similar = next((known for known in choices if known in word), word)  # cosineannealinglr
    more = {
        "model": f"; for any other model write model.name={choice}",
        "data": f"; for a folder of images write data.root={choice}",
    }.get(group) or did_you_mean(similar, choices)
    raise UserError(f"{text}: no such {group}; choose one of {', '.join(choices)}{more}")


def _allows(name: str, value: Any) -> bool:
    """Whether a key takes a value. Each override is checked by itself, to name it.

    If a key is given twice, composing would find a mistake in either but not know in which.
    """
    if "${" in str(value):  # composing resolves it
        return True
    section, _, last = name.partition(".")
    tree = copy.deepcopy(DEFAULTS[section])
    try:
        OmegaConf.update(tree, last, value)
    except OmegaConfBaseException:
        return False
    # OmegaConf would accept 2 and yes for true.
    if FIELDS[name].type is bool and not isinstance(value, bool):
        return False
    node = tree[last]
    found = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    return bool(FIELDS[name].metadata["check"].allows(found))


def allowed_values(name: str) -> str:
    """The values that a key accepts, from its check if it has one, else from its type."""
    kind: Any = FIELDS[name].type
    if says := FIELDS[name].metadata["check"].says:
        return says.replace("a number", "a whole number", 1) if kind in (int, int | None) else says
    if get_origin(kind) is list:
        return "a list, in brackets"
    return "true or false" if kind is bool else "a name or a path"
