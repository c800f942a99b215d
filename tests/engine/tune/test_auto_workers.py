"""train.py with loader.workers=auto: the measurement changes no weights and leaves no process.

On a CPU, train.py does not measure. These tests force it to, with four simulated cores and short
measurements.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from conf.schema import Config
from engine import checkpoint
from engine.distributed import World
from engine.tune import autotune, search, verdict
from engine.tune.measured import Measured
from pipeline import decode, machine
from pipeline import loader_plan as plan
from pipeline.loader import WorkerPool
from pipeline.loader_plan import why_no_engines
from tests import small_run
from tests.engine.tune.answers import TUNED
from tests.engines import PillowEngines
from tests.processes import HANGS_SECONDS, family, wait_until
from tests.ranks import Ranks
from tests.results import rows, same, stored

ROOT = Path(train.__file__).parent
pytestmark = pytest.mark.usefixtures("whole_runs", "own_logging")
ADAMW = [
    "optim=adamw",
    "optim.lr=0.001",
    "train.ema_decay=0.9",
    "optim.clip_norm=1",
    "augment.batch=[{mixup: {alpha: 0.4}}]",
]
BUDGET = 3  # workers: of four cores, the training process keeps one
MOST = 6  # workers for which buffers are allocated


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure as on a GPU, without remembered results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "why_not_measured", lambda *_: "")
    monkeypatch.setattr(autotune, "FEWEST_BATCHES", 0)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(machine, "threads_per_core", lambda: 1)
    monkeypatch.setattr(machine, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(autotune, "MEASURE_SECONDS", 0.2)
    # Also on a busy machine, where steps are slow.
    monkeypatch.setattr(autotune, "FEWEST_STEPS", 1)
    monkeypatch.setattr(autotune, "LATE_SECONDS", math.inf)


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return small_run.compose(root, folder, "loader.workers=auto", *overrides)


def run(root: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    return train.train(compose(root, folder, *overrides))


def command(notes: Path, root: Path, folder: Path, *overrides: str) -> list[str]:
    """Return the command line of a run that measures; it writes its results to `notes`."""
    script = str(Path(__file__).with_name("measured_on_cpu.py"))
    arguments = small_run.overrides_of(root, folder, "loader.workers=auto", *overrides)
    return [sys.executable, script, str(notes), *arguments]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def result(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the newest stored state and the validation rows, without durations."""
    return stored(folder), rows(folder, "val")


