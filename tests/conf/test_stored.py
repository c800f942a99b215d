"""The config of a checkpoint with overrides, and the arguments of scripts that take files."""

from pathlib import Path
from typing import Any

import pytest

from conf import cli
from conf.compose import load
from conf.schema import UserError, config_values


@pytest.fixture
def values() -> dict[str, Any]:
    return config_values(load(["recipe=imagenet_rn50_fast", "data.root=/images"]))


def test_config_is_unchanged(values: dict[str, Any]) -> None:
    assert config_values(load(stored=values)) == values


def test_sizes_follow_the_key(values: dict[str, Any]) -> None:
    config = load(["data.val_size=288"], stored=values)
    assert config.augment.val == [
        {"resize": {"size": 288, "crop_ratio": 0.875}},
        {"center_crop": {"size": 288}},
    ]
    assert config.data.image_size == 192


def test_both_sides_of_a_squash_follow_the_key(values: dict[str, Any]) -> None:
    squash = [{"resize": {"size": [256, 256]}}]
    config = load(["data.val_size=288"], stored={**values, "augment.val": squash})
    assert config.augment.val == [{"resize": {"size": [288, 288]}}]


def test_other_entries_are_kept(values: dict[str, Any]) -> None:
    entries = ["v2.RandomInvert", {"resize": {"size": 300}}, {"center_crop": {"size": 256}}]
    config = load(["data.val_size=288"], stored={**values, "augment.val": entries})
    assert config.augment.val == [*entries[:2], {"center_crop": {"size": 288}}]


def test_overrides(values: dict[str, Any]) -> None:
    config = load(
        stored=values, overrides=["augment=demo", "data.root=/other", "data.mean=[0,0,0]"]
    )
    assert config.augment.val[0] == {"resize": {"size": 256}}
    assert (config.data.root, config.data.mean) == ("/other", [0, 0, 0])
    for override, message in {
        "optim.lrr=1": "there is no key",
        "data.val_size=7": "not allowed",
        "data.mean=[0]": "not allowed",
        "recipe=demo": "the checkpoint holds the whole config",
    }.items():
        with pytest.raises(UserError, match=message):
            load([override], stored=values)


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "${data.val}", 5.5, [1], {"a": 1}])
def test_stored_values_are_not_resolved(values: dict[str, Any], value: Any) -> None:
    with pytest.raises(UserError, match=r"^data\.image_size"):
        load(stored={**values, "data.image_size": value})


def test_keys_of_other_versions(values: dict[str, Any]) -> None:
    del values["data.on_error"]
    assert load(stored={**values, "data.former": 3, "ranks": 8}).data.on_error == "raise"


def test_paths_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run,optim.lr=0.3").mkdir()
    Path("a.pth").touch()
    words = ["run,optim.lr=0.3", "data.val_size=64", "a.pth", "augment=demo"]
    assert cli.split_paths(words, what="a file") == (
        ["run,optim.lr=0.3", "a.pth"],
        ["data.val_size=64", "augment=demo"],
    )
    for word, message in {
        "gone.pth": "^gone.pth: no such file or folder; give a file$",
        "run,optim.lr=0.4": "^run,optim.lr=0.4: ",
        "data.root": "^data.root: is not key=value; write data.root=VALUE$",
        "demo": "^demo: is not key=value; write recipe=demo$",
        "data.rot=x": "did you mean data.root",
        "data.val_size=x": "not allowed",
        "--lr=3": "write optim.lr=3",
    }.items():
        with pytest.raises(UserError, match=message):
            cli.split_paths(["a.pth", word], what="a file")
