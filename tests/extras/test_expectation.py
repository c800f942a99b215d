"""Comparing a run with its recipe, and runs that are not compared."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from conf.compose import from_overrides
from engine.metrics import Metrics
from extras.expectation import Expectation, fraction_lower
from tests.engine.plans import schedule

FACTS: dict[str, Any] = {"recipe": "imagenet_rn50", "top1": 76.1, "std": 0.1, "runs": 20}
FACTS |= {"status": "published", "source": "torchvision IMAGENET1K_V1", "format": "JPEG"}
FACTS |= {"classes": 1000, "train_images": 1_281_167, "val_images": 50_000}
FACTS |= {"hardware": "one GPU", "time": "a night"}
STEPS = 10  # per epoch; 3 epochs


def expectation(
    *overrides: str,
    image: str = "n01440764_18.JPEG",
    history: tuple[str, ...] = (),
    last: Mapping[str, Any] = {},
    fitted: int | None = None,
    **changes: Any,
) -> Expectation:
    """Return an ImageNet run's expectation after validation `last`; `changes` replace facts."""
    config = from_overrides(["data.root=/imagenet", *overrides])
    train = type("Images", (), {"__len__": lambda _: 1_281_167, "name": lambda *_: image})()
    datasets = SimpleNamespace(classes=range(1000), train=train, val=range(50_000))
    config.expect = {**FACTS, **changes}
    state = SimpleNamespace(history=list(history), last_validation=last)
    planned = replace(schedule(10 * STEPS, 10, 3), fitted_micro_batch=fitted)
    log: Any = SimpleNamespace(schedule=planned, datasets=datasets, state=state)
    log.config, log.metrics = config, Metrics.of(config)
    return Expectation(log)


def row(epoch: int, top1: float = 0.0) -> dict[str, float]:
    return {"step": STEPS * epoch, "epoch": epoch, "top1": top1}


LOWER = pytest.approx(0.0025, abs=1e-5)  # t with 19 degrees of freedom, -0.4 / 0.123 / 1.05**0.5


@pytest.mark.parametrize(
    ("std", "expected", "remark", "lower"),
    [(0.123, "76.1 ± 0.12", "; 0.3 % of runs are lower", LOWER), (None, "76.1", "", None)],
)
def test_expectation_finish_summary(std, expected, remark, lower):
    """The summary contains the recipe's facts. A run that stops earlier is not compared."""
    source = "(published, torchvision IMAGENET1K_V1)"
    line = f"recipe    top1 75.70 %: {expected} is expected {source}{remark}"
    compared = {**FACTS, "std": std, "value": "top1", "difference": -0.4}
    compared |= {"fraction_lower": lower, "line": line}
    for words in ([], ["train.best_by=macro_f1"]):
        found = expectation(*words, std=std, last=row(3, 75.7))
        assert found.finish({}) == {"expectation": compared}
    for earlier in (row(2, 75.7), {}):
        assert expectation(std=std, last=earlier).finish({}) == {"expectation": None}


def test_fraction_lower_of_published_quantiles():
    """Quantiles of Student's t for 1, 3, 4, 7, 9 and 30 degrees of freedom."""
    quantiles = {2: 12.706, 4: 3.182, 5: 2.776, 8: 2.365, 10: 2.262, 31: 2.042}  # by runs
    for runs, quantile in quantiles.items():
        limit = quantile * (1 + 1 / runs) ** 0.5
        found = fraction_lower(limit, runs), fraction_lower(-limit, runs)
        assert found == pytest.approx((0.975, 0.025), abs=2e-5)


FREE = ["train.seed=3", "train.precision=fp32", "loader.workers=2", "loader.decoder=gpu"]
FREE += ["data.train=/elsewhere", "train.max_steps=9", "run.name=mine", "log.every_steps=1"]
CHANGED = [("classes", 10), ("recipe", "copied"), ("image", "1.png"), ("format", "lossless")]
CHANGED += [("fitted", 64), ("history", ("began at",))]  # smaller micro-batches; continues a run


@pytest.mark.parametrize(
    ("typed", "changes", "compared"),
    [
        (FREE, {}, True),  # chosen by the user and the machine
        (["train.epochs=91"], {}, False),
        *(([], {key: value}, False) for key, value in CHANGED),
        ([], {"image": "tar: 1.PNG", "format": "lossless"}, True),
    ],
)
def test_expectation_compared_runs(typed, changes, compared):
    found = expectation(*typed, last=row(3), **changes).finish({})
    assert (found["expectation"] is not None) == compared
