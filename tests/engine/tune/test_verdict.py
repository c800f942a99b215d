"""The cause that limits, by the figures of a run: its name, the sentences and what to change."""

from typing import Any

import pytest

from engine.tune.verdict import verdict
from pipeline.clock import Shares, StepClock

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
WAITS_MORE = {"wait": 0.3, "copy": 0.7}
DISK = {"wait": 0.6, "rate": 2000, "storage_ms": 5.7}
SLOWER = {"alone": 7500}
NOT_ALONE = {"alone": 0}
DRAINED = {"drained": 0.9}
LACKS_CORE = {"core": 0.4, "late": 0.2, **NOT_ALONE}
CPU = {"on_gpu": False, **NOT_ALONE}
SLOW_CPU = {**CPU, "wait": 0.6, "rate": 46, "cpu_ms": 20.0, "workers": 1}
BUSY = {"wait": 0.06, "copy": 0.95, "alone": 6600, "workers": 14}
READERS = {"wait": 0.34, "rate": 14555, "cpu_ms": 0.1, "workers": 6, "mode": "gpu"}
ONE_FILE = {"wait": 0.83, "rate": 60, "storage_ms": 20.0}
HOT = {"slowdowns": "board limit"}
MORE_CORES = "use a machine with more CPU cores"


KNOWN = {
    "storage": ["move the images to faster storage"],
    "decode": [MORE_CORES],
    "step": ["set model.compile=tuned"],
}


def text_of(ranks: list[Shares]) -> str:
    return " ".join(verdict(ranks, KNOWN))


