"""What rank 0 prints: the table of rows, the progress line and the results."""

from pathlib import Path
from typing import Any

import pytest

from engine.log.console import HEADER, Console, duration

TRAIN = {"step": 10, "epoch": 1.0, "loss": 1.0, "top1": 50.0, "lr": 0.1, "seconds_left": 3723.0}
TRAIN |= {"images_per_second": 1234.5678, "data_wait_fraction": 0.25}
VAL = {"step": 20, "epoch": 2.0, "loss": 0.5, "top1": 60.0, "top5": 95.0}
VAL |= {"images": 500, "seconds": 2.0}
EXPECTED = {"top1": 71.0, "spread": 0.5, "status": "published", "source": "a paper"}
SUMMARY: dict[str, Any] = {
    "status": "finished",
    "signal": 0,
    "unreadable_images": 3,
    "step": 1500,
    "epoch": 10.0,
    "top1": 71.25,
    "top5": 90.5,
    "expectation": None,
    "best_top1": 72.5,
    "best_epoch": 9.0,
    "best_checkpoint": "step-00001350.pt",
    "images_per_second": 2950.4,
    "images_per_second_with_first_epoch": 2104.2,
    "seconds": 65.4,
    "seconds_lost": {"validation": 61.0, "start": 5.0},
    "starts": 2,
    "effective_time": 0.5,
    "total_seconds": 132.0,
    "verdict": ["compute-bound"],
}
INTERRUPTED = {"status": "interrupted", "signal": 15}


def console(prints: bool = True) -> Console:
    return Console(prints, 10)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.train_row(TRAIN, {"loss": 1.0, "top1": 50.0, "grad_norm": 1.23456})
    shown.train_row({**TRAIN, "ranks_wait_fraction": 0.125}, {})
    shown.val_row(VAL, best=True)
    shown.val_row({**VAL, "top1_raw": 59.0, "top5_raw": 94.0}, best=False)
    header, first, second, best, other = capsys.readouterr().out.splitlines()
    assert header == HEADER and len(second) == len(HEADER)
    assert first[len(HEADER) :] == "  grad_norm 1.235"
    words = ["1.00/10", "10", "1.0000", "50.00", "1,235", "25.0", "0.1", "1:02:03"]
    assert first.split()[:8] == words and second.split()[5] == "37.5"
    titles = ("step", "loss", "top1 %", "img/s", "wait %", "lr", "left")
    for title, value in zip(titles, words[1:], strict=True):
        end = header.index(title) + len(title)
        assert first[end - len(value) : end] == value
    assert best.endswith("validation: top5 95.00 %, 500 images, 2.0 s  best so far")
    assert other.endswith("2.0 s; raw model: top1 59.00 %, top5 94.00 %")


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    silent = console(prints=False)
    silent.say("hello")
    silent.val_row(VAL, best=True)
    silent.train_row(TRAIN, {})
    silent.outcome(tmp_path, SUMMARY, resumes=True)
    assert capsys.readouterr() == ("", "")


def outcome(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    console().outcome(folder, {**SUMMARY, **changes}, resumes=True)
    return capsys.readouterr().out


def test_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        outcome(tmp_path, capsys)
        == f"""
status    finished after 1,500 steps, 10 epochs, in 1:05
accuracy  top1 71.25 %, top5 90.50 %; best top1 72.50 % after epoch 9
speed     2,950 images/s; 2,104 over all steps
run       {tmp_path}
best      {tmp_path}/checkpoints/step-00001350.pt
skipped   3 unreadable images: {tmp_path}/bad_files.txt
time      50 % of 2:12 over 2 starts was training; validation 1:01, start 0:05
verdict   compute-bound
"""
    )


def test_other_outcomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "suspects.csv").touch()
    stopped = {"status": "interrupted", "signal": 15, "top1": None, "best_checkpoint": None}
    text = outcome(tmp_path, capsys, **stopped, starts=1, unreadable_images=0)
    for line in (
        "status    interrupted after 1,500 steps, 10 epochs, in 1:05",
        "accuracy  not validated",
        "best      no checkpoint was validated",
        "time      50 % of 2:12 was training; validation 1:01, start 0:05",
        "resume    run the same command again to resume at step 1,500",
    ):
        assert f"\n{line}\n" in text
    assert "skipped" not in text and f"\nsuspects  {tmp_path}/suspects.csv: " in text
    steady = {"images_per_second_with_first_epoch": 2950.1}
    expected = {**EXPECTED, "verdict": "within", "difference": 0.25}
    text = outcome(tmp_path, capsys, top1_raw=70.0, expectation=expected, **steady)
    assert "after epoch 9; raw model: top1 70.00 %\n" in text
    assert "\nspeed     2,950 images/s\n" in text
    assert "\nrecipe    accuracy 71.25 %: within 71 +/- 0.5 (published, a paper)\n" in text
    expected = {**EXPECTED, "spread": None, "verdict": "above", "difference": 0.25}
    text = outcome(tmp_path, capsys, expectation=expected)
    assert ": 0.25 points above 71 (published, a paper, spread unknown)\n" in text


@pytest.mark.parametrize(
    ("run", "shown"), [("a run", "'{}/a run/tensorboard'"), ("runs/a", "{}/runs")]
)
def test_the_command_for_tensorboard(
    run: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the default folder, it shows all runs by name."""
    (tmp_path / run / "tensorboard").mkdir(parents=True)
    expected = f"\ncurves    tensorboard --logdir {shown.format(tmp_path)}\n"
    assert expected in outcome(tmp_path / run, capsys)


def test_duration() -> None:
    expected = {0: "0:00", 59.4: "0:59", 59.6: "1:00", 3599: "59:59", 3600: "1:00:00"}
    expected[90061] = "25:01:01"
    assert {seconds: duration(seconds) for seconds in expected} == expected
