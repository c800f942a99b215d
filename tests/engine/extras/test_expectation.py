"""How a run is compared with its recipe: words, limits, and the runs that are not compared."""

import re
from dataclasses import asdict, replace
from statistics import NormalDist

import numpy as np
import pytest

from conf import cli
from conf.schema import FOLDER, Config, Expect, Reference, UserError, check_expect, group_names
from engine.extras.expectation import LEAST_STD, Expectation, band, compare, quantile, sentence

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


def expectation(
    *overrides: str, curve: Reference | None = CURVE, continues: bool = False, **data: int
) -> Expectation:
    config = cli.load(["data.root=/imagenet", *overrides])
    config = replace(config, expect=replace(PUBLISHED, reference=curve))
    return Expectation(config, **(DATA | data), continues=continues)


@pytest.mark.parametrize(
    ("top1", "text"),
    [
        (76.234, "76.23 %: within 76.1 +/- 0.2"),
        (75.9, "75.90 %: within 76.1 +/- 0.2"),
        (75.2, "75.20 %: 0.90 points below 76.1 +/- 0.2"),
        (76.5, "76.50 %: 0.40 points above 76.1 +/- 0.2"),
    ],
)
def test_the_sentence_at_the_end(top1: float, text: str) -> None:
    found = sentence(compare(PUBLISHED, top1), top1)
    assert found == f"accuracy {text} (published, torchvision IMAGENET1K_V1)"


def test_a_source_without_a_spread() -> None:
    expect = replace(PUBLISHED, spread=None)
    assert sentence(compare(expect, 76.0), 76.0) == (
        "accuracy 76.00 %: 0.10 points below 76.1 (published, torchvision IMAGENET1K_V1, spread "
        "unknown)"
    )


def test_the_summary_has_the_facts_without_the_curve() -> None:
    facts = {k: v for k, v in asdict(PUBLISHED).items() if k != "reference"}
    expect = replace(PUBLISHED, reference=CURVE)
    assert compare(expect, 76.0) == {**facts, "difference": -0.1, "verdict": "within"}


# Which runs are compared.


def compared(found: Expectation) -> tuple[bool, bool]:
    """Return whether a run is compared at its end, and after each epoch."""
    return found.final is not None, found.reference is not None


def test_what_the_user_and_the_machine_choose_does_not_matter() -> None:
    free = ["train.seed=3", "train.precision=fp32", "loader.workers=2", "loader.decoder=gpu"]
    free += ["data.train=/elsewhere", "train.max_steps=9", "run.name=mine", "log.every_steps=1"]
    assert compared(expectation(*free)) == (True, True)


@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=91",
        "model.name=resnet18",
        "loader.batch_size=512",
        "train.label_smoothing=0.1",
    ],
)
def test_a_changed_recipe_is_not_compared(override: str) -> None:
    assert compared(expectation(override)) == (False, False)


def test_another_learning_rate_is_compared_with_the_curve_only() -> None:
    assert compared(expectation("optim.lr=1")) == (False, True)
    assert compared(expectation("optim=adamw")) == (False, True)
    assert compared(expectation("optim.lr=1", "train.epochs=91")) == (False, False)


@pytest.mark.parametrize("name", DATA)
def test_other_data_are_not_compared(name: str) -> None:
    assert compared(expectation(**{name: DATA[name] - 1})) == (False, False)


def test_a_run_that_continues_another_one_is_not_compared() -> None:
    assert compared(expectation(continues=True)) == (False, False)


def test_a_recipe_without_a_curve() -> None:
    found = expectation(curve=None)
    assert compared(found) == (True, False)
    assert found.columns(1) == {} and found.warning((2, 0.0), (1, 0.0)) is None


def test_a_config_without_an_expectation() -> None:
    assert compared(Expectation(Config(), **DATA)) == (False, False)


# The limits.


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.95, 1, 6.314), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.99, 19, 2.539), (0.999, 7, 4.785)],
)
def test_quantiles_of_the_t_distribution(probability: float, freedom: int, value: float) -> None:
    """The values of the printed tables."""
    assert quantile(probability, freedom) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("runs", [5, 10, 20])
