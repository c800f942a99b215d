"""Layers of a config; commands share a run directory if and only if they train the same."""

import shlex
from typing import Any

import pytest

from conf.compose import NAME_LENGTH, from_checkpoint, from_words
from conf.schema import Config, UserError, config_values, result_keys
from tests.conf.refused import offered
from tests.processes import run_python

DATA = "data.root=/imagenet"  # composing does not read it


def composed(typed: str) -> Config:
    return offered([DATA, *shlex.split(typed)])


def name(typed: str = "") -> str:
    return str(composed(typed).run.name)


# Precedence: schema < groups < recipe < typed groups < typed keys.


LAYERS = {
    # A typed group replaces the recipe's section, also the values that it does not set.
    "recipe=imagenet_rn50_tuned optim=adamw": {
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.1,
        "optim.clip_norm": 1,
    },
    "recipe=imagenet_vit_s16 optim=sgd": {"optim.lr": 0.1, "optim.clip_norm": None},
    "recipe=imagenet_rn50_tuned schedule=step": {"schedule.warmup_epochs": 0},
    "recipe=imagenet_rn18 model=vit_s16": {"model.name": "vit_s16"},
    # Other groups keep the values that they do not set: size, normalisation, batch size.
    "recipe=cifar10 data=fake loader=debug": {
        "data.image_size": 32,
        "data.mean": [0.4914, 0.4822, 0.4465],
        "loader.workers": 0,
        "loader.batch_size": 256,
    },
    # A typed length shortens a warm-up that would take more than half of it, unless it is typed.
    "recipe=cifar10 train.epochs=10": {"schedule.warmup_epochs": 1},
    "recipe=cifar10 train.epochs=12": {"schedule.warmup_epochs": 6},
    # A typed key overrides a typed group.
    "optim.lr=0.7 optim=adamw recipe=imagenet_rn50_tuned": {
        "optim.lr": 0.7,
        "optim.weight_decay": 0.1,
    },
    # The recipe overrides groups that are not typed.
    "recipe=imagenet_vit_s16": {"optim.name": "adamw", "data.mean": [0.5, 0.5, 0.5]},
}


@pytest.mark.parametrize("typed", LAYERS)
def test_layers(typed: str) -> None:
    config = composed(typed)
    found = config_values(config)
    assert {name: found[name] for name in LAYERS[typed]} == LAYERS[typed]
    reverse = shlex.join(reversed(shlex.split(typed)))
    assert config == composed(reverse)  # their order does not matter


def test_a_recipe_does_not_have_the_expectation_of_the_one_it_is_based_on() -> None:
    own, base = (composed(f"recipe={name}").expect for name in ("cifar10_long", "cifar10"))
    assert own is not None and base is not None
    assert "reference" in base and "reference" not in own


# The default name.

SAME = [  # pairs of commands that train the same thing
    ("", "recipe=imagenet_rn50"),
    ("", "optim.lr=1e-1 optim=sgd schedule=step model=resnet50 data=folder"),
    ("", "data.root=/imagenet/../imagenet/"),
    ("", "data.val_size=224 data.image_size=224"),
    ("", "'augment.train=[{random_resized_crop: {size: 224}}, horizontal_flip]'"),
    ("", "loader.workers=3 loader.prefetch_batches=2"),
    ("", "loader.decoder=pillow loader.timeout_seconds=5 loader.start_method=spawn"),
    ("", "train.max_steps=100 checkpoint.every_steps=7 checkpoint.keep=1"),
    ("", "log.every_steps=1 log.trackers=[] log.observers=[]"),
    ("", "train.deterministic=true model.compile=off train.device=cpu data.on_error=skip"),
    ("data.image_size=64", "data.image_size=64 data.val_size=64"),
    ("optim=adamw", "optim=adamw optim.lr=0.001"),
    ("model.weights=/a/b.pth", "model.weights=/a/../a/b.pth loader.workers=2"),
    ("data.val=test", "data.val=./test/"),
]
FORKED = "optim.name=engine.optim:decay_groups"  # code of a fork
OTHER = [  # pairs that train different things; tests/equal has more names
    ("", "data.root=/imagenet2"),
    ("", "data.val=/elsewhere/other"),
    ("", "checkpoint.resume=/runs/a/checkpoints/step-00000010.pt"),
    ("data.fake_images=1234567 data=fake", "data.fake_images=1234568 data=fake"),
    ("data.image_size=176", "data.image_size=176 data.val_size=224"),
    ("data.mean=[0,0,0.5]", "data.mean=[0,0.5,0]"),
    ("model.weights=/a/b-c.pth", "'model.weights=/a/b c.pth'"),
    ("model.weights=pretrained", ""),
    ("optim=adamw", "optim.name=adamw"),
    ("optim=adamw", "optim=adamw optim.betas=[0.9,0.99]"),
    (FORKED, f"{FORKED} optim.betas=[0.9,0.99]"),
    (FORKED, f"{FORKED} optim.momentum=0.5"),
    ("loader.decoder=hybrid", "loader.decoder=gpu"),
    ("loader.decoder=hybrid", "loader.decoder=region"),
]
LONG = "optim=adamw augment=strong data.val=/elsewhere/val model=vit_s16 train.epochs=300"
# run_identity holds what these stand for.
IGNORED = ("data.root", "data.val", "loader.decoder", "model.weights")


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_training_has_the_same_directory(one: str, other: str) -> None:
    configs = [composed(one), composed(other)]
    assert configs[0].run == configs[1].run
    first, second = (result_keys(config) for config in configs)
    assert {k: v for k, v in first.items() if k not in IGNORED} == {
        k: v for k, v in second.items() if k not in IGNORED
    }


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_training_has_another_directory(one: str, other: str) -> None:
    first, second = composed(one), composed(other)
    assert first.run.dir != second.run.dir
    assert (
        result_keys(first) != result_keys(second)
        or first.checkpoint.resume != second.checkpoint.resume
    )


