"""The image of scripts/bench.py sweep=true: a cell per setting, the darker the faster."""

from collections.abc import Sequence
from itertools import product

from PIL import Image, ImageColor, ImageDraw

from conf.schema import show
from engine.log.pictures import LARGE, SMALL, font, sheet
from scripts.lib.sweep import AXES, MEASURES, Cell, best, knee

WIDTH, HEIGHT = 84, 52  # of a cell, pixels
LEFT, TOP = 144, 76  # margins, pixels
PALE, DARK, BEST, KNEE = "#edf3fa", "#103e7a", "#e8590c", "#2f9e44"
INK = "#555555"  # of labels


def heat_map(cells: Sequence[Cell], title: str) -> Image.Image:
    """Draw a panel per measure, decoder and pin_memory: workers across, prefetch_factor down."""
    settings = [cell.setting for cell in cells]
    workers, pins, factors, decoders = (
        [*dict.fromkeys(getattr(s, axis) for s in settings)] for axis in AXES
    )
    panels = list(product(MEASURES, decoders, pins))
    height = HEIGHT * len(factors) + 80
    width = max(LEFT + WIDTH * len(workers) + 24, int(font(LARGE).getlength(title)) + 40)
    image, draw = sheet(width, TOP + height * len(panels), title)
    draw.text((16, 42), "images/s and the fraction of the measure's best", INK, font(SMALL))
    for x, colour, name in ((LEFT + 216, BEST, "best"), (LEFT + 296, KNEE, "knee")):
        draw.rectangle((x, 44, x + 20, 58), outline=colour, width=3)
        draw.text((x + 28, 42), name, INK, font(SMALL))
    for number, (measure, decoder, pin) in enumerate(panels):
        top = TOP + height * number + 28
        caption = f"{MEASURES[measure]}, decoder={decoder}, pin_memory={show(pin)}"
        draw.text((LEFT, top - 28), caption, "black", font(LARGE))
        _draw_labels(draw, top, workers, factors)
        fastest = best(cells, measure)
        fewest = knee(cells) if measure == "train" else None
        peak = fastest.rate(measure) if fastest else 0.0
        for cell in cells:
            if (cell.setting.decoder, cell.setting.pin_memory) == (decoder, pin):
                x = LEFT + WIDTH * workers.index(cell.setting.workers)
                y = top + HEIGHT * factors.index(cell.setting.prefetch_factor)
                _draw_cell(draw, x, y, cell.rate(measure), peak)
                for inset, colour, outlined in ((0, BEST, fastest), (3, KNEE, fewest)):
                    if cell is outlined:
                        right, bottom = x + WIDTH - 3 - inset, y + HEIGHT - 3 - inset
                        box = (x + inset, y + inset, right, bottom)
                        draw.rectangle(box, outline=colour, width=3)
    return image


def _draw_labels(
    draw: ImageDraw.ImageDraw, top: int, workers: Sequence[int], factors: Sequence[int]
) -> None:
    for i, factor in enumerate(factors):
        middle = top + HEIGHT * (i + 0.5)
        draw.text((LEFT - 10, middle), f"prefetch_factor {factor}", INK, font(SMALL), anchor="rm")
    below = top + HEIGHT * len(factors) + 4
    draw.text((LEFT - 10, below), "workers", INK, font(SMALL), anchor="rt")
    for i, count in enumerate(workers):
        middle = LEFT + WIDTH * (i + 0.5)
        draw.text((middle, below), str(count), "black", font(SMALL), anchor="mt")


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, rate: float, peak: float) -> None:
    box = (x, y, x + WIDTH - 3, y + HEIGHT - 3)
    middle = x + WIDTH / 2
    if not rate:
        draw.rectangle(box, fill="#dddddd")
        draw.text((middle, y + HEIGHT / 2), "failed", INK, font(SMALL), anchor="mm")
        return
    share = rate / peak
    draw.rectangle(box, fill=shade(share**2, PALE, DARK))  # squared: near the best, colours differ
    ink = "white" if share > 0.72 else "black"
    draw.text((middle, y + 17), f"{rate:,.0f}", ink, font(LARGE), anchor="mm")
    draw.text((middle, y + 36), f"{share:.2f}", ink, font(SMALL), anchor="mm")


def shade(share: float, light: str, dark: str) -> tuple[int, ...]:
    """Return the colour between `light` (0) and `dark` (1)."""
    ends = zip(ImageColor.getrgb(light), ImageColor.getrgb(dark), strict=True)
    return tuple(round(a + (b - a) * share) for a, b in ends)
