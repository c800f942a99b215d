"""Transforms of one image, written as an ordered list in the config.

Journey of a batch, 3: picture -> picture. Runs in a worker. A transform is a function of (picture, rng); its generator is a
pure function of (seed, epoch, index), so an image is augmented alike whichever worker, start or restart it falls to.

To add one: write a class with keyword-only parameters, and name it in TRANSFORMS. One that changes the image's size says so
in `side`: the side of the square it makes, or None where that depends on the image.
"""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

from conf.schema import UserError, did_you_mean
from pipeline.decode import Picture
from pipeline.parameters import number, span, whole

Transform = Callable[[Picture, random.Random], Picture]


def sample_rng(seed: int, epoch: int, index: int) -> random.Random:
    """The generator of one sample's augmentation."""
    # Python hashes an integer seed of any length into its state, so the three fields need only not overlap.
    return random.Random((seed << 80) | (epoch << 48) | index)


class Compose:
    """Apply transforms in order.

    Args:
        transforms: built by `build`.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = list(transforms)

    @property
    def side(self) -> int | None:
        """Side of the square image that comes out, pixels; None when the list does not fix one."""
        side = None
        for transform in self.transforms:
            side = getattr(transform, "side", side)
        return side

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        for transform in self.transforms:
            picture = transform(picture, rng)
        return picture


class RandomResizedCrop:
    """A region of random area and aspect ratio, scaled to size x size (Inception's crop, arXiv 1409.4842).

    Args:
        size: side of the result, pixels.
        scale: range of the region's share of the image's area.
        ratio: range of its width / height.
    """

    def __init__(self, *, size: int, scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3)) -> None:
        self.side, self.scale, self.ratio = _side(size), span("scale", scale, 1), span("ratio", ratio, 1000)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return picture.resized((self.side, self.side), self.box(*picture.size, rng), quick=True)

    def box(self, width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
        """As torchvision draws it: ten tries, then the largest centred region of an allowed ratio."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(rng.random() * (width - w + 1)), int(rng.random() * (height - h + 1))
                return left, top, left + w, top + h
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


class Resize:
    """Scale so that the shorter side is `size / crop_ratio` pixels, of which a crop of `size` keeps the share `crop_ratio`.

    Args:
        size: of the crop that follows; with the default ratio, of the shorter side itself.
        crop_ratio: ImageNet models are validated at 0.875: 256 px before the crop of 224 px.
    """

    side = None

    def __init__(self, *, size: int, crop_ratio: float = 1.0) -> None:
        self.size = round(_side(size) / number("crop_ratio", crop_ratio, 0.01, 1))

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        width, height = picture.size
        short = min(width, height)
        return picture.resized((int(self.size * width / short), int(self.size * height / short)))


class CenterCrop:
    """The middle size x size pixels; a smaller image is padded with black."""

    def __init__(self, *, size: int) -> None:
        self.side = _side(size)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        width, height = picture.size
        left, top = round((width - self.side) / 2), round((height - self.side) / 2)
        return picture.cropped((left, top, left + self.side, top + self.side))


class RandomCrop:
    """size x size pixels from a random place of the image, padded with black by `padding` on every side."""

    def __init__(self, *, size: int, padding: int = 0) -> None:
        self.side, self.padding = _side(size), whole("padding", padding, 0, 4096)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        width, height = picture.size
        if min(width, height) + 2 * self.padding < self.side:
            raise ValueError(f"random_crop: {width}x{height} with padding {self.padding} is smaller than size {self.side}")
        left = int(rng.random() * (width + 2 * self.padding - self.side + 1)) - self.padding
        top = int(rng.random() * (height + 2 * self.padding - self.side + 1)) - self.padding
        return picture.cropped((left, top, left + self.side, top + self.side))


class HorizontalFlip:
    """Mirror left to right with probability p."""

    def __init__(self, *, p: float = 0.5) -> None:
        self.p = number("p", p, 0, 1)

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        return picture.mirrored() if rng.random() < self.p else picture


class RandAugment:
    """`count` random operations of strength `magnitude` (arXiv 1909.13719), as torchvision's RandAugment.

    Args:
        count: operations per image.
        magnitude: strength from 0 to STRENGTHS.
    """

    def __init__(self, *, count: int = 2, magnitude: int = 9) -> None:
        self.count = whole("count", count, 1, 100)
        self.strength = number("magnitude", magnitude, 0, STRENGTHS) / STRENGTHS

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        image = picture.pillow()
        for _ in range(self.count):
            image = operate(image, *_draw(rng), self.strength, wide=False)
        return Picture.of_pillow(image)


class TrivialAugment:
    """One random operation of random strength (arXiv 2103.10158, the wide space), as torchvision's TrivialAugmentWide."""

    def __call__(self, picture: Picture, rng: random.Random) -> Picture:
        strength = int(rng.random() * (STRENGTHS + 1)) / STRENGTHS
        return Picture.of_pillow(operate(picture.pillow(), *_draw(rng), strength, wide=True))


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.NEAREST)


