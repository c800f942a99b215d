"""How a run is compared with its recipe: words, limits, and the runs that are not compared."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from conf.compose import from_overrides
from conf.errors import UserError
from conf.named import ROOT
from conf.schema import group_names
from engine.metrics import Metrics
from extras.expectation import GOOD_SIGMAS, MIN_STD, Expectation, half_width
from scripts import report
from tests.engine.plans import schedule

FACTS: dict[str, Any] = {"recipe": "imagenet_rn50", "top1": 76.1, "std": 0.1, "runs": 20}
FACTS |= {"status": "published", "source": "torchvision IMAGENET1K_V1", "format": "JPEG"}
FACTS |= {"classes": 1000, "train_images": 1_281_167, "val_images": 50_000}
FACTS |= {"hardware": "one GPU", "time": "a night"}
CURVE = {"runs": 20, "top1": [20.0, 40.0, 60.0], "std": [4.0, 2.0, 0.1]}
STEPS = 10  # per epoch; 3 epochs


def expectation(
    *overrides: str,
    image: str = "n01440764_18.JPEG",
    history: tuple[str, ...] = (),
    last: Mapping[str, Any] = {},
    fitted: int | None = None,
    **changes: Any,
) -> Expectation:
    """Of a run on ImageNet after the validation `last`; `changes` are entries of the recipe."""
    config = from_overrides(["data.root=/imagenet", *overrides])
    train = type("Images", (), {"__len__": lambda _: 1_281_167, "name": lambda *_: image})()
    datasets = SimpleNamespace(classes=range(1000), train=train, val=range(50_000))
    config.expect = {**FACTS, "reference": CURVE, **changes}
    state = SimpleNamespace(history=list(history), last_validation=last)
    lines: list[str] = []
    tracker = SimpleNamespace(print=lines.append, lines=lines)
    planned = replace(schedule(10 * STEPS, 10, 3), fitted_micro_batch=fitted)
    log: Any = SimpleNamespace(schedule=planned, datasets=datasets, tracker=tracker, state=state)
    log.config, log.metrics, log.row = config, Metrics.of(config), {}
    return Expectation(log)


def judge(
    found: Expectation, now: Mapping[str, Any], before: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Return the columns of a validation after another one, and what it prints."""
    if before:
        found.validated(before, {})
    found.log.tracker.lines.clear()
    return found.validated(now, {}), found.log.tracker.lines


def row(epoch: float, top1: float = 0.0) -> dict[str, float]:
    return {"step": round(STEPS * epoch), "top1": top1}


@pytest.mark.parametrize(
    ("top1", "runs", "judged", "line"),
    [
        (76.234, 20, (0.2145, 0.134, "within"), "within 76.1 +/- 0.21 "),
        (76.5, 20, (0.2145, 0.4, "above"), "0.4 above 76.1 +/- 0.21 "),
        (76.4, 5, (0.3041, 0.3, "within"), "within 76.1 +/- 0.3 "),
        (76.0, None, (None, -0.1, None), "-0.1 against 76.1 "),
    ],
)
def test_the_summary_at_the_end(
    top1: float, runs: int | None, judged: tuple[Any, ...], line: str
) -> None:
    """It has the facts without the curve. A run that stops earlier is not compared."""
    unknown = "" if runs else ", spread unknown"
    line = f"recipe    top1 {top1:.2f} %: {line}(published, torchvision IMAGENET1K_V1{unknown})"
    found = dict(zip(("spread", "difference", "verdict"), judged, strict=True))
    expected = {"expectation": {**FACTS, "runs": runs, "value": "top1", **found, "line": line}}
    last = row(3, top1)
    assert expectation(runs=runs, last=last).finish({}) == expected
    assert expectation("train.best_by=macro_f1", runs=runs, last=last).finish({}) == expected
    for earlier in (row(2, top1), {}):
        assert expectation(runs=runs, last=earlier).finish({}) == {"expectation": None}
    compared = expectation(last=last | {"epoch": 3.0, "loss": 6.91})
    for loss, nothing in ((6.92, True), (float("nan"), True), (6.8, False)):
        compared.log.row["loss"] = loss  # of the training
        assert ("below 6.91, that of a guess" in str(compared.finish({}))) == nothing
        assert compared.finish({})["expectation"]["line"].startswith("recipe    top1")


FREE = ["train.seed=3", "train.precision=fp32", "loader.workers=2", "loader.decoder=gpu"]
FREE += ["data.train=/elsewhere", "train.max_steps=9", "run.name=mine", "log.every_steps=1"]
OTHERS = [("classes", 10), ("recipe", "copied"), ("image", "1.png"), ("format", "lossless")]
OTHERS += [("fitted", 64), ("history", ("began at",))]  # smaller parts; it continues another run
BOTH, CURVE_ONLY, NEITHER = (True, True), (False, True), (False, False)


