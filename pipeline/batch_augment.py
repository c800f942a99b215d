"""Transforms of a whole training batch on the device, written as an ordered list in the config.

Journey of a batch, 5: runs on the prefetcher's side stream, after normalisation. A transform is a function of
(images, targets, rng) with float32 images [B, 3, S, S] and targets float32 [B, classes], whatever decoded them and whatever
the training dtype is; the prefetcher rounds to that dtype once, after the last transform. Parameters are drawn on the host, one
set per image, from a generator that is a pure function of (seed, step, rank), so a GPU and a CPU see the same draws.
Numbers for every pixel come from `torch.Generator(images.device).manual_seed(int(rng.integers(2**63)))`: torch's global
generator would give others after a restart.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.parameters import number, positive, span

BatchTransform = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]


def batch_rng(seed: int, step: int, rank: int) -> np.random.Generator:
    """The generator of one batch's transforms."""
    return np.random.Generator(np.random.PCG64([seed, step, rank, 1]))  # 1: not the sampler's stream


class Mixup:
    """Blend each image and its target with its neighbour's (arXiv 1710.09412); the weight is Beta(alpha, alpha).

    Args:
        alpha: 0.2 blends little, 1 anything.
        p: share of the images that are blended.
    """

    def __init__(self, *, alpha: float = 0.2, p: float = 1.0) -> None:
        self.alpha, self.p = positive("alpha", alpha), number("p", p, 0, 1)

    def __call__(self, images: Tensor, targets: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        count = len(images)
        keep = np.where(rng.random(count) < self.p, rng.beta(self.alpha, self.alpha, count), 1.0)
        weight = to_device(keep, images)[:, None]
        images = torch.lerp(images.roll(1, 0), images, weight[:, :, None, None])
        return images, torch.lerp(targets.roll(1, 0), targets, weight)


class Cutmix:
    """Paste a random box of each image's neighbour into it; targets mix by area (arXiv 1905.04899).

    Args:
        alpha: the box's share of the area is 1 - Beta(alpha, alpha).
        p: share of the images that get a box.
    """

    def __init__(self, *, alpha: float = 1.0, p: float = 1.0) -> None:
        self.alpha, self.p = positive("alpha", alpha), number("p", p, 0, 1)

    def __call__(self, images: Tensor, targets: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        count, side = len(images), images.shape[-1]
        share = np.where(rng.random(count) < self.p, 1 - rng.beta(self.alpha, self.alpha, count), 0.0)
        half = np.sqrt(share) * side / 2
        centre = rng.random((2, count)) * side
        low, high = np.clip(np.round(centre - half), 0, side), np.clip(np.round(centre + half), 0, side)
        area = (high - low).prod(0) / side**2  # of the box as the image's border cuts it
        images = torch.where(_inside(np.concatenate([low, high]).T, images), images.roll(1, 0), images)
        return images, torch.lerp(targets, targets.roll(1, 0), to_device(area, images)[:, None])


class RandomErasing:
    """Set a random box of an image to the mean colour (arXiv 1708.04896), as torchvision's RandomErasing.

    Args:
        p: share of the images that lose a box.
        scale: range of the box's share of the area.
        ratio: range of its height / width.
    """

    def __init__(self, *, p: float = 0.25, scale: Sequence[float] = (0.02, 0.33), ratio: Sequence[float] = (0.3, 3.3)) -> None:
        self.p, self.scale, self.ratio = number("p", p, 0, 1), span("scale", scale, 1), span("ratio", ratio, 1000)

    def __call__(self, images: Tensor, targets: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        boxes = self.boxes(len(images), images.shape[-1], rng)
        return images.masked_fill(_inside(boxes, images), 0.0), targets  # 0 is the mean after normalisation

    def boxes(self, count: int, side: int, rng: np.random.Generator) -> np.ndarray:
        """As torchvision draws them: ten tries for a box that is smaller than the image; it lies within the image anywhere.

        Returns:
            float [count, 4], left, top, right, bottom; empty where nothing is erased.
        """
        chosen = rng.random(count) < self.p
        area = side**2 * rng.uniform(*self.scale, (10, count))
        aspect = np.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1]), (10, count)))
        sizes = np.round(np.sqrt(np.stack([area / aspect, area * aspect])))  # [width or height, try, image]
        fits = (sizes < side).all(axis=0)
        size = sizes[:, fits.argmax(axis=0), np.arange(count)] * (chosen & fits.any(axis=0))
        low = np.floor(rng.random((2, count)) * (side - size + 1))
        return np.concatenate([low, low + size]).T


BATCH_TRANSFORMS: dict[str, Callable[..., BatchTransform]] = {
    "mixup": Mixup,
    "cutmix": Cutmix,
    "random_erasing": RandomErasing,
}


def to_device(values: np.ndarray, like: Tensor) -> Tensor:
    """Copy a few host numbers beside `like` as float32 without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def _inside(boxes: np.ndarray, images: Tensor) -> Tensor:
    """bool [B, 1, S, S]: which pixels lie in each image's (left, top, right, bottom)."""
    left, top, right, bottom = to_device(boxes, images).T[:, :, None]  # each [B, 1]
    place = torch.arange(images.shape[-1], device=images.device)
    across, down = (place >= left) & (place < right), (place >= top) & (place < bottom)
    return (across[:, None, :] & down[:, :, None])[:, None]
