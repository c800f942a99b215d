"""Optional parts: folders and files of the program that a fork may delete (docs/fork.md).

Each part is imported in one place, inside a function and after a call of one of these. What is left
works as if the option were not offered, and says so if it is asked for.
"""

from importlib.util import find_spec

from conf.schema import UserError


def has_part(name: str) -> bool:
    """Whether this copy of the program has an optional part, such as `engine.tune`."""
    return find_spec(name) is not None


def require_part(name: str, asked_for: str) -> None:
    """Refuse a value such as `loader.decoder=gpu` with a UserError if its part is missing here."""
    if not has_part(name):
        path = name.replace(".", "/")
        raise UserError(f"{asked_for}: not offered, because this copy has no {path}; leave it out")