# What the verdict says, in parts.
ONE_RANK: list[tuple[dict[str, Any], str]] = [
    ({}, "compute-bound: the step can process 6,633 img/s and got 6,600; the GPU waited 0.4%"),
    ({}, "faster data loading would not help. Remedies: set model.compile=tuned."),
    (HOT, "the step can ... which lowered its clock: board limit; set model.compile=tuned."),
    (
        WAITS,
        "input-bound by decode: the GPU waited 38.0% of the time for images; the step can process "
        "6,704 img/s and got 4,150; per image, each worker (15) computes 3.6 ms, and waits 0.0 "
        "ms for storage and 0.1 ms for a core. Remedies: use a machine with more CPU cores.",
    ),
    ({**WAITS, "rate": 2500, "workers": 0}, "by decode ... the training process computes 3.6"),
    ({**BUSY, "mode": "hybrid"}, f"by the GPU's JPEG engines ... 0. Remedies: {MORE_CORES}."),
    (READERS, f"by the GPU's JPEG engines ... 14,555. Remedies: {MORE_CORES}."),
    ({**READERS, "cpu_ms": 0.5, "workers": 3}, "by decode ... use a machine with more CPU"),
    ({**WAITS, "decoder": "none"}, "by loading: the GPU waited 38.0% ... each worker (15)"),
    (
        DISK,
        "input-bound by storage: the GPU waited 60.0% ... waits 5.7 ms for storage and 0.1 ms for "
        "a core. Remedies: move the images to faster storage.",
    ),
    ({**WAITS, "core_ms": 6.0, "storage_ms": 7.0}, "input-bound by storage"),
    (ONE_FILE, "by storage: the GPU waited 83.0%"),  # although workers can supply more
    (SLOW_CPU, "by decode: the CPU waited 60.0% ... with more CPU cores"),
    ({"wait": 0.38, "rate": 4150}, "by the hand-off ... can supply 7,895. Rem"),
    ({**WAITS, "core_ms": 6.0}, f"by CPU cores ... : end other processes ... {MORE_CORES}."),
    ({**SLOW_CPU, "rate": 14, "cpu_ms": 17.7, "core_ms": 50.5}, "by CPU cores ... : end other"),
    ({**WAITS_MORE, "copy": 0.95}, "copy-bound: copying a batch takes 1.2 ms ... PCIe"),
    (WAITS_MORE, "input-bound by decode"),
    (DRAINED, "launch-bound ... 90% of the steps ... Remedies: raise loader.batch_"),
    ({**DRAINED, "graph_refused": "two shapes"}, "graph, which failed: two shapes; raise"),
    ({"late": 0.2}, "launch-bound: the GPU was idle 20% of the time, and before 0%"),
    (
        {**SLOWER, "drained": 0.6},
        "core-bound: the step processed 7,500 img/s alone and 6,627 while the workers run, 88% of "
        f"it; the GPU waited 0.4% of the time for images. Remedies: {MORE_CORES}.",
    ),
    ({**SLOWER, "drained": 0.2}, "core-bound ... use a machine with more CPU cores"),
    ({**SLOWER, "late": 0.2, "alone": 9000}, "core-bound: the step processed 9"),
    ({**SLOWER, "wait": 0.3}, "input-bound by decode"),
    ({**NOT_ALONE, "drained": 0.6}, "launch-bound"),
    ({**SLOWER, "drained": 0.6, "mode": "gpu"}, "launch-bound"),
    (SLOWER, "compute-bound: the step processed 7,500 img/s alone ... check the GPUs' clocks"),
    ({**SLOWER, "mode": "gpu", **HOT}, "; decoding uses a part of the GPU. Rem"),
    ({**SLOWER, **HOT}, "of rank 0 on node0, which lowered its clock: board limit; check the"),
    (
        {**CPU, "core": 0.4},
        "core-bound: rank 0 on node0 waited 40% of the time for a CPU core; the CPU waited 0.4% of "
        "the time for images. Remedies: end other processes",
    ),
    ({**CPU, "core": 0.1}, "compute-bound"),
    ({"core": 0.4}, "compute-bound"),  # the GPU did not wait for its host
    (
        LACKS_CORE,
        "core-bound: rank 0 on node0 waited 40% of the time for a CPU core, and the GPU 20% of the "
        "time for launches; the GPU waited 0.4% ... NUM_THREADS; use a machine with more CPU cores",
    ),
    ({**LACKS_CORE, "core": 0.08}, "launch-bound"),  # too short to be the reason
    ({**LACKS_CORE, "graph_refused": "x"}, "launch-bound"),
    ({"on_gpu": False, "drained": 1.0}, "compute-bound"),
    ({**CPU, "rate": 100, "wait": 0.01, "copy": 0.1}, "process 112 img/s"),
]


@pytest.mark.parametrize(("change", "says"), ONE_RANK)
def test_one_rank(change: dict[str, Any], says: str) -> None:
    text = text_of([RUNS_WELL._replace(**change)])
    assert all(part in text for part in says.split(" ... ")), text


def ranks_of(*changes: dict[str, Any], **both: Any) -> list[Shares]:
    """Ranks on a CPU with steps of 100 ms, and 1,000 images/s of all of them."""
    steps = {
        "rate": 1000 / len(changes),
        "steps": 1,
        "seconds": 0.1,
        "exchange_ms": 1.0,
        **CPU,
        **both,
    }
    return [
        RUNS_WELL._replace(**{**steps, "name": f"rank {n} on node{n // 2}", **change})
        for n, change in enumerate(changes)
    ]


