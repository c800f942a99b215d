"""TensorBoard's tab HPARAMS: a row for each run, with the keys that affect its result.

By default, conf/config.yaml names it: log.observers=[extras.hparams:HParams].
"""

from collections.abc import Mapping
from typing import Any

from conf.schema import result_keys, show
from engine.log.observer import Observer


class HParams(Observer):
    """Writes the row at each validation, with the best value so far. A resumed run has one row."""

    def validated(self, row: Mapping[str, Any], rows: Any) -> None:
        config, name = self.log.config, self.log.metrics.best_by.name
        keys = {"recipe": config.recipe, **result_keys(config)}

        def add(board: Any) -> None:
            from torch.utils.tensorboard.summary import hparams

            typed = {k: v if type(v) in (int, float) else show(v) for k, v in keys.items()}
            # Without the first part, which lists all keys, the tab begins with those that differ.
            board.file_writer.add_summary(hparams(typed, {})[1])
            board.add_scalar(f"best/{name}", self.log.state.best_validation[name], row["step"])

        self.log.tracker.write_board("HPARAMS", add)
