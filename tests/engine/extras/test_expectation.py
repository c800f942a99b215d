"""How a run is compared with its recipe: words, limits, and the runs that are not compared."""

import re
from dataclasses import asdict, replace
from statistics import NormalDist

import numpy as np
import pytest

from conf import cli
from conf.schema import FOLDER, UserError, group_names
from engine.extras.expectation import (
    LEAST_STD,
    STATUSES,
    Expect,
    Expectation,
    Reference,
    half_width,
    quantile,
)

PUBLISHED = Expect(
    top1=76.1,
    spread=0.2,
    status="published",
    source="torchvision IMAGENET1K_V1",
    classes=1000,
    train_images=1_281_167,
    val_images=50_000,
    hardware="one GPU",
    time="a night",
)
CURVE = Reference(runs=20, top1=[20.0, 40.0, 60.0], std=[4.0, 2.0, 0.1])
DATA = {"classes": 1000, "train_images": 1_281_167, "val_images": 50_000}
FACTS = {key: value for key, value in asdict(PUBLISHED).items() if key != "reference"}


def expectation(
    *overrides: str, expect: Expect | None = PUBLISHED, continues: bool = False, **data: int
) -> Expectation:
    config = cli.load(["data.root=/imagenet", *overrides])
    if expect is not None:
        expect = replace(expect, reference=CURVE)
    classes, train_images, val_images = (DATA | data).values()
    config = replace(config, expect=expect and asdict(expect))
    return Expectation(config, (classes, train_images, val_images), continues=continues)


@pytest.mark.parametrize(
    ("top1", "spread", "difference", "verdict"),
    [
        (76.234, 0.2, 0.134, "within"),
        (75.9, 0.2, -0.2, "within"),
        (75.2, 0.2, -0.9, "below"),
        (76.5, 0.2, 0.4, "above"),
        (76.0, None, -0.1, "below"),
    ],
)
def test_the_summary_at_the_end(
    top1: float, spread: float | None, difference: float, verdict: str
) -> None:
    """It has the facts without the curve."""
    found = expectation(expect=replace(PUBLISHED, spread=spread)).compare(top1)
    expected = {**FACTS, "spread": spread, "difference": difference, "verdict": verdict}
    assert found == expected


# Which runs are compared.

FREE = ["train.seed=3", "train.precision=fp32", "loader.workers=2", "loader.decoder=gpu"]
FREE += ["data.train=/elsewhere", "train.max_steps=9", "run.name=mine", "log.every_steps=1"]


@pytest.mark.parametrize(
    ("found", "at_the_end", "with_the_curve"),
    [
        pytest.param(expectation(*FREE), True, True, id="what the user and the machine choose"),
        pytest.param(expectation("train.epochs=91"), False, False, id="epochs"),
        pytest.param(expectation("model.name=resnet18"), False, False, id="model"),
        pytest.param(expectation("loader.batch_size=512"), False, False, id="batch size"),
        pytest.param(expectation("train.label_smoothing=0.1"), False, False, id="smoothing"),
        pytest.param(expectation("optim.lr=1"), False, True, id="learning rate"),
        pytest.param(expectation("optim=adamw"), False, True, id="optimiser"),
        pytest.param(expectation("optim.lr=1", "train.epochs=91"), False, False, id="both"),
        *(
            pytest.param(expectation(**{name: DATA[name] - 1}), False, False, id=name)
            for name in DATA
        ),
        pytest.param(expectation(continues=True), False, False, id="continues another run"),
        pytest.param(expectation(expect=None), False, False, id="no expectation"),
    ],
)
def test_which_runs_are_compared(
    found: Expectation, at_the_end: bool, with_the_curve: bool
) -> None:
    assert (found.compare(76.0) is not None, found.columns(1) != {}) == (at_the_end, with_the_curve)
    assert (found.warning((2, 0.0), (1, 0.0)) is not None) == with_the_curve


# The limits.


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.95, 1, 6.314), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.99, 19, 2.539), (0.999, 7, 4.785)],
)
def test_quantiles_of_the_t_distribution(probability: float, freedom: int, value: float) -> None:
    """The values of the printed tables."""
    assert quantile(probability, freedom) == pytest.approx(value, abs=1e-3)


def test_one_good_run_of_740_is_below() -> None:
    """As often as a value is 3 sigma below a known mean, however few runs there are."""
    values = np.random.default_rng(5).normal(50, 2, size=(200_000, 6))
    means, stds = values[:, :5].mean(1), values[:, :5].std(1, ddof=1)
    share = (values[:, 5] < means - half_width(2, 5) / 2 * stds).mean()
    assert share == pytest.approx(NormalDist().cdf(-3), rel=0.2)


