"""Bytes to pixels. tests/reliability/test_odd_images.py tests every kind of file."""

import io
import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from pipeline.data import decode
from tests.helpers.drawings import draw_image
from tests.reliability.odd_images import KINDS, SIZE, encoded, exif, jpeg

INSTALLED = sorted({"pillow", decode.resolve("auto")})


def opened(data: bytes, decoder: str = "pillow", *, upright: bool = False) -> decode.Picture:
    return decode.open_picture(data, decoder, exif_orientation=upright)


def test_picture_decodes_lazily():
    picture = opened(jpeg()[:1000])  # the header is complete, the rest is not
    assert picture.mirrored().resized((30, 20)).cropped((0, 0, 5, 6)).size == (5, 6)
    with pytest.raises(decode.UnreadableError, match=r"^image file is truncated"):
        picture.pixels()


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("kind", ["jpeg ends in its scan", "jpeg lacks its end marker"])
def test_picture_rejects_truncated_file(decoder, kind):
    with pytest.raises(decode.UnreadableError, match="truncated"):
        opened(KINDS[kind][0](), decoder).cropped((0, 0, 30, 8)).pixels()


# Odd sizes end in the middle of a block.
PHOTO = draw_image("plaid", np.random.default_rng(3)).resize((333, 251), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 have no meaning
def test_open_picture_exif_orientation(orientation):
    """The whole image is rotated as by Pillow; crops are crops of the result."""
    image, options = PHOTO, {"exif": exif(orientation)}
    for data in [
        *(encoded(image.convert(mode), **options) for mode in ("RGB", "L", "CMYK")),
        encoded(image, "MPO", save_all=True, append_images=[image], **options),
        *(encoded(image, kind, **options) for kind in ("PNG", "WEBP")),
        encoded(image, xmp=b'<x tiff:Orientation="%d"/>' % orientation),
        encoded(image, "TIFF", tiffinfo={0x0112: orientation}),  # Pillow always rotates it
    ]:
        with Image.open(io.BytesIO(data)) as file:
            turned = ImageOps.exif_transpose(file).convert("RGB")
        picture = opened(data, decode.resolve("auto"), upright=True)
        assert (picture.size, opened(data).size) == (turned.size, image.size)
        np.testing.assert_array_equal(picture.pixels(), np.asarray(turned))
        for box in [(11, 20, 120, 90), (-5, 200, 50, 260)]:
            cropped = decode.crop(np.asarray(turned), box, 0)
            np.testing.assert_array_equal(picture.cropped(box).pixels(), cropped)


def test_open_picture_damaged_exif():
    assert opened(KINDS["jpeg corrupt EXIF"][0](), upright=True).size == SIZE


@pytest.mark.parametrize("interpolation", decode.INTERPOLATIONS)
@pytest.mark.parametrize("decoder", INSTALLED)
def test_picture_resize_equals_torchvision(decoder, interpolation):
    """Equal to torchvision's crop and resize of uint8 tensors. No pixel outside the box is used."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    data = encoded(PHOTO, quality=95)
    whole = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
    picture = opened(data, decoder)
    mode = InterpolationMode(interpolation)
    boxes = [(0, 0, 333, 251), (100, 100, 140, 150), (3, 3, 300, 9)]
    for box, size in itertools.product(boxes, [(64, 64), (250, 3)]):
        left, top, right, bottom = box
        place = top, left, bottom - top, right - left
        theirs = functional.resized_crop(whole, *place, [*size[::-1]], mode, antialias=True)
        ours = picture.resized(size, box, interpolation=interpolation).pixels()
        np.testing.assert_array_equal(ours, theirs.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize(
    ("size", "box", "scale"),
    [((1333, 1001), (100, 51, 1300, 990), 4), ((2001, 1999), (3, 5, 1990, 1980), 8)],
)
def test_picture_quick_resize_is_close(decoder, size, box, scale):
    """A reduced decode averages blocks before the resize, so it is softer, but not shifted."""
    image = draw_image("waves", np.random.default_rng(3)).resize(size, Image.Resampling.BICUBIC)
    assert decode.reduction(box, (224, 224)) == scale
    shifted = tuple(v + 2 * scale for v in box[:2]) + box[2:]
    picture, whole = opened(encoded(image, quality=95), decoder), decode.Picture(np.asarray(image))
    quick = picture.resized((224, 224), box, quick=True).pixels().astype(float)
    exact, moved = (whole.resized((224, 224), place).pixels() for place in (box, shifted))
    assert abs(quick - exact).mean() < min(2.5, abs(quick - moved).mean())


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("kind", ["jpeg", "jpeg gray", "png"])
def test_open_picture_checks_number_of_pixels(decoder, kind, monkeypatch):
    assert decode.MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    data = KINDS[kind][0]()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    monkeypatch.setattr(decode, "MAX_PIXELS", 6000)
    with pytest.raises(decode.UnreadableError, match=r"6300 pixels\) exceeds limit of 6000"):
        decode.open_picture(data, decoder)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_picture_keeps_dtype_and_channels(dtype, channels):
    """Mirroring, crops and resizes equal numpy's, for any number of channels."""
    two = {np.uint8: (60, 190), np.float32: (-1, 3)}[dtype]
    levels = np.random.default_rng(1).choice(two, (40, 50, channels)).astype(dtype)
    found = decode.Picture(levels).mirrored().cropped((-2, 5, 40, 45)).pixels()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.pad(levels[5:, ::-1], ((0, 5), (2, 0), (0, 0)))[:, :42])
    for interpolation in decode.INTERPOLATIONS:
        small = decode.Picture(levels).resized((70, 33), interpolation=interpolation).pixels()
        exact = decode.resize(levels.astype(np.float32), (70, 33), interpolation)
        assert (small.dtype, small.shape) == (dtype, (33, 70, channels))
        assert abs(small.astype(float) - exact).max() <= {np.uint8: 2, np.float32: 0}[dtype]
