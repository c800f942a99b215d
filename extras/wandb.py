"""Send a run's rows to Weights & Biases, https://docs.wandb.ai, from a separate process.

    pip install wandb
    python train.py data.root=/imagenet log.observers=[extras.wandb:WandB]

wandb reads its own environment variables, such as WANDB_PROJECT and WANDB_MODE.
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.schema import result_keys
from engine.files import replace_file
from engine.log.observer import ObservedRun, Observer
from engine.log.tracker import curves


class WandB(Observer):
    """Start or continue the run with the ID in the run directory, and send each row."""

    def __init__(self, log: ObservedRun) -> None:
        from wandb import Settings, init, setup  # scripts/evaluate.py needs no wandb

        folder, config = log.path, log.config
        path = folder / "wandb" / "id"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            replace_file(path, uuid.uuid4().hex[:16])
        # With `silent`, a missing login is an error instead of a prompt on the terminal.
        settings = Settings(silent=True, console="off", init_timeout=30, finish_timeout=30)
        setup(settings=settings)
        self.run = init(
            dir=str(folder),
            id=path.read_text("utf-8").strip(),
            name=folder.resolve().name[:128],  # the server's limit
            resume="allow",
            config={"recipe": config.recipe, **result_keys(config)},
            allow_val_change=True,  # keys that may change when a run resumes
            settings=settings,
        )
        # Use our step as the axis of all curves. wandb's step never decreases, so after a kill it
        # would reject the rows of repeated steps.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        offline = f"offline; `wandb sync {Path(self.run.dir).parent}` sends it"
        log.tracker.print(f"wandb     {self.run.url or offline}")

    def logged(self, row: Mapping[str, Any]) -> None:
        self.run.log({"step": row["step"], **curves(row)})

    def close(self) -> None:
        self.run.finish()
