"""The sentences for the figures of a run: tests/equal has the cause for many more of them."""

from collections import defaultdict
from typing import Any

import pytest

from engine.tune.verdict import verdict
from pipeline.clock import Shares

RUNS_WELL = Shares(
    rate=6600,
    alone=6700,
    wait=0.004,
    late=0.001,
    copy=0.03,
    copy_ms=1.2,
    steps=1,
    seconds=256 / 6600,
    cpu_ms=1.8,
    core_ms=0.1,
    decoder="region",
    workers=15,
    on_gpu=True,
    name="rank 0 on node0",
)
WAITS = {"wait": 0.38, "rate": 4150, "cpu_ms": 3.6}
SLOWER = {"alone": 7500}
NOT_ALONE = {"alone": 0}
LACKS_CORE = {"core": 0.4, "late": 0.2, **NOT_ALONE}
CPU = {"on_gpu": False, **NOT_ALONE}
HOT = {"slowdowns": "board limit"}
KNOWN = defaultdict(lambda: ["a remedy"])

# What differs from RUNS_WELL, and what the verdict says, in parts.
ONE_RANK: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "compute-bound: the GPU waited 0.4% of the time for images; the step can process 6,627 "
        "img/s and got 6,600; faster data loading would not help. Remedies: a remedy.",
    ),
    (HOT, "rank 0 on node0 has lowered the clock of its GPU (board limit): check its cooling"),
    (
        WAITS,
        "input-bound by decode: the GPU waited 38.0% of the time for images; the step can process "
        "6,694 img/s and got 4,150; per image, each worker (15) computes 3.6 ms, and waits 0.0 "
        "ms for storage and 0.1 ms for a core. Remedies: a remedy.",
    ),
    ({**WAITS, "rate": 2500, "workers": 0}, "by decode ... the training process computes 3.6"),
    (
        {"wait": 0.6, "rate": 2000, "storage_ms": 5.7},
        "input-bound by storage: the GPU waited 60.0% ... waits 5.7 ms for storage and 0.1 ms for",
    ),
    ({**CPU, "wait": 0.6, "rate": 46, "cpu_ms": 20.0, "workers": 1}, "the CPU waited 60.0%"),
    ({"wait": 0.3, "copy": 0.95}, "copy-bound: ... copying a batch takes 1.2 ms"),
    (
        {"drained": 0.9, "graph_refused": "two shapes"},
        "launch-bound: ... the GPU was idle 0% of the time, and before 90% of the steps, although "
        "the images were ready; the step is not one CUDA graph: two shapes. R",
    ),
    (
        {**SLOWER, "drained": 0.6},
        "core-bound: the GPU waited 0.4% of the time for images; the step can process 6,627 img/s, "
        "88% of the 7,500 that it processed alone, and got 6,600; rank 0 on node0 waited 0% of the",
    ),
    ({"alone": 7500, "core": 0.4}, "compute-bound: ... , 88% of the 7,500 that it processed alone"),
    (
        LACKS_CORE,
        "core-bound: ... rank 0 on node0 waited 40% of the time for a core. R",
    ),
    ({**CPU, "core": 0.4}, "core-bound: ... rank 0 on node0 waited 40% of the time for a core. R"),
]


def ranks_of(*changes: dict[str, Any], **both: Any) -> list[Shares]:
    """Ranks on a GPU with steps of 100 ms, and 1,000 images/s of all of them."""
    steps = {"rate": 1000 / len(changes), "seconds": 0.1, "exchange_ms": 1.0, **NOT_ALONE, **both}
    return [
        RUNS_WELL._replace(**{**steps, "name": f"rank {n} on node{n // 2}", **change})
        for n, change in enumerate(changes)
    ]


OWN_50, OWN_60 = {"own_ms": 50.0}, {"own_ms": 60.0}
STALLS = {"ranks": 0.38, "wait": 0.02, "late": 0.005}  # both have images, and wait for each other
SEVERAL: list[tuple[list[Shares], str]] = [
    (
        ranks_of(OWN_50, {"own_ms": 52.0}, {"own_ms": 80.0}, {"own_ms": 49.0}, on_gpu=False),
        "slowed by a straggler: ... got 1,000; rank 2 on node1 needs 80.0 ms to compute its "
        "gradients, the other ranks 50.0 ms, and they wait for it 30% of the time. R",
    ),
    (ranks_of(OWN_50, {**OWN_60, **HOT}), "straggler: ... rank 1 on node0 has lowered the clock"),
    (
        ranks_of({"exchange_ms": 44.0}, {"exchange_ms": 40.0}),
        "communication-bound: ... averaging the gradients over the ranks takes 40.0 of the 100.0 "
        "ms of a step, and no rank computes then",
    ),
    (ranks_of({"core": 0.3}, {}, **STALLS), "core-bound: ... 30% of the time for a core"),
    # The rank that the others wait for is judged.
    (
        ranks_of({"cpu_ms": 9.0}, {"wait": 0.4, "cpu_ms": 29.0}),
        "input-bound by decode: the GPU waited 40.0% ... each worker (30) computes 29.0",
    ),
    (ranks_of(*[{}] * 4, alone=300.0), "process 1,004 img/s, 84% of the 1,200 that it processed"),
]


@pytest.mark.parametrize(
    ("ranks", "says"), [([RUNS_WELL._replace(**one)], says) for one, says in ONE_RANK] + SEVERAL
)
def test_sentences(ranks: list[Shares], says: str) -> None:
    for order in (ranks, ranks[::-1]):
        text = " ".join(verdict(order, KNOWN))
        assert all(part in text for part in says.split(" ... ")), text
