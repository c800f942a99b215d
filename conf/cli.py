"""The command line: turn `key=value` overrides into a checked `Config`, or into one line that says what is wrong.

Hydra composes the groups. This module checks each override against the schema before that, so that a typo is answered with the
nearest name, also after + and ++. A mistake ends the program with status 2, and nothing is created.
"""

import contextlib
import copy
import difflib
import hashlib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import MarkedYAMLError

from conf import hints
from conf.schema import RESULT, Config, UserError, check, config_values, did_you_mean, in_effect, path_hash, show, walk

FOLDER = Path(__file__).parent
GROUPS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
FIELDS = {name: field for name, field, _ in walk(Config())}
KEYS = list(FIELDS)
NAMES = [*KEYS, *GROUPS]
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
        tree = copy.deepcopy(planned)
        for group, choice in groups.items():
            _choose(tree, group, choice)
        for override in keys:
            at_fault = [override]
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        at_fault = parsed
        if tree.run.name is None:
            tree.run.name = run_name(recipe, planned, tree)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise UserError(_explain(error, at_fault)) from None
    assert isinstance(config, Config)
    check(config, runnable=runnable)
    for override in keys:
        _check_effect(override, config)
    config.typed = list(overrides)
    config.notes = _replaced(recipe, planned, tree, groups, {o.key_or_group for o in keys}) + _doubts(config)
    return config


@cache
def _compose(recipe: str, folder: Path) -> DictConfig:
    """The schema's defaults, the groups' and the recipe's values, merged in this order. Do not write into it."""
    _refuse_missing(recipe, folder)
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        composed = compose(config_name="config", overrides=[f"recipe={recipe}"])
    # A YAML file can add keys to the composed tree; only the schema's own keys survive this merge.
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), composed))


def _choose(tree: DictConfig, group: str, choice: str) -> None:
    """Put a typed group into the tree, above the recipe.

    A section with a name (optim, schedule, model) is replaced as a whole: the values that a recipe has for one optimiser are
    wrong for another. In other sections the recipe's values stay where the group has none: data=fake keeps the image size.
    """
    chosen = OmegaConf.load(FOLDER / group / f"{choice}.yaml")
    section = tree[group] if f"{group}.name" not in FIELDS else OmegaConf.structured(OmegaConf.get_type(tree[group]))
    tree[group] = OmegaConf.merge(section, chosen)


def _replaced(recipe: str, planned: DictConfig, tree: DictConfig, groups: Mapping[str, str], keys: set[str]) -> list[str]:
    """One note for each typed group that replaces values of the recipe, and one if optim.name alone keeps them."""
    own = OmegaConf.load(FOLDER / "recipe" / f"{recipe}.yaml")
    notes = []
    for group, choice in groups.items():
        names = [f"{group}.{key}" for key in OmegaConf.select(own, group) or {} if f"{group}.name" in FIELDS]
        before, now = _flat(planned, resolve=True), _flat(tree, resolve=True)
        changed = [f"{name} {show(before[name])} -> {show(now[name])}" for name in names
                   if before[name] != now[name] and name not in keys]  # fmt: skip
        notes += [f"{group}={choice} replaces values of the recipe: {', '.join(changed)}"] if changed else []
    if "optim.name" in keys and "optim" not in groups and tree.optim.name != planned.optim.name:
        kept = [f"optim.{key}={show(tree.optim[key])}" for key in ("lr", "weight_decay") if f"optim.{key}" not in keys]
        notes += [f"optim.name={tree.optim.name} keeps {', '.join(kept)} of {planned.optim.name}; write "
                  f"optim={tree.optim.name} to use its own defaults"] if kept else []  # fmt: skip
    return notes


def run_name(recipe: str, planned: DictConfig, tree: DictConfig) -> str:
    """The default run.name: the recipe, and every key that affects the result and differs from the recipe's value.

    Two commands of one recipe get the same name if and only if they train the same thing.

    Args:
        recipe: its name.
        planned: the recipe as composed, interpolations unresolved.
        tree: the same with what the user typed.

    Returns:
        Such as `imagenet_rn50,optim.lr=0.3`. A part that would make it longer than NAME_LENGTH is left out, and characters that
        are unsafe in a file name are replaced. Then a hash of the whole name is appended.
    """
    full, short = recipe, recipe
    before, now, values = _flat(planned), _flat(tree), _flat(tree, resolve=True)
    for name, f in FIELDS.items():
        if not f.metadata["affects"] & RESULT or before[name] == now[name] or not in_effect(tree, f):
            continue
        trial = copy.deepcopy(tree)
        OmegaConf.update(trial, name, before[name], merge=False)
        value = f.metadata["alike"](values[name])
        try:  # data.val_size=224 says what the recipe's ${data.image_size} says, if that is 224
            same = value == f.metadata["alike"](_flat(trial, resolve=True)[name])
        except InterpolationResolutionError:  # the recipe's expression refers to a key that refers to this one now
            same = False
        if not same:
            full += f",{name}={show(value)}"
            part = f",{name}=" + re.sub(r"[^\w.+-]+", "-", show(value), flags=re.ASCII).strip("-")
            short += part if len(short + part) <= NAME_LENGTH else ""
    if tree.checkpoint.resume not in ("auto", "never"):  # a run that begins with the weights of another
        full, short = (f"{text},checkpoint.resume={path_hash(tree.checkpoint.resume)}" for text in (full, short))
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
        values = config_values(config)
        because = " and ".join(f"{key}={show(values[key])}" for key in f.metadata["when"])
        needed = " and ".join(f"{key}={' or '.join(allowed)}" for key, allowed in f.metadata["when"].items())
        raise UserError(f"{override.input_line}: has no effect with {because}; give {needed}, or leave it out")


