"""Read and check one override: `key=value` or `group=choice`, in Hydra's grammar.

Each mistake gets one line that says what to write instead. `--config-dir=DIR` among the overrides
names a folder with more choices: it belongs to them, because they may mean nothing without it.
"""

import contextlib
import difflib
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from conf import hints
from conf.schema import (
    FOLDER,
    Config,
    UserError,
    did_you_mean,
    group_names,
    show,
    walk,
)

GROUPS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
FIELDS = {name: field for name, field, _ in walk(Config())}
KEYS = list(FIELDS)
NAMES = [*KEYS, *GROUPS]
WORDS = {name for name, field in FIELDS.items() if field.type in (str, str | None)} | {
    "data.root",  # or a list of such words
    "data.classes",
}
CONFIG_DIR = "--config-dir="


def split_config_dir(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the folder of `--config-dir=DIR`, None without one, and the overrides.

    Raises:
        UserError: the folder cannot be used, or has a choice of the same name as this program.
    """
    given = [word.removeprefix(CONFIG_DIR) for word in words if word.startswith(CONFIG_DIR)]
    overrides = [word for word in words if not word.startswith(CONFIG_DIR)]
    if not given:
        return None, overrides
    folder = Path(given[-1]).expanduser()
    typed = f"{CONFIG_DIR}{folder}"
    if len(given) > 1:
        raise UserError(f"{typed}: given {len(given)} times; give one folder")
    if not given[0] or not folder.is_dir():
        raise UserError(f"{typed}: no such folder; give a folder that holds, for example, recipe/")
    if not any((folder / group).is_dir() for group in GROUPS):
        raise UserError(f"{typed}: has no folder {' or '.join(GROUPS)}; put YAML files there")
    for group in GROUPS:
        own = sorted(path.stem for path in (folder / group).glob("*.yaml"))
        if taken := [name for name in own if name in group_names(group)]:
            raise UserError(
                f"{typed}: {group}/{taken[0]}.yaml has the name of a choice of this program; "
                "rename it"
            )
    return folder, overrides


def read_override(text: str, config_dir: Path | None = None) -> Override:
    """Parse an override and check its key and the type of its value.

    Args:
        text: as typed.
        config_dir: a folder with more choices of groups.

    Raises:
        UserError: names the override and what to write instead.
    """
    if re.search(r"[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]", text):
        raise UserError(f"{text}: is not text; rename the file, or use a symbolic link to it")
    override = _parse(_with_quotes(text))
    name, typed = override.key_or_group, override.input_line or override.key_or_group
    if name not in NAMES:
        _refuse_unknown(override, typed)
    if override.is_sweep_override():
        if name in KEYS and get_origin(FIELDS[name].type) is list:
            raise UserError(f"{typed}: not allowed; give {allowed_values(name)}")
        raise UserError(f"{typed}: is a sweep; `train.py -m` trains once for each value")
    if name in GROUPS and "@" not in typed.split("=")[0]:
        _check_choice(override, typed, config_dir)
    elif name in KEYS:
        _check_key(override, typed)
    else:
        _refuse_unknown(override, typed)
    return override


def quoted(value: str) -> str:
    """Put a value in quotes, in Hydra's grammar."""
    # Inside quotes, a backslash is literal unless it precedes a quote.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def _with_quotes(text: str) -> str:
    """Quote a value, usually a path, that Hydra's grammar would not take literally."""
    name, _, value = text.partition("=")
    if name.lstrip("+") not in WORDS or not value:
        return text
    with contextlib.suppress(HydraException):
        parsed = OverridesParser.create().parse_override(text)
        is_word = not isinstance(parsed.value(), (bool, int, float))  # 1.10 would become 1.1
        if is_word and (not parsed.is_sweep_override() or "/" not in value):
            return text
    return f"{name}={quoted(value)}"


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        # JSON's {"alpha": 0.2} is {alpha: 0.2} here.
        plain = re.sub(r"""(["'])(\w+)\1\s*:""", r"\2:", text)
        name = text.partition("=")[0].lstrip("+")
        remedy = "put special characters in quotes: 'run.name=\"a, b\"'"
        if plain != text:
            remedy = f"write {shlex.quote(plain)}"
        elif name in KEYS and name not in WORDS:
            remedy = f"give {allowed_values(name)}"
        raise UserError(f"{text}: cannot be read as key=value; {remedy}") from None


def _check_choice(override: Override, typed: str, config_dir: Path | None) -> None:
    name, choice = override.key_or_group, override.value()
    choices = group_names(name, config_dir)
    if not isinstance(choice, (str, int)) or show(choice) not in choices:  # 10.yaml is allowed
        more = {
            "model": f"; for any other model write model.name={choice}",
            "data": f"; for a folder of images write data.root={choice}",
        }.get(name, "")
        cutoff = 0.85 if name == "model" else 0.6
        hint = did_you_mean(Path(str(choice)).stem.lower(), choices, cutoff=cutoff)
        raise UserError(f"{typed}: no such {name}; choose one of {', '.join(choices)}{hint}{more}")
    if override.is_add() or override.is_delete():
        raise UserError(f"{typed}: write {name}={show(choice)}")


def _check_key(override: Override, typed: str) -> None:
    name, value = override.key_or_group, override.value()
    if override.is_delete():
        raise UserError(f"{typed}: a key cannot be removed; give it a value")
    if override.is_add():
        raise UserError(f"{typed}: write {name}={show(value)}")
    plain = f"{name}={show(value)}".lower()
    for start, remedy in hints.VALUES.items():
        if plain.startswith(start):
            raise UserError(f"{typed}: not allowed; {remedy}")
    if not _fits(name, value):
        raise UserError(f"{typed}: not allowed; give {allowed_values(name)}")


def _fits(name: str, value: Any) -> bool:
    """Whether a value has the type of a key. Each override is checked by itself, to name it.

    If a key is given twice, composing would find a mistake in either but not know in which.
    """
    section, _, last = name.partition(".")
    try:
        OmegaConf.update(OmegaConf.structured(getattr(Config(), section)), last, value)
        missing = OmegaConf.missing_keys(OmegaConf.create([value]))
    except InterpolationResolutionError:  # found by composing, with the values of the other keys
        return True
    except OmegaConfBaseException:
        return False
    # OmegaConf would accept 2 and yes for true.
    return not missing and (FIELDS[name].type is not bool or isinstance(value, bool))


def _refuse_unknown(override: Override, typed: str) -> None:
    name, value = override.key_or_group, _shown(override)
    if re.match(r"hydra([./]|$)", name):
        setting = name.replace("/", ".").removeprefix("hydra.")
        advice = next(text for start, text in hints.HYDRA.items() if setting.startswith(start))
        raise UserError(
            f"{typed}: Hydra's own settings are not used here; {advice.replace('{}', value)}"
        )
    parent, _, inner = name.rpartition(".")
    if parent in KEYS and get_origin(FIELDS[parent].type) is dict:
        raise UserError(f"{typed}: write {parent}={{{inner}: {value}}}")
    section = [key for key in KEYS if key.startswith(f"{name}.")]
    if section:
        raise UserError(f"{typed}: {name} is a group of keys: {', '.join(section)}")
    raise UserError(f"{typed}: there is no key {name or typed}{_another_key(override)}")


def _shown(override: Override) -> str:
    """The value as typed; that of a sweep is no plain value."""
    if override.is_sweep_override():
        return str(override.input_line).partition("=")[2]
    return show(override.value())


def _another_key(override: Override) -> str:
    """The advice for an unknown key, after a semicolon: the right key, or a sentence."""
    name = override.key_or_group
    last = name.rpartition(".")[2].lower()
    # The right last part in the wrong section (`train.lr`) says more than a similar spelling.
    moved = [key for key in KEYS if key.rpartition(".")[2] == last]
    if moved and last not in hints.REMEDIES:
        return f"; did you mean {' or '.join(moved)}?"
    if advice := remedy(name):
        advice = advice.replace("{}", "" if override.is_delete() else _shown(override))
        is_override = advice.partition("=")[0] in NAMES
        return f"; write {shlex.quote(advice)}" if is_override else f"; {advice}"
    last_parts = {key.rpartition(".")[2]: key for key in KEYS}
    close = difflib.get_close_matches(name.lower(), last_parts, n=1, cutoff=0.75)
    if close and "." not in name:
        return f"; did you mean {last_parts[close[0]]}?"
    return did_you_mean(name.lower(), NAMES) or "; --help lists all keys"


def remedy(name: str) -> str | None:
    """The equivalent of another program's flag or key: an override, or a sentence.

    `{}` in it stands for the value. None if there is no equivalent.
    """
    word = name.lstrip("-").replace("_", "-").lower()
    own = [
        key
        for key in NAMES
        if word in (key.replace("_", "-"), key.rpartition(".")[2].replace("_", "-"))
    ]
    if len(own) == 1 and word not in hints.REMEDIES:
        is_bool = own[0] in KEYS and FIELDS[own[0]].type is bool
        return f"{own[0]}={'true' if is_bool else '{}'}"
    return hints.REMEDIES.get(word) or hints.REMEDIES.get(word.rpartition(".")[2])


def allowed_values(name: str) -> str:
    """The values that a key accepts, from its check if it has one, else from its type."""
    kind: Any = FIELDS[name].type
    test = FIELDS[name].metadata["check"]
    # A check describes the allowed values when it refuses one.
    wrong: Any = "" if name in WORDS else [math.nan] if get_origin(kind) is list else math.nan
    says: str | None = test(wrong) if test else None
    if get_origin(kind) is list:
        return f"{says or 'a list'}, in brackets"
    if says is None:
        return "true or false" if kind is bool else "a name or a path"
    return says.replace("a number", "a whole number", 1) if kind in (int, int | None) else says