GPU = {"on_gpu": True}
OWN_50, OWN_60 = {"own_ms": 50.0}, {"own_ms": 60.0}
ERRORS = {"own_error_ms": 1.8, **GPU}
STRAGGLES: tuple[dict[str, Any], ...] = (OWN_50, {"own_ms": 52.0}, {"own_ms": 80.0})
# Both ranks have their images and wait for each other.
STALLS = {"ranks": 0.38, "wait": 0.02, "late": 0.005, **GPU}
SHORT_WAITS = {"ranks": 0.08, "wait": 0.04, "late": 0.0, **GPU}
SLOW_STEP = {**GPU, "alone": 300.0}
SEVERAL: list[tuple[list[Shares], str]] = [
    (
        ranks_of(*STRAGGLES, {"own_ms": 49.0}),
        "slowed by a straggler: rank 2 on node1 needs 80.0 ms to compute its gradients, the other "
        "ranks 50.0 ms, and they wait for it 30% of the time; all ranks together processed 1,000 "
        "img/s. Remedies: check the clock and cooling of its CPU, and which other processes use it",
    ),
    (
        ranks_of({**OWN_50, "exchange_ms": 44.0}, {"own_ms": 52.0, "exchange_ms": 40.0}),
        "communication-bound: averaging the gradients over the ranks takes 40.0 of the 100.0 ms of "
        "a step (40%), during which no rank computes; all ranks together processed 1,000 img/s. "
        "Remedies: use a faster link between the ranks; raise",
    ),
    # The largest loss is named.
    (ranks_of(*STRAGGLES, wait=0.35, cpu_ms=99.0), "input-bound by decode"),
    (ranks_of(*STRAGGLES, wait=0.25, cpu_ms=99.0), "slowed by a straggler"),
    # Ranks that share a machine differ.
    (ranks_of(OWN_50, {"own_ms": 65.0}), "compute-bound"),
    (ranks_of(OWN_50, OWN_60, **GPU), "they wait for it 10% of the time"),
    (ranks_of(OWN_50, {"own_ms": 54.0}, **GPU), "compute-bound"),
    (ranks_of(OWN_50, {"own_ms": 0.0}, **GPU), "compute-bound"),  # not known
    # 3.3 and 2.8 standard errors of the difference.
    (ranks_of(OWN_50, OWN_50, {**OWN_60, "own_error_ms": 2.4}, **ERRORS), "slowed by a straggler"),
    (ranks_of(OWN_50, OWN_50, {**OWN_60, "own_error_ms": 3.1}, **ERRORS), "compute-bound"),
    (ranks_of(OWN_50, {**OWN_60, **HOT}, **GPU), "its GPU lowered its clock (board limit)"),
    (ranks_of({"exchange_ms": 9.0}, {"exchange_ms": 8.0}, **GPU), "takes 8.0 of the 100.0 ms of"),
    (ranks_of({"core": 0.5}, {"core": 0.3}), "core-bound: rank 0 on node0 wait"),
    (ranks_of({"core": 0.3}, {}, **STALLS), "30% of the time for a CPU core, and the GPU"),
    # Other threads of the processes lack a core.
    (ranks_of({}, {}, **{**STALLS, "core_ms": 2.0}), "core-bound"),
    (ranks_of({}, {}, **STALLS), "launch-bound: the GPU was idle 36% of the time"),
    # It is the input of rank 0, but a stall costs more.
    (ranks_of({"wait": 0.08}, {}, **STALLS), "launch-bound: the GPU was idle 30%"),
    # Each rank waits for the images of the other.
    (ranks_of({}, {}, core=0.3, **SHORT_WAITS), "compute-bound"),
    # The rank that the others wait for is judged.
    (
        ranks_of({"cpu_ms": 9.0}, {"wait": 0.4, "cpu_ms": 29.0}, **GPU),
        "input-bound by decode: the GPU waited 40.0% ... each worker (15) computes 29.0",
    ),
    (
        ranks_of({"drained": 0.95}, {"late": 0.4}, **GPU),
        "launch-bound: the GPU was idle 40% of the time",
    ),
    (
        ranks_of({}, {"wait": 0.001, "drained": 0.9}, **GPU),
        "launch-bound: the GPU was idle 0% of the time, and before 90% of the steps",
    ),
    (ranks_of({}, {}, wait=0.6, rate=4000.0, **GPU), "hand-off ... supply 15,789"),
    # Delays of the ranks add up: every step ends when the last rank does.
    (ranks_of(*[{}] * 4, drained=0.04, **SLOW_STEP), "core-bound: the step proc"),
    (ranks_of(*[{}] * 4, late=0.02, **SLOW_STEP), "core-bound"),
    (ranks_of(*[{}] * 4, **SLOW_STEP), "alone and 1,004 while the workers run, 84% of it"),
    (ranks_of({**OWN_50, **HOT}, {"own_ms": 52.0, **HOT}, **GPU), "compute-bound ... rank 1 on n"),
]