def _doubts(config: Config) -> list[str]:
    """Notes about values that are allowed but are probably not what the user wants."""
    transformer = re.search(r"vit|swin|[bd]eit|former|eva0|cait|mixer", config.model.name)
    if transformer and config.optim.name == "sgd":
        return [f"model.name={config.model.name} with optim.name=sgd: transformers train poorly with SGD; "
                "try the optimiser and the schedule of recipe=imagenet_vit_s16"]  # fmt: skip
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
    if {"-h", "--help"} & set(arguments):
        print(help_text(script, purpose))
        sys.exit(0)
    show_only = bool({"-c", "--cfg", "--cfg=job"} & set(arguments))
    words = [a for a in arguments if a not in ("-c", "--cfg", "--cfg=job")]
    if show_only and "job" in words:
        words.remove("job")
    try:
        _check_spelling(words)
        config = load(words, runnable=not show_only)
    except UserError as error:
        fail(str(error), script)
    if show_only:
        print(to_yaml(config), end="")
        sys.exit(0)
    return config


def complain(message: str, script: str = "train.py") -> None:
    """Print one line on stderr, also when a path in it has a line break."""
    print(f"{script}: {' '.join(message.splitlines())}", file=sys.stderr)


def complain_of_mistake(message: str, script: str = "train.py") -> None:
    """Complain once per node: every rank finds the user's mistake, the first rank of a node prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        complain(message, script)


def fail(message: str, script: str = "train.py") -> NoReturn:
    """Complain and exit with status 2, which means the user's mistake."""
    complain_of_mistake(message, script)
    sys.exit(2)


def help_text(script: str, purpose: str) -> str:
    """List every group with its choices, and every key with its default and sentence."""
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
        "keys and their defaults (groups and recipes set others; a run resumes only with the same values of keys marked *):",
    ]
    for name, f, value in walk(Config()):
        default = show(value) if f.default is not MISSING or value else "[]"
        mark = "*" if f.metadata["affects"] & RESULT else " "
        lines.append(f"{mark} {name + '=' + default:<42} {f.metadata['sentence']}")
    lines += ["", "--cfg job prints the composed config and exits; --help prints this text."]
    return "\n".join(lines)


def nearest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str:
    """`; did you mean X?` for the closest known name, or nothing."""
    hint = did_you_mean(word.lower(), known, cutoff=cutoff)
    return f"; {hint}" if hint else ""


def _check_spelling(words: Sequence[str]) -> None:
    """Refuse what is not `key=value` at all, and say how to write it.

    Raises:
        UserError: names every flag, or the first other word.
    """
    _refuse_flags(words)
    for i, word in enumerate(words):
        line = " ".join(words[i:])
        # `optim.lr 0.3`, `optim.lr = 0.3`, `optim.lr= 0.3`, `optim.lr =0.3`, `optim.lr: 0.3` and `optim.lr:0.3`
        apart = re.match(r"([\w./]+)(?:\s*[:=]?\s+=?\s*|:)([^\s=]+)(?=\s|$)", line)
        if apart and apart[1] in NAMES:
            override = shlex.quote(f"{apart[1]}={apart[2]}")
            raise UserError(f"{apart[0]}: a key and its value are one word; write {override}")
        if word.partition("=")[0].lstrip("+") not in WORDS and _open_brackets(word):  # a path may hold any bracket
            whole = next((t for n in range(i + 2, len(words) + 1) if not _open_brackets(t := " ".join(words[i:n]))), None)
            raise UserError(f"{word}: a bracket is not closed" + (f"; write {shlex.quote(whole)}, in quotes" if whole else ""))
        if "=" in word or word.startswith("~"):
            continue
        if word in KEYS:
            raise UserError(f"{word}: has no value; write {word}=VALUE")
        before = words[i - 1] if i else ""
        if group := next((g for g in ("recipe", *GROUPS) if word in choices(g)), None):
            remedy = f"write {group}={word}"
        elif before.partition("=")[0] in WORDS and not word.startswith("/"):
            remedy = f"a value with spaces needs quotes: {shlex.quote(f'{before} {word}')}"
        else:
            remedy = f"write data.root={word}" if _is_path(word) else "--help lists all keys"
        raise UserError(f"{word}: is not key=value; {remedy}")


