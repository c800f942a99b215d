"""Transforms of a whole training batch on the device, written as an ordered list in the config.

Journey of a batch, 5: on the prefetcher's side stream, after normalisation. A transform is a
function of (images, targets, share): float32 [B, C, S, S], float32 [B, classes], and which part of
the global batch they are. The prefetcher rounds to the training dtype once, after the last one.

If each transform draws its parameters in `draw_numbers` and gets them from `share.numbers`, the
rest becomes a CUDA graph: it may not depend on the host or wait for the device.

Parameters are drawn on the host, one set per image or group of images, from a generator that is a
pure function of (seed, step). Every rank draws for the global batch and takes its own, so the draws
of an image, and the image it is mixed with, do not depend on the number of ranks. For random
numbers per pixel, use `torch.Generator(images.device).manual_seed(int(share.rng.integers(2**63)))`:
torch's global generator would give different numbers after a restart. A transform with such numbers
must not call `share.numbers`: in a CUDA graph, there is no `share.rng`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.constraints import UNIT_INTERVAL, integer_interval, interval, ordered_pair
from conf.errors import UserError
from conf.schema import Config
from pipeline.data.augment import build_by_name, parameter
from pipeline.data.build import Datasets
from pipeline.data.field import Field

# Images are mixed within blocks of this many rows. A rank whose share of the batch is a multiple of
# it mixes the same images as a single process does.
BLOCK = 4
ALPHA = interval(0.001, 1000)


@dataclass(frozen=True)
class BatchShare:
    """A rank's rows of the global batch, and the random numbers of all rows."""

    # numpy's generator of this step, in the same state on every rank; None in a CUDA graph
    rng: Any
    total: int  # rows of the global batch: draw this many of everything
    first: int  # this rank's first row
    count: int  # its number of rows
    drawn: Iterator[Tensor] | None = None  # on the device: `numbers` returns these, and draws none
    used: list[Tensor] = field(default_factory=list)  # what `numbers` has drawn and returned

    def of_rank(self, values: np.ndarray) -> np.ndarray:
        """Return this rank's part of values [..., total]."""
        return values[..., self.first : self.first + self.count]

    def draw(self, transform: Any, size: int) -> np.ndarray:
        """Return this rank's part, float [n, B], of what `draw_numbers` of a transform draws.

        It gets this share and the size of the images, and returns float [n, total].
        """
        return self.of_rank(transform.draw_numbers(self, size))

    def numbers(self, transform: Any, images: Tensor) -> Tensor:
        """Return what `draw` returns as float32 on the device of the images."""
        if self.drawn is not None:
            return next(self.drawn)
        values = self.draw(transform, images.shape[-1])
        numbers = replace_numbers(torch.empty(values.shape, device=images.device), values)
        self.used.append(numbers)
        return numbers

    def draw_weights(self, alpha: float, p: float) -> np.ndarray:
        """Draw float [total]: with probability p from Beta(alpha, alpha), else 1."""
        chosen = self.rng.random(self.total) < p
        weights = self.rng.beta(alpha, alpha, self.total)
        return np.where(chosen, weights, 1.0)

    def blend(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return weight * row + (1 - weight) * partner for float32 rows and weights [B, ...].

        The partner is the row before it in its block; that of the first row is the last one.
        """
        block = math.gcd(self.total, self.count, BLOCK)
        if block == 1:
            block = len(rows)
        result = torch.empty_like(rows)  # in the same memory format
        old = rows.unflatten(0, (-1, block))
        own = weight.unflatten(0, (-1, block))
        new = result.unflatten(0, (-1, block))
        torch.lerp(old[:, :-1], old[:, 1:], own[:, 1:], out=new[:, 1:])
        torch.lerp(old[:, -1], old[:, 0], own[:, 0], out=new[:, 0])
        return result


BatchTransform = Callable[[Tensor, Tensor, BatchShare], tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class Mixup:
    """Blend each image and its target with another one of the batch (arXiv 1710.09412)."""

    # The weight is drawn from Beta(alpha, alpha): near 0 or 1 for 0.2, uniform for 1.
    alpha: float = parameter(ALPHA, 0.2)
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability for an image to be blended

    def __call__(self, images: Tensor, targets: Tensor, share: BatchShare) -> tuple[Tensor, Tensor]:
        own = share.numbers(self, images)[0, :, None]
        images = share.blend(images, own[:, :, None, None])
        return images, share.blend(targets, own)

    def draw_numbers(self, share: BatchShare, size: int) -> np.ndarray:
        return share.draw_weights(self.alpha, self.p)[None]


@dataclass(kw_only=True)
class Cutmix:
    """Paste a random box of another image of the batch into each image (arXiv 1905.04899).

    The targets are mixed in proportion to the area. Boxes are those of torchvision's CutMix.
    """

    alpha: float = parameter(ALPHA, 1.0)  # the box's fraction of the area is 1 - Beta(alpha, alpha)
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability for an image to get a box

    def __call__(self, images: Tensor, targets: Tensor, share: BatchShare) -> tuple[Tensor, Tensor]:
        own, boxes = share.numbers(self, images).split([1, 4])
        images = share.blend(images, _outside(boxes, images))
        return images, share.blend(targets, own.T)

    def draw_numbers(self, share: BatchShare, size: int) -> np.ndarray:
        areas = 1 - share.draw_weights(self.alpha, self.p)
        boxes, areas = _pasted_boxes(areas, size, share.rng)
        return np.vstack([1 - areas, boxes])


@dataclass(kw_only=True)
class MixupOrCutmix:
    """Apply mixup or cutmix: one of them, with one weight or box, to each group of images.

    torchvision's RandomChoice([MixUp(), CutMix()]) and timm's Mixup draw once per GPU: with p=1 and
    switch_p=0.5 this is torchvision's, where `group` is the number of images on a GPU. timm mixes
    the image i with the last but i, and its boxes may be one pixel larger.
    """

    mixup_alpha: float = parameter(ALPHA, 0.2)  # as alpha of Mixup
    cutmix_alpha: float = parameter(ALPHA, 1.0)  # as alpha of Cutmix
    p: float = parameter(UNIT_INTERVAL, 1.0)  # probability of either
    switch_p: float = parameter(UNIT_INTERVAL, 0.5)  # probability of cutmix instead of mixup
    # Images of the global batch that share a draw: 1 for a draw per image, the batch size for one
    # per batch. The last group is smaller if the batch is no multiple of it.
    group: int = parameter(integer_interval(1, 10**6), 128)

    def __call__(self, images: Tensor, targets: Tensor, share: BatchShare) -> tuple[Tensor, Tensor]:
        pixel_weights, target_weights, boxes = share.numbers(self, images).split([1, 1, 4])
        own = pixel_weights.T[:, :, None, None] * _outside(boxes, images)
        return share.blend(images, own), share.blend(targets, target_weights.T)

    def draw_numbers(self, share: BatchShare, size: int) -> np.ndarray:
        rng = share.rng
        num_groups = math.ceil(share.total / self.group)
        changed = rng.random(num_groups) < self.p
        is_cutmix = rng.random(num_groups) < self.switch_p
        alpha = np.where(is_cutmix, self.cutmix_alpha, self.mixup_alpha)
        weights = np.where(changed, rng.beta(alpha, alpha), 1.0)
        areas = np.where(is_cutmix, 1 - weights, 0.0)
        boxes, areas = _pasted_boxes(areas, size, rng)
        pixel_weights = np.where(is_cutmix, 1.0, weights)  # outside the box
        target_weights = np.where(is_cutmix, 1 - areas, weights)
        groups = np.arange(share.total) // self.group
        return np.vstack([pixel_weights, target_weights, boxes])[:, groups]


@dataclass(kw_only=True)
class RandomErasing:
    """Set a random box of an image to the mean colour, as torchvision does (arXiv 1708.04896)."""

    p: float = parameter(UNIT_INTERVAL, 0.25)  # probability for an image to lose a box
    # range of the box's area as a fraction of the image's area
    scale: Sequence[float] = parameter(ordered_pair(1), (0.02, 0.33))
    ratio: Sequence[float] = parameter(ordered_pair(1000), (0.3, 3.3))  # of its height / width

    def __call__(self, images: Tensor, targets: Tensor, share: BatchShare) -> tuple[Tensor, Tensor]:
        outside = _outside(share.numbers(self, images), images)
        return images * outside, targets  # normalised: the mean is 0

    def draw_numbers(self, share: BatchShare, size: int) -> np.ndarray:
        """Draw boxes as torchvision does: up to ten tries for a box smaller than the image.

        Returns left, top, right, bottom; an empty box if nothing is erased.
        """
        rng = share.rng
        count = share.total
        erased = rng.random(count) < self.p
        smallest, largest = self.scale
        narrowest, widest = map(math.log, self.ratio)
        area = size**2 * rng.uniform(smallest, largest, (10, count))
        aspect = np.exp(rng.uniform(narrowest, widest, (10, count)))
        squares = np.stack([area / aspect, area * aspect])
        sizes = np.round(np.sqrt(squares))  # [width or height, try, image]
        fits = (sizes < size).all(axis=0)
        first = fits.argmax(axis=0)
        erased &= fits.any(axis=0)
        sides = sizes[:, first, np.arange(count)] * erased
        low = np.floor(rng.random((2, count)) * (size - sides + 1))
        return np.concatenate([low, low + sides])


BATCH_TRANSFORMS: dict[str, Callable[..., BatchTransform]] = {
    "mixup": Mixup,
    "cutmix": Cutmix,
    "mixup_or_cutmix": MixupOrCutmix,
    "random_erasing": RandomErasing,
}


@dataclass(frozen=True)
class BatchTransforms:
    """Batch transforms for training, in order; a batch is this rank's part of the global batch."""

    transforms: Sequence[BatchTransform]
    num_classes: int
    seed: int
    rank: int = 0
    world_size: int = 1
    # The field to mix: class numbers or floating-point numbers. None: only images are changed.
    label: str | None = "label"

    def targets(self, fields: Mapping[str, Tensor]) -> Tensor:
        """What is mixed: one-hot float32 [B, classes], or the numbers, float32 [B, ...]."""
        if self.label is None:
            first, *_ = fields.values()
            return torch.zeros(len(first), 0)
        label = fields[self.label]
        if label.is_floating_point():
            return label.float()
        targets = torch.zeros(len(label), self.num_classes, device=label.device)
        return targets.scatter_(1, label[:, None], 1)  # one_hot writes int64

    def apply(self, images: Tensor, targets: Tensor, share: BatchShare) -> tuple[Tensor, Tensor]:
        """Transform float32 [B, ..., C, H, W], and targets if there are any.

        All image fields of a batch, and all frames of a sample, get the same draws.
        """
        pixels = images.flatten(1, -3)  # [B, C, H, W]
        mixed = targets[:, None].flatten(1)  # [B, n]
        for transform in self.transforms:
            pixels, mixed = transform(pixels, mixed, share)
        return pixels.reshape(images.shape), mixed.view(targets.shape)

    def share(self, step: int, count: int) -> BatchShare:
        """Return the part of this rank, `count` rows, of the global batch of a step."""
        # The 1 distinguishes it from the sampler's generator.
        rng = np.random.Generator(np.random.PCG64([self.seed, step, 0, 1]))
        return BatchShare(rng, count * self.world_size, self.rank * count, count)


def replace_numbers(numbers: Tensor, values: np.ndarray) -> Tensor:
    """Overwrite float32 numbers with a few of the host, without synchronising; return them."""
    host = torch.empty(values.shape, pin_memory=numbers.is_cuda).copy_(torch.from_numpy(values))
    return numbers.copy_(host, non_blocking=numbers.is_cuda)


def _pasted_boxes(
    areas: np.ndarray, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw boxes of cutmix; a part may lie outside the image.

    `areas`: float [B], fractions of the image's area. Returns float [4, B], left, top, right,
    bottom inside the image; and float [B], the fractions that lie inside.
    """
    half = np.floor(np.sqrt(areas) * size / 2)
    centre = np.floor(rng.random((2, len(areas))) * size)
    low = (centre - half).clip(0, size)
    high = (centre + half).clip(0, size)
    width, height = high - low
    return np.concatenate([low, high]), width * height / size**2


def _outside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return float32 [B, 1, S, S]: 0 in each image's (left, top, right, bottom), 1 outside.

    `boxes`: these coordinates, float32 [4, B].
    """
    left, top, right, bottom = boxes[:, :, None]
    pixel = torch.arange(images.shape[-1], device=images.device)
    across = (left <= pixel) & (pixel < right)
    down = (top <= pixel) & (pixel < bottom)
    inside = across[:, None, :] & down[:, :, None]
    return (~inside)[:, None].float()


def build_batch_transforms(
    config: Config, datasets: Datasets, rank: int = 0, world_size: int = 1
) -> BatchTransforms | None:
    """Build augment.batch for the training batches; None if the list is empty.

    Raises UserError for an invalid transform, and for a mixing one if the samples have no label.
    """
    transforms = build_by_name(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    if not transforms:
        return None
    return BatchTransforms(
        transforms,
        num_classes=len(datasets.classes),
        seed=config.train.seed,
        rank=rank,
        world_size=world_size,
        label=find_mixed_field(transforms, datasets.train.fields),
    )


def find_mixed_field(
    transforms: Sequence[BatchTransform], fields: Mapping[str, Field]
) -> str | None:
    """Return the field that batch transforms mix like the images: the only one that is no image.

    None if they mix nothing. Raises UserError if no field, or more than one, can be mixed.
    """
    if all(isinstance(transform, RandomErasing) for transform in transforms):
        return None
    others = [name for name, field in fields.items() if not field.image]
    if len(others) == 1:
        field = fields[others[0]]
        if not field.shape or np.dtype(field.dtype).kind == "f":
            return others[0]
    wrong = f"mixup and cutmix mix a class number or floats; a sample has {', '.join(fields)}"
    raise UserError("augment.batch", wrong, "leave them out")
