"""Transforms of one image, written as an ordered list in the config.

Journey of a batch, 3: picture -> picture, in a worker. A transform is a function of (picture, rng).
Its generator is a pure function of (seed, epoch, index), so the result depends neither on the
worker nor on restarts.

To add a transform, write a class with keyword-only parameters and name it in TRANSFORMS.
"""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from conf.schema import UserError, did_you_mean
from pipeline.decode import INTERPOLATIONS, Box, Move, Picture, crop
from pipeline.parameters import choice, number, span, whole
from pipeline.torchvision_transforms import V2_TRANSFORMS

Transform = Callable[[Picture, random.Random], Picture]
Operation = tuple[str, float]  # name in OPERATIONS, signed strength in the unit of this operation
LARGEST = 4096  # side of an image after a transform, in pixels


def sample_rng(seed: int, epoch: int, index: int) -> random.Random:
    """Return the generator of one sample's augmentation."""
    # random.Random takes an integer of any length. The fields do not overlap: index < 2**48.
    return random.Random((seed << 80) | (epoch << 48) | index)


class Compose:
    """Apply transforms, the result of `build`, in order.

    Args:
        transforms: the list.
        image_size: side of the resulting square images in pixels; 0 if it is not known.
    """

    def __init__(self, transforms: Sequence[Transform], image_size: int = 0) -> None:
        self.transforms = list(transforms)
        self.image_size = image_size
        last = self.transforms[-1] if self.transforms else None
        self._random = last if isinstance(last, RandAugment | TrivialAugment) else None

    @property
    def operations(self) -> int:
        """Number of operations that `sample` returns for each image."""
        return self._random.operations if self._random else 0

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        picture, operations = self.sample(picture, rng)
        return apply_operations(picture, operations)

    def sample(self, picture: Picture, rng: random.Random) -> tuple[Picture, list[Operation]]:
        """Apply the list, but only sample the operations of a RandAugment at its end.

        A GPU applies them to the whole batch (pipeline/gpu/augment.py).
        """
        for transform in self.transforms[:-1] if self._random else self.transforms:
            picture = transform(picture, rng)
        return picture, self._random.sample(picture.size, rng) if self._random else []


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
        self.size = whole("size", size, 1, LARGEST)
        self.scale = span("scale", scale, 1)
        self.ratio = span("ratio", ratio, 1000)
        self.interpolation = choice("interpolation", interpolation, (*INTERPOLATIONS, "random"))

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        box, interpolation = self.box(*picture.size, rng), self.interpolation
        if interpolation == "random":
            interpolation = INTERPOLATIONS[rng.random() < 0.5]
        size = self.size, self.size
        return picture.resized(size, box, interpolation=interpolation, quick=True)

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
        self,
        *,
        size: int | Sequence[int],
        crop_ratio: float = 1.0,
        interpolation: str = "bilinear",
    ) -> None:
        ratio = number("crop_ratio", crop_ratio, 0.01, 1)
        sides = size if isinstance(size, list | tuple) else [size]
        if sides is size and (len(sides) != 2 or ratio != 1):
            raise ValueError(f"size={size}: give [height, width] without crop_ratio")
        self.sides = [round(whole("size", side, 1, LARGEST) / ratio) for side in sides]
        self.interpolation = choice("interpolation", interpolation, INTERPOLATIONS)

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
        self.size = whole("size", size, 1, LARGEST)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        size, (width, height) = self.size, picture.size
        left, top = round((width - size) / 2), round((height - size) / 2)
        return picture.cropped((left, top, left + size, top + size))


class RandomCrop:
    """Crop a random region of size x size pixels.

    Args:
        size: side of the result in pixels.
        padding: width of the black border that is added on every side first, in pixels.
    """

    def __init__(self, *, size: int, padding: int = 0) -> None:
        self.size = whole("size", size, 1, LARGEST)
        self.padding = whole("padding", padding, 0, LARGEST)

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
        self.p = number("p", p, 0, 1)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return picture.mirrored() if rng.random() < self.p else picture


