"""Pictures of images and of a validation's results, drawn with Pillow."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from pipeline.batch import Field

BLUE, RED, GREY = "#4c72b0", "#c44e52", "#808080"
LARGE, SMALL = 18, 14  # font sizes, pixels
TILE = 192  # side of an image in `tiles`, pixels
Pixels = npt.NDArray[np.uint8]


@cache
def font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def sheet(
    width: int, height: int, title: str, *, left: int = 16
) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return a white image with a title, and its drawing context."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((left, 14), title, "black", font(LARGE))
    return image, draw


def bars(title: str, rows: Sequence[tuple[str, float, int]]) -> Image.Image:
    """Draw a bar for each (name, percentage, number of images), 26 px apart."""
    image, draw = sheet(900, 80 + 26 * len(rows), title)
    for i, (name, percent, count) in enumerate(rows):
        top, right = 56 + 26 * i, 300 + max(2, int(4.4 * percent))
        draw.rectangle((300, top, right, top + 20), BLUE)
        draw.text((16, top + 10), _shortened(name, 276), "black", font(SMALL), "lm")
        label = f"{percent:.1f} % of {count:,}"
        draw.text((right + 8, top + 10), label, "black", font(SMALL), "lm")
    return image


def rgb(pixels: npt.NDArray[Any]) -> Pixels:
    """Return an image of a dataset, [..., H, W, C] of any dtype, as uint8 [H, W, 3].

    Of several frames, the first; of channels that are not RGB, the first as grey.
    """
    pixels = pixels.reshape(-1, *pixels.shape[-3:])[0]
    if pixels.shape[-1] != 3:
        pixels = pixels[..., :1].repeat(3, axis=-1)
    if pixels.dtype == np.uint8:
        return pixels
    return (pixels * (255 / Field(pixels.dtype).highest)).round().clip(0, 255).astype(np.uint8)


def tiles(
    title: str, images: Sequence[npt.NDArray[Any]], captions: Sequence[Sequence[tuple[str, str]]]
) -> Image.Image:
    """Draw images [..., S, S, C] (see `rgb`) in rows of four, each above up to three lines.

    A line is (text, colour).
    """
    width, height, top = TILE + 8, TILE + 62, 40
    image, draw = sheet(8 + 4 * width, top + height * -(-len(images) // 4), title, left=8)
    for i, (pixels, lines) in enumerate(zip(map(rgb, images), captions, strict=True)):
        x, y = 8 + i % 4 * width, top + i // 4 * height
        # The pixels of small images stay visible.
        small = len(pixels) < TILE
        filter = Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR
        image.paste(Image.fromarray(pixels).resize((TILE, TILE), filter), (x, y))
        for line, (text, colour) in enumerate(lines):
            place = (x, y + TILE + 3 + 17 * line)
            draw.text(place, _shortened(text, TILE), colour, font(SMALL))
    return image


def _shortened(text: str, width: int) -> str:
    """Shorten a text to `width` pixels."""
    text = text.encode(errors="replace").decode()  # a folder name may not be UTF-8
    if font(SMALL).getlength(text) <= width:
        return text
    while text and font(SMALL).getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