NAMES = {
    "": "resnet50,data.root=imagenet",
    "data.root=/copy/imagenet/": "resnet50,data.root=imagenet",
    # Of the default recipe, the model; what a sweep varies is before the data.
    "data.root=/photos model=resnet_tiny": "resnet_tiny,data.root=photos",
    "data.mean=[0,0,0.5]": "resnet50,data.root=imagenet,data.mean=0.0-0.0-0.5,",
    "optim.lr=0.3": "resnet50,optim.lr=0.3,data.root=imagenet",
    "recipe=cifar10 train.seed=9 model=vit_s16": (
        "cifar10,model.name=vit_s16,train.seed=9,data.root=imagenet"
    ),
    # A typed key is before what a group sets.
    "optim=adamw train.epochs=3": "resnet50,train.epochs=3,data.root=imagenet,",
    # What does not fit is left out, and a hash of everything follows.
    LONG: "vit_s16,train.epochs=300,data.root=imagenet,",
    "model.name=timm/resnet18": "timm-resnet18,data.root=imagenet,",
    "model.name=a_model_of_" + 70 * "x": "a_model_of_" + 49 * "x" + ",",
}


@pytest.mark.parametrize("typed", NAMES)
def test_names_are_for_a_person(typed: str) -> None:
    """At most 60 characters and a hash; and each can be typed."""
    found = name(typed)
    assert found.startswith(NAMES[typed]) and len(found) <= NAME_LENGTH + 9
    assert (found == NAMES[typed]) == (NAMES[typed][-1] != ",")
    config = from_words([DATA, f"run.name={found}", f"run.dir=runs/{found}"])
    assert (config.run.name, config.run.dir) == (found, f"runs/{found}")


def test_the_name_is_the_same_in_every_process() -> None:
    """The order of a set of strings differs between processes, but ranks need the same name."""
    code = "import sys; from conf.compose import from_words as of; print(of(sys.argv[1:]).run.name)"
    done = run_python("-c", code, DATA, *LONG.split(), PYTHONHASHSEED="1")
    assert done.stdout.strip() == name(LONG)


# The config of a checkpoint with overrides.


@pytest.fixture
def values() -> dict[str, Any]:
    return config_values(offered(["recipe=imagenet_rn50_fast", "data.root=/images"]))


def test_a_stored_config_is_unchanged(values: dict[str, Any]) -> None:
    assert config_values(from_checkpoint(values)) == values
    del values["data.on_error"]  # of another version
    assert from_checkpoint({**values, "data.former": 3, "ranks": 8}).data.on_error == "raise"


def test_sizes_follow_the_key(values: dict[str, Any]) -> None:
    assert values["data.val_size"] == 256
    entries = [
        "v2.RandomInvert",
        {"resize": {"size": 300}},
        {"resize": {"size": [256, 256]}},
        {"resize": {"size": 256, "crop_ratio": 0.875}},
    ]
    config = from_checkpoint({**values, "augment.val": entries}, ["data.val_size=288"])
    assert config.augment.val == [
        *entries[:2],
        {"resize": {"size": [288, 288]}},
        {"resize": {"size": 288, "crop_ratio": 0.875}},
    ]
    assert config.data.image_size == 192


def test_overrides_of_a_stored_config(values: dict[str, Any]) -> None:
    config = from_checkpoint(values, ["augment=demo", "data.root=/other", "data.mean=[0,0,0]"])
    assert config.augment.val[0] == {"resize": {"size": 256}}
    assert (config.data.root, config.data.mean) == ("/other", [0, 0, 0])
    for override, message in {
        "optim.lrr=1": "there is no key",
        "data.val_size=7": "not allowed",
        "recipe=demo": "the checkpoint holds the whole config",
    }.items():
        with pytest.raises(UserError, match=message):
            from_checkpoint(values, [override])


@pytest.mark.parametrize("value", ["${oc.env:HOME}", 5.5, [1], {"a": 1}])
def test_stored_values_are_checked(values: dict[str, Any], value: Any) -> None:
    says = "only" if isinstance(value, str) else "not allowed"
    with pytest.raises(UserError, match=rf"data\.image_size=.*: {says}"):
        from_checkpoint({**values, "data.image_size": value})


def test_paths_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/images")
    config = from_words(
        ["data.root=${oc.env:FOLDER}/more", "run.dir=${oc.env:NONE,/runs}/${now:%Y}"]
    )
    assert config.data.root == "/images/more"
    assert config.run.dir.startswith("/runs/20")
