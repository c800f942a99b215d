"""The stage that limits, by the figures of a run: its name, the sentences and what to change."""

from dataclasses import fields, replace
from typing import Any

import pytest

from engine.tune.prices import Gains
from engine.tune.verdict import (
    CAUSES,
    LoaderState,
    Observation,
    Setup,
    Supply,
    diagnose,
    slowest,
)
from tests.answers import SETUP

SUPPLY = Supply(cpu_ms=1.8, wait_ms=0.0, core_ms=0.1, spread=1.2, file_bytes=110e3, workers=1)
RUNS_WELL = Observation(
    SETUP,
    LoaderState(workers=15, worker_rate=0.0, supply=SUPPLY, pinned=True),
    images_per_second=6600,
    step_alone=6700,
    copy_ms=1.2,
    wait_fraction=0.004,
    late_fraction=0.001,
    copy_fraction=0.03,
)


def changed(**values: Any) -> Observation:
    """RUNS_WELL with other values, wherever the fields of these names are."""

    def part(record: Any) -> dict[str, Any]:
        return {
            field.name: values.pop(field.name) for field in fields(record) if field.name in values
        }

    of_loader = part(LoaderState)
    supply = replace(SUPPLY, **part(Supply))
    loader = replace(
        RUNS_WELL.loader, supply=supply, worker_rate=supply.images_per_second, **of_loader
    )
    found = replace(
        RUNS_WELL, setup=replace(SETUP, **part(Setup)), loader=loader, **part(Observation)
    )
    assert not values
    return found


WAITS = {"wait_fraction": 0.38, "images_per_second": 4150, "cpu_ms": 3.6}


def ranks_of(*ranks: dict[str, Any]) -> dict[str, Any]:
    """What the ranks observed of steps of 100 ms, as a change of RUNS_WELL."""
    places = [f"rank {number} on node{number // 2}" for number in range(len(ranks))]
    observed = [
        changed(place=place, **{"exchange_ms": 1.0, **one})
        for place, one in zip(places, ranks, strict=True)
    ]
    steps = {"batch_size": 100, "images_per_second": 1000, "step_alone": 0, "ranks": len(ranks)}
    return {**steps, "on_gpu": False, "all_ranks": tuple(observed)}


