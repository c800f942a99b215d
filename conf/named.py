"""Import the code that a config names as module:name. No other module does this.

    python train.py model.name=experiments.networks:tiny

A value `module:name` names an object in a Python file of this checkout. No other objects can be
named. After `rm` of the file, YAML files that name it raise an error until the name is removed.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf.errors import UserError, did_you_mean
from conf.start import PACKAGES

ROOT = Path(__file__).resolve().parents[1]


def is_object_name(value: Any) -> bool:
    """Return whether a value has the form `module:name`, where the module may have dots."""
    module, _, name = str(value).partition(":")
    return all(map(str.isidentifier, [*module.split("."), name]))


def module_files(value: str) -> list[Path]:
    """Return the file of the module in `module:name`, or [] if it is not in this checkout."""
    path = ROOT.joinpath(*value.partition(":")[0].split("."))
    files = filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return [*filter(lambda file: file.resolve().is_relative_to(ROOT), files)]


def object_names_in(value: Any) -> set[str]:
    """Return all `module:name` strings in a value, including nested lists and dicts."""
    if isinstance(value, dict):
        return object_names_in([*value, *value.values()])
    if isinstance(value, list):
        return set().union(*map(object_names_in, value))
    return {value} if is_object_name(value) else set()


def check_module(value: str, key: str) -> None:
    """Raise UserError unless the module of `module:name` is inside this checkout."""
    if not is_object_name(value) or not module_files(value):
        module = value.partition(":")[0]
        problem = f"{module.replace('.', '/')}.py not found in {ROOT}"
        fix = f"correct the name or remove it; `grep -r {module} conf` finds it in YAML files"
        raise UserError(f"{key}={value}", problem, fix)


def import_object(value: str, key: str) -> Any:
    """Import the module of `module:name`, and return the object.

    Raises UserError with the config key if this checkout has no such module or object, or if the
    module imports a package that is not installed.
    """
    check_module(value, key)
    module, _, name = value.partition(":")
    with installed(f"{key}={value}"):
        imported = importlib.import_module(module)
    attribute = getattr(imported, name, None)
    if attribute is None:
        problem = f"{module} has no {name}{did_you_mean(name, vars(imported))}"
        raise UserError(f"{key}={value}", problem)
    return attribute


@contextmanager
def installed(origin: str) -> Iterator[None]:
    """Raise UserError if the `with` block imports a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if error.name is None or find_spec(package) is not None:
            raise  # not an import, or the package lacks a module
        fix = f"run `pip install {PACKAGES.get(package, package)}`"
        raise UserError(origin, f"{package} not installed", fix) from None


def create_object(value: str, key: str, kind: Any, /, *arguments: Any, **parameters: Any) -> Any:
    """Call `module:name`. Raises UserError for invalid arguments or a result not of type `kind`."""
    create = import_object(value, key)
    check_signature(create, f"{key}={value}", *arguments, **parameters)
    with installed(f"{key}={value}"):
        created = create(*arguments, **parameters)
    if not isinstance(created, kind):
        name = getattr(kind, "__name__", kind)
        problem = f"returned an object of type {type(created).__name__}, not {name}"
        raise UserError(f"{key}={value}", problem, "see docs/fork.md")
    return created


def check_signature(called: Any, origin: str, /, *arguments: Any, **parameters: Any) -> None:
    """Raise UserError unless an object can be called with these arguments."""
    try:
        with suppress(ValueError):  # C functions may have no signature
            inspect.signature(called).bind(*arguments, **parameters)
    except TypeError as error:
        raise UserError(origin, f"cannot be called: {error}", "see docs/fork.md") from None


def split_entry(entry: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Return the name and parameters of a list entry, `name` or `name: {parameter: value}`.

    Raises UserError for any other form. `key`: the config key, for messages.
    """
    if isinstance(entry, str):
        return entry, {}
    try:
        ((name, parameters),) = entry.items()
        return str(name), {**(parameters or {})}
    except (AttributeError, TypeError, ValueError):  # not {name: dict} or {name: null}
        fix = "expected `name` or `name: {parameter: value}`"
        raise UserError(key, f"invalid entry {entry!r}", fix) from None


def with_parameter(entry: Any, key: str, parameter: str, value: Any) -> Any:
    """Return an entry of `split_entry` with a parameter, if its function has it and it is unset."""
    with suppress(TypeError, ValueError):  # null, or an error that is raised on use
        name, parameters = split_entry(entry, key)
        if parameter in inspect.signature(import_object(name, key)).parameters:
            return {name: {parameter: value} | parameters}
    return entry