def no_process_is_left(before: set[int]) -> None:
    """Wait until only the forkserver and the resource tracker have been added since `before`."""
    stay: set[Any] = {
        os.getpid(),
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    wait_until(lambda: family(os.getpid()) - before == stay - before)


def compare_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the engines with the CPU decoder even if that is enough."""
    for module in (autotune, search):
        monkeypatch.setattr(module, "is_enough", lambda trials: False)
    monkeypatch.setattr(search, "could_win", lambda *_: True)


def tuning(console: str) -> list[str]:
    """Return the lines about the measurement; they must come before the first step."""
    before, header, _ = console.partition(f"{'epoch':>10} {'step':>9}")
    assert header, "no step was logged"
    lines = before.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("autotune "))
    return [line[9:] for line in lines[first:]]


def test_the_measurement_does_not_change_the_result(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer is remembered until autotune.refresh."""
    before = family(os.getpid())
    expected = [
        run(image_root, tmp_path / name, f"loader.workers={name}")["params_sha256"] for name in "01"
    ]
    assert expected[0] == expected[1]
    expected_result = result(tmp_path / "1")

    answers, printed = [], []
    for name, options in (
        ("measured", ["log.trackers=[tensorboard]"]),
        ("remembered", []),
        ("again", ["autotune.refresh=true"]),
    ):
        capfd.readouterr()
        assert run(image_root, tmp_path / name, *options)["params_sha256"] == expected[1], name
        assert same(result(tmp_path / name), expected_result), name
        no_process_is_left(before)
        answers.append(json.loads((tmp_path / name / "autotune.json").read_text()))
        printed.append(tuning(capfd.readouterr().out))

    measured, remembered, again = answers
    assert remembered == measured
    assert again["seconds"] != measured["seconds"]
    assert [lines[-1].split(" ")[0] for lines in printed] == ["measured", "remembered;", "measured"]
    for kept, lines in zip(answers, printed, strict=True):
        assert 1 <= kept["workers"] <= MOST
        assert lines[0].startswith("the step takes ")
        assert lines[1].endswith(f"; there are cores for {BUDGET}")
        assert lines[2].startswith(f"decoder={kept['decoder']} workers={kept['workers']} ")
        assert f"with the step {kept['rate']:,.0f} img/s" in lines[2]

    board = EventAccumulator(
        str(tmp_path / "measured" / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    text = board.Tensors("autotune/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "the step takes " in text


def test_the_verdict_uses_all_ranks_and_the_measured_step_time(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With progressive sizes, the step is faster at first."""
    gathered: list[Any] = []
    monkeypatch.setattr(World, "all_gather", lambda world, value: gathered.append(value) or [value])
    monkeypatch.setattr(verdict, "SHORT", {"epoch": 0.0, "run": 0.0})
    for name, options in (("one", []), ("several", ["data.sizes={0: 16, 1: 32}"])):
        run(image_root, tmp_path / name, *options)
        demand = json.loads((tmp_path / name / "autotune.json").read_text())["demand"]
        seen = [
            value for value in gathered if isinstance(value, Measured) and "rank" in value.place
        ]
        alone = demand if name == "one" else 0.0
        assert [one.step_alone for one in seen] == [alone] * 3  # two epochs, and the run
        gathered.clear()


@pytest.mark.slow
def test_the_measurement_does_not_change_a_resumed_run(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With and without moments and an average when the measurement starts."""
    whole = run(image_root, tmp_path / "whole", *ADAMW, "loader.workers=1")
    for part in (["train.max_steps=3"], ["autotune.refresh=true"]):
        capfd.readouterr()
        summary = run(image_root, tmp_path / "parts", *ADAMW, *part)
        assert tuning(capfd.readouterr().out)[-1].startswith("measured in ")
    assert summary["params_sha256"] == whole["params_sha256"]
    state, validated = result(tmp_path / "parts")
    expected_state, expected = result(tmp_path / "whole")
    assert same({**state, "best": 0}, {**expected_state, "best": 0})
    assert [row["step"] for row in validated] == [3, 5, 9] and validated[1:] == expected


def test_remembered_number_of_workers_is_limited_by_memory(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Less memory may be free than at the last start."""
    sizes = []
    activate = WorkerPool.activate

    def recorded(pool: WorkerPool, workers: int) -> None:
        activate(pool, workers)
        sizes.append(pool.active)

    monkeypatch.setattr(WorkerPool, "activate", recorded)
    remembered = replace(TUNED, workers=MOST + 2, prefetch_factor=2, pin_memory=False)
    monkeypatch.setattr(autotune, "load_result", lambda _: remembered)
    run(image_root, tmp_path / "run", "train.max_steps=1")
    assert MOST in sizes and max(sizes) == MOST
    lines = tuning(capfd.readouterr().out)
    assert lines[-1].startswith(f"remembered; there is room for {MOST} workers; autotune.refresh")


def test_too_few_steps_for_a_measurement(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(autotune, "FEWEST_BATCHES", 4)
    for steps, first_line in (
        ("3", "not measured, workers=3: 3 steps are over before it matters"),
        ("7", "the step takes "),
    ):
        capfd.readouterr()
        # The second run resumes at step 3.
        run(image_root, tmp_path / "run", f"train.max_steps={steps}")
        assert tuning(capfd.readouterr().out)[0].startswith(first_line)


def test_unreadable_file_during_the_measurement(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training would read it a moment later."""
    before = family(os.getpid())
    root = shutil.copytree(image_root, tmp_path / "images")
    broken = next((root / "train").rglob("*.jpg"))
    broken.write_bytes(broken.read_bytes()[:2000])
    assert train.main(compose(root, tmp_path / "run")) == 1
    assert f"train.py: {broken}: " in capfd.readouterr().err
    assert not [*(tmp_path / "cache").rglob("autotune/*")]
    no_process_is_left(before)


@pytest.mark.slow
def test_signal_during_the_measurement(
    image_root: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The exit status is 128 + signal, and nothing is saved: the next start measures."""
    arguments = command(tmp_path, image_root, tmp_path / "run")
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until((tmp_path / "measuring-0").exists, process)
        processes = family(process.pid)
        assert len(processes) > 1
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=HANGS_SECONDS)
    wait_until(lambda: not any(map(family, processes)))
    assert process.returncode == 128 + signal.SIGTERM
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("interrupted", signal.SIGTERM)
    assert summary["step"] == 0
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]

    rest = run(image_root, tmp_path / "run", "loader.workers=1")
    assert (
        rest["params_sha256"]
        == run(image_root, tmp_path / "straight", "loader.workers=1")["params_sha256"]
    )


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[PillowEngines]:
    """Stand-ins for JPEG engines, which are always compared with the CPU decoder."""

    class Engines(PillowEngines):
        pass

    choose = plan.choose_decoders
    cuda = torch.device("cuda")
    monkeypatch.setattr(plan, "why_no_engines", lambda device: None)
    monkeypatch.setattr(plan, "choose_decoders", lambda a, b, _, *more: choose(a, b, cuda, *more))
    monkeypatch.setattr("pipeline.gpu.GpuDecoder", Engines)
    compare_always(monkeypatch)
    return Engines


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["gpu", "hybrid"])
def test_the_chosen_decoder_is_part_of_the_run(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    engines: type[PillowEngines],
    chosen: str,
) -> None:
    """A resumed run keeps it without another measurement; the weights are those of a given gpu."""
    auto, crops = "loader.decoder=auto", "augment=imagenet"
    monkeypatch.setattr(autotune, "best_setting", lambda trials: (chosen, min(trials[chosen])))
    for steps, last_line in (("4", "measured in "), ("9", "remembered; ")):
        capfd.readouterr()
        summary = run(image_root, tmp_path / "run", auto, crops, f"train.max_steps={steps}")
        lines = tuning(capfd.readouterr().out)
        assert lines[-1].startswith(last_line)
        path = tmp_path / "run" / "checkpoints" / f"step-{int(steps):08d}.pt"
        assert checkpoint.load(path)["identity"]["pixels"] == chosen
    answer = json.loads((tmp_path / "run" / "autotune.json").read_text())
    assert answer["decoder"] == chosen
    assert set(answer["alternatives"]) == {decode.resolve("auto"), "hybrid", "gpu"}
    assert any(line.startswith("the other decoders, at their best: ") for line in lines)
    if chosen == "gpu":
        given = ["loader.decoder=gpu", crops, "loader.workers=1"]
        whole = run(image_root, tmp_path / "given", *given)
        assert summary["params_sha256"] == whole["params_sha256"]


@pytest.mark.gpu
def test_decoders_are_measured_on_a_gpu(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engines themselves; the first start and its continuation use one decoder."""
    if why_no_engines(torch.device("cuda", 0)) is not None:
        pytest.skip("no JPEG engines")
    compare_always(monkeypatch)
    options = ["train.device=cuda", "loader.decoder=auto", "augment=imagenet"]
    for steps in (4, 9):
        run(image_root, tmp_path / "run", *options, f"train.max_steps={steps}")
        answer = json.loads((tmp_path / "run" / "autotune.json").read_text())
        assert set(answer["alternatives"]) == {decode.resolve("auto"), "hybrid", "gpu"}
        path = tmp_path / "run" / "checkpoints" / f"step-{steps:08d}.pt"
        assert checkpoint.load(path)["identity"]["pixels"] == plan.pixels_of(answer["decoder"])


@pytest.mark.parametrize(
    ("broken", "augment", "reason"),
    [
        (True, "imagenet", "nvjpegDecodeBatched returned status 6"),
        pytest.param(
            *(False, "strong", "augment.train or the files need the CPU"),  # rand_augment
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engines_that_cannot_be_used(
    image_root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    engines: type[PillowEngines],
    broken: bool,
    augment: str,
    reason: str,
) -> None:
    engines.broken, crops = broken, f"augment={augment}"
    summary = run(image_root, tmp_path / "run", "loader.decoder=auto", crops)
    answer = json.loads((tmp_path / "run" / "autotune.json").read_text())
    assert answer["decoder"] == decode.resolve("auto")
    assert f"loader.decoder=auto: the GPU's JPEG engines are not used: {reason}" in caplog.text
    plain = run(image_root, tmp_path / "plain", "loader.workers=1", crops)
    assert summary["params_sha256"] == plain["params_sha256"]


@pytest.mark.slow
def test_ranks_choose_together(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """All ranks get the same number, within one rank's share of the cores, and the same weights.

    There are three ranks because a sum of two numbers does not depend on their order.
    """
    number, hashes = 3, {}
    for workers in ("auto", "0"):
        arguments = command(
            tmp_path,
            image_root,
            tmp_path / workers,
            *ADAMW,
            "loader.batch_size=12",
            f"loader.workers={workers}",
        )
        done = ranks.run(arguments, number)
        assert done.returncode == 0, done.stderr
        hashes[workers] = json.loads((tmp_path / workers / "summary.json").read_text())[
            "params_sha256"
        ]
        if workers == "auto":
            assert tuning(done.stdout)[-1].startswith("measured in ")
            assert done.stdout.count("the step takes ") == 1

    by_rank = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(number)]
    assert json.loads((tmp_path / "auto" / "autotune.json").read_text()) == by_rank[0]["answer"]
    for found in by_rank:
        answer = found["answer"]
        assert found["workers"] == answer["workers"] == by_rank[0]["workers"]
        assert answer["lines"][1].endswith("; there are cores for 1")
        assert 1 <= found["workers"] <= found["most"] == 2
    assert hashes["auto"] == hashes["0"]


@pytest.mark.slow
def test_ranks_use_one_decoder(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """With the weights that this decoder gives without a measurement."""
    monkeypatch.setenv("CHOOSES", "gpu")
    hashes = []
    for decoder, workers in (("auto", "auto"), ("gpu", "1")):
        folder = tmp_path / decoder
        options = [f"loader.decoder={decoder}", f"loader.workers={workers}", "augment=imagenet"]
        done = ranks.run(command(tmp_path, image_root, folder, *options), 2)
        assert done.returncode == 0, done.stderr
        hashes.append(json.loads((folder / "summary.json").read_text())["params_sha256"])
        stored = checkpoint.load(folder / "checkpoints" / "step-00000009.pt")
        assert stored["identity"]["pixels"] == "gpu"
    assert hashes[0] == hashes[1]
    by_rank = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert [found["answer"]["decoder"] for found in by_rank] == ["gpu", "gpu"]