STRAGGLES = ({"own_ms": 50.0}, {"own_ms": 52.0}, {"own_ms": 80.0}, {"own_ms": 49.0})
MEASURED = {"alternatives": {"region": 4150.0, "hybrid": 4000.0}}
# Both ranks have their images and wait for each other.
AGREES = {"ranks_fraction": 0.38, "wait_fraction": 0.02, "late_fraction": 0.005}
SHORT_WAITS = {"ranks_fraction": 0.08, "wait_fraction": 0.04, "late_fraction": 0.0}
LIKE_ALONE: dict[str, Any] = {**MEASURED, "step_alone": 0, "gains": Gains(shrink=1.5)}
CPU: dict[str, Any] = {"decoder": "region", "copy_fraction": 0.1}
GPUS: dict[str, Any] = {"on_gpu": True, "gains": Gains(shrink=1.0)}


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        ({}, "compute", ["compute-bound", "6,600 of 6,633", "model.compile=tuned"]),
        ({"compile": "tuned"}, "compute", ["so faster data loading would not help."]),
        ({"compile": "off"}, "compute", ["model.compile=default"]),
        (
            WAITS,
            "decode",
            [
                "waited 38.0% of the time",
                "can process 6,704 img/s and got 4,150",
                "3.6 ms of CPU time",
                " ms for a core: set loader.decoder=auto and loader.workers=auto in a new run to "
                "measure the GPU's JPEG engines, if it has them; re-encode the images once with "
                "scripts/prepare.py --side 352; "
                "use a machine with about 27 CPU cores (about 6,560 img/s).",
            ],
        ),
        (
            {**WAITS, "gains": Gains(shrink=1.5), "has_engines": True},
            "decode",
            [
                "measure the GPU's JPEG engines; re-encode the images once with "
                "scripts/prepare.py --side 352 "
                "(about 6,225 img/s); use a machine with about 27 CPU cores (about 6,560 img/s).",
            ],
        ),
        (
            {**WAITS, "gains": Gains(shrink=1.02), **MEASURED, "ranks": 2, "cpu_ms": 7.3},
            "decode",
            [" ms for a core: use a machine with about 27 CPU cores for each rank (about 6,560"],
        ),
        (
            {
                **WAITS,
                **MEASURED,
                "decoder": "simplejpeg",
                "gains": Gains(shrink=1.2, decoder="region", decode=1.25),
            },
            "decode",
            [
                " ms for a core: install a C compiler for loader.decoder=region, x1.25 in "
                "docs/benchmarks.md (about 5,188 img/s); re-encode the images once with "
                "scripts/prepare.py --side 352 (about 4,980 img/s, "
                "6,225 together with the change before it); "
                "use a machine with about 27 CPU cores",
            ],
        ),
        (
            {
                **WAITS,
                "decoder": "pillow",
                "gains": Gains(shrink=1.0, decoder="simplejpeg", decode=1.2, installed=True),
                "has_engines": False,
            },
            "decode",
            ["core: set loader.decoder=auto, which is simplejpeg here (about 4,980 img/s); use"],
        ),
        (
            {**WAITS, **MEASURED, "decoder": "hybrid", "gains": Gains(shrink=2), "decoded": 0.5},
            "decode",
            [
                "scripts/prepare.py --side 352 (about 6,225 img/s); "
                "use a machine with about 39 CPU cores"
            ],
        ),
        (  # the step reaches its rate alone, so there are cores enough
            {**MEASURED, "decoder": "hybrid", "workers": 14, "most_workers": 14, "step_alone": 6600}
            | {"wait_fraction": 0.06, "copy_fraction": 0.95},
            "engines",
            ["got 6,600. Re-encode the images once with scripts/prepare.py --side 352."],
        ),
        (
            {**WAITS, "decoder": "hybrid", "large_files": False},
            "decode",
            ["in a new run to measure all decoders; use a machine with about 28 CPU cores"],
        ),
        (
            {
                **MEASURED,
                "wait_fraction": 0.9,
                "images_per_second": 2200,
                "workers": 3,
                "core_ms": 0.0,
                "large_files": False,
            },
            "decode",
            [" ms for a core: use a machine with more CPU cores."],
        ),
        (
            {
                "wait_fraction": 0.7,
                "images_per_second": 1600,
                "workers": 3,
                "core_ms": 0.0,
                "step_alone": 0,
                "gains": Gains(shrink=1.5),
                "has_engines": False,
            },
            "decode",
            [
                "raise loader.workers, there are cores for 15 (about 5,227 img/s); re-encode the "
                "images once with scripts/prepare.py --side 352 (about 2,400 img/s).",
            ],
        ),
        (
            {
                "wait_fraction": 0.9,
                "images_per_second": 2200,
                "workers": 3,
                "core_ms": 1.8,
                "step_alone": 0,
                "large_files": False,
            },
            "decode",
            ["1.8 ms for a core: set loader.decoder=auto"],
        ),
        (
            {"wait_fraction": 0.6, "images_per_second": 2000, "wait_ms": 5.7},
            "storage",
            [
                "by storage",
                "waits 5.7 ms for storage",
                "faster storage (about 4,900 img/s); re-encode the images once with",
            ],
        ),
        (
            {"wait_fraction": 0.6, "images_per_second": 2000, "wait_ms": 5.7, "large_files": False},
            "storage",
            [" ms for a core: move the images to faster storage (about 4,900 img/s)."],
        ),
        (
            {"wait_fraction": 0.6, "images_per_second": 2000, "wait_ms": 5.7, "step_alone": 0},
            "storage",
            [
                " ms for a core: move the images to faster storage (about 4,900 img/s); try "
                "loader.workers=38, since reading is mostly waiting (about 4,490 img/s); re-encode",
            ],
        ),
        (
            {
                "wait_fraction": 0.6,
                "images_per_second": 2000,
                "wait_ms": 5.7,
                "step_alone": 0,
                "core_ms": 25.0,
            },
            "storage",
            ["25.0 ms for a core: move the images"],
        ),
        (
            {
                "wait_fraction": 0.86,
                "images_per_second": 31,
                "wait_ms": 30.1,
                "workers": 1,
                "most_workers": 1,
                "step_alone": 0,
                "late_fraction": 0.0,
            },
            "storage",
            [" ms for a core: move the images", "try loader.workers=9, since"],
        ),
        (
            {
                "wait_fraction": 0.83,
                "images_per_second": 60,
                "wait_ms": 20.0,
                "slow_share": 0.95,
                "slow_files": "/x/a.jpg, /x/b.jpg",
            },
            "files",
            [
                "by single files: the GPU waited 83.0%",
                "Single files took 95% of the workers' time, seconds each (/x/a.jpg, /x/b.jpg)",
            ],
        ),
        (
            {
                "on_gpu": False,
                "step_alone": 0,
                "wait_fraction": 0.6,
                "images_per_second": 46,
                "cpu_ms": 20.0,
                "workers": 1,
                "most_workers": 1,
            },
            "decode",
            [
                " ms for a core: set loader.workers=2 to use the core of the step, which waits "
                "(about 63 img/s)",
                "use a machine with about 4 CPU cores (about 113 img/s)",
            ],
        ),
        (
            {
                "on_gpu": False,
                "step_alone": 0,
                "wait_fraction": 0.6,
                "images_per_second": 46,
                "cpu_ms": 7.0,
                "core_ms": 1.0,
                "workers": 1,
                "most_workers": 1,
            },
            "hand-off",
            [],
        ),
        (
            {"wait_fraction": 0.38, "images_per_second": 4150},
            "hand-off",
            ["by the hand-off", "can supply 7,895"],
        ),
        (
            {"wait_fraction": 0.3, "images_per_second": 2500, "workers": 0, "cpu_ms": 0.4},
            "decode",
            ["loader.workers=auto"],
        ),
        (
            {"wait_fraction": 0.3, "images_per_second": 500, "workers": 0, "cpu_ms": 0.4},
            "decode",
            ["loader.workers=auto"],
        ),
        (
            {"wait_fraction": 0.3, "copy_fraction": 0.95, "copy_ms": 16.0},
            "copy",
            ["copy-bound", "page-locked already: use more PCIe lanes"],
        ),
        ({"wait_fraction": 0.3, "copy_fraction": 0.7, "copy_ms": 16.0}, "decode", []),
        (
            {"wait_fraction": 0.3, "copy_fraction": 0.7, "copy_ms": 16.0, "pinned": False},
            "copy",
            ["copy-bound", "loader.pin_memory=true"],
        ),
        (
            {"wait_fraction": 0.6, "images_per_second": 4000, "wait_ms": 5.7, "ranks": 2},
            "storage",
            ["can process 10,025 img/s and got 4,000", "Each of the 15 workers of a rank"],
        ),
        (
            {"wait_fraction": 0.6, "images_per_second": 8000, "ranks": 2},
            "hand-off",
            ["can supply 15,789"],
        ),
        (
            {"drained_fraction": 0.9, "batch_size": 8},
            "launch",
            ["launch-bound", "90% of the steps", "loader.batch_size"],
        ),
        (
            {"drained_fraction": 0.9, "graph_refused": "the batch has two shapes"},
            "launch",
            ["not one CUDA graph (the batch has two shapes): fix that, or raise loader.batch_"],
        ),
        (
            {"late_fraction": 0.2},
            "launch",
            ["launch-bound: the GPU was idle 20% of the time, and before 0% of the steps,"],
        ),
        (
            {"step_alone": 7500, "drained_fraction": 0.6},
            "cores",
            [
                "core-bound: the step processed 7,500 img/s alone and 6,627 while the workers run",
                "a GPU waited 0% of the time for launches and was idle before 60% of the steps",
                "Set loader.decoder=auto and",
            ],
        ),
        (
            {
                **MEASURED,
                "step_alone": 7500,
                "drained_fraction": 0.6,
                "gains": Gains(shrink=1.5),
            },
            "cores",
            ["Re-encode the images once with scripts/prepare.py --side 352 (about 6,890 img/s)."],
        ),
        (
            {**MEASURED, "step_alone": 7500, "drained_fraction": 0.6, "large_files": False},
            "cores",
            ["Use a machine with more CPU cores."],
        ),
        (
            {"step_alone": 7500},
            "slowed",
            [
                "slower than alone: the step processed 7,500 img/s alone and 6,627 while the "
                "workers run, 88% of it; a GPU waited 0% of the time for launches and was idle "
                "before 0% of the steps; the GPU waited 0.4% of the time for images. Images and "
                "launches were on time",
                "check the GPU's clocks and which",
            ],
        ),
        (
            {"step_alone": 26700, "images_per_second": 21900, "ranks": 4, "batch_size": 1024},
            "slowed",
            ["21,988 while the workers run, 82% of it", "the links between them"],
        ),
        (
            {"step_alone": 7500, "slowdowns": "thermal throttling by the driver, 40 % of the time"},
            "slowed",
            ["The GPU ran below its maximum clock (thermal throttling by the driver, 40 % of"],
        ),
        ({"step_alone": 7500, "drained_fraction": 0.6, "decoder": "gpu"}, "launch", []),
        (
            {"step_alone": 7500, "decoder": "gpu"},
            "slowed",
            ["images. Decoding uses part of the GPU."],
        ),
        (
            {
                "wait_fraction": 0.34,
                "images_per_second": 14555,
                "cpu_ms": 0.1,
                "workers": 6,
                "decoder": "gpu",
                "large_files": False,
            },
            "engines",
            [
                "for images; the step can process 22,",
                "Set loader.decoder=auto and loader.workers=auto in a new run to measure all",
            ],
        ),
        (
            {"wait_fraction": 0.3, "cpu_ms": 3.0, "decoder": "none", "large_files": False},
            "decode",
            ["use a machine with more CPU cores."],
        ),
        (
            {
                "wait_fraction": 0.8,
                "images_per_second": 1950,
                "cpu_ms": 0.5,
                "core_ms": 0.0,
                "workers": 1,
                "decoder": "gpu",
                "step_alone": 0,
            },
            "decode",
            [
                "The one worker spends 0.5 ms",
                "raise loader.workers, there are cores for 15 (about 9,555 img/s); re-encode",
            ],
        ),
        (
            {"wait_fraction": 0.34, "images_per_second": 4000, "cpu_ms": 0.5, "wait_ms": 0.6},
            "hand-off",
            [],
        ),
        (
            {"on_gpu": False, "core_fraction": 0.4, "large_files": False},
            "cores",
            [
                "the training process was ready to compute but waited at least 40% of the time for "
                "a CPU core; without this wait, about 11,000 img/s instead of 6,600; the CPU",
                "End other processes that use these CPUs, or lower loader.workers or "
                "OMP_NUM_THREADS; use a machine with more CPU cores.",
            ],
        ),
        ({"on_gpu": False, "core_fraction": 0.1}, "compute", []),
        ({"core_fraction": 0.4}, "compute", []),  # the GPU did not wait for its host
        (
            {"core_fraction": 0.4, "late_fraction": 0.2, **LIKE_ALONE},
            "cores",
            [
                "core-bound: the training process waited 40% of the time for a CPU core, and the "
                "GPU 20% of the time for launches; the GPU waited 0.4%",
                "End other processes that use these CPUs; use a machine with more CPU cores.",
            ],
        ),
        (
            {"core_fraction": 0.4, "late_fraction": 0.2, "workers": 30, **LIKE_ALONE},
            "cores",
            ["Set loader.workers=15; use a machine with more CPU cores."],
        ),
        (  # the wait for a core is too short to be the reason
            {"core_fraction": 0.08, "late_fraction": 0.2, **LIKE_ALONE},
            "launch",
            [],
        ),
        (
            {"core_fraction": 0.4, "late_fraction": 0.2, "graph_refused": "x", **LIKE_ALONE},
            "launch",
            [],
        ),
        (
            {**WAITS, **LIKE_ALONE, "core_ms": 6.0},
            "starved",
            [
                "input-bound by CPU cores: the GPU waited 38.0% of the time for images",
                "Each of the 15 workers spends 3.6 ms of CPU time per image, and waits 0.0 ms for "
                "storage and 6.0 ms for a core: end other processes that use these CPUs; re-encode",
            ],
        ),
        (
            {**WAITS, **LIKE_ALONE, "core_ms": 6.0, "most_workers": 7, "large_files": False}
            | {"gains": Gains(shrink=1.0)},
            "starved",
            ["6.0 ms for a core: use a machine with about 13 CPU cores (about 6,560 img/s)."],
        ),
        ({**WAITS, "core_ms": 6.0, "wait_ms": 7.0}, "storage", []),
        (
            {**AGREES, **ranks_of({**AGREES, "core_fraction": 0.3}, AGREES), **GPUS},
            "cores",
            [
                "core-bound: the training process of rank 0 on node0 waited 30% of the time for a "
                "CPU core, and the GPU 36% of the time for launches",
            ],
        ),
        (  # other threads of the process lack a core
            {**AGREES, **ranks_of(AGREES, AGREES), **GPUS, "core_ms": 2.0},
            "cores",
            [],
        ),
        (
            {**AGREES, **ranks_of(AGREES, AGREES), **GPUS},
            "launch",
            ["launch-bound: the GPU was idle 36% of the time"],
        ),
        (  # it is the input of rank 0, but a stall costs more
            {**ranks_of({**AGREES, "wait_fraction": 0.08}, AGREES), **GPUS, "wait_fraction": 0.08},
            "launch",
            ["the GPU was idle 30%"],
        ),
        (  # each rank waits for the images of the other
            {**SHORT_WAITS, **ranks_of(SHORT_WAITS, SHORT_WAITS), **GPUS, "core_fraction": 0.3},
            "compute",
            [],
        ),
        (
            ranks_of(*[{"core_fraction": 0.25, "ranks_fraction": 0.3}] * 2),
            "cores",
            ["each rank was ready to compute but waited at least 25% of the time"],
        ),
        (
            {"on_gpu": False, **ranks_of({"core_fraction": 0.5}, {"core_fraction": 0.3})},
            "cores",
            ["core-bound: each rank was ready to compute but waited at least 30% of the time"],
        ),
        (
            ranks_of(*STRAGGLES),
            "straggler",
            [
                "slowed by a straggler: rank 2 on node1 needs 80.0 ms to compute its gradients, "
                "the other ranks 50.0 ms, and they wait for it 30% of the time; all ranks together "
                "processed 1,000 img/s.",
                "Check the clock of its CPU and whether other processes use it; if that does not "
                "help, train without this CPU (about 1,429 img/s).",
            ],
        ),
        (
            {
                "on_gpu": False,
                **ranks_of(
                    {"own_ms": 50.0, "core_fraction": 0.1}, {"own_ms": 80.0, "core_fraction": 0.4}
                ),
            },
            "straggler",
            ["Its process waited 40% of the time for a CPU core: end other processes on these"],
        ),
        (
            {
                "on_gpu": False,
                **ranks_of(
                    {"own_ms": 50.0, "core_fraction": 0.25}, {"own_ms": 80.0, "core_fraction": 0.28}
                ),
            },
            "straggler",
            ["Check the clock of its CPU and whether"],  # both ranks lack cores
        ),
        (
            ranks_of({"own_ms": 50.0, "exchange_ms": 44.0}, {"own_ms": 52.0, "exchange_ms": 40.0}),
            "exchange",
            [
                "communication-bound: averaging the gradients over the ranks takes 40.0 of "
                "the 100.0 ms of a step (40%), during which no rank computes; without it, about "
                "1,667 img/s instead of 1,000.",
                "raise loader.batch_size",
            ],
        ),
        # The largest loss is named.
        ({**ranks_of(*STRAGGLES), "wait_fraction": 0.35, "cpu_ms": 99.0}, "decode", []),
        ({**ranks_of(*STRAGGLES), "wait_fraction": 0.25, "cpu_ms": 99.0}, "straggler", []),
        ({**ranks_of(*STRAGGLES), "late_fraction": 0.35}, "compute", []),
        (ranks_of({"own_ms": 50.0}, {"own_ms": 54.0}), "compute", []),
        (ranks_of({"own_ms": 50.0}, {"own_ms": 65.0}), "compute", []),
        (
            {**ranks_of({"own_ms": 50.0}, {"own_ms": 60.0}), "on_gpu": True},
            "straggler",
            [
                "they wait for it 10% of the time",
                "Check the clock of its GPU and whether other processes use it; if that does not "
                "help, train without this GPU",
            ],
        ),
        (
            {
                **ranks_of({"own_ms": 50.0}, {"own_ms": 60.0, "slowdowns": "power cap 80%"}),
                "on_gpu": True,
            },
            "straggler",
            ["Its GPU ran below its maximum clock (power cap 80%): check cooling and power"],
        ),
        ({**ranks_of({"own_ms": 50.0}, {"own_ms": 54.0}), "on_gpu": True}, "compute", []),
        # 3.3 and 2.8 standard errors of the difference.
        *(
            (
                {
                    **ranks_of(
                        {"own_ms": 50.0, "own_error_ms": 1.8},
                        {"own_ms": 50.0, "own_error_ms": 1.8},
                        {"own_ms": 50.0, "own_error_ms": 90.0},
                        {"own_ms": 60.0, "own_error_ms": error},
                    ),
                    "on_gpu": True,
                },
                cause,
                [],
            )
            for error, cause in ((2.4, "straggler"), (3.1, "compute"))
        ),
        ({**ranks_of({"own_ms": 50.0}, {"own_ms": 0.0}), "on_gpu": True}, "compute", []),
        (
            {
                **ranks_of(
                    {"own_ms": 50.0, "slowdowns": "thermal 90%"},
                    {"own_ms": 60.0, "slowdowns": "thermal 80%"},
                ),
                "on_gpu": True,
            },
            "straggler",
            ["Check the clock of its GPU"],  # the other one is slowed down too
        ),
        (
            {
                **ranks_of(
                    {"own_ms": 50.0, "exchange_ms": 9.0}, {"own_ms": 52.0, "exchange_ms": 8.0}
                ),
                "on_gpu": True,
            },
            "exchange",
            ["takes 8.0 of the 100.0 ms of a step (8%)"],
        ),
        (
            {
                **ranks_of(
                    {"own_ms": 50.0, "exchange_ms": 9.0}, {"own_ms": 70.0, "exchange_ms": 8.0}
                ),
                **{"on_gpu": True, "graph_refused": "memory", "drained_fraction": 0.9},
            },
            "launch",
            [],
        ),
        ({"step_alone": 7500, "drained_fraction": 0.2}, "cores", []),
        ({"step_alone": 9000, "late_fraction": 0.2}, "cores", []),
        ({"step_alone": 7500, "wait_fraction": 0.3}, "decode", []),
        ({"step_alone": 0, "drained_fraction": 0.6}, "launch", []),
        ({"on_gpu": False, "drained_fraction": 1.0}, "compute", ["the CPU waited"]),
        (
            {
                "on_gpu": False,
                "step_alone": 0,
                "images_per_second": 100,
                "wait_fraction": 0.01,
                "copy_fraction": 0.1,
            },
            "compute",
            ["100 of 112 img/s"],
        ),
    ],
)
def test_sentences(change: dict[str, Any], cause: str, says: list[str]) -> None:
    found = diagnose(changed(**change))
    assert found.cause == cause
    text = " ".join(found.sentences)
    assert all(part in text for part in says), text
    assert 1 <= len(found.sentences) <= 2
    assert text.startswith(CAUSES[cause].label)
    assert found.remedy.lower() in text.lower()


