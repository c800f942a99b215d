"""Import the code that a config names as module:name. No other module does this.

    python train.py model.name=experiments.networks:tiny

A value `module:name` stands for an object in a Python file of this checkout; nothing else can be
named. After `rm` of the file, a YAML file that names it is refused until the name is taken out.
"""

import importlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

from conf.errors import UserError, did_you_mean

ROOT = Path(__file__).resolve().parents[1]


def is_object_name(value: Any) -> bool:
    """Whether a value has the form `module:name`, where the module may have dots."""
    module, _, name = str(value).partition(":")
    return all(map(str.isidentifier, [*module.split("."), name]))


def module_files(value: str) -> list[Path]:
    """Return the file of this checkout that is the module of `module:name`, or no file."""
    path = ROOT.joinpath(*value.partition(":")[0].split("."))
    files = filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return [*filter(lambda file: file.resolve().is_relative_to(ROOT), files)]


def object_names_in(value: Any) -> set[str]:
    """Return the names `module:name` in a value, and in the lists and dicts that it holds."""
    if isinstance(value, dict):
        return object_names_in([*value, *value.values()])
    if isinstance(value, list):
        return set().union(*map(object_names_in, value))
    return {value} if is_object_name(value) else set()


def check_module(value: str, key: str) -> None:
    """Refuse a name whose module is not inside this checkout."""
    if not is_object_name(value) or not module_files(value):
        module = value.partition(":")[0]
        wrong = f"there is no {module.replace('.', '/')}.py in {ROOT}"
        cure = f"correct the name or leave it out; `grep -r {module} conf` finds it in YAML files"
        raise UserError(f"{key}={value}", wrong, cure)


def import_object(value: str, key: str) -> Any:
    """Import the module of `module:name`, and return the object.

    Raises UserError, which names the config key, if this checkout has no such module or object.
    """
    check_module(value, key)
    module, _, name = value.partition(":")
    imported = importlib.import_module(module)
    attribute = getattr(imported, name, None)
    if attribute is None:
        wrong = f"{module} has no {name}{did_you_mean(name, vars(imported))}"
        raise UserError(f"{key}={value}", wrong)
    return attribute


def create_object(value: str, key: str, kind: Any, /, *arguments: Any, **parameters: Any) -> Any:
    """Call an object `module:name`; UserError if it does not take this or returns no `kind`."""
    create = import_object(value, key)
    check_signature(create, f"{key}={value}", *arguments, **parameters)
    created = create(*arguments, **parameters)
    if not isinstance(created, kind):
        name = getattr(kind, "__name__", kind)
        wrong = f"gives an object of type {type(created).__name__}, not {name}"
        raise UserError(f"{key}={value}", wrong, "see docs/fork.md")
    return created


def check_signature(called: Any, origin: str, /, *arguments: Any, **parameters: Any) -> None:
    """Refuse an object that cannot be called, or not with these arguments, with a UserError."""
    try:
        with suppress(ValueError):  # code in C has no signature
            inspect.signature(called).bind(*arguments, **parameters)
    except TypeError as error:
        raise UserError(origin, f"cannot be called: {error}", "see docs/fork.md") from None


def split_entry(entry: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a list's entry: `name` or `name: {parameter: value}`.

    Raises UserError if it has another form. `key`: the config key, for messages.
    """
    if isinstance(entry, str):
        return entry, {}
    try:
        ((name, parameters),) = entry.items()
        return str(name), {**(parameters or {})}
    except (AttributeError, TypeError, ValueError):  # not {name: dict} or {name: null}
        cure = "write `name` or `name: {parameter: value}`"
        raise UserError(key, f"{entry!r} is not an entry", cure) from None
