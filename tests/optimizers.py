"""The optimisers of `optim=` whose code is there."""

from conf import cli
from conf.named import is_name, is_there
from conf.schema import Optim, group_names

OPTIMIZERS: dict[str, Optim] = {}
"""Choice of the group -> its values."""
for choice in group_names("optim"):
    found = cli.load(["data=fake", f"optim={choice}"]).optim
    if not is_name(found.name) or is_there(found.name):
        OPTIMIZERS[choice] = found
