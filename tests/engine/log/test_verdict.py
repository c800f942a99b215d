"""Sentences for the times of a run, and remedies. tests/repository/equal has more causes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from conf.compose import from_overrides
from conf.schema import NAMES
from engine.log.verdict import REMEDIES, remedy_for, verdict_of
from pipeline.feed.step_times import StepTimes
from tests.pipeline.loaders import opened

STEP: dict[str, Any] = {"steps": 1, "seconds": 256 / 6600, "images_per_second": 6600}
STEP |= {"data_wait_fraction": 0.004, "late_fraction": 0.001, "compute_fraction": 0.995}
STEP |= {"copy_fraction": 0.03, "copy_ms": 1.2, "image_cpu_ms": 1.8, "image_cpu_wait_ms": 0.1}
RUNS_WELL = StepTimes(**STEP)
WAITS = {"data_wait_fraction": 0.38, "compute_fraction": 0.619, "images_per_second": 4150}
WAITS |= {"image_cpu_ms": 3.6}
WAITING = {"data_wait_fraction": 0.4, "compute_fraction": 0.599, "image_cpu_ms": 29.0}
HOT = {"throttled_fraction": 0.125}


def feed_of(*typed: str, cuda: bool = True, kilobytes: int = 10, **changes: Any) -> Any:
    """Return the attributes of a feed that the verdict reads. Its CPU decodes with 15 workers."""
    stage = SimpleNamespace(device_decodes=False)
    images = SimpleNamespace(mean_bytes=lambda: 1e3 * kilobytes, stage=stage)
    attributes = {
        "config": from_overrides(["data=fake", "data.image_size=32", *typed]),
        "datasets": SimpleNamespace(train=images),
        "train": SimpleNamespace(cuda=cuda),
        "pool": SimpleNamespace(active=15),
    }
    usual = {"num_cores": 4, "decode_mode": "cpu", "step_rate": 0.0, "no_graph": ""}
    return SimpleNamespace(**attributes, **{**usual, **changes})


GPU = feed_of(step_rate=6700)
NOT_ALONE = feed_of()


def ranks_of(*changes: dict[str, Any]) -> list[StepTimes]:
    """Return ranks with steps of 100 ms and 1,000 images/s in total."""
    steps = {"images_per_second": 1000 / len(changes), "seconds": 0.1}
    return [RUNS_WELL._replace(**{**steps, **change}) for change in changes]


# Times per rank, and parts of the verdict's sentence.
CASES: list[tuple[list[StepTimes], Any, str]] = [
    (
        [RUNS_WELL._replace(**HOT)],
        GPU,
        "compute-bound: ... waited 0.4% ... process 6,627 img/s and got 6,600 ... clock 12% of",
    ),
    (
        [RUNS_WELL._replace(**WAITS)],
        GPU,
        "input-bound by decode and augmentation: ... waited 38.0% ... img/s and got 4,150 ... with "
        "15 workers, an image takes 3.6 ms of computing, 0.0 ms of waiting for storage and 0.1 ms",
    ),
    (
        [RUNS_WELL._replace(idle_steps_fraction=0.9)],
        feed_of(step_rate=6700, no_graph="two shapes"),
        "launch-bound: ... before 90% of the steps ... captured in a CUDA graph (two shapes).",
    ),
    (
        [RUNS_WELL._replace(cpu_wait_fraction=0.4)],
        feed_of(cuda=False),
        "core-bound: ... rank 0 waited 40% of the time for a core",
    ),
    (ranks_of({}, HOT), NOT_ALONE, "compute-bound: ... a GPU lowered its clock 12% of the"),
    # The verdict is about the rank that the other ranks wait for.
    (
        ranks_of({"image_cpu_ms": 9.0}, WAITING),
        NOT_ALONE,
        "by decode and augmentation: training waited 40.0% ... with 30 workers, an image takes 29",
    ),
    (ranks_of(*[{}] * 4), feed_of(step_rate=300), "process 1,004 img/s ... it processed 1,200"),
]


@pytest.mark.parametrize(("ranks", "feed", "sentence"), CASES)
def test_judge_sentences(ranks, feed, sentence):
    for order in (ranks, ranks[::-1]):
        text = verdict_of(order, 0.0, feed, feed.no_graph)[0]
        assert all(part in text for part in sentence.split(" ... ")), text


def test_verdict_of_requires_20_seconds(image_root):
    """A verdict needs 20 s on each rank."""
    short, long = (RUNS_WELL._replace(seconds=seconds) for seconds in (19.9, 20.0))
    with opened(image_root, workers=0) as feed:
        assert verdict_of([StepTimes()], 20.0, feed, "") == []
        assert verdict_of([long, short], 20.0, feed, "") == []
        (sentence,) = verdict_of([long, long], 20.0, feed, "")
    assert sentence.startswith("compute-bound: ")


DECODE = "input-bound by decode and augmentation"
AUTO = "set loader.workers=auto"
RE_ENCODE = "re-encode the images: python scripts/prepare.py SOURCE --to DIR --side 50"


@pytest.mark.parametrize(
    ("overrides", "kilobytes", "cause", "expected"),
    [
        ([], 100, DECODE, RE_ENCODE),
        (["loader.workers=4"], 10, DECODE, "use a machine with more CPU cores"),  # same as auto
        (["loader.workers=3"], 100, DECODE, AUTO),
        ([], 100, "compute-bound", None),
    ],
)
def test_remedy_for_run(overrides, kilobytes, cause, expected):
    assert remedy_for(cause, feed_of(*overrides, kilobytes=kilobytes)) == expected


def test_remedies_name_valid_overrides():
    texts = " ".join([*REMEDIES.values(), AUTO, RE_ENCODE])
    assert {*re.findall(r"[a-z]+\.[a-z_]+", texts)} - {"prepare.py"} <= {*NAMES}
    from_overrides(["data=fake", *re.findall(r"[a-z]+\.[a-z]+=[a-z]+", texts)])