def test_columns_of_a_validation() -> None:
    width = half_width(2, 20)
    assert expectation().columns(2) == {
        "reference_top1": 40,
        "reference_top1_min": 40 - width,
        "reference_top1_max": 40 + width,
    }
    # The run has not begun, stops within an epoch, or is longer than the curve.
    assert [expectation().columns(epoch) for epoch in (0, None, 4)] == [{}] * 3
    assert half_width(0.0, 20) == half_width(LEAST_STD, 20)  # a tiny deviation may be chance
    assert half_width(4, 5) > 20  # the band ends at 0


# The warning.


def limit(epoch: int, sigmas: float) -> float:
    return CURVE.top1[epoch - 1] - half_width(CURVE.std[epoch - 1], CURVE.runs, sigmas)


def test_two_low_validations_in_a_row_are_one_warning() -> None:
    """The second is more than 3 sigma below, the first more than 2."""
    now, before = limit(2, 3) - 0.1, limit(1, 2) - 0.1
    found = expectation()
    assert found.warning((2, now), (1, before)) == (
        f"top1 {now:.1f} % after epoch 2 is below the 3 sigma limit of this recipe, "
        f"{limit(2, 3):.1f} (20 runs reached 40.0 +/- 2.0), and the previous validation, "
        f"{before:.1f} %, was also low: check the labels, the learning rate and your code changes; "
        "training continues, Ctrl-C stops it"
    )
    assert found.warning((2, now), (1, before)) is None
    text = expectation("optim.lr=1").warning((3, 10.0), (2, 10.0))
    assert text and "check the labels and what differs from the recipe (optim.lr=1);" in text


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ((1, 0.0), (None, 0.0)),  # the first one
        ((2, 0.0), (1, limit(1, 2) + 0.1)),
        ((3, limit(3, 3) + 0.1), (2, 0.0)),
        ((None, 0.0), (2, 0.0)),  # the run stops within an epoch
    ],
)
def test_a_single_low_validation_is_not_a_warning(
    now: tuple[int | None, float], before: tuple[int | None, float]
) -> None:
    assert expectation().warning(now, before) is None


# The recipes.


@pytest.mark.parametrize("recipe", group_names("recipe"))
def test_the_expectation_of_a_recipe_is_sound_and_documented(recipe: str) -> None:
    """docs/accuracy.md has a row of exactly these facts, README.md the rounded accuracy."""
    config = cli.load([f"recipe={recipe}", "data.root=/data"])
    if config.expect is None:
        pytest.skip("the recipe states no accuracy")
    expect = Expect.parse(config.expect)
    assert 0 <= expect.top1 <= 100 and expect.status in STATUSES
    curve = expect.reference
    if curve is not None:
        assert curve.runs >= 5
        assert len(curve.top1) == len(curve.std) == config.train.epochs
        assert abs(curve.top1[-1] - expect.top1) <= expect.spread  # the curve may be of fewer runs
        assert expect.status == "reproduced here"
    text = (FOLDER / "recipe" / f"{recipe}.yaml").read_text()
    (command,) = re.findall(r"^#   (python train\.py .*)$", text, re.MULTILINE)
    spread = "" if expect.spread is None else f" +/- {expect.spread:g}"
    cells = [
        f"`{command}`",
        f"{expect.train_images:,} images, {expect.classes:,} classes",
        expect.hardware,
        expect.time,
        f"{expect.top1:g}{spread}",
        expect.source,
        expect.status,
    ]
    row = f"| {' | '.join(cells)} |"
    table = (FOLDER.parent / "docs" / "accuracy.md").read_text().splitlines()
    assert row in table, f"docs/accuracy.md: replace the row of the recipe by {row}"
    readme = (FOLDER.parent / "README.md").read_text().splitlines()
    (line,) = [line for line in readme if line.startswith(f"| `{recipe}`")]
    assert f" {expect.top1:.1f}" in line, f"README.md: the recipe's row must say {expect.top1:.1f}"


def test_an_expectation_is_not_a_key() -> None:
    """It is neither typed nor written to config.yaml, and does not change the name of a run."""
    config = cli.load(["data.root=/imagenet"])
    assert config.expect is not None and "expect" not in cli.to_yaml(config)
    with pytest.raises(UserError, match=r"there is no key expect\.top1"):
        cli.load(["data.root=/imagenet", "expect.top1=3"])


@pytest.mark.parametrize("node", [{"top1": 70.0}, {**FACTS, "top3": 3}, {**FACTS, "reference": 1}])
def test_a_wrong_expectation(node: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^expect: .*; correct this node of the recipe's file"):
        Expect.parse(node)
