"""Transforms of a whole training batch on the device, written as an ordered list in the config.

Journey of a batch, 5: on the prefetcher's side stream, after normalisation. A transform is a
function of (images, targets, rng): float32 [B, 3, S, S] and float32 [B, classes], for every decoder
and training dtype. The prefetcher rounds to the training dtype once, after the last transform.

Parameters are drawn on the host, one set per image, from a generator that is a pure function of
(seed, step, rank), so GPU and CPU see the same draws. For random numbers per pixel, use
`torch.Generator(images.device).manual_seed(int(rng.integers(2**63)))`: torch's global generator
would give different numbers after a restart.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.parameters import number, positive, span

BatchTransform = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]


def batch_rng(seed: int, step: int, rank: int) -> np.random.Generator:
    """Return the generator of one batch's transforms."""
    # The 1 distinguishes it from the sampler's generator.
    return np.random.Generator(np.random.PCG64([seed, step, rank, 1]))


class Mixup:
    """Blend each image and its target with the next one in the batch (arXiv 1710.09412).

    Args:
        alpha: the weight is drawn from Beta(alpha, alpha): near 0 or 1 for 0.2, uniform for 1.
        p: probability for an image to be blended.
    """

    def __init__(self, *, alpha: float = 0.2, p: float = 1.0) -> None:
        self.alpha = positive("alpha", alpha)
        self.p = number("p", p, 0, 1)

    def __call__(
        self, images: Tensor, targets: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        count = len(images)
        keep = np.where(rng.random(count) < self.p, rng.beta(self.alpha, self.alpha, count), 1.0)
        weight = to_device(keep, images)[:, None]
        images = torch.lerp(images.roll(1, 0), images, weight[:, :, None, None])
        return images, torch.lerp(targets.roll(1, 0), targets, weight)


class Cutmix:
    """Paste a random box of the next image in the batch into each image (arXiv 1905.04899).

    The targets are mixed in proportion to the area.

    Args:
        alpha: the box's fraction of the area is 1 - Beta(alpha, alpha).
        p: probability for an image to get a box.
    """

    def __init__(self, *, alpha: float = 1.0, p: float = 1.0) -> None:
        self.alpha = positive("alpha", alpha)
        self.p = number("p", p, 0, 1)

    def __call__(
        self, images: Tensor, targets: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        count, size = len(images), images.shape[-1]
        chosen = rng.random(count) < self.p
        share = np.where(chosen, 1 - rng.beta(self.alpha, self.alpha, count), 0.0)
        half = np.sqrt(share) * size / 2
        centre = rng.random((2, count)) * size
        low = np.clip(np.round(centre - half), 0, size)
        high = np.clip(np.round(centre + half), 0, size)
        area = (high - low).prod(0) / size**2  # of the part of the box within the image
        inside = _inside(np.concatenate([low, high]).T, images)
        images = torch.where(inside, images.roll(1, 0), images)
        return images, torch.lerp(targets, targets.roll(1, 0), to_device(area, images)[:, None])


class RandomErasing:
    """Set a random box of an image to the mean colour, as torchvision's RandomErasing.

    Source: arXiv 1708.04896.

    Args:
        p: probability for an image to lose a box.
        scale: range of the box's area as a fraction of the image's area.
        ratio: range of the box's height / width.
    """

    def __init__(
        self,
        *,
        p: float = 0.25,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
    ) -> None:
        self.p = number("p", p, 0, 1)
        self.scale = span("scale", scale, 1)
        self.ratio = span("ratio", ratio, 1000)

    def __call__(
        self, images: Tensor, targets: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        boxes = self.boxes(len(images), images.shape[-1], rng)
        # After normalisation, 0 is the mean.
        return images.masked_fill(_inside(boxes, images), 0.0), targets

    def boxes(self, count: int, image_size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw boxes as torchvision does: up to ten tries for a box smaller than the image.

        Returns:
            float [count, 4], left, top, right, bottom; empty if nothing is erased.
        """
        chosen = rng.random(count) < self.p
        area = image_size**2 * rng.uniform(*self.scale, (10, count))
        aspect = np.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1]), (10, count)))
        # [width or height, try, image]
        sizes = np.round(np.sqrt(np.stack([area / aspect, area * aspect])))
        fits = (sizes < image_size).all(axis=0)
        size = sizes[:, fits.argmax(axis=0), np.arange(count)] * (chosen & fits.any(axis=0))
        low = np.floor(rng.random((2, count)) * (image_size - size + 1))
        return np.concatenate([low, low + size]).T


BATCH_TRANSFORMS: dict[str, Callable[..., BatchTransform]] = {
    "mixup": Mixup,
    "cutmix": Cutmix,
    "random_erasing": RandomErasing,
}


def to_device(values: np.ndarray, like: Tensor) -> Tensor:
    """Copy a few host numbers to the device of `like` as float32, without synchronising."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def _inside(boxes: np.ndarray, images: Tensor) -> Tensor:
    """Return which pixels, bool [B, 1, S, S], lie in each image's (left, top, right, bottom)."""
    left, top, right, bottom = to_device(boxes, images).T[:, :, None]  # each [B, 1]
    place = torch.arange(images.shape[-1], device=images.device)
    across, down = (place >= left) & (place < right), (place >= top) & (place < bottom)
    return (across[:, None, :] & down[:, :, None])[:, None]
