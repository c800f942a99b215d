"""The question whose answer loader.workers=auto remembers, and the schema of the config."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from conf import cli
from conf.schema import DATA_FOLDERS, SPEED, Config, config_values, walk
from engine.plan import make_plan
from engine.tune.autotune import tuning_question
from pipeline.build import build_datasets
from tests.engine.plans import ALONE
from tests.small_run import SMALL_RUN

OTHER = """loader.decoder=pillow loader.start_method=spawn model.compile=off train.device=cuda
    model.name=resnet18 optim.name=adamw train.precision=tf32 data.source=fake
    model.rewrite=a:b data.val_fold=2/5"""


def other_value(config: Config, name: str) -> Any:
    """A value of a key that is allowed and not the present one."""
    value: Any = config_values(config)[name]
    values: dict[str, Any] = dict(each.split("=") for each in OTHER.split())
    values |= {"loader.workers": 3, "loader.prefetch_factor": 2}
    if name in values:
        return values[name]
    if value is None:
        return 0.5
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "zero_init_residual": True}
    if isinstance(value, list):
        return [*value, "horizontal_flip"]
    return f"{value}-other" if isinstance(value, str) else value + 1


def test_an_answer_is_remembered_for_every_key_that_affects_speed(image_root: Path) -> None:
    """So that a fork's new key cannot be forgotten, it follows from the schema."""
    config = cli.load([*SMALL_RUN, f"data.root={image_root}"])
    datasets = build_datasets(config)
    first = make_plan(config, datasets, ALONE)

    def question_of(config: Config) -> dict[str, Any]:
        plan = dataclasses.replace(first, config=config)
        return tuning_question(plan, ALONE, datasets.train.fingerprint())

    question = question_of(config)
    assert json.loads(json.dumps(question)) == question  # it is compared with what a file holds
    changed = set()
    for name, field, _ in walk(config):
        section, key = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{key: other_value(config, name)})
        differs = question_of(dataclasses.replace(config, **{section: part})) != question
        speed = field.metadata["affects"] & SPEED
        if speed and name not in DATA_FOLDERS and not field.metadata["when"]:
            assert differs, name
            changed.add(name)
        elif not speed:
            assert not differs, name
    assert {"augment.batch", "optim.clip_norm", "train.ema_decay", "loader.workers"} <= changed
    assert "optim.lr" not in changed and "train.seed" not in changed
