"""Optimizers of `optim=` whose code is available."""

from contextlib import suppress

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import OptimConfig, group_names

OPTIMIZERS: dict[str, OptimConfig] = {}
"""Choice of the group -> its values."""
for choice in group_names("optim"):
    with suppress(UserError):  # deleted by a fork
        OPTIMIZERS[choice] = from_overrides(["data=fake", f"optim={choice}"]).optim