class RandAugment:
    """Apply random operations of a fixed strength (arXiv 1909.13719), as torchvision's RandAugment.

    timm's magnitudes go from 0 to 10, not to STRENGTHS: its rand-m7-mstd0.5 is {magnitude: 21,
    magnitude_std: 1.5, p: 0.5}, but its list of operations differs.

    Args:
        count: number of operations per image.
        magnitude: strength from 0 to STRENGTHS.
        magnitude_std: standard deviation of the strength of each operation, which is drawn from a
            normal distribution, rounded and clipped to [0, STRENGTHS]; 0: all have `magnitude`.
        p: probability of each operation.
    """

    def __init__(
        self, *, count: int = 2, magnitude: float = 9, magnitude_std: float = 0, p: float = 1
    ) -> None:
        self.operations = whole("count", count, 1, 100)
        self.magnitude = number("magnitude", magnitude, 0, STRENGTHS)
        self.magnitude_std = number("magnitude_std", magnitude_std, 0, STRENGTHS)
        self.p = number("p", p, 0, 1)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return apply_operations(picture, self.sample(picture.size, rng))

    def sample(self, size: tuple[int, int], rng: random.Random) -> list[Operation]:
        """Sample the operations of an image of this (width, height)."""
        return [self._sample_one(size, rng) for _ in range(self.operations)]

    def _sample_one(self, size: tuple[int, int], rng: random.Random) -> Operation:
        if self.p < 1 and rng.random() >= self.p:
            return "identity", 0.0
        magnitude = self.magnitude
        if self.magnitude_std > 0:
            # Rounded, because the GPU path keeps the numbers of each operation and strength.
            magnitude = round(rng.gauss(magnitude, self.magnitude_std))
            magnitude = min(max(magnitude, 0), STRENGTHS)
        return _sample_operation(size, rng, magnitude / STRENGTHS, wide=False)


class TrivialAugment:
    """Apply one random operation of random strength, as torchvision's TrivialAugmentWide.

    Its units are the wide ones of arXiv 2103.10158.
    """

    operations = 1

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return apply_operations(picture, self.sample(picture.size, rng))

    def sample(self, size: tuple[int, int], rng: random.Random) -> list[Operation]:
        """Sample the operation of an image of this (width, height)."""
        strength = int(rng.random() * (STRENGTHS + 1)) / STRENGTHS
        return [_sample_operation(size, rng, strength, wide=True)]


STRENGTHS = 30  # steps from the weakest to the strongest: torchvision's 31 bins, counted from 0

# name -> affine matrix (a, b, c, d, e, f) of a signed strength: the pixel (x, y) of the result is
# the pixel (a x + b y + c, d x + e y + f) of the image.
AFFINE: dict[str, Callable[[float], tuple[float, ...]]] = {
    "shear_x": lambda v: (1, v, 0, 0, 1, 0),
    "shear_y": lambda v: (1, 0, 0, v, 1, 0),
    "translate_x": lambda v: (1, 0, -int(v), 0, 1, 0),
    "translate_y": lambda v: (1, 0, 0, 0, 1, -int(v)),
}


def _affine(name: str) -> "Apply":
    return lambda image, v: image.transform(
        image.size, Image.Transform.AFFINE, AFFINE[name](v), resample=Image.Resampling.NEAREST
    )


def solarize_threshold(strength: float) -> float:
    """The lowest level to invert: a multiple of 0.5."""
    return round(255 * (1 - abs(strength)), 6)  # restores the last bit that a product may lose


Apply = Callable[[Image.Image, float], Image.Image]
Unit = float | Callable[[tuple[int, int]], float]  # or a function of (width, height)
# name -> (function of (image, signed strength in its own unit), unit at strength 1 for RandAugment,
# unit at strength 1 for TrivialAugment wide). pipeline/gpu/augment.py has the same operations.
OPERATIONS: dict[str, tuple[Apply, Unit, Unit]] = {
    "identity": (lambda image, v: image, 0, 0),
    "shear_x": (_affine("shear_x"), 0.3, 0.99),
    "shear_y": (_affine("shear_y"), 0.3, 0.99),
    "translate_x": (_affine("translate_x"), lambda size: 150 / 331 * size[0], 32),
    "translate_y": (_affine("translate_y"), lambda size: 150 / 331 * size[1], 32),
    "rotate": (lambda image, v: image.rotate(v), 30, 135),
    "brightness": (lambda image, v: ImageEnhance.Brightness(image).enhance(1 + v), 0.9, 0.99),
    "color": (lambda image, v: ImageEnhance.Color(image).enhance(1 + v), 0.9, 0.99),
    "contrast": (lambda image, v: ImageEnhance.Contrast(image).enhance(1 + v), 0.9, 0.99),
    "sharpness": (lambda image, v: ImageEnhance.Sharpness(image).enhance(1 + v), 0.9, 0.99),
    "posterize": (lambda image, v: ImageOps.posterize(image, 8 - round(abs(v))), 4, 6),
    "solarize": (lambda image, v: ImageOps.solarize(image, solarize_threshold(v)), 1, 1),  # type: ignore[arg-type]
    "autocontrast": (lambda image, v: ImageOps.autocontrast(image), 0, 0),
    "equalize": (lambda image, v: ImageOps.equalize(image), 0, 0),
}
NAMES = tuple(OPERATIONS)


