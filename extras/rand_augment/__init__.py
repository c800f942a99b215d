"""RandAugment and TrivialAugment with three lists of operations and timm's options; 3-Augment.

    augment.train=[..., {extras.rand_augment:RandAugment: {operations: timm, magnitude: 21}}]

Workers apply the operations with Pillow. If augment.train ends with RandAugment or TrivialAugment
and training runs on a GPU, workers only sample the operations, and on_gpu.py applies them to a
batch with identical pixels.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from conf.schema import NULL, UNIT_INTERVAL, choice, integer_interval, interval, list_of
from pipeline.data.augment import draw_interpolation, parameter
from pipeline.data.decode import INTERPOLATIONS


class Operation(NamedTuple):
    """A name from MATRICES or NAMES, or identity, and its parameter.

    Operations that move pixels use `interpolation`, a value of Image.Resampling, and `fill`, the
    color of pixels from outside the image: red + 256 green + 65,536 blue.
    """

    name: str
    number: float
    interpolation: int = Image.Resampling.NEAREST
    fill: int = 0


STRENGTHS = 30  # steps from the weakest to the strongest; torchvision has 31 bins, from 0 to 30
LEVEL = integer_interval(0, 255)


def _rotation(degrees: float, size: tuple[int, int]) -> tuple[float, ...]:
    """Compute Image.rotate's matrix for a rotation about the center."""
    x, y = size[0] / 2, size[1] / 2
    angle = -math.radians(degrees % 360)
    cos = round(math.cos(angle), 15)
    sin = round(math.sin(angle), 15)
    from_x = -x * cos - y * sin + x
    from_y = x * sin - y * cos + y
    return cos, sin, from_x, -sin, cos, from_y


# Operations that move pixels: name -> function of (number, (width, height)) that returns an affine
# matrix (a, b, c, d, e, f): the result's (x, y) is the image's (a x + b y + c, d x + e y + f).
MATRICES: dict[str, Callable[[float, tuple[int, int]], tuple[float, ...]]] = {
    "shear_x": lambda v, size: (1, v, 0, 0, 1, 0),
    "shear_y": lambda v, size: (1, 0, 0, v, 1, 0),
    "translate_x": lambda v, size: (1, 0, -v, 0, 1, 0),
    "translate_y": lambda v, size: (1, 0, 0, 0, 1, -v),
    "rotate": _rotation,
}
# Operations that blend the image with a degenerate version; the number is the image's weight.
BLENDED = ("brightness", "color", "contrast", "sharpness")
# Operations on a channel's levels: name -> function of (level, number) that returns the new level.
LEVELS: dict[str, Callable[[int, int], int]] = {
    "posterize": lambda level, mask: level & mask,
    "solarize": lambda level, first: level if level < first else 255 - level,
    "invert": lambda level, _: 255 - level,
    "solarize_add": lambda level, add: min(level + add, 255) if level < 128 else level,
}
# All operations that do not move pixels, in the order in which the kernels number them.
NAMES = (*BLENDED, *LEVELS, "autocontrast", "equalize")
_COMMON = (*MATRICES, *BLENDED, "posterize", "solarize", "autocontrast", "equalize")
LISTS = dict.fromkeys(("torchvision", "wide"), ("identity", *_COMMON))
LISTS["timm"] = (*_COMMON, "invert", "solarize_add")


class Strongest(NamedTuple):
    """Parameters of operations at the maximum strength."""

    shear: float
    degrees: float
    blend: float  # 0.9 weights the image from 0.1 to 1.9
    bits: int  # number of bits that posterize drops


STRONGEST = dict.fromkeys(LISTS, Strongest(shear=0.3, degrees=30, blend=0.9, bits=4))
STRONGEST["wide"] = Strongest(shear=0.99, degrees=135, blend=0.99, bits=6)


def apply(image: Image.Image, operation: Operation) -> Image.Image:
    """Apply an operation to an RGB image. The kernels compute identical pixels."""
    name, value, interpolation, fill = operation
    if name == "identity":
        return image
    if name in MATRICES:
        matrix = MATRICES[name](value, image.size)
        mode = Image.Resampling(interpolation)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, mode, fillcolor=fill)
    if name in BLENDED:
        return getattr(ImageEnhance, name.capitalize())(image).enhance(value)
    if name in LEVELS:
        levels = [LEVELS[name](level, int(value)) for level in range(256)]
        return image.point(3 * levels)
    return getattr(ImageOps, name)(image)


def number_of(name: str, strength: float, size: tuple[int, int], operations: str) -> float:
    """Convert a strength in [-1, 1] to an operation's number for an image of (width, height)."""
    strongest = STRONGEST[operations]
    if name in ("shear_x", "shear_y"):
        return strength * strongest.shear
    if name == "rotate":
        return strength * strongest.degrees
    if name in BLENDED:
        return 1 + strength * strongest.blend
    if name == "translate_x":
        return _translation(strength, size[0], operations)
    if name == "translate_y":
        return _translation(strength, size[1], operations)
    if name == "posterize":
        return _posterize_mask(abs(strength), operations)
    if name == "solarize":
        return _solarize_level(abs(strength), operations)
    if name == "solarize_add":
        return int(110 * abs(strength))
    return 0


def _translation(strength: float, side: int, operations: str) -> float:
    """Return the translation in pixels."""
    if operations == "timm":
        return round(strength * 0.45 * side, 6)  # Pillow accumulates the error of the last bit
    if operations == "wide":
        return int(strength * 32)
    return int(strength * (150 / 331 * side))


