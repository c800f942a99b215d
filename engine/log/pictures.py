"""Pictures of images and of a validation's results, drawn with Pillow."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageColor, ImageDraw, ImageFont

BLUE, RED, GREY = "#4c72b0", "#c44e52", "#808080"
LARGE, SMALL = 18, 14  # font sizes, pixels
TILE = 192  # side of an image in `tiles`, pixels
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
Pixels = npt.NDArray[np.uint8]


@cache
def font(size: int) -> Font:
    return ImageFont.load_default(size)


def sheet(
    width: int, height: int, title: str, *, left: int = 16
) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return a white image with a title, and its drawing context."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((left, 14), title, "black", font(LARGE))
    return image, draw


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Image.Image:
    """Draw a bar for each (name, value, label), with values up to 100."""
    width, left, height = 900, 180, 26
    image, draw = sheet(width, 80 + height * len(rows), title)
    for i, (name, value, label) in enumerate(rows):
        top = 56 + i * height
        middle, right = top + 10, left + max(2, int((width - left - 200) * value / 100))
        draw.rectangle((left, top, right, top + 20), BLUE)
        draw.text((16, middle), _shortened(name, left - 24), "black", font(SMALL), "lm")
        draw.text((right + 8, middle), label, "black", font(SMALL), "lm")
    return image


def tiles(
    title: str, images: Sequence[Pixels], captions: Sequence[Sequence[tuple[str, str]]]
) -> Image.Image:
    """Draw images in rows of four, each with up to three lines of (text, colour) below it.

    Args:
        images: each uint8 [S, S, 3].
    """
    width, height, top = TILE + 8, TILE + 62, 40
    image, draw = sheet(8 + 4 * width, top + height * -(-len(images) // 4), title, left=8)
    for i, (pixels, lines) in enumerate(zip(images, captions, strict=True)):
        x, y = 8 + i % 4 * width, top + i // 4 * height
        # The pixels of small images stay visible.
        small = len(pixels) < TILE
        filter = Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR
        image.paste(Image.fromarray(pixels).resize((TILE, TILE), filter), (x, y))
        for line, (text, colour) in enumerate(lines):
            place = (x, y + TILE + 3 + 17 * line)
            draw.text(place, _shortened(text, TILE), colour, font(SMALL))
    return image


def confusion(title: str, shares: npt.NDArray[np.floating], names: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix in percent of each class (row): correct in blue, wrong in red.

    Args:
        shares: float [N, N], share of a class's images by prediction (column).
    """
    count, left, top = len(names), 220, 90
    cell = max(22, min(64, 640 // max(1, count)))
    span, digits = count * cell, font(min(SMALL, cell // 2))
    image, draw = sheet(max(760, left + span + 20), top + span + 20, title)
    about = "rows: class, columns: prediction, % of the class's images"
    draw.text((16, 38), about, GREY, font(SMALL))
    colours = np.where(np.eye(count)[..., None], ImageColor.getrgb(BLUE), ImageColor.getrgb(RED))
    # The root makes a few percent of wrong predictions visible.
    pixels = 255 - np.sqrt(shares)[..., None] * (255 - colours)
    if count:
        matrix = Image.fromarray(pixels.round().astype(np.uint8))
        image.paste(matrix.resize((span, span), Image.Resampling.NEAREST), (left, top))
    for i, name in enumerate(names):
        middle = i * cell + cell // 2
        text = _shortened(f"{i + 1}  {name}", left - 20)
        draw.text((left - 6, top + middle), text, "black", font(SMALL), "rm")
        draw.text((left + middle, top - 12), f"{i + 1}", "black", digits, "mm")
    for row, column in np.argwhere(shares >= 0.005).tolist():
        centre = (left + column * cell + cell // 2, top + row * cell + cell // 2)
        colour = "white" if shares[row, column] > 0.3 else "black"
        draw.text(centre, f"{100 * shares[row, column]:.0f}", colour, digits, "mm")
    draw.rectangle((left - 1, top - 1, left + span, top + span), outline=GREY)
    return image


def _shortened(text: str, width: int) -> str:
    """Shorten a text to `width` pixels."""
    text = text.encode(errors="replace").decode()  # a folder name may not be UTF-8
    if font(SMALL).getlength(text) <= width:
        return text
    while text and font(SMALL).getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
