"""Results of loader.workers=auto are stored by question; a bad file is no error."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from conf.files import default_cache_dir
from engine.tune.autotune import load_result, save_result
from tests.engine.tune.answers import TUNED

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


def test_the_newest_result_of_the_same_question_is_used() -> None:
    assert load_result(QUESTION) is None
    save_result(QUESTION, replace(TUNED, workers=3))
    save_result(QUESTION, TUNED)
    assert load_result(dict(reversed(QUESTION.items()))) == TUNED  # the order does not matter
    other = {**QUESTION, "machine": ["H200", 15, 1.5, None, True]}
    assert load_result(other) is None and load_result({**QUESTION, "more": 1}) is None
    save_result(other, replace(TUNED, workers=3))
    assert (load_result(QUESTION), load_result(other)) == (TUNED, replace(TUNED, workers=3))


def test_a_resumed_run_keeps_the_decoder() -> None:
    """Its question is answered by that of the first start."""
    result, several = replace(TUNED, decoder="hybrid"), ["region", "gpu", "hybrid"]
    save_result({**QUESTION, "decoders": several}, result)
    assert load_result({**QUESTION, "decoders": several}) == result
    assert load_result({**QUESTION, "decoders": ["hybrid"]}) == result
    assert load_result(QUESTION) is None
    assert load_result({**QUESTION, "decoders": ["gpu"]}) is None


def stored(**changes: Any) -> bytes:
    return json.dumps({"question": QUESTION, "result": {**asdict(TUNED), **changes}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x81\x82",
        b"null",
        stored()[:-9],  # truncated
        json.dumps({"question": {**QUESTION, "data": []}, "result": asdict(TUNED)}).encode(),
        stored(another="field"),
        stored(workers="many"),
        stored(workers=0),
        stored(prefetch_factor=0),
        stored(demand=0),
        stored(decoder="pillow"),  # not one to choose from
    ],
)
def test_foreign_file(cache: Path, content: bytes) -> None:
    """The next measurement replaces it."""
    save_result(QUESTION, TUNED)
    memory(cache).write_bytes(content)
    assert load_result(QUESTION) is None
    save_result(QUESTION, TUNED)
    assert load_result(QUESTION) == TUNED


def test_cache_that_cannot_be_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in place of a folder, which root cannot write to either."""
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    save_result(QUESTION, TUNED)
    assert load_result(QUESTION) is None and cache.read_text() == "in the way"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"cannot store the result of loader.workers=auto in {cache / 'autotune'} ("
    )
