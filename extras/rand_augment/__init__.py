"""RandAugment and TrivialAugment with three lists of operations and timm's options.

    augment.train=[..., {extras.rand_augment:RandAugment: {operations: timm, magnitude: 21}}]

In a worker, Pillow applies the operations. If one of them ends augment.train and the training runs
on a GPU, workers only draw the operations, and on_gpu.py applies those of a batch, with the same
pixels.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from pipeline.decode import INTERPOLATIONS, Picture
from pipeline.parameters import choice, number, whole


class Operation(NamedTuple):
    """A name of OPERATIONS and its argument, such as degrees or a threshold.

    `interpolation` of Image.Resampling and `fill` (red + 256 green + 65,536 blue, for pixels from
    outside) are for the operations that move pixels.
    """

    name: str
    argument: float
    interpolation: int = Image.Resampling.NEAREST
    fill: int = 0


class RandAugment:
    """Apply random operations of a fixed strength (arXiv 1909.13719).

    timm's magnitudes go from 0 to 10, not to STRENGTHS: its rand-m7-mstd0.5-inc1 is {operations:
    timm, magnitude: 21, magnitude_std: 1.5, p: 0.5, interpolation: random}, and the mean colour of
    the dataset as `fill`.

    Args:
        count: number of operations per image.
        magnitude: strength from 0 to STRENGTHS.
        magnitude_std: standard deviation of the strength of each operation, which is drawn from a
            normal distribution, rounded and clipped to [0, STRENGTHS]; 0: all have `magnitude`.
        p: probability of each operation.
        operations: their list and their strengths: those of torchvision's RandAugment, the wide
            ones of its TrivialAugmentWide, or those of timm that increase with the magnitude.
        interpolation: of shear, translation and rotation: nearest (torchvision's default),
            bilinear, bicubic, or random to draw bilinear or bicubic for each operation, as timm.
        fill: level, or [red, green, blue], of the pixels from outside the image.
    """

    def __init__(
        self,
        *,
        count: int = 2,
        magnitude: float = 9,
        magnitude_std: float = 0,
        p: float = 1,
        operations: str = "torchvision",
        interpolation: str = "nearest",
        fill: int | Sequence[int] = 0,
    ) -> None:
        self.count = whole("count", count, 1, 100)
        self.magnitude = number("magnitude", magnitude, 0, STRENGTHS)
        self.magnitude_std = number("magnitude_std", magnitude_std, 0, STRENGTHS)
        self.p = number("p", p, 0, 1)
        self.list = choice("operations", operations, _Kind._fields[1:])
        self.names = [name for name in NAMES if getattr(OPERATIONS[name], operations) is not None]
        allowed = ("nearest", *INTERPOLATIONS, "random")
        self.interpolation = choice("interpolation", interpolation, allowed)
        levels = list(fill) if isinstance(fill, list | tuple) else [fill] * 3
        if len(levels) != 3:
            raise ValueError(f"fill={fill}: give a level or [red, green, blue]")
        red, green, blue = (whole("fill", level, 0, 255) for level in levels)
        self.fill = red | green << 8 | blue << 16  # a colour as Pillow's whole number

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return apply_operations(picture, self.sample(picture.size, rng))

    def sample(self, size: tuple[int, int], rng: random.Random) -> list[Operation]:
        """Sample the operations of an image of this (width, height)."""
        return [self._sample_one(size, rng) for _ in range(self.count)]

    def _sample_one(self, size: tuple[int, int], rng: random.Random) -> Operation:
        if self.p < 1 and rng.random() >= self.p:
            return Operation("identity", 0)
        strength = self._strength(rng) / STRENGTHS
        name = self.names[int(rng.random() * len(self.names))]
        sign = 1 if rng.random() < 0.5 else -1
        value = argument(name, sign * strength, size, self.list)
        if name not in MATRICES:
            return Operation(name, value)
        interpolation = self.interpolation
        if interpolation == "random":
            interpolation = INTERPOLATIONS[rng.random() < 0.5]
        return Operation(name, value, Image.Resampling[interpolation.upper()], self.fill)

    def _strength(self, rng: random.Random) -> float:
        if self.magnitude_std == 0:
            return self.magnitude
        # Rounded, because the GPU path keeps the numbers of each operation and strength.
        magnitude = round(rng.gauss(self.magnitude, self.magnitude_std))
        return min(max(magnitude, 0), STRENGTHS)


class TrivialAugment(RandAugment):
    """Apply one random operation of random strength, as torchvision's TrivialAugmentWide.

    Its strengths are the wide ones of arXiv 2103.10158; `interpolation` and `fill` are those of
    RandAugment.
    """

    def __init__(self, *, interpolation: str = "nearest", fill: int | Sequence[int] = 0) -> None:
        super().__init__(count=1, operations="wide", interpolation=interpolation, fill=fill)

    def _strength(self, rng: random.Random) -> float:
        return int(rng.random() * (STRENGTHS + 1))


STRENGTHS = 30  # steps from the weakest to the strongest: torchvision's 31 bins, counted from 0


def _rotation(degrees: float, size: tuple[int, int]) -> tuple[float, ...]:
    """Compute the matrix of Image.rotate, about the centre."""
    angle, (x, y) = -math.radians(degrees % 360), (size[0] / 2, size[1] / 2)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    return cos, sin, -x * cos - y * sin + x, -sin, cos, x * sin - y * cos + y


# name -> affine matrix (a, b, c, d, e, f) of (argument, (width, height)): the point (x, y) of the
# result is the point (a x + b y + c, d x + e y + f) of the image.
MATRICES: dict[str, Callable[[float, tuple[int, int]], tuple[float, ...]]] = {
    "shear_x": lambda v, size: (1, v, 0, 0, 1, 0),
    "shear_y": lambda v, size: (1, 0, 0, v, 1, 0),
    "translate_x": lambda v, size: (1, 0, -v, 0, 1, 0),
    "translate_y": lambda v, size: (1, 0, 0, 0, 1, -v),
    "rotate": _rotation,
}


def _move(image: Image.Image, operation: Operation) -> Image.Image:
    name, value, interpolation, fill = operation
    matrix = MATRICES[name](value, image.size)
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling(interpolation), fillcolor=fill
    )


def _enhance(image: Image.Image, operation: Operation) -> Image.Image:
    enhancer = getattr(ImageEnhance, operation.name.capitalize())
    return enhancer(image).enhance(1 + operation.argument)


def _solarize(image: Image.Image, operation: Operation) -> Image.Image:
    return ImageOps.solarize(image, operation.argument)  # type: ignore[arg-type]  # takes halves


def _solarize_add(image: Image.Image, operation: Operation) -> Image.Image:
    """Brighten the dark half of the levels."""
    add = int(operation.argument)
    levels = [min(level + add, 255) if level < 128 else level for level in range(256)]
    return image.point(levels * 3)


Argument = float | Callable[[float, tuple[int, int]], float]


class _Kind(NamedTuple):
    """A function, then for each list its argument at a strength in [-1, 1].

    That is the strength times a number, or a function of (strength, (width, height)). None: the
    operation is not in this list.
    """

    apply: Callable[[Image.Image, Operation], Image.Image]
    torchvision: Argument | None
    wide: Argument | None
    timm: Argument | None


def _translations(axis: int) -> tuple[Argument, ...]:
    return (
        lambda s, size: int(s * (150 / 331 * size[axis])),
        lambda s, size: int(s * 32),
        lambda s, size: round(s * 0.45 * size[axis], 6),  # Pillow accumulates a last bit
    )


# on_gpu.py has the same operations.
OPERATIONS = {
    "identity": _Kind(lambda image, operation: image, 0, 0, None),
    "shear_x": _Kind(_move, 0.3, 0.99, 0.3),
    "shear_y": _Kind(_move, 0.3, 0.99, 0.3),
    "translate_x": _Kind(_move, *_translations(axis=0)),
    "translate_y": _Kind(_move, *_translations(axis=1)),
    "rotate": _Kind(_move, 30, 135, 30),
    "brightness": _Kind(_enhance, 0.9, 0.99, 0.9),
    "color": _Kind(_enhance, 0.9, 0.99, 0.9),
    "contrast": _Kind(_enhance, 0.9, 0.99, 0.9),
    "sharpness": _Kind(_enhance, 0.9, 0.99, 0.9),
    "posterize": _Kind(  # number of bits to keep
        lambda image, operation: ImageOps.posterize(image, int(operation.argument)),
        lambda s, size: 8 - round(4 * abs(s)),
        lambda s, size: 8 - round(6 * abs(s)),
        lambda s, size: max(4 - int(4 * abs(s)), 1),  # Pillow refuses 0, timm's for the strongest
    ),
    "solarize": _Kind(  # the lowest level to invert: a multiple of 0.5, or of 1
        _solarize,
        lambda s, size: round(255 * (1 - abs(s)), 6),  # restores a bit that a product may lose
        lambda s, size: round(255 * (1 - abs(s)), 6),
        lambda s, size: 256 - int(256 * abs(s)),
    ),
    "autocontrast": _Kind(lambda image, operation: ImageOps.autocontrast(image), 0, 0, 0),
    "equalize": _Kind(lambda image, operation: ImageOps.equalize(image), 0, 0, 0),
    "invert": _Kind(_solarize, None, None, 0),
    "solarize_add": _Kind(_solarize_add, None, None, lambda s, size: int(110 * abs(s))),
}
NAMES = tuple(OPERATIONS)


def argument(name: str, strength: float, size: tuple[int, int], operations: str) -> float:
    """Convert a strength in [-1, 1] to the argument on an image of (width, height) in a list."""
    unit: Argument | None = getattr(OPERATIONS[name], operations)
    assert unit is not None, (name, operations)
    return unit(strength, size) if callable(unit) else strength * unit


def apply_operations(picture: Picture, operations: Sequence[Operation]) -> Picture:
    pixels = picture.pixels()
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
        raise ValueError("RandAugment, TrivialAugment: need uint8 images of 3 channels")
    image = Image.fromarray(pixels)
    for operation in operations:
        image = OPERATIONS[operation.name].apply(image, operation)
    return Picture(np.asarray(image), moved=True)


def as_rows(operations: Sequence[Operation]) -> np.ndarray:
    """Operations as float64 [count, 4]: position in NAMES, argument, interpolation, fill."""
    return np.array([(NAMES.index(name), *numbers) for name, *numbers in operations])
