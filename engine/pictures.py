"""What a run shows besides curves, drawn with Pillow: a picture needs no plotting library."""

import io
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

BLUE, RED, GREY = "#4c72b0", "#c44e52", "#808080"
MOST_CONFUSED = 50  # classes of a confusion matrix that can still be read
NAMED_WORST, NAMED_BEST = 20, 5
Counts = npt.NDArray[np.integer]


def bars(
    title: str, rows: Sequence[tuple[str, float, str]], *, marked: Collection[str] = (), most: float = 0, height: int = 44
) -> Image.Image:
    """A bar for each (name, value, label), the `marked` names in red, against the largest value or `most`. 900 px wide.

    Args:
        height: of a row, pixels.
    """
    width, left = 900, 180
    image = Image.new("RGB", (width, 60 + height * len(rows) + 20), "white")
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(18), ImageFont.load_default(14)
    draw.text((16, 14), title, "black", font)
    most = most or max((value for _, value, _ in rows), default=0) or 1
    for i, (name, value, label) in enumerate(rows):
        top, thick = 56 + i * height, height - min(16, height // 4)
        length = max(2, int((width - left - 200) * value / most))
        draw.rectangle((left, top, left + length, top + thick), fill=RED if name in marked else BLUE)
        draw.text((16, top + thick // 2), _shortened(name, left - 24, small), "black", small, "lm")
        draw.text((left + length + 8, top + thick // 2), label, "black", small, "lm")
    return image


def grid(images: Tensor, columns: int = 8) -> Tensor:
    """uint8 [N, 3, S, S] -> uint8 [3, rows * S, columns * S], missing places black."""
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = torch.zeros(rows * columns, channels, height, width, dtype=images.dtype)
    sheet[:count] = images
    return (
        sheet.view(rows, columns, channels, height, width)
        .permute(2, 0, 3, 1, 4)
        .reshape(channels, rows * height, columns * width)
    )


def worst(title: str, images: Tensor, captions: Sequence[tuple[str, str, str]]) -> Image.Image:
    """Images with what is written under each: its class, what it was taken for (in red if another), and the loss.

    Args:
        images: uint8 [N, 3, S, S]; small ones are shown larger.
        captions: N times (class, prediction, the rest).
    """
    side = images.shape[-1]
    tile = side * -(-160 // side) if side < 160 else min(side, 256)  # a whole multiple keeps small pixels square
    columns, font = min(4, max(1, len(captions))), ImageFont.load_default(14)
    width, height, top = tile + 8, tile + 62, 40
    sheet = Image.new("RGB", (max(600, 8 + columns * width), top + height * -(-len(captions) // columns)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((8, 10), title, "black", ImageFont.load_default(18))
    for i, (pixels, (label, prediction, rest)) in enumerate(zip(images, captions, strict=True)):
        x, y = 8 + i % columns * width, top + i // columns * height
        shown = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        filter = Image.Resampling.NEAREST if tile >= side else Image.Resampling.BILINEAR
        sheet.paste(shown.resize((tile, tile), filter), (x, y))
        lines = [(label, "black"), (f"-> {prediction}", GREY if prediction == label else RED), (rest, GREY)]
        for line, (text, colour) in enumerate(lines):
            draw.text((x, y + tile + 3 + 17 * line), _shortened(text, tile, font), colour, font)
    return sheet


def confusion(title: str, table: Counts, classes: Sequence[str]) -> Image.Image:
    """Of each class (row) the percentage taken for each (column): right ones in blue, wrong ones in red.

    Of more than 50 classes, those that are most often confused, each beside what it is confused with; the percentages are
    still of all images of a class.

    Args:
        table: int [classes, classes], images by class and prediction.
    """
    chosen = most_confused(table, MOST_CONFUSED) if len(classes) > MOST_CONFUSED else list(range(len(classes)))
    count = len(chosen)
    if count < len(classes):
        title += f": the {count} of {len(classes):,} classes most confused with each other"
    part = table[np.ix_(chosen, chosen)] / np.maximum(table[chosen].sum(1, keepdims=True), 1)
    cell = max(22, min(64, 640 // max(1, count)))
    font, digits = ImageFont.load_default(min(14, cell - 7)), ImageFont.load_default(min(14, cell // 2))
    names = [_shortened(classes[number], 180, font) for number in chosen]
    margin = 14 + round(max(map(font.getlength, names), default=0))

    right = np.eye(count, dtype=bool)[..., None]
    shades = np.where(right, part[..., None] ** 0.7 * 0.9, part[..., None] ** 0.5)  # a few percent wrong must show
    colours = np.where(right, [76, 114, 176], [196, 78, 82])
    pixels = (255 + shades * (colours - 255)).round().astype(np.uint8)
    field = Image.fromarray(pixels).resize((count * cell, count * cell), Image.Resampling.NEAREST)

    columns = Image.new("RGB", (margin, count * cell), "white")  # written from left to right, then turned
    left, top = 10 + margin, 64 + margin
    sheet = Image.new("RGB", (max(760, left + count * cell + 20), top + count * cell + 20), "white")
    draw, turned = ImageDraw.Draw(sheet), ImageDraw.Draw(columns)
    for i, name in enumerate(names):
        middle = i * cell + cell // 2
        turned.text((6, middle), name, "black", font, "lm")
        draw.text((left - 6, top + middle), name, "black", font, "rm")
    sheet.paste(columns.rotate(90, expand=True), (left, top - margin))
    sheet.paste(field, (left, top))
    draw.text((16, 12), title, "black", ImageFont.load_default(18))
    draw.text((16, 36), "rows: class, columns: prediction, % of the class's images", GREY, ImageFont.load_default(14))
    for row, column in np.argwhere(part >= 0.005).tolist():
        share = part[row, column]
        colour = "white" if share > (0.5 if row == column else 0.3) else "black"
        centre = (left + column * cell + cell // 2, top + row * cell + cell // 2)
        draw.text(centre, f"{100 * share:.0f}", colour, digits, "mm")
    draw.rectangle((left - 1, top - 1, left + count * cell, top + count * cell), outline=GREY)
    return sheet


def most_confused(table: Counts, most: int) -> list[int]:
    """Up to `most` classes, in pairs from the most often confused one on; a class stands beside its first partner."""
    wrong = np.triu(table + table.T, 1)
    first, second = np.nonzero(wrong)
    order = np.argsort(-wrong[first, second], kind="stable")[: most * most]  # `most` classes have fewer pairs among them
    found: list[int] = []
    for pair in zip(first[order].tolist(), second[order].tolist(), strict=True):
        a, b = sorted(pair, key=lambda number: number not in found)  # the one that is there comes first
        if a not in found:
            found += [a, b]
        elif b not in found:
            found.insert(found.index(a) + 1, b)
        if len(found) >= most:
            break
    return found[:most] or list(range(min(most, len(table))))


def per_class(title: str, images: Counts, hits: Counts, classes: Sequence[str]) -> Image.Image:
    """The accuracy of every class, the worst first: as bars; of many classes a profile, the 20 worst and the 5 best.

    Args:
        images, hits: int [classes].
    """
    known = np.flatnonzero(images)
    accuracy = 100 * hits[known] / images[known]
    order = np.lexsort((known, accuracy))
    rows = [(classes[known[i]], float(accuracy[i]), f"{accuracy[i]:.1f} % of {images[known[i]]:,}") for i in order]
    if len(rows) <= NAMED_WORST + NAMED_BEST:
        return bars(title, rows, most=100, height=26)
    named = bars(f"the {NAMED_WORST} worst and the {NAMED_BEST} best", rows[:NAMED_WORST] + rows[-NAMED_BEST:],
                 marked=[name for name, _, _ in rows[:NAMED_WORST]], most=100, height=26)  # fmt: skip
    left, top, width, height = 60, 52, 800, 180
    sheet = Image.new("RGB", (named.width, top + height + 40 + named.height), "white")
    sheet.paste(named, (0, top + height + 40))
    draw, small = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    draw.text((16, 14), title, "black", ImageFont.load_default(18))
    heights = accuracy[order][np.arange(width) * len(order) // width] * height / 100
    filled = np.arange(height, 0, -1)[:, None] <= heights.round()
    profile = np.where(filled[..., None], [76, 114, 176], 255).astype(np.uint8)
    sheet.paste(Image.fromarray(profile), (left, top))
    for percent in (0, 25, 50, 75, 100):
        y = top + height - height * percent // 100
        draw.line((left, y, left + width, y), "#d0d0d0")
        draw.text((left - 6, y), f"{percent}", "black", small, "rm")
    draw.text((left, top + height + 6), f"{len(rows):,} classes, sorted; median {np.median(accuracy):.1f} %, "
              f"{(accuracy < 50).sum():,} below 50 %", GREY, small)  # fmt: skip
    return sheet


def encoded(image: Image.Image, *, photos: bool = False) -> bytes:
    """A PNG; for more photographs than 64 of CIFAR's a JPEG, a tenth of its size and made in a tenth of the time.

    Of a quality that is enough to look at: TensorBoard takes 50 ms of the interpreter's time for the checksum of 600 kB.
    """
    file = io.BytesIO()
    if photos and image.width * image.height * 3 > 2**18:
        image.save(file, "JPEG", quality=85)
    else:
        image.save(file, "PNG", compress_level=3)
    return file.getvalue()


def _shortened(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """As much of a text as fits into `width` pixels; folders may have names that are no text."""
    text = text.encode(errors="replace").decode()
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
