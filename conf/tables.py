"""The names in tables of this program and of torchvision, read from the text of their modules.

An import would load torch, and answer a misspelled name some seconds later.
"""

from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path

from conf.errors import UserError, did_you_mean
from conf.named import module_files, split_entry
from conf.schema import Config

TRANSFORM = "{0}: there is no transform {1}; choose from {2}"
METRIC = "a validation has no such value; give one of {2}, with - in front if lower is better"
MODEL = "no such model; write timm/{1} for a model of timm, module:function for yours; ours: {2}"
# Key -> its table, and the error of a name that is not in it: {0} key, {1} name, {2} names
TABLES = {
    "augment.train": ("pipeline.data.augment:TRANSFORMS", TRANSFORM),
    "augment.val": ("pipeline.data.augment:TRANSFORMS", TRANSFORM),
    "augment.batch": ("pipeline.feed.batch_augment:BATCH_TRANSFORMS", TRANSFORM),
    "train.loss": ("engine.losses:LOSSES", "{0}={1}: not allowed; give {2}"),
    "train.best_by": ("engine.metrics:METRICS", "{0}={1}: " + METRIC),
    "model.name": ("models.zoo:OURS", "{0}={1}: " + MODEL),
}


def check_names(config: Config, stored: Collection[str]) -> list[UserError]:
    """Return the errors of names that no table has; `module:name`, timm/NAME and v2.NAME pass.

    stored: keys that a checkpoint holds. Another version may have had their names.
    """
    values = map(table_names, ["train:", *config.log.values])  # any text of train.py
    others = {"train.best_by": [*chain(*values)], "model.name": torchvision_models()}
    errors = []
    for key in sorted(TABLES.keys() - stored):
        table, text = TABLES[key]
        names = table_names(table)
        if not names:  # the table is written in another way
            continue
        known = names + others.get(key, [])
        value = attrgetter(key)(config)
        entries = value if isinstance(value, list) else [value]
        found = {split_entry(entry, key)[0].removeprefix("-") for entry in entries}
        for name in sorted({*filter(str.isidentifier, found)}.difference(known)):
            wrong = text.format(key, name, ", ".join(names)) + did_you_mean(name, known)
            errors.append(UserError(wrong))
    return errors


@cache
def table_names(table: str) -> list[str]:
    """Return the names in `module:TABLE`: the quoted words of the statements that begin so."""
    text = module_files(table)[0].read_text(encoding="utf-8")
    parts = text.split("\n" + table.partition(":")[2])[1:]
    statements = " ".join(part.partition("}\n")[0] for part in parts)
    return [*filter(str.isidentifier, statements.split('"')[1::2])]


@cache
def torchvision_models() -> list[str]:
    """Return the decorated functions of torchvision.models: all that build a model are."""
    folder = Path(find_spec("torchvision").origin).with_name("models")  # type: ignore
    text = b"\n".join(map(Path.read_bytes, folder.glob("*.py"))).decode()
    return [part.partition("(")[0] for part in text.split(")\ndef ")[1:]]
