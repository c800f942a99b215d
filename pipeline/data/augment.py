"""Image transforms, configured as an ordered list.

Data flow, step 3: picture -> picture, in a worker. A sample's generator `rng` is a pure function
of (seed, epoch, index), so the result does not depend on the worker or on a restart.

To add a transform, write a function of (image, rng) that returns an image of the same type, uint8
[H, W, C], and name it as module:function in the config; its other arguments are parameters. Or
write a class with such a `__call__`: `build_by_name` checks the `parameter`s of a dataclass.
Masks can follow the transforms in this file that are `Geometry`: functions of a Picture.
"""

import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from conf.errors import UserError, did_you_mean
from conf.named import check_signature, create_object, import_object, is_object_name, split_entry
from conf.schema import (
    UNIT_INTERVAL,
    Constraint,
    choice,
    integer_interval,
    interval,
    list_of,
    ordered_pair,
)
from pipeline.data.decode import INTERPOLATIONS, Box, CropResize, Picture, crop, size_of

LARGEST = 4096  # maximum height and width of an image after a transform, in pixels
PIXELS = integer_interval(1, LARGEST)
NUMPY_GENERATOR = np.random.MT19937(0)  # NumPy's global generator inside `seeded`
COLOR = integer_interval(0, 255) | list_of(integer_interval(0, 255), 3, 3)  # one or three levels
SIDES: dict[str, Any] = {"shorter": (min, int), "longer": (max, round)}  # like torchvision, timm
UNCHECKED = Constraint(lambda value: True, "any value")
# torchvision's v2 transforms that need only one image and random numbers, and keep size and uint8
V2_NAMES = tuple(
    "AugMix AutoAugment ElasticTransform RandAugment RandomAffine RandomPerspective RandomRotation "
    "RandomVerticalFlip TrivialAugmentWide ColorJitter GaussianBlur RandomAdjustSharpness "
    "RandomAutocontrast RandomChannelPermutation RandomEqualize RandomErasing RandomGrayscale "
    "RandomInvert RandomPhotometricDistort RandomPosterize RandomSolarize".split()
)
# Padding mode -> `CropResize.fill`: constant is black, reflect the image mirrored at its edge
PADDINGS = {"constant": 0, "reflect": None}


def sample_rng(seed: int, epoch: int, index: int) -> Random:
    """Return the generator for the augmentation of one sample."""
    # Unique seeds: epoch < 2**32 (the position in the stream if classes are sampled), index < 2**48
    return Random((seed << 80) | (epoch << 48) | index)


class Geometry(ABC):
    """Base class of crops, resizes and flips, which decode no pixels and which masks follow."""

    @abstractmethod
    def __call__(self, picture: Picture, rng: Random) -> Picture: ...


# (image [H, W, C], which it may overwrite, rng) -> image of the same dtype
ImageFunction = Callable[[np.ndarray, Random], np.ndarray]
Transform = Geometry | ImageFunction


@dataclass(eq=False)
class Compose:
    transforms: Sequence[Transform]  # the result of `build_by_name`
    image_size: int = 0  # height and width of the resulting images in pixels; 0 if unknown

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        for transform in self.transforms:
            if isinstance(transform, Geometry):
                picture = transform(picture, rng)
            else:
                image = _apply(transform, picture.pixels(), rng)
                picture = Picture(image, untracked=True)
        return picture


def _apply(transform: ImageFunction, pixels: np.ndarray, rng: Random) -> np.ndarray:
    """Apply a transform to a copy of the pixels. Raises UserError if dtype or channels change."""
    result = transform(pixels.copy(), rng)
    image = np.asarray(result)
    if (image.dtype, image.shape[2:]) != (pixels.dtype, pixels.shape[2:]):
        problem = f"returned {type(result).__name__} {image.dtype} {list(image.shape)}"
        expected = f"return {pixels.dtype} [H, W, {pixels.shape[2]}]"
        raise UserError(f"the transform {name_of(transform)}", problem, expected)
    return image


def name_of(transform: Transform) -> str:
    """Return a transform's class or function name."""
    function = getattr(transform, "func", transform)  # of a partial
    return getattr(function, "__name__", type(function).__name__)


def parameter(constraint: Constraint, default: Any = MISSING) -> Any:
    """Declare a transform's parameter, which `build_by_name` checks, and its default if any."""
    return field(default=default, metadata={"constraint": constraint})


def draw_interpolation(choice: str, rng: Random) -> str:
    """Return bilinear or bicubic for `random`, else the choice itself."""
    if choice == "random":
        return INTERPOLATIONS[rng.random() < 0.5]
    return choice


