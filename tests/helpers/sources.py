"""The modules of the project and their syntax trees, for tests of the structure."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("conf", "pipeline", "models", "engine", "extras", "train", "scripts", "tests")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


FILES = [ROOT / "train.py", *(p for part in PARTS for p in sorted((ROOT / part).rglob("*.py")))]
# Dotted name -> file, for every module of the project.
SOURCES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES
}
PROGRAM = {name: path for name, path in SOURCES.items() if not name.startswith("tests.")}


@cache
def imports(path: Path) -> list[str]:
    """Dotted names that a file imports; `from a import b` gives a.b, because b may be a module."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def within(name: str, parts: tuple[str, ...] | list[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)
