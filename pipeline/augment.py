"""Transforms of one image, written as an ordered list in the config.

Journey of a batch, 3: picture -> picture, in a worker. A transform is a function of (picture, rng).
Its generator is a pure function of (seed, epoch, index), so the result depends neither on the
worker nor on restarts.

To add a transform, write a class with keyword-only parameters and name it in TRANSFORMS, or name it
as module:name in the config.
"""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from conf.named import import_object, is_name, split_entry
from conf.packages import import_torchvision
from conf.schema import FRACTION, UserError, did_you_mean, number, one_of, span, whole
from pipeline.decode import INTERPOLATIONS, Box, Picture, crop

Transform = Callable[[Picture, random.Random], Picture]
LARGEST = 4096  # side of an image after a transform, in pixels
PIXELS = whole(1, LARGEST)
# Of torchvision.transforms.v2: those that need only one image and their own draws, and keep the
# size and uint8.
V2_NAMES = (
    *("AugMix", "AutoAugment", "ElasticTransform", "RandAugment", "RandomAffine"),
    *("RandomPerspective", "RandomRotation", "RandomVerticalFlip", "TrivialAugmentWide"),
    *("ColorJitter", "GaussianBlur", "RandomAdjustSharpness", "RandomAutocontrast"),
    *("RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale"),
    *("RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize"),
)


def sample_rng(seed: int, epoch: int, index: int) -> random.Random:
    """Return the generator of one sample's augmentation."""
    # random.Random takes an integer of any length. The fields do not overlap: index < 2**48.
    return random.Random((seed << 80) | (epoch << 48) | index)


class Compose:
    """Apply transforms, the result of `build`, in order.

    `image_size`: side of the resulting square images in pixels; 0 if it is not known.
    """

    def __init__(self, transforms: Sequence[Transform], image_size: int = 0) -> None:
        self.transforms = list(transforms)
        self.image_size = image_size

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        for transform in self.transforms:
            picture = transform(picture, rng)
        return picture