STRENGTHS = 30  # steps from the weakest to the strongest; torchvision counts them from 0 as 31 bins
Unit = float | Callable[[Image.Image], float]
# name -> (operation(image, signed strength in its own unit), unit at strength 1 for RandAugment, for TrivialAugment wide)
OPERATIONS: dict[str, tuple[Callable[[Image.Image, float], Image.Image], Unit, Unit]] = {
    "identity": (lambda image, v: image, 0, 0),
    "shear_x": (lambda image, v: _affine(image, 1, v, 0, 0, 1, 0), 0.3, 0.99),
    "shear_y": (lambda image, v: _affine(image, 1, 0, 0, v, 1, 0), 0.3, 0.99),
    "translate_x": (lambda image, v: _affine(image, 1, 0, -int(v), 0, 1, 0), lambda image: 150 / 331 * image.width, 32),
    "translate_y": (lambda image, v: _affine(image, 1, 0, 0, 0, 1, -int(v)), lambda image: 150 / 331 * image.height, 32),
    "rotate": (lambda image, v: image.rotate(v), 30, 135),
    "brightness": (lambda image, v: ImageEnhance.Brightness(image).enhance(1 + v), 0.9, 0.99),
    "color": (lambda image, v: ImageEnhance.Color(image).enhance(1 + v), 0.9, 0.99),
    "contrast": (lambda image, v: ImageEnhance.Contrast(image).enhance(1 + v), 0.9, 0.99),
    "sharpness": (lambda image, v: ImageEnhance.Sharpness(image).enhance(1 + v), 0.9, 0.99),
    "posterize": (lambda image, v: ImageOps.posterize(image, 8 - round(abs(v))), 4, 6),
    # The threshold is a multiple of 0.5, without the last bit that a product of fractions may miss.
    "solarize": (lambda image, v: ImageOps.solarize(image, round(255 * (1 - abs(v)), 6)), 1, 1),  # type: ignore[arg-type]
    "autocontrast": (lambda image, v: ImageOps.autocontrast(image), 0, 0),
    "equalize": (lambda image, v: ImageOps.equalize(image), 0, 0),
}
NAMES = tuple(OPERATIONS)


def _draw(rng: random.Random) -> tuple[str, int]:
    """Name of an operation and the sign of its strength."""
    return NAMES[int(rng.random() * len(NAMES))], 1 if rng.random() < 0.5 else -1


def operate(image: Image.Image, name: str, sign: int, strength: float, *, wide: bool) -> Image.Image:
    """Apply an operation of `strength` 0 to 1; `wide` chooses TrivialAugment's units instead of RandAugment's."""
    operation, *units = OPERATIONS[name]
    unit = units[wide]
    return operation(image, sign * strength * (unit(image) if callable(unit) else unit))


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "random_resized_crop": RandomResizedCrop,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "horizontal_flip": HorizontalFlip,
    "rand_augment": RandAugment,
    "trivial_augment": TrivialAugment,
}


def build(entries: Sequence[Any], table: dict[str, Callable[..., Any]], *, key: str) -> list[Any]:
    """Build the transforms a config list names, through an explicit table.

    Args:
        entries: each `name` or `{name: {parameter: value}}`.
        table: what names are allowed: TRANSFORMS here, BATCH_TRANSFORMS for whole batches.
        key: the config key, for messages.

    Raises:
        UserError: an unknown name or parameter, or a value the transform refuses; says what is allowed.
    """
    return [_build_one(entry, table, key) for entry in entries]


def _build_one(entry: Any, table: dict[str, Callable[..., Any]], key: str) -> Any:
    if isinstance(entry, dict) and len(entry) == 1:
        name, parameters = next(iter(entry.items()))
        parameters = {} if parameters is None else parameters
    else:
        name, parameters = entry, {}
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise UserError(f"{key}: {entry!r} is not a transform; write `name` or `name: {{parameter: value}}`")
    if name not in table:
        hint = did_you_mean(name, table)
        raise UserError(f"{key}: there is no transform {name}; choose from {', '.join(table)}{'; ' if hint else ''}{hint}")
    signature = inspect.signature(table[name]).parameters.values()
    accepted = [p for p in signature if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    allowed = [p.name for p in accepted]
    unknown = next((p for p in parameters if p not in allowed), None)
    if unknown is not None:
        raise UserError(f"{key}: {name} has no parameter {unknown}; it has {', '.join(allowed) or 'none'}")
    missing = [p.name for p in accepted if p.default is p.empty and p.name not in parameters]
    if missing:
        example = {p: 224 if p == "size" else "..." for p in missing} | parameters
        text = ", ".join(f"{parameter}: {value}" for parameter, value in example.items())
        raise UserError(f"{key}: {name} needs {' and '.join(missing)}; write {name}: {{{text}}}")
    try:
        return table[name](**parameters)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"{key}: {name}: {error}") from None


def _side(size: Any) -> int:
    return whole("size", size, 1, 4096)
