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
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from conf.schema import UserError, did_you_mean
from pipeline.decode import INTERPOLATIONS, Box, Move, Picture, crop
from pipeline.parameters import choice, number, span, whole
from pipeline.torchvision_transforms import V2_TRANSFORMS

Transform = Callable[[Picture, random.Random], Picture]
LARGEST = 4096  # side of an image after a transform, in pixels


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
        last = self.transforms[-1] if self.transforms else None
        self._random = last if isinstance(last, RandAugment) else None

    @property
    def operations(self) -> int:
        """Number of operations that `sample` returns for each image."""
        return self._random.count if self._random else 0

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        picture, operations = self.sample(picture, rng)
        return apply_operations(picture, operations)

    def sample(self, picture: Picture, rng: random.Random) -> "tuple[Picture, list[Operation]]":
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

    `padding`: width of the black border that is added on every side first, in pixels.
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


# pipeline/gpu/augment.py has the same operations.
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
    if not operations:
        return picture
    pixels = picture.pixels()
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
        raise ValueError("rand_augment, trivial_augment: needs uint8 images of 3 channels")
    image = Image.fromarray(pixels)
    for operation in operations:
        image = OPERATIONS[operation.name].apply(image, operation)
    return Picture(np.asarray(image), origin=(picture, operations))


def follow(
    mask: np.ndarray, picture: Picture, operations: Sequence[Move] = (), *, fill: int = 0
) -> np.ndarray:
    """Move a mask as its image was moved, to the nearest pixel; decodes nothing.

    Raises ValueError if the mask has another size than the file, and TypeError if torchvision does
    not move masks as one of its transforms has moved the image.

    Args:
        mask: integers [H, W] or [H, W, C] of the size of the image's file.
        picture, operations: the results of `Compose.sample`.
        fill: value of the pixels from outside the mask.
    """
    if picture.origin is not None:
        mask = follow(mask, *picture.origin, fill=fill)
    elif mask.shape[1::-1] != (size := picture.full_size):
        raise ValueError(f"the mask's (width, height) is {mask.shape[1::-1]}, its image's {size}")
    elif picture.orientation > 1:
        raise ValueError(
            f"the image has the EXIF orientation {picture.orientation}, and its mask may be of the "
            "stored or of the upright pixels; turn the images once (exiftran -ai), or write "
            "data.exif_orientation=false if the masks are of the stored pixels"
        )
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
        elif move[0] in MATRICES:
            places = np.asarray(_move(Image.fromarray(places), Operation(*move[:2])))
    moved = mask.reshape(-1, *mask.shape[2:])[places - 1]
    moved[places == 0] = fill
    return moved


def as_rows(operations: Sequence[Operation]) -> np.ndarray:
    """Operations as float64 [count, 4]: position in NAMES, argument, interpolation, fill."""
    return np.array([(NAMES.index(name), *numbers) for name, *numbers in operations])


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

    Raises UserError if a name or parameter is unknown, or the transform refuses a value.

    Args:
        entries: each `name` or `{name: {parameter: value}}`.
        table: the allowed names: TRANSFORMS here, BATCH_TRANSFORMS for whole batches.
        key: the config key, for messages.
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
