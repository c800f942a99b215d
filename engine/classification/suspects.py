"""Training images whose label may be wrong: those that the model keeps getting wrong.

Each step adds the loss of every image to a table on the device. A network learns what most images
of a class show before it learns single exceptions (arXiv 1706.05394), so a wrong label has a high
loss for most of the training. The end of a run writes the images with the highest mean loss into
suspects.csv.
"""

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from conf.escape import write_csv
from engine.distributed import World
from engine.losses import UNIT
from pipeline.class_names import readable
from pipeline.dataset import Dataset

# suspects.csv lists this share of the images, but at least FEWEST.
SHARE, FEWEST = 0.02, 100


class SampleLosses(nn.Module):
    """The mean loss of each training image in the second half of the training.

    The table holds integers: their sums do not depend on the order, so they are the same for any
    number of ranks, after a restart, and with the atomic additions of a GPU. Each rank adds its own
    images; `collect` moves all sums to rank 0.

    Args:
        images, classes: numbers of training images and of classes.
        first_epoch: the first epoch that counts, as numbered in the samples.
    """

    sums: Tensor  # int32 [images, 2], the sum of the losses in 1/UNIT, and their number
    # int32 [images], the last epoch that counted * classes + the class predicted in it; -1 if none
    latest: Tensor

    def __init__(
        self, images: int, classes: int, *, first_epoch: int, device: torch.device
    ) -> None:
        super().__init__()
        self.classes, self.first_epoch = classes, first_epoch
        self.register_buffer("sums", torch.zeros(images, 2, dtype=torch.int32, device=device))
        self.register_buffer("latest", torch.full((images,), -1, dtype=torch.int32, device=device))

    def add(self, samples: Tensor, per_image: Tensor, unless: Tensor | float = 0) -> None:
        """Add a batch. Nothing here waits for the device.

        Args:
            samples: int64 [B, 2], the (epoch, index) of each image.
            per_image: int32 [B, 3], from `engine.losses.image_losses`.
            unless: float32 [], 1 to add nothing, else 0.
        """
        epochs, indices = samples.unbind(1)
        _, counts, guesses = per_image.unbind(1)
        late = (epochs >= self.first_epoch) & (unless == 0)
        self.sums.index_add_(0, indices, per_image[:, :2] * late[:, None])
        predicted = ((epochs * self.classes).int() + guesses).where(late & (counts > 0), -1)
        self.latest.scatter_reduce_(0, indices, predicted, "amax")

    def collect(self, world: World) -> None:
        """Move the sums of all ranks to rank 0, which writes the checkpoint. Collective."""
        world.sum(self.sums)
        world.max(self.latest)
        self.keep_on_rank_0(world)

    def keep_on_rank_0(self, world: World) -> None:
        """Clear the sums of the other ranks, which have the same ones."""
        if not world.is_main:
            self.sums.zero_()

    def csv(self, dataset: Dataset, classes: Sequence[str]) -> str:
        """Return a table of the suspects, the worst first; "" if no loss has counted."""
        assert dataset.labels is not None
        total, count = self.sums.cpu().double().unbind(1)
        known = count.nonzero()[:, 0]
        means = total[known] / count[known] / UNIT
        most = max(FEWEST, round(SHARE * len(total)))
        # A stable sort: equal losses stay in the order of the images.
        order = means.sort(descending=True, stable=True).indices[:most]
        predicted = self.latest.cpu() % self.classes
        rows = [["path", "label", "mean_loss", "predicted", "label_name", "predicted_name"]]
        for index, mean in zip(known[order].tolist(), means[order].tolist(), strict=True):
            label, guess = classes[dataset.labels[index]], classes[int(predicted[index])]
            names = readable(label), readable(guess)
            rows.append([dataset.name(index), label, f"{mean:.3f}", guess, *names])
        file = io.StringIO()
        write_csv(file, rows)
        return file.getvalue() if len(order) else ""