def _refuse_flags(words: Sequence[str]) -> None:
    flags: list[str] = []
    overrides: list[str] = []
    sentences: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        attached = re.fullmatch(r"(-[A-Za-z])(\d.*)", word)  # -b256
        flag, _, value = word.partition("=") if not attached else (attached[1], "", attached[2])
        remedy = _remedy(flag) if flag.startswith("-") else None
        if not flag.startswith("-"):
            if flags and "=" not in word and "://" not in word and _is_path(word):  # the DIR of pytorch/examples
                overrides.append(f"data.root={word}")
            continue
        flags.append(flag if remedy else word)
        if remedy and "{}" in remedy and not value:
            value = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else "VALUE"
        if remedy is None:
            sentences.append("--help lists all keys")
        elif remedy.partition("=")[0] in NAMES:
            overrides.append(remedy.replace("{}", value))
            sentences += [meaning for key, meaning in hints.MEANINGS.items() if remedy.startswith(f"{key}=")]
        else:
            sentences.append(remedy.replace("{}", value))
    if flags:
        remedies = [f"write {' '.join(map(shlex.quote, overrides))}"] * bool(overrides) + list(dict.fromkeys(sentences))
        raise UserError(f"{', '.join(flags)}: not {'options' if flags[1:] else 'an option'}; {'; '.join(remedies)}")


def _remedy(name: str) -> str | None:
    """What to write for a flag or a key of another program: an override, or a sentence; {} stands for the value."""
    word = name.lstrip("-").replace("_", "-").lower()
    own = [key for key in NAMES if word in (key.replace("_", "-"), key.rpartition(".")[2].replace("_", "-"))]
    if len(own) == 1 and word not in hints.REMEDIES:
        return f"{own[0]}={'true' if own[0] in KEYS and FIELDS[own[0]].type is bool else '{}'}"
    return hints.REMEDIES.get(word) or hints.REMEDIES.get(word.rpartition(".")[2])


def _is_path(word: str) -> bool:
    return "/" in word or os.path.isdir(word)


def _open_brackets(text: str) -> bool:
    return sum(text.count(c) for c in "[{(") > sum(text.count(c) for c in "]})")


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
    except HydraException:
        # JSON's {"alpha": 0.2} is {alpha: 0.2} here.
        plain = re.sub(r"""(["'])(\w+)\1\s*:""", r"\2:", text)
        name = text.partition("=")[0].lstrip("+")
        if plain != text:
            remedy = f"write {shlex.quote(plain)}"
        elif name in KEYS and name not in WORDS:
            remedy = f"give {_allowed(name)}"
        else:
            remedy = "put special characters in quotes: 'run.name=\"a, b\"'"
        raise UserError(f"{text}: cannot be read as key=value; {remedy}") from None


def _check_override(override: Override) -> None:
    name = override.key_or_group
    text = override.input_line or name
    if override.is_sweep_override() and name in KEYS and get_origin(FIELDS[name].type) is list:
        raise UserError(f"{text}: not allowed; give {_allowed(name)}")
    if override.is_sweep_override():
        raise UserError(f"{text}: sweeps are not supported; start one run per value")
    if name in GROUPS and "@" not in text.split("=")[0]:
        choice = override.value()
        if not isinstance(choice, str) or choice not in choices(name):
            more = {"model": f"; for any other model write model.name={choice}",
                    "data": f"; for a folder of images write data.root={choice}"}.get(name, "")  # fmt: skip
            hint = nearest(Path(str(choice)).stem, choices(name), cutoff=0.85 if name == "model" else 0.6)
            raise UserError(f"{text}: no such {name}; choose one of {', '.join(choices(name))}{hint}{more}")
        if override.is_add() or override.is_delete():
            raise UserError(f"{text}: write {name}={choice}")
        return
    if name.split(".")[0] == "hydra":
        raise UserError(f"{text}: Hydra's own settings are not used here; run.dir= sets the run's folder")
    if name not in KEYS:
        section = [k for k in KEYS if k.startswith(f"{name}.")]
        if section:
            raise UserError(f"{text}: {name} is a group of keys: {', '.join(section)}")
        raise UserError(f"{text}: there is no key {name or text}; {_another_key(override)}")
    if override.is_delete():
        raise UserError(f"{text}: a key cannot be removed; give it a value")
    if override.is_add():
        raise UserError(f"{text}: write {name}={show(override.value())}")
    typed = f"{name}={show(override.value())}".lower()
    if remedy := next((r for start, r in hints.VALUES.items() if typed.startswith(start)), None):
        raise UserError(f"{text}: not allowed; {remedy}")
    _check_type(name, override.value(), text)


