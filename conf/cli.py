"""The command line: `key=value` overrides in, a checked `Config` out, or one line that says what is wrong.

Hydra composes the groups. Around it stands what Hydra leaves open: overrides are checked against the schema first (so that
a typo is answered with the nearest name, also behind + and ++), mistakes end with status 2, and nothing is created.
"""

import contextlib
import copy
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import RESULT, Config, UserError, check, did_you_mean, in_effect, show, walk

FOLDER = Path(__file__).parent
GROUPS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
FIELDS = {name: field for name, field, _ in walk(Config())}
KEYS = list(FIELDS)
WORDS = {name for name, field in FIELDS.items() if field.type in (str, str | None)}
DEFAULT_RECIPE: str = OmegaConf.load(FOLDER / "config.yaml").defaults[-2].recipe
NAME_LENGTH = 100  # of a run, at most: a folder's name may have 255 bytes


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (FOLDER / group).glob("*.yaml"))


def load(overrides: Sequence[str] = (), *, runnable: bool = True) -> Config:
    """Compose and check a config from Hydra overrides such as `recipe=demo` or `optim.lr=0.2`.

    Precedence, from low to high: the schema's defaults, groups, the recipe, typed groups, typed keys.

    Args:
        overrides: as typed.
        runnable: refuse a config that lacks what only the user can give, data.root.

    Raises:
        UserError: a key, group choice or value that is not allowed.
    """
    parsed = [_read_override(_quoted(text)) for text in overrides]
    for override in parsed:
        _check_override(override)
    groups = {o.key_or_group: str(o.value()) for o in parsed if o.key_or_group in GROUPS}
    keys = [o for o in parsed if o.key_or_group not in GROUPS]
    recipe = groups.pop("recipe", DEFAULT_RECIPE)
    at_fault = parsed
    try:
        planned = _compose(recipe, FOLDER)
        tree, notes = copy.deepcopy(planned), []
        for group, choice in groups.items():
            notes += _choose(tree, group, choice, recipe)
        for override in keys:
            at_fault = [override]
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        at_fault = parsed
        if tree.run.name is None:
            tree.run.name = run_name(recipe, planned, tree)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, at_fault)) from None
    assert isinstance(config, Config)
    check(config, runnable=runnable)
    for override in keys:
        _check_effect(override, config)
    config.typed = list(overrides)
    config.notes = notes + _doubts(config)
    return config


@cache
def _compose(recipe: str, folder: Path) -> DictConfig:
    """The schema's defaults, the groups' and the recipe's values, merged in this order. Do not write into it."""
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        composed = compose(config_name="config", overrides=[f"recipe={recipe}"])
    # A YAML file can add keys to the composed tree; only the schema's own keys survive this merge.
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))


def _choose(tree: DictConfig, group: str, choice: str, recipe: str) -> list[str]:
    """Put a typed group into the tree, above the recipe; return what the user should know.

    A section with a name (optim, schedule, model) is replaced as a whole: the values that a recipe has for one optimiser are
    wrong for another. In other sections the recipe's values stay where the group has none: data=fake keeps the image size.
    """
    chosen = OmegaConf.load(FOLDER / group / f"{choice}.yaml")
    if f"{group}.name" not in FIELDS:
        tree[group] = OmegaConf.merge(tree[group], chosen)
        return []
    own = OmegaConf.select(OmegaConf.load(FOLDER / "recipe" / f"{recipe}.yaml"), group) or {}
    before = {key: tree[group][key] for key in own}
    tree[group] = OmegaConf.merge(OmegaConf.structured(OmegaConf.get_type(tree[group])), chosen)
    dropped = [f"{group}.{key}={show(value)}" for key, value in before.items() if value != tree[group][key]]
    return [f"{group}={choice} replaces the recipe's {', '.join(dropped)}"] if dropped else []


def run_name(recipe: str, planned: DictConfig, tree: DictConfig) -> str:
    """The default run.name: the recipe, and every key that affects the result and differs from the recipe's value.

    Two commands of one recipe get the same name if and only if they train the same thing.

    Args:
        recipe: its name.
        planned: the recipe as composed, interpolations unresolved.
        tree: the same with what the user typed.

    Returns:
        Such as `imagenet_rn50,optim.lr=0.3`. What makes it longer than NAME_LENGTH characters, or cannot be in the name of a
        folder, is left out, and a hash of everything stands at the end.
    """
    full, short = recipe, recipe
    before, now, values = _flat(planned), _flat(tree), _flat(tree, resolve=True)
    for name, f in FIELDS.items():
        if not f.metadata["affects"] & RESULT or before[name] == now[name] or not in_effect(tree, f):
            continue
        trial = copy.deepcopy(tree)
        OmegaConf.update(trial, name, before[name], merge=False)
        # data.val_size=224 says what the recipe's ${data.image_size} says, if that is 224.
        value, planned_value = (f.metadata["alike"](v[name]) for v in (values, _flat(trial, resolve=True)))
        if value != planned_value:
            full += f",{name}={show(value)}"
            part = f",{name}=" + re.sub(r"[^\w.+-]+", "-", show(value), flags=re.ASCII).strip("-")
            short += part if len(short + part) <= NAME_LENGTH else ""
    return full if full == short else f"{short},{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _flat(tree: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Dotted key -> value, for every key; interpolations as they are written, or resolved."""
    nested = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=resolve))
    return {name: nested[name.split(".")[0]][name.split(".")[1]] for name in KEYS}


def _check_effect(override: Override, config: Config) -> None:
    """Refuse a typed key that another key puts out of effect: the run would not be what was asked for.

    Raises:
        UserError: names the other key.
    """
    name = override.key_or_group
    f = FIELDS[name]
    if not in_effect(config, f):
        values = {key: value for key, _, value in walk(config)}
        because = " and ".join(f"{key}={show(values[key])}" for key in f.metadata["when"])
        needed = " and ".join(f"{key}={' or '.join(allowed)}" for key, allowed in f.metadata["when"].items())
        raise UserError(f"{override.input_line}: has no effect with {because}; give {needed}, or leave it out")


def _doubts(config: Config) -> list[str]:
    """What is allowed and will hardly be what the user wants."""
    transformer = re.search(r"vit|swin|deit|former", config.model.name)
    if transformer and config.optim.name == "sgd":
        return [f"model.name={config.model.name} with optim.name=sgd: transformers learn little with SGD; "
                "recipe=imagenet_vit_s16 has an optimiser and a schedule for them"]  # fmt: skip
    return []


def to_yaml(content: Config | list[str]) -> str:
    """YAML of a resolved config, as `--cfg job` prints it and config.yaml holds it, or of overrides as they were typed."""
    if isinstance(content, list):
        return OmegaConf.to_yaml(OmegaConf.create(content))
    sections = {f.name: asdict(getattr(content, f.name)) for f in fields(content) if is_dataclass(getattr(content, f.name))}
    return OmegaConf.to_yaml(OmegaConf.create(sections))


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
    lines += [
        "",
        "keys (defaults before the recipe's; * affects the result: a run does not resume with another value):",
    ]
    for name, f, value in walk(Config()):
        default = show(value) if f.default is not MISSING or value else "[]"
        mark = "*" if f.metadata["affects"] & RESULT else " "
        lines.append(f"{mark} {name + '=' + default:<42} {f.metadata['sentence']}")
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
