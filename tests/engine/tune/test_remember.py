"""Answers of loader.workers=auto are stored by question; a bad file is no error."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from conf.files import default_cache_dir
from engine.tune.autotune import Answer, recall, remember
from tests.answers import ANSWER

QUESTION: dict[str, Any] = {
    "data": ["abc", 224, [{"resize": {"size": 9}}, "flip"]],
    "machine": ["H200", 16, 1.5, None, True],
    "decoders": ["region"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return default_cache_dir()


def memory(cache: Path) -> Path:
    """The only file in the cache."""
    (path,) = (p for p in cache.rglob("*") if p.is_file())
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "answer", [ANSWER, replace(ANSWER, copy_ms=None, pin_memory=False)], ids=["a GPU", "a CPU"]
)
def test_round_trip(answer: Answer) -> None:
    assert recall(QUESTION) is None
    remember(QUESTION, answer)
    assert recall(QUESTION) == answer
    assert (
        recall(dict(reversed(QUESTION.items()))) == answer
    )  # the order of its keys does not matter


def test_another_question() -> None:
    remember(QUESTION, ANSWER)
    other = {**QUESTION, "machine": ["H200", 15, 1.5, None, True]}
    assert recall(other) is None
    remember(other, replace(ANSWER, workers=3))
    assert (recall(QUESTION), recall(other)) == (ANSWER, replace(ANSWER, workers=3))
    assert recall({**QUESTION, "more": 1}) is None


def test_a_resumed_run_keeps_the_decoder() -> None:
    """Its question is answered by that of the first start."""
    answer = replace(ANSWER, decoder="hybrid")
    remember({**QUESTION, "decoders": ["region", "gpu", "hybrid"]}, answer)
    assert recall({**QUESTION, "decoders": ["region", "gpu", "hybrid"]}) == answer
    assert recall({**QUESTION, "decoders": ["hybrid"]}) == answer
    assert recall(QUESTION) is None
    assert recall({**QUESTION, "decoders": ["gpu"]}) is None


def test_the_newest_answer_is_used(cache: Path) -> None:
    remember(QUESTION, ANSWER)
    remember(QUESTION, replace(ANSWER, workers=3))
    assert recall(QUESTION) == replace(ANSWER, workers=3)
    assert memory(cache).suffix == ".json"


def test_the_file_holds_its_question(cache: Path) -> None:
    remember(QUESTION, ANSWER)
    assert json.loads(memory(cache).read_text())["question"] == QUESTION


def test_file_of_another_question(cache: Path) -> None:
    """As if two questions had the same file name."""
    remember(QUESTION, ANSWER)
    memory(cache).write_text(
        json.dumps({"question": {**QUESTION, "data": []}, "answer": asdict(ANSWER)})
    )
    assert recall(QUESTION) is None


def test_truncated_at_any_place(cache: Path) -> None:
    remember(QUESTION, ANSWER)
    whole = memory(cache).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        memory(cache).write_bytes(whole[:length])
        assert recall(QUESTION) is None, length
    memory(cache).write_bytes(whole)
    assert recall(QUESTION) == ANSWER


def answered(**changes: Any) -> str:
    return json.dumps({"question": QUESTION, "answer": {**asdict(ANSWER), **changes}})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x81\x82",
        b"\0" * 4096,
        b"<html>404</html>",
        b"null",
        b"7",
        b'"question"',
        b"[1, 2]",
        b"{}",
        json.dumps({"question": QUESTION}).encode(),
        json.dumps({"question": QUESTION, "answer": None}).encode(),
        json.dumps({"question": QUESTION, "answer": [1, 2]}).encode(),
        json.dumps({"question": QUESTION, "answer": {"workers": 3}}).encode(),
        answered(supply=None).encode(),
        answered(supply={"cpu_ms": 1}).encode(),
        answered(copy_ms=3).encode(),
        answered(another="field").encode(),
    ],
    ids=lambda content: content[:12] if len(content) < 100 else str(len(content)),
)
def test_foreign_file(cache: Path, content: bytes) -> None:
    remember(QUESTION, ANSWER)
    memory(cache).write_bytes(content)
    assert recall(QUESTION) is None
    remember(QUESTION, ANSWER)  # the next measurement replaces it
    assert recall(QUESTION) == ANSWER


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": "many"},
        {"workers": 3.5},
        {"prefetch_factor": 0},
        {"demand": 0},
        {"decoder": "pillow"},  # not one to choose from
    ],
    ids=str,
)
def test_invalid_values(cache: Path, changes: dict[str, Any]) -> None:
    """They would stop the run, or let it hang, much later."""
    remember(QUESTION, ANSWER)
    memory(cache).write_text(answered(**changes))
    assert recall(QUESTION) is None


def test_folder_in_place_of_the_file(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    remember(QUESTION, ANSWER)
    path = memory(cache)
    path.unlink()
    path.mkdir()
    assert recall(QUESTION) is None
    remember(QUESTION, ANSWER)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("part", ["..", ".", "autotune"])
def test_cache_that_cannot_be_written(
    part: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in place of a folder, which root cannot write to either."""
    blocked = Path(os.path.normpath(cache / part))
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("in the way")
    remember(QUESTION, ANSWER)
    (warning,) = warnings(caplog)
    assert warning.startswith(
        f"cannot store the answer of loader.workers=auto in {cache / 'autotune'} ("
    )
    assert recall(QUESTION) is None
    assert blocked.read_text() == "in the way"


def test_full_disk(
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    file_size_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    """The earlier answer is kept."""
    remember(QUESTION, ANSWER)
    with file_size_limit(100):
        remember(QUESTION, replace(ANSWER, workers=3))
    assert len(warnings(caplog)) == 1
    assert recall(QUESTION) == ANSWER


def test_full_disk_leaves_no_files(
    cache: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with file_size_limit(100):
        remember(QUESTION, ANSWER)
    assert [p for p in cache.rglob("*") if p.is_file()] == []
