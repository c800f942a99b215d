"""Precedence of overrides; commands share a run directory if and only if they train the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from conf import cli
from conf.compose import NAME_LENGTH
from conf.schema import (
    NOTHING,
    RESULT,
    SPEED,
    Config,
    UserError,
    affecting,
    differences,
    group_names,
    key,
    walk,
)

ROOT = Path(__file__).parents[2]
DATA = "data.root=/imagenet"


def name(*overrides: str) -> str:
    found = cli.load([DATA, *overrides]).run.name
    assert found is not None
    return found


# Precedence: schema < groups < recipe < typed groups < typed keys.


LAYERS = [
    # A typed group replaces the recipe's section, also the values that it does not set.
    (
        ["recipe=imagenet_rn50_tuned", "optim=adamw"],
        {"optim.name": "adamw", "optim.lr": 1e-3, "optim.weight_decay": 0.1, "optim.clip_norm": 1},
    ),
    (
        ["recipe=imagenet_vit_s16", "optim=sgd"],
        {"optim.name": "sgd", "optim.lr": 0.1, "optim.momentum": 0.9, "optim.clip_norm": None},
    ),
    (
        ["recipe=imagenet_rn50_tuned", "schedule=step"],
        {"schedule.step_epochs": 30, "schedule.warmup_epochs": 0},
    ),
    (["recipe=imagenet_rn18", "model=vit_s16"], {"model.name": "vit_s16"}),
    # A typed key overrides a typed group.
    (
        ["optim.lr=0.7", "optim=adamw", "recipe=imagenet_rn50_tuned"],
        {"optim.name": "adamw", "optim.lr": 0.7, "optim.weight_decay": 0.1},
    ),
    # The recipe overrides groups that are not typed.
    (["recipe=imagenet_vit_s16"], {"optim.name": "adamw", "data.mean": [0.5, 0.5, 0.5]}),
    # Keys may refer to each other.
    (
        ["recipe=demo", "data.image_size=32"],
        {"data.val_size": 32},
    ),
]


@pytest.mark.parametrize(("typed", "expected"), LAYERS)
def test_layers(typed: list[str], expected: dict[str, object]) -> None:
    config = cli.load([*typed, DATA])
    found = {name: value for name, _, value in walk(config)}
    assert {name: found[name] for name in expected} == expected
    assert config == cli.load([*reversed(typed), DATA])  # their order does not matter


def test_groups_keep_values_that_they_do_not_set() -> None:
    """Image size, normalisation and batch size are those of the recipe."""
    cifar = cli.load(["recipe=cifar10", "data=fake", "loader=debug"])
    assert (cifar.data.source, cifar.data.image_size, cifar.data.mean[0]) == ("fake", 32, 0.4914)
    assert (cifar.loader.workers, cifar.loader.batch_size) == (0, 256)


def test_a_recipe_does_not_have_the_expectation_of_the_one_it_is_based_on() -> None:
    own, base = (cli.load([f"recipe={name}", DATA]).expect for name in ("cifar10_96", "cifar10"))
    assert own is not None and base is not None
    assert base.reference is not None and own.reference is None


def test_a_note_lists_the_values_that_a_typed_group_replaces() -> None:
    (note,) = cli.load([DATA, "recipe=imagenet_rn50_tuned", "optim=adamw"]).notes
    assert note.startswith(
        "optim=adamw replaces values of the recipe: optim.lr 1.024 -> 0.001, optim.momentum 0.875"
    )
    assert cli.load([DATA, "recipe=imagenet_rn50_tuned", "optim.lr=1"]).notes == []
    assert cli.load([DATA, "optim=sgd"]).notes == []  # the recipe sets nothing there
    assert (
        cli.load(["recipe=demo", "schedule=cosine", "schedule.warmup_epochs=2"]).notes == []
    )  # typed again
    (note,) = cli.load(["recipe=demo", "schedule=cosine"]).notes
    assert note == "schedule=cosine replaces values of the recipe: schedule.warmup_epochs 2 -> 5"


def test_a_note_lists_the_values_that_a_typed_optimiser_keeps() -> None:
    (note,) = cli.load([DATA, "recipe=imagenet_rn50_tuned", "optim.name=adamw"]).notes
    assert note.startswith("optim.name=adamw keeps optim.lr=1.024, optim.weight_decay=3.05")
    assert note.endswith(" of sgd; write optim=adamw to use its own defaults")
    typed = ["optim.name=adamw", "optim.lr=1e-3", "optim.weight_decay=0.1"]
    assert cli.load([DATA, *typed]).notes == cli.load([DATA, "optim.name=sgd"]).notes == []


def test_the_data_folder_of_the_demo_is_not_used_for_other_data() -> None:
    with pytest.raises(UserError, match=r"data\.root is missing"):
        cli.load(["recipe=demo", "data=folder"])


@pytest.mark.parametrize(
    "model", ["model=vit_s16", "model.name=swin_t", "model.name=timm/deit_small_patch16_224"]
)
def test_a_note_recommends_a_recipe_for_a_transformer_with_sgd(model: str) -> None:
    (note,) = cli.load([DATA, model]).notes
    assert "transformers train poorly with SGD" in note and "recipe=imagenet_vit_s16" in note
    assert "transformers" not in str(cli.load([DATA, model, "optim=adamw"]).notes)


NO_EFFECT = {
    "optim.betas=[0.8,0.9]": "optim.name="
    + " or ".join(n for n in group_names("optim") if n != "sgd"),
    "schedule.step_gamma=0.5": "schedule.name=step",
    "data.fake_images=50": "data.source=fake",
}


@pytest.mark.parametrize("override", NO_EFFECT)
def test_a_typed_key_without_effect_is_refused(override: str) -> None:
    with pytest.raises(UserError) as error:
        cli.load([DATA, "schedule=constant", override])
    assert str(error.value).startswith(f"{override}: has no effect with ")
    assert f"; give {NO_EFFECT[override]}, or leave it out" in str(error.value)


# The default name.

SAME = [  # pairs of override lists that train the same thing
    ([], ["recipe=imagenet_rn50"]),
    ([], ["optim.lr=0.1"]),
    ([], ["optim.lr=1e-1", "optim=sgd", "schedule=step", "model=resnet50", "data=folder"]),
    ([], ["data.root=/imagenet/"]),
    ([], ["data.root=/imagenet/../imagenet"]),
    ([], ["data.val_size=224"]),
    ([], ["data.image_size=224"]),
    ([], ["augment.train=[{random_resized_crop: {size: 224}}, horizontal_flip]"]),
    ([], ["loader.workers=3"]),
    ([], ["autotune.refresh=true", "loader.pin_memory=false", "loader.prefetch_factor=2"]),
    ([], ["loader.decoder=pillow"]),
    ([], ["loader.decoder=simplejpeg", "loader.timeout_seconds=5", "loader.start_method=spawn"]),
    ([], ["train.max_steps=100"]),
    ([], ["checkpoint.every_steps=7", "checkpoint.keep=1"]),
    ([], ["log.every_steps=1", "log.trackers=[]", "profile.steps=[1,2]"]),
    ([], ["train.deterministic=true", "model.compile=off", "train.device=cpu"]),
    ([], ["data.on_error=skip"]),
    (["data.image_size=64"], ["data.image_size=64", "data.val_size=64"]),
    (["recipe=demo", "optim.lr=0.3"], ["optim.lr=0.3", "recipe=demo"]),
    (
        ["recipe=imagenet_rn50_tuned", "optim=adamw"],
        ["recipe=imagenet_rn50_tuned", "optim=adamw", "optim.lr=0.001"],
    ),
    (["model.weights=/a/b.pth"], ["model.weights=/a/../a/b.pth", "loader.workers=2"]),
    (["data.val=test"], ["data.val=./test/"]),
]
OTHER = [  # pairs that train different things
    ([], ["optim.lr=0.3"]),
    (["optim.lr=0.3"], ["optim.lr=0.31"]),
    (["optim.lr=0.1", "train.seed=1"], ["train.seed=2"]),
    ([], ["train.epochs=30"]),
    ([], ["data.root=/imagenet2"]),
    ([], ["data.val=test"]),
    ([], ["data.val=/elsewhere/other"]),
    ([], ["checkpoint.resume=/runs/a/checkpoints/step-00000010.pt"]),
    (["data.fake_images=1234567", "data=fake"], ["data.fake_images=1234568", "data=fake"]),
    (["optim.lr=1234567"], ["optim.lr=1234568"]),
    ([], ["data.image_size=176"]),
    (["data.image_size=176"], ["data.image_size=176", "data.val_size=224"]),
    (["augment=strong"], ["augment=strong", "augment.batch=[]"]),
    (
        ["augment.train=[{random_resized_crop: {size: 9}}]"],
        ["augment.train=[{random_resized_crop: {size: 8}}]"],
    ),
    (["data.mean=[0, 0, 0.5]"], ["data.mean=[0, 0.5, 0]"]),
    (["model.weights=/a/b-c.pth"], ["model.weights=/a/b c.pth"]),
    (["model.weights=pretrained"], []),
    (["model=resnet18"], ["model=vit_s16"]),
    (["optim=adamw"], ["optim.name=adamw"]),
    (["optim=adamw"], ["optim=adamw", "optim.betas=[0.9, 0.99]"]),
    (["loader.decoder=hybrid"], ["loader.decoder=gpu"]),
    (["loader.decoder=hybrid"], ["loader.decoder=region"]),
    (["loader.batch_size=512"], ["loader.batch_size=256"]),
    (["train.ema_decay=0.9999"], ["train.ema_decay=0.999"]),
    (["train.precision=tf32"], ["train.precision=fp32"]),
    (["schedule=cosine"], ["schedule=cosine", "schedule.warmup_epochs=4"]),
    (["recipe=imagenet_rn18"], ["recipe=imagenet_rn50"]),
]
LONG = [
    "optim=adamw",
    "augment=strong",
    "data.val=/elsewhere/val",
    "model=vit_s16",
    "train.epochs=300",
    "train.seed=7",
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_training_has_the_same_directory(one: list[str], other: list[str]) -> None:
    first, second = (cli.load([DATA, *overrides]) for overrides in (one, other))
    assert first.run == second.run
    ignored = (
        "data.root",
        "data.val",
        "loader.decoder",
        "model.weights",
    )  # run_identity holds what these stand for
    values = [
        {k: v for k, v in affecting(config, RESULT).items() if k not in ignored}
        for config in (first, second)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_training_has_another_directory(one: list[str], other: list[str]) -> None:
    first, second = (cli.load([DATA, *overrides]) for overrides in (one, other))
    assert first.run.dir != second.run.dir
    begins = (first.checkpoint.resume, second.checkpoint.resume)
    assert affecting(first, RESULT) != affecting(second, RESULT) or begins[0] != begins[1]


def test_names_are_readable() -> None:
    assert name("optim.lr=0.3") == f"{name()},optim.lr=0.3"
    assert name() == name("data.root=/copy/imagenet/") == "imagenet_rn50,data.root=imagenet"
    assert cli.load(["recipe=demo"]).run.name == "demo"
    assert cli.load(["recipe=demo", "train.epochs=3", "optim.nesterov=false"]).run.name == (
        "demo,optim.nesterov=false,train.epochs=3"
    )
    assert cli.load([DATA, "optim.lr=0.3", "run.name=mine"]).run.dir == "runs/mine"


def test_a_long_name_is_shortened_and_remains_unique() -> None:
    names = {name(*LONG, f"optim.lr={lr}") for lr in ("1e-3", "2e-3", "3e-3")}
    assert len(names) == 3
    for found in names:
        assert len(found) <= NAME_LENGTH + 9
        assert found.startswith("imagenet_rn50,data.root=")
        assert all(part for part in found.split(",")) and "/" not in found


def test_a_name_can_be_typed_literally() -> None:
    for found in (name("optim.lr=0.3"), name(*LONG)):
        assert cli.load([DATA, f"run.name={found}"]).run.name == found
        assert cli.load([DATA, f"run.dir=runs/{found}"]).run.dir == f"runs/{found}"


def test_the_name_is_the_same_in_every_process() -> None:
    """The order of a set of strings differs between processes, but ranks need the same name."""
    code = f"from conf import cli; print(cli.load({[DATA, *LONG]!r}).run.name)"
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == name(*LONG)


def test_a_key_may_refer_to_one_that_refers_to_it_in_the_recipe() -> None:
    data = cli.load([DATA, "data.image_size=${data.val_size}", "data.val_size=176"]).data
    assert (data.image_size, data.val_size) == (176, 176)


# What each key affects.


def test_every_key_states_what_it_affects() -> None:
    """A new key: decide what it affects, and add it here if it does not affect the result."""
    found = {
        what: {n for n, f, _ in walk(Config()) if f.metadata["affects"] == what}
        for what in (NOTHING, SPEED)
    }
    sections = {"checkpoint", "run", "log", "profile", "autotune"}
    assert {n for n in found[NOTHING] if n.split(".")[0] not in sections} == {
        *("data.on_error", "data.max_bad_fraction", "data.max_pixels"),
        *("loader.timeout_seconds", "train.max_steps", "train.validate_every_epochs"),
    }
    assert sections <= {n.split(".")[0] for n in found[NOTHING]}
    loader = ("workers", "pin_memory", "prefetch_factor", "prefetch_batches", "start_method")
    assert found[SPEED] == {
        *(f"loader.{name}" for name in loader),
        *("model.channels_last", "model.compile", "train.deterministic", "train.device"),
    }
    with pytest.raises(TypeError):
        key(1)  # type: ignore[call-arg]


def test_keys_out_of_effect_do_not_affect_the_result() -> None:
    assert "optim.betas" not in affecting(cli.load([DATA]), RESULT)
    adamw = affecting(cli.load([DATA, "optim=adamw"]), RESULT)
    assert "optim.betas" in adamw and "optim.momentum" not in adamw


def test_differences_are_those_that_do_not_affect_the_result() -> None:
    def values(*overrides: str) -> dict[str, object]:
        return {name: value for name, _, value in walk(cli.load(list(overrides)))}

    now = values(
        "data.root=/moved",
        "loader.workers=3",
        "optim.lr=0.5",
        "run.name=other",
        "train.max_steps=7",
    )
    assert differences(values(DATA, "loader.workers=2"), now) == [
        "data.root: /imagenet -> /moved",
        "loader.workers: 2 -> 3",
        "train.max_steps: null -> 7",
    ]