def _another_key(override: Override) -> str:
    """What to do about a key that does not exist: the right key, or a sentence."""
    name = override.key_or_group
    last = name.rpartition(".")[2].lower()
    # A right last part in a wrong section (`train.lr`) says more than a similar spelling.
    moved = [k for k in KEYS if k.rpartition(".")[2] == last]
    if moved and last not in hints.REMEDIES:
        return f"did you mean {' or '.join(moved)}?"
    if remedy := _remedy(name):
        remedy = remedy.replace("{}", show(override.value()) if not override.is_delete() else "")
        return f"write {shlex.quote(remedy)}" if remedy.partition("=")[0] in NAMES else remedy
    last_parts = {k.rpartition(".")[2]: k for k in KEYS}
    if "." not in name and (close := difflib.get_close_matches(name.lower(), last_parts, n=1, cutoff=0.75)):
        return f"did you mean {last_parts[close[0]]}?"
    return did_you_mean(name.lower(), NAMES) or "--help lists all keys"


def _check_type(name: str, value: Any, text: str) -> None:
    """Refuse a value of the wrong type here, where the override is known: of two for one key, either may be at fault.

    Raises:
        UserError: names the override as typed.
    """
    # OmegaConf would take 2 and yes for true.
    boolean = FIELDS[name].type is bool and not isinstance(value, bool)
    try:
        section, _, last = name.partition(".")
        OmegaConf.update(OmegaConf.structured(getattr(Config(), section)), last, value)
        wrong = boolean or OmegaConf.missing_keys(OmegaConf.create([value]))
    except InterpolationResolutionError:  # composing finds it, where the other keys have their values
        return
    except OmegaConfBaseException:
        wrong = True
    if wrong:
        raise UserError(f"{text}: not allowed; give {_allowed(name)}")


def _refuse_missing(recipe: str, folder: Path) -> None:
    """Refuse `???` in the recipe or in a group: composing would ignore it.

    Raises:
        UserError: names the file and the key.
    """
    for path in sorted(folder.rglob("*.yaml")):
        other_recipe = path.parent.name == "recipe" and path.stem != recipe
        if not other_recipe and "???" in path.read_text(encoding="utf-8"):
            for name in sorted(OmegaConf.missing_keys(OmegaConf.load(path))):
                raise UserError(f"{path}: {name}=??? is not allowed; give it a value")


def _explain(error: Exception, overrides: Sequence[Override]) -> str:
    """Turn an error of Hydra, OmegaConf or the YAML parser into `key=value: what is wrong; what to do`."""
    if isinstance(error, MarkedYAMLError):
        place = f"{error.problem_mark.name}: line {error.problem_mark.line + 1}" if error.problem_mark else "config"
        return f"{place}: is not YAML ({error.problem}); correct it"
    cause: BaseException = error
    while cause.__cause__ is not None and isinstance(cause.__cause__, (HydraException, OmegaConfBaseException)):
        cause = cause.__cause__
    name = getattr(cause, "full_key", None) or ""
    base = name.split("[")[0]
    # Types are checked one by one; what is found only now is found in the last override of a key, which wins.
    typed = next((o.input_line for o in reversed(overrides) if o.key_or_group == base and o.input_line), None)
    if base in FIELDS:
        return f"{typed or name}: {_first_line(cause)}; give {_allowed(base)}"
    return f"{typed or name or 'config'}: {_first_line(cause)}"


def _allowed(name: str) -> str:
    """What a key takes, as its check says it, else by its type."""
    kind: Any = FIELDS[name].type
    test = FIELDS[name].metadata["check"]
    # A check says what it allows when it refuses a value.
    wrong: Any = "" if name in WORDS else [math.nan] if get_origin(kind) is list else math.nan
    says: str | None = test(wrong) if test else None
    if get_origin(kind) is list:
        return f"{says or 'a list'}, in brackets"
    if says is None:
        return "true or false" if kind is bool else "a name or a path"
    return says.replace("a number", "a whole number", 1) if kind in (int, int | None) else says


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) > 1 and lines[0].endswith("raised while composing config:"):  # of a YAML: the cause stands below
        key = next((line.split(": ", 1)[1] for line in lines if line.strip().startswith("full_key: ")), "")
        return f"{lines[0].split(':')[0]}: {key}{': ' if key else ''}{lines[1]}"
    return lines[0]
