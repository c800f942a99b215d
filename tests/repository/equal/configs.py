"""Config values, including the run's name, for each recipe and list of overrides."""

import json
from typing import Any

from conf.compose import DEFAULT_RECIPE, from_overrides
from conf.errors import UserError
from conf.schema import config_values, group_names

Values = dict[str, str]  # dotted key -> repr() of its value


def values_of(overrides: list[str]) -> dict[str, Any] | None:
    """Adapter: dotted key -> value of the composed config; None if invalid."""
    try:
        return config_values(from_overrides(overrides))
    except UserError:
        return None


def compose(recipe: str, typed: list[str]) -> Values | None:
    """Return the values; the run's name and directory are templates that all recipes share."""
    values = values_of([f"recipe={recipe}", *typed])
    if values is None:
        return None
    name, folder = values["run.name"], values["run.dir"].replace(values["run.name"], "{run.name}")
    values |= {"run.name": name.replace(recipe, "{recipe}", 1), "run.dir": folder}
    return {key: repr(value) for key, value in values.items()}


def expanded(lines: list[dict[str, Any]], recipe: str) -> dict[str, Values | None]:
    """Return overrides, in JSON -> stored values, for one recipe.

    The first line has all values of the default recipe. Later lines have the values that differ
    (`differs`) in a different recipe, or in some recipes with overrides; null if invalid.
    """
    usual, *lines = lines
    (own,) = (line["differs"] for line in lines if line.get("recipe") == recipe)
    base = usual | own
    found = {"[]": base}
    for line in lines:
        if recipe in line.get("recipes", []):
            differs = line["differs"]
            found[json.dumps(line["typed"])] = None if differs is None else base | differs
    return found


def current_answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stored lines with this code's answers."""
    recipes = sorted(group_names("recipe"), key=lambda name: name != DEFAULT_RECIPE)
    bare = {recipe: compose(recipe, []) or {} for recipe in recipes}
    usual = bare[recipes[0]]
    found = [usual]
    found += [{"recipe": r, "differs": difference(usual, bare[r])} for r in recipes]
    for typed in dict.fromkeys(json.dumps(line["typed"]) for line in lines if "typed" in line):
        groups = {}
        for recipe in recipes:
            values = compose(recipe, json.loads(typed))
            differs = values and difference(bare[recipe], values)
            groups.setdefault(json.dumps(differs), []).append(recipe)
        found += [
            {"typed": json.loads(typed), "recipes": names, "differs": json.loads(differs)}
            for differs, names in groups.items()
        ]
    return found


def difference(before: Values, after: Values) -> Values:
    return {key: value for key, value in after.items() if value != before.get(key)}
