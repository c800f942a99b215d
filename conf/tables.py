"""The names in tables of this program and of torchvision, read from the text of their modules.

An import would load torch, and answer a misspelled name some seconds later.
"""

from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from conf.errors import UserError, did_you_mean
from conf.named import module_files, split_entry
from conf.schema import Config

NO_TRANSFORM = "{}: there is no transform {}; choose from {}"
NO_METRIC = (
    "{}={}: a validation has no such value; give one of {}, with - in front if lower is better"
)
NO_MODEL = "{0}={1}: no such model; write timm/{1} for a model of timm, module:function for yours"
# Key -> its table, and the error of a name that is not in it, of (key, name, names)
TABLES = {
    "augment.train": ("pipeline.data.augment:TRANSFORMS", NO_TRANSFORM),
    "augment.val": ("pipeline.data.augment:TRANSFORMS", NO_TRANSFORM),
    "augment.batch": ("pipeline.feed.batch_augment:BATCH_TRANSFORMS", NO_TRANSFORM),
    "train.loss": ("engine.losses:LOSSES", "{}={}: not allowed; give {}"),
    "train.best_by": ("engine.metrics:METRICS", NO_METRIC),
    "model.name": ("models.zoo:OURS", NO_MODEL + "; ours: {2}"),
}


def check_names(config: Config) -> list[UserError]:
    """Return the errors of names that no table has; `module:name`, timm/NAME and v2.NAME pass."""
    others = {
        "train.best_by": table_names("train:", *config.log.values),  # any text of train.py
        "model.name": torchvision_models(),
    }
    errors = []
    for key, (table, text) in TABLES.items():
        names = table_names(table)
        known = names + others.get(key, [])
        value = attrgetter(key)(config)
        for entry in value if isinstance(value, list) else [value]:
            name = split_entry(entry, key)[0].removeprefix("-")
            if name.isidentifier() and name not in known:
                near = did_you_mean(name, known)
                errors.append(UserError(text.format(key, name, ", ".join(names)) + near))
    return errors


@cache
def table_names(*tables: str) -> list[str]:
    """Return the names in tables `module:TABLE`: the quoted words of statements that begin so."""
    words: list[str] = []
    for table in tables:
        name = table.partition(":")[2]
        text = module_files(table)[0].read_text(encoding="utf-8")
        statements = [part.partition("}\n")[0] for part in text.split(f"\n{name}")[1:]]
        words += " ".join(statements).split('"')[1::2]
    return [*filter(str.isidentifier, words)]


@cache
def torchvision_models() -> list[str]:
    """Return the functions of torchvision.models that are decorated, as all that build one are."""
    folder = Path(find_spec("torchvision").origin).with_name("models")  # type: ignore
    files = folder.glob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return [part.partition("(")[0] for part in text.split(")\ndef ")[1:]]
