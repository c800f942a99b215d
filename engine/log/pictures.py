"""Images for TensorBoard and scripts/bench.py, drawn with Pillow."""

import io
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

BLUE, RED, GREY = "#4c72b0", "#c44e52", "#808080"
LARGE, SMALL = 18, 14  # font sizes, pixels
MAX_CONFUSED = 50  # classes; a larger confusion matrix is hard to read
NAMED_WORST, NAMED_BEST = 20, 5
Counts = npt.NDArray[np.integer]
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


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


def bars(
    title: str,
    rows: Sequence[tuple[str, float, str]],
    *,
    marked: Collection[str] = (),
    most: float = 0,
    height: int = 44,
) -> Image.Image:
    """Draw a bar for each (name, value, label), 900 px wide.

    Args:
        marked: Names to draw in red.
        most: Value of the longest possible bar; 0 for the largest value.
        height: Height of a row, pixels.
    """
    width, left = 900, 180
    image, draw = sheet(width, 60 + height * len(rows) + 20, title)
    most = most or max((value for _, value, _ in rows), default=0) or 1
    for i, (name, value, label) in enumerate(rows):
        top = 56 + i * height
        bottom = top + height - min(16, height // 4)
        middle = (top + bottom) // 2
        right = left + max(2, int((width - left - 200) * value / most))
        draw.rectangle((left, top, right, bottom), fill=RED if name in marked else BLUE)
        draw.text(
            (16, middle), _shortened(name, left - 24, font(SMALL)), "black", font(SMALL), "lm"
        )
        draw.text((right + 8, middle), label, "black", font(SMALL), "lm")
    return image


def grid(images: Tensor, columns: int = 8) -> Tensor:
    """Arrange uint8 [N, 3, S, S] as uint8 [3, rows * S, columns * S]; empty cells are black."""
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    cells = torch.zeros(rows * columns, channels, height, width, dtype=images.dtype)
    cells[:count] = images
    return (
        cells.view(rows, columns, channels, height, width)
        .permute(2, 0, 3, 1, 4)
        .reshape(channels, rows * height, columns * width)
    )


def worst(title: str, images: Tensor, captions: Sequence[tuple[str, str, str]]) -> Image.Image:
    """Draw images with captions: class, prediction (red if wrong) and a remark such as the loss.

    Args:
        images: uint8 [N, 3, S, S]; small images are enlarged.
        captions: (class, prediction, remark) of each image.
    """
    side = images.shape[-1]
    # An integer multiple keeps the pixels of small images square.
    tile = side * -(-160 // side) if side < 160 else min(side, 256)
    columns = min(4, max(1, len(captions)))
    rows = -(-len(captions) // columns)
    width, height, top = tile + 8, tile + 62, 40
    image, draw = sheet(max(600, 8 + columns * width), top + height * rows, title, left=8)
    for i, (pixels, (label, prediction, remark)) in enumerate(zip(images, captions, strict=True)):
        x, y = 8 + i % columns * width, top + i // columns * height
        shown = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        filter = Image.Resampling.NEAREST if tile >= side else Image.Resampling.BILINEAR
        image.paste(shown.resize((tile, tile), filter), (x, y))
        judged = GREY if prediction == label else RED
        lines = [(label, "black"), (f"-> {prediction}", judged), (remark, GREY)]
        for line, (text, colour) in enumerate(lines):
            place = (x, y + tile + 3 + 17 * line)
            draw.text(place, _shortened(text, tile, font(SMALL)), colour, font(SMALL))
    return image


def confusion(title: str, table: Counts, classes: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix in percent of each class (row): correct in blue, wrong in red.

    With more than 50 classes it shows those that are most often confused, in pairs; the percentages
    are still of all images of a class.

    Args:
        table: int [classes, classes], number of images by class and prediction.
    """
    chosen = list(range(len(classes)))
    if len(chosen) > MAX_CONFUSED:
        chosen = most_confused(table, MAX_CONFUSED)
    count = len(chosen)
    if count < len(classes):
        title += f": the {count} of {len(classes):,} classes most often confused"
    part = table[np.ix_(chosen, chosen)] / np.maximum(table[chosen].sum(1, keepdims=True), 1)
    cell = max(22, min(64, 640 // max(1, count)))
    name_font = font(min(SMALL, cell - 7))
    digit_font = font(min(SMALL, cell // 2))
    names = [_shortened(classes[number], 180, name_font) for number in chosen]
    margin = 14 + round(max(map(name_font.getlength, names), default=0))

    right = np.eye(count, dtype=bool)[..., None]
    # The exponents make a few percent of wrong predictions visible.
    shades = np.where(right, part[..., None] ** 0.7 * 0.9, part[..., None] ** 0.5)
    colours = np.where(right, [76, 114, 176], [196, 78, 82])
    pixels = (255 + shades * (colours - 255)).round().astype(np.uint8)
    span = count * cell
    matrix = Image.fromarray(pixels).resize((span, span), Image.Resampling.NEAREST)

    left, top = 10 + margin, 64 + margin
    image, draw = sheet(max(760, left + span + 20), top + span + 20, title)
    columns = Image.new("RGB", (margin, span), "white")  # column names, rotated below
    draw_column = ImageDraw.Draw(columns)
    for i, name in enumerate(names):
        middle = i * cell + cell // 2
        draw_column.text((6, middle), name, "black", name_font, "lm")
        draw.text((left - 6, top + middle), name, "black", name_font, "rm")
    image.paste(columns.rotate(90, expand=True), (left, top - margin))
    image.paste(matrix, (left, top))
    draw.text(
        (16, 38), "rows: class, columns: prediction, % of the class's images", GREY, font(SMALL)
    )
    for row, column in np.argwhere(part >= 0.005).tolist():
        share = part[row, column]
        colour = "white" if share > (0.5 if row == column else 0.3) else "black"
        centre = (left + column * cell + cell // 2, top + row * cell + cell // 2)
        draw.text(centre, f"{100 * share:.0f}", colour, digit_font, "mm")
    draw.rectangle((left - 1, top - 1, left + span, top + span), outline=GREY)
    return image


def reliability(
    title: str, images: Counts, accuracy: npt.NDArray[np.floating], error: float
) -> Image.Image:
    """Draw the accuracy in bins of equal width of the confidence: a calibrated one is as high.

    Args:
        images: int [bins], number of images by confidence, which counts from 0 to 1.
        accuracy: float [bins], share of correct predictions; ignored where there are no images.
        error: the expected calibration error, in [0, 1].
    """
    edges = 100 * np.arange(len(images) + 1) / len(images)
    rows = [
        (f"confidence {low:.0f}-{high:.0f} %", 100 * share, f"{100 * share:.1f} % of {count:,}")
        for low, high, count, share in zip(
            edges, edges[1:], images.tolist(), accuracy.tolist(), strict=False
        )
        if count
    ]
    return bars(f"{title}: accuracy by confidence, ECE {100 * error:.2f} %", rows, most=100)


def most_confused(table: Counts, most: int) -> list[int]:
    """Choose up to `most` classes in pairs, the most often confused pair first."""
    wrong = np.triu(table + table.T, 1)
    pairs = np.argwhere(wrong)
    # `most` classes have fewer than `most` * `most` pairs.
    order = np.argsort(-wrong[tuple(pairs.T)], kind="stable")[: most * most]
    found = list(dict.fromkeys(pairs[order].ravel().tolist()))
    return found[:most] or list(range(min(most, len(table))))


def per_class(title: str, images: Counts, hits: Counts, classes: Sequence[str]) -> Image.Image:
    """Draw the accuracy of the classes as bars, the worst first: of many, the worst and the best.

    Args:
        images, hits: int [classes], number of images and of correct predictions.
    """
    known = np.flatnonzero(images)
    accuracy = 100 * hits[known] / images[known]
    order = np.lexsort((known, accuracy))
    rows = [
        (classes[known[i]], float(accuracy[i]), f"{accuracy[i]:.1f} % of {images[known[i]]:,}")
        for i in order
    ]
    if len(rows) <= NAMED_WORST + NAMED_BEST:
        return bars(title, rows, most=100, height=26)
    title += f": the {NAMED_WORST} worst and the {NAMED_BEST} best of {len(rows):,} classes"
    title += f" (median {np.median(accuracy):.1f} %)"
    shown, marked = rows[:NAMED_WORST] + rows[-NAMED_BEST:], [row[0] for row in rows[:NAMED_WORST]]
    return bars(title, shown, marked=marked, most=100, height=26)


def encoded(image: Image.Image, *, photos: bool = False) -> bytes:
    """Encode as PNG, or photographs larger than 64 CIFAR images as JPEG.

    The JPEG takes a tenth of the size and of the time. Its quality is sufficient for viewing:
    TensorBoard holds the GIL for 50 ms to compute the checksum of 600 kB.
    """
    file = io.BytesIO()
    if photos and image.width * image.height * 3 > 2**18:
        image.save(file, "JPEG", quality=85)
    else:
        image.save(file, "PNG", compress_level=3)
    return file.getvalue()


def _shortened(text: str, width: int, font: Font) -> str:
    """Shorten a text to `width` pixels."""
    text = text.encode(errors="replace").decode()  # a folder name may not be UTF-8
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
