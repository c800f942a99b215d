"""Odd and hostile image files are trained or named, in bounded memory and time."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

import pytest

from pipeline import decode
from tests.processes import run_python
from tests.reliability.odd_images import KINDS, load_mutated

MUTATED = 100_000  # JPEGs for each decoder in the long form


def child(*arguments: object, seconds: float) -> CompletedProcess[str]:
    return run_python("-m", "tests.reliability.odd_images", *arguments, seconds=seconds)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each decoder makes of each kind of file, all of them named .jpg: decoder -> kind."""
    split = tmp_path_factory.mktemp("odd") / "train"
    (split / "a").mkdir(parents=True)
    for number, (make, _) in enumerate(KINDS.values()):
        (split / "a" / f"{number:03d}.jpg").write_bytes(make())
    result = child(",".join(decode.installed()), "kinds", split, seconds=120)
    assert result.returncode == 0, f"{result.stderr[-2000:]} after {result.stdout[-300:]}"
    made: dict[str, dict[str, Any]] = {name: {} for name in decode.installed()}
    for line in map(json.loads, result.stdout.splitlines()):
        made[line["decoder"]][line["kind"]] = line
    return made


def wrong(kind: str, answer: dict[str, Any], pillows: dict[str, Any]) -> bool:
    """Whether a decoder neither trains a file as it should nor names it in one line."""
    verdict = KINDS[kind][1]
    if isinstance(verdict, str):
        error = answer.get("error", "")
        named = f"{list(KINDS).index(kind):03d}.jpg: " in error and verdict in error
        return not named or "\n" in error or "MemoryError" in error
    as_pillow = answer.get("hash") == pillows.get("hash")
    return answer.get("size") != list(verdict) or not as_pillow


def test_each_kind_is_trained_or_named(
    found: dict[str, dict[str, Any]], figure: Callable[[str, int, int], None]
) -> None:
    """A kind counts if it is right with every CPU decoder."""
    assert len(KINDS) >= 60
    bad = {}
    for decoder, answers in found.items():
        assert answers.keys() == KINDS.keys()
        for kind, answer in answers.items():
            if wrong(kind, answer, found["pillow"][kind]):
                bad[kind] = f"{decoder}: {answer}"
    figure("kinds of odd image files named or trained on", len(KINDS) - len(bad), len(KINDS))
    assert not bad


def test_mutated_jpegs() -> None:
    """The long form has other files."""
    for counts in load_mutated(decode.installed(), range(MUTATED, MUTATED + 500)).values():
        assert counts["trained"] > 100 and counts["named"] > 100


@pytest.mark.slow
@pytest.mark.timeout(7500)
def test_many_mutated_jpegs(tmp_path: Path, figure: Callable[[str, int, int], None]) -> None:
    """In a process of its own, whose memory is limited: a crash or a hang names the file."""
    progress, decoders = tmp_path / "progress", decode.installed()
    try:
        result = child(",".join(decoders), "mutated", 0, MUTATED, progress, seconds=7200)
        ended, message = result.returncode == 0, result.stderr[-2000:]
    except TimeoutExpired:
        ended, message = False, "no end within two hours"
    reached = MUTATED if ended else int(progress.read_text())
    figure(
        "mutated JPEGs, each through every CPU decoder: memory bounded, no crash, no hang",
        reached,
        MUTATED,
    )
    assert ended, f"random.Random({reached}): {message}"
