"""train.py with the task of these tests, so that a fork's own task does not change them.

python tests/toy.py KEY=VALUE ...
"""

import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.argv[0], sys.path[0] = str(root / "train.py"), str(root)
    from conf.start import start

    CONFIG = start("Train on a toy task.")

from torch import Tensor, nn

import train
from conf.launch import exit_with
from engine.losses import Criterion
from engine.scores import class_means, class_values
from pipeline.prefetcher import Batch

Values = dict[str, Tensor]


def training_loss(
    network: nn.Module, batch: Batch, criterion: Criterion = nn.functional.cross_entropy
) -> tuple[Tensor, Values]:
    """In place of `train.training_loss`."""
    labels = batch["label"]
    targets = batch.fields.get("target", labels)
    logits = network(batch["image"]).float()
    return criterion(logits, targets), class_means(logits, targets, labels)


def validation_values(network: nn.Module, batch: Batch) -> Values:
    """In place of `train.validation_values`."""
    return class_values(network(batch["image"]).float(), batch["label"])


TASK = {"training_loss": training_loss, "validation_values": validation_values}

if __name__ == "__main__":
    vars(train).update(TASK)
    exit_with(partial(train.main, CONFIG))