class RandomResizedCrop:
    """Scale a region of random area and aspect ratio to size x size (Inception, arXiv 1409.4842).

    Args:
        size: side of the result in pixels.
        scale: range of the region's area as a fraction of the image's area.
        ratio: range of the region's width / height.
        interpolation: bilinear, bicubic, or random to draw one of them for each image, as timm's
            RandomResizedCropAndInterpolation.
    """

    def __init__(
        self,
        *,
        size: int,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
    ) -> None:
        self.size = PIXELS.require("size", size)
        self.scale = span(1).require("scale", scale)
        self.ratio = span(1000).require("ratio", ratio)
        allowed = one_of(*INTERPOLATIONS, "random")
        self.interpolation = allowed.require("interpolation", interpolation)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        box, interpolation = self.box(*picture.size, rng), self.interpolation
        if interpolation == "random":
            interpolation = INTERPOLATIONS[rng.random() < 0.5]
        return picture.resized((self.size, self.size), box, interpolation=interpolation, quick=True)

    def box(self, width: int, height: int, rng: random.Random) -> Box:
        """Draw a region as torchvision does: ten tries, then the largest centred valid region."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left = int(rng.random() * (width - w + 1))
                top = int(rng.random() * (height - h + 1))
                return left, top, left + w, top + h
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        w = min(width, max(1, round(height * aspect)))
        h = min(height, max(1, round(width / aspect)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


class Resize:
    """Scale the image so that its shorter side is `size / crop_ratio` pixels, or to a fixed size.

    Args:
        size: side of the following crop in pixels; with the default ratio, the shorter side itself.
            [height, width] scales both sides, whatever the image's aspect ratio.
        crop_ratio: 0.875 is usual for ImageNet: 256 px before a crop of 224 px.
        interpolation: bilinear or bicubic, with antialiasing.
    """

    def __init__(
        self, *, size: int | Sequence[int], crop_ratio: float = 1.0, interpolation: str = "bilinear"
    ) -> None:
        ratio = number(0.01, 1).require("crop_ratio", crop_ratio)
        sides = size if isinstance(size, list | tuple) else [size]
        if sides is size and (len(sides) != 2 or ratio != 1):
            raise ValueError(f"size={size}: give [height, width] without crop_ratio")
        self.sides = [round(PIXELS.require("size", side) / ratio) for side in sides]
        self.interpolation = one_of(*INTERPOLATIONS).require("interpolation", interpolation)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        width, height = picture.size
        if len(self.sides) == 2:
            size = self.sides[1], self.sides[0]
        else:
            short, side = min(width, height), self.sides[0]
            size = int(side * width / short), int(side * height / short)
        return picture.resized(size, interpolation=self.interpolation)


class CenterCrop:
    """Crop the centre to size x size pixels; pad a smaller image with black."""

    def __init__(self, *, size: int) -> None:
        self.size = PIXELS.require("size", size)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        size, (width, height) = self.size, picture.size
        left, top = round((width - size) / 2), round((height - size) / 2)
        return picture.cropped((left, top, left + size, top + size))


class RandomCrop:
    """Crop a random region of size x size pixels.

    `padding`: width of the black border that is added on every side first, in pixels.
    """

    def __init__(self, *, size: int, padding: int = 0) -> None:
        self.size = PIXELS.require("size", size)
        self.padding = whole(0, LARGEST).require("padding", padding)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        size, padding, (width, height) = self.size, self.padding, picture.size
        if min(width, height) + 2 * padding < size:
            raise ValueError(
                f"random_crop: {width}x{height} with padding {padding} is smaller than size {size}"
            )
        left = int(rng.random() * (width + 2 * padding - size + 1)) - padding
        top = int(rng.random() * (height + 2 * padding - size + 1)) - padding
        return picture.cropped((left, top, left + size, top + size))


class HorizontalFlip:
    """Flip left to right with probability p."""

    def __init__(self, *, p: float = 0.5) -> None:
        self.p = FRACTION.require("p", p)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return picture.mirrored() if rng.random() < self.p else picture


class TorchvisionTransform:
    """Apply a v2 transform to one image; it draws from torch's generator, seeded from the sample's.

    torchvision takes a second to import, so it is imported only if a config names one of them: in
    the training process to check the parameters, and in a worker at its first image. `name` is one
    of V2_NAMES, `parameters` are the arguments of its constructor.
    """

    def __init__(self, name: str, **parameters: Any) -> None:
        self.name, self.parameters = name, parameters
        self._transform  # noqa: B018 - refuses wrong parameters now

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        pixels = torch.from_dlpack(picture.pixels()).permute(2, 0, 1)  # [C, H, W]
        pixels = pixels.clone(memory_format=torch.contiguous_format)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which also seeds the GPUs' generators.
            torch.default_generator.manual_seed(rng.getrandbits(63))
            pixels = self._transform(pixels).permute(1, 2, 0)
        return Picture(pixels.numpy(), moved=True)

    @cached_property
    def _transform(self) -> Any:
        import_torchvision()
        from torchvision.transforms import v2

        return getattr(v2, self.name)(**self.parameters)

    def __getstate__(self) -> dict[str, Any]:
        # Without the v2 transform: unpickling it would import torchvision when a worker starts.
        return {"name": self.name, "parameters": self.parameters}


def follow(mask: np.ndarray, picture: Picture, *, fill: int = 0) -> np.ndarray:
    """Crop, resize and flip a mask as its image was, to the nearest pixel; decodes nothing.

    Raises ValueError if the mask has another size than the file, or a transform changed the pixels
    in another way.

    Args:
        mask: integers [H, W] or [H, W, C] of the size of the image's file.
        picture: what the transforms made of the image.
        fill: value of the pixels from outside the mask.
    """
    if picture.moved:
        raise ValueError(
            "a mask follows crops, resizes and flips only; leave out other transforms, and turn "
            "photos with an EXIF orientation once (exiftran -ai), or data.exif_orientation=false"
        )
    if mask.shape[1::-1] != (size := picture.full_size):
        raise ValueError(f"the mask's (width, height) is {mask.shape[1::-1]}, its image's {size}")
    for step in picture.geometry:
        mask = crop(mask, step.box, fill)
        (height, width), (new_width, new_height) = mask.shape[:2], step.size
        rows = (2 * np.arange(new_height) + 1) * height // (2 * new_height)
        columns = (2 * np.arange(new_width) + 1) * width // (2 * new_width)
        mask = mask[rows][:, columns[::-1] if step.mirrored else columns]
    return mask


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "random_resized_crop": RandomResizedCrop,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "horizontal_flip": HorizontalFlip,
    **{f"v2.{name}": partial(TorchvisionTransform, name) for name in V2_NAMES},
}


def build(entries: Sequence[Any], table: dict[str, Callable[..., Any]], *, key: str) -> list[Any]:
    """Build the transforms that a config list names.

    Raises UserError if a name or parameter is unknown, or the transform refuses a value.

    Args:
        entries: each `name` or `{name: {parameter: value}}`; a name may be `module:name`.
        table: the allowed names: TRANSFORMS here, BATCH_TRANSFORMS for whole batches.
        key: the config key, for messages.
    """
    transforms = []
    for name, parameters in (split_entry(entry, key) for entry in entries):
        make = import_object(name, key) if is_name(name) else table.get(name)
        if make is None:
            raise UserError(
                f"{key}: there is no transform {name}; choose from {', '.join(table)}"
                f"{did_you_mean(name, table)}"
            )
        try:
            transforms.append(make(**parameters))
        except (TypeError, ValueError, IndexError) as error:
            takes = ""
            if isinstance(make, type):
                takes = f"; it takes {', '.join(inspect.signature(make).parameters)}"
            raise UserError(f"{key}: {name}: {error}{takes}") from None
    return transforms