@pytest.mark.parametrize(("ranks", "says"), SEVERAL)
def test_several_ranks(ranks: list[Shares], says: str) -> None:
    for order in (ranks, ranks[::-1]):
        text = text_of(order)
        assert all(part in text for part in says.split(" ... ")), text


REGION = {"mode": "cpu", "copy": 0.1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "engines: the GPU waited 16.7% of the time for images or for other ranks; the step c"),
        ({"alone": 22_075}, "process 80,014 img/s and got 66,652"),
        ({"number": 32}, "process 640,115 img/s and got 533,216"),
        (REGION, "input-bound by decode: the GPU waited 16.7%"),
        ({**REGION, "cpu_ms": 0.3, "storage_ms": 0.47}, "by storage: the GPU waited 16.7"),
        ({**REGION, "cpu_ms": 0.5}, "waited 4.6% of the time for images"),
        ({"copy": 0.6, "cpu_ms": 0.5}, "waited 4.6% of the time for images"),
        # One rank has fewer images than the others.
        ({"wait": 0.2, "ranks": 0.0}, "engines: the GPU waited 20.8% of the tim"),
        # The hosts cost more than the images.
        ({"late": 0.2}, "launch-bound: the GPU was idle 20%"),
        ({"core": 0.12}, "waited 4.6% of the time for images, so"),
        ({"core": 0.15, "ranks": 0.2}, "core-bound: rank 0 on node0 waited 15%"),
    ],
)
def test_a_feed_that_is_always_busy_limits_all_ranks(change: dict[str, Any], says: str) -> None:
    """Measured on four H200s, ResNet-18: each rank waits little for its own images."""
    number = change.pop("number", 4)
    run = {
        **{"rate": 16_663, "steps": 1, "seconds": 256 / 16_663, "mode": "hybrid", "workers": 13},
        **{"cpu_ms": 0.77, "core_ms": 0.0, "alone": 0},
        **{"copy": 0.95, "core": 0.015, "own_ms": 11.9, "exchange_ms": 0.38},
    }
    parts = ("wait", "late", "ranks", "drained")
    measured = (
        (0.046, 0.008, 0.055, 0.36),
        (0.001, 0.003, 0.163, 0.02),
        (0.014, 0.004, 0.139, 0.12),
        (0.004, 0.003, 0.140, 0.04),
    )
    ranks = [
        RUNS_WELL._replace(**{**run, **dict(zip(parts, rank, strict=True)), **change})
        for rank in measured * (number // 4)
    ]
    assert says in text_of(ranks)


@pytest.mark.parametrize(
    ("own", "figures"),
    [
        ((30.0, 32.0, 34.0, 36.0), []),  # too few steps were measured
        ((30.0, 32.0, 34.0, 36.0, 38.0), [34.0, (10 / 5) ** 0.5, 4.0]),
        # The slowest of ten, and the shortest exchange, have no effect.
        ((30.0, 32.0, 34.0, 36.0, 38.0, *[34.0] * 4, 40.0), [34.0, (40 / 8 / 9) ** 0.5, 4.0]),
    ],
)
def test_parts_of_the_measured_steps(own: tuple[float, ...], figures: list[float]) -> None:
    """The mean, its standard error, and the exchange."""
    clock = StepClock(cuda=False)
    clock.parts.extend((ms, 40.0 - ms + 2.0) for ms in own)
    assert list(clock._parts().values()) == pytest.approx(figures)
