"""The command line: `key=value` overrides in, a checked `Config` out, or one line that says what is wrong.

Hydra composes the groups. Around it stands what Hydra leaves open: overrides are checked against the schema first (so that
a typo is answered with the nearest name, also behind + and ++), mistakes end with status 2, and nothing is created.
"""

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import Config, UserError, check, did_you_mean, show, walk

FOLDER = Path(__file__).parent
GROUPS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
FIELDS = {name: field for name, field, _ in walk(Config())}
KEYS = list(FIELDS)
WORDS = {name for name, field in FIELDS.items() if field.type in (str, str | None)}


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (FOLDER / group).glob("*.yaml"))


def load(overrides: Sequence[str] = (), *, runnable: bool = True) -> Config:
    """Compose and check a config from Hydra overrides such as `recipe=demo` or `optim.lr=0.2`.

    Args:
        overrides: as typed.
        runnable: refuse a config that lacks what only the user can give, data.root.

    Raises:
        UserError: a key, group choice or value that is not allowed.
    """
    overrides = [_quoted(text) for text in overrides]
    parsed = [_read_override(text) for text in overrides]
    for override in parsed:
        _check_override(override)
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
            composed = compose(config_name="config", overrides=list(overrides))
        # `+key=value` can add to the composed tree; only the schema's own keys survive this merge.
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, parsed)) from None
    assert isinstance(config, Config)
    check(config, runnable=runnable)
    return config


def to_yaml(config: Config) -> str:
    """The resolved config as YAML: what `--cfg job` prints and config.yaml in a run directory holds."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def differences(stored: str, config: Config) -> list[str]:
    """What a config changes against one stored as YAML, key by key; its own name and folder do not count."""
    tree = OmegaConf.create(stored)
    now = {name: value for name, _, value in walk(config) if not name.startswith("run.")}
    was = {name: OmegaConf.select(tree, name) for name in now}
    was = {name: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for name, v in was.items()}
    return [f"{name}: {show(was[name])} -> {show(now[name])}" for name in now if was[name] != now[name]]


def parse(arguments: Sequence[str], *, script: str, purpose: str) -> Config:
    """Turn a command line into a `Config`; print and leave for --help, --cfg and mistakes.

    Raises:
        SystemExit: 0 after --help or --cfg job, 2 after a mistake.
    """
    overrides = [a for a in arguments if not a.startswith("-")]
    flags = [a for a in arguments if a.startswith("-")]
    if {"-h", "--help"} & set(flags):
        print(help_text(script, purpose))
        sys.exit(0)
    show_only = False
    for flag in flags:
        if flag in ("-c", "--cfg", "--cfg=job"):
            show_only = True
        else:
            if flag in ("-m", "--multirun"):
                fail(f"{flag}: sweeps are not supported; start one run per value, each with its own run.name", script)
            fail(f"{flag}: not an option; --help names them, everything else is key=value", script)
    if show_only and "job" in overrides:
        overrides.remove("job")
    try:
        config = load(overrides, runnable=not show_only)
    except UserError as error:
        fail(str(error), script)
    if show_only:
        print(to_yaml(config), end="")
        sys.exit(0)
    return config


def complain(message: str, script: str = "train.py") -> None:
    """Say one line on stderr, also when a path in it has a line break."""
    print(f"{script}: {' '.join(message.splitlines())}", file=sys.stderr)


def complain_of_mistake(message: str, script: str = "train.py") -> None:
    """Complain once a node: every rank finds the user's mistake, the first of a node says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        complain(message, script)


def fail(message: str, script: str = "train.py") -> NoReturn:
    """Complain and leave with status 2, the user's mistake."""
    complain_of_mistake(message, script)
    sys.exit(2)


