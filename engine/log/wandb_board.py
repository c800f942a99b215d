"""Optional: send a run to Weights & Biases, https://docs.wandb.ai.

wandb's own process reads the event files of TensorBoard and sends what they hold: no call here is
part of training. wandb reads its own environment variables, such as WANDB_PROJECT and WANDB_MODE.
"""

import logging
import uuid
from collections.abc import Callable
from pathlib import Path

from conf.files import read_text
from conf.schema import RESULT, Config, affecting
from engine.checkpoint import replace_file

logger = logging.getLogger(__name__)

WAIT_SECONDS = 30  # for a server that does not answer, at the start and at the end


def open_wandb(folder: Path, config: Config) -> Callable[[], None]:
    """Start or continue the run whose ID is in a run directory, before TensorBoard opens its files.

    Return the function that ends the run, after TensorBoard has closed its files.
    """
    import wandb

    path = folder / "wandb" / "id"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        replace_file(path, uuid.uuid4().hex[:16])
    # Silent: without a login, an error instead of a question on the terminal.
    limits = {"init_timeout": WAIT_SECONDS, "finish_timeout": WAIT_SECONDS}
    settings = wandb.Settings(silent=True, console="off", **limits)
    wandb.setup(settings=settings)
    run = wandb.init(
        dir=str(folder),
        id=read_text(path).strip(),
        name=folder.resolve().name[:128],  # the most that the server takes
        resume="allow",
        config={"recipe": config.recipe, **affecting(config, RESULT)},
        allow_val_change=True,  # keys that may change when a run resumes
        sync_tensorboard=True,
        settings=settings,
    )
    offline = f"offline; `wandb sync {Path(run.dir).parent}` sends it"
    logger.info("Weights & Biases: %s", run.url or offline)
    return run.finish