@pytest.mark.parametrize(
    ("typed", "changes", "compared"),
    [
        (FREE, {}, BOTH),  # what the user and the machine choose
        (["train.epochs=91"], {}, NEITHER),
        (["optim.lr=1"], {}, CURVE_ONLY),
        *(([], {key: value}, NEITHER) for key, value in OTHERS),
        ([], {"image": "tar: 1.PNG", "format": "lossless"}, BOTH),
        ([], {"reference": {}}, (True, False)),
    ],
)
def test_which_runs_are_compared(
    typed: list[str], changes: dict[str, Any], compared: tuple[bool, bool]
) -> None:
    """At the end, and with the curve."""
    found = expectation(*typed, **changes)
    columns, printed = judge(found, row(2), row(1))
    found.validated(row(3), {})
    assert ((found.finish({})["expectation"] is not None), columns != {}) == compared
    assert len(printed) == compared[1]


def limit(epoch: int, sigmas: float) -> float:
    return CURVE["top1"][epoch - 1] - half_width(max(MIN_STD, CURVE["std"][epoch - 1]), 20, sigmas)


def test_two_low_validations_in_a_row_are_one_warning() -> None:
    """The second is more than 3 sigma below, the first more than 2."""
    now, before = limit(2, 3) - 0.1, limit(1, 2) - 0.1
    found = expectation()
    (warning,) = judge(found, row(2, now), row(1, before))[1]
    assert warning == (
        f"warning   top1 {now:.2f} % after epoch 2 is worse than the 3 sigma limit of this recipe, "
        f"{limit(2, 3):.2f} (20 runs reached 40 +/- 2), and so was the previous validation, "
        f"top1 {before:.2f} %: check the labels and your code changes; "
        "training continues, Ctrl-C stops it"
    )
    assert judge(found, row(2, now), row(1, before))[1] == []
    (warning,) = judge(expectation("optim.lr=1", last=row(2)), row(3), {})[1]  # of another start
    assert "check the labels and what differs from the recipe (optim.lr=1);" in warning


def test_a_single_low_validation_is_not_a_warning() -> None:
    for now, before in (
        (row(1), {}),  # the first one
        (row(2), row(0.5)),
        (row(2), row(1, limit(1, 2) + 0.1)),
        (row(3, limit(3, 3) + 0.1), row(2)),
        (row(2.5), row(2)),  # the run stops within an epoch
    ):
        assert judge(expectation(), now, before)[1] == []


def test_the_curve_of_five_runs(tmp_path: Path) -> None:
    """`.ci/reference` prints the node of a recipe, without the facts of the data."""
    reference = run_path(str(ROOT / ".ci" / "reference"))["reference"]
    top1 = np.random.default_rng(0).uniform(20, 80, (5, 3))
    for seed, values in enumerate(top1.tolist()):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        (folder / "config.yaml").write_text(f"train: {{epochs: 3, seed: {seed}}}\noptim: {{lr: 1}}")
        for epoch, value in enumerate(values, start=1):
            row = {"epoch": epoch + 0.1, "split": "val", "top1": value, "images": 15}
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
    runs = report.read_runs([tmp_path], [])
    node = yaml.safe_load(reference(runs))["expect"]
    curve = node["reference"]
    np.testing.assert_allclose(curve["top1"], top1.mean(0), atol=0.006)
    np.testing.assert_allclose(curve["std"], top1.std(0, ddof=1), atol=0.006)
    assert (node["top1"], node["std"]) == (curve["top1"][-1], curve["std"][-1])
    assert node["runs"] == curve["runs"] == 5 and node["val_images"] == 15
    assert expectation(**node).finish({}) == {"expectation": None}
    with pytest.raises(UserError, match=r"give 5 or more .*; 4 are given, "):
        reference(runs[:4])


@pytest.mark.parametrize("recipe", group_names("recipe"))
def test_the_expectation_of_a_recipe_is_sound_and_documented(recipe: str) -> None:
    """docs/accuracy.md has a row with these facts."""
    config = from_overrides([f"recipe={recipe}", "data.root=/data"])
    expect = config.expect
    if expect is None:
        pytest.skip("the recipe states no accuracy")
    assert expect.keys() - {"reference"} == FACTS.keys() and expect["recipe"] == recipe
    if curve := expect.get("reference"):
        assert curve.keys() == CURVE.keys() and curve["runs"] >= 5
        assert len(curve["top1"]) == len(curve["std"]) == config.train.epochs
        # The curve may be of fewer runs.
        assert abs(curve["top1"][-1] - expect["top1"]) <= expect["std"]
        assert expect["status"] == "reproduced here"
    runs, hardware, time, source = (expect[n] for n in ("runs", "hardware", "time", "source"))
    spread = f" +/- {half_width(expect['std'], runs, GOOD_SIGMAS):.2g}" if runs else ""
    row = re.escape(" | ".join(["", hardware, time, f"{expect['top1']:g}{spread}", f"{source} |"]))
    about = rf"^\| `{recipe}` \| [^|]+, {config.train.epochs:g}\b[^|]*{row}"
    assert re.search(about, (ROOT / "docs" / "accuracy.md").read_text(), re.MULTILINE), about