@dataclass(kw_only=True)
class RandomResizedCrop(Geometry):
    """Scale a region of random area and aspect ratio to a square (Inception, arXiv 1409.4842)."""

    size: int = parameter(PIXELS)  # height and width of the result in pixels
    # range of the region's area as a fraction of the image's area
    scale: Sequence[float] = parameter(ordered_pair(1), (0.08, 1.0))
    # range of width / height
    ratio: Sequence[float] = parameter(ordered_pair(1000), (3 / 4, 4 / 3))
    # random selects one per image, like timm's RandomResizedCropAndInterpolation
    interpolation: str = parameter(choice(*INTERPOLATIONS, "random"), "bilinear")

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        box = self.box(*picture.size, rng)
        interpolation = draw_interpolation(self.interpolation, rng)
        return picture.resized((self.size, self.size), box, interpolation=interpolation, quick=True)

    def box(self, width: int, height: int, rng: Random) -> Box:
        """Sample a region like torchvision: ten tries, then the largest valid centered region."""
        narrowest, widest = self.ratio
        low, high = math.log(narrowest), math.log(widest)
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left = int(rng.random() * (width - w + 1))
                top = int(rng.random() * (height - h + 1))
                return left, top, left + w, top + h
        aspect = min(max(width / height, narrowest), widest)
        w = min(width, max(1, round(height * aspect)))
        h = min(height, max(1, round(width / aspect)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


@dataclass(kw_only=True)
class Resize(Geometry):
    """Scale the image so that one side is `size / crop_ratio` pixels.

    A `size` of [height, width] scales both sides, whatever the image's aspect ratio.
    """

    # size of the following crop in pixels; with the default ratio, the side itself
    size: int | Sequence[int] = parameter(PIXELS | list_of(PIXELS, 2, 2))
    # 0.875 is usual for ImageNet: 256 px before a crop of 224 px
    crop_ratio: float = parameter(interval(0.01, 1), 1.0)
    interpolation: str = parameter(choice(*INTERPOLATIONS), "bilinear")  # with antialiasing
    # longer keeps the whole image, which center_crop then pads
    side: str = parameter(choice(*SIDES), "shorter")

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        width, height = picture.size
        if isinstance(self.size, int):
            length, rounded = SIDES[self.side]
            old, new = length(width, height), round(self.size / self.crop_ratio)
            width, height = rounded(new * width / old), rounded(new * height / old)
        else:
            height, width = map(round, np.divide(self.size, self.crop_ratio))
        return picture.resized((max(1, width), max(1, height)), interpolation=self.interpolation)


@dataclass(kw_only=True)
class CenterCrop(Geometry):
    """Crop the center to size x size pixels, and pad a smaller image, like torchvision."""

    size: int = parameter(PIXELS)
    fill: int | Sequence[int] = parameter(COLOR, 0)  # color of the padding

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        spare = np.subtract(picture.size, self.size)
        left, top = np.where(spare < 0, spare / 2, np.rint(spare / 2)).astype(int).tolist()
        return picture.cropped((left, top, left + self.size, top + self.size), fill=self.fill)


@dataclass(kw_only=True)
class RandomCrop(Geometry):
    """Crop a random region of size x size pixels."""

    size: int = parameter(PIXELS)
    # width of the border that is first added on every side, in pixels
    padding: int = parameter(integer_interval(0, LARGEST), 0)
    padding_mode: str = parameter(choice(*PADDINGS), "constant")

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        width, height = picture.size
        spare_width = width + 2 * self.padding - self.size
        spare_height = height + 2 * self.padding - self.size
        if min(spare_width, spare_height) < 0:
            padded = f"{width}x{height} with padding {self.padding}"
            raise ValueError(f"random_crop: {padded} is smaller than size {self.size}")
        left = int(rng.random() * (spare_width + 1)) - self.padding
        top = int(rng.random() * (spare_height + 1)) - self.padding
        box = (left, top, left + self.size, top + self.size)
        return picture.cropped(box, fill=PADDINGS[self.padding_mode])


@dataclass(kw_only=True)
class HorizontalFlip(Geometry):
    """Flip left to right with probability p."""

    p: float = parameter(UNIT_INTERVAL, 0.5)

    def __call__(self, picture: Picture, rng: Random) -> Picture:
        return picture.mirrored() if rng.random() < self.p else picture


class TorchvisionTransform:
    """Apply a v2 transform to one image, with torch's generator seeded from the sample's.

    Importing torchvision takes a second, so it happens only if a config names such a transform, in
    the training process to check the parameters, and in a worker for its first image. `name`: one
    of V2_NAMES; `parameters`: constructor arguments.
    """

    def __init__(self, name: str, **parameters: Any) -> None:
        self.name = name
        self.parameters = parameters
        _v2_transform(self)  # raises for invalid parameters now

    def __call__(self, image: np.ndarray, rng: Random) -> np.ndarray:
        pixels = torch.from_numpy(image).permute(2, 0, 1).contiguous()  # [C, H, W]
        with seeded(rng):
            pixels = _v2_transform(self)(pixels).permute(1, 2, 0)
        return pixels.numpy()


@cache  # an attribute would be unpickled, and import torchvision, when a worker starts
def _v2_transform(transform: TorchvisionTransform) -> Any:
    from torchvision.transforms import v2

    return getattr(v2, transform.name)(**transform.parameters)


@contextmanager
def seeded(rng: Random) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), NumPy and Python from `rng`.

    Takes 50 us. After the `with` block, the generators continue as before.
    """
    seed = rng.getrandbits(63)
    python_state = random.getstate()
    numpy_generator = get_bit_generator()  # NumPy's get_state and set_state take 300 us
    random.seed(seed)
    set_bit_generator(NUMPY_GENERATOR)
    np.random.seed(seed % 2**32)
    try:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the GPUs' generators.
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        set_bit_generator(numpy_generator)


def transform_target(target: np.ndarray, picture: Picture, *, fill: int = 0) -> np.ndarray:
    """Crop, resize and flip a mask or points like their image, without decoding it.

    Raises ValueError if a mask differs in size from the image file, or after any other transform.

    Args:
        target: a mask or a map, [H, W] or [H, W, C] with the image file's size, which is resized by
            nearest neighbor; or points, float [N, 2] of (x, y) in pixels from the file's upper
            left corner. Returned points are relative to the result's corner, and may be outside.
        picture: the transformed image.
        fill: value of the pixels outside the mask.
    """
    if picture.untracked:
        raise ValueError(
            "a mask follows crops, resizes and flips only; remove other transforms, and rotate "
            "photos with an EXIF orientation once (exiftran -ai) or set data.exif_orientation=false"
        )
    is_points = target.dtype.kind == "f" and target.shape[1:] == (2,)
    if not is_points and size_of(target) != picture.full_size:
        size = f"the mask's (width, height) is {size_of(target)}"
        text = f"{size}, its image's is {picture.full_size}; return points as float [N, 2]"
        raise ValueError(text)
    transform = _transform_points if is_points else partial(_transform_mask, fill=fill)
    for step in picture.geometry:
        target = transform(target, step)
    return target


def _transform_points(points: np.ndarray, step: CropResize) -> np.ndarray:
    left, top, right, bottom = step.box
    points = (points - (left, top)) * step.size / (right - left, bottom - top)
    if step.mirrored:
        points = points * (-1, 1) + (step.size[0], 0)
    return points


def _transform_mask(mask: np.ndarray, step: CropResize, fill: int) -> np.ndarray:
    mask = crop(mask, step.box, None if step.fill is None else fill)
    height, width = mask.shape[:2]
    new_width, new_height = step.size
    rows = (2 * np.arange(new_height) + 1) * height // (2 * new_height)
    columns = (2 * np.arange(new_width) + 1) * width // (2 * new_width)
    if step.mirrored:
        columns = columns[::-1]
    return mask[rows][:, columns]


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "random_resized_crop": RandomResizedCrop,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "horizontal_flip": HorizontalFlip,
    **{f"v2.{name}": partial(TorchvisionTransform, name) for name in V2_NAMES},
}


def build_by_name(entries: Sequence[Any], table: dict[str, Any], *, key: str) -> list[Any]:
    """Create the transforms in a config list.

    Raises UserError for an unknown name or an invalid parameter.

    Args:
        entries: each `name` or `{name: {parameter: value}}`; a name may be `module:name`.
        table: the known names: TRANSFORMS here, BATCH_TRANSFORMS for whole batches.
    """
    transforms = []
    for entry in entries:
        name, parameters = split_entry(entry, key)
        if is_object_name(name):
            transform = _custom_transform(name, parameters, key)
        else:
            transform = _from_table(name, parameters, table, key)
        _check_parameters(transform, f"{key}: {name}")
        transforms.append(transform)
    return transforms


def _custom_transform(name: str, parameters: dict[str, Any], key: str) -> Any:
    """Instantiate a class `module:name`, or bind parameters to a function."""
    named = import_object(name, key)
    if isinstance(named, type):
        return create_object(name, key, Callable, **parameters)
    check_signature(named, f"{key}: {name}", None, rng=None, **parameters)
    return partial(named, **parameters)


def _from_table(name: str, parameters: dict[str, Any], table: dict[str, Any], key: str) -> Any:
    if name not in table:
        choices = f"choose from {', '.join(table)}"
        nearest = did_you_mean(name.split(".")[-1], table)
        raise UserError(key, f"unknown transform {name}", choices + nearest)
    create = table[name]
    try:
        return create(**parameters)
    except (TypeError, ValueError, IndexError) as error:
        text = str(error).rpartition("__init__() ")[2]  # without the class name
        if isinstance(create, type):
            text += f"; expected {', '.join(inspect.signature(create).parameters)}"
        raise UserError(f"{key}: {name}", text) from None


def _check_parameters(transform: Any, origin: str) -> None:
    """Raise UserError if a `parameter` of a dataclass has an invalid value."""
    if not is_dataclass(transform):
        return
    for one in fields(transform):
        constraint = one.metadata.get("constraint", UNCHECKED)
        value = getattr(transform, one.name)
        if not constraint.check(value):
            problem = f"{one.name}={value}: invalid value"
            raise UserError(origin, problem, f"expected {constraint.description}")