def _posterize_mask(strength: float, operations: str) -> int:
    """Return the mask of the bits to keep."""
    if operations == "timm":  # keep 1 bit; timm's strongest keeps 0, which Pillow rejects
        dropped_bits = 8 - max(4 - int(4 * strength), 1)
    else:
        dropped_bits = round(STRONGEST[operations].bits * strength)
    return int(256 - 2**dropped_bits)


def _solarize_level(strength: float, operations: str) -> int:
    """Return the lowest level to invert."""
    if operations == "timm":
        return 256 - int(256 * strength)
    return math.ceil(round(255 * (1 - strength), 6))  # the product may be wrong in the last bit


@dataclass(kw_only=True)
class RandAugment:
    """Apply random operations with a fixed strength (arXiv 1909.13719).

    timm's magnitudes go from 0 to 10 instead of STRENGTHS. Its rand-m7-mstd0.5-inc1 is {operations:
    timm, magnitude: 21, magnitude_std: 1.5, p: 0.5, interpolation: random}, with the dataset's mean
    color as `fill`.
    """

    count: int = parameter(integer_interval(1, 100), 2)  # operations per image
    # Strength; null samples it uniformly for each operation
    magnitude: float | None = parameter(interval(0, STRENGTHS) | NULL, 9)
    # Standard deviation of each operation's strength, which is sampled from a normal distribution,
    # rounded and clipped to [0, STRENGTHS]
    magnitude_std: float = parameter(interval(0, STRENGTHS), 0)
    p: float = parameter(UNIT_INTERVAL, 1)  # probability of each operation
    # List of operations and their strengths: torchvision's RandAugment, its TrivialAugmentWide
    # (wide), or timm's with strengths that increase with the magnitude
    operations: str = parameter(choice(*LISTS), "torchvision")
    # For shear, translation and rotation; torchvision's default is nearest. random chooses bilinear
    # or bicubic for each operation, like timm
    interpolation: str = parameter(choice("nearest", *INTERPOLATIONS, "random"), "nearest")
    # Level, or [red, green, blue], of pixels from outside the image
    fill: int | Sequence[int] = parameter(LEVEL | list_of(LEVEL, 3, 3), 0)

    def __call__(self, image: np.ndarray, rng: random.Random) -> np.ndarray:
        rgb = rgb_image(image)
        for operation in self.sample(rgb.size, rng):
            rgb = apply(rgb, operation)
        return np.asarray(rgb)

    def sample(self, size: tuple[int, int], rng: random.Random) -> list[Operation]:
        """Sample the operations for an image of (width, height)."""
        return [self._sample_one(size, rng) for _ in range(self.count)]

    def _sample_one(self, size: tuple[int, int], rng: random.Random) -> Operation:
        if self.p < 1 and rng.random() >= self.p:
            return Operation("identity", 0)
        strength = self._strength(rng) / STRENGTHS
        names = LISTS[self.operations]
        name = names[int(rng.random() * len(names))]
        sign = 1 if rng.random() < 0.5 else -1
        value = number_of(name, sign * strength, size, self.operations)
        if name not in MATRICES:
            return Operation(name, value)
        resampling = Image.Resampling[draw_interpolation(self.interpolation, rng).upper()]
        levels = self.fill
        if isinstance(levels, int):
            levels = (levels, levels, levels)
        red, green, blue = levels
        fill = red + 256 * green + 256**2 * blue  # Pillow's integer format of a color
        return Operation(name, value, resampling, fill)

    def _strength(self, rng: random.Random) -> float:
        if self.magnitude is None:
            return int(rng.random() * (STRENGTHS + 1))
        if self.magnitude_std == 0:
            return self.magnitude
        drawn = round(rng.gauss(self.magnitude, self.magnitude_std))
        return min(max(drawn, 0), STRENGTHS)


@dataclass(kw_only=True)
class TrivialAugment(RandAugment):
    """Apply one operation with a random strength, like torchvision's TrivialAugmentWide.

    Source: arXiv 2103.10158.
    """

    count: int = field(default=1, init=False)
    magnitude: float | None = field(default=None, init=False)
    magnitude_std: float = field(default=0, init=False)
    operations: str = field(default="wide", init=False)


class ThreeAugment:
    """Convert the image to gray, solarize or blur it, then jitter its colors: DeiT III's 3-Augment.

    Source: arXiv 2204.07118, with a jitter of 0.3. Blurring takes most of the time.
    """

    def __call__(self, image: np.ndarray, rng: random.Random) -> np.ndarray:
        blur = ImageFilter.GaussianBlur(rng.uniform(0.1, 2))
        kinds = (ImageOps.grayscale, ImageOps.solarize, lambda image: image.filter(blur))
        change = kinds[int(rng.random() * 3)]
        changed = change(rgb_image(image)).convert("RGB")
        for name in sorted(("brightness", "contrast", "color"), key=lambda _: rng.random()):
            changed = apply(changed, Operation(name, rng.uniform(0.7, 1.3)))
        return np.asarray(changed)


def rgb_image(pixels: np.ndarray) -> Image.Image:
    """Convert pixels to a Pillow image. Raises ValueError unless they are uint8 [H, W, 3]."""
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
        raise ValueError("RandAugment, TrivialAugment, ThreeAugment: expected uint8 RGB images")
    return Image.fromarray(pixels)