@pytest.mark.parametrize(
    ("change", "advised"),
    [
        ({}, True),
        ({"has_engines": False}, False),
        ({"alternatives": {"region": 4150.0}}, True),
        ({"alternatives": {"hybrid": 4150.0}, "decoder": "hybrid"}, True),
        (MEASURED, False),  # at an earlier start
        ({"decoder_fixed": False}, True),  # loader.workers is fixed
        ({"alternatives": {"region": 4150.0}, "decoder_fixed": False}, False),  # fast enough
        ({"on_gpu": False}, False),
    ],
)
def test_engines_are_advised_unless_they_were_measured(
    change: dict[str, Any], advised: bool
) -> None:
    found = diagnose(changed(**WAITS, **change))
    assert found.cause == "decode"
    assert ("set loader.decoder=auto and loader.workers=auto in a" in found.remedy) == advised


def test_every_cause_can_be_found() -> None:
    (mark,) = [mark for mark in test_sentences.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {cause for _, cause, _ in mark.args[1]} == CAUSES.keys()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            ({"wait_fraction": 0.002}, {"wait_fraction": 0.4, "cpu_ms": 9.0}),
            "input-bound by decode: the GPU waited 40.0%",
        ),
        (
            (
                {"wait_fraction": 0.002, "drained_fraction": 0.95},
                {"wait_fraction": 0.001, "late_fraction": 0.4},
            ),
            "launch-bound: the GPU was idle 40% of the time",
        ),
        (
            ({"wait_fraction": 0.002}, {"wait_fraction": 0.001, "drained_fraction": 0.9}),
            "launch-bound: the GPU was idle 0% of the time, and before 90% of the steps",
        ),
        (({"wait_fraction": 0.002}, {"wait_fraction": 0.001}), "compute-bound"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_judged(
    changes: tuple[dict[str, Any], ...], says: str
) -> None:
    """They wait where gradients are averaged, which looks like computing."""
    observed = [changed(ranks=2, **change) for change in changes]
    for order in (observed, observed[::-1]):
        found = slowest(order)
        assert found is not None and diagnose(found).sentences[0].startswith(says)
    assert slowest([*observed, None]) is None


@pytest.mark.parametrize(
    ("ranks", "cause", "says"),
    [
        ([{"wait_fraction": 0.04}] * 4, "slowed", "up to 16% of the time together: raise loader.p"),
        ([{"wait_fraction": 0.01}] * 4, "slowed", "check the GPUs' clocks, the links between"),
        ([{"drained_fraction": 0.04}] * 4, "cores", "was idle before 16% of the steps"),
        ([{"late_fraction": 0.02}] * 4, "cores", "a GPU waited 8% of the time for launches"),
        (
            [{}, {"slowdowns": "board limit, 9 % of the time", "place": "rank 1 on node0"}, {}],
            "slowed",
            "The GPU of rank 1 on node0 ran below its maximum clock (board limit,",
        ),
    ],
)
def test_delays_of_the_ranks_add_up(ranks: list[dict[str, Any]], cause: str, says: str) -> None:
    """Every step ends when the last rank does, and at each step another one may be the last."""
    slower = {"step_alone": 26700, "images_per_second": 21900, "batch_size": 1024}
    seen = slowest([changed(ranks=len(ranks), **{**slower, **one}) for one in ranks])
    assert seen is not None
    found = diagnose(seen)
    assert found.cause == cause
    assert says in " ".join(found.sentences)


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        ({}, "engines", "waited 16.7% of the time for images or for other ranks; the step can"),
        ({"large_files": False}, "engines", "about 26 CPU cores for each rank (about 78,"),
        ({"step_alone": 88_300}, "engines", "process 80,014 img/s and got 66,652"),
        ({"ranks": 32}, "engines", "process 640,115 img/s and got 533,216"),
        (CPU, "decode", "input-bound by decode: the GPU waited 16.7%"),
        ({**CPU, "cpu_ms": 0.3, "wait_ms": 0.47}, "storage", "by storage: the GPU waited 16.7%"),
        ({**CPU, "cpu_ms": 0.5}, "compute", "waited 4.6% of the time for images"),
        ({"copy_fraction": 0.6, "cpu_ms": 0.5}, "compute", "waited 4.6% of the time for images"),
        # One rank has fewer images than the others.
        ({"wait_fraction": 0.2, "ranks_fraction": 0.0}, "engines", "waited 20.8% of the time for"),
        ({**CPU, "pinned": False, "copy_fraction": 0.55}, "decode", ""),
        # The hosts cost more than the images.
        ({"late_fraction": 0.2}, "launch", "the GPU was idle 20%"),
        ({"core_fraction": 0.12}, "compute", "waited 4.6% of the time for images, so"),
        ({"core_fraction": 0.15, "ranks_fraction": 0.2}, "cores", "waited 15% of the time for"),
    ],
)
def test_a_feed_that_is_always_busy_limits_all_ranks(
    change: dict[str, Any], cause: str, says: str
) -> None:
    """Measured on four H200s, ResNet-18: each rank waits little for its own images."""
    ranks = change.get("ranks", 4)
    run = {
        **{"ranks": ranks, "batch_size": 256 * ranks, "decoder": "hybrid", "workers": 13},
        **{"images_per_second": 16_663 * ranks, "cpu_ms": 0.77, "core_ms": 0.0, "decoded": 0.26},
        "step_alone": 0,
    }
    parts = ("wait_fraction", "late_fraction", "ranks_fraction", "drained_fraction")
    measured = (
        (0.046, 0.008, 0.055, 0.36),
        (0.001, 0.003, 0.163, 0.02),
        (0.014, 0.004, 0.139, 0.12),
        (0.004, 0.003, 0.140, 0.04),
    )
    times = {"copy_fraction": 0.95, "core_fraction": 0.015, "own_ms": 11.9, "exchange_ms": 0.38}
    seen = slowest(
        [
            changed(**{**run, **times, **dict(zip(parts, rank, strict=True)), **change})
            for rank in measured * (ranks // 4)
        ]
    )
    assert seen is not None
    found = diagnose(seen)
    assert found.cause == cause
    assert says in " ".join(found.sentences)
