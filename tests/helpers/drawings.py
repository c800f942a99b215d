"""Synthetic images for tests, with textures that a small model can learn."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

# A texture maps coordinates, in periods, to values in [-1, 1].
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "stripes": lambda u, v: np.sin(2 * math.pi * u),
    "checks": lambda u, v: np.sin(2 * math.pi * u) * np.sin(2 * math.pi * v),
    "dots": lambda u, v: 1 - 5 * np.hypot(u % 1 - 0.5, v % 1 - 0.5),
    "waves": lambda u, v: np.sin(2 * math.pi * (v + 0.4 * np.sin(2 * u))),
    "plaid": lambda u, v: np.sin(2 * math.pi * u) + np.sin(2 * math.pi * v),
    "rings": lambda u, v: np.sin(2 * math.pi * np.hypot(u - u.mean(), v - v.mean())),
}


def draw_image(label: str, rng: np.random.Generator) -> Image.Image:
    """Draw an RGB image of 128-320 px with a random angle, scale, colors and noise."""
    width, height = rng.integers(128, 321, 2).tolist()
    x = np.arange(width)[None, :] * np.ones((height, 1))
    y = np.arange(height)[:, None] * np.ones((1, width))
    angle, period = rng.uniform(0, 2 * math.pi), min(width, height) / rng.uniform(4, 9)
    u = (math.cos(angle) * x + math.sin(angle) * y) / period + rng.uniform(0, 32)
    v = (math.cos(angle) * y - math.sin(angle) * x) / period + rng.uniform(0, 32)
    value = np.clip(0.5 + 2 * TEXTURES[label](u, v), 0, 1)[:, :, None]
    dark, bright = rng.uniform(0, 0.4, 3), rng.uniform(0.5, 1, 3)
    pixels = dark + value * (bright - dark) + rng.normal(0, 0.04, (height, width, 3))
    return Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8))