def _sample_operation(
    size: tuple[int, int], rng: random.Random, strength: float, *, wide: bool
) -> Operation:
    """Sample an operation and the sign of its strength."""
    name = NAMES[int(rng.random() * len(NAMES))]
    sign = 1 if rng.random() < 0.5 else -1
    return name, signed_strength(name, sign * strength, size, wide=wide)


def signed_strength(name: str, strength: float, size: tuple[int, int], *, wide: bool) -> float:
    """Convert a strength in [-1, 1] to the unit of an operation on an image of (width, height).

    Args:
        wide: use TrivialAugment's units instead of RandAugment's.
    """
    _, narrow_unit, wide_unit = OPERATIONS[name]
    unit = wide_unit if wide else narrow_unit
    return strength * (unit(size) if callable(unit) else unit)


def apply_operations(picture: Picture, operations: Sequence[Operation]) -> Picture:
    if not operations:
        return picture
    pixels = picture.pixels()
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
        raise ValueError("rand_augment, trivial_augment: needs uint8 images of 3 channels")
    image = Image.fromarray(pixels)
    for name, strength in operations:
        image = OPERATIONS[name][0](image, strength)
    return Picture(np.asarray(image), origin=(picture, operations))


def follow(
    mask: np.ndarray, picture: Picture, operations: Sequence[Move] = (), *, fill: int = 0
) -> np.ndarray:
    """Move a mask as its image was moved, to the nearest pixel; decodes nothing.

    Args:
        mask: integers [H, W] or [H, W, C] of the size of the image's file.
        picture, operations: the results of `Compose.sample`.
        fill: value of the pixels from outside the mask.

    Raises:
        ValueError: the mask has another size than the file, or v2.AugMix blended moved copies.
    """
    if picture.origin is not None:
        mask = follow(mask, *picture.origin, fill=fill)
    elif mask.shape[1::-1] != (size := Picture(picture.source).size):
        raise ValueError(f"the mask's (width, height) is {mask.shape[1::-1]}, its image's {size}")
    for step in picture.geometry:
        mask = crop(mask, step.box, fill)
        (height, width), (new_width, new_height) = mask.shape[:2], step.size
        rows = (2 * np.arange(new_height) + 1) * height // (2 * new_height)
        columns = (2 * np.arange(new_width) + 1) * width // (2 * new_width)
        mask = mask[rows][:, columns[::-1] if step.mirrored else columns]
    if not operations:
        return mask
    # Where each pixel is from, counted from 1.
    places = np.arange(1, math.prod(mask.shape[:2]) + 1, dtype=np.int32).reshape(mask.shape[:2])
    for move in operations:
        if callable(move):
            places = move(places)
        elif move[0] in (*AFFINE, "rotate"):
            places = np.asarray(OPERATIONS[move[0]][0](Image.fromarray(places), move[1]))
    moved = mask.reshape(-1, *mask.shape[2:])[places - 1]
    moved[places == 0] = fill
    return moved


def as_rows(operations: Sequence[Operation]) -> np.ndarray:
    """Operations as numbers, float64 [count, 2]: position in NAMES, signed strength."""
    return np.array([(NAMES.index(name), strength) for name, strength in operations])


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "random_resized_crop": RandomResizedCrop,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "horizontal_flip": HorizontalFlip,
    "rand_augment": RandAugment,
    "trivial_augment": TrivialAugment,
    **V2_TRANSFORMS,
}


def build(entries: Sequence[Any], table: dict[str, Callable[..., Any]], *, key: str) -> list[Any]:
    """Build the transforms that a config list names, through an explicit table.

    Args:
        entries: each `name` or `{name: {parameter: value}}`.
        table: the allowed names: TRANSFORMS here, BATCH_TRANSFORMS for whole batches.
        key: the config key, for messages.

    Raises:
        UserError: an unknown name or parameter, or a value that the transform refuses.
    """
    return [_build_one(entry, table, key) for entry in entries]


def _build_one(entry: Any, table: dict[str, Callable[..., Any]], key: str) -> Any:
    name, parameters = entry, None
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, parameters),) = entry.items()
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise UserError(
            f"{key}: {entry!r} is not a transform; write `name` or `name: {{parameter: value}}`"
        )
    if name not in table:
        raise UserError(
            f"{key}: there is no transform {name}; choose from {', '.join(table)}"
            f"{did_you_mean(name, table)}"
        )
    try:
        return table[name](**(parameters or {}))
    except (TypeError, ValueError, IndexError) as error:
        takes = ""
        if isinstance(table[name], type):
            takes = f"; it takes {', '.join(inspect.signature(table[name]).parameters)}"
        raise UserError(f"{key}: {name}: {error}{takes}") from None
