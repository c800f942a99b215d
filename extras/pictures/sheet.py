"""Draw a sheet of images with captions using Pillow, including one of the first batch."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.data.class_names import readable
from pipeline.data.field import IMAGE, Field
from pipeline.feed.batch import Batch, ImageFormat

IMAGE_SIZE = 192  # pixels
WIDTH = IMAGE_SIZE + 8  # from one image to the next
HEIGHT = IMAGE_SIZE + 62  # an image with its caption
MARGIN = 8
COLUMNS = 4
SHOWN_IMAGES = 16  # images drawn from the first batch


def rgb(pixels: np.ndarray) -> np.ndarray:
    """Convert a dataset's image, [..., H, W, C] of any dtype, to uint8 [H, W, 3].

    Uses the first of several frames, and the first channel as gray if the image is not RGB.
    """
    frame = pixels.reshape(-1, *pixels.shape[-3:])[0]
    levels = frame * (255 / Field(pixels.dtype).highest)
    if levels.shape[-1] != 3:
        levels = levels[..., :1].repeat(3, axis=-1)
    return levels.round().clip(0, 255).astype(np.uint8)


def sheet(images: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """Draw images [..., S, S, C] (see `rgb`) in rows of four, with captions of up to 3 lines."""
    rows = math.ceil(len(images) / COLUMNS)
    size = (MARGIN + COLUMNS * WIDTH, MARGIN + rows * HEIGHT)
    drawn = Image.new("RGB", size, "white")
    font = ImageFont.load_default(14)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        tile = Image.new("RGB", (IMAGE_SIZE, HEIGHT), "white")  # clips a long caption
        image = Image.fromarray(rgb(pixels))
        # Use a box filter, which keeps a small image's pixels visible.
        tile.paste(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX))
        text = caption.encode(errors="replace").decode()  # a folder name may not be UTF-8
        draw = ImageDraw.Draw(tile)
        draw.multiline_text((0, IMAGE_SIZE + 3), text, "black", font, spacing=3)
        row, column = divmod(number, COLUMNS)
        drawn.paste(tile, (MARGIN + column * WIDTH, MARGIN + row * HEIGHT))
    return drawn


def draw_batch(batch: Batch, format: ImageFormat, classes: Sequence[str]) -> dict[str, Image.Image]:
    """Draw the first images of a batch without normalization. Synchronizes the device."""
    images = batch[IMAGE][:SHOWN_IMAGES].float()
    levels = (images - format.shift) / format.scale
    pixels = (levels / format.highest).movedim(-3, -1).cpu().numpy()
    captions = [""] * len(pixels)
    for name, column in batch.fields.items():
        if column.ndim == 1:
            for i, value in enumerate(column[:SHOWN_IMAGES].tolist()):
                captions[i] += f"{_text(name, value, classes)}\n"
    return {"train/images": sheet(list(pixels), captions)}


def _text(name: str, value: float, classes: Sequence[str]) -> str:
    """Format a scalar field as its class name if it is a label, or as a number."""
    if name == "label" and isinstance(value, int):
        return readable(classes[value])
    return f"{name} {value:.4g}"
