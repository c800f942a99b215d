"""Sentences for figures of a run, and remedies; tests/repository/equal has the causes of more."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from conf.compose import from_overrides
from conf.schema import NAMES
from engine.distributed import World
from engine.log.verdict import REMEDIES, Verdict, judge, remedy_for, verdict
from pipeline.feed.feed import Feed
from pipeline.feed.step_times import StepTimes
from tests.engine.plans import ALONE, WAITED
from tests.pipeline.loaders import opened

STEP: dict[str, Any] = {"rate": 6600, "step_rate": 6700, "steps": 1, "seconds": 256 / 6600}
STEP |= {"data_wait": 0.004, "late": 0.001, "copy": 0.03, "copy_ms": 1.2, "cpu_ms": 1.8}
STEP |= {"core_ms": 0.1, "decoder": "region", "workers": 15}
RUNS_WELL = StepTimes(**STEP, on_gpu=True)
WAITS = {"data_wait": 0.38, "rate": 4150, "cpu_ms": 3.6}
NOT_ALONE = {"step_rate": 0}
CPU = {"on_gpu": False, **NOT_ALONE}
HOT = {"slowed": 0.125}
SENTENCES = ("a sentence.", "Remedy: use more PCIe lanes.")  # of the fixture `judged`

# What differs from RUNS_WELL, and what the verdict says, in parts.
ONE_RANK: list[tuple[dict[str, Any], str]] = [
    (HOT, "compute-bound: ... waited 0.4% ... process 6,627 img/s and got 6,600 ... clock 12% of"),
    (
        WAITS,
        "input-bound by decode and augmentation: ... waited 38.0% ... img/s and got 4,150 ... with "
        "15 workers, an image takes 3.6 ms to compute, 0.0 ms of waiting for storage and 0.1 ms",
    ),
    (
        {"drained": 0.9, "graph_refused": "two shapes"},
        "launch-bound: ... before 90% of the steps ... the step is not one CUDA graph: two shapes.",
    ),
    ({**CPU, "core_wait": 0.4}, "core-bound: ... rank 0 waited 40% of the time for a core"),
]


def ranks_of(*changes: dict[str, Any], **both: Any) -> list[StepTimes]:
    """Ranks on a GPU with steps of 100 ms, and 1,000 images/s of all of them."""
    steps = {"rate": 1000 / len(changes), "seconds": 0.1, **NOT_ALONE, **both}
    return [RUNS_WELL._replace(**{**steps, **change}) for change in changes]


SEVERAL: list[tuple[list[StepTimes], str]] = [
    (ranks_of({}, HOT), "compute-bound: ... a GPU has lowered its clock 12% of the time"),
    # The rank that the others wait for is judged.
    (
        ranks_of({"cpu_ms": 9.0}, {"data_wait": 0.4, "cpu_ms": 29.0}),
        "by decode and augmentation: training waited 40.0% ... with 30 workers, an image takes 29",
    ),
    (ranks_of(*[{}] * 4, step_rate=300.0), "process 1,004 img/s ... it processed 1,200 alone"),
]


@pytest.mark.parametrize(
    ("ranks", "says"), [([RUNS_WELL._replace(**one)], says) for one, says in ONE_RANK] + SEVERAL
)
def test_sentences(ranks, says):
    for order in (ranks, ranks[::-1]):
        cause, text = verdict(order)
        assert text.startswith(f"{cause}: ")
        assert all(part in text for part in says.split(" ... ")), text


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called with the times that are judged."""
    judged = Mock(return_value=("copy-bound", "a sentence."))
    monkeypatch.setattr("engine.log.verdict.verdict", judged)
    return judged


def lasting(seconds: float, **values: Any) -> StepTimes:
    return WAITED._replace(seconds=seconds, rate=4 * 16 / seconds, **values)


@pytest.fixture
def feed(image_root: Path) -> Iterator[Feed]:
    with opened(image_root, "loader.batch_size=16", "data.image_size=32", workers=0) as feed:
        yield feed


def test_a_short_time_has_no_verdict(feed, judged):
    rows, says = [], []
    for seconds in (1.0, 18.0, 1.0):
        says.append(judge(rows, 20.0, ALONE, feed))
        rows.append(lasting(seconds))
    assert says == [Verdict()] * 3
    judged.assert_not_called()
    assert judge(rows, 20.0, ALONE, feed).sentences == SENTENCES
    (times,) = judged.call_args.args[0]
    assert times.rate == pytest.approx(9.6)


DECODE = "input-bound by decode and augmentation"
AUTO = "set loader.workers=auto"
RE_ENCODE = "re-encode the images: python scripts/prepare.py SOURCE --to DIR --side 50"


@pytest.mark.parametrize(
    ("overrides", "kilobytes", "cause", "expected"),
    [
        ([], 100, DECODE, RE_ENCODE),
        (["loader.workers=4"], 10, DECODE, "use a machine with more CPU cores"),  # as auto
        (["loader.workers=3"], 100, DECODE, AUTO),
        ([], 100, "compute-bound", None),
    ],
)
def test_the_remedy_for_this_run(overrides, kilobytes, cause, expected):
    config = from_overrides(["data=fake", "data.image_size=32", *overrides])
    train = SimpleNamespace(mean_bytes=lambda: 1e3 * kilobytes)
    feed = SimpleNamespace(config=config, datasets=SimpleNamespace(train=train), num_cores=4)
    assert remedy_for(cause, feed) == expected


def test_what_remedies_say_to_give_can_be_given():
    texts = " ".join([*REMEDIES.values(), AUTO, RE_ENCODE])
    assert {*re.findall(r"[a-z]+\.[a-z_]+", texts)} - {"prepare.py"} <= {*NAMES}
    from_overrides(["data=fake", *re.findall(r"[a-z]+\.[a-z]+=[a-z]+", texts)])


def test_all_ranks_have_the_same_verdict(feed, judged, monkeypatch):
    """The other rank waits longer, and has rows of 20 s."""

    def gathered(_, value):
        if isinstance(value, StepTimes):
            return [value, value._replace(data_wait=0.4)]
        return [value, 20.0]

    monkeypatch.setattr(World, "all_gather", gathered)
    row = lasting(22.0, data_wait=0.1)
    assert judge([row], 20.0, ALONE, feed).sentences == SENTENCES
    (ranks,) = judged.call_args.args
    assert [rank.data_wait for rank in ranks] == pytest.approx([0.1, 0.4])
    assert judge([row], 21.0, ALONE, feed) == Verdict()
