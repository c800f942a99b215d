"""Bytes to pixels: the same as Pillow's own conversion for every kind of file that a dataset may hold."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import decode
from pipeline.demo import draw_image


def drawn(mode: str = "RGB") -> Image.Image:
    return draw_image("plaid", np.random.default_rng(0)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated_by_exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a viewer turns it by 90 degrees
    return encoded(drawn(), exif=exif)


def with_alpha() -> Image.Image:
    image = drawn("RGBA")
    alpha = Image.linear_gradient("L").resize(image.size)
    image.putalpha(alpha)
    return image


def wide_grey(dtype: str) -> Image.Image:
    values = np.linspace(0, 65535, 90 * 60).astype(dtype).reshape(60, 90)
    return Image.fromarray(values)


def animated() -> bytes:
    return encoded(drawn("P"), "GIF", save_all=True, append_images=[drawn("L").convert("P")])


FORMATS: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: encoded(drawn()),
    "JPEG 4:4:4": lambda: encoded(drawn(), subsampling=0),
    "JPEG progressive": lambda: encoded(drawn(), progressive=True),
    "JPEG grey": lambda: encoded(drawn("L")),
    "JPEG CMYK": lambda: encoded(drawn("CMYK")),
    "JPEG with EXIF orientation": rotated_by_exif,
    "JPEG with a comment and a tail": lambda: encoded(drawn(), comment=b"x" * 1000) + b"tail",
    "PNG": lambda: encoded(drawn(), "PNG"),
    "PNG grey": lambda: encoded(drawn("L"), "PNG"),
    "PNG bilevel": lambda: encoded(drawn("1"), "PNG"),
    "PNG palette": lambda: encoded(drawn("P"), "PNG"),
    "PNG palette, one transparent": lambda: encoded(drawn("P"), "PNG", transparency=3),
    "PNG palette, alpha": lambda: encoded(drawn("P"), "PNG", transparency=bytes(range(256))),
    "PNG alpha": lambda: encoded(with_alpha(), "PNG"),
    "PNG grey alpha": lambda: encoded(with_alpha().convert("LA"), "PNG"),
    "PNG RGB, one transparent": lambda: encoded(drawn(), "PNG", transparency=(1, 2, 3)),
    "GIF": animated,
    "WebP": lambda: encoded(drawn(), "WEBP"),
    "WebP alpha": lambda: encoded(with_alpha(), "WEBP", lossless=True),
    "BMP": lambda: encoded(drawn(), "BMP"),
    "PPM": lambda: encoded(drawn(), "PPM"),
    "TIFF": lambda: encoded(drawn(), "TIFF", compression="tiff_lzw"),
    "TIFF CMYK": lambda: encoded(drawn("CMYK"), "TIFF"),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", FORMATS)
def test_pixels_are_those_of_pillow(name: str) -> None:
    data = FORMATS[name]()
    picture = decode.open_pillow(data)
    with Image.open(io.BytesIO(data)) as image:
        assert picture.size == image.size
        expected = np.asarray(image.convert("RGB"))
    pixels = picture.pixels()
    assert (pixels.dtype, pixels.shape) == (np.uint8, (*expected.shape[:2], 3))
    assert np.ptp(pixels) > 100
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(("kind", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
def test_16_bit_grey_keeps_its_upper_byte(kind: str, dtype: str) -> None:
    """Pillow's own conversion clips it: nearly everything becomes white."""
    image = wide_grey(dtype)
    pixels = decode.open_pillow(encoded(image, kind)).pixels()
    expected = np.asarray(image) // 256
    np.testing.assert_array_equal(pixels, np.stack([expected] * 3, axis=-1))


def test_exif_orientation_is_not_applied() -> None:
    """The published models have been trained on images as they are stored."""
    picture = decode.open_pillow(rotated_by_exif())
    assert picture.size == drawn().size
    np.testing.assert_array_equal(picture.pixels(), decode.open_pillow(encoded(drawn())).pixels())


def test_nothing_is_decoded_before_pixels_are_needed() -> None:
    data = encoded(drawn())
    picture = decode.open_pillow(data[:1000])  # the header is there, the rest is not
    assert picture.size == drawn().size
    with pytest.raises(OSError, match="truncated"):
        picture.pixels()


def test_resized_region() -> None:
    picture = decode.open_pillow(encoded(drawn()))
    whole = drawn().size
    np.testing.assert_array_equal(picture.resized(whole).pixels(), picture.pixels())
    np.testing.assert_array_equal(
        picture.resized((50, 40), box=(10, 20, 90, 110)).pixels(),
        np.asarray(picture.pillow().resize((50, 40), Image.Resampling.BILINEAR, box=(10, 20, 90, 110))),
    )
    assert picture.resized((1, 3)).size == (1, 3)


def test_crop_and_mirror() -> None:
    picture = decode.open_pillow(encoded(drawn()))
    pixels = picture.pixels()
    np.testing.assert_array_equal(picture.cropped((5, 7, 50, 60)).pixels(), pixels[7:60, 5:50])
    np.testing.assert_array_equal(picture.mirrored().pixels(), pixels[:, ::-1])
    beyond = picture.cropped((-4, -3, 10, 10)).pixels()
    np.testing.assert_array_equal(beyond[3:, 4:], pixels[:10, :10])
    assert not beyond[:3].any()
    assert not beyond[:, :4].any()


def test_auto_stands_for_a_decoder_that_exists() -> None:
    assert decode.resolve("auto") in decode.DECODERS
    for name in decode.DECODERS:
        assert decode.resolve(name) == name