def test_one_good_run_of_740_is_below(runs: int) -> None:
    """As often as a value is 3 sigma below a known mean, however few runs there are."""
    values = np.random.default_rng(runs).normal(50, 2, size=(400_000, runs + 1))
    means, stds = values[:, :runs].mean(1), values[:, :runs].std(1, ddof=1)
    limit = band(50, 2, runs)
    width = (limit.mean - limit.low) / limit.std
    share = (values[:, runs] < means - width * stds).mean()
    assert share == pytest.approx(NormalDist().cdf(-3), rel=0.2)
    assert (values[:, runs] < means - 3 * stds).mean() > 1.5 * NormalDist().cdf(-3)


def test_a_tiny_deviation_may_be_chance() -> None:
    assert band(60, 0.0, 20) == replace(band(60, LEAST_STD, 20), std=0.0)


def test_the_band_ends_at_0_and_100() -> None:
    assert (band(98, 3, 5).high, band(2, 3, 5).low) == (100, 0)


def test_columns_of_a_validation() -> None:
    expected = band(40, 2, 20)
    assert expectation().columns(2) == {
        "reference_top1": 40,
        "reference_top1_min": expected.low,
        "reference_top1_max": expected.high,
    }
    assert expectation().columns(None) == {}  # the run stops within an epoch
    assert expectation().columns(4) == {}  # the curve is shorter


# The warning.


def limit(epoch: int, sigmas: float) -> float:
    return band(CURVE.top1[epoch - 1], CURVE.std[epoch - 1], CURVE.runs, sigmas).low


def test_two_low_validations_in_a_row_are_a_warning() -> None:
    """The second is more than 3 sigma below, the first more than 2."""
    now, before = limit(2, 3) - 0.1, limit(1, 2) - 0.1
    assert expectation().warning((2, now), (1, before)) == (
        f"top1 {now:.1f} % after epoch 2 is below the 3 sigma limit of this recipe, "
        f"{limit(2, 3):.1f} (20 runs reached 40.0 +/- 2.0), and the previous validation, "
        f"{before:.1f} %, was also low: check the labels, the learning rate and your code changes; "
        "training continues, Ctrl-C stops it"
    )


def test_a_single_low_validation_is_not_a_warning() -> None:
    found = expectation()
    assert found.warning((1, 0.0), (None, 0.0)) is None  # the first one
    assert found.warning((2, 0.0), (1, limit(1, 2) + 0.1)) is None
    assert found.warning((3, limit(3, 3) + 0.1), (2, 0.0)) is None
    assert found.warning((None, 0.0), (2, 0.0)) is None  # the run stops within an epoch


def test_a_run_is_warned_about_once_and_the_changed_key_is_named() -> None:
    found = expectation("optim.lr=1")
    text = found.warning((3, 10.0), (2, 10.0))
    assert (
        text is not None
        and "check the labels and what differs from the recipe (optim.lr=1);" in text
    )
    assert found.warning((3, 10.0), (2, 10.0)) is None


# The recipes.


@pytest.mark.parametrize("recipe", group_names("recipe"))
def test_the_expectation_of_a_recipe_is_sound_and_documented(recipe: str) -> None:
    """docs/accuracy.md has a row of exactly these facts, README.md the rounded accuracy."""
    config = cli.load([f"recipe={recipe}", "data.root=/data"])
    expect = config.expect
    if expect is None:
        pytest.skip("the recipe states no accuracy")
    check_expect(expect)
    assert all([expect.source, expect.hardware, expect.time, expect.classes > 1])
    assert expect.train_images > expect.val_images > 0
    curve = expect.reference
    if curve is not None:
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top1": 100.5}, "expect.top1 of the recipe: not allowed; give a number >= 0"),
        ({"status": "proven"}, "expect.status of the recipe: not allowed; give one of published"),
        ({"spread": -1.0}, "expect.spread of the recipe: not allowed"),
        ({"reference": replace(CURVE, runs=4)}, "expect.reference.runs of the recipe: not allowed"),
        ({"reference": replace(CURVE, std=[1.0])}, "expect.reference.std .* a list of 3 values"),
    ],
)
def test_a_wrong_expectation_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        check_expect(replace(PUBLISHED, **change))  # type: ignore[arg-type]


def test_an_expectation_is_not_a_key() -> None:
    """It is neither typed nor written to config.yaml, and does not change the name of a run."""
    config = cli.load(["data.root=/imagenet"])
    assert config.expect is not None and "expect" not in cli.to_yaml(config)
    with pytest.raises(UserError, match=r"there is no key expect\.top1"):
        cli.load(["data.root=/imagenet", "expect.top1=3"])