def help_text(script: str, purpose: str) -> str:
    """Every group with its choices and every key with its type, default and sentence."""
    lines = [
        purpose,
        "",
        f"usage: python {script} [group=choice ...] [key=value ...] [--cfg job] [--help]",
        "",
        "groups:",
    ]
    lines += [f"  {group + '=':<10} {' | '.join(choices(group))}" for group in GROUPS]
    lines += ["", "keys (defaults before the recipe's):"]
    for section in fields(Config):
        node = getattr(Config(), section.name)
        for name, f, value in walk(node, f"{section.name}."):
            default = show(value) if f.default is not MISSING or value else "[]"
            lines.append(f"  {name + '=' + default:<42} {f.metadata['sentence']}")
    lines += ["", "--cfg job prints the composed config and ends; --help this text."]
    return "\n".join(lines)


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?` for the closest known name, or nothing."""
    hint = did_you_mean(word, known, cutoff=0.5)
    return f"; {hint}" if hint else ""


def _quoted(text: str) -> str:
    """Put a word, a path above all, in quotes where Hydra's grammar would stumble over a bracket or an umlaut in it."""
    name, _, value = text.partition("=")
    if name.lstrip("+") not in WORDS or not value or not value.isprintable():
        return text
    with contextlib.suppress(HydraException):
        parsed = OverridesParser.create().parse_override(text)
        a_word = not isinstance(parsed.value(), (bool, int, float))  # 1.10 would come back as 1.1
        if a_word and (not parsed.is_sweep_override() or "/" not in value):
            return text
    # In quotes, a backslash means itself unless a quote follows.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + "\\'" * bool(found[2]), value)
    return f"{name}='{escaped}'"


def _read_override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(f"{text}: cannot be read: {_first_line(error)}; write key=value, quoted for the shell") from None


def _check_override(override: Override) -> None:
    name = override.key_or_group
    text = override.input_line or name
    if override.is_sweep_override():
        raise UserError(f"{text}: sweeps are not supported; start one run per value")
    if name in GROUPS and "@" not in text.split("=")[0]:
        choice = override.value()
        if not isinstance(choice, str) or choice not in choices(name):
            hint = nearest(str(choice), choices(name))
            more = f"; any other model is model.name={choice}" if name == "model" else ""
            raise UserError(f"{text}: no such {name}; choose one of {', '.join(choices(name))}{hint}{more}")
        if override.is_add() or override.is_delete():
            raise UserError(f"{text}: write {name}={choice}")
        return
    if name.split(".")[0] == "hydra":
        raise UserError(f"{text}: Hydra's own settings are not used here; the run's folder is run.dir=")
    if name not in KEYS:
        section = [k for k in KEYS if k.startswith(f"{name}.")]
        if section:
            raise UserError(f"{text}: {name} is a group of keys: {', '.join(section)}")
        # A right last part in a wrong section (`train.lr`) says more than a similar spelling.
        moved = [k for k in KEYS if k.rpartition(".")[2] == name.rpartition(".")[2]]
        hint = f"; did you mean {moved[0]}?" if moved else nearest(name, KEYS + GROUPS)
        raise UserError(f"{text}: there is no key {name}{hint or '; see --help'}")
    if override.is_delete():
        raise UserError(f"{text}: a key cannot be removed; give it a value")
    if override.is_add():
        raise UserError(f"{text}: write {name}={show(override.value())}")
    if FIELDS[name].type is bool and not isinstance(override.value(), bool):  # OmegaConf would take 2 and yes for true
        raise UserError(f"{text}: not allowed; give true or false")


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """Turn a Hydra or OmegaConf error into `key=value: what is wrong; what to do`."""
    cause: BaseException = error
    while cause.__cause__ is not None and isinstance(cause.__cause__, (HydraException, OmegaConfBaseException)):
        cause = cause.__cause__
    name = getattr(cause, "full_key", None) or ""
    base = name.split("[")[0]
    typed = next((o.input_line for o in overrides if o.key_or_group == base and o.input_line), None)
    if base in FIELDS:
        allowed = _type_name(FIELDS[base].type)
        return f"{typed or name}: {_first_line(cause)}; give {allowed}"
    return f"{typed or name or 'config'}: {_first_line(cause)}"


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if is_dataclass(kind):
        return "keys"
    return names.get(kind) or str(kind).replace("typing.", "").replace("None", "null")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith("raised while composing config:"):  # of a YAML: the cause stands below
        key = next((line.split(": ", 1)[1] for line in lines if line.strip().startswith("full_key: ")), "")
        return f"{lines[0].split(':')[0]}: {key}{': ' if key else ''}{lines[1]}"
    return lines[0]
