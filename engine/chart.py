"""Bars with their numbers, drawn with Pillow: a picture needs no plotting library."""

from collections.abc import Collection, Sequence

from PIL import Image, ImageDraw, ImageFont

BLUE, RED = "#4c72b0", "#c44e52"


def bars(title: str, rows: Sequence[tuple[str, float, str]], *, marked: Collection[str] = ()) -> Image.Image:
    """A bar for each (name, value, label); the `marked` names in red. 900 px wide."""
    width, height, left = 900, 44, 180
    image = Image.new("RGB", (width, 60 + height * len(rows) + 20), "white")
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(18), ImageFont.load_default(14)
    draw.text((16, 14), title, "black", font)
    most = max((value for _, value, _ in rows), default=0) or 1
    for i, (name, value, label) in enumerate(rows):
        top = 56 + i * height
        length = max(2, int((width - left - 200) * value / most))
        draw.rectangle((left, top, left + length, top + height - 16), fill=RED if name in marked else BLUE)
        draw.text((16, top + 5), name, "black", small)
        draw.text((left + length + 8, top + 5), label, "black", small)
    return image
