"""A sheet of images with captions, drawn with Pillow, and that of the first batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from engine.metrics import format_value
from pipeline.batch import IMAGE, Batch, Field, ImageFormat
from pipeline.class_names import readable

SIDE = 192  # side of an image in pixels
HEIGHT = SIDE + 62  # an image with its caption
SHOWN_IMAGES = 16  # images of the first batch that are drawn


def rgb(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return an image of a dataset, [..., H, W, C] of any dtype, as uint8 [H, W, 3].

    Uses the first of several frames; shows the first channel as grey if the image is not RGB.
    """
    pixels = pixels.reshape(-1, *pixels.shape[-3:])[0] * (255 / Field(pixels.dtype).highest)
    if pixels.shape[-1] != 3:
        pixels = pixels[..., :1].repeat(3, axis=-1)
    return pixels.round().clip(0, 255).astype(np.uint8)


def sheet(images: Sequence[npt.NDArray[Any]], captions: Sequence[str]) -> Image.Image:
    """Draw images [..., S, S, C] (see `rgb`) in rows of four, each above up to three lines."""
    drawn = Image.new("RGB", (808, 8 + HEIGHT * -(-len(images) // 4)), "white")
    font = ImageFont.load_default(14)
    for i, (pixels, caption) in enumerate(zip(map(rgb, images), captions, strict=True)):
        tile = Image.new("RGB", (SIDE, HEIGHT), "white")  # clips a long caption
        # A box filter leaves the pixels of a small image visible.
        tile.paste(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BOX))
        text = caption.encode(errors="replace").decode()  # a folder name may not be UTF-8
        ImageDraw.Draw(tile).multiline_text((0, SIDE + 3), text, "black", font, spacing=3)
        drawn.paste(tile, (8 + i % 4 * (SIDE + 8), 8 + i // 4 * HEIGHT))
    return drawn


def draw_batch(batch: Batch, format: ImageFormat, classes: Sequence[str]) -> dict[str, Image.Image]:
    """Draw the first images of a batch, without normalisation; waits for the device."""
    levels = batch[IMAGE][:SHOWN_IMAGES].float().sub(format.shift).div(format.scale)
    images = list((levels / format.highest).movedim(-3, -1).cpu().numpy())
    captions = [""] * len(images)
    for name, column in batch.fields.items():
        for i, value in enumerate(column[: len(images)].tolist() if column.ndim == 1 else ()):
            known = name == "label" and isinstance(value, int)
            captions[i] += f"{readable(classes[value]) if known else format_value(name, value)}\n"
    return {"train/images": sheet(images, captions)}
