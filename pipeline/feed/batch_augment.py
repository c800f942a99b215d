"""Transforms of a whole training batch on the device, listed in order in augment.batch.

`train_step` begins with them, inside its CUDA graph. A transform is called with images, float32
[B, C, S, S]; targets, float32 [B, n]; the numbers that its method `draw` returned for these rows,
float32 [n, B]; and `partners`, int64 [B], the row with which each row is mixed. It returns images
and targets, and must not synchronize with the device.

`draw` runs on the host before the step. Its generator depends only on (seed, step). It returns
float [n, rows] for the global batch, from which each rank takes its rows, so an image's draws and
partner do not depend on the number of ranks. For random numbers per pixel, a transform calls torch,
which is seeded for each (seed, step, rank).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from conf.errors import UserError
from conf.schema import UNIT_INTERVAL, Config, integer_interval, interval, ordered_pair
from pipeline.data.augment import build_by_name, parameter
from pipeline.data.build import Datasets
from pipeline.data.field import TARGET, Fields
from pipeline.feed.batch import Batch

# Images are mixed within blocks of this many rows. If a rank's batch is a multiple of it, the rank
# mixes the same images as a single process.
BLOCK = 4
ALPHA = interval(0.001, 1000)
Pair = tuple[Tensor, Tensor]  # images and targets


@dataclass(kw_only=True)
class Mixup:
    """Blend each image and its target with those of its partner (arXiv 1710.09412)."""

    # Weights follow Beta(alpha, alpha), near 0 or 1 for 0.2 and uniform for 1.
    alpha: float = parameter(ALPHA, 0.2)
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability that an image is blended

    def draw(self, rng: Generator, rows: int, size: int) -> np.ndarray:
        return _draw_weights(self.alpha, self.p, rng, rows)[None]

    def __call__(self, images: Tensor, targets: Tensor, numbers: Tensor, partners: Tensor) -> Pair:
        weights = numbers[0, :, None]
        images = blend(images, weights[:, :, None, None], partners)
        return images, blend(targets, weights, partners)


@dataclass(kw_only=True)
class Cutmix:
    """Paste a random box of each image's partner into the image (arXiv 1905.04899).

    Targets are mixed in proportion to the area. Boxes are those of torchvision's CutMix.
    """

    alpha: float = parameter(ALPHA, 1.0)  # the box's fraction of the area is 1 - Beta(alpha, alpha)
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability that an image gets a box

    def draw(self, rng: Generator, rows: int, size: int) -> np.ndarray:
        areas = 1 - _draw_weights(self.alpha, self.p, rng, rows)
        boxes, areas = _pasted_boxes(areas, size, rng)
        return np.vstack([1 - areas, boxes])

    def __call__(self, images: Tensor, targets: Tensor, numbers: Tensor, partners: Tensor) -> Pair:
        weights, boxes = numbers.split([1, 4])
        images = blend(images, _outside(boxes, images), partners)
        return images, blend(targets, weights.T, partners)


@dataclass(kw_only=True)
class MixupOrCutmix:
    """Apply mixup or cutmix to each group of images, with one weight or box per group.

    torchvision's RandomChoice([MixUp(), CutMix()]) and timm's Mixup draw once per GPU. With p=1,
    switch_p=0.5 and `group` images per GPU, the result is torchvision's. timm pairs image i with
    image B - 1 - i, and its boxes may be one pixel larger.
    """

    mixup_alpha: float = parameter(ALPHA, 0.2)  # Mixup's alpha
    cutmix_alpha: float = parameter(ALPHA, 1.0)  # Cutmix's alpha
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability of either
    switch_p: float = parameter(UNIT_INTERVAL, 0.5)  # probability of cutmix instead of mixup
    # Number of images in the global batch that share a draw, from 1 (a draw per image) to the batch
    # size (a draw per batch). The last group is smaller if the batch is not a multiple of it.
    group: int = parameter(integer_interval(1, 10**6), 128)

    def draw(self, rng: Generator, rows: int, size: int) -> np.ndarray:
        num_groups = math.ceil(rows / self.group)
        changed = rng.random(num_groups) < self.p
        is_cutmix = rng.random(num_groups) < self.switch_p
        alpha = np.where(is_cutmix, self.cutmix_alpha, self.mixup_alpha)
        weights = np.where(changed, rng.beta(alpha, alpha), 1.0)
        areas = np.where(is_cutmix, 1 - weights, 0.0)
        boxes, areas = _pasted_boxes(areas, size, rng)
        pixel_weights = np.where(is_cutmix, 1.0, weights)  # outside the box
        target_weights = np.where(is_cutmix, 1 - areas, weights)
        groups = np.arange(rows) // self.group
        return np.vstack([pixel_weights, target_weights, boxes])[:, groups]

    def __call__(self, images: Tensor, targets: Tensor, numbers: Tensor, partners: Tensor) -> Pair:
        pixel_weights, target_weights, boxes = numbers.split([1, 1, 4])
        weights = pixel_weights.T[:, :, None, None] * _outside(boxes, images)
        return blend(images, weights, partners), blend(targets, target_weights.T, partners)


@dataclass(kw_only=True)
class RandomErasing:
    """Set a random box of an image to the mean color, like torchvision (arXiv 1708.04896)."""

    p: float = parameter(UNIT_INTERVAL, 0.25)  # probability that a box is erased
    scale: Sequence[float] = parameter(ordered_pair(1), (0.02, 0.33))  # box area / image area
    ratio: Sequence[float] = parameter(ordered_pair(1000), (0.3, 3.3))  # box height / width

    def draw(self, rng: Generator, rows: int, size: int) -> np.ndarray:
        """Draw boxes like torchvision, with up to ten tries for a box smaller than the image.

        Returns left, top, right and bottom; the box is empty if nothing is erased.
        """
        erased = rng.random(rows) < self.p
        smallest, largest = self.scale
        narrowest, widest = map(math.log, self.ratio)
        area = size**2 * rng.uniform(smallest, largest, (10, rows))
        aspect = np.exp(rng.uniform(narrowest, widest, (10, rows)))
        squares = np.stack([area / aspect, area * aspect])
        sizes = np.round(np.sqrt(squares))  # [width or height, try, image]
        fits = (sizes < size).all(axis=0)
        first = fits.argmax(axis=0)
        erased &= fits.any(axis=0)
        sides = sizes[:, first, np.arange(rows)] * erased
        low = np.floor(rng.random((2, rows)) * (size - sides + 1))
        return np.concatenate([low, low + sides])

    def __call__(self, images: Tensor, targets: Tensor, numbers: Tensor, partners: Tensor) -> Pair:
        return images * _outside(numbers, images), targets  # The mean of normalized images is 0.


BATCH_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "mixup": Mixup,
    "cutmix": Cutmix,
    "mixup_or_cutmix": MixupOrCutmix,
    "random_erasing": RandomErasing,
}


@dataclass(frozen=True)
class BatchTransforms:
    """Training batch transforms, in order. Batches are this rank's shard of the global batch."""

    transforms: Sequence[Any]
    num_classes: int
    seed: int
    image_names: Sequence[str]  # names of the image fields
    label: str | None  # field to mix, class indices or floats; with None, only images change
    dtype: torch.dtype = torch.float32  # dtype of the images after the last transform
    rank: int = 0
    world_size: int = 1

    def draw(self, fields: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the numbers of every image field and transform as fields for `mix`, [B, n].

        All image fields of a batch get the same draws.
        """
        drawn = {}
        for name in self.image_names:
            count, size = len(fields[name]), fields[name].shape[-1]
            # The last number distinguishes it from the sampler's generator.
            rng = np.random.Generator(np.random.PCG64([self.seed, step, 0, 1]))
            for place, transform in enumerate(self.transforms):
                values = transform.draw(rng, count * self.world_size, size)
                own = values[:, self.rank * count : (self.rank + 1) * count]
                drawn[f"{name} {place}"] = torch.from_numpy(own.T).float()
        return drawn

    def mix(self, batch: Batch) -> Batch:
        """Transform the images [B, ..., C, H, W], and add TARGET if labels are mixed.

        All frames of a sample get the same draws. Transforms may work in place.
        """
        fields = dict(batch.fields)
        partners = find_partners(batch.samples)
        for name in self.image_names:
            images, targets = batch[name], self.targets(batch)
            pixels = images.flatten(1, -3)  # [B, C, H, W]
            mixed = targets[:, None].flatten(1)  # [B, n]
            for place, transform in enumerate(self.transforms):
                numbers = fields.pop(f"{name} {place}").T
                pixels, mixed = transform(pixels, mixed, numbers, partners)
            fields[name] = pixels.reshape(images.shape).to(self.dtype)
            if self.label is not None:
                fields[TARGET] = mixed.view(targets.shape)
        return Batch(fields, batch.samples, batch.step)

    def targets(self, batch: Batch) -> Tensor:
        """Copy class indices as one-hot float32 [B, classes], or floats as float32 [B, ...]."""
        if self.label is None:
            return torch.zeros(len(batch.samples), 0)
        label = batch[self.label]
        if label.is_floating_point():
            return label.to(torch.float32, copy=True)
        targets = torch.zeros(len(label), self.num_classes, device=label.device)
        return targets.scatter_(1, label[:, None], 1)  # one_hot writes int64


def find_partners(rows: Tensor) -> Tensor:
    """Return the previous row in each row's block, int64 [B]; the last one for the first row."""
    block = math.gcd(len(rows), BLOCK)
    if block == 1:
        block = len(rows)
    row = torch.arange(len(rows), device=rows.device)
    return torch.where(row % block == 0, row + block - 1, row - 1)


def blend(rows: Tensor, weights: Tensor, partners: Tensor) -> Tensor:
    """Return weight * row + (1 - weight) * partner for float32 rows and weights [B, ...]."""
    return torch.lerp(rows[partners], rows, weights)


def _draw_weights(alpha: float, p: float, rng: Generator, rows: int) -> np.ndarray:
    """Draw float [rows] from Beta(alpha, alpha) with probability p, otherwise 1."""
    chosen = rng.random(rows) < p
    return np.where(chosen, rng.beta(alpha, alpha, rows), 1.0)


def _pasted_boxes(areas: np.ndarray, size: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw cutmix boxes, which may extend beyond the image, and clip them to it.

    `areas`: fractions of the image's area, float [B]. Returns left, top, right and bottom of the
    clipped boxes, float [4, B], and their fractions of the image's area, float [B].
    """
    half = np.floor(np.sqrt(areas) * size / 2)
    center = np.floor(rng.random((2, len(areas))) * size)
    low = (center - half).clip(0, size)
    high = (center + half).clip(0, size)
    width, height = high - low
    return np.concatenate([low, high]), width * height / size**2


def _outside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return a mask float32 [B, 1, S, S], 0 inside each image's box and 1 outside.

    `boxes`: left, top, right and bottom, float32 [4, B].
    """
    left, top, right, bottom = boxes[:, :, None]
    pixel = torch.arange(images.shape[-1], device=images.device)
    across = (left <= pixel) & (pixel < right)
    down = (top <= pixel) & (pixel < bottom)
    inside = across[:, None, :] & down[:, :, None]
    return (~inside)[:, None].float()


def build_batch_transforms(config: Config, datasets: Datasets) -> BatchTransforms:
    """Build the transforms in augment.batch; `open_feed` sets their dtype and rank.

    Raises UserError for an invalid transform, or a mixing transform for samples without a label.
    """
    fields = datasets.train.fields
    images = [name for name, field in fields.items() if field.image]
    transforms = build_by_name(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    label = find_mixed_field(transforms, fields, images)
    return BatchTransforms(transforms, len(datasets.classes), config.train.seed, images, label)


def find_mixed_field(
    transforms: Sequence[Any], fields: Fields, images: Sequence[str]
) -> str | None:
    """Return the only field that is not an image, which is mixed like the images.

    Returns None if no transform mixes. Raises UserError if no field or more than one can be mixed.
    """
    if all(isinstance(transform, RandomErasing) for transform in transforms):
        return None
    others = [*(fields.keys() - images)]
    if len(others) == 1:
        field = fields[others[0]]
        if not field.shape or np.dtype(field.dtype).kind == "f":
            return others[0]
    problem = f"mixup and cutmix mix one class index or floats; a sample has {', '.join(fields)}"
    raise UserError("augment.batch", problem, "remove them")
